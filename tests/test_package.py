"""The package as a module: its names, and what its import costs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import tierstore

ROOT = Path(__file__).resolve().parents[1]
NAMES = "import tierstore; print(*dir(tierstore))"
HELP = "import pydoc, tierstore; print(pydoc.plain(pydoc.render_doc(tierstore)))"
IMPORT = "import sys, tierstore; dir(tierstore); print('torch' in sys.modules)"


def output_of(program: str) -> str:
    """Return the output of a new interpreter, in which no name was used before."""
    command = [sys.executable, "-c", program]
    return subprocess.run(command, cwd=ROOT, check=True, text=True, stdout=subprocess.PIPE).stdout


def test_dir_lists_the_public_names() -> None:
    names = output_of(NAMES).split()
    assert set(tierstore.__all__) <= set(names)
    assert names == sorted(set(names))


def test_help_describes_the_public_names() -> None:
    text = output_of(HELP)
    for name in set(tierstore.__all__) - {"pages"}:
        assert f"class {name}(" in text or f"{name}(" in text, name


def test_neither_the_import_nor_dir_imports_torch() -> None:
    assert output_of(IMPORT) == "False\n"


def test_other_names_are_refused() -> None:
    with pytest.raises(AttributeError, match="no attribute 'absent'"):
        tierstore.absent  # noqa: B018
