"""The commands of tierstore: what is in a run or a checkpoint, is it whole, publish it.

Each exits with 0 if all is good, 1 if the data is not, 2 if the call was wrong. Results go
to stdout, everything else to stderr. Modules that need torch are imported by the commands
that need them, so that help comes at once.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tierstore.errors import CorruptionError, PeerFailed, StorageError, TierstoreError
from tierstore.units import format_bytes

if TYPE_CHECKING:
    from rich.console import RenderableType

    from tierstore.inspection.reader import Report
    from tierstore.inspection.summary import Summary

_BAD_DATA, _WRONG_CALL = 1, 2
_ROWS_MAX = 40
_FAULTS_MAX = 20
_WIDTH_PIPED = 160
_CELL_MAX = 60

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Optimizer state in pages: look into runs and checkpoints, check and publish them.",
)

_Place = Annotated[Path, typer.Argument(metavar="PATH", help="A run directory or a checkpoint.")]
_AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object to stdout.")]


def _print_version(wanted: bool) -> None:
    if wanted:
        _write(f"tierstore {importlib.metadata.version('tierstore')}\n")
        raise typer.Exit


@app.callback()
def _tierstore(
    version: Annotated[
        bool,
        typer.Option("--version", is_eager=True, callback=_print_version, help="Print it, exit."),
    ] = False,
) -> None:
    """Nothing to do before a command."""


@app.command()
def inspect(path: _Place, as_json: _AsJson = False) -> None:
    """Say what is in a run or a checkpoint.

    Reads manifests and .metadata, no pages; works while the run is in use.
    """
    with _exit_codes(as_json):
        from tierstore.inspection.summary import summarize

        _tell_of_reshard(path)
        summary = summarize(path)
        if as_json:
            _write_json(dataclasses.asdict(summary))
        else:
            _print(*_describe_summary(summary))


@app.command()
def verify(path: _Place, as_json: _AsJson = False) -> None:
    """Check that a run or a checkpoint is whole.

    Reads every byte of the committed step and changes nothing. A run must not be in use.
    Exits with 1 if anything is not as it was written.
    """
    with _exit_codes(as_json):
        from tierstore.inspection import verify as verifying

        _tell_of_reshard(path)
        with _progress("checked") as on_progress:
            report = verifying.verify(path, on_progress)
        if as_json:
            _write_json({**dataclasses.asdict(report), "good": report.good})
        else:
            _print(*_describe_report(report))
        if not report.good:
            raise typer.Exit(_BAD_DATA)


@app.command()
def checkpoint(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The directory of a stopped run.")],
    out: Annotated[
        Path, typer.Argument(metavar="OUT", help="The checkpoint: an absent or empty directory.")
    ],
    as_json: _AsJson = False,
) -> None:
    """Publish the committed step of a stopped run as a checkpoint.

    torch.distributed.checkpoint loads it. On the filesystem of the run, pages are linked
    and take no further space; on another one they are copied.
    """
    with _exit_codes(as_json):
        from tierstore.checkpoint.publish_stopped import publish_run

        _tell_of_reshard(run)
        with _progress("copied") as on_progress:
            publication = publish_run(run, out, on_progress=on_progress)
            publication.wait()
        if as_json:
            fields = ("path", "step", "bytes_total", "bytes_copied", "bytes_linked")
            _write_json({name: getattr(publication, name) for name in fields})
        else:
            nbytes = format_bytes(publication.bytes_total)
            how = "linked, they take no further space"
            if publication.bytes_copied:
                linked = publication.bytes_linked
                how = f"copied, {format_bytes(linked)} linked" if linked else "copied"
            _write(_plain(f"{out}: step {publication.step}, {nbytes} of pages {how}") + "\n")


# ------------------------------------------------------------------------ how a call ends


@contextmanager
def _exit_codes(as_json: bool) -> Iterator[None]:
    """Turn what a command raises into a message and an exit code."""
    try:
        yield
    except (CorruptionError, StorageError, PeerFailed) as error:
        _fail(str(error), as_json, _BAD_DATA)
    except TierstoreError as error:
        _fail(str(error), as_json, _WRONG_CALL)
    except OSError as error:
        place = f"{error.filename}: " if error.filename else ""
        _fail(f"{place}{error.strerror} (errno {error.errno})", as_json, _BAD_DATA)


def _fail(message: str, as_json: bool, code: int) -> None:
    if as_json:
        _write_json({"error": message})
    sys.stderr.write(f"tierstore: {_plain(message)}\n")
    raise typer.Exit(code)


@contextmanager
def _progress(what: str) -> Iterator[Callable[[int, int], None]]:
    """Show a bar on stderr, where somebody sees it, for the length of a block."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    progress = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
        disable=not sys.stderr.isatty(),
    )
    task = progress.add_task(what, total=None)
    with progress:
        yield lambda done, total: progress.update(task, completed=done, total=total)


def _tell_of_reshard(run: Path) -> None:
    """Say on stderr where a run is that was taken apart for other ranks."""
    from tierstore.inspection.reader import Reader
    from tierstore.inspection.run_reader import newest_commit, read_ranks
    from tierstore.run.file_names import RESHARDED_NAME

    if (run / RESHARDED_NAME).exists() and newest_commit(read_ranks(Reader(run))) is None:
        sys.stderr.write(
            f"tierstore: {_plain(str(run))} was about to go on with another number of ranks: it is "
            f"in the checkpoint {RESHARDED_NAME} in it. Open it with resume=True and reshard=True "
            "to go on.\n"
        )


# ------------------------------------------------------------------------ what is printed


def _write_json(body: Mapping[str, Any]) -> None:
    _write(json.dumps(body, default=str) + "\n")


def _write(text: str) -> None:
    """Write to stdout. Who closed it, as ``head`` does, has read enough."""
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _print(*parts: RenderableType) -> None:
    from rich.console import Console

    # A pipe has no width of its own, and the default one would fold most lines.
    width = None if sys.stdout.isatty() else _WIDTH_PIPED
    console = Console(width=width, highlight=False, markup=False, emoji=False)
    with console.capture() as captured:
        for part in parts:
            console.print(part, soft_wrap=isinstance(part, str))
    _write(captured.get())


def _plain(text: str) -> str:
    """Return a text whose every character shows: names may hold what moves a cursor."""
    return "".join(
        character if character.isprintable() else repr(character)[1:-1] for character in text
    )


def _cell(value: object) -> str:
    text = _plain(str(value))
    return text if len(text) <= _CELL_MAX else f"{text[: _CELL_MAX - 3]}..."


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _describe_report(report: Report) -> Iterator[RenderableType]:
    step = f", step {report.step}" if report.step is not None else ""
    checked = f"{_count(report.files, 'file')}, {format_bytes(report.bytes_checked)} checked"
    verdict = "good" if report.good else _count(len(report.faults), "fault")
    for fault in report.faults[:_FAULTS_MAX]:
        yield f"fault: {_plain(fault.place)}: {_plain(fault.what)}"
    if len(report.faults) > _FAULTS_MAX:
        yield f"... {len(report.faults) - _FAULTS_MAX} more; --json lists all"
    for note in report.notes:
        yield f"note: {_plain(note)}"
    yield f"{_plain(report.path)}: {report.kind}{step}: {verdict} ({checked})"
    if not report.good and report.kind == "run":
        yield (
            "What to do: a restart goes back to a commit that is whole, if one is, and refuses "
            "damaged pages. Else begin a new run with restore(checkpoint=PATH) from the last "
            "checkpoint of it that verifies."
        )
    elif not report.good:
        yield (
            "What to do: copy the files named above again from where this checkpoint came from, "
            "or take an older checkpoint that verifies."
        )


def _describe_summary(summary: Summary) -> Iterator[RenderableType]:
    step = f"step {summary.step}" if summary.step is not None else "no committed step"
    yield f"{_plain(summary.path)}: {summary.kind}" + (
        "" if summary.kind == "plain checkpoint" else f", {step}"
    )
    if summary.run_id is not None:
        yield f"run {_plain(summary.run_id)}, attempt {_plain(str(summary.attempt))}"
    if summary.page_bytes is not None:
        ranks = _count(summary.world_size or 1, "rank")
        pages = _count(summary.pages, "page")
        yield f"{ranks}, {pages} of about {format_bytes(summary.page_bytes)}"
    yield f"{_count(summary.files, 'file')}, {format_bytes(summary.file_bytes)}"
    if summary.shared_files:
        yield (
            f"{summary.shared_files} of these files ({format_bytes(summary.shared_bytes)}) have "
            "another name, in the run or a checkpoint: removing this one frees the rest only"
        )
    for directory, share in summary.directories.items():
        yield f"{_plain(directory)}: dealt {share:.0%} of the pages"
    if summary.in_use_by is not None:
        yield f"in use by {_plain(summary.in_use_by)}"
    for note in summary.notes:
        yield f"note: {_plain(note)}"
    for number, group in enumerate(summary.hyperparameters):
        values = ", ".join(f"{key}={_hyperparameter(value)}" for key, value in group.items())
        yield f"group {number}: {_plain(values)}"
    if summary.parameters:
        yield _parameter_table(summary)
        totals = ", ".join(
            f"{state} {format_bytes(nbytes)}" for state, nbytes in summary.state_bytes.items()
        )
        yield f"{_count(len(summary.parameters), 'parameter')}: {_plain(totals)}"
    if summary.tensors and not summary.parameters:
        yield _tensor_table(summary)
    if summary.tensors:
        nbytes = format_bytes(sum(tensor.nbytes for tensor in summary.tensors))
        tensors = _count(len(summary.tensors), "tensor")
        yield f".metadata names {tensors} ({nbytes}) and {_count(summary.objects, 'other value')}"


def _hyperparameter(value: object) -> str:
    """Return a tagged value in a few characters."""
    if isinstance(value, dict) and value.keys() == {"$tuple"}:
        value = tuple(value["$tuple"])
    return _cell(value)


def _parameter_table(summary: Summary) -> RenderableType:
    rows = [
        (
            str(parameter.group),
            _plain(parameter.name),
            "x".join(map(str, parameter.shape)) or "scalar",
            parameter.dtype,
            _cell(", ".join(f"{name} {dtype}" for name, dtype in parameter.states.items())),
            format_bytes(parameter.nbytes),
        )
        for parameter in summary.parameters
    ]
    return _table(("group", "parameter", "shape", "dtype", "states", "bytes"), rows)


def _tensor_table(summary: Summary) -> RenderableType:
    rows = [
        (
            _plain(tensor.key),
            "x".join(map(str, tensor.shape)) or "scalar",
            tensor.dtype,
            str(tensor.chunks),
            format_bytes(tensor.nbytes),
        )
        for tensor in summary.tensors
    ]
    return _table(("key", "shape", "dtype", "chunks", "bytes"), rows)


def _table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> RenderableType:
    """Return a table of the first rows, and how many more there are."""
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False)
    for header in headers:
        right = header in ("group", "chunks", "bytes")
        table.add_column(header, justify="right" if right else "left", overflow="fold")
    for row in rows[:_ROWS_MAX]:
        table.add_row(*map(Text, row))
    if len(rows) > _ROWS_MAX:
        table.caption = f"... {len(rows) - _ROWS_MAX} more; --json lists all"
    return table


if __name__ == "__main__":
    app()
