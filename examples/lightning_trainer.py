"""Train a small GPT with Lightning while its optimizer state stays on disk.

The text is the source of Python's standard library: nothing is downloaded. Stop the program at any
moment, also with kill -9, and start it again: it continues from the last committed step and ends
with the same parameters, bit for bit::

    pip install lightning
    python examples/lightning_trainer.py runs/lightning
    torchrun --nproc-per-node 2 examples/lightning_trainer.py runs/lightning-2
"""

from __future__ import annotations

import os
from typing import Annotated, Any

import lightning
import torch
import typer
from gpt import ADAMW_LR, GPT, MUON_LR, Options, learning_rate_factor, parameter_digest
from text import standard_library_text, windows
from torch.utils.data import DataLoader, TensorDataset

import muon
import tierstore
from tierstore.integrations.lightning import Commit

CONTEXT = 128


class Module(lightning.LightningModule):
    """The GPT with its optimizer, whose state is on a store."""

    def __init__(self, options: Options, store: tierstore.TierStore) -> None:
        super().__init__()
        self.gpt = GPT(options)
        self.options = options
        self.store = store

    def configure_optimizers(self) -> dict[str, Any]:
        """Return the optimizer and its scheduler."""
        groups = muon.param_groups(self, lr=MUON_LR, adamw_lr=ADAMW_LR)
        optimizer = muon.Muon(groups, store=self.store, ns_dtype=torch.float32)
        scheduler = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: learning_rate_factor(step, self.options.steps)
        )
        by_step = {"scheduler": scheduler, "interval": "step"}
        return {"optimizer": optimizer, "lr_scheduler": by_step}

    def training_step(self, batch: list[torch.Tensor]) -> torch.Tensor:
        """Return the loss of a batch."""
        loss: torch.Tensor = self.gpt(*batch)
        self.print(f"step {self.store.step + 1} loss {loss:.3f}", flush=True)
        return loss

    def validation_step(self, batch: list[torch.Tensor]) -> None:
        """Log the loss of a batch."""
        self.log("validation_loss", self.gpt(*batch))

    def on_validation_epoch_end(self) -> None:
        """Print the mean loss of this rank."""
        loss = self.trainer.callback_metrics["validation_loss"]
        self.print(f"epoch {self.current_epoch} validation {loss:.3f}", flush=True)


def main(
    directory: Annotated[str, typer.Argument(help="Where pages and checkpoints live.")],
    steps: Annotated[int, typer.Option(min=1)] = 100,
    width: Annotated[int, typer.Option(min=64, help="A multiple of 64.")] = 128,
    batch: Annotated[int, typer.Option(min=1, help="Windows of a rank in a batch.")] = 8,
) -> None:
    """Train, or continue from the last commit."""
    torch.set_num_threads(1)
    lightning.seed_everything(0)
    options = Options(
        steps=steps, layers=2, width=width, batch=batch, context=CONTEXT, seed=0, dropout=0.1
    )
    train_text, validation_text = standard_library_text()
    # Two epochs for one process, four for two.
    data = TensorDataset(*windows(train_text, list(range(steps * batch)), CONTEXT))
    held_out = TensorDataset(*windows(validation_text, list(range(16)), CONTEXT))
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if ranks > 1:  # The store is opened before the Trainer would do it.
        torch.distributed.init_process_group()
    with tierstore.TierStore(
        f"{directory}/run", host_memory="32MiB", page_bytes="4MiB", resume=True
    ) as store:
        module = Module(options, store)
        trainer = lightning.Trainer(
            devices=ranks,
            strategy="ddp" if ranks > 1 else "auto",
            callbacks=[Commit(store)],
            max_steps=steps,
            accumulate_grad_batches=2,
            default_root_dir=directory,
            logger=False,
            enable_progress_bar=False,
        )
        if trainer.is_global_zero:
            print(f"starts after step {store.committed.step}", flush=True)
        trainer.fit(
            module,
            DataLoader(data, batch_size=batch, shuffle=True),
            DataLoader(held_out, batch_size=batch),
        )
        module.print(f"parameters sha256 {parameter_digest(module.named_parameters())}")


if __name__ == "__main__":
    typer.run(main)
