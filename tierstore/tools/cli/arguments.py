"""Arguments that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tierstore.tools.cli.output import complain

RunOrCheckpoint = Annotated[
    Path, typer.Argument(metavar="PATH", help="A run directory or a checkpoint.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object to stdout.")]


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
