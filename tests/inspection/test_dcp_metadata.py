"""Tests of the restricted reader of `.metadata`, compared with the stock unpickler."""

from __future__ import annotations

import builtins
import collections
import copyreg
import os
import pickle
import random
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed._shard.sharded_tensor import metadata as old_metadata
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

import tierstore
from tierstore.inspection.dcp_metadata import read_metadata


def small_metadata(**fields: Any) -> Metadata:
    """Return metadata of a tensor of two chunks and an object."""
    chunks = [ChunkStorageMetadata(torch.Size([row, 0]), torch.Size([2, 3])) for row in (0, 2)]
    tensor = TensorStorageMetadata(
        TensorProperties(dtype=torch.bfloat16), torch.Size([4, 3]), chunks
    )
    metadata = Metadata(
        {"weight": tensor, "step": BytesStorageMetadata()},
        planner_data={"weight": ("model", "weight"), "step": ("groups", 0, "step")},
        storage_data={
            MetadataIndex("weight", torch.Size([0, 0]), 0): _StorageInfo("__0_0.distcp", 0, 700),
            MetadataIndex("weight", torch.Size([2, 0]), 1): _StorageInfo("__1_0.distcp", 0, 700),
            MetadataIndex("step"): _StorageInfo("__0_0.distcp", 700, 10, ["zstd"]),
        },
        storage_meta=StorageMeta(Path("/checkpoints/7"), "save"),
        version="1.0.0",
    )
    for name, value in fields.items():
        setattr(metadata, name, value)
    return metadata


def read(data: bytes) -> Metadata:
    return read_metadata(data, "the metadata")


# ------------------------------------------------------------------------- valid metadata


def test_checkpoint_that_dcp_saved(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    state = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "of every kind": [1, 2.5, "text", None, (True, b"x")],
    }
    dcp.save(state, checkpoint_id=tmp_path, no_dist=True)
    data = (tmp_path / ".metadata").read_bytes()
    assert read(data) == pickle.loads(data)


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_every_protocol(protocol: int) -> None:
    data = pickle.dumps(small_metadata(), protocol=protocol)
    found, expected = read(data), pickle.loads(data)
    assert found == expected
    assert found.planner_data == expected.planner_data
    assert [type(index.offset) for index in found.storage_data] == [
        *(torch.Size, torch.Size),
        type(None),
    ]
    assert found.storage_data[MetadataIndex("weight", torch.Size([2, 0]))].length == 700


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float16, torch.int64, torch.bool, torch.float8_e4m3fn]
)
def test_properties_of_tensors(dtype: torch.dtype) -> None:
    for layout in (torch.strided, torch.sparse_coo):
        for memory_format in (
            torch.contiguous_format,
            torch.channels_last,
            torch.preserve_format,
        ):
            properties = TensorProperties(dtype, layout, True, memory_format, True)
            metadata = small_metadata(
                state_dict_metadata={"x": TensorStorageMetadata(properties, torch.Size([]), [])}
            )
            found = read(pickle.dumps(metadata)).state_dict_metadata["x"]
            assert isinstance(found, TensorStorageMetadata)
            assert found.properties == properties


def test_properties_saved_by_torch_2_2() -> None:
    old = old_metadata.TensorProperties(dtype=torch.float16, requires_grad=True)
    metadata = small_metadata()
    metadata.state_dict_metadata["weight"].properties = old  # type: ignore[union-attr,assignment]
    found = read(pickle.dumps(metadata)).state_dict_metadata["weight"]
    assert isinstance(found, TensorStorageMetadata)
    assert type(found.properties) is TensorProperties
    assert (found.properties.dtype, found.properties.requires_grad) == (torch.float16, True)


def test_enum_pickled_by_early_python_3_11(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        _MEM_FORMAT_ENCODING,
        "__reduce_ex__",
        lambda self, protocol: (getattr, (self.__class__, self.name)),
    )
    data = pickle.dumps(small_metadata())
    assert b"getattr" in data
    monkeypatch.undo()
    assert read(data) == small_metadata()


def test_planner_data_of_any_plain_values() -> None:
    values: dict[Any, Any] = {
        "sets": {1, 2, "three"},
        "frozen": frozenset({None, (1, "two")}),
        "ordered": collections.OrderedDict([("b", 1), ("a", [])]),
        ("a", 1): -(2**70),
        3: [b"x" * 300, "\N{SNOWMAN}" * 300, 1e-300, 2**31, 70000, -5],
    }
    values["shared"] = values["ordered"]
    found = read(pickle.dumps(small_metadata(planner_data=values))).planner_data
    assert found == values
    assert list(found["ordered"]) == ["b", "a"]
    assert found["shared"] is found["ordered"]


def test_value_that_contains_itself() -> None:
    values: list[Any] = []
    values.append((values,))
    found = read(pickle.dumps(small_metadata(planner_data=values))).planner_data
    assert found[0][0] is found


# ----------------------------------------------------------------------- refused metadata


class Calls:
    """Pickles as a call of a function."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self._call = (function, arguments)

    def __reduce__(self) -> Any:
        return self._call


ran: list[str] = []


def note(*_arguments: Any) -> None:
    ran.append("ran")


class WithState:
    def __setstate__(self, state: Any) -> None:
        note()

    def __getstate__(self) -> Any:
        return {"some": "state"}


class WithNew:
    def __new__(cls) -> Any:
        note()
        return super().__new__(cls)


class WithItems(dict[Any, Any]):
    def __setitem__(self, key: Any, value: Any) -> None:
        note()


HOSTILE: dict[str, Any] = {
    "os.system": Calls(os.system, "touch pwned"),
    "eval": Calls(builtins.eval, "open('pwned', 'w')"),
    "exec": Calls(builtins.exec, "open('pwned', 'w')"),
    "import": Calls(builtins.__import__, "this"),
    "open": Calls(builtins.open, "pwned", "w"),
    "getattr": Calls(getattr, Metadata, "__init__"),
    "getattr of an enum": Calls(getattr, _MEM_FORMAT_ENCODING, "__class__"),
    "a function of these tests": Calls(note),
    "an object with __setstate__": WithState(),
    "an object with __new__": WithNew(),
    "a dict of its own kind": WithItems(a=1),
    "torch.load": Calls(torch.load, "pwned"),
    "torch.hub": Calls(torch.hub.load, "a/b", "c"),
    "a tensor": torch.zeros(3),
    "memory": Calls(bytearray, 2**40),
    "a size of text": Calls(torch.Size, ("a",)),
    "a call of a class": Calls(MetadataIndex, "fqn"),
    "a counter": collections.Counter("aab"),
    "a default dict": collections.defaultdict(list),
    "a complex number": 1j,
    "an unknown enum": Calls(_MEM_FORMAT_ENCODING, 77),
}


@pytest.mark.parametrize("value", HOSTILE.values(), ids=HOSTILE)
def test_hostile_values_are_refused_and_not_run(
    value: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for metadata in (
        small_metadata(planner_data={"key": value}),
        small_metadata(storage_data=value),
        value,
    ):
        data = pickle.dumps(metadata)
        ran.clear()
        with pytest.raises(tierstore.CorruptionError, match=r"^the metadata "):
            read(data)
        assert ran == []
    assert list(tmp_path.iterdir()) == []


def test_message_gives_the_refused_name() -> None:
    data = pickle.dumps(small_metadata(planner_data=Calls(os.system, "true")))
    with pytest.raises(tierstore.CorruptionError, match=r"names posix\.system, which is not in"):
        read(data)


def short(text: str) -> bytes:
    return pickle.SHORT_BINUNICODE + bytes([len(text)]) + text.encode()


def globally(module: str, name: str) -> bytes:
    return pickle.GLOBAL + f"{module}\n{name}\n".encode()


METADATA = "torch.distributed.checkpoint.metadata"
INDEX = globally(METADATA, "MetadataIndex")
NEW_INDEX = INDEX + pickle.EMPTY_TUPLE + pickle.NEWOBJ
SIZE = globally("torch", "Size")

PROGRAMS: dict[str, bytes] = {
    "nothing": b"",
    "no value": pickle.STOP,
    "two values": pickle.NONE + pickle.NONE + pickle.STOP,
    "no end": pickle.EMPTY_DICT,
    "an empty stack": pickle.TUPLE2 + pickle.STOP,
    "below a mark": pickle.NONE + pickle.MARK + pickle.TUPLE1 + pickle.STOP,
    "no mark": pickle.EMPTY_LIST + pickle.APPENDS + pickle.STOP,
    "a stack that two share": pickle.MARK + pickle.POP + pickle.STOP,
    "half a number": pickle.BININT + b"\1",
    "text longer than all": pickle.BINUNICODE + struct.pack("<I", 2**32 - 1) + b"x",
    "text longer than memory": pickle.BINUNICODE8 + struct.pack("<Q", 2**63) + b"x",
    "bytes longer than memory": pickle.BINBYTES8 + struct.pack("<Q", 2**63 - 1) + b"x",
    "a byte array": pickle.BYTEARRAY8 + struct.pack("<Q", 2**36),
    "a huge memo": pickle.NONE + pickle.LONG_BINPUT + struct.pack("<I", 2**32 - 1) + pickle.STOP,
    "an absent memo": pickle.LONG_BINGET + struct.pack("<I", 7) + pickle.STOP,
    "not text": pickle.SHORT_BINUNICODE + b"\2\xff\xfe" + pickle.STOP,
    "an extension": pickle.EXT1 + b"\1" + pickle.STOP,
    "a persistent id": pickle.NONE + pickle.BINPERSID + pickle.STOP,
    "an instance": pickle.MARK + pickle.INST + b"os\nsystem\n" + pickle.STOP,
    "an object": pickle.MARK + globally("os", "system") + short("true") + pickle.OBJ + pickle.STOP,
    "keywords": INDEX + pickle.EMPTY_TUPLE + pickle.EMPTY_DICT + pickle.NEWOBJ_EX + pickle.STOP,
    "a global of another kind": pickle.NONE + pickle.NONE + pickle.STACK_GLOBAL + pickle.STOP,
    "a dotted name": globally("torch", "serialization.os.system") + pickle.STOP,
    "an attribute of torch": globally("torch", "load") + pickle.STOP,
    "fields of a class": INDEX
    + pickle.NONE
    + (pickle.EMPTY_DICT + short("__hash__") + pickle.NONE + pickle.SETITEM)
    + (pickle.TUPLE2 + pickle.BUILD + pickle.STOP),
    "fields of a function": SIZE
    + (pickle.EMPTY_DICT + short("call") + pickle.NONE + pickle.SETITEM)
    + (pickle.BUILD + pickle.STOP),
    "fields of a dict": pickle.EMPTY_DICT + pickle.EMPTY_DICT + pickle.BUILD + pickle.STOP,
    "an empty object as a key": pickle.EMPTY_DICT + NEW_INDEX + pickle.NONE + pickle.SETITEM,
    "a list as a key": pickle.EMPTY_DICT + pickle.EMPTY_LIST + pickle.NONE + pickle.SETITEM,
    "a call of a number": pickle.NONE + pickle.EMPTY_TUPLE + pickle.REDUCE + pickle.STOP,
    "text": b"not a pickle at all\n",
    "deep lists": 10**5 * pickle.EMPTY_LIST + (10**5 - 1) * pickle.APPEND + pickle.STOP,
    "deep tuples": pickle.NONE + 10**5 * pickle.TUPLE1 + pickle.STOP,
    "deep tuples as a key": pickle.EMPTY_DICT
    + (pickle.NONE + 10**5 * pickle.TUPLE1)
    + (pickle.NONE + pickle.SETITEM + pickle.STOP),
    "deep tuples as a memory format": globally(METADATA, "_MEM_FORMAT_ENCODING")
    + (pickle.NONE + 10**5 * pickle.TUPLE1 + pickle.TUPLE1 + pickle.REDUCE + pickle.STOP),
    "a path that doubles": globally("pathlib", "PosixPath")
    + (pickle.BINPUT + b"\0" + short("a") + pickle.BINPUT + b"\1")
    + 40 * (pickle.BINGET + b"\0" + 2 * (pickle.BINGET + b"\1") + pickle.TUPLE2 + b"Rq\1")
    + pickle.STOP,
}


@pytest.mark.quick(1)
@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS)
def test_programs_that_are_not_metadata(program: bytes) -> None:
    """A program neither crashes nor takes more memory than a multiple of its length."""
    tracemalloc.start()
    with pytest.raises(tierstore.CorruptionError):
        read(pickle.PROTO + b"\4" + program)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2**20 + 200 * len(program)


def with_planner_data(program: bytes) -> bytes:
    """Return valid metadata, except that this program makes its planner data."""
    data = pickle.dumps(small_metadata(planner_data="planner"), protocol=2)
    planner = pickle.BINUNICODE + struct.pack("<I", 7) + b"planner"
    assert planner in data
    return data.replace(planner, program)


HALF = b"\xed\xa0\x80"  # Half of a surrogate pair.
MEMORY_FORMAT = globally(METADATA, "_MEM_FORMAT_ENCODING")
FQN = pickle.EMPTY_DICT + short("fqn") + short("a") + pickle.SETITEM
DEEP = pickle.NONE + 10**5 * pickle.TUPLE1

WITHIN: dict[str, tuple[bytes, str]] = {
    "half a character": (pickle.SHORT_BINUNICODE + b"\3" + HALF, "damaged"),
    "half a character in long text": (pickle.BINUNICODE + b"\3\0\0\0" + HALF, "damaged"),
    "a byte array": (pickle.BYTEARRAY8 + struct.pack("<Q", 1) + b"a", "damaged"),
    "text of Python 2": (pickle.SHORT_BINSTRING + b"\1a", "damaged"),
    "a number in digits": (pickle.INT + b"1\n", "damaged"),
    "a persistent id": (pickle.NONE + pickle.BINPERSID, "damaged"),
    "a dict at once": (pickle.MARK + pickle.DICT, "damaged"),
    "a key twice": (pickle.EMPTY_DICT + 2 * (2 * pickle.NONE + pickle.SETITEM), "twice"),
    "two keys at once": (
        pickle.EMPTY_DICT + pickle.MARK + 4 * pickle.NONE + pickle.SETITEMS,
        "twice",
    ),
    "no items of a list": (pickle.EMPTY_LIST + pickle.MARK + pickle.SETITEMS, "not a dict"),
    "deep tuples in a set": (
        pickle.EMPTY_SET + pickle.MARK + DEEP + pickle.ADDITEMS,
        "a strange kind",
    ),
    "deep tuples in a frozen set": (pickle.MARK + DEEP + pickle.FROZENSET, "a strange kind"),
    "an object without fields": (NEW_INDEX, "without its fields"),
    "an unknown field": (
        NEW_INDEX + FQN + short("__class__") + pickle.NONE + pickle.SETITEM + pickle.BUILD,
        "a strange field",
    ),
    "fields again": (NEW_INDEX + 2 * (FQN + pickle.BUILD), "already"),
    "fields and attributes": (NEW_INDEX + 2 * FQN + pickle.TUPLE2 + pickle.BUILD, "makes a Meta"),
    "deep tuples in an object as a key": (
        (pickle.EMPTY_DICT + NEW_INDEX + pickle.EMPTY_DICT + short("fqn") + DEEP + pickle.SETITEM)
        + (pickle.BUILD + pickle.NONE + pickle.SETITEM),
        "a strange kind",
    ),
    "an object of arguments": (
        INDEX + pickle.NONE + pickle.TUPLE1 + pickle.NEWOBJ + FQN + pickle.BUILD,
        "makes an object",
    ),
    "an object of a function": (SIZE + pickle.EMPTY_TUPLE + pickle.NEWOBJ, "makes an object"),
    "a call of a class": (INDEX + short("a") + pickle.TUPLE1 + pickle.REDUCE, "calls"),
    "a call with a list": (
        globally("collections", "OrderedDict") + pickle.EMPTY_LIST + pickle.REDUCE,
        "calls",
    ),
    "an ordered dict of another": (
        globally("collections", "OrderedDict") + pickle.EMPTY_DICT + pickle.TUPLE1 + pickle.REDUCE,
        "damaged",
    ),
    "a bool as a memory format": (
        MEMORY_FORMAT + pickle.NEWTRUE + pickle.TUPLE1 + pickle.REDUCE,
        "strange value",
    ),
    "an attribute of nothing": (
        globally("builtins", "getattr")
        + (pickle.NONE + short("TORCH_CHANNELS_LAST") + pickle.TUPLE2 + pickle.REDUCE),
        "attribute",
    ),
    "a size of too many": (
        SIZE
        + pickle.MARK
        + 65 * (pickle.BININT1 + b"\1")
        + pickle.TUPLE
        + pickle.TUPLE1
        + pickle.REDUCE,
        "a size",
    ),
    "a size as a key": (
        (pickle.EMPTY_DICT + SIZE + pickle.EMPTY_TUPLE + pickle.TUPLE1 + pickle.REDUCE)
        + (pickle.NONE + pickle.SETITEM),
        "a strange kind",
    ),
    "a negative size": (
        SIZE + pickle.BININT + b"\xff\xff\xff\xff" + 2 * pickle.TUPLE1 + pickle.REDUCE,
        "a size",
    ),
    "a bool as a size": (SIZE + pickle.NEWTRUE + 2 * pickle.TUPLE1 + pickle.REDUCE, "a size"),
}


@pytest.mark.parametrize(("program", "message"), WITHIN.values(), ids=WITHIN)
def test_refused_programs_within_valid_metadata(program: bytes, message: str) -> None:
    assert read(with_planner_data(pickle.NONE)) == small_metadata(planner_data=None)
    with pytest.raises(tierstore.CorruptionError, match=f"^the metadata .*{message}"):
        read(with_planner_data(program))


@pytest.mark.parametrize("before", [pickle.NONE, pickle.MARK])
def test_values_left_on_the_stack_are_refused(before: bytes) -> None:
    data = pickle.dumps(small_metadata(), protocol=2)
    assert read(data) == small_metadata()
    with pytest.raises(tierstore.CorruptionError, match="more than one value"):
        read(data[:2] + before + data[2:])


def test_a_registered_extension_is_refused() -> None:
    """Stock readers resolve the number of an extension: no name is in the bytes."""
    copyreg.add_extension("builtins", "eval", 77)
    try:
        with pytest.raises(tierstore.CorruptionError, match="damaged"):
            read(with_planner_data(pickle.EXT1 + bytes([77])))
    finally:
        copyreg.remove_extension("builtins", "eval", 77)


def test_values_that_double_are_not_walked() -> None:
    """A thousand nested pairs of one tuple: few bytes, but 2**1000 leaves."""
    memo = struct.pack("<I", 9999)
    doubled = pickle.EMPTY_TUPLE + 1000 * (
        pickle.LONG_BINPUT + memo + pickle.LONG_BINGET + memo + pickle.TUPLE2
    )
    found = read(with_planner_data(doubled)).planner_data
    for _ in range(1000):
        assert found[0] is found[1]
        found = found[0]
    assert found == ()


@pytest.mark.parametrize(
    "change",
    [
        {"state_dict_metadata": {1: BytesStorageMetadata()}},
        {"state_dict_metadata": {"a": None}},
        {"state_dict_metadata": {"a": MetadataIndex("a")}},
        {"state_dict_metadata": None},
        {"storage_data": None},
        {"storage_data": {"a": _StorageInfo("a", 0, 1)}},
        {"storage_data": {MetadataIndex("a"): ("a", 0, 1)}},
        {"storage_data": {MetadataIndex("a"): _StorageInfo("a", 0.0, 1)}},  # type: ignore[arg-type]
        {"storage_data": {MetadataIndex("a"): _StorageInfo("a", 0, True)}},
        {"storage_data": {MetadataIndex("a"): _StorageInfo(b"a", 0, 1)}},  # type: ignore[arg-type]
        {"storage_data": {MetadataIndex("a"): _StorageInfo("a", 0, 1, [1])}},  # type: ignore[list-item]
        {"version": 1},
    ],
)
def test_fields_of_other_types(change: dict[str, Any]) -> None:
    with pytest.raises(tierstore.CorruptionError):
        read(pickle.dumps(small_metadata(**change)))


@pytest.mark.parametrize(
    "chunk",
    [
        None,
        ChunkStorageMetadata(torch.Size([0]), torch.Size([4, 3])),
        ChunkStorageMetadata(torch.Size([0, 0]), torch.Size([4])),
        ChunkStorageMetadata((0, 0), (4, 3)),  # type: ignore[arg-type]
    ],
)
def test_chunks_of_other_dimensions(chunk: Any) -> None:
    metadata = small_metadata()
    metadata.state_dict_metadata["weight"].chunks.append(chunk)  # type: ignore[union-attr]
    with pytest.raises(tierstore.CorruptionError):
        read(pickle.dumps(metadata))


def test_damage_is_a_corruption_error_or_other_values() -> None:
    """Flips a bit of every byte, replaces it, removes it, or cuts the file there."""
    whole = pickle.dumps(small_metadata())
    generator = random.Random(0)
    for position in range(len(whole)):
        for damaged in (
            whole[:position]
            + bytes([whole[position] ^ (1 << generator.randrange(8))])
            + whole[position + 1 :],
            whole[:position] + bytes([generator.randrange(256)]) + whole[position + 1 :],
            whole[:position] + whole[position + 1 :],
            whole[:position],
        ):
            try:
                found = read(damaged)
            except tierstore.CorruptionError:
                continue
            assert type(found) is Metadata
