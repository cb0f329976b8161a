"""``tierstore doctor``: say what works on a machine, and how to mend what does not."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tierstore.tools.cli.arguments import JsonOption
from tierstore.tools.cli.exit_codes import BAD_DATA, exit_codes
from tierstore.tools.cli.output import plain, write_json, write_lines

if TYPE_CHECKING:
    from tierstore.tools.probe.doctor import Finding


def doctor(
    directories: Annotated[
        list[Path] | None,
        typer.Argument(metavar="[DIR...]", help="Existing directories that runs would use."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Say what works here for runs, and how to mend what does not.

    Looks at packages, memory, GPU and directories; writes 4 KiB to each directory and removes them.
    Exits with 1 if runs do not work.
    """
    with exit_codes(as_json):
        from tierstore.tools.probe.doctor import Health, examine

        found = examine(directories or [])
        if as_json:
            findings = [{**dataclasses.asdict(one), "health": one.health.value} for one in found]
            write_json({"findings": findings})
        else:
            write_lines(_lines(found))
        if any(one.health is Health.BAD for one in found):
            raise typer.Exit(BAD_DATA)


def _lines(found: Sequence[Finding]) -> Iterator[str]:
    for one in found:
        yield f"{one.health.value}  {plain(one.subject)}: {plain(one.text)}"
        if one.remedy is not None:
            yield f"      to do: {plain(one.remedy)}"
