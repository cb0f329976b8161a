"""``tierstore inspect``: show what a run or a checkpoint contains."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from tierstore.tools.cli.arguments import JsonOption, RunOrCheckpoint, note_interrupted_reshard
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
from tierstore.units import format_bytes

if TYPE_CHECKING:
    from tierstore.tools.inspect.summary import ParameterSummary, Summary, TensorSummary


def inspect(path: RunOrCheckpoint, as_json: JsonOption = False) -> None:
    """Show what a run or a checkpoint contains.

    Reads manifests and .metadata, no pages; works while the run is in use.
    """
    with exit_codes(as_json):
        from tierstore.tools.inspect.summary import summarize

        note_interrupted_reshard(path)
        summary = summarize(path)
        if as_json:
            write_json(dataclasses.asdict(summary))
        else:
            write_lines(_summary_lines(summary))


def _summary_lines(summary: Summary) -> Iterator[str]:
    step = f"step {summary.step}" if summary.step is not None else "no committed step"
    if summary.epoch:
        step += f", epoch {summary.epoch}"
    yield f"{plain(summary.path)}: {summary.kind}" + (
        "" if summary.kind == "plain checkpoint" else f", {step}"
    )
    if summary.run_id is not None:
        yield f"run {plain(summary.run_id)}, attempt {plain(str(summary.attempt))}"
    if summary.page_bytes is not None:
        ranks = count(summary.world_size or 1, "rank")
        pages = count(summary.pages, "page")
        yield f"{ranks}, {pages} of about {format_bytes(summary.page_bytes)}"
    yield f"{count(summary.files, 'file')}, {format_bytes(summary.file_bytes)}"
    if summary.shared_files:
        yield (
            f"{summary.shared_files} of these files ({format_bytes(summary.shared_bytes)}) have "
            "another name, in the run or a checkpoint: removing this one frees the rest only"
        )
    for directory, share in summary.directories.items():
        yield f"{plain(directory)}: {share:.0%} of the pages"
    if summary.marked_whole is not None:
        yield mark_line(summary.marked_whole)
    if summary.in_use_by is not None:
        yield f"in use by {plain(summary.in_use_by)}"
    for note in summary.notes:
        yield f"note: {plain(note)}"
    for number, group in enumerate(summary.hyperparameters):
        values = ", ".join(f"{key}={_hyperparameter(value)}" for key, value in group.items())
        yield f"group {number}: {plain(values)}"
    if summary.parameters:
        yield from _parameter_table(summary)
        totals = ", ".join(
            f"{state} {format_bytes(nbytes)}" for state, nbytes in summary.state_bytes.items()
        )
        yield f"{count(len(summary.parameters), 'parameter')}: {plain(totals)}"
    elif summary.tensors:
        yield from _tensor_table(summary)
    if summary.tensors:
        nbytes = format_bytes(sum(tensor.nbytes for tensor in summary.tensors))
        tensors = count(len(summary.tensors), "tensor")
        yield f".metadata names {tensors} ({nbytes}) and {count(summary.objects, 'other value')}"


def _hyperparameter(value: object) -> str:
    """Return a tagged value in at most 60 characters."""
    if isinstance(value, dict) and value.keys() == {"$tuple"}:
        value = tuple(value["$tuple"])
    return cell(value)


def _parameter_table(summary: Summary) -> Iterator[str]:
    columns: dict[str, Callable[[ParameterSummary], object]] = {
        "group": lambda parameter: parameter.group,
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
