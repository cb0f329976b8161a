"""Errors keep what they say on their way to another process."""

from __future__ import annotations

import copy
import errno
import pickle

import pytest

import tierstore


@pytest.mark.parametrize(
    "error",
    [
        tierstore.PeerFailed(2, "no room"),
        tierstore.StorageError("write", path="/disk/file", errno=errno.ENOSPC),
        tierstore.StorageError(
            "read", path="/disk/file", errno=errno.EIO, offset=4096, nbytes=8192
        ),
        tierstore.CorruptionError("page 3 is damaged"),
        tierstore.BudgetError("pass host_memory=3"),
    ],
)
def test_errors_can_be_pickled(error: Exception) -> None:
    for found in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert type(found) is type(error)
        assert str(found) == str(error)
        assert vars(found) == vars(error)
