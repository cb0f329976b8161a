"""Train a small Llama with torchtitan's Trainer while its optimizer state stays on disk.

The text is the source of Python's standard library: nothing is downloaded. Stop the program at any
moment, also with kill -9, and start it again: it continues from the last committed step and ends
with the same parameters, bit for bit. torchtitan needs GPUs::

    pip install torchtitan==0.2.2
    torchrun --nproc-per-node 8 examples/torchtitan_trainer.py runs/torchtitan
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from gpt import ADAMW_LR, MUON_LR, parameter_digest
from text import shuffled_windows, standard_library_text, windows
from torch import Tensor
from torch.distributed.tensor import DTensor
from torchtitan.components.dataloader import ParallelAwareDataloader
from torchtitan.config import ConfigManager
from torchtitan.models import llama3
from torchtitan.models.llama3 import TransformerModelArgs
from torchtitan.protocols.train_spec import register_train_spec
from torchtitan.tools.logging import logger
from torchtitan.train import Trainer

import tierstore
from muon.integrations.torchtitan import MuonContainer
from tierstore.integrations.torchtitan import Checkpointer

CONTEXT = 128


class Windows(torch.utils.data.IterableDataset[Any]):
    """Windows of the text for one rank, in a random order, with the position as their state."""

    def __init__(self, rank: int, ranks: int) -> None:
        self.text, _ = standard_library_text()
        self.rank, self.ranks, self.taken = rank, ranks, 0

    def __iter__(self) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
        count = (len(self.text) - 1) // CONTEXT
        order = shuffled_windows(count, 0, self.taken * self.ranks)
        for index in islice(order, self.rank, None, self.ranks):
            self.taken += 1
            ((inputs,), (labels,)) = windows(self.text, [index], CONTEXT)
            yield {"input": inputs}, labels

    def state_dict(self) -> dict[str, int]:
        """Return the position of this rank."""
        return {"taken": self.taken}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continue from a position."""
        self.taken = state["taken"]


def main(
    directory: Annotated[str, typer.Argument(help="Where pages and checkpoints live.")],
    steps: Annotated[int, typer.Option(min=1)] = 100,
    width: Annotated[int, typer.Option(min=64, help="A multiple of 64.")] = 128,
    batch: Annotated[int, typer.Option(min=1, help="Windows of a rank in a batch.")] = 8,
) -> None:
    """Train, or continue from the last commit."""
    torch.set_num_threads(1)
    logger.addHandler(logging.StreamHandler(sys.stdout))
    logger.setLevel(logging.INFO)

    def build_dataloader(
        dp_world_size: int, dp_rank: int, **others: Any
    ) -> ParallelAwareDataloader:
        return ParallelAwareDataloader(
            Windows(dp_rank, dp_world_size),
            dp_rank=dp_rank,
            dp_world_size=dp_world_size,
            batch_size=batch,
        )

    def build_optimizers(model_parts: Any, *others: Any) -> MuonContainer:
        store = tierstore.TierStore(
            f"{directory}/run", host_memory="32MiB", page_bytes="4MiB", resume=True
        )
        return MuonContainer(
            model_parts, store=store, lr=MUON_LR, adamw_lr=ADAMW_LR, ns_dtype=torch.float32
        )

    model_args = TransformerModelArgs(
        dim=width, n_layers=2, n_heads=width // 64, vocab_size=256, multiple_of=64
    )
    spec = replace(
        llama3.get_train_spec(),
        model_args={"tiny": model_args},
        build_tokenizer_fn=None,
        build_dataloader_fn=build_dataloader,
        build_optimizers_fn=build_optimizers,
    )
    register_train_spec("tiny-llama", spec)
    options = {
        "model.name": "tiny-llama",
        "model.flavor": "tiny",
        "training.steps": steps,
        "training.seq_len": CONTEXT,
        "training.local_batch_size": batch,
        "training.mixed_precision_param": "float32",  # The default, bfloat16, is for GPUs.
        "lr_scheduler.warmup_steps": 10,
        "metrics.log_freq": 1,
        "debug.seed": 0,
        "job.dump_folder": directory,
    }
    arguments = [f"--{key}={value}" for key, value in options.items()]
    trainer = Trainer(ConfigManager().parse_args(arguments))
    trainer.checkpointer = Checkpointer(
        trainer, folder=f"{directory}/checkpoints", interval=50, keep_last=2
    )
    store = trainer.optimizers.store
    print(f"starts after step {store.committed.step}", flush=True)
    try:
        trainer.train()
    finally:
        trainer.close()
    whole = (
        (name, parameter.full_tensor() if isinstance(parameter, DTensor) else parameter)
        for name, parameter in trainer.model_parts[0].named_parameters()
    )
    digest = parameter_digest(whole)
    if dist.get_rank() == 0:
        print(f"parameters sha256 {digest}")
    dist.destroy_process_group()


if __name__ == "__main__":
    typer.run(main)
