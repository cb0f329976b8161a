"""Output of commands: results on stdout, a progress bar on stderr.

Functions import the modules that are slow to import, so that ``--help`` is printed at once.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import re
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TextIO, TypeVar

from tierstore.units import format_bytes

T = TypeVar("T")

_ROWS_MAX = 40
_CELL_MAX = 60
_GAP = "  "
_WORD = re.compile(r"[^ .]*[ .]+|[^ .]+")


class OutputError(Exception):
    """stdout or stderr cannot be written."""

    @classmethod
    def of(cls, stream: TextIO, error: OSError) -> OutputError:
        """Return the error of a stream, to which nothing more is written."""
        _discard(stream)
        name = error.filename or stream.name.strip("<>")
        return cls(f"{name} cannot be written: {error.strerror} (errno {error.errno})")


def put(stream: TextIO, text: str) -> None:
    """Write to stdout or stderr. A closed pipe (as by ``head``) is not an error.

    Raises:
        OutputError: the text cannot be written, for example to a full disk.
    """
    # A name may hold characters that the encoding lacks.
    encoding = stream.encoding or "utf-8"
    try:
        stream.write(text.encode(encoding, "backslashreplace").decode(encoding))
        stream.flush()
    except BrokenPipeError:
        _discard(stream)
    except OSError as error:
        raise OutputError.of(stream, error) from error


def _discard(stream: TextIO) -> None:
    """Let a stream write to nowhere: the interpreter flushes once more at its end, and fails."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def write(text: str) -> None:
    """Write to stdout; see put()."""
    put(sys.stdout, text)


def write_lines(lines: Iterable[str]) -> None:
    """Write lines to stdout, after all of them are made; see folded()."""
    write("".join(f"{part}\n" for line in lines for part in folded(line, sys.stdout)))


def folded(line: str, stream: TextIO, margin: str = "") -> list[str]:
    """Return a line as lines that fit the terminal, if the stream is one. Fold after spaces.

    A line that begins with a space or has two spaces in a row is code or a row of a table, and
    stays.

    Args:
        line: the line.
        stream: stdout or stderr.
        margin: spaces to put before each line.
    """
    width = shutil.get_terminal_size().columns - len(margin)
    if not stream.isatty() or len(line) <= width or line.startswith(" ") or _GAP in line:
        return [margin + line]
    parts = textwrap.wrap(
        line, width, subsequent_indent=_GAP, break_long_words=False, break_on_hyphens=False
    )
    return [margin + part for part in parts]


def write_json(body: Mapping[str, Any]) -> None:
    """Write one JSON object as a line to stdout."""
    write(json.dumps(body, default=str) + "\n")


def complain(message: str) -> None:
    """Write a message to stderr; see put()."""
    lines = folded(f"tierstore: {plain(message)}", sys.stderr)
    put(sys.stderr, "".join(f"{line}\n" for line in lines))


def mark_line(marked_whole: bool) -> str:
    """Return the line that says whether a checkpoint is marked as whole."""
    is_marked = "marked" if marked_whole else "not marked"
    return f"{is_marked} as whole by the run that published it"


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
) -> Iterator[str]:
    """Yield the lines of a table of the first 40 items, and the number of further items.

    On a terminal, the widest columns are folded to fit its width, but only after spaces and
    dots: a longer word makes the line longer.

    Args:
        columns: header of a column -> function from an item to the content of the cell.
        items: one item for each row.
        right: the headers of the columns that are aligned to the right, and never folded.
    """
    rows = [list(columns)]
    rows += [[str(content(item)) for content in columns.values()] for item in items[:_ROWS_MAX]]
    texts = list(zip(*rows, strict=True))
    widths = [max(map(len, column)) for column in texts]
    if sys.stdout.isatty():
        words = [map(str.rstrip, _WORD.findall(" ".join(column))) for column in texts]
        least = [max(map(len, column)) for column in words]
        foldable = [index for index, header in enumerate(columns) if header not in right]
        excess = sum(widths) + len(_GAP) * (len(widths) - 1) - shutil.get_terminal_size().columns
        while excess > 0 and (wide := [i for i in foldable if widths[i] > least[i]]):
            widths[max(wide, key=widths.__getitem__)] -= 1
            excess -= 1
    for row in rows:
        folded = [_fold(text, width) for text, width in zip(row, widths, strict=True)]
        for pieces in itertools.zip_longest(*folded, fillvalue=""):
            aligned = (
                piece.rjust(width) if header in right else piece.ljust(width)
                for header, piece, width in zip(columns, pieces, widths, strict=True)
            )
            yield _GAP.join(aligned).rstrip()
    if len(items) > _ROWS_MAX:
        yield f"... {len(items) - _ROWS_MAX} more; --json lists all"


def _fold(text: str, width: int) -> list[str]:
    """Return a text as lines that end after a space or a dot."""
    lines = [""]
    for word in _WORD.findall(text):
        if lines[-1] and len(lines[-1]) + len(word.rstrip()) > width:
            lines.append("")
        lines[-1] += word
    return [line.rstrip() for line in lines]


@contextmanager
def progress(*passes: str) -> Iterator[Callable[[str, int, int], None]]:
    """Show a bar on stderr for one pass after the other, if stderr is a terminal.

    Rate and time left are means of the whole pass so far: disks and caches work in bursts.

    Args:
        passes: the operations on the bytes in their order, for example "check". The first ones may
            not happen, and are not counted then.

    Yields:
        A function to call with the pass, the number of bytes done, and of all bytes.
    """
    from rich import progress as rich_progress
    from rich.console import Console

    def rate(task: rich_progress.Task) -> float:
        return task.completed / task.elapsed if task.elapsed else 0.0

    class Rate(rich_progress.ProgressColumn):
        def render(self, task: rich_progress.Task) -> str:
            return f"{format_bytes(int(rate(task)))}/s"

    class Left(rich_progress.ProgressColumn):
        def render(self, task: rich_progress.Task) -> str:
            if not task.total or not rate(task):
                return "time left unknown"
            left_s = (task.total - task.completed) / rate(task)
            return f"{timedelta(seconds=math.ceil(left_s))} left"

    bar = rich_progress.Progress(
        rich_progress.TextColumn("{task.description}"),
        rich_progress.BarColumn(),
        rich_progress.TaskProgressColumn(),
        rich_progress.DownloadColumn(binary_units=True),
        Rate(),
        Left(),
        console=Console(stderr=True),
        transient=True,
        disable=not sys.stderr.isatty(),
    )
    tasks: dict[str, rich_progress.TaskID] = {}

    def update(name: str, done: int, total: int) -> None:
        if name not in tasks:
            for task in tasks.values():
                bar.update(task, visible=False)
            first = passes.index(next(iter(tasks), name))
            several = f"{len(tasks) + 1} of {len(passes) - first}, " * (len(passes) - first > 1)
            tasks[name] = bar.add_task(f"{several}{name}", total=None)
        bar.update(tasks[name], completed=done, total=total)

    with bar:
        yield update
