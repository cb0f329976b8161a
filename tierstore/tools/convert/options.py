"""Options of readers and writers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch

from tierstore.inspection.reader import Reader


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """Options of reading a source."""

    check: bool = True
    """True to compare data with the checksums that the source has.

    The structure is checked in any case."""
    on_progress: Callable[[int, int], None] | None = None
    """Called with the number of bytes that were checked, and of all bytes to check."""
    optimizer: bool = True
    """False if only the model is needed. A reader may then skip the states, and errors that they
    would cause."""
    wrapped: bool = True
    """False if names have no prefixes of wrappers, as in a new destination."""
    _readers: list[Reader] = field(default_factory=list, init=False)

    def reader(self, root: Path) -> Reader:
        """Return a reader of a directory; compare_checksums() compares what it reads."""
        reader = Reader(root, self.on_progress, collect_checksums=self.check)
        self._readers.append(reader)
        return reader

    def compare_checksums(self) -> None:
        """Compare the data that was read with checksums of the source, unless read() did.

        If a checksum covers more than the data that was read, the rest is read now.

        Raises:
            CorruptionError: a source is damaged.
            StorageError: a file of a source cannot be opened.
        """
        for reader in self._readers:
            reader.compare_checksums()


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Options of writing a destination."""

    dtype: torch.dtype | None = None
    """Dtype of the weights; None: as in the source."""
    shard_bytes: int | None = None
    """About how many bytes a file of weights holds, where a format has several."""
    bare_keys: bool = False
    """True if keys of the model in a DCP checkpoint lack "model.", as in torchtitan."""
