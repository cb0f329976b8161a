"""Training of a byte-level GPT on several ranks with data parallelism.

``train_ddp.py`` and ``train_fsdp2.py`` define how ranks share the model; ``train()`` uses the
library. A batch has the same windows of the text on any number of ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Annotated

import torch
import torch.distributed as dist
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
from text import shuffled_windows, standard_library_text, windows
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import muon
import tierstore

Share = Callable[[GPT], nn.Module]


def mean_of_ranks(value: Tensor | float, device: torch.device) -> float:
    """Return the mean of a value over ranks, whose tensors are on ``device``."""
    mean = torch.as_tensor(value, dtype=torch.float64, device=device) / dist.get_world_size()
    dist.all_reduce(mean)
    return mean.item()


def whole(parameter: Tensor) -> Tensor:
    """Return the whole parameter; all ranks call this."""
    return parameter.full_tensor() if isinstance(parameter, DTensor) else parameter


def say(text: str) -> None:
    """Print a text on rank 0."""
    if dist.get_rank() == 0:
        print(text, flush=True)


def train(
    store: tierstore.TierStore,
    share: Share,
    options: Options,
    checkpoints: Path,
    checkpoint_every: int,
    from_checkpoint: Path | None,
) -> None:
    """Train from the start, from the last committed step of ``store``, or from a checkpoint."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    device = training_device()
    train_text, validation_text = (text.to(device) for text in standard_library_text())
    torch.manual_seed(options.seed)  # All ranks start from the same parameters.
    model = GPT(options).to(device)
    shared_model = share(model)
    groups = muon.param_groups(model, lr=MUON_LR, adamw_lr=ADAMW_LR)
    optimizer = muon.Muon(groups, store=store, ns_dtype=model.dtype)
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: learning_rate_factor(step, options.steps)
    )
    store.register(scheduler=scheduler)
    first_step = optimizer.restore(from_checkpoint)
    if first_step > 0:
        say(f"resumed after step {first_step}")
    order = shuffled_windows(
        (len(train_text) - 1) // options.context, options.seed, first_step * options.batch
    )
    say(f"{sum(p.numel() for p in model.parameters()):,} parameters on {world_size} ranks")

    for step in range(first_step + 1, options.steps + 1):
        indices = list(islice(order, options.batch))[rank::world_size]
        loss = shared_model(*windows(train_text, indices, options.context))
        loss.backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        store.commit()
        if checkpoint_every and (step % checkpoint_every == 0 or step == options.steps):
            store.checkpoint(checkpoints / f"step-{step}", model=model, keep_last=2)
        if step % max(1, options.steps // 20) == 0:
            say(f"step {step}  loss {mean_of_ranks(loss.detach(), device):.3f}")
    store.synchronize()
    digest = parameter_digest((name, whole(p)) for name, p in model.named_parameters())
    own = validation_loss(shared_model, validation_text, options, rank, world_size)
    final = mean_of_ranks(own, device)
    say(f"validation loss {final:.4f} nats per byte after step {store.committed.step}")
    say(f"parameters sha256 {digest}")


def run(share: Share, directory: Path) -> None:
    """Run the training program.

    Args:
        share: prepares a model for its ranks in place, and returns the module to call.
        directory: default directory of the pages.
    """
    default = directory

    def main(
        directory: Annotated[Path, typer.Option(help="Where the pages live.")] = default,
        checkpoints: Annotated[
            Path | None, typer.Option(help="Where to publish. [default: beside the pages]")
        ] = None,
        checkpoint_every: Annotated[
            int, typer.Option(min=0, help="In steps, and at the end; 0: never.")
        ] = 100,
        resume: Annotated[
            bool,
            typer.Option("--resume", help="Resume from the last commit, on any number of ranks."),
        ] = False,
        from_checkpoint: Annotated[
            Path | None,
            typer.Option(help="Begin in a new directory with this, on any number of ranks."),
        ] = None,
        steps: Annotated[int, typer.Option(min=1)] = 200,
        layers: Annotated[int, typer.Option(min=1)] = 4,
        width: Annotated[int, typer.Option(help=f"A multiple of {HEAD_DIM}.")] = 192,
        batch: Annotated[int, typer.Option(help="Windows in a step, on all ranks.")] = 16,
        context: Annotated[int, typer.Option(min=1, help="Bytes in a window.")] = 128,
        seed: Annotated[int, typer.Option(help="Decides initial weights and order.")] = 0,
    ) -> None:
        dist.init_process_group()  # NCCL for tensors on GPUs, gloo for those on the CPU.
        try:
            if batch < 1 or batch % dist.get_world_size():
                raise typer.BadParameter(
                    f"must be a multiple of the {dist.get_world_size()} ranks, got {batch}",
                    param_hint="--batch",
                )
            options = Options(
                steps=steps,
                layers=layers,
                width=width,
                batch=batch,
                context=context,
                seed=seed,
                dropout=0.0,  # Dropout would depend on the number of ranks.
            )
            with tierstore.TierStore(
                directory,
                host_memory="16MiB",
                page_bytes="1MiB",
                resume=resume,
            ) as store:
                published = checkpoints or directory.with_name(f"{directory.name}-checkpoints")
                train(store, share, options, published, checkpoint_every, from_checkpoint)
        finally:
            dist.destroy_process_group()

    typer.run(main)
