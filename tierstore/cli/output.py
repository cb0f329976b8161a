"""Output of commands: results on stdout, a progress bar on stderr.

Functions import the modules that are slow to import, so that ``--help`` is printed at once.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from rich.console import RenderableType

T = TypeVar("T")

_ROWS_MAX = 40
_WIDTH_PIPED = 160
_CELL_MAX = 60


def write_json(body: Mapping[str, Any]) -> None:
    """Write one JSON object as a line to stdout."""
    write(json.dumps(body, default=str) + "\n")


def write(text: str) -> None:
    """Write to stdout. A closed stdout (as by ``head``) is not an error."""
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:  # Else the interpreter would flush once more at its end, and fail.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def print_parts(parts: Iterator[RenderableType]) -> None:
    """Write lines and tables to stdout."""
    from rich.console import Console

    # A pipe has no width, and rich's default one would fold most lines.
    width = None if sys.stdout.isatty() else _WIDTH_PIPED
    console = Console(width=width, highlight=False, markup=False, emoji=False)
    with console.capture() as captured:
        for part in parts:
            console.print(part, soft_wrap=isinstance(part, str))
    write(captured.get())


def plain(text: str) -> str:
    """Return a text with unprintable characters escaped: a name may hold terminal codes."""
    return "".join(
        character if character.isprintable() else repr(character)[1:-1] for character in text
    )


def cell(value: object) -> str:
    """Return a value as text of at most 60 characters."""
    text = plain(str(value))
    return text if len(text) <= _CELL_MAX else f"{text[: _CELL_MAX - 3]}..."


def count(number: int, noun: str) -> str:
    """Return a number and a noun, in the plural unless the number is 1."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def shape_text(shape: Sequence[int]) -> str:
    """Return a shape as "5x7"."""
    return "x".join(map(str, shape)) or "scalar"


def table(
    columns: Mapping[str, Callable[[T], object]], items: Sequence[T], right: Sequence[str]
) -> RenderableType:
    """Return a table of the first 40 items, with the number of further items below it.

    Args:
        columns: header of a column -> function from an item to the content of the cell.
        items: one item for each row.
        right: the headers of the columns that are aligned to the right.
    """
    from rich.table import Table
    from rich.text import Text

    shown = Table(box=None, pad_edge=False)
    for header in columns:
        shown.add_column(header, justify="right" if header in right else "left", overflow="fold")
    for item in items[:_ROWS_MAX]:
        shown.add_row(*(Text(str(content(item))) for content in columns.values()))
    if len(items) > _ROWS_MAX:
        shown.caption = f"... {len(items) - _ROWS_MAX} more; --json lists all"
    return shown


@contextmanager
def progress(verb: str) -> Iterator[Callable[[int, int], None]]:
    """Show a bar on stderr for the length of a block, if stderr is a terminal.

    Args:
        verb: the operation on the bytes, for example "checked".

    Yields:
        A function to call with the number of bytes done and of all bytes.
    """
    from rich import progress as rich_progress
    from rich.console import Console

    bar = rich_progress.Progress(
        *rich_progress.Progress.get_default_columns(),
        rich_progress.DownloadColumn(binary_units=True),
        rich_progress.TransferSpeedColumn(),
        console=Console(stderr=True),
        transient=True,
        disable=not sys.stderr.isatty(),
    )
    task = bar.add_task(verb, total=None)
    with bar:
        yield lambda done, total: bar.update(task, completed=done, total=total)
