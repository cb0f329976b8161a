"""The command ``tierstore checkpoint``.

Known failures: each test states the wanted behaviour and fails today.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.commands import call_process
from tests.support.toy import Toy, make_run

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.xfail(
    strict=True, raises=subprocess.TimeoutExpired, reason="it waits 30 s for the lock"
)
def test_a_run_in_use_is_not_waited_for(tmp_path: Path) -> None:
    """Not for much longer than by a command that begins later and says it at once."""
    toy = Toy(tmp_path / "run")
    toy.step()
    toy.store.synchronize()
    command = [sys.executable, "-m", "tierstore"]
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
