"""Tests with the systems whose checkpoints are converted: `make test-peers` has them installed."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from tests.peers.deepspeed_cases import CASES, run_deepspeed


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    absent = importlib.util.find_spec("deepspeed") is None
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.peers)
            item.add_marker(pytest.mark.timeout(1800))
            if absent:
                item.add_marker(pytest.mark.skip("DeepSpeed is not installed: `make test-peers`"))


@pytest.fixture(scope="session")
def deepspeed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Name of a case -> its folder, written by DeepSpeed."""
    return run_deepspeed(tmp_path_factory.mktemp("deepspeed"), CASES)
