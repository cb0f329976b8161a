"""Drives the decision about one request with sequences of results that no disk gives."""

from __future__ import annotations

import errno

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierstore.units import SECTOR_BYTES

native = pytest.importorskip("tierstore._native", reason="installed without liburing")

TRANSIENT = (-errno.EINTR, -errno.EAGAIN)


@given(
    first=st.integers(0, 2**40),
    sectors=st.integers(1, 64),
    moves=st.lists(
        st.one_of(st.floats(0, 1), st.sampled_from([*TRANSIENT, -errno.EIO, -errno.ENOSPC])),
        max_size=200,
    ),
)
def test_any_sequence_of_results(first: int, sectors: int, moves: list[float]) -> None:
    nbytes = sectors * SECTOR_BYTES
    start = first * SECTOR_BYTES
    request = native.Request(start, nbytes)
    moved = bytearray(nbytes)  # 1 where a byte has moved: what a buffer would show.
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
        if result in TRANSIENT and retries < native.RETRIES_MAX:
            retries += 1
            assert verdict is native.Verdict.RESUBMIT
            assert request.offset - start == where
        elif result == asked:
            assert verdict is native.Verdict.DONE
            assert all(moved)
            return
        elif result >= SECTOR_BYTES:
            assert verdict is native.Verdict.RESUBMIT
            assert all(moved[: request.offset - start])
            assert request.bytes_remaining < asked
        else:
            assert verdict is native.Verdict.FAILED
            assert request.error == (-result if result < 0 else errno.EIO)
            return
        assert request.error == 0


@pytest.mark.parametrize("result", [SECTOR_BYTES + 1, 2**40, -4096, -(2**31), -(2**40), -(2**63)])
def test_impossible_results_fail(result: int) -> None:
    request = native.Request(0, SECTOR_BYTES)
    assert request.complete(result) is native.Verdict.FAILED
    assert request.error == errno.EIO


def test_sync_is_done_by_zero() -> None:
    assert native.Request(7, 0).complete(0) is native.Verdict.DONE


def test_retries_end() -> None:
    request = native.Request(0, SECTOR_BYTES)
    for _ in range(native.RETRIES_MAX):
        assert request.complete(-errno.EAGAIN) is native.Verdict.RESUBMIT
    assert request.complete(-errno.EAGAIN) is native.Verdict.FAILED
    assert request.error == errno.EAGAIN
