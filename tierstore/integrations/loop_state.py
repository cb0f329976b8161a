"""The objects that loops register with the store of their optimizer, and the order of data."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

from tierstore.run.random_state import RandomState
from tierstore.run.registered import CommittedStep
from tierstore.store import TierStore


class RandomLater(RandomState):
    """Random generators that a loop restores by set(), after its startup has drawn from them."""

    def __init__(self) -> None:
        self._restored: dict[str, Any] | None = None

    def state_dict(self) -> dict[str, Any]:
        """Return the state that set() will set, or the current state."""
        return super().state_dict() if self._restored is None else self._restored

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep the state for set()."""
        self._restored = state_dict

    def set(self) -> None:
        """Set the generators, if a commit was restored since the last call."""
        if self._restored is not None:
            super().load_state_dict(self._restored)
            self._restored = None


class _SavedBuffers:
    """The buffers in the state dict of the model."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model

    def state_dict(self) -> dict[str, torch.Tensor]:
        saved = self._model.state_dict().keys()
        return {name: buffer for name, buffer in self._model.named_buffers() if name in saved}

    def load_state_dict(self, state_dict: dict[str, torch.Tensor]) -> None:
        with torch.no_grad():
            for name, buffer in self.state_dict().items():
                buffer.copy_(state_dict[name])


def register(
    store: TierStore, model: torch.nn.Module, scheduler: Any, scaler: Any, **own: Any
) -> dict[str, Any]:
    """Register the other objects of a loop with the store; return them by name.

    Args:
        store: the store of the optimizer.
        model: the model without wrappers.
        scheduler: a scheduler of learning rates, or None.
        scaler: a GradScaler or None.
        own: further objects of this kind of loop.
    """
    objects = {"scheduler": scheduler, "scaler": scaler, "buffers": _SavedBuffers(model), **own}
    found = {name: given for name, given in objects.items() if given is not None}
    store.register(**found)
    return found


def restore_optimizer(store: TierStore, optimizer: Any, checkpoint: Path | None = None) -> int:
    """Restore parameters and states; return the step.

    Args:
        store: the store of the optimizer.
        optimizer: any optimizer on the store, without wrappers.
        checkpoint: begin a new run from this checkpoint; None: use the commit of the run.

    Raises:
        RunMismatchError, CheckpointError: as in ``TierStore.restore()``.
    """
    restore = optimizer.restore if hasattr(optimizer, "restore") else store.restore
    step: int = restore(checkpoint)
    return step


def require_own(committed: CommittedStep, key: str, maker: str, processes: int | None) -> None:
    """Require that a loop of the same kind, on as many processes, committed a step.

    Args:
        committed: the step, and its registered states.
        key: the name under which this kind of loop registers itself.
        maker: the kind of loop, for the message.
        processes: number of processes of this loop; None if any number is allowed.

    Raises:
        ValueError: another program, or another number of processes, committed the step.
    """
    step = committed.step
    if step and key not in {*committed.tagged, *committed.unequal}:
        raise ValueError(
            f"step {step} of the store was not committed by {maker}: continue it with the program "
            "that began the run, or open the store in a new directory"
        )
    if step and (key in committed.unequal or (committed.of_other_ranks and processes)):
        raise ValueError(
            f"step {step} of the store was committed by {maker} of another number of processes, "
            "which had other batches, or was converted: continue the run with as many processes"
        )


def publish(
    store: TierStore,
    folder: Path,
    model: torch.nn.Module,
    *,
    is_main: bool,
    wait: Callable[[], Any],
    **options: Any,
) -> None:
    """Publish the last step as a checkpoint. Replace an existing one.

    The existing one is renamed to ``<folder>.old``, and removed when the new one is complete.

    Args:
        store: the store of the optimizer.
        folder: the directory of the checkpoint.
        model: the model without wrappers.
        is_main: whether this is rank 0.
        wait: waits for all ranks.
        options: as in ``TierStore.checkpoint()``.
    """
    old = folder.with_name(f"{folder.name}.old")
    if is_main and store.step and folder.exists():
        shutil.rmtree(old, ignore_errors=True)
        folder.rename(old)
    wait()
    store.checkpoint(folder, model=model, **options)
    if is_main:
        shutil.rmtree(old, ignore_errors=True)


# -- The order of the data.


def data_order(loaders: Iterable[Any]) -> dict[str, Any]:
    """Return the state that determines the order of an epoch, before its first batch is drawn.

    Args:
        loaders: DataLoaders, or objects in place of them.
    """
    parts = _parts(loaders)
    return {
        "random": RandomState().state_dict(),
        "generators": [generator.get_state() for generator in _generators(parts)],
        "seeds": [part.initial_seed for part in parts if _is_seeded(part)],
        "epochs": [part.epoch for part in parts if _has_epoch(part)],
    }


def restore_data_order(loaders: Iterable[Any], order: dict[str, Any]) -> None:
    """Restore loaders to the state that data_order() returned."""
    parts = _parts(loaders)
    RandomState().load_state_dict(order["random"])
    for generator, state in zip(_generators(parts), order["generators"], strict=True):
        generator.set_state(state)
    for part, seed in zip(filter(_is_seeded, parts), order["seeds"], strict=True):
        part.initial_seed = seed
    for part, epoch in zip(filter(_has_epoch, parts), order["epochs"], strict=True):
        part.set_epoch(epoch)


def _parts(loaders: Iterable[Any]) -> list[Any]:
    """Return the loaders and the samplers in them."""
    parts = list(loaders)
    for part in parts:  # The list grows during the loop.
        for name in ("batch_sampler", "sampler"):
            inner = getattr(part, name, None)
            if inner is not None and all(inner is not known for known in parts):
                parts.append(inner)
    return parts


def _is_seeded(part: Any) -> bool:
    """Return whether a sampler of accelerate draws each epoch from a seed."""
    return hasattr(part, "initial_seed")


def _has_epoch(part: Any) -> bool:
    """Return whether a sampler, such as a DistributedSampler, changes its order each epoch."""
    return hasattr(part, "set_epoch") and hasattr(part, "epoch")


def _generators(parts: list[Any]) -> list[torch.Generator]:
    names = ("generator", "synchronized_generator")  # The second name is from accelerate.
    found = [getattr(part, name, None) for part in parts if not _is_seeded(part) for name in names]
    return [generator for generator in found if generator is not None]
