"""The reader of pickles with stand-ins, as files of torch.save are read: the same refusals."""

from __future__ import annotations

import contextlib
import io
import pickle
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

import tierstore
from tests.inspection.test_dcp_metadata import HOSTILE, PROGRAMS, WITHIN, ran
from tierstore.inspection.dcp_metadata import read_metadata
from tierstore.inspection.safe_pickle import Unread, load_pickle

# What is refused by name there, and is a stand-in here.
BY_NAME = ("makes", "already", "field", "attribute", "calls")
LIMITS = {
    name: program
    for name, (program, message) in WITHIN.items()
    if not any(word in message for word in BY_NAME) and "in an object" not in name
}


def load(data: bytes) -> Any:
    return load_pickle(io.BytesIO(data), len(data), stand_ins=True)


def is_inert(value: Any) -> bool:
    if isinstance(value, Unread):
        return is_inert(value.arguments) and is_inert(value.state)
    if type(value) in (list, tuple, dict):
        items = [*value, *value.values()] if isinstance(value, dict) else value
        return all(map(is_inert, items))
    is_name = type(value).__module__ == load_pickle.__module__
    return is_name or type(value) in (str, bytes, int, float, bool, type(None))


@pytest.mark.parametrize("protocol", [2, 4])
@pytest.mark.parametrize("value", HOSTILE.values(), ids=HOSTILE)
def test_nothing_runs(
    value: Any, protocol: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    data = pickle.dumps({"key": value}, protocol=protocol)
    ran.clear()
    try:
        found = load(data)
    except tierstore.CorruptionError:
        found = None
    assert is_inert(found)
    assert ran == []
    assert list(tmp_path.iterdir()) == []


@pytest.mark.quick(2)
@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS)
def test_memory_is_a_multiple_of_the_length(program: bytes) -> None:
    tracemalloc.start()
    with contextlib.suppress(tierstore.CorruptionError):
        load(pickle.PROTO + b"\4" + program)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2**20 + 200 * len(program)


@pytest.mark.parametrize("program", LIMITS.values(), ids=LIMITS)
def test_the_limits_are_the_same(program: bytes) -> None:
    with pytest.raises(tierstore.CorruptionError):
        load(pickle.PROTO + b"\4" + program + pickle.STOP)


def test_many_objects_with_one_long_list_are_refused() -> None:
    """To check the fields of each of 20,000 objects would take minutes."""
    count = 20_000
    items = b"X\1\0\0\0aq\0](" + b"h\0" * count + b"eq\1"
    kind = pickle.GLOBAL + b"torch.distributed.checkpoint.metadata\nStorageMeta\nq\2"
    made = b"h\2)\x81}X\7\0\0\0modulesh\1sb"
    for number, refused in ((1, "does not hold"), (count, "larger than itself")):
        data = b"\x80\2" + items + kind + b"000" + (made + b"0") * number + b"N."
        with pytest.raises(tierstore.CorruptionError, match=refused):
            read_metadata(data, "the metadata")
