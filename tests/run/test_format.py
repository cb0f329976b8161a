"""docs/reference/format.md, by a reader that was made from it alone."""

from __future__ import annotations

import json
import math
import re
import shutil
import struct
import subprocess
import sys
from collections import Counter, OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xxhash
from hypothesis import given
from hypothesis import strategies as st

import muon
import tierstore
from tests.support import independent_reader, training
from tests.support.independent_reader import Content, read_checkpoint, read_run
from tests.support.kept import commit_with
from tests.support.lone_layouts import lay_out_alone
from tests.support.thread_ranks import ThreadJob
from tests.support.toy import RANK, Spec, Toy
from tierstore.layout.parameters import ParameterSpec
from tierstore.layout.records import RECORD_DTYPES
from tierstore.ranks.peers import Ranks
from tierstore.run import tagged_json
from tierstore.run.layout_file import RankLayout
from tierstore.run.sealed import checksum_of

ROOT = Path(__file__).resolve().parents[2]
FORMAT_TEXT = (ROOT / "docs/reference/format.md").read_text()
READERS = {"run": read_run, "published": read_checkpoint}
TRAINED_STEPS = 6


def assert_bits(found: np.ndarray, expected: torch.Tensor) -> None:
    """Compare what the reader gives with a tensor, bit for bit."""
    if expected.dtype == torch.bfloat16:
        expected = expected.float()  # Exact.
    array = expected.detach().contiguous().numpy()
    assert (found.dtype, found.shape) == (array.dtype, array.shape)
    assert found.tobytes() == array.tobytes()


# ------------------------------------------------------------------ the reader and the store


@pytest.fixture(scope="module", params=[torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def trained(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, dict[str, torch.Tensor], list[dict[str, Any]]]:
    """A run of awkward parameters in many pages and its checkpoint; what torch had of them."""
    directory = tmp_path_factory.mktemp("trained")
    parameters = training.make_parameters(request.param)
    store = tierstore.TierStore(directory / "run", page_bytes=10000)
    optimizer = muon.Muon(training.make_groups(parameters), store=store)
    scheduler = training.make_scheduler(optimizer)
    training.train(optimizer, parameters, range(1, TRAINED_STEPS + 1), scheduler=scheduler)
    store.register(scheduler=scheduler, position={"batch": (6, [1.5])})
    store.commit()
    snapshot = training.snapshot(optimizer, parameters)
    groups = [dict(group) for group in optimizer.param_groups]
    store.checkpoint(directory / "published")
    store.close()
    return directory, snapshot, groups


@pytest.mark.parametrize("kind", READERS)
def test_reader_agrees_with_the_store(trained: Any, kind: str) -> None:
    directory, snapshot, groups = trained
    content = READERS[kind](directory / kind)
    assert content.step == TRAINED_STEPS
    assert content.states.keys() == training.SHAPES.keys()
    seen = set()
    for name, states in content.states.items():
        parameter = snapshot[f"parameter {name}"]
        rounded = torch.from_numpy(states["master"].copy()).to(parameter.dtype)
        assert torch.equal(rounded.view(-1).view(torch.uint8), parameter.view(-1).view(torch.uint8))
        for state, values in states.items():
            key = f"{state} of {name}"
            if key in snapshot:  # fp32 parameters have no other master.
                assert_bits(values, snapshot[key])
                seen.add(key)
        for scalar, value in content.scalars.get(name, {}).items():
            assert value == snapshot[f"{scalar} of {name}"]
            seen.add(f"{scalar} of {name}")
    assert seen == {key for key in snapshot if not key.startswith("parameter ")}
    assert content.extra["position"] == {"batch": (6, [1.5])}
    assert content.extra["scheduler"]["last_epoch"] == TRAINED_STEPS
    for found, group in zip(content.hyperparameters, groups, strict=True):
        # The reader knows no torch: a dtype is its name.
        assert found == {
            key: str(group[key]).removeprefix("torch.") if key == "ns_dtype" else group[key]
            for key in found
        }
        assert {"lr", "weight_decay"} <= found.keys() <= group.keys()


def test_trained_run_is_awkward(trained: Any) -> None:
    """The golden runs have parameters in several pages, 0-d and empty parameters."""
    directory, *_ = trained
    commit = independent_reader.unseal("commit", directory / "published" / f"{RANK}.commit")
    layout = independent_reader.read_layout(directory / "published" / f"{RANK}.layout", commit)
    pages = list(independent_reader.pages_of(layout))
    pages_of = Counter(name for page in pages for name in {r.name for r in page.records})
    assert pages_of["embedding"] > 2
    assert pages_of["empty"] == 0
    assert training.SHAPES["scalar"][0] == ()
    assert len(layout["groups"]) == 4
    assert any(step < TRAINED_STEPS for _, step, _ in commit["pages"])


def test_metadata_is_not_needed(trained: Any, tmp_path: Path) -> None:
    published = shutil.copytree(trained[0] / "published", tmp_path / "published")
    (published / ".metadata").unlink()
    assert_same(read_checkpoint(published), read_checkpoint(trained[0] / "published"))


def test_checkpoint_holds_what_the_run_does(trained: Any) -> None:
    assert_same(read_checkpoint(trained[0] / "published"), read_run(trained[0] / "run"))


def assert_same(one: Content, other: Content) -> None:
    for field in ("run_id", "step", "scalars", "hyperparameters"):
        assert getattr(one, field) == getattr(other, field)
    assert repr(one.extra) == repr(other.extra)
    assert one.states.keys() == other.states.keys()
    for name, states in one.states.items():
        for state, values in states.items():
            assert values.tobytes() == other.states[name][state].tobytes()


def test_reader_imports_neither_torch_nor_tierstore(trained: Any) -> None:
    script = f"""
import sys
from pathlib import Path
sys.path.insert(0, {str(ROOT / "tests" / "support")!r})
from independent_reader import read_run
assert read_run(Path(sys.argv[1])).step == 6
print(sorted(name for name in sys.modules if name.split(".")[0] in ("torch", "tierstore", "muon")))
"""
    command = [sys.executable, "-c", script, str(trained[0] / "run")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.stdout, done.stderr) == ("[]\n", "")


def test_several_ranks(tmp_path: Path) -> None:
    shapes = {"weight-0": (3, 5), "weight-1": (4, 5), "flat": (7, 3)}

    def train(ranks: Ranks) -> None:
        specs: list[Spec] = [
            (name, shape, torch.bfloat16, {"sum": torch.float32}, name == "flat")
            for name, shape in shapes.items()
        ]
        toy = Toy(tmp_path / "run", [specs], process_group=ranks)
        for _ in range(3):
            toy.step()
        commit_with(toy.store, f"of rank {ranks.rank}")
        toy.store.checkpoint(tmp_path / "published")
        toy.store.close()

    assert ThreadJob(2).run(train) == [None, None]
    for content in (read_run(tmp_path / "run"), read_checkpoint(tmp_path / "published")):
        assert content.step == 3
        assert content.extra == {"kept": {"state": "of rank 0"}}
        for name, shape in shapes.items():
            states = content.states[name]
            assert np.array_equal(states["master"], np.full(shape, 0.25, np.float32))
            assert np.array_equal(states["sum"], np.full(shape, 3, np.float32))


# ---------------------------------------------------------------------------------- layout

DTYPES = sorted(str(dtype).removeprefix("torch.") for dtype in RECORD_DTYPES)
SIZES = st.lists(st.integers(0, 40), max_size=4).filter(lambda shape: math.prod(shape) < 2000)
PARAMETERS = st.builds(
    lambda shape, dtype, states, elementwise: {
        "shape": shape,
        "dtype": dtype,
        "states": {f"state{number}": state for number, state in enumerate(states)},
        "elementwise": elementwise,
    },
    SIZES,
    st.sampled_from(["float32", "bfloat16", "float16", "float64"]),
    st.lists(st.sampled_from(DTYPES), max_size=3),
    st.booleans(),
)


def assert_layouts_agree(groups: list[list[dict[str, Any]]], page_bytes: int) -> None:
    for number, parameter in enumerate(p for group in groups for p in group):
        parameter["name"] = f"parameter{number}"
    specs = [[ParameterSpec.from_json(parameter) for parameter in group] for group in groups]
    layouts = lay_out_alone(specs, page_bytes)
    data = RankLayout.from_pages(specs, layouts).to_bytes()
    body = json.loads(data.partition(b"\n")[2])
    found = list(independent_reader.pages_of(body))
    assert [page.nbytes for page in found] == [layout.nbytes for layout in layouts]
    for page, layout in zip(found, layouts, strict=True):
        assert page.blocks == [(b.offset, b.offset + b.nbytes) for b in layout.blocks]
        records = [record for section in layout.sections for record in section.records]
        assert [(r.name, r.state, r.offset, r.nbytes) for r in page.records] == [
            (r.parameter.name, r.state, r.offset, r.data_nbytes) for r in records
        ]
        for mine, record in zip(page.records, records, strict=True):
            chunk = mine.chunk
            assert (chunk.offsets, chunk.sizes) == (record.chunk.offsets, record.chunk.sizes)
    assert independent_reader.digest_of(found) == body["offsets"]
    read = RankLayout.from_bytes(data, "", digest=checksum_of(data))
    assert [page.digest for page in read.lay_out()] == [page.digest for page in layouts]


@given(
    groups=st.lists(st.lists(PARAMETERS, max_size=4), max_size=3),
    page_bytes=st.integers(500, 50_000) | st.sampled_from([1, 4096, 8192, 65536]),
)
def test_layout_is_what_the_document_says(
    groups: list[list[dict[str, Any]]], page_bytes: int
) -> None:
    assert_layouts_agree(groups, page_bytes)


@pytest.mark.parametrize("elementwise", [False, True])
@pytest.mark.parametrize(
    "shape",
    [[1 << 29], [(1 << 29) + 12345], [3, 1 << 29], [50257, 20480], [7, 3, 1 << 26], [2**31]],
)
def test_layout_of_large_parameters_is_what_the_document_says(
    shape: list[int], elementwise: bool
) -> None:
    states = {"exp_avg": "float32", "exp_avg_sq": "bfloat16"}
    large = {"shape": shape, "dtype": "bfloat16", "states": states, "elementwise": elementwise}
    small = {"shape": [5, 7], "dtype": "float32", "states": {}, "elementwise": True}
    assert_layouts_agree([[small, large, dict(small)]], 256 << 20)


def test_examples_of_the_document_are_true() -> None:
    weight = {"shape": [5, 7], "dtype": "bfloat16", "states": {"momentum": "bfloat16"}}
    bias = {"shape": [9], "dtype": "float32", "states": {"average": "float32"}}
    group = [
        {"name": "w", "elementwise": False, **weight},
        {"name": "b", "elementwise": True, **bias},
    ]
    (page,) = re.findall(r"^`(\[0,.*\])`\.$", FORMAT_TEXT, re.MULTILINE)
    (layout,) = independent_reader.pages_of({"groups": [group], "pages": [json.loads(page)]})
    rows = re.findall(r"^\| (\d+) \| (\d+) \| `(\w+)` of `(\w)`", FORMAT_TEXT, re.MULTILINE)
    assert rows == [(str(r.offset), str(r.nbytes), r.state, r.name) for r in layout.records]
    assert f"the file has {layout.nbytes} bytes" in FORMAT_TEXT
    specs = [[ParameterSpec.from_json(parameter) for parameter in group]]
    (written,) = lay_out_alone(specs, 1 << 28)
    assert page in RankLayout.from_pages(specs, [written]).to_bytes().decode()
    (text,) = re.findall(r'^\[\["master".*', FORMAT_TEXT, re.MULTILINE)
    digest = xxhash.xxh3_128_hexdigest(text.encode())
    assert independent_reader.digest_of([layout]) == xxhash.xxh3_128_hexdigest(digest.encode())


# --------------------------------------------------------------------------- tagged values


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ([None, True, -3, 0.1, 1e300, "é"], [None, True, -3, 0.1, 1e300, "é"]),
        ((), ()),
        ({"$a": 1, (2, "b"): {3: ()}}, {"$a": 1, (2, "b"): {3: ()}}),
        (OrderedDict(b=1, a=2), OrderedDict(b=1, a=2)),
        (Counter("abca"), Counter("abca")),
        (float("-inf"), float("-inf")),
        (b"\0\xff", b"\0\xff"),
        (torch.bfloat16, "bfloat16"),
        (torch.tensor([[1.5], [-2]], dtype=torch.bfloat16), np.array([[1.5], [-2]], np.float32)),
        (torch.tensor(True), np.array(True)),
        (torch.arange(4).view(2, 2).T, np.array([[0, 2], [1, 3]])),
        (torch.tensor([1 + 2j]), np.array([1 + 2j], np.complex64)),
        (torch.zeros(0, 3), np.zeros((0, 3), np.float32)),
        (np.array([[1, 2]], ">i2"), np.array([[1, 2]], ">i2")),
        (np.float32(0.1), np.float32(0.1)),
    ],
    ids=repr,
)
def test_tagged_values_are_what_the_document_says(value: Any, expected: Any) -> None:
    text = json.dumps(tagged_json.encode(value), allow_nan=False)
    found = independent_reader.decode(json.loads(text))
    assert type(found) is type(expected)
    if isinstance(expected, np.ndarray):
        assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
        assert found.tobytes() == expected.tobytes()
    else:
        assert found == expected


def test_nan_is_what_the_document_says() -> None:
    for value in (math.nan, -math.nan):
        found = independent_reader.decode(json.loads(json.dumps(tagged_json.encode(value))))
        assert struct.pack(">d", found) == struct.pack(">d", math.nan)
