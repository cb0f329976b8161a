"""Checkpoints of several ranks: stock PyTorch loads the same values as from one process."""

from __future__ import annotations

import dataclasses
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash
from torch.distributed.checkpoint.metadata import Metadata

from tests.rank_programs.checkpoints import EXTRA, Job, paged
from tests.support import independent_reader
from tests.support.originals import flip, reseal, reseal_layout
from tests.support.published import (
    assert_equal,
    digests,
    names_in,
    pages_of,
    read_with_stock,
    tensors_in,
)
from tests.support.rank_pool import RankPool
from tierstore.checkpoint.publish_stopped import publish_run
from tierstore.inspection.reader import Fault, Reader
from tierstore.inspection.verify_checkpoint import verify_checkpoint
from tierstore.layout.chunks import Chunk
from tierstore.layout.page_layout import lay_out
from tierstore.layout.subgroups import Subgroup
from tierstore.run.layout_file import RankLayout
from tierstore.run.manifest import Manifest
from tierstore.run.sealed import checksum_of
from tierstore.tools.inspect.summary import summarize
from tierstore.tools.inspect.verify import verify

TRAINED, GOES_ON = (1, 2, 3), (4, 5)
WORK = "tests.rank_programs.checkpoints:work"
# Number of ranks, how they hold the model, who owns what they hold whole, dtype.
Case = tuple[int, str, str, torch.dtype]
CASES: list[Case] = [
    (2, "copies", "by_parameter", torch.bfloat16),
    (3, "copies", "flat", torch.float32),
    (3, "rows", "auto", torch.bfloat16),
    (2, "columns", "auto", torch.float32),
    (4, "hsdp", "auto", torch.bfloat16),
    (3, "uneven", "auto", torch.float32),
]
# What begins from the checkpoint of each.
BEGUN: list[Case] = [
    (3, "rows", "auto", torch.bfloat16),
    (1, "copies", "auto", torch.float32),
    (2, "copies", "flat", torch.bfloat16),
    (4, "rows", "auto", torch.float32),
    (3, "copies", "by_parameter", torch.bfloat16),
    (2, "uneven", "auto", torch.float32),
]


def name_of(case: Case) -> str:
    ranks, layout, partition, dtype = case
    return f"{ranks} ranks, {layout}, {partition}, {dtype}"


def job_of(case: Case, directory: Path, steps: tuple[int, ...], **options: Any) -> Job:
    _, layout, partition, dtype = case
    return Job(
        run=directory / "run",
        checkpoint=directory / "checkpoint",
        layout=layout,
        partition=partition,
        dtype=dtype,
        steps=steps,
        **options,
    )


@pytest.fixture(scope="module")
def alone(pool: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of one process: <dtype>-<number of steps>/checkpoint."""
    root = tmp_path_factory.mktemp("alone")
    for dtype in (torch.float32, torch.bfloat16):
        for steps in (TRAINED, TRAINED + GOES_ON):
            case = (1, "copies", "auto", dtype)
            pool.run(1, WORK, job_of(case, root / f"{dtype}-{len(steps)}", steps))
    return root


@pytest.fixture(scope="module")
def published(pool: RankPool, tmp_path_factory: pytest.TempPathFactory) -> dict[Case, Path]:
    root = tmp_path_factory.mktemp("published")
    found = {}
    for number, case in enumerate(CASES):
        directory = root / str(number)
        pool.run(case[0], WORK, job_of(case, directory, TRAINED))
        found[case] = directory
    return found


def metadata_of(checkpoint: Path) -> Metadata:
    found: Metadata = pickle.loads((checkpoint / ".metadata").read_bytes())
    return found


@pytest.mark.quick(1)
@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_is_what_one_process_publishes(
    case: Case, published: dict[Case, Path], alone: Path
) -> None:
    checkpoint = published[case] / "checkpoint"
    reference = alone / f"{case[3]}-{len(TRAINED)}" / "checkpoint"
    report = verify(checkpoint)
    assert (report.faults, report.step) == ((), len(TRAINED))
    assert_equal(tensors_in(checkpoint), tensors_in(reference))
    # Every value that is in no page is there once, as in the other.
    assert (checkpoint / "unpaged").read_bytes() == (reference / "unpaged").read_bytes()
    found, expected = metadata_of(checkpoint), metadata_of(reference)
    assert found.state_dict_metadata.keys() == expected.state_dict_metadata.keys()
    assert found.planner_data == expected.planner_data
    ranks = {name[:10] for name in names_in(checkpoint) if ".page-" in name}
    assert ranks == {f"rank-{rank:05d}" for rank in range(case[0])}


@pytest.mark.quick(1)
@pytest.mark.parametrize(("case", "begun"), list(zip(CASES, BEGUN, strict=True)), ids=name_of)
def test_begins_a_run_on_other_ranks(
    case: Case,
    begun: Case,
    published: dict[Case, Path],
    alone: Path,
    pool: RankPool,
    tmp_path: Path,
) -> None:
    source = published[case] / "checkpoint"
    before = digests(source)
    job = job_of(begun, tmp_path, GOES_ON, begin_from=source, seed=5)
    assert pool.run(begun[0], WORK, job) == [(len(TRAINED), repr(EXTRA))] * begun[0]
    reference = alone / f"{case[3]}-{len(TRAINED + GOES_ON)}" / "checkpoint"
    assert verify(tmp_path / "checkpoint").good
    found = tensors_in(tmp_path / "checkpoint")
    assert_equal(paged(found), paged(tensors_in(reference)))
    assert digests(source) == before


@pytest.mark.quick(1)
@pytest.mark.parametrize("case", CASES[1:3], ids=name_of)
def test_a_run_is_rewound(case: Case, alone: Path, pool: RankPool, tmp_path: Path) -> None:
    """It goes on as if the steps in between had not been."""
    pool.run(case[0], WORK, job_of(case, tmp_path, TRAINED))
    resume = {"store": {"resume": True}, "seed": 5}
    job = dataclasses.replace(job_of(case, tmp_path, (6, 7, 8), **resume), checkpoint=None)
    assert {step for step, _ in pool.run(case[0], WORK, job)} == {len(TRAINED)}
    source, again = tmp_path / "checkpoint", tmp_path / "again"
    job = job_of(case, tmp_path, GOES_ON, begin_from=source, rewind=True, **resume)
    job = dataclasses.replace(job, checkpoint=again)
    assert pool.run(case[0], WORK, job) == [(len(TRAINED), repr(EXTRA))] * case[0]
    reference = alone / f"{case[3]}-{len(TRAINED + GOES_ON)}" / "checkpoint"
    assert verify(again).good
    assert_equal(paged(tensors_in(again)), paged(tensors_in(reference)))
    for path in (tmp_path / "run", again):
        assert (summarize(path).step, summarize(path).epoch) == (len(TRAINED + GOES_ON), 1)


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_another_reader_finds_the_same(
    case: Case, published: dict[Case, Path], alone: Path
) -> None:
    """In the run and in what was published, by the document alone."""
    reference = alone / f"{case[3]}-{len(TRAINED)}"
    expected = independent_reader.read_checkpoint(reference / "checkpoint")
    for found in (
        independent_reader.read_run(published[case] / "run"),
        independent_reader.read_checkpoint(published[case] / "checkpoint"),
    ):
        assert found.states.keys() == expected.states.keys()
        for name, states in expected.states.items():
            for state, values in states.items():
                assert found.states[name][state].tobytes() == values.tobytes(), (name, state)
        assert (found.scalars, found.step) == (expected.scalars, expected.step)
        assert found.hyperparameters == expected.hyperparameters


def test_command_publishes_a_run_of_several_ranks(
    published: dict[Case, Path], tmp_path: Path
) -> None:
    for case, directory in published.items():
        assert verify(directory / "run").good
        out = tmp_path / name_of(case)
        publication = publish_run(directory / "run", out)
        assert (publication.step, publication.bytes_copied) == (len(TRAINED), 0)
        assert publication.bytes_linked == sum(page.stat().st_size for page in pages_of(out))
        assert verify(out).good
        found = tensors_in(out)
        expected = tensors_in(directory / "checkpoint")
        # A run knows only one of the names of what is tied, and nothing that is not paged.
        paged_too = {key: expected[key] for key in paged(expected) if ".twin." not in key}
        assert_equal(found, paged_too)
        assert summarize(directory / "run").world_size == case[0]


@pytest.fixture(scope="module")
def by_stock(pool: RankPool, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Checkpoints of 3 ranks and of one rank, loaded by stock PyTorch: <ranks> to <ranks>."""
    root = tmp_path_factory.mktemp("stock")
    for ranks, layout in ((3, "rows"), (1, "copies")):
        case = (ranks, layout, "auto", torch.float32)
        pool.run(ranks, WORK, job_of(case, root / str(ranks), TRAINED, awkward=False))
    options: dict[str, Any] = {"model": "layers", "flat": False, "steps": [], "named": True}

    def load(saved: int, loaded: int) -> tuple[str, str, dict[str, Any]]:
        path = str(root / str(saved) / "checkpoint")
        return f"{saved} to {loaded}", "load", {**options, "path": path, "sharded": loaded > 1}

    return read_with_stock([load(1, 1), load(3, 1)], root / "to 1") | read_with_stock(
        [load(3, 2)], root / "to 2", ranks=2
    )


@pytest.mark.long
@pytest.mark.parametrize("name", ["3 to 1", "3 to 2"])
def test_stock_load_on_another_number_of_ranks(name: str, by_stock: dict[str, Any]) -> None:
    assert_equal(by_stock[name], by_stock["1 to 1"])


@pytest.mark.long
def test_begins_from_what_stock_fsdp2_saved(pool: RankPool, tmp_path: Path) -> None:
    path = tmp_path / "stock"
    saver = ("saved", "save", {"path": str(path), "model": "layers", "steps": [1, 2]})
    read_with_stock([saver], tmp_path / "saver", ranks=2)
    expected = tensors_in(path)
    for case in ((3, "rows", "auto", torch.float32), (2, "copies", "flat", torch.float32)):
        directory = tmp_path / name_of(case)
        stock = {"awkward": False, "normuon_beta": None}
        job = job_of(case, directory, (), begin_from=path, seed=5, **stock)
        assert pool.run(case[0], WORK, job) == [(2, "None")] * case[0]
        found = tensors_in(directory / "checkpoint")
        for key, tensor in expected.items():
            if key != "model.mean":
                assert_equal(found[key], tensor, key)


# ---------------------------------------------------------------------------- what is refused


def checked_part(checkpoint: Path, rank: int) -> Reader:
    """Return the reader of a rank of three, which has checked its part."""
    reader = Reader(checkpoint, rank=rank, world_size=3)
    verify_checkpoint(reader, published=True)
    return reader


@pytest.mark.long
def test_ranks_share_the_work_of_verifying(published: dict[Case, Path], tmp_path: Path) -> None:
    """Each byte is read once by all of them together, and each fault found by one."""
    whole = published[CASES[0]] / "checkpoint"
    alone = verify(whole)
    parts = [checked_part(whole, rank) for rank in range(3)]
    assert not any(part.faults for part in parts)
    assert sum(part.bytes_done for part in parts) == alone.bytes_checked
    assert max(part.bytes_done for part in parts) < 0.6 * alone.bytes_checked
    for number, page in enumerate(pages_of(whole)):
        damaged = shutil.copytree(whole, tmp_path / str(number))
        flip(damaged / page.name, 512)
        found = [bool(checked_part(damaged, rank).faults) for rank in range(3)]
        assert sorted(found) == [False, False, True]


def test_a_damaged_checkpoint_is_refused_on_all_ranks(
    published: dict[Case, Path], pool: RankPool, tmp_path: Path
) -> None:
    case = CASES[2]
    good = published[case] / "checkpoint"
    damaged = shutil.copytree(good, tmp_path / "damaged")
    flip(pages_of(damaged)[0], 600)
    job = job_of(case, tmp_path, (), begin_from=damaged, seed=5)
    found = pool.run(3, "tests.rank_programs.checkpoints:fail_to_begin", job, good)
    assert sorted(kind for kind, _ in found) == ["CorruptionError", "PeerFailed", "PeerFailed"]
    assert all("rank-00000.page-000000" in text for _, text in found)


def test_an_uneven_parameter_that_is_not_trained_is_refused(pool: RankPool, tmp_path: Path) -> None:
    work = "tests.rank_programs.checkpoints:publish_with_an_uneven_frozen_parameter"
    for text in pool.run(2, work, tmp_path):
        assert text == (
            "CheckpointError: 'bias' of the model is not trained, and ranks hold uneven parts of "
            "it, which PyTorch cannot gather: keep it whole on each rank"
        )
    assert not (tmp_path / "checkpoint").exists()


@pytest.mark.parametrize("failing", [0, 1])
def test_a_path_that_one_rank_cannot_use(failing: int, pool: RankPool, tmp_path: Path) -> None:
    """Nothing is left, and all ranks go on."""
    folder = tmp_path / "checkpoints"
    job = Job(run=tmp_path / "run", layout="rows", steps=(), checkpoint=folder / "good")
    found = pool.run(2, "tests.rank_programs.checkpoints:fail_to_publish", job, failing)
    assert found[failing][0] == "CheckpointError"
    assert found[1 - failing][0] == "PeerFailed"
    assert all("cannot name a checkpoint" in text for _, text, _ in found)
    assert all(went_on for *_, went_on in found)
    assert names_in(folder) == ["good"]
    assert verify(folder / "good").good


@pytest.mark.parametrize("failing", [0, 1])
def test_an_interrupt_on_one_rank(failing: int, pool: RankPool, tmp_path: Path) -> None:
    """It leaves no checkpoint; no rank waits, and none goes on."""
    job = Job(
        run=tmp_path / "run", layout="rows", steps=(), checkpoint=tmp_path / "checkpoints" / "1"
    )
    found = pool.run(3, "tests.rank_programs.checkpoints:interrupted", job, failing)
    kinds = [kind for kind, _ in found]
    assert kinds.pop(failing) == "KeyboardInterrupt"
    assert kinds == ["PeerFailed"] * 2
    assert names_in(tmp_path / "checkpoints") == []
    case = (3, "rows", "auto", torch.float32)
    again = job_of(case, tmp_path, (2,), store={"resume": True})
    assert pool.run(3, WORK, again) == [(1, "None")] * 3
    assert verify(tmp_path / "checkpoint").good


def test_the_oldest_are_removed(pool: RankPool, tmp_path: Path) -> None:
    for step in (1, 2, 3):
        job = Job(
            run=tmp_path / "run",
            layout="rows",
            steps=(step,),
            checkpoint=tmp_path / "checkpoints" / str(step),
            options={"keep_last": 2},
            store={"resume": True},
        )
        pool.run(2, WORK, job)
    assert names_in(tmp_path / "checkpoints") == ["2", "3"]
    for name in ("2", "3"):
        report = verify(tmp_path / "checkpoints" / name)
        assert report.good
        assert report.marked_whole


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    ("unmarked", "kept"),
    [(None, ["2", "3"]), ("rank-00000.whole", ["1", "3"]), ("rank-00001.whole", ["1", "3"])],
)
def test_a_checkpoint_is_whole_if_all_ranks_have_marked_it(
    unmarked: str | None, kept: list[str], pool: RankPool, tmp_path: Path
) -> None:
    folder = tmp_path / "checkpoints"
    for step in (1, 2, 3):
        job = Job(
            run=tmp_path / "run",
            layout="rows",
            steps=(step,),
            checkpoint=folder / str(step),
            options={"keep_last": 1},
            store={"resume": True},
        )
        if step == 3 and unmarked is not None:
            (folder / "2" / unmarked).unlink()
            assert not verify(folder / "2").marked_whole
        pool.run(2, WORK, job)
    assert names_in(folder) == kept


@pytest.mark.parametrize("after", ["step", "checkpoint"])
@pytest.mark.parametrize("failing", [0, 1])
def test_what_verification_finds_on_one_rank_fails_all(
    failing: int, after: str, pool: RankPool, tmp_path: Path
) -> None:
    job = Job(run=tmp_path / "run", layout="rows", steps=(), checkpoint=tmp_path / "checkpoints/1")
    found = pool.run(2, "tests.rank_programs.checkpoints:unreadable_meanwhile", job, failing, after)
    kinds = ["PeerFailed", "PeerFailed"]
    kinds[failing] = "StorageError"
    assert [kind for kind, _ in found] == kinds
    assert all("read failed" in text for _, text in found)
    marks = [path.name for path in (tmp_path / "checkpoints/1").glob("*.whole")]
    assert marks == [f"rank-{1 - failing:05d}.whole"]
    assert names_in(tmp_path / "checkpoints") == ["1"]


@pytest.mark.quick(4)
@pytest.mark.parametrize(
    ("kind", "change"),
    [
        ("layout", lambda body: body.update(pages=None)),
        ("layout", lambda body: body.update(pages=7)),
        ("layout", lambda body: body.update(pages=[])),
        ("layout", lambda body: body.update(pages={"a": 1})),
        ("layout", lambda body: body.pop("pages")),
        ("layout", lambda body: body["pages"].pop()),
        ("layout", lambda body: body["pages"].append(body["pages"][0])),
        ("layout", lambda body: body["pages"].reverse()),
        ("layout", lambda body: body["pages"][0].__setitem__(0, 99)),
        ("layout", lambda body: body["pages"][0].__setitem__(0, -1)),
        ("layout", lambda body: body["pages"][0].__setitem__(1, [])),
        ("layout", lambda body: first_shard(body).__setitem__(0, 99)),
        ("layout", lambda body: first_shard(body).__setitem__(0, "0")),
        ("layout", lambda body: first_shard(body).__setitem__(1, [])),
        ("layout", lambda body: first_shard(body).__setitem__(1, "ab")),
        ("layout", lambda body: first_chunk(body).__setitem__(0, [2**40, 0])),
        ("layout", lambda body: first_chunk(body).__setitem__(0, [-1, 0])),
        ("layout", lambda body: first_chunk(body).__setitem__(0, [0])),
        ("layout", lambda body: first_chunk(body).__setitem__(1, [0, 17])),
        ("layout", lambda body: first_chunk(body).__setitem__(1, [2**62, 2**62])),
        ("layout", lambda body: first_chunk(body).__setitem__(1, "ab")),
        ("layout", lambda body: body["groups"][0][0].update(shape=[2**20, 2**20])),
        ("layout", lambda body: body["groups"][0].pop()),
        ("layout", lambda body: body["groups"][1].append(body["groups"][1][0])),
        ("commit", lambda body: body["hyperparameters"][0].update(lr=7.0)),
        ("commit", lambda body: body.update(page_bytes=1)),
        ("commit", lambda body: body.update(scalars={})),
        ("commit", lambda body: body.update(dropped=["head.weight"])),
        ("commit", lambda body: body["pages"].__setitem__(0, None)),
    ],
)
def test_files_of_one_rank_sealed_by_somebody_else(
    kind: str,
    change: Callable[[dict[str, Any]], None],
    published: dict[Case, Path],
    tmp_path: Path,
) -> None:
    """Whatever they say, it is reported soon, and nothing else is raised."""

    def alter(manifest: Path) -> None:
        if kind == "layout":
            reseal_layout(manifest, change)
        else:
            reseal(manifest, "commit", change)

    checkpoint = shutil.copytree(published[CASES[2]] / "checkpoint", tmp_path / "checkpoint")
    alter(checkpoint / "rank-00001.commit")
    for name in ("rank-00001.commit", "rank-00001.layout"):
        data = (checkpoint / name).read_bytes()
        entry = {name: {"nbytes": len(data), "xxh3_128": xxhash.xxh3_128_hexdigest(data)}}
        marker = checkpoint / "tierstore.json"
        reseal(marker, "checkpoint", lambda body, entry=entry: body["files"].update(entry))
    assert not verify(checkpoint).good
    assert summarize(checkpoint).step == len(TRAINED)
    run = shutil.copytree(published[CASES[2]] / "run", tmp_path / "run")
    alter(run / "rank-00001" / f"commit-{len(TRAINED):010d}")
    assert not verify(run).good
    assert summarize(run).step in (len(TRAINED) - 1, len(TRAINED))


def first_shard(body: dict[str, Any]) -> list[Any]:
    found: list[Any] = body["pages"][0][1][0]
    return found


def first_chunk(body: dict[str, Any]) -> list[Any]:
    found: list[Any] = first_shard(body)[1][0]
    return found


def test_holes_and_overlaps_are_named(published: dict[Case, Path], tmp_path: Path) -> None:
    """Each rank is whole by itself."""
    newest = f"rank-00001/commit-{len(TRAINED):010d}"

    def faults(name: str, change: Callable[[list[Subgroup]], list[Subgroup]]) -> list[Fault]:
        run = shutil.copytree(published[CASES[2]] / "run", tmp_path / name)
        manifest = Manifest.from_bytes((run / newest).read_bytes(), newest)
        folder = (run / newest).parent
        data = (folder / f"layout-{manifest.layout}").read_bytes()
        layout = RankLayout.from_bytes(data, newest, digest=manifest.layout)
        subgroups = change(list(layout.subgroups))
        data = RankLayout.from_pages(layout.groups, list(map(lay_out, subgroups))).to_bytes()
        changed = dataclasses.replace(
            manifest, pages=manifest.pages[: len(subgroups)], layout=checksum_of(data)
        )
        (folder / f"layout-{changed.layout}").write_bytes(data)
        (run / newest).write_bytes(changed.to_bytes())
        return list(verify(run).faults)

    def moved(subgroups: list[Subgroup]) -> list[Subgroup]:
        """Put the first chunk where the first chunk of rank 0 is."""
        shard, *shards = subgroups[0].shards
        chunk = Chunk((0,) * len(shard.chunks[0].sizes), shard.chunks[0].sizes)
        first = dataclasses.replace(shard, chunks=(chunk, *shard.chunks[1:]))
        return [dataclasses.replace(subgroups[0], shards=(first, *shards)), *subgroups[1:]]

    assert faults("as it was", lambda subgroups: subgroups) == []
    (overlap,) = faults("overlap", moved)
    assert overlap.place == "parameter 'hidden.weight'"
    assert "on all ranks together: the chunk at [0, 0]" in overlap.what
    assert "overlap" in overlap.what
    holes = faults("hole", lambda subgroups: subgroups[:-1])
    assert {hole.place for hole in holes} == {"parameter 'head.weight'"}
    assert all("are in no chunk" in hole.what for hole in holes)
