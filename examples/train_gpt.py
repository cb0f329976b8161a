"""Train a byte-level GPT with Muon while its optimizer state stays on disk.

The text is the source of Python's standard library, so there is nothing to download. Stop the
program at any moment with Ctrl-C or kill -9, then start it again with ``--resume``. It continues
from the last committed step and ends with the same parameters, bit for bit. ``train()`` uses the
library; the rest is an ordinary PyTorch program.
"""

from __future__ import annotations

import shlex
import statistics
import sys
import time
from itertools import islice, pairwise
from pathlib import Path
from typing import Annotated, Any

import rich
import torch
import typer
from gpt import (
    ADAMW_LR,
    GPT,
    HEAD_DIM,
    MUON_LR,
    Options,
    learning_rate_factor,
    parameter_digest,
    training_device,
    validation_loss,
)
from rich.filesize import decimal
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from text import shuffled_windows, standard_library_text, windows

import muon
import tierstore

DROPOUT = 0.05


def train(store: tierstore.TierStore, options: Options, *, resume: bool) -> None:
    """Train from the start, or from the last committed step of ``store``."""
    device = training_device()
    train_text, validation_text = (text.to(device) for text in standard_library_text())
    torch.manual_seed(options.seed)
    model = GPT(options).to(device)
    groups = muon.param_groups(model, lr=MUON_LR, adamw_lr=ADAMW_LR)
    optimizer = muon.Muon(groups, store=store, ns_dtype=model.dtype)
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: learning_rate_factor(step, options.steps)
    )
    data: dict[str, Any] = {"position": 0, "losses": []}
    store.register(scheduler=scheduler, data=data, random=tierstore.RandomState())
    first_step = optimizer.restore() if resume else 0
    if first_step > 0:
        print(f"resumed after step {first_step}")
    count = (len(train_text) - 1) // options.context
    order = shuffled_windows(count, options.seed, data["position"])
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters, {len(train_text):,} bytes")

    is_terminal = rich.get_console().is_terminal
    now, left = TextColumn("{task.fields[now]}"), TextColumn("left")
    columns = (BarColumn(24), MofNCompleteColumn(), now, TimeRemainingColumn(), left)
    with Progress(*columns, disable=not is_terminal) as progress:
        task = progress.add_task("", total=options.steps, completed=first_step, now="")
        started = time.perf_counter()
        for step in range(first_step + 1, options.steps + 1):
            batch = windows(train_text, list(islice(order, options.batch)), options.context)
            loss = model(*batch)
            loss.backward()
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            data["position"] += options.batch
            data["losses"].append(loss.item())
            store.commit()
            tokens = (step - first_step) * options.batch * options.context
            rate = tokens / (time.perf_counter() - started)
            status = f"loss {loss.item():.3f}  {rate:,.0f} tokens/s"
            progress.update(task, advance=1, now=status)
            if not is_terminal and step % max(1, options.steps // 20) == 0:
                print(f"step {step}  {status}", flush=True)
            if step % max(1, options.steps // 4) == 0 and step < options.steps:
                loss_now = validation_loss(model, validation_text, options)
                print(f"step {step}  validation loss {loss_now:.4f}", flush=True)
    store.synchronize()
    print(plot(data["losses"]))
    stats = store.stats()
    print(f"disk: {decimal(stats.bytes_read)} read, {decimal(stats.bytes_written)} written")
    print(f"host memory of the store: {decimal(stats.host_bytes_peak)} at most")
    final = validation_loss(model, validation_text, options)
    print(f"validation loss {final:.4f} nats per byte after step {store.committed.step}")
    print(f"parameters sha256 {parameter_digest(model.named_parameters())}")


def plot(losses: list[float], columns: int = 64, rows: int = 10) -> str:
    """Return the training loss as text: each column is the mean of a few steps."""
    columns = min(columns, len(losses))
    edges = [column * len(losses) // columns for column in range(columns + 1)]
    means = [statistics.fmean(losses[start:end]) for start, end in pairwise(edges)]
    height = (max(means) - min(means)) / (rows - 1) or 1.0
    lines = ["training loss, nats per byte"]
    for row in range(rows):
        marks = ("*" if round((max(means) - mean) / height) == row else " " for mean in means)
        lines.append(f"{max(means) - row * height:6.2f} |{''.join(marks)}".rstrip())
    return "\n".join([*lines, f"       +{'-' * columns}", f"  step  1{len(losses):{columns - 1}}"])


def command(*options: str) -> str:
    """Return the command line of this program with other options for an existing run."""
    kept = [word for word in sys.argv if word not in ("--resume", "--overwrite")]
    return shlex.join([sys.orig_argv[0], *kept, *options])


def main(
    directory: Annotated[Path, typer.Option(help="Where the pages live.")] = Path("runs/train-gpt"),
    resume: Annotated[bool, typer.Option("--resume", help="Resume from the last commit.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Discard an old run.")] = False,
    steps: Annotated[int, typer.Option(min=1)] = 180,
    layers: Annotated[int, typer.Option(min=1)] = 4,
    width: Annotated[int, typer.Option(min=HEAD_DIM, help=f"A multiple of {HEAD_DIM}.")] = 256,
    batch: Annotated[int, typer.Option(min=1, help="Windows in a step.")] = 8,
    context: Annotated[int, typer.Option(min=1, help="Bytes in a window.")] = 256,
    seed: Annotated[int, typer.Option(help="Seed of initial weights, order and dropout.")] = 0,
    threads: Annotated[int, typer.Option(min=1, help="Changes the last bits of results.")] = 2,
) -> None:
    """Train a byte-level GPT on Python's standard library with its optimizer state on disk."""
    if width % HEAD_DIM:
        raise typer.BadParameter(
            f"must be a multiple of {HEAD_DIM}, got {width}", param_hint="--width"
        )
    if resume and overwrite:
        raise typer.BadParameter("give --resume or --overwrite, not both")
    torch.set_num_threads(threads)
    options = Options(
        steps=steps,
        layers=layers,
        width=width,
        batch=batch,
        context=context,
        seed=seed,
        dropout=DROPOUT,
    )
    try:
        with tierstore.TierStore(
            directory, host_memory="16MiB", page_bytes="4MiB", resume=resume, overwrite=overwrite
        ) as store:
            train(store, options, resume=resume)
    except KeyboardInterrupt:
        typer.echo(f"Stopped. To resume: {command('--resume')}", err=True)
        raise typer.Exit(130) from None
    except (tierstore.RunDirectoryError, tierstore.BudgetError) as error:
        typer.echo(str(error), err=True)
        if type(error) is tierstore.RunDirectoryError:  # Not locked, and not another model.
            typer.echo(f"To resume the run: {command('--resume')}", err=True)
            typer.echo(f"To discard the run: {command('--overwrite')}", err=True)
        raise typer.Exit(2) from error
    inspect = [str(Path(sys.orig_argv[0]).with_name("tierstore")), "inspect", str(directory)]
    print("Try next:")
    print(f"  {shlex.join(inspect)}  # Shows the committed step and its files.")
    print(f"  {command('--overwrite')}  # Press Ctrl-C, then resume with --resume.")


if __name__ == "__main__":
    typer.run(main)
