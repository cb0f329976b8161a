"""The optimizer container and the checkpointer of a torchtitan Trainer, on a store."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tierstore.integrations.loop_state import (
    RandomLater,
    publish,
    register,
    require_own,
    restore_optimizer,
)
from tierstore.store import TierStore

_MAKER = "a Trainer with this checkpointer"


class Container(torch.optim.Optimizer):
    """A container of one optimizer on a store, with the calls of an ``OptimizersContainer``.

    Its state dict names the step of the store and has no tensors: the state stays in pages.

    Args:
        model_parts: one module, with the parameters of the optimizer.
        optimizer: its attribute ``store`` is its store.

    Raises:
        ValueError: several model parts, that is, several pipeline stages on one rank.
        TypeError: the optimizer has no store.
    """

    def __init__(self, model_parts: Sequence[nn.Module], optimizer: torch.optim.Optimizer) -> None:
        only_part(model_parts)
        if not isinstance(getattr(optimizer, "store", None), TierStore):
            raise TypeError(f"{type(optimizer).__name__} has no TierStore as its attribute `store`")
        self.optimizers = [optimizer]
        self.model_parts = list(model_parts)
        params = [param for group in optimizer.param_groups for param in group["params"]]
        super().__init__(params, {})  # Supports hooks of steps.

    @property
    def store(self) -> TierStore:
        """The store of the optimizer."""
        store: TierStore = self.optimizers[0].store  # type: ignore[attr-defined]
        return store

    def __iter__(self) -> Iterator[torch.optim.Optimizer]:
        return iter(self.optimizers)

    def __len__(self) -> int:
        return len(self.optimizers)

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Step the optimizer."""
        self.optimizers[0].step(closure)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients."""
        self.optimizers[0].zero_grad(set_to_none=set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """Return the step of the store."""
        return {"tierstore_step": self.store.step}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Require that the state is at the step of the store. Load nothing.

        Raises:
            ValueError: the state is of another step, or of an optimizer without a store.
        """
        if state_dict != self.state_dict():
            raise ValueError(
                "this checkpoint conflicts with the store, which continues from its step "
                f"{self.store.step}: let `Checkpointer` load it, or open the store in a new "
                "directory and load only the weights"
            )


def only_part(model_parts: Sequence[nn.Module]) -> nn.Module:
    """Return the single part of a model.

    Raises:
        ValueError: the model has several parts, or none.
    """
    if len(model_parts) != 1:
        raise ValueError(
            f"a store holds the parameters of one model part, got {len(model_parts)}: train "
            "without pipeline parallelism"
        )
    return model_parts[0]


class _ResumedData:
    """A data loader whose first iterator leaves random generators in their committed state."""

    def __init__(self, loader: Any, random: RandomLater) -> None:
        self._loader = loader
        self._random = random

    def __iter__(self) -> Iterator[Any]:
        # iter() draws a seed. The committed generators have drawn it already.
        iterator: Iterator[Any] = iter(self._loader)
        self._random.set()
        return iterator

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)


class Checkpointer:
    """A checkpointer that commits each step of a Trainer, and resumes from the last commit.

    A commit holds, besides parameters and optimizer states, the learning rates, the position in
    the data, random generators, saved buffers of the model and the state of the Trainer.

    Args:
        trainer: a ``torchtitan.train.Trainer`` whose ``optimizers`` are a ``Container``.
        folder: checkpoints are published here as ``step-<n>``, with the keys of torchtitan. An
            existing one is replaced.
        interval: number of steps from one checkpoint to the next; None: no checkpoints.
        keep_last: number of checkpoints to keep, as in ``TierStore.checkpoint()``.

    Raises:
        TypeError: the optimizers are not a ``Container``.
        ValueError: ``interval`` without ``folder`` or below 1, or the store has steps.
    """

    def __init__(
        self,
        trainer: Any,
        *,
        folder: str | Path | None = None,
        interval: int | None = None,
        keep_last: int | None = None,
    ) -> None:
        container = trainer.optimizers
        if not isinstance(container, Container):
            raise TypeError(
                f"the optimizers of the Trainer must be a Container of a store, got "
                f"{type(container).__name__}: give it as `build_optimizers_fn`"
            )
        if interval is not None and (folder is None or interval < 1):
            raise ValueError(f"interval={interval} needs a folder, and to be at least 1")
        if trainer.dataloader is None:
            raise ValueError("the Trainer has no dataloader, but a commit needs its state")
        if container.store.step:
            raise ValueError(
                f"the store is at step {container.store.step} already: make the checkpointer "
                "before the first step"
            )
        self._trainer = trainer
        self._container = container
        self._store = container.store
        self._model = container.model_parts[0]
        self._folder = None if folder is None else Path(folder)
        self._interval = interval
        self._keep_last = keep_last
        self._saved = 0  # The last step that save() was called for.
        self._around = sys.exc_info()[1]  # An earlier error that the program is handling.

    def load(self, step: int = -1) -> bool:
        """Restore the last commit of the store; return whether it exists.

        Args:
            step: -1 for the last commit.

        Raises:
            ValueError: another step is requested, or another program made the commit.
            RunMismatchError: the run does not fit the model.
        """
        store = self._store
        if step not in (-1, store.committed.step):
            raise ValueError(
                f"step {step} conflicts with the store, which continues from its step "
                f"{store.committed.step}: leave out `load_step`"
            )
        require_own(store.committed, "trainer", _MAKER, dist.get_world_size())
        trainer, random = self._trainer, RandomLater()
        register(store, self._model, trainer.lr_schedulers, None)
        store.register(random=random, trainer=trainer, data=trainer.dataloader)
        self._saved = restore_optimizer(store, self._container.optimizers[0])
        if self._saved:
            trainer.dataloader = _ResumedData(trainer.dataloader, random)
        return bool(self._saved)

    def save(self, curr_step: int, last_step: bool = False) -> bool:
        """Commit a step; publish it if a checkpoint is due, and return whether it was.

        Args:
            curr_step: the step of the Trainer.
            last_step: whether this is the last step. A checkpoint is then also due.

        Raises:
            TypeError, ValueError: the state of data or Trainer cannot be stored.
            StorageError: an earlier commit or write failed.
        """
        self._store.commit()
        self._saved = self._store.step
        due = self._interval is not None and (last_step or curr_step % self._interval == 0)
        if due:
            assert self._folder is not None  # __init__() has checked it.
            publish(
                self._store,
                self._folder / f"step-{curr_step}",
                self._model,
                is_main=dist.get_rank() == 0,
                wait=dist.barrier,
                keep_last=self._keep_last,
                model_prefix="",
            )
        return due

    def maybe_wait_for_staging(self) -> None:
        """Do nothing: a step waits for what it needs."""

    def close(self) -> None:
        """Close the store. A step without a call of save() is not committed."""
        kind, error, traceback = sys.exc_info()
        if error is self._around:
            kind = error = traceback = None
        if kind is None and self._store.step != self._saved:
            kind = RuntimeError  # An exception ended the step, and was handled elsewhere.
        self._store.__exit__(kind, error, traceback)
