"""A process without further descriptors or threads: typed errors, and commits where they fit."""

from __future__ import annotations

import resource
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.support.isolated_process import allow_more_memory, apart
from tests.support.toy import Spec, Toy

ENGINES = ["io_uring", "libaio", "aiofiles"]
MANY: list[list[Spec]] = [
    [(f"p{number:03d}", (64, 16), torch.float32, {}, False) for number in range(160)]
]


def commit_with_few_files(directory: Path, engine: str) -> int:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (100, hard))
    toy = Toy(directory, MANY, engine=engine, page_bytes=4096)
    assert toy.store.stats().pages == 160
    toy.step()
    toy.store.synchronize()
    step = toy.store.committed.step
    toy.store.close()
    return step


@pytest.mark.parametrize("engine", ENGINES)
def test_more_pages_than_descriptors_are_committed(engine: str, tmp_path: Path) -> None:
    outcome = apart(commit_with_few_files, tmp_path, engine)
    assert outcome.error == ""
    assert outcome.value == 1


def commit_without_files(directory: Path, engine: str) -> None:
    toy = Toy(directory, engine=engine)
    toy.step()
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
    toy.store.synchronize()


@pytest.mark.parametrize("engine", ENGINES)
def test_an_error_for_want_of_descriptors_names_the_limit(engine: str, tmp_path: Path) -> None:
    outcome = apart(commit_without_files, tmp_path, engine)
    assert outcome.typed, outcome
    assert "ulimit -n" in outcome.error


def allow_no_thread() -> None:
    """Leave less addresses than the stack of a thread, and enough for all else."""
    threading.stack_size(128 << 20)
    allow_more_memory(32 << 20)


def open_without_threads(directory: Path, engine: str) -> None:
    allow_no_thread()
    Toy(directory, engine=engine)


def commit_without_threads(directory: Path, engine: str) -> None:
    toy = Toy(directory, engine=engine)
    toy.step()
    allow_no_thread()
    toy.store.synchronize()


@pytest.mark.parametrize(
    ("use", "engine"),
    [
        *((open_without_threads, engine) for engine in ("libaio", "aiofiles")),
        *((commit_without_threads, engine) for engine in ENGINES),
    ],
)
def test_a_thread_that_cannot_be_started_is_a_typed_error(
    use: Callable[[Path, str], None], engine: str, tmp_path: Path
) -> None:
    outcome = apart(use, tmp_path, engine)
    assert outcome.typed or not outcome.error, outcome.error
