"""Exit codes of commands: 0 good, 1 the data is bad, 2 the call is wrong or its output is lost."""

from __future__ import annotations

import contextlib
import io
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import takewhile
from typing import Any, NoReturn

import typer
from typer.core import TyperCommand, TyperGroup
from typing_extensions import override

from tierstore.errors import (
    CorruptionError,
    NotCarriedError,
    PeerFailed,
    StorageError,
    TierstoreError,
)
from tierstore.tools.cli.output import OutputError, complain, put, write_json

BAD_DATA, WRONG_CALL = 1, 2

# The base class of every error in arguments, for which typer exports no name.
_UsageError: Any = typer.BadParameter.__bases__[0]

_TYPES = {"int": "N", "float": "NUMBER", "str": "TEXT", "Path": "FILE"}


class Command(TyperCommand):
    """A command whose help writes SOURCE... DESTINATION and --memory TEXT.

    typer writes {SOURCE...}... <list[Path]> and --memory <str>.
    """

    @override
    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        return ["[OPTIONS]", *(argument.display_name_raw for argument in self._arguments())]

    @override
    def format_options(self, ctx: Any, formatter: Any) -> None:
        params: Any = self.get_params(ctx)
        for param in params:
            of = re.sub(r"list\[(\w+)\]", r"\1", param.bare_type())
            text = None if param in self._arguments() else param.metavar or _TYPES.get(of)
            param.display_type_rich = lambda ctx, text=text: text
        super().format_options(ctx, formatter)

    def _arguments(self) -> list[Any]:
        return [param for param in self.params if param.param_type_name == "argument"]


class Program(TyperGroup):
    """All commands, with the errors of arguments and of the output."""

    @override
    def main(self, args: Sequence[str] | None = None, *rest: Any, **options: Any) -> NoReturn:
        given = list(sys.argv[1:] if args is None else args)
        as_json = "--json" in takewhile(lambda argument: argument != "--", given)
        options["standalone_mode"] = False  # typer returns the exit code, and raises its errors.
        if sys.stderr is None:  # Closed. Else the next file to open would become stderr.
            sys.stderr = open(os.devnull, "w")  # noqa: SIM115 - for the rest of the process.
        try:
            if sys.stdout is None:
                raise OutputError("stdout is closed")
            sys.exit(_exit_code(partial(super().main, given, *rest, **options), as_json))
        except OutputError as error:
            with contextlib.suppress(OutputError):  # Nothing can be written, stderr included.
                complain(str(error))
            sys.exit(WRONG_CALL)

    @override
    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if "" in args:  # As a path, it would mean the current directory.
            raise typer.BadParameter("an argument is empty, name a path", ctx)
        return super().parse_args(ctx, args)


def _exit_code(run: Callable[[], Any], as_json: bool) -> Any:
    """Return the exit code of a call; report arguments that typer refuses."""
    try:
        return run()
    except _UsageError as error:
        usage = io.StringIO()
        error.show(usage)
        put(sys.stderr, usage.getvalue())
        if as_json:
            write_json({"error": error.format_message()})
        return WRONG_CALL
    except SystemExit as end:  # Of shell completion, or of help for a reader that has left.
        return 0 if isinstance(end.__context__, BrokenPipeError) else end.code
    except OSError as error:  # Of help: a command reports its own.
        raise OutputError.of(sys.stdout, error) from error


@contextmanager
def exit_codes(as_json: bool) -> Iterator[None]:
    """Turn the errors of a command into a message and an exit code."""
    try:
        yield
    except (CorruptionError, StorageError, PeerFailed, NotCarriedError) as error:
        fail(str(error), as_json, BAD_DATA)
    except TierstoreError as error:
        fail(str(error), as_json, WRONG_CALL)
    except OSError as error:
        place = f"{error.filename}: " if error.filename else ""
        fail(f"{place}{error.strerror} (errno {error.errno})", as_json, BAD_DATA)
    except (typer.Exit, OutputError, _UsageError):
        raise
    except Exception as error:  # A fault of this program: its traceback follows.
        if as_json:
            write_json({"error": f"{type(error).__name__}: {error}"})
        raise


def fail(message: str, as_json: bool, code: int) -> NoReturn:
    """Report an error and end the command with an exit code."""
    if as_json:
        write_json({"error": message})
    complain(message)
    raise typer.Exit(code)
