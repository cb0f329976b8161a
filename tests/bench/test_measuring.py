from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from tests.support.bench_runs import BENCH


def test_a_scratch_folder_has_an_absolute_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(BENCH))
    measuring = importlib.import_module("measuring")
    monkeypatch.chdir(tmp_path)
    with measuring.scratch_folder(Path(".")) as scratch:
        assert scratch.is_absolute()
        assert scratch.parent == tmp_path
    assert list(tmp_path.iterdir()) == []
