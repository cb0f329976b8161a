"""Golden files: what version 0.1 wrote, which every later version has to read."""

from __future__ import annotations

import json
import re
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
import xxhash

import tierstore
from tests.run.test_format import FORMAT_TEXT, READERS, assert_same
from tests.support.golden_files import assert_same_files
from tests.support.independent_reader import FormatError, read_checkpoint, read_run
from tests.support.make_golden import EXTRA, GROUPS, HYPERPARAMETERS, STEPS, Golden, make
from tests.support.originals import flip, reseal
from tests.support.toy import RANK, unchanged
from tierstore.run import tagged_json
from tierstore.tools.inspect.verify import verify

GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "version-1"


@pytest.fixture
def golden(tmp_path: Path) -> Path:
    """A copy of the golden files."""
    return shutil.copytree(GOLDEN, tmp_path / "golden")


def expected_states() -> dict[str, dict[str, np.ndarray]]:
    shapes = {name: spec[0] for group in GROUPS for name, spec in group.items()}
    return {
        name: {state: np.array(values).reshape(shapes[name]) for state, values in states.items()}
        for name, states in json.loads((GOLDEN / "expected.json").read_text()).items()
    }


def assert_golden(model: Golden) -> None:
    """Check parameters, states and scalars of a model with what is beside the golden files."""
    states = model.store.pages.read_states()
    for name, expected in expected_states().items():
        parameter = model.model.get_parameter(name).detach()
        masters = torch.from_numpy(expected["master"])
        assert torch.equal(parameter, masters.to(parameter.dtype))
        for state, tensor in states.get(name, {}).items():  # Empty ones have no states.
            assert torch.equal(tensor, torch.from_numpy(expected[state]).to(tensor.dtype))
    assert model.store.pages.scalars == {name: {"step": STEPS} for name in GROUPS[1]}
    for group, hyperparameters in zip(model.groups, HYPERPARAMETERS, strict=True):
        assert group.own_hyperparameters() == hyperparameters


def spoil(model: Golden) -> None:
    """Make everything that restore() shall bring back another thing."""
    for parameter in model.model.parameters():
        parameter.detach().fill_(77)
    for group in model.groups:
        group.hyperparameters.update(lr=77.0)


def assert_extra(found: dict[str, Any]) -> None:
    assert tagged_json.encode(found) == tagged_json.encode(EXTRA)


@pytest.mark.parametrize("kind", READERS)
def test_golden_files_are_read_independently(kind: str) -> None:
    content = READERS[kind](GOLDEN / kind)
    assert content.step == STEPS
    expected = expected_states()
    assert content.states.keys() == expected.keys()
    for name, states in content.states.items():
        assert states.keys() == expected[name].keys()
        for state, values in states.items():
            assert values.shape == expected[name][state].shape
            assert np.array_equal(values.astype(np.float64), expected[name][state])
    assert content.scalars == {name: {"step": STEPS} for name in GROUPS[1]}
    assert content.hyperparameters == HYPERPARAMETERS
    assert content.extra["where"][("epoch", 2)] == (3, 0)
    assert content.extra["milestones"] == Counter({7: 2, 30: 1})
    assert content.extra["ordered"] == EXTRA["ordered"]
    assert np.array_equal(content.extra["half"], [[1.5, -2]])
    assert np.array_equal(content.extra["array"], EXTRA["array"])


def test_golden_run_is_restored_and_goes_on(golden: Path) -> None:
    model = Golden(golden / "run", resume=True)
    spoil(model)
    assert_extra(model.restore(EXTRA))
    assert_golden(model)
    model.store.register(**dict.fromkeys(EXTRA))
    model.step()
    model.commit({"later": 7})
    model.store.close()
    content = read_run(golden / "run")
    assert (content.step, content.extra) == (STEPS + 1, {"later": 7})


def test_golden_run_falls_back_to_the_commit_before(golden: Path) -> None:
    flip(golden / "run" / RANK / f"commit-{STEPS:010d}.2", -1)
    model = Golden(golden / "run", resume=True)
    assert model.restore(["position"]) == {"position": STEPS}
    assert_golden(model)
    model.store.close()
    assert read_run(golden / "run").extra == {"position": STEPS}


def test_golden_checkpoint_begins_a_run(golden: Path, tmp_path: Path) -> None:
    model = Golden(tmp_path / "run")
    spoil(model)
    with unchanged(golden):
        assert_extra(model.restore(EXTRA, golden / "published"))
    assert_golden(model)
    model.store.close()


def test_golden_checkpoint_is_loaded_by_dcp() -> None:
    expected = expected_states()
    state = {
        f"model.{name}": torch.zeros(values["master"].shape, dtype=torch.float64)
        for name, values in expected.items()
    }
    state |= {"model.tied": torch.zeros(12, 10), "model.buffer": torch.zeros(3, dtype=torch.int64)}
    state |= {
        f"optimizer.state.{name}.{key}": torch.zeros(values.shape, dtype=torch.float64)
        for name, states in expected.items()
        for key, values in states.items()
        if key != "master"
    }
    dcp.load(state, checkpoint_id=GOLDEN / "published", no_dist=True)
    assert torch.equal(state.pop("model.buffer"), torch.arange(3))
    assert torch.equal(state.pop("model.tied").double(), state["model.weight"])
    for name, states in expected.items():
        for key, values in states.items():
            found = state[f"model.{name}" if key == "master" else f"optimizer.state.{name}.{key}"]
            assert np.array_equal(found.numpy(), values)


@pytest.mark.parametrize("kind", READERS)
def test_golden_files_are_whole(kind: str) -> None:
    with unchanged(GOLDEN / kind):
        report = verify(GOLDEN / kind)
    assert report.faults == ()
    assert report.step == STEPS


def test_golden_files_are_made_again(tmp_path: Path) -> None:
    """Until another version writes another format."""
    make(tmp_path)
    assert_same_files(tmp_path, GOLDEN)


def test_fields_of_the_document_equal_the_files() -> None:
    commit = json.loads((GOLDEN / f"published/{RANK}.commit").read_bytes().partition(b"\n")[2])
    tables = re.findall(r"^\| ((?:`\w+`(?:, )?)+) \|", FORMAT_TEXT, re.MULTILINE)
    named = {name for row in tables for name in re.findall(r"`(\w+)`", row)}
    assert commit.keys() <= named
    layout = json.loads((GOLDEN / f"published/{RANK}.layout").read_bytes().partition(b"\n")[2])
    assert layout.keys() <= named
    others = [*layout["groups"][0][0], *commit["scalars"]]
    others += json.loads((GOLDEN / f"run/{RANK}/run.json").read_bytes().partition(b"\n")[2])
    marker = (GOLDEN / "published/tierstore.json").read_bytes().partition(b"\n")[2]
    others += json.loads(marker)
    assert not {name for name in others if f"`{name}`" not in FORMAT_TEXT}


def committed_files(golden: Path) -> list[Path]:
    files = [path for path in golden.rglob("rank-*") if path.is_file()]
    files += [
        path for path in (golden / "run" / RANK).iterdir() if path.name != "commit-0000000003"
    ]
    return [*files, golden / "published" / "tierstore.json", golden / "published" / "unpaged"]


def test_reader_refuses_every_flipped_bit(golden: Path) -> None:
    """But in the older commit, and of the newer one it falls back to that; and in a mark."""
    files = committed_files(golden)
    assert len(files) > 20
    for path in files:
        kind = "run" if path.is_relative_to(golden / "run") else "published"
        for position in (0, path.stat().st_size // 2, path.stat().st_size - 1):
            flip(path, position)
            if re.fullmatch(r"commit-0000000003\.2", path.name) and position:
                assert READERS[kind](golden / kind).extra == {"position": STEPS}
            elif path.name == "rank-00000.whole":
                assert READERS[kind](golden / kind).marked == set()
            else:
                with pytest.raises((FormatError, ValueError)):
                    READERS[kind](golden / kind)
            flip(path, position)
    for kind, read in READERS.items():
        assert_same(read(golden / kind), read(GOLDEN / kind))
    assert READERS["published"](golden / "published").marked == {0}


def test_reader_refuses_pages_of_mixed_steps(golden: Path) -> None:
    dirty = golden / "run" / RANK / "dirty"
    dirty.write_text(json.dumps({"overwriting": f"commit-{STEPS - 1:010d}"}))
    assert read_run(golden / "run").step == STEPS
    for content in (json.dumps({"overwriting": f"commit-{STEPS:010d}.2"}), "{"):
        dirty.write_text(content)
        with pytest.raises(FormatError, match="mixed steps"):
            read_run(golden / "run")


def as_version(path: Path, version: int) -> None:
    """Give a sealed file another version, all else being right."""
    head, _, text = path.read_bytes().partition(b"\n")
    _, kind, _, _ = head.decode().split()
    body = json.loads(text) | {"something new": [1, 2, 3]}
    text = json.dumps(body).encode()
    digest = xxhash.xxh3_128_hexdigest(text)
    path.write_bytes(f"tierstore {kind} {version} {digest}\n".encode() + text)


@pytest.mark.parametrize("name", ["run.json", "commit-0000000003", "commit-0000000003.2"])
def test_run_of_a_later_version_is_refused_and_left_alone(golden: Path, name: str) -> None:
    as_version(golden / "run" / RANK / name, 2)
    with pytest.raises(FormatError, match="version 2"):
        read_run(golden / "run")
    report = verify(golden / "run")
    assert any("version 2" in fault.what for fault in report.faults)
    with (
        unchanged(golden / "run"),
        pytest.raises(tierstore.RunDirectoryError, match=r"version 2.*reads version 1"),
    ):
        Golden(golden / "run", resume=True)


@pytest.mark.parametrize("name", ["tierstore.json", f"{RANK}.commit"])
def test_checkpoint_of_a_later_version_is_refused(golden: Path, tmp_path: Path, name: str) -> None:
    as_version(golden / "published" / name, 2)
    if name != "tierstore.json":  # Which has the checksum of the other.
        data = (golden / "published" / name).read_bytes()
        entry = {"nbytes": len(data), "xxh3_128": xxhash.xxh3_128_hexdigest(data)}
        reseal(
            golden / "published" / "tierstore.json",
            "checkpoint",
            lambda body: body["files"].update({name: entry}),
        )
    with pytest.raises(FormatError, match="version 2"):
        read_checkpoint(golden / "published")
    model = Golden(tmp_path / "new")
    with (
        unchanged(golden / "published"),
        pytest.raises(tierstore.TierstoreError, match="version 2"),
    ):
        model.store.restore(checkpoint=golden / "published")
    model.store.close()
