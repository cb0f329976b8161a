"""``tierstore checkpoint``: publish a stopped run."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from tierstore.tools.cli.arguments import JsonOption, require_there
from tierstore.tools.cli.exit_codes import exit_codes
from tierstore.tools.cli.output import plain, progress, write_json, write_lines
from tierstore.units import format_bytes


def checkpoint(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The directory of a stopped run.")],
    out: Annotated[
        Path, typer.Argument(metavar="OUT", help="The checkpoint: an absent or empty directory.")
    ],
    verify: Annotated[
        bool, typer.Option("--verify", help="Read every page first; publish nothing if damaged.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Publish the committed step of a stopped run as a checkpoint.

    torch.distributed.checkpoint loads it. On the filesystem of the run, pages are linked
    and take no further space; on another filesystem they are copied.
    """
    with exit_codes(as_json):
        require_there(run)
        from tierstore.checkpoint.publish_stopped import publish_run

        with progress(*["verify"] * verify, "copy") as on_progress:
            publication = publish_run(run, out, verify=verify, on_progress=on_progress)
        if as_json:
            fields = ("path", "step", "bytes_total", "bytes_copied", "bytes_linked")
            found = {name: getattr(publication, name) for name in fields}
            write_json({**found, "verified": verify})
            return
        nbytes = format_bytes(publication.bytes_total)
        how = "linked, they take no further space"
        if publication.bytes_copied:
            linked = publication.bytes_linked
            how = f"copied, {format_bytes(linked)} linked" if linked else "copied"
        published = f"{out}: step {publication.step}, {nbytes} of pages {how}"
        verified = (
            "verified: every page was read before it was published"
            if verify
            else f"not verified: tierstore verify {shlex.quote(str(out))} reads every byte"
        )
        write_lines([plain(published), plain(verified)])
