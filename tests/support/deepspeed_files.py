"""Changes to files that DeepSpeed wrote, without DeepSpeed."""

from __future__ import annotations

import contextlib
import enum
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch


@dataclass
class fragment_address:  # noqa: N801  # As DeepSpeed calls it.
    numel: int
    start: int


class LossScaler:
    pass


class ZeroStageEnum(int, enum.Enum):
    optimizer_states = 1
    gradients = 2
    weights = 3


_CLASSES = {
    "deepspeed.utils.tensor_fragment": fragment_address,
    "deepspeed.runtime.fp16.loss_scaler": LossScaler,
    "deepspeed.runtime.zero.config": ZeroStageEnum,
}


@contextlib.contextmanager
def classes_of_deepspeed() -> Iterator[None]:
    """Let torch load and save objects of DeepSpeed's classes in the block."""
    kept = dict(sys.modules)
    modules = {part for name in _CLASSES for part in _parents(name)}
    sys.modules.update({name: ModuleType(name) for name in modules})
    before = {kind: kind.__module__ for kind in _CLASSES.values()}
    for name, kind in _CLASSES.items():
        setattr(sys.modules[name], kind.__name__, kind)
        kind.__module__ = name
    try:
        yield
    finally:
        for kind, name in before.items():
            kind.__module__ = name
        for name in modules:
            sys.modules.pop(name)
        sys.modules.update({name: kept[name] for name in modules if name in kept})


def _parents(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[:count]) for count in range(1, len(parts) + 1)]


def change(path: Path, edit: Callable[[Any], None]) -> None:
    """Write a file of DeepSpeed again after an edit of its value in place."""
    with classes_of_deepspeed():
        value = torch.load(path, weights_only=False)
        edit(value)
        torch.save(value, path)
