"""The files of a run: what they say, that a person and torch can read them, and damage."""

from __future__ import annotations

import io
import json
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash

import tierstore
from tests.support import training
from tests.support.toy import RANK, Spec, Toy, contents, make_run, open_muon, unchanged
from tierstore.layout.records import RECORD_PREFIX_BYTES, record_trailer


def test_run_json_missing_beside_commits(tmp_path: Path) -> None:
    make_run(tmp_path)
    (tmp_path / RANK / "run.json").unlink()
    with (
        unchanged(tmp_path),
        pytest.raises(tierstore.RunDirectoryError, match=r"run\.json is missing, though"),
    ):
        tierstore.TierStore(tmp_path, resume=True)


@pytest.mark.parametrize("content", [b"", b"{}", b"tierstore run 1\n{}", bytes(1000)])
def test_something_else_in_place_of_run_json(content: bytes, tmp_path: Path) -> None:
    make_run(tmp_path)
    (tmp_path / RANK / "run.json").write_bytes(content)
    with (
        unchanged(tmp_path),
        pytest.raises(tierstore.CorruptionError, match=r"run\.json does not begin like"),
    ):
        tierstore.TierStore(tmp_path, resume=True)


@pytest.mark.parametrize("name", ["run.json", "commit-0000000003"])
def test_every_flipped_bit_of_a_small_file_is_seen(name: str, tmp_path: Path) -> None:
    """Of run.json it is an error; without the last manifest, the one before is found."""
    make_run(tmp_path)
    path = tmp_path / RANK / name
    whole = path.read_bytes()
    version = whole.index(b" 1 ") + 1  # Another version is an error of its own.
    for position in {*range(0, len(whole), 17), len(whole) - 1} - {version}:
        path.write_bytes(whole[:position] + bytes([whole[position] ^ 4]) + whole[position + 1 :])
        if name == "run.json":
            with pytest.raises(tierstore.CorruptionError, match=r"run\.json"):
                tierstore.TierStore(tmp_path, resume=True)
        else:
            with tierstore.TierStore(tmp_path, resume=True) as store:
                assert store.committed.step == 2


def sealed(kind: str, version: int, body: dict[str, Any]) -> bytes:
    """A small file as tierstore makes it: a line with a checksum, then JSON."""
    text = json.dumps(body).encode()
    return f"tierstore {kind} {version} {xxhash.xxh3_128_hexdigest(text)}\n".encode() + text


@pytest.mark.parametrize(
    ("rank", "world_size", "expected"),
    [
        (1, 2, "belongs to rank 1 of 2, this is rank 0 of 1: start the job with 2 ranks"),
        (0, 8, "has 8 ranks, but the directories of 7 ranks are missing beside it: .* on 8 ranks"),
    ],
)
def test_a_run_of_other_ranks_is_refused(
    rank: int, world_size: int, expected: str, tmp_path: Path
) -> None:
    make_run(tmp_path)
    path = tmp_path / RANK / "run.json"
    body = json.loads(path.read_bytes().partition(b"\n")[2])
    assert (body["rank"], body["world_size"]) == (0, 1)
    path.write_bytes(sealed("run", 1, {**body, "rank": rank, "world_size": world_size}))
    with unchanged(tmp_path), pytest.raises(tierstore.RunDirectoryError, match=expected):
        tierstore.TierStore(tmp_path, resume=True)


@pytest.mark.parametrize(("kind", "name"), [("run", "run.json"), ("commit", "commit-0000000003")])
def test_a_later_format_is_refused(kind: str, name: str, tmp_path: Path) -> None:
    make_run(tmp_path)
    (tmp_path / RANK / name).write_bytes(sealed(kind, 2, {"novelty": True}))
    with (
        unchanged(tmp_path),
        pytest.raises(tierstore.RunDirectoryError, match="has format version 2") as caught,
    ):
        tierstore.TierStore(tmp_path, resume=True)
    assert "use the version of tierstore that wrote it" in str(caught.value)


def test_a_manifest_of_another_run_is_passed_over(tmp_path: Path) -> None:
    make_run(tmp_path / "one", steps=3)
    make_run(tmp_path / "other", steps=4)
    stranger = tmp_path / "other" / RANK / "commit-0000000004"
    (tmp_path / "one" / RANK / stranger.name).write_bytes(stranger.read_bytes())
    with tierstore.TierStore(tmp_path / "one", resume=True) as store:
        assert store.committed.step == 3
    assert not (tmp_path / "one" / RANK / stranger.name).exists()


def test_no_manifest_is_whole(tmp_path: Path) -> None:
    make_run(tmp_path)
    for path in (tmp_path / RANK).glob("commit-*"):
        path.write_bytes(b"")
    with (
        unchanged(tmp_path),
        pytest.raises(tierstore.RunDirectoryError, match=r"no commit in .* is whole"),
    ):
        tierstore.TierStore(tmp_path, resume=True)


def test_what_a_crash_left_half_written_is_removed(tmp_path: Path) -> None:
    make_run(tmp_path)
    rank = tmp_path / RANK
    before = contents(tmp_path)
    left = ["commit-0000000004.tmp", "run.json.tmp", "dirty.tmp", "page-000000.a.tmp"]
    for name in left:
        (rank / name).write_bytes(b"half")
    (rank / "mine.tmp").write_bytes(b"precious")
    toy = Toy(tmp_path, resume=True)
    assert toy.store.restore() == 3
    toy.store.close()
    assert contents(tmp_path) == before | {f"{RANK}/mine.tmp": b"precious"}


def test_the_last_two_manifests_are_kept(tmp_path: Path) -> None:
    toy = Toy(tmp_path)
    for step in range(1, 5):
        toy.step()
        toy.store.synchronize()
        names = {path.name for path in (tmp_path / RANK).glob("commit-*")}
        assert names == {f"commit-{s:010d}" for s in (step - 1, step) if s}
    toy.store.close()


def test_a_person_can_read_a_manifest(tmp_path: Path) -> None:
    store, optimizer, parameters = open_muon(tmp_path)
    training.train(optimizer, parameters, range(1, 4))
    store.register(progress={"epoch": 7, "best": (1.5, None)})
    store.commit()
    store.close()
    head, _, text = (tmp_path / RANK / "commit-0000000003").read_text().partition("\n")
    assert head == f"tierstore commit 1 {xxhash.xxh3_128_hexdigest(text.encode())}"
    manifest = json.loads(text)
    assert manifest["step"] == 3
    assert manifest["extra"] == {"progress": {"epoch": 7, "best": {"$tuple": [1.5, None]}}}
    muon_group, adamw_group = manifest["hyperparameters"][:2]
    assert (muon_group["algorithm"], muon_group["lr"], muon_group["momentum"]) == (
        "muon",
        0.02,
        0.9,
    )
    assert (adamw_group["algorithm"], adamw_group["lr"]) == ("adamw", 3e-3)
    assert adamw_group["betas"] == {"$tuple": [0.8, 0.95]}
    assert {"step": 3.0} in manifest["scalars"]["groups"]
    assert manifest["scalars"]["parameters"] == {"rarely": {"step": 1.0}}
    data = (tmp_path / RANK / f"layout-{manifest['layout']}").read_text()
    head, _, text = data.partition("\n")
    assert head == f"tierstore layout 1 {manifest['layout']}"
    layout = json.loads(text)
    assert layout["groups"][0][0] == {
        "name": "wide",
        "shape": [17, 61],
        "dtype": "bfloat16",
        "states": {"momentum_buffer": "bfloat16"},
        "elementwise": False,
    }
    identity = json.loads((tmp_path / RANK / "run.json").read_text().partition("\n")[2])
    assert manifest["run_id"] == identity["run_id"]
    assert identity["page_bytes"] == 10000


def test_every_record_is_a_file_that_torch_load_reads(tmp_path: Path) -> None:
    store, optimizer, parameters = open_muon(tmp_path)
    training.train(optimizer, parameters, range(1, 4), scheduler=training.make_scheduler(optimizer))
    store.close()
    expected = training.resident_run(3, torch.bfloat16, page_bytes=10000)
    manifest = json.loads((tmp_path / RANK / "commit-0000000003").read_text().partition("\n")[2])
    elements: dict[str, int] = {}
    for page, (slot, *_) in zip(store._session.table.pages, manifest["pages"], strict=True):
        file = (tmp_path / RANK / f"page-{page.index:06d}.{slot}").read_bytes()
        for record in (record for section in page.layout.sections for record in section.records):
            nbytes = RECORD_PREFIX_BYTES + record.data_nbytes
            nbytes += len(record_trailer(record.chunk.sizes, record.dtype))
            loaded = load_record(file[record.offset : record.offset + nbytes])
            name = f"{record.state} of {record.parameter.name}"
            assert torch.equal(loaded, record.chunk.select(expected[name]))
            assert loaded.dtype == record.dtype
            elements[name] = elements.get(name, 0) + loaded.numel()
    assert elements == {
        name: tensor.numel()
        for name, tensor in expected.items()
        if not name.startswith(("parameter ", "step of ")) and tensor.numel()
    }


def load_record(content: bytes) -> torch.Tensor:
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        assert {name.partition("/")[2] for name in archive.namelist()} == {
            "data.pkl",
            "byteorder",
            "version",
            "data/0",
        }
    tensor = torch.load(io.BytesIO(content), weights_only=True)
    assert isinstance(tensor, torch.Tensor)
    return tensor


def test_the_first_record_by_plain_arithmetic(tmp_path: Path) -> None:
    """17 x 61 elements of float32, between 512 bytes before them and 244 behind."""
    store, optimizer, parameters = open_muon(tmp_path)
    training.train(optimizer, parameters, range(1, 2))
    master = store.pages.read_states(["wide"])["wide"]["master"]
    store.close()
    file = (tmp_path / RANK / "page-000000.a").read_bytes()
    assert torch.equal(load_record(file[: 512 + 17 * 61 * 4 + 244]), master)
    data = torch.frombuffer(bytearray(file[512 : 512 + 17 * 61 * 4]), dtype=torch.float32)
    assert torch.equal(data.view(17, 61), master)


@pytest.mark.parametrize(
    ("dtype", "momentum_dtype"),
    [
        (torch.float32, None),
        (torch.float32, torch.bfloat16),
        (torch.bfloat16, None),
        (torch.bfloat16, torch.float32),
        (torch.float16, None),
        (torch.float16, torch.bfloat16),
        (torch.float64, None),
    ],
)
def test_every_dtype_comes_back(
    dtype: torch.dtype, momentum_dtype: torch.dtype | None, tmp_path: Path
) -> None:
    store, optimizer, parameters = open_muon(tmp_path, dtype, momentum_dtype=momentum_dtype)
    training.train(optimizer, parameters, range(1, 4))
    expected = training.snapshot(optimizer, parameters)
    store.close()
    assert expected["momentum_buffer of wide"].any()
    store, optimizer, parameters = open_muon(
        tmp_path, dtype, momentum_dtype=momentum_dtype, resume=True
    )
    assert optimizer.restore() == 3
    actual = training.snapshot(optimizer, parameters)
    training.assert_identical(actual, expected)
    assert {name: tensor.dtype for name, tensor in actual.items()} == {
        name: tensor.dtype for name, tensor in expected.items()
    }
    assert actual["momentum_buffer of wide"].dtype == (momentum_dtype or dtype)
    store.close()


def test_states_of_every_dtype_that_a_record_has(tmp_path: Path) -> None:
    dtypes = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
    dtypes += [torch.float8_e4m3fn, torch.float8_e5m2, torch.bool]
    dtypes += [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8]
    states = {f"state_{number}": dtype for number, dtype in enumerate(dtypes)}
    model: list[list[Spec]] = [[("all", (3, 5), torch.float32, states, False)]]
    values = {name: (torch.arange(15).view(3, 5) % 7).to(dtype) for name, dtype in states.items()}
    toy = Toy(tmp_path, model)
    toy.store.pages.write_states({"all": values})
    toy.store.close()
    toy = Toy(tmp_path, model, resume=True)
    toy.store.restore()
    found = toy.store.pages.read_states()["all"]
    assert found.keys() == values.keys()
    for name, value in values.items():
        assert found[name].dtype == value.dtype
        assert torch.equal(found[name].view(torch.uint8), value.view(torch.uint8))
    toy.store.close()
