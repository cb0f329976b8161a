from __future__ import annotations

import shutil
import signal
from pathlib import Path

import pytest
import torch

pytest.register_assert_rewrite("tests.training")

# The tensors of most tests are small: threads would only wait for each other.
torch.set_num_threads(1)

# A shell that runs a job in the background has it ignore Ctrl-C, which some tests are about.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def originals(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run, a checkpoint of it, and one that DCP wrote: for all tests, to be copied."""
    from tests.verifying import make_originals

    return make_originals(tmp_path_factory.mktemp("originals"))


@pytest.fixture
def run(originals: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(originals / "run", tmp_path / "run"))


@pytest.fixture
def published(originals: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(originals / "published", tmp_path / "published"))


@pytest.fixture
def plain(originals: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(originals / "plain", tmp_path / "plain"))
