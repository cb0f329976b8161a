"""The command line, and what the package says of itself.

Known failures: each test states the wanted behaviour and fails today.
"""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.support.commands import call_process
from tests.support.forked_programs import run_program
from tests.support.toy import Spec, Toy, make_run

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.xfail(strict=True, raises=AssertionError, reason="-h is no option")
@pytest.mark.parametrize("arguments", [["-h"], ["inspect", "-h"]])
def test_a_short_option_asks_for_help(arguments: list[str]) -> None:
    done = call_process(*arguments)
    assert done.returncode == 0
    assert "Usage" in done.stdout


@pytest.mark.xfail(strict=True, raises=AssertionError, reason="the package has no __main__")
def test_the_package_runs_as_a_module() -> None:
    done = run_program("tierstore", "--version")
    assert done.returncode == 0
    assert done.stdout.startswith("tierstore ")


@pytest.mark.xfail(strict=True, raises=AssertionError, reason="completion is turned off")
def test_help_names_completion() -> None:
    assert "completion" in call_process("--help").stdout


@pytest.mark.xfail(strict=True, raises=json.JSONDecodeError, reason="usage errors are plain text")
@pytest.mark.parametrize(
    "arguments", [["verify", "--json", "--nope", "."], ["verify", "--json"], ["inspect", "--json"]]
)
def test_a_call_that_is_not_understood_is_json_on_request(arguments: list[str]) -> None:
    done = call_process(*arguments)
    assert done.returncode == 2
    assert json.loads(done.stdout)["error"]


@pytest.mark.xfail(
    strict=True, raises=AssertionError, reason="a full output counts as damaged data"
)
@pytest.mark.parametrize("argument", ["--version", "inspect"])
def test_an_output_that_cannot_be_written_is_2(argument: str, tmp_path: Path) -> None:
    make_run(tmp_path)
    command = [sys.executable, "-m", "tierstore.cli", argument]
    command += [str(tmp_path)] if argument == "inspect" else []
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            command, cwd=ROOT, stdout=full, stderr=subprocess.PIPE, text=True, check=False
        )
    assert "Traceback" not in done.stderr
    assert done.returncode == 2


_LONG: Spec = (
    "model.layers.0.self_attention.query_projection.weight",
    (3, 4),
    torch.float32,
    {"average": torch.float32},
    False,
)


@pytest.mark.xfail(strict=True, raises=AssertionError, reason="columns are cut at any character")
def test_names_are_not_folded_in_mid_word_at_80_columns(tmp_path: Path) -> None:
    toy = Toy(tmp_path, [[_LONG]])
    toy.step()
    toy.store.close()
    ours, theirs = pty.openpty()
    try:
        call_process("inspect", tmp_path, stdout=theirs, environment={"COLUMNS": "80"})
    finally:
        os.close(theirs)
    shown = b""
    while piece := _read(ours):
        shown += piece
    os.close(ours)
    words = shown.decode().split()
    rest = "".join(words)
    for word in _LONG[0].split("."):
        assert word in rest  # It is shown at all.
        assert any(word in shown_word for shown_word in words), word


def _read(descriptor: int) -> bytes:
    try:
        return os.read(descriptor, 1 << 16)
    except OSError:  # How Linux tells the end of a terminal.
        return b""


@pytest.mark.xfail(
    strict=True, raises=subprocess.TimeoutExpired, reason="it waits 30 s for the lock"
)
def test_a_run_in_use_is_not_waited_for(tmp_path: Path) -> None:
    """Not for much longer than by a command that begins later and says it at once."""
    toy = Toy(tmp_path / "run")
    toy.step()
    toy.store.synchronize()
    command = [sys.executable, "-m", "tierstore.cli"]
    publishing = subprocess.Popen(
        [*command, "checkpoint", str(tmp_path / "run"), str(tmp_path / "out")],
        cwd=ROOT,
        stderr=subprocess.PIPE,
    )
    try:
        # It imports as much as the first, which has done so when it ends.
        verifying = subprocess.run(
            [*command, "verify", str(tmp_path / "run")],
            cwd=ROOT,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
        assert "in use by process" in verifying.stderr
        assert publishing.wait(timeout=3) == 2
    finally:
        publishing.kill()
        publishing.communicate()
        toy.store.close()


@pytest.mark.xfail(strict=True, raises=AssertionError, reason="it sounds as if all were good")
def test_a_published_checkpoint_is_said_not_to_be_verified(tmp_path: Path) -> None:
    make_run(tmp_path / "run")
    done = call_process("checkpoint", tmp_path / "run", tmp_path / "out")
    assert done.returncode == 0
    assert "not verified" in done.stdout + done.stderr
