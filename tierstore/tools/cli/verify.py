"""``tierstore verify``: check a run or a checkpoint."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING

import typer

from tierstore.tools.cli.arguments import (
    JsonOption,
    RunOrCheckpoint,
    note_interrupted_reshard,
    require_there,
)
from tierstore.tools.cli.exit_codes import BAD_DATA, exit_codes
from tierstore.tools.cli.output import count, mark_line, plain, progress, write_json, write_lines
from tierstore.units import format_bytes

if TYPE_CHECKING:
    from tierstore.tools.inspect.verify import Report

_FAULTS_MAX = 20
_RUN_ADVICE = (
    "What to do: copy missing ranks into place. After damage, a restart goes back to an older "
    "commit if one is whole, and refuses damaged pages. If none is whole, begin a new run with "
    "restore(checkpoint=PATH) from the last checkpoint of this run that verifies."
)
_CHECKPOINT_ADVICE = (
    "What to do: copy the files named above again from where this checkpoint came from, or take "
    "an older checkpoint that verifies."
)


def verify(path: RunOrCheckpoint, as_json: JsonOption = False) -> None:
    """Check that a run or a checkpoint is whole.

    Reads every byte of the committed step and changes nothing. A run must not be in use.
    Exits with 1 if anything is not as it was written.
    """
    with exit_codes(as_json):
        require_there(path)
        from tierstore.tools.inspect import verify as verification

        note_interrupted_reshard(path)
        with progress("check") as on_progress:
            report = verification.verify(path, partial(on_progress, "check"))
        if as_json:
            write_json({**dataclasses.asdict(report), "good": report.good})
        else:
            write_lines(_report_lines(report))
        if not report.good:
            raise typer.Exit(BAD_DATA)


def _report_lines(report: Report) -> Iterator[str]:
    step = f", step {report.step}" if report.step is not None else ""
    checked = f"{count(report.files, 'file')}, {format_bytes(report.bytes_checked)} checked"
    verdict = "good" if report.good else count(len(report.faults), "fault")
    for fault in report.faults[:_FAULTS_MAX]:
        yield f"fault: {plain(fault.place)}: {plain(fault.what)}"
    if len(report.faults) > _FAULTS_MAX:
        yield f"... {len(report.faults) - _FAULTS_MAX} more; --json lists all"
    for note in report.notes:
        yield f"note: {plain(note)}"
    if report.marked_whole is not None:
        yield mark_line(report.marked_whole)
    yield f"{plain(report.path)}: {report.kind}{step}: {verdict} ({checked})"
    if not report.good:
        yield _RUN_ADVICE if report.kind == "run" else _CHECKPOINT_ADVICE
