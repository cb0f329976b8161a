from __future__ import annotations

import gc
import random
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import hypothesis
import pytest
import torch

if TYPE_CHECKING:
    from tests.support.rank_pool import RankPool

pytest.register_assert_rewrite(
    "tests.support.training",
    "tests.rank_programs.checks",
    "tests.rank_programs.collective_order",
)

# `make test` draws fewer examples than `make test-all`. Deadlines are off, because other
# programs on the machine may take its time.
hypothesis.settings.register_profile("full", deadline=None)
hypothesis.settings.register_profile("quick", deadline=None, max_examples=20)
hypothesis.settings.load_profile("full")

# The tensors of most tests are small: threads would only wait for each other.
torch.set_num_threads(1)

# A shell that runs a job in the background has it ignore Ctrl-C, which some tests are about.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_configure(config: pytest.Config) -> None:
    """Say at the end which tests should have the mark ``long``."""
    from tests.support.costs import Costs

    config.pluginmanager.register(Costs())


@pytest.hookimpl(tryfirst=True)  # Before `-m` chooses by the mark `long`.
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give cases beyond the number of the mark ``quick`` the mark ``long``; sort by limits.

    Tests of the longest limits begin, so that none of them is left for the end.
    """
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("quick") and not _is_skipped(item):
            cases.setdefault(item.nodeid.split("[")[0], []).append(item)
    for test, of_test in cases.items():
        (count,) = of_test[0].get_closest_marker("quick").args  # type: ignore[union-attr]
        # Not evenly spaced, which would leave out values of the last parameters.
        chosen = random.Random(test).sample(of_test, min(count, len(of_test)))
        for item in of_test:
            if item not in chosen:
                item.add_marker("long")
    items.sort(key=_limit_s, reverse=True)


def _is_skipped(item: pytest.Item) -> bool:
    return any(mark.args[0] for mark in item.iter_markers("skipif"))


def _limit_s(item: pytest.Item) -> float:
    mark = item.get_closest_marker("timeout")
    return mark.args[0] if mark is not None else 300.0


def pytest_collection_finish() -> None:
    """Leave modules and tests out of garbage collections, which then take milliseconds."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def originals(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run, a checkpoint of it, and one that DCP wrote: for all tests, to be copied."""
    from tests.support.originals import make_originals

    return make_originals(tmp_path_factory.mktemp("originals"))


@pytest.fixture(scope="session")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankPool]:
    """Processes that are ranks of gloo groups, for all tests."""
    from tests.support.rank_pool import RankPool

    with RankPool(tmp_path_factory.mktemp("worlds")) as ranks:
        yield ranks


@pytest.fixture
def run(originals: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(originals / "run", tmp_path / "run"))


@pytest.fixture
def published(originals: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(originals / "published", tmp_path / "published"))


@pytest.fixture
def plain(originals: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(originals / "plain", tmp_path / "plain"))
