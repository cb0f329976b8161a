"""The command line: one module for each command, assembled into one typer app.

To add a command, write a module with a function of the command's name, and register the function
with ``app.command()``.
"""

from __future__ import annotations

import importlib.metadata
from typing import Annotated

import typer

from tierstore.tools.cli import checkpoint, convert, doctor, fit, inspect, plan, probe, verify
from tierstore.tools.cli.exit_codes import Program
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
app.command()(inspect.inspect)
app.command()(verify.verify)
app.command()(checkpoint.checkpoint)
app.command()(convert.convert)
app.command()(probe.probe)
app.command()(fit.fit)
app.command()(plan.plan)
app.command()(doctor.doctor)


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
