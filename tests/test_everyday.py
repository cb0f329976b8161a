"""The page of everyday tasks: its programs print what it shows."""

from __future__ import annotations

import logging
import re
import textwrap
from pathlib import Path

import pytest
from typer.testing import CliRunner

import tierstore
from tests.test_doc_examples import Names, committed, of_everyday, usual
from tests.test_docs import FENCE, ROOT
from tierstore.tools.cli import app

PAGE = ROOT / "docs/guide/everyday.md"


def section(heading: str) -> tuple[list[str], list[str]]:
    """Return the programs of a section, and its blocks without a language."""
    text = PAGE.read_text(encoding="utf-8").split(f"\n## {heading}\n")[1].split("\n## ")[0]
    blocks = [(language, textwrap.dedent(block)) for _, language, block in FENCE.findall(text)]
    programs = [block.replace('"/nvme', '"nvme') for kind, block in blocks if kind == "python"]
    return programs, [block for kind, block in blocks if not kind]


def run(program: str, names: Names) -> None:
    exec(compile(program, PAGE.name, "exec"), names)


@pytest.fixture(autouse=True)
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_notebook_cells_run_twice(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cells, (printed, refusal) = section("Run a notebook cell twice")
    names: Names = {}
    for cell in [*cells, *cells]:
        run(cell, names)
    assert capsys.readouterr().out == printed
    with pytest.raises(tierstore.RunLockedError) as caught:
        run(cells[0].replace("store.close()", "pass"), names)
    assert str(caught.value).replace(f"{directory}/", "/") == refusal.strip()
    names["store"].close()


def test_the_log(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (program,), (shown,) = section("See the log")
    root, level = logging.getLogger(), logging.getLogger().level
    handlers, root.handlers = root.handlers, []  # pytest has configured logging.
    try:
        run(program, {})
        tierstore.TierStore("nvme/run1").close()
    finally:
        root.handlers = handlers
        root.setLevel(level)
    found = capsys.readouterr().err.replace(f"{directory}/", "/")

    def without_engine(text: str) -> str:
        return re.sub(r"(?:INFO|WARNING)(: .* engine) .*", r"\1", text)

    assert without_engine(found) == without_engine(shown)


def test_weights_are_exported() -> None:
    _, (command, shown) = section("Export weights")
    committed(usual())
    arguments = command.replace("/nvme", "nvme").split()[1:]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    assert Path("weights/model.safetensors").is_file()
    for line in shown.splitlines():
        assert line.split(":")[0] in done.output


def test_a_frozen_layer_stays_over_a_resume(capsys: pytest.CaptureFixture[str]) -> None:
    (program,), shown = section("Freeze and unfreeze layers")
    for printed in shown:
        run(program, of_everyday())
        assert capsys.readouterr().out == printed
