"""Known failures: damaged files of any size, a lock file with two names, few descriptors.

Each test states the wanted behaviour and fails today.
"""

from __future__ import annotations

import contextlib
import os
import resource
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import tierstore
from tests.support.isolated_process import apart
from tests.support.originals import STEPS
from tests.support.toy import RANK, Spec, Toy, make_run

ENGINES = ["io_uring", "libaio", "aiofiles"]
COMMIT = f"commit-{STEPS:010d}"
TIB = 2**40
MANY: list[list[Spec]] = [
    [(f"p{number:03d}", (64, 16), torch.float32, {}, False) for number in range(160)]
]


# ------------------------------------------------------------------- links and few files


def begin(run: Path) -> None:
    (run / RANK).mkdir(parents=True)


@pytest.mark.xfail(
    strict=True,
    raises=AssertionError,
    reason="the holder's name is written into a file that is somebody else's, too",
)
@pytest.mark.parametrize("prepare", [begin, make_run])
def test_a_lock_with_two_names_is_not_written_to(
    prepare: Callable[[Path], None], tmp_path: Path
) -> None:
    run, precious = tmp_path / "run", tmp_path / "precious"
    prepare(run)
    precious.write_bytes(b"another's")
    (run / RANK / "lock").unlink(missing_ok=True)
    os.link(precious, run / RANK / "lock")
    with contextlib.suppress(tierstore.TierstoreError):
        Toy(run, resume=True).store.close()
    assert precious.read_bytes() == b"another's"


def commit_with_few_files(directory: Path, engine: str) -> int:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (100, hard))
    toy = Toy(directory, MANY, engine=engine, page_bytes=4096)
    assert toy.store.stats().pages == 160
    toy.step()
    toy.store.synchronize()
    step = toy.store.committed_step
    toy.store.close()
    return step


@pytest.mark.xfail(
    strict=True,
    raises=AssertionError,
    reason="a flush opens more page files at once than the process may have open",
)
@pytest.mark.parametrize("engine", ["io_uring", "libaio"])
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


@pytest.mark.xfail(
    strict=True,
    raises=AssertionError,
    reason="the error of a process without free descriptors does not name the limit",
)
@pytest.mark.parametrize("engine", ENGINES)
def test_an_error_for_want_of_descriptors_names_the_limit(engine: str, tmp_path: Path) -> None:
    outcome = apart(commit_without_files, tmp_path, engine)
    assert outcome.typed, outcome
    assert "ulimit -n" in outcome.error
