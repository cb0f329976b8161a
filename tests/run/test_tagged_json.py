from __future__ import annotations

import base64
import enum
import json
import math
import random
import struct
from collections import Counter, OrderedDict, defaultdict, namedtuple
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tierstore.run import tagged_json

DTYPES = sorted(
    {
        value
        for value in vars(torch).values()
        if isinstance(value, torch.dtype) and not str(value).startswith(("torch.qu", "torch.qi"))
    },
    key=str,
)


def through_json(value: object) -> Any:
    return tagged_json.decode(json.loads(json.dumps(tagged_json.encode(value), allow_nan=False)))


def raw(tensor: torch.Tensor) -> bytes:
    """Return the bytes of the elements, through an untyped storage."""
    return bytes(tensor.detach().clone(memory_format=torch.contiguous_format).untyped_storage())


def same(left: Any, right: Any) -> bool:
    """Return whether two values, and all values inside them, have the same types and bits."""
    if type(left) is not type(right):
        return False
    if isinstance(left, float):
        return struct.pack("<d", left) == struct.pack("<d", right)
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(map(same, left, right))
    if isinstance(left, dict):
        return same(list(left.items()), list(right.items()))
    if isinstance(left, torch.Tensor):
        head = (left.dtype, left.shape, left.device) == (right.dtype, right.shape, right.device)
        return head and raw(left) == raw(right)
    if isinstance(left, np.ndarray | np.generic):
        head = (left.dtype, left.shape) == (right.dtype, right.shape)
        return head and left.tobytes() == right.tobytes()
    return bool(left == right)


def test_same_sees_differences() -> None:
    pairs = [
        (0.0, -0.0),
        (1, True),
        (1, 1.0),
        ((1,), [1]),
        ({1: 2, 3: 4}, {3: 4, 1: 2}),
        ({}, OrderedDict()),
        (torch.zeros(1), -torch.zeros(1)),
        (torch.zeros(1), torch.zeros(1, 1)),
        (torch.zeros(1), torch.zeros(1, dtype=torch.int32)),
        (np.zeros(1), np.zeros(1, dtype=">f8")),
        (np.float64(1), 1.0),
    ]
    assert not any(same(left, right) or same([left], [right]) for left, right in pairs)


def repeated_array(dtype: str, shape: list[int], data: bytes) -> np.ndarray[Any, Any]:
    array: np.ndarray[Any, Any] = np.zeros(shape, dtype)
    nbytes = array.nbytes
    repeated = (data * nbytes)[:nbytes] if data else bytes(nbytes)
    return np.frombuffer(repeated, array.dtype).reshape(shape)


# The sign and the payload of NaN are not kept.
floats = st.floats(allow_nan=False) | st.just(math.nan)
leaves = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(1 - 2**512, 2**512 - 1),
    floats,
    st.text(),
    st.text("$dict", max_size=6),
    st.binary(max_size=20),
    st.sampled_from([torch.float32, torch.bfloat16, torch.bool, torch.float8_e5m2]),
    floats.map(np.float64),
    st.integers(0, 255).map(np.uint8),
    st.booleans().map(np.bool_),
)
keys = st.recursive(leaves, lambda inner: st.lists(inner, max_size=3).map(tuple), max_leaves=4)
shapes = st.lists(st.integers(0, 3), max_size=3)
arrays = st.builds(
    repeated_array,
    st.sampled_from(["<f4", ">f8", "|b1", "<i8", "<c16"]),
    shapes,
    st.binary(max_size=9),
)
tensors = st.builds(lambda shape, seed: torch.full(shape, seed), shapes, st.floats(width=32))


def containers(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    pairs = st.lists(st.tuples(keys, inner), max_size=4)
    return st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(st.text(max_size=4), inner, max_size=4),
        pairs.map(dict),
        pairs.map(OrderedDict),
        st.dictionaries(keys, st.integers(), max_size=4).map(Counter),
    )


@settings(max_examples=200)
@given(st.recursive(st.one_of(leaves, arrays, tensors), containers, max_leaves=20))
def test_round_trip(value: Any) -> None:
    assert same(through_json(value), value)


# fmt: off
NUMBERS = [
    1 - 2**512, 2**512 - 1, True, -0.0, 5e-324, 1e16, math.inf, -math.inf, math.nan,
    np.float32(1e-45),
]
TEXTS = ["\x00\ud7ff\U0001f600\u2028", ""]
CONTAINERS = [
    (), ((1,), [2, (3,)]), {}, {"$tuple": [1]}, {"$": 1, "b": 2}, {"b": 1, "a": 2, "": 3},
    {1: "int", "1": "str", 2.5: "float", None: "none", b"1": "bytes", (1, "1"): "tuple"},
    {math.nan: 1, float("nan"): 2}, OrderedDict(b=1, a=2), Counter({30: 2, 80: -1}),
]
ARRAYS = [
    np.array(7, dtype=">u4"), np.zeros((0, 3)),
]
# fmt: on


@pytest.mark.parametrize("value", [*NUMBERS, *TEXTS, *CONTAINERS, *ARRAYS], ids=type)
def test_round_trip_of(value: Any) -> None:
    assert same(through_json(value), value)
    assert same(through_json([value, {"key": value}]), [value, {"key": value}])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (3,), (2, 0), (2, 3)], ids=str)
@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
def test_tensors_of_every_dtype(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    nbytes = math.prod(shape) * dtype.itemsize
    data = bytes(i % 2 if dtype == torch.bool else 37 * i % 256 for i in range(nbytes))
    tensor = torch.empty(shape, dtype=dtype)
    tensor.untyped_storage().copy_(torch.tensor(list(data), dtype=torch.uint8).untyped_storage())
    loaded = through_json(tensor)
    assert (loaded.dtype, loaded.shape) == (dtype, tensor.shape)
    assert bytes(loaded.untyped_storage()) == data


def test_tensor_comes_back_plain() -> None:
    base = torch.arange(24.0).reshape(4, 6)
    for view in [base.t(), base[1:3, ::2], base[0].expand(3, 6), base.flip(1)]:
        loaded = through_json(view)
        assert torch.equal(loaded, view)
        assert loaded.is_contiguous()
    complex_tensor = torch.tensor([1 + 2j, 3 - 4j])
    assert through_json(complex_tensor.conj()).tolist() == [1 - 2j, 3 + 4j]
    assert through_json(complex_tensor.conj().imag).tolist() == [-2.0, 4.0]
    with_history = torch.ones(2, requires_grad=True) * 3
    loaded = through_json(with_history)
    assert loaded.tolist() == [3.0, 3.0]
    assert not loaded.requires_grad


def test_encoding_is_a_snapshot_and_loaded_values_can_be_changed() -> None:
    value: list[Any] = [torch.zeros(2), np.zeros(2), [1]]
    encoded = tagged_json.encode(value)
    loaded = tagged_json.decode(encoded)
    for tensor, array, plain in (value, loaded):
        tensor.fill_(1)
        array.fill(1)
        plain.append(2)
    assert same(tagged_json.decode(encoded), [torch.zeros(2), np.zeros(2), [1]])


def test_plain_values_stay_plain() -> None:
    value = {"lr": 0.02, "step": 7, "names": ["a", None, True], "nested": {"a b": {}, "n": 2**64}}
    assert tagged_json.encode(value) == value
    assert json.dumps(tagged_json.encode(value)) == json.dumps(value)


@pytest.mark.parametrize(
    ("value", "encoded"),
    [
        ((0.9, 0.95), {"$tuple": [0.9, 0.95]}),
        ({1: (2,)}, {"$dict": [[1, {"$tuple": [2]}]]}),
        ({"$a": 1}, {"$dict": [["$a", 1]]}),
        (OrderedDict(b=1, a=2), {"$ordered_dict": [["b", 1], ["a", 2]]}),
        (Counter([30, 30, 80]), {"$counter": [[30, 2], [80, 1]]}),
        (math.inf, {"$float": "inf"}),
        (-math.inf, {"$float": "-inf"}),
        (math.nan, {"$float": "nan"}),
        (b"\x00\xff\x10", {"$bytes": "AP8Q"}),
        (torch.bfloat16, {"$dtype": "bfloat16"}),
        (
            torch.tensor([[1, 2]], dtype=torch.int16),
            {"$tensor": {"dtype": "int16", "shape": [1, 2], "data": "AQACAA=="}},
        ),
        (
            np.array([1, 2], dtype=">i2"),
            {"$array": {"dtype": ">i2", "shape": [2], "data": "AAEAAg=="}},
        ),
        (np.uint16(513), {"$scalar": {"dtype": "<u2", "data": "AQI="}}),
    ],
    ids=lambda value: type(value).__name__,
)
def test_written_form(value: Any, encoded: Any) -> None:
    """The format of commits on disk: a change needs a new format version."""
    assert tagged_json.encode(value) == encoded
    assert same(tagged_json.decode(encoded), value)


Color = enum.IntEnum("Color", "RED")
Name = type("Name", (str,), {})
Point = namedtuple("Point", "x")


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (len, "builtin_function_or_method"),
        (object(), "object"),
        (1j, "complex"),
        (2**512, "int"),
        (torch.Size([2, 3]), "torch.Size"),
        (np.str_("text"), "dtype"),
        (np.array([b"text"]), "dtype"),
        (np.datetime64("NaT"), "dtype"),
        ({1}, "set"),
        (range(3), "range"),
        (bytearray(b"1"), "bytearray"),
        (Color(1), "Color"),
        (Name("a"), "Name"),
        (Point(1), "Point"),
        (defaultdict(int), "collections.defaultdict"),
        (torch.device("cpu"), "torch.device"),
        (torch.nn.Parameter(torch.ones(1)), "torch.nn.parameter.Parameter"),
        (torch.Generator(), "Generator"),
        (torch.ones(2).to_sparse(), "sparse"),
        (torch.empty(2, device="meta"), "meta"),
        (np.array([object()]), "dtype object"),
        (np.zeros(2, dtype=[("x", "<f4")]), "dtype"),
        (np.void(b"12"), "dtype"),
        (type("Scalar", (np.float64,), {})(1), "Scalar"),
        (np.ma.masked_array([1]), "MaskedArray"),
    ],
    ids=lambda value: value if type(value) is str else "",
)
def test_other_types_are_refused_by_path(value: object, kind: str) -> None:
    extra = {"scheduler": {"ok": 1, "list": [0, (value,)]}}
    with pytest.raises(TypeError) as error:
        tagged_json.encode(extra)
    assert str(error.value).startswith("extra['scheduler']['list'][1][0] is a ")
    assert kind in str(error.value)
    assert "allowed are None, bool, int" in str(error.value)


@pytest.mark.parametrize(
    "key", [frozenset(), (1, len), torch.ones(1), torch.device("cpu")], ids=str
)
def test_other_keys_are_refused_by_path(key: object) -> None:
    with pytest.raises(TypeError, match=r"key .*of group\['a'\].* is a "):
        tagged_json.encode({"a": {key: 1}}, name="group")


@pytest.mark.parametrize(
    ("value", "path"),
    [
        (["\ud800"], r"extra\[0\]"),
        ({"a\udfff": 1}, r"the key 'a\\udfff' of extra"),
        ({1: 2, "a\udfff": 1}, r"the key 'a\\udfff' of extra"),
    ],
    ids=["value", "key", "pair"],
)
def test_lone_surrogates_are_refused(value: object, path: str) -> None:
    with pytest.raises(ValueError, match=f"{path} is not valid Unicode"):
        tagged_json.encode(value)


def test_value_that_contains_itself_is_refused() -> None:
    loop: list[object] = []
    loop.append({"again": loop})
    with pytest.raises(ValueError, match="levels deep, or contains itself"):
        tagged_json.encode(loop)


def test_depth_has_a_limit_that_json_can_take() -> None:
    deepest: Any = 0
    for _ in range(tagged_json.DEPTH_MAX // 2):
        deepest = {1: (deepest,)}
    assert same(through_json(deepest), deepest)
    with pytest.raises(ValueError, match=f"more than {tagged_json.DEPTH_MAX} levels"):
        tagged_json.encode([deepest])
    with pytest.raises(ValueError, match="levels"):
        tagged_json.decode(
            json.loads("[" * (tagged_json.DEPTH_MAX + 2) + "]" * (tagged_json.DEPTH_MAX + 2))
        )


def test_limit_counts_tensors_arrays_bytes_and_text() -> None:
    value = {"small": [torch.zeros(2), b"1234"], "large": (np.zeros(3), "ä.")}
    tagged_json.encode(value, limit_bytes=49)
    with pytest.raises(
        ValueError, match=r"^state holds 49 B .* at most 48 B; the largest"
    ) as error:
        tagged_json.encode(value, name="state", limit_bytes=48)
    assert "state['large'][0] with 24 B" in str(error.value)


def test_limit_is_64_mib() -> None:
    tagged_json.encode([torch.zeros(2**16)])
    # Expanded: the limit counts the bytes to be written, not the memory in use.
    with pytest.raises(ValueError, match=r"extra\[1\] with 64\.0 MiB"):
        tagged_json.encode([b"1", torch.zeros(1).expand(2**24), b"2"])


def data(text: bytes) -> str:
    return base64.b64encode(text).decode()


# fmt: off
REFUSED = [
    {"$pickle": "gASVAAAA"}, {"$": 1}, {"$tuple": [1], "a": 2}, {"$tuple": [1], "$dict": []},
    {"a": 1, "$b": 2}, {"$tuple": "ab"}, {"$tuple": {"a": 1}},
    {"$dict": {"a": 1}}, {"$dict": [[1]]}, {"$dict": [[1, 2, 3]]}, {"$dict": ["ab"]},
    {"$dict": [[[], 1]]}, {"$dict": [[1, 2], [1, 3]]}, {"$counter": [["a", 2], ["a", 3]]},
    {"$counter": 1}, {"$int": "0x1"}, {"$float": [1.0]},
    {"$float": "one"}, {"$float": {"inf": 1}},
    {"$bytes": "A"}, {"$bytes": "AP8Q\n"}, {"$bytes": "\u00e9"}, {"$bytes": [0]},
    {"$dtype": "float"}, {"$dtype": "load"}, {"$dtype": "torch.float32"}, {"$dtype": ["float32"]},
    {"$size": [1]}, {"$scalar": {"dtype": "<M8[s]", "data": data(bytes(8))}},
    {"$tensor": [1]}, {"$tensor": {"dtype": "uint8", "shape": [2]}},
    {"$tensor": {"dtype": "uint8", "shape": [0], "data": "", "device": "cuda"}},
    {"$scalar": {"dtype": "<i4", "data": data(bytes(8))}},
    {"$scalar": {"dtype": "<i4", "shape": [], "data": data(bytes(4))}},
    {"$scalar": {"dtype": "<U1", "data": data(b"\xff\xff\xff\xff")}},
]
BAD_SHAPES: list[tuple[object, int]] = [  # Each with the number of bytes that come with it.
    ([2], 1), ([1], 2), ([], 0), ([2**62, 2**62], 2), ([0, 2**62, 2**62], 0), ([-1, -2], 2),
    (2, 2), ([2.0], 2), ([True], 1), ("1", 1), (None, 1),
]
BAD_DTYPES: list[tuple[object, int]] = [
    ("|O", 8), ("|O8", 8), ("|V8", 8), ("<i4,<i4", 8), ("=i8", 8), ("i8", 8), ("int64", 8),
    ("<i3", 3), ("<U9999999999999", 0), ("<M8[parsec]", 8), ("<i8\n", 8), (8, 8),
]
# fmt: on


@pytest.mark.parametrize("encoded", REFUSED, ids="{!r:.50}".format)
def test_decode_refuses(encoded: object) -> None:
    with pytest.raises(ValueError):
        tagged_json.decode(encoded)
    with pytest.raises(ValueError):
        tagged_json.decode({"a": [encoded]})


@pytest.mark.parametrize(("shape", "nbytes"), BAD_SHAPES)
def test_decode_refuses_shapes(shape: object, nbytes: int) -> None:
    for tag, dtype in [("$tensor", "uint8"), ("$array", "|u1")]:
        with pytest.raises(ValueError):
            tagged_json.decode({tag: {"dtype": dtype, "shape": shape, "data": data(bytes(nbytes))}})


@pytest.mark.parametrize(("dtype", "itemsize"), BAD_DTYPES)
def test_decode_refuses_numpy_dtypes(dtype: object, itemsize: int) -> None:
    for fields in ({"shape": [1]}, {}):
        tag = "$array" if fields else "$scalar"
        with pytest.raises(ValueError, match=r"dtype|is expected"):
            tagged_json.decode({tag: {"dtype": dtype, **fields, "data": data(bytes(itemsize))}})


TAGS = ["tuple", "dict", "ordered_dict", "counter", "float", "bytes", "dtype"]
TAGS += ["tensor", "array", "scalar", "unknown"]
# The text of a number has one NaN, whatever the payload.
json_floats = st.one_of(st.floats(allow_nan=False), st.just(math.nan))
json_values = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), json_floats, st.text(max_size=5)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(st.text(max_size=3), inner, max_size=3),
        st.dictionaries(
            st.sampled_from([f"${tag}" for tag in TAGS]),
            inner,
            min_size=1,
            max_size=2,
        ),
    ),
    max_leaves=12,
)


@given(json_values)
def test_decode_of_anything_is_a_value_or_a_value_error(encoded: Any) -> None:
    try:
        value = tagged_json.decode(encoded)
    except ValueError:
        return
    assert same(through_json(value), value)


def test_random_states_are_restored() -> None:
    python = random.Random(1)
    legacy = np.random.RandomState(2)
    generators = [np.random.Generator(kind(3)) for kind in (np.random.PCG64, np.random.MT19937)]
    torch_generator = torch.Generator().manual_seed(4)
    python.gauss(0, 1)  # Adds a float to the ints of the state.
    states = through_json(
        {
            "python": python.getstate(),
            "legacy": legacy.get_state(),
            "numpy": [generator.bit_generator.state for generator in generators],
            "torch": torch_generator.get_state(),
        }
    )

    def draw() -> list[Any]:
        drawn: list[Any] = [python.gauss(0, 1), python.random(), legacy.randn(3).tolist()]
        drawn += [generator.standard_normal(3).tolist() for generator in generators]
        return [*drawn, torch.rand(3, generator=torch_generator).tolist()]

    expected = draw()
    assert draw() != expected
    python.setstate(states["python"])
    legacy.set_state(states["legacy"])
    for generator, state in zip(generators, states["numpy"], strict=True):
        generator.bit_generator.state = state
    torch_generator.set_state(states["torch"])
    assert draw() == expected


Optimizer = torch.optim.Optimizer
Schedule = torch.optim.lr_scheduler
SCHEDULERS: dict[str, Callable[[Optimizer], Schedule.LRScheduler]] = {
    "step": lambda optimizer: Schedule.StepLR(optimizer, 3, gamma=0.3),
    "multi_step": lambda optimizer: Schedule.MultiStepLR(optimizer, [2, 4, 4, 7]),
    "cosine": lambda optimizer: Schedule.CosineAnnealingLR(optimizer, 10),
    "one_cycle": lambda optimizer: Schedule.OneCycleLR(optimizer, 1.0, total_steps=20),
    "plateau": lambda optimizer: Schedule.ReduceLROnPlateau(optimizer, patience=1),
    "sequential": lambda optimizer: Schedule.SequentialLR(
        optimizer,
        [
            Schedule.LinearLR(optimizer, 0.1, total_iters=3),
            Schedule.MultiStepLR(optimizer, [2, 3]),
            Schedule.CosineAnnealingLR(optimizer, 6),
        ],
        milestones=[3, 8],
    ),
}


def make_optimizer() -> torch.optim.SGD:
    return torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.5, momentum=0.9)


def rates(optimizer: Optimizer, scheduler: Any, steps: int) -> list[tuple[float, float]]:
    """Return learning rate and momentum (OneCycleLR changes both) after every step."""
    found = []
    for _ in range(steps):
        optimizer.step()
        scheduler.step(*[1.0] if isinstance(scheduler, Schedule.ReduceLROnPlateau) else [])
        found.append((optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["momentum"]))
    return found


@pytest.mark.parametrize("name", SCHEDULERS)
@pytest.mark.filterwarnings("ignore:The epoch parameter:UserWarning")
def test_scheduler_resumes_from_its_state(name: str) -> None:
    optimizer = make_optimizer()
    scheduler = SCHEDULERS[name](optimizer)
    rates(optimizer, scheduler, 5)
    saved = through_json({"scheduler": scheduler.state_dict(), "optimizer": optimizer.state_dict()})
    assert same(saved["scheduler"], scheduler.state_dict())
    expected = rates(optimizer, scheduler, 6)

    resumed = make_optimizer()
    resumed_scheduler = SCHEDULERS[name](resumed)
    resumed.load_state_dict(saved["optimizer"])
    resumed_scheduler.load_state_dict(saved["scheduler"])
    assert rates(resumed, resumed_scheduler, 6) == expected
