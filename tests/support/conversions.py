"""Conversions that must leave no trace, and the state of directories before and after."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def tree(directory: Path) -> dict[str, str]:
    """Path -> sha256 of all files below a directory; folders end with a slash."""
    found = {}
    for path in sorted(directory.rglob("*")):
        name = str(path.relative_to(directory))
        if path.is_file():
            found[name] = hashlib.sha256(path.read_bytes()).hexdigest()
        else:
            found[f"{name}/"] = ""
    return found


@contextmanager
def no_trace(directory: Path) -> Iterator[None]:
    """Check that a block leaves a directory as it was."""
    before = tree(directory)
    yield
    assert tree(directory) == before
