"""The command line as a whole: help, version, exit codes, terminals and pipes."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import typer.main

import tierstore
from tests.support.commands import call, call_process
from tests.support.toy import RANK
from tierstore.cli import app
from tierstore.inspection import verify

ROOT = Path(__file__).resolve().parents[2]
COMMANDS = sorted(typer.main.get_group(app).commands)


def test_version() -> None:
    assert call("--version") == (0, f"tierstore {tierstore.__version__}\n", "")


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help_and_a_section_of_the_docs(command: str) -> None:
    code, out, _ = call(command, "--help")
    assert code == 0
    assert "Options" in out
    assert f"\n## `tierstore {command} " in (ROOT / "docs/guide/commands.md").read_text()
    assert command in call("--help")[1]


def test_help_does_not_import_torch() -> None:
    """torch alone takes seconds to import."""
    program = "import sys, tierstore.cli; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=False).returncode == 0


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["verify"],
        ["verify", "a", "b"],
        ["verify", "a", "--all"],
        ["verify", "a", "--json", "--all"],
        ["inspect"],
        ["inspect", "--foo"],
        ["checkpoint", "a"],
        ["checkpoint", "a", "b", "c"],
        ["reticulate"],
        ["--foo"],
    ],
)
def test_wrong_arguments_are_2(arguments: list[str]) -> None:
    code, out, _ = call(*arguments)
    assert code == 2
    assert "--json" not in arguments or out == ""


@pytest.mark.parametrize("command", ["verify", "inspect"])
@pytest.mark.parametrize("as_json", [False, True])
def test_a_path_that_is_neither_run_nor_checkpoint_is_2(
    command: str, as_json: bool, run: Path, tmp_path: Path
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "empty", tmp_path / "file", tmp_path / "absent", run / RANK):
        code, out, err = call(command, path, *(["--json"] if as_json else []))
        assert code == 2
        assert err.startswith(f"tierstore: {path} ")
        assert "Traceback" not in err
        assert (json.loads(out)["error"] if as_json else out) == (
            err.removeprefix("tierstore: ").rstrip("\n") if as_json else ""
        )


def test_ctrl_c_is_130(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(verify, "verify", interrupted)
    code, out, err = call("verify", run)
    assert (code, out) == (130, "")
    assert "Traceback" not in err


def test_a_disk_that_fails_is_1(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(path: Any) -> list[str]:
        raise OSError(5, "Input/output error", path)

    monkeypatch.setattr(os, "listdir", failing)
    for command in ("verify", "inspect"):
        code, _, err = call(command, run)
        assert code == 1
        assert f"{run}: Input/output error (errno 5)" in err


def test_a_closed_pipe_is_not_an_error(run: Path) -> None:
    read, write = os.pipe()
    os.close(read)
    # An interpreter that ends writes what is left of the output, a forked process does not.
    command = [sys.executable, "-m", "tierstore.cli", "inspect", str(run)]
    done = subprocess.run(
        command, cwd=ROOT, stdout=write, stderr=subprocess.PIPE, text=True, check=False
    )
    os.close(write)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_terminal_shows_a_progress_bar(run: Path) -> None:
    ours, theirs = pty.openpty()
    done = call_process("verify", run, stderr=theirs)
    os.close(theirs)
    shown = b""
    while True:
        try:
            piece = os.read(ours, 1 << 16)
        except OSError:  # Linux reports the end of a terminal as EIO.
            break
        if not piece:
            break
        shown += piece
    os.close(ours)
    assert done.returncode == 0
    assert b"checked" in shown
    assert b"KiB" in shown


def test_names_with_terminal_codes_are_escaped(tmp_path: Path) -> None:
    key = "a\x1b[2Jb\rc[red]d\N{RIGHT-TO-LEFT OVERRIDE}"
    dcp.save({key: torch.zeros(2)}, checkpoint_id=tmp_path, no_dist=True)
    shown = "a\\x1b[2Jb\\rc[red]d\\u202e"
    assert shown in call("inspect", tmp_path)[1]
    assert json.loads(call("inspect", tmp_path, "--json")[1])["tensors"][0]["key"] == key
    data = tmp_path / "__0_0.distcp"
    data.write_bytes(bytes(data.stat().st_size))
    assert f"fault: {shown}: " in call("verify", tmp_path)[1]
