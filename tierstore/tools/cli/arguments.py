"""Arguments that several commands share."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, overload

import typer

from tierstore.errors import CheckpointError, TierstoreError
from tierstore.tools.cli.output import complain
from tierstore.units import parse_bytes

RunOrCheckpoint = Annotated[
    Path, typer.Argument(metavar="PATH", help="A run directory or a checkpoint.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object to stdout.")]


@overload
def size_of(option: str, text: str) -> int: ...


@overload
def size_of(option: str, text: str | None) -> int | None: ...


def size_of(option: str, text: str | None) -> int | None:
    """Return the bytes that the text of an option names."""
    try:
        return None if text is None else parse_bytes(text)
    except ValueError as error:
        raise TierstoreError(f"{option}: {error}") from error


def require_there(path: Path) -> None:
    """Refuse a path that does not exist, before torch is imported, which takes seconds."""
    try:
        os.lstat(path)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise CheckpointError(f"{path} does not exist: name a run or a checkpoint") from error


def note_interrupted_reshard(run: Path) -> None:
    """Print on stderr where the committed step of a run with an incomplete reshard is."""
    from tierstore.inspection.reader import Reader
    from tierstore.inspection.run_reader import newest_commit, read_ranks
    from tierstore.run.file_names import RESHARDED_NAME

    if (run / RESHARDED_NAME).exists() and newest_commit(read_ranks(Reader(run))) is None:
        complain(
            f"{run} was being resharded to another number of ranks: its committed step is in the "
            f"checkpoint {RESHARDED_NAME} in it. Open it with resume=True to resume."
        )
