"""Tests of the decision after a completion, with sequences of results that disks rarely give."""

from __future__ import annotations

import errno
import importlib
from types import ModuleType

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierstore.units import SECTOR_BYTES


@pytest.fixture(scope="module", params=["tierstore.storage._native", "tierstore.storage.request"])
def decision(request: pytest.FixtureRequest) -> ModuleType:
    """A module with the class Request: the extension in C++, if present, or the one in Python."""
    if request.param == "tierstore.storage._native":
        return pytest.importorskip(request.param, reason="installed without liburing")
    return importlib.import_module(request.param)


TRANSIENT = (-errno.EINTR, -errno.EAGAIN)


@given(
    first=st.integers(0, 2**40),
    sectors=st.integers(1, 64),
    moves=st.lists(
        st.one_of(st.floats(0, 1), st.sampled_from([*TRANSIENT, -errno.EIO, -errno.ENOSPC])),
        max_size=200,
    ),
)
def test_any_sequence_of_results(
    decision: ModuleType, first: int, sectors: int, moves: list[float]
) -> None:
    nbytes = sectors * SECTOR_BYTES
    start = first * SECTOR_BYTES
    request = decision.Request(start, nbytes)
    moved = bytearray(nbytes)  # 1 for every byte that has moved.
    retries = 0
    for move in moves:
        where, asked = request.offset - start, request.bytes_remaining
        assert where % SECTOR_BYTES == 0
        assert asked % SECTOR_BYTES == 0
        assert asked > 0
        assert where + asked == nbytes
        result = int(move) if move < 0 else int(move * asked)
        moved[where : where + max(result, 0)] = b"\1" * max(result, 0)
        verdict = request.complete(result)
        if result in TRANSIENT and retries < decision.RETRIES_MAX:
            retries += 1
            assert verdict is decision.Verdict.RESUBMIT
            assert request.offset - start == where
        elif result == asked:
            assert verdict is decision.Verdict.DONE
            assert all(moved)
            return
        elif result >= SECTOR_BYTES:
            assert verdict is decision.Verdict.RESUBMIT
            assert all(moved[: request.offset - start])
            assert request.bytes_remaining < asked
        else:
            assert verdict is decision.Verdict.FAILED
            assert request.error == (-result if result < 0 else errno.EIO)
            return
        assert request.error == 0


@pytest.mark.parametrize("result", [SECTOR_BYTES + 1, 2**40, -4096, -(2**31), -(2**40), -(2**63)])
def test_impossible_results_fail(decision: ModuleType, result: int) -> None:
    request = decision.Request(0, SECTOR_BYTES)
    assert request.complete(result) is decision.Verdict.FAILED
    assert request.error == errno.EIO


def test_sync_is_done_by_zero(decision: ModuleType) -> None:
    assert decision.Request(7, 0).complete(0) is decision.Verdict.DONE


def test_retries_end(decision: ModuleType) -> None:
    request = decision.Request(0, SECTOR_BYTES)
    for _ in range(decision.RETRIES_MAX):
        assert request.complete(-errno.EAGAIN) is decision.Verdict.RESUBMIT
    assert request.complete(-errno.EAGAIN) is decision.Verdict.FAILED
    assert request.error == errno.EAGAIN
