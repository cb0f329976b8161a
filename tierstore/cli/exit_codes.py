"""Exit codes of commands: 0 good, 1 the data is bad, 2 the call is wrong."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import typer

from tierstore.cli.output import plain, write_json
from tierstore.errors import CorruptionError, PeerFailed, StorageError, TierstoreError

BAD_DATA, WRONG_CALL = 1, 2


@contextmanager
def exit_codes(as_json: bool) -> Iterator[None]:
    """Turn the errors of a command into a message and an exit code."""
    try:
        yield
    except (CorruptionError, StorageError, PeerFailed) as error:
        _fail(str(error), as_json, BAD_DATA)
    except TierstoreError as error:
        _fail(str(error), as_json, WRONG_CALL)
    except OSError as error:
        place = f"{error.filename}: " if error.filename else ""
        _fail(f"{place}{error.strerror} (errno {error.errno})", as_json, BAD_DATA)


def _fail(message: str, as_json: bool, code: int) -> None:
    if as_json:
        write_json({"error": message})
    sys.stderr.write(f"tierstore: {plain(message)}\n")
    raise typer.Exit(code)
