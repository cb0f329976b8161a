"""Train a small GPT in a loop of accelerate while its optimizer state stays on disk.

The text is the source of Python's standard library: nothing is downloaded. Stop the program at any
moment, also with kill -9, and start it again: it continues from the last committed step and ends
with the same parameters, bit for bit::

    pip install accelerate
    python examples/accelerate_loop.py runs/accelerate
    torchrun --nproc-per-node 2 examples/accelerate_loop.py runs/accelerate-2
"""

from __future__ import annotations

from typing import Annotated

import torch
import typer
from accelerate import Accelerator
from accelerate.utils import set_seed
from gpt import ADAMW_LR, GPT, MUON_LR, Options, learning_rate_factor, parameter_digest
from gpt import validation_loss as validate
from text import standard_library_text, windows
from torch.utils.data import DataLoader, TensorDataset

import muon
import tierstore
from tierstore.integrations.accelerate import prepare

CONTEXT = 128
ACCUMULATED = 2  # Batches of a step.


def main(
    directory: Annotated[str, typer.Argument(help="Where pages and checkpoints live.")],
    steps: Annotated[int, typer.Option(min=1)] = 100,
    width: Annotated[int, typer.Option(min=64, help="A multiple of 64.")] = 128,
    batch: Annotated[int, typer.Option(min=1, help="Windows of a rank in a batch.")] = 8,
) -> None:
    """Train, or continue from the last commit."""
    torch.set_num_threads(1)
    set_seed(0)
    options = Options(
        steps=steps, layers=2, width=width, batch=batch, context=CONTEXT, seed=0, dropout=0.1
    )
    model = GPT(options)
    train_text, validation_text = standard_library_text()
    # Two epochs for one process, four for two.
    data = TensorDataset(*windows(train_text, list(range(steps * batch)), CONTEXT))
    loader = DataLoader(data, batch_size=batch, shuffle=True)

    accelerator = Accelerator(
        cpu=not torch.cuda.is_available(),
        gradient_accumulation_steps=ACCUMULATED,
        step_scheduler_with_optimizer=False,  # Else it steps once for each process.
    )
    with tierstore.TierStore(
        f"{directory}/run", host_memory="32MiB", page_bytes="4MiB", resume=True
    ) as store:
        groups = muon.param_groups(model, lr=MUON_LR, adamw_lr=ADAMW_LR)
        optimizer = muon.Muon(groups, store=store, ns_dtype=torch.float32)
        scheduler = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: learning_rate_factor(step, steps)
        )
        model, optimizer, batches, scheduler, step = prepare(
            accelerator, model, optimizer, loader, scheduler
        )
        accelerator.print(f"starts after step {step}", flush=True)
        while store.step < steps:
            for inputs, targets in batches:
                with accelerator.accumulate(model):
                    loss = model(inputs, targets)
                    accelerator.backward(loss)
                    optimizer.step()
                    if accelerator.sync_gradients:
                        scheduler.step()
                        accelerator.print(f"step {store.step} loss {loss:.3f}", flush=True)
                    optimizer.zero_grad()
                if store.step == steps:
                    break
            validation_loss = validate(accelerator.unwrap_model(model), validation_text, options)
            accelerator.print(f"epoch {batches.epoch} validation {validation_loss:.3f}", flush=True)
        accelerator.save_state(f"{directory}/saved")
        accelerator.print(f"parameters sha256 {parameter_digest(model.named_parameters())}")


if __name__ == "__main__":
    typer.run(main)
