"""Train a byte-level GPT with Muon while its optimizer state stays on disk.

The text is the source of Python's own standard library, so there is nothing to download.
Stop the program at any moment, kill -9 included, and start it again with ``--resume``: it
goes on from the last committed step and ends with the same parameters, bit for bit. The
lines that use the library are in ``train()``; the rest is an ordinary PyTorch program.
"""

from __future__ import annotations

import hashlib
import math
import time
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Annotated

import rich
import torch
import typer
from rich.filesize import decimal
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from text import shuffled_windows, standard_library_text, windows
from torch import Tensor, nn
from torch.nn import functional

import muon
import tierstore

BYTE_VALUES = 256
HEAD_DIM = 64
DROPOUT = 0.05
MUON_LR = 0.02
ADAMW_LR = 3e-4
VALIDATION_WINDOWS = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What a run is made of; a resumed run needs the same values to end in the same bits."""

    steps: int
    layers: int
    width: int
    batch: int
    context: int
    seed: int


def rotary_angles(context: int) -> Tensor:
    """Return cos and sin of the rotary angles, fp32 (2, context, HEAD_DIM / 2)."""
    frequencies = 10_000.0 ** (-torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    angles = torch.outer(torch.arange(context).float(), frequencies)
    return torch.stack((angles.cos(), angles.sin()))


def rotate(x: Tensor, rotary: Tensor) -> Tensor:
    """Turn pairs of features of (batch, heads, context, HEAD_DIM) by their positions' angles."""
    cos, sin = rotary.to(x.dtype)
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


class Block(nn.Module):
    """Causal attention, then an MLP, each behind a norm and added to the stream."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width, bias=False)
        self.query = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(width, width, bias=False)
        self.value = nn.Linear(width, width, bias=False)
        self.attention_out = nn.Linear(width, width, bias=False)
        self.mlp_norm = nn.LayerNorm(width, bias=False)
        self.mlp_in = nn.Linear(width, 4 * width, bias=False)
        self.mlp_out = nn.Linear(4 * width, width, bias=False)
        self.dropout = nn.Dropout(DROPOUT)
        # Zero output projections: each block starts as the identity.
        nn.init.zeros_(self.attention_out.weight)
        nn.init.zeros_(self.mlp_out.weight)

    def forward(self, x: Tensor, rotary: Tensor) -> Tensor:
        """Return the stream after this block, (batch, context, width)."""
        normed = self.attention_norm(x)
        query, key, value = (
            projection(normed).unflatten(-1, (-1, HEAD_DIM)).transpose(1, 2)
            for projection in (self.query, self.key, self.value)
        )  # (batch, heads, context, HEAD_DIM) each
        mixed = functional.scaled_dot_product_attention(
            rotate(query, rotary), rotate(key, rotary), value, is_causal=True
        )
        x = x + self.dropout(self.attention_out(mixed.transpose(1, 2).flatten(2)))
        x = x + self.dropout(self.mlp_out(functional.gelu(self.mlp_in(self.mlp_norm(x)))))
        return x


class GPT(nn.Module):
    """A decoder-only transformer over bytes."""

    rotary: Tensor

    def __init__(self, options: Options) -> None:
        super().__init__()
        self.embedding = nn.Embedding(BYTE_VALUES, options.width)
        self.blocks = nn.ModuleList(Block(options.width) for _ in range(options.layers))
        self.norm = nn.LayerNorm(options.width, bias=False)
        self.lm_head = nn.Linear(options.width, BYTE_VALUES, bias=False)
        self.register_buffer("rotary", rotary_angles(options.context), persistent=False)
        # A fact of the processor, not a timing, so that a resumed run decides alike.
        features = torch.cpu.get_capabilities()
        self.bf16 = bool(features.get("avx512_bf16") or features.get("amx_bf16"))

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Return the mean loss in nats per byte, a fp32 scalar; (batch, context) each."""
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=self.bf16):
            x = self.embedding(inputs)
            for block in self.blocks:
                x = block(x, self.rotary)
            logits = self.lm_head(self.norm(x))  # (batch, context, BYTE_VALUES)
            return functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


@torch.no_grad()
def validation_loss(model: GPT, text: Tensor, options: Options) -> float:
    """Return the mean loss in nats per byte over windows spread evenly over the text."""
    count = (len(text) - 1) // options.context
    chosen = list(range(0, count, max(1, count // VALIDATION_WINDOWS)))[:VALIDATION_WINDOWS]
    model.eval()
    total = 0.0
    for start in range(0, len(chosen), options.batch):
        indices = chosen[start : start + options.batch]
        total += model(*windows(text, indices, options.context)).item() * len(indices)
    model.train()
    return total / len(chosen)


def learning_rate_factor(step: int, steps: int) -> float:
    """Return what the learning rates are multiplied by: linear warm-up, then a cosine to 0."""
    warmup_steps = max(1, steps // 20)
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    return 0.5 * (1 + math.cos(math.pi * (step - warmup_steps) / max(1, steps - warmup_steps)))


def parameter_digest(model: GPT) -> str:
    """Return the SHA-256 of all parameters, to compare two runs by eye."""
    digest = hashlib.sha256()
    for name, parameter in model.named_parameters():
        digest.update(name.encode() + parameter.detach().numpy().tobytes())
    return digest.hexdigest()


def train(store: tierstore.TierStore, options: Options, *, resume: bool) -> None:
    """Train from the start, or from the last committed step of ``store``."""
    train_text, validation_text = standard_library_text()
    torch.manual_seed(options.seed)
    model = GPT(options)
    optimizer = muon.Muon(muon.param_groups(model, lr=MUON_LR, adamw_lr=ADAMW_LR), store=store)
    # Before restore(): a new scheduler sets learning rates, and restore() puts back the real ones.
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: learning_rate_factor(step, options.steps)
    )
    position = 0
    first_step = optimizer.restore() if resume else 0
    if first_step > 0:
        scheduler.load_state_dict(store.extra["scheduler"])
        torch.set_rng_state(store.extra["rng"])
        position = store.extra["position"]
        print(f"resumed after step {first_step}")
    order = shuffled_windows((len(train_text) - 1) // options.context, options.seed, position)
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
            position += options.batch
            store.commit(
                extra={
                    "scheduler": scheduler.state_dict(),
                    "rng": torch.get_rng_state(),
                    "position": position,
                }
            )
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
    print(f"validation loss {final:.4f} nats per byte after step {store.committed_step}")
    print(f"parameters sha256 {parameter_digest(model)}")


def main(
    directory: Annotated[Path, typer.Option(help="Where the pages live.")] = Path("runs/train-gpt"),
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the last commit.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Discard an old run.")] = False,
    steps: Annotated[int, typer.Option(min=1)] = 400,
    layers: Annotated[int, typer.Option(min=1)] = 6,
    width: Annotated[int, typer.Option(min=HEAD_DIM, help=f"A multiple of {HEAD_DIM}.")] = 384,
    batch: Annotated[int, typer.Option(min=1, help="Windows in a step.")] = 8,
    context: Annotated[int, typer.Option(min=1, help="Bytes in a window.")] = 256,
    seed: Annotated[int, typer.Option(help="Decides initial weights, order and dropout.")] = 0,
    threads: Annotated[int, typer.Option(min=1, help="Another number, other last bits.")] = 2,
) -> None:
    """Train a byte-level GPT on Python's standard library, its optimizer state on disk."""
    if width % HEAD_DIM:
        raise typer.BadParameter(
            f"must be a multiple of {HEAD_DIM}, got {width}", param_hint="--width"
        )
    if resume and overwrite:
        raise typer.BadParameter("give --resume or --overwrite, not both")
    torch.set_num_threads(threads)
    options = Options(
        steps=steps, layers=layers, width=width, batch=batch, context=context, seed=seed
    )
    try:
        with tierstore.TierStore(
            directory, host_memory="64MiB", page_bytes="16MiB", resume=resume, overwrite=overwrite
        ) as store:
            train(store, options, resume=resume)
    except (tierstore.RunDirectoryError, tierstore.BudgetError) as error:
        typer.echo(str(error), err=True)
        if type(error) is tierstore.RunDirectoryError:  # Not locked, and not another model.
            typer.echo("Use --resume to go on with a run, --overwrite to discard it.", err=True)
        raise typer.Exit(2) from error


if __name__ == "__main__":
    typer.run(main)
