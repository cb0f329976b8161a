"""``tierstore inspect``: show what a run or a checkpoint contains."""

from __future__ import annotations

import dataclasses
import shlex
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tierstore.tools.cli.arguments import JsonOption, note_interrupted_reshard, require_there
from tierstore.tools.cli.exit_codes import exit_codes
from tierstore.tools.cli.output import (
    cell,
    count,
    mark_line,
    plain,
    shape_text,
    table,
    write_json,
    write_lines,
)
from tierstore.tools.plan.wording import days_text, short_text
from tierstore.units import format_bytes

if TYPE_CHECKING:
    from tierstore.tools.inspect.folder import Listed
    from tierstore.tools.inspect.summary import ParameterSummary, Summary, TensorSummary


def inspect(
    path: Annotated[
        Path,
        typer.Argument(
            metavar="PATH", help="A run, a checkpoint of any system, or a folder of checkpoints."
        ),
    ],
    as_json: JsonOption = False,
) -> None:
    """Show what a run or a checkpoint contains.

    Reads manifests and metadata, not the data; works while the run is in use. Of a folder, lists
    the checkpoints, and what removing each of them frees.
    """
    with exit_codes(as_json):
        require_there(path)
        from tierstore.tools.inspect.folder import checkpoints_in
        from tierstore.tools.inspect.summary import summarize

        note_interrupted_reshard(path)
        found = checkpoints_in(path)
        if found:
            if as_json:
                rows = [dataclasses.asdict(one) for one in found]
                write_json({"path": str(path), "kind": "folder", "checkpoints": rows})
            else:
                write_lines(_checkpoint_table(found))
            return
        summary = summarize(path)
        if as_json:
            write_json(dataclasses.asdict(summary))
        else:
            write_lines(_summary_lines(summary))


def _summary_lines(summary: Summary) -> Iterator[str]:
    from tierstore.inspection.kinds import TIERSTORE_KINDS
    from tierstore.run.tagged_json import decode

    step = f"step {summary.step}" if summary.step is not None else "no committed step"
    if summary.epoch:
        step += f", epoch {summary.epoch}"
    has_step = summary.step is not None or summary.kind in ("run", "checkpoint")
    yield f"{plain(summary.path)}: {summary.kind}" + (f", {step}" if has_step else "")
    if summary.committed_at is not None:
        pace = summary.steps_per_hour
        yield f"committed {_ago(summary.committed_at)}" + (
            "" if pace is None else f", at {short_text(pace)} steps per hour"
        )
    if summary.run_id is not None:
        attempt = "" if summary.attempt is None else f", attempt {summary.attempt}"
        yield plain(f"run {summary.run_id}{attempt}")
    if summary.page_bytes is not None:
        ranks = count(summary.world_size or 1, "rank")
        pages = count(summary.pages, "page")
        yield f"{ranks}, {pages} of about {format_bytes(summary.page_bytes)}"
    yield f"{count(summary.files, 'file')}, {format_bytes(summary.file_bytes)}"
    if summary.shared_files:
        freed = format_bytes(summary.file_bytes - summary.shared_bytes)
        yield (
            f"removing it frees {freed}: {count(summary.shared_files, 'file')} "
            f"({format_bytes(summary.shared_bytes)}) also belong to the run or a checkpoint"
        )
    for directory, share in summary.directories.items():
        yield f"{plain(directory)}: {share:.0%} of the pages"
    if summary.marked_whole is not None:
        yield mark_line(summary.marked_whole)
    if summary.in_use_by is not None:
        yield f"in use by {plain(summary.in_use_by)}"
    for note in summary.notes:
        yield f"note: {plain(note)}"
    for sentence in summary.lost:
        yield f"a conversion does not carry: {plain(sentence)}"
    for number, group in enumerate(summary.hyperparameters):
        known = {key: decode(value) for key, value in group.items() if value is not None}
        values = ", ".join(f"{key}={cell(value)}" for key, value in known.items())
        yield f"group {number}: {plain(values)}"
    if summary.parameters:
        yield from _parameter_table(summary)
        totals = ", ".join(
            f"{state} {format_bytes(nbytes)}" for state, nbytes in summary.state_bytes.items()
        )
        yield f"{count(len(summary.parameters), 'parameter')}: {plain(totals)}"
    elif summary.tensors:
        yield from _tensor_table(summary)
    if summary.kind not in TIERSTORE_KINDS:
        source = shlex.quote(summary.path)
        yield "What to type next:"
        to = "RUN --to tierstore" if summary.hyperparameters else "DCP --to dcp --only model"
        yield plain(f"    tierstore convert {source} {to} --dry-run")
    if summary.tensors:
        nbytes = format_bytes(sum(tensor.nbytes for tensor in summary.tensors))
        tensors = count(len(summary.tensors), "tensor")
        yield f".metadata names {tensors} ({nbytes}) and {count(summary.objects, 'other value')}"


def _ago(time_s: float) -> str:
    """Return how long ago a time is: "12 min ago"."""
    age_s = max(0.0, time.time() - time_s)
    if age_s < 120:
        return f"{age_s:.0f} s ago"
    return f"{age_s / 60:.0f} min ago" if age_s < 7200 else f"{days_text(age_s / 86400)} ago"


def _size(nbytes: int | None) -> str:
    return "unknown" if nbytes is None else format_bytes(nbytes)


def _checkpoint_table(found: Sequence[Listed]) -> Iterator[str]:
    columns: dict[str, Callable[[Listed], object]] = {
        "checkpoint": lambda one: plain(one.name),
        "kind": lambda one: one.kind if one.in_use_by is None else f"{one.kind}, in use",
        "step": lambda one: "unknown" if one.step is None else one.step,
        "written": lambda one: _ago(one.written_at),
        "size": lambda one: _size(one.nbytes),
        "removing frees": lambda one: _size(one.freed_bytes),
        "marked as whole": lambda one: {None: "", True: "yes", False: "no"}[one.marked_whole],
    }
    right = ("step", "written", "size", "removing frees")
    return table(columns, found, right=right)


def _parameter_table(summary: Summary) -> Iterator[str]:
    columns: dict[str, Callable[[ParameterSummary], object]] = {
        "group": lambda parameter: "" if parameter.group is None else parameter.group,
        "parameter": lambda parameter: plain(parameter.name),
        "shape": lambda parameter: shape_text(parameter.shape),
        "dtype": lambda parameter: parameter.dtype,
        "states": lambda parameter: cell(", ".join(map(" ".join, parameter.states.items()))),
        "bytes": lambda parameter: format_bytes(parameter.nbytes),
    }
    return table(columns, summary.parameters, right=("group", "bytes"))


def _tensor_table(summary: Summary) -> Iterator[str]:
    columns: dict[str, Callable[[TensorSummary], object]] = {
        "key": lambda tensor: plain(tensor.key),
        "shape": lambda tensor: shape_text(tensor.shape),
        "dtype": lambda tensor: tensor.dtype,
        "chunks": lambda tensor: tensor.chunks,
        "bytes": lambda tensor: format_bytes(tensor.nbytes),
    }
    return table(columns, summary.tensors, right=("chunks", "bytes"))
