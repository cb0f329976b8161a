"""Options of readers and writers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """How a source is read."""

    check: bool = True
    """Whether all bytes are read first, and compared with the checksums that the source has.

    The structure is checked in any case."""
    on_progress: Callable[[int, int], None] | None = None
    """Called with the number of bytes that were checked, and of all bytes to check."""
    optimizer: bool = True
    """Whether the optimizer is wanted. If not, a reader may leave out the states, and what it would
    refuse of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How a destination is written."""

    dtype: torch.dtype | None = None
    """Dtype of the weights; None: as in the source."""
    shard_bytes: int | None = None
    """About how many bytes a file of weights holds, where a format has several."""
    bare_keys: bool = False
    """Whether keys of the model in a DCP checkpoint lack "model.", as in torchtitan."""
