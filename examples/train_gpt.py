"""Train a byte-level GPT with Muon while its optimizer state stays on disk.

The text is the source of Python's standard library, so there is nothing to download. Stop the
program at any moment, also with kill -9, and start it again with ``--resume``: it continues from
the last committed step and ends with the same parameters, bit for bit. ``train()`` uses the
library; the rest is an ordinary PyTorch program.
"""

from __future__ import annotations

import time
from itertools import islice
from pathlib import Path
from typing import Annotated

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
    data = {"position": 0}
    store.register(scheduler=scheduler, data=data, random=tierstore.RandomState())
    first_step = optimizer.restore() if resume else 0
    if first_step > 0:
        print(f"resumed after step {first_step}")
    count = (len(train_text) - 1) // options.context
    order = shuffled_windows(count, options.seed, data["position"])
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters, {len(train_text):,} bytes")

    status = TextColumn("{task.fields[now]}")
    columns = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), status)
    with Progress(*columns, disable=not rich.get_console().is_terminal) as progress:
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
            store.commit()
            seconds = time.perf_counter() - started
            tokens = (step - first_step) * options.batch * options.context
            stats = store.stats()
            now = (
                f"loss {loss.item():.3f}  {tokens / seconds:,.0f} tokens/s  "
                f"disk {decimal(stats.bytes_read)} read {decimal(stats.bytes_written)} written  "
                f"host {decimal(stats.host_bytes_peak)}"
            )
            progress.update(task, advance=1, now=now)
            if step % max(1, options.steps // 20) == 0:
                print(f"step {step}  {now}", flush=True)
            if step % max(1, options.steps // 4) == 0 and step < options.steps:
                loss_now = validation_loss(model, validation_text, options)
                print(f"step {step}  validation loss {loss_now:.4f}", flush=True)
    store.synchronize()
    final = validation_loss(model, validation_text, options)
    print(f"validation loss {final:.4f} nats per byte after step {store.committed.step}")
    print(f"parameters sha256 {parameter_digest(model.named_parameters())}")


def main(
    directory: Annotated[Path, typer.Option(help="Where the pages live.")] = Path("runs/train-gpt"),
    resume: Annotated[bool, typer.Option("--resume", help="Resume from the last commit.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Discard an old run.")] = False,
    steps: Annotated[int, typer.Option(min=1)] = 260,
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
    except (tierstore.RunDirectoryError, tierstore.BudgetError) as error:
        typer.echo(str(error), err=True)
        if type(error) is tierstore.RunDirectoryError:  # Not locked, and not another model.
            typer.echo("Use --resume to go on with a run, --overwrite to discard it.", err=True)
        raise typer.Exit(2) from error


if __name__ == "__main__":
    typer.run(main)
