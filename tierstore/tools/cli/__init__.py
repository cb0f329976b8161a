"""The command line: one module for each command, assembled into one typer app.

To add a command, write a module with a function of the command's name, and register the function
with ``app.command(cls=Command)``.
"""

from __future__ import annotations

import importlib.metadata
from typing import Annotated

import typer

from tierstore.tools.cli import checkpoint, convert, doctor, fit, inspect, plan, probe, verify
from tierstore.tools.cli.exit_codes import Command, Program
from tierstore.tools.cli.output import write

app = typer.Typer(
    cls=Program,
    context_settings={"help_option_names": ["-h", "--help"]},
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Optimizer state in pages: inspect, verify, publish and convert runs and checkpoints, "
    "measure machines, plan runs, and say what works on a machine.",
)
app.command(cls=Command)(inspect.inspect)
app.command(cls=Command)(verify.verify)
app.command(cls=Command)(checkpoint.checkpoint)
app.command(cls=Command)(convert.convert)
app.command(cls=Command)(probe.probe)
app.command(cls=Command)(fit.fit)
app.command(cls=Command)(plan.plan)
app.command(cls=Command)(doctor.doctor)


def _print_version(wanted: bool) -> None:
    if wanted:
        write(f"tierstore {importlib.metadata.version('tierstore')}\n")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", is_eager=True, callback=_print_version, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    """Options that stand before a command."""
