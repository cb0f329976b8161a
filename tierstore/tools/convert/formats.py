"""The formats: how each is recognized, read and written.

To add a format, write a module with the functions that FORMATS names, and add a line there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from tierstore.errors import CheckpointError
from tierstore.tools.convert import (
    dcp,
    deepspeed,
    huggingface,
    megatron,
    safetensors_files,
    tierstore_runs,
    tierstore_writer,
    torch_checkpointing,
    torch_files,
    torch_writer,
    universal,
    universal_writer,
)
from tierstore.tools.convert.contents import Contents
from tierstore.tools.convert.entries import Entry
from tierstore.tools.convert.options import Options, Reading
from tierstore.tools.convert.pipeline import Piece


class Writer(Protocol):
    """Writes contents in one format. Made before anything is written."""

    entries: Sequence[Entry]
    """The entries in the order in which they are written, with the dtypes that are written."""
    lost: Sequence[str]
    """Values that the format does not hold, each as ``name: reason``."""
    nbytes: int
    """About how many bytes all files have, rather more than less."""

    def writing(self, directory: Path) -> AbstractContextManager[Callable[[Piece], None]]:
        """Write to an empty directory: the block passes all pieces of ``entries`` in order.

        The end of the block without an error completes the files; they need not be durable.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """One format."""

    recognizes: Callable[[Path], bool] | None = None
    """Returns True if a path may be a checkpoint of this format, by names of files alone."""
    read: Callable[[Sequence[Path], Reading], Sequence[Contents]] | None = None
    """Read the contents of one or several paths, which are parts of one checkpoint."""
    write: Callable[[Contents, Options], Writer] | None = None
    file: str = ""
    """The name of the only file that a writer makes, which then becomes the destination."""


FORMATS: dict[str, Format] = {
    "tierstore": Format(
        recognizes=tierstore_runs.recognizes,
        read=tierstore_runs.read,
        write=tierstore_writer.Writer,
    ),
    "deepspeed": Format(recognizes=deepspeed.recognizes, read=deepspeed.read),
    "torch_checkpointing": Format(
        recognizes=torch_checkpointing.recognizes, read=torch_checkpointing.read
    ),
    "huggingface": Format(recognizes=huggingface.recognizes, read=huggingface.read),
    "megatron": Format(recognizes=megatron.recognizes, read=megatron.read),
    "universal": Format(
        recognizes=universal.recognizes,
        read=universal.read,
        write=universal_writer.Writer,
    ),
    "dcp": Format(recognizes=dcp.recognizes, read=dcp.read, write=dcp.Writer),
    "torch": Format(
        recognizes=torch_files.recognizes,
        read=torch_files.read,
        write=torch_writer.Writer,
        file=torch_writer.FILE,
    ),
    "safetensors": Format(
        recognizes=safetensors_files.recognizes,
        read=safetensors_files.read,
        write=safetensors_files.Writer,
    ),
}


def recognized(path: Path) -> str:
    """Return the name of the format of a path.

    Raises:
        CheckpointError: nothing is there, or no format is recognized.
    """
    if not path.exists():
        raise CheckpointError(f"{path} does not exist: name a checkpoint")
    for name, known in FORMATS.items():
        if known.recognizes is not None and known.recognizes(path):
            return name
    readable = ", ".join(name for name, known in FORMATS.items() if known.read)
    raise CheckpointError(
        f"{path} is not recognized as any of {readable}: name the directory or file of a "
        "checkpoint, or pass --from"
    )
