"""What a look at a run or a checkpoint found."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing that is not as it was written."""

    place: str
    """The file, from the directory looked at, or the key of ``.metadata``."""
    what: str
    """What is wrong with it, and what that means where it is not plain."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The outcome of verify()."""

    path: str
    kind: str
    """"run", "checkpoint", or "plain checkpoint": one that tierstore did not publish."""
    step: int | None
    """The committed step; None where nothing says it, or nothing was committed."""
    files: int
    """How many files were looked into."""
    bytes_checked: int
    """How many bytes of them were, each counted once."""
    faults: Sequence[Fault]
    notes: Sequence[str]
    """What is worth knowing and no fault."""

    @property
    def good(self) -> bool:
        """Whether no fault was found."""
        return not self.faults
