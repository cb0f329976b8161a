"""Tests with the systems whose checkpoints are converted: `make test-peers` has them installed."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from tests.peers import deepspeed_cases, huggingface_cases, torch_checkpointing_cases

PACKAGES = (
    *("accelerate", "deepspeed", "diffusers", "lightning", "torch_checkpointing", "torchtitan"),
    *("peft", "transformers", "trl"),
)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    absent = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    if absent and config.option.markexpr == "peers":
        raise pytest.UsageError(f"{absent} not installed, which `make test-peers` installs")
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.peers)
            item.add_marker(pytest.mark.timeout(1800))
            if absent:
                item.add_marker(pytest.mark.skip(f"{absent} not installed: `make test-peers`"))


@pytest.fixture(scope="session")
def deepspeed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Name of a case -> its folder, written by DeepSpeed."""
    return deepspeed_cases.run_deepspeed(
        tmp_path_factory.mktemp("deepspeed"), deepspeed_cases.CASES
    )


@pytest.fixture(scope="session")
def huggingface(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Name of a case -> its folder, written by Trainer or accelerate."""
    return huggingface_cases.run_huggingface(
        tmp_path_factory.mktemp("huggingface"), huggingface_cases.CASES
    )


@pytest.fixture(scope="session")
def torch_checkpointing(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Name of a case -> its folder, written by torch_checkpointing."""
    return torch_checkpointing_cases.run_torch_checkpointing(
        tmp_path_factory.mktemp("torch_checkpointing"), torch_checkpointing_cases.CASES
    )
