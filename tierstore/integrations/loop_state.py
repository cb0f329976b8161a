"""The state of a loop beside its optimizer, as values that a commit can hold."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Iterable
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tierstore.store import TierStore


def loop_state(model: torch.nn.Module, scheduler: Any, scaler: Any) -> dict[str, Any]:
    """Return scheduler, random generators, gradient scaler and saved buffers.

    Args:
        model: the model without wrappers.
        scheduler: a scheduler of learning rates, or None.
        scaler: a GradScaler or None.
    """
    return {
        "scheduler": None if scheduler is None else scheduler.state_dict(),
        "random": random_state(),
        "scaler": None if scaler is None else scaler.state_dict(),
        "buffers": _saved_buffers(model),
    }


def load_loop_state(
    state: dict[str, Any], model: torch.nn.Module, scheduler: Any, scaler: Any = None
) -> None:
    """Load what loop_state() returned, but for the random generators."""
    if scheduler is not None:
        scheduler.load_state_dict(deepcopy(state["scheduler"]))
    if scaler is not None and state["scaler"] is not None:
        scaler.load_state_dict(state["scaler"])
    with torch.no_grad():
        for name, buffer in _saved_buffers(model).items():
            buffer.copy_(state["buffers"][name])


def restore_optimizer(store: TierStore, optimizer: Any, checkpoint: Path | None = None) -> int:
    """Restore parameters and states; return the step.

    Args:
        store: the store of the optimizer.
        optimizer: any optimizer on the store, without wrappers.
        checkpoint: begin a new run from it; None for the commit of the run.

    Raises:
        RunMismatchError, CheckpointError: as of ``TierStore.restore()``.
    """
    restore = optimizer.restore if hasattr(optimizer, "restore") else store.restore
    step: int = restore(checkpoint)
    return step


def _saved_buffers(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the buffers that a state dict of the model has."""
    saved = model.state_dict().keys()
    return {name: buffer for name, buffer in model.named_buffers() if name in saved}


def require_own(step: int, extra: Any, key: str, maker: str, processes: int | None = None) -> None:
    """Require that a loop of the same kind, on as many processes, committed a step.

    Args:
        step: the committed step; 0 if there is none.
        extra: of its commit.
        key: has what this kind of loop keeps, with its processes as ``"processes"``.
        maker: the kind of loop, for the message.
        processes: of this loop; None if any number will do.

    Raises:
        ValueError: another program committed it, or another number of processes.
    """
    if not step:
        return
    if not isinstance(extra, dict) or key not in extra:
        raise ValueError(
            f"step {step} of the store was not committed by {maker}: continue it with the program "
            "that began the run, or open the store in a new directory"
        )
    if processes is not None and processes != extra[key]["processes"]:
        raise ValueError(
            f"step {step} of the store was committed by {maker} of {extra[key]['processes']} "
            f"processes, and this is one of {processes}, which has other batches: continue it "
            "with as many"
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
    """Publish the last step as a checkpoint, in the place of one that may be there.

    That one is removed once the new one is there; until then it is ``<folder>.old``.

    Args:
        store: the store of the optimizer.
        folder: of the checkpoint.
        model: as of loop_state().
        is_main: whether this is rank 0.
        wait: waits for all ranks.
        options: as of ``TierStore.checkpoint()``.
    """
    old = folder.with_name(f"{folder.name}.old")
    if is_main and store.step and folder.exists():
        shutil.rmtree(old, ignore_errors=True)
        folder.rename(old)
    wait()
    store.checkpoint(folder, model=model, **options)
    if is_main:
        shutil.rmtree(old, ignore_errors=True)


def random_state() -> dict[str, Any]:
    """Return the state of the generators of Python, numpy and torch, GPUs included."""
    numpy_state: Any = np.random.get_state()
    name, keys, *rest = numpy_state
    return {
        "python": random.getstate(),
        "numpy": (name, torch.from_numpy(keys.astype(np.int64)), *rest),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
    }


def set_random_state(state: dict[str, Any]) -> None:
    """Bring all generators to a state of random_state()."""
    random.setstate(state["python"])
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), *rest))
    torch.set_rng_state(state["torch"])
    if state["cuda"]:
        torch.cuda.set_rng_state_all(state["cuda"])


# -- The order of the data.


def data_order(loaders: Iterable[Any]) -> dict[str, Any]:
    """Return what the order of an epoch follows from, before its first batch was drawn.

    Args:
        loaders: DataLoaders, or what stands for them.
    """
    parts = _parts(loaders)
    return {
        "random": random_state(),
        "generators": [generator.get_state() for generator in _generators(parts)],
        "seeds": [part.initial_seed for part in parts if _is_seeded(part)],
        "epochs": [part.epoch for part in parts if _has_epoch(part)],
    }


def restore_data_order(loaders: Iterable[Any], order: dict[str, Any]) -> None:
    """Bring loaders to where data_order() found them."""
    parts = _parts(loaders)
    set_random_state(order["random"])
    for generator, state in zip(_generators(parts), order["generators"], strict=True):
        generator.set_state(state)
    for part, seed in zip(filter(_is_seeded, parts), order["seeds"], strict=True):
        part.initial_seed = seed
    for part, epoch in zip(filter(_has_epoch, parts), order["epochs"], strict=True):
        part.set_epoch(epoch)


def _parts(loaders: Iterable[Any]) -> list[Any]:
    """Return the loaders and the samplers in them."""
    parts = list(loaders)
    for part in parts:  # It grows.
        for name in ("batch_sampler", "sampler"):
            inner = getattr(part, name, None)
            if inner is not None and all(inner is not known for known in parts):
                parts.append(inner)
    return parts


def _is_seeded(part: Any) -> bool:
    """Return if a sampler of accelerate draws each epoch from a seed."""
    return hasattr(part, "initial_seed")


def _has_epoch(part: Any) -> bool:
    """Return if a sampler, for example a DistributedSampler, has another order in each epoch."""
    return hasattr(part, "set_epoch") and hasattr(part, "epoch")


def _generators(parts: list[Any]) -> list[torch.Generator]:
    names = ("generator", "synchronized_generator")  # The second of accelerate.
    found = [getattr(part, name, None) for part in parts if not _is_seeded(part) for name in names]
    return [generator for generator in found if generator is not None]
