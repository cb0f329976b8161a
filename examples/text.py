"""Training text: the source of Python's standard library, as windows of bytes."""

from __future__ import annotations

import hashlib
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor


def standard_library_text() -> tuple[Tensor, Tensor]:
    """Return the training and validation text, uint8 (bytes,) each.

    About one file in twenty is held out whole, chosen by a hash of its name, so the choice is the
    same in every run.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    skipped = {"site-packages", "dist-packages", "test", "tests", "idle_test"}
    names = sorted(path.relative_to(root).as_posix() for path in root.rglob("*.py"))
    train, validation = bytearray(), bytearray()
    for name in names:
        if skipped.isdisjoint(name.split("/")):
            held_out = hashlib.sha256(name.encode()).digest()[0] < 256 / 20
            (validation if held_out else train).extend((root / name).read_bytes())
    dtype = torch.uint8
    return torch.frombuffer(train, dtype=dtype), torch.frombuffer(validation, dtype=dtype)


def windows(text: Tensor, indices: list[int], context: int) -> tuple[Tensor, Tensor]:
    """Return inputs and next-byte targets, int64 (windows, context) each."""
    rows = [text[i * context : (i + 1) * context + 1] for i in indices]
    both = torch.stack(rows).long()  # (windows, context + 1)
    return both[:, :-1], both[:, 1:]


def shuffled_windows(count: int, seed: int, position: int) -> Iterator[int]:
    """Yield window indices forever from a position on, in a new random order each epoch."""
    while True:
        epoch, start = divmod(position, count)
        order = torch.randperm(count, generator=torch.Generator().manual_seed(seed + epoch))
        yield from order[start:].tolist()
        position += count - start
