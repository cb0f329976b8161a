"""A lock file with a second name, which may be another's file."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path

import pytest

import tierstore
from tests.support.toy import RANK, Toy, make_run


def begin(run: Path) -> None:
    (run / RANK).mkdir(parents=True)


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


def test_a_lock_with_two_names_locks(tmp_path: Path) -> None:
    make_run(tmp_path)
    os.link(tmp_path / RANK / "lock", tmp_path / "backup")
    toy = Toy(tmp_path, resume=True)
    with pytest.raises(tierstore.RunLockedError):
        Toy(tmp_path, resume=True)
    toy.store.close()
    Toy(tmp_path, resume=True).store.close()
