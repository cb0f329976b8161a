"""Tables of the reference that repeat the code: `python docs/tables.py` writes them to the pages.

A page has its table between two comments. tests/test_docs.py fails if a table is not up to date.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import tierstore
from muon.keys import KEYS, Key

REFERENCE = Path(__file__).resolve().parent / "reference"
BEGIN, END = "<!-- Written by docs/tables.py -->", "<!-- End of the table -->"


def code(value: Any) -> str:
    """Return a value of Python as Markdown."""
    return f"`{value}`" if isinstance(value, torch.dtype) else f"`{value!r}`"


def table(*rows: tuple[str, ...]) -> str:
    """Return a table of Markdown, given its rows with the names of the columns first."""
    names, *others = (f"| {' | '.join(cells)} |" for cells in rows)
    return "\n".join([names, f"|{'---|' * len(rows[0])}", *others])


def row_of(key: Key) -> tuple[str, ...]:
    """Return the row of a key of param groups."""
    groups = "all" if len(key.of) > 1 else {"muon": "Muon", "adamw": "AdamW"}[key.of[0]]
    defaults = dict.fromkeys(code(key.defaults[of]) for of in key.of if of in key.defaults)
    default = "" if key.name == "algorithm" else ", ".join(defaults)
    return f"`{key.name}`", groups, default, "yes" if key.form is not None else "", key.meaning


def keys() -> str:
    """Return the table of the keys of param groups."""
    rows = [row_of(key) for key in KEYS.values() if key.only is None]
    return table(("key", "groups", "default", "fixed", "meaning"), *rows)


def sections(docstring: str) -> dict[str, dict[str, str]]:
    """Return section -> argument -> meaning, given the docstring of a class."""
    found: dict[str, dict[str, str]] = {}
    for line in inspect.cleandoc(docstring).splitlines():
        if heading := re.fullmatch(r"(\w[\w ]*):", line):
            arguments = found.setdefault(heading[1], {})
        elif start := re.fullmatch(r" {4}(\w+): (.*)", line):
            name = start[1]
            arguments[name] = start[2]
        elif line.startswith(" " * 8):
            arguments[name] += f" {line.strip()}"
    return found


def default_of(parameter: inspect.Parameter) -> str:
    """Return the default of an argument as Markdown; nothing if the argument is required."""
    return "" if parameter.default is inspect.Parameter.empty else code(parameter.default)


def options() -> str:
    """Return the tables of the arguments of TierStore, one for each section of its docstring."""
    parameters = inspect.signature(tierstore.TierStore).parameters
    parts = []
    for section, arguments in sections(tierstore.TierStore.__doc__ or "").items():
        rows = [
            (f"`{name}`", default_of(parameters[name]), meaning.replace("``", "`"))
            for name, meaning in arguments.items()
            if name in parameters
        ]
        if rows:
            heading = [] if section == "Args" else [f"## {section}"]
            parts += [*heading, table(("argument", "default", "meaning"), *rows)]
    return "\n\n".join(parts)


PAGES: dict[str, Callable[[], str]] = {"param-groups.md": keys, "options.md": options}


def with_table(text: str, made: str) -> str:
    """Return the text of a page with another table."""
    before, found, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (found and end):
        raise ValueError(f"the page must have the lines {BEGIN!r} and {END!r}")
    return f"{before}{BEGIN}\n\n{made}\n\n{END}{after}"


def main() -> None:
    """Write all tables."""
    for name, make in PAGES.items():
        path = REFERENCE / name
        path.write_text(with_table(path.read_text(encoding="utf-8"), make()), encoding="utf-8")


if __name__ == "__main__":
    main()
