"""Interrupts at random times: the next call works, or is refused and restore() works."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.long
def test_the_next_call_works(tmp_path: Path) -> None:
    count = 500
    ended = subprocess.run(
        [sys.executable, "-m", "tests.support.random_interrupts", str(tmp_path), "7", str(count)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=30 + 2 * count,
    )
    assert ended.returncode == 0, ended.stderr
    interrupted = re.findall(r"(\d+)  \w+: interrupted", ended.stdout)
    assert sum(map(int, interrupted)) > count / 2
