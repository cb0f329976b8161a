"""verify() of manifests: of a checkpoint, of a run, of several ranks, and hostile ones."""

from __future__ import annotations

import itertools
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import xxhash

import tierstore
from tests.support.commands import call
from tests.support.originals import (
    STEPS,
    TWIN,
    check,
    committed_pages,
    flip,
    places,
    reseal,
    reseal_layout,
    text,
)
from tests.support.thread_ranks import ThreadJob
from tests.support.toy import MODEL, RANK, Toy, resumed
from tierstore.ranks.peers import Ranks
from tierstore.tools.inspect.summary import summarize

TENSOR = {"$tensor": {"dtype": "uint8", "shape": [], "data": "AA=="}}

# -------------------------------------------------------------------- a published checkpoint


def relist(published: Path, name: str) -> None:
    """Write the digest of a changed file into tierstore.json."""
    data = (published / name).read_bytes()
    entry = {"nbytes": len(data), "xxh3_128": xxhash.xxh3_128_hexdigest(data)}
    reseal(
        published / "tierstore.json",
        "checkpoint",
        lambda body: body["files"].update({name: entry}),
    )


def test_a_manifest_of_another_step(published: Path) -> None:
    name = f"{RANK}.commit"
    reseal(published / name, "commit", lambda body: body.update(step=STEPS + 1))
    relist(published, name)
    report = check(published)
    assert name in places(report)
    assert "step 4 of run" in text(report)


@pytest.mark.parametrize(
    "change",
    [
        lambda body: body.pop("pages"),
        lambda body: body.update(surprise=1),
        lambda body: body.update(page_bytes=0),
        lambda body: body.update(rank="0"),
        lambda body: body.update(pages=7),
        lambda body: body["pages"][0].__setitem__(0, "../../etc/passwd"),
        lambda body: body["pages"][0].__setitem__(1, -1),
        lambda body: body["pages"][0].__setitem__(2, "not hexadecimal"),
        lambda body: body["pages"][0].__setitem__(2, "00" * 8),
        lambda body: body["pages"][0].pop(),
        lambda body: body["pages"].pop(),
        lambda body: body["pages"].append(body["pages"][0]),
        lambda body: body["pages"].__setitem__(0, None),
        lambda body: body.update(layout="0" * 32),
        lambda body: body.update(layout="../run.json"),
        lambda body: body.update(dropped=["unknown"]),
        lambda body: body.update(dropped=[7]),
        lambda body: body.update(first=1),
        lambda body: body.update(hyperparameters=5),
        lambda body: body.update(hyperparameters=[1, 2, 3]),
        lambda body: body["hyperparameters"].pop(),
        lambda body: body["hyperparameters"][0].update(lr={"$unknown": 1}),
        lambda body: body.update(scalars=[1]),
        lambda body: body.update(scalars={"second": 1}),
        lambda body: body["scalars"].update(groups=[None]),
        lambda body: body["scalars"].update(groups=[1, 2, 3]),
        lambda body: body["scalars"].update(parameters={"second": 1}),
        lambda body: body.update(extra={"$unknown": 1}),
        lambda body: body.update(extra={"$dict": [[TENSOR, 1]]}),
    ],
)
def test_hostile_manifests(
    change: Callable[[dict[str, Any]], None], published: Path, run: Path, tmp_path: Path
) -> None:
    """Every reader reports them soon, and raises nothing else."""
    name = f"{RANK}.commit"
    reseal(published / name, "commit", change)
    relist(published, name)
    newest = f"{RANK}/commit-{STEPS:010d}"
    reseal(run / newest, "commit", change)
    assert_reported(published, run, tmp_path)


@pytest.mark.parametrize(
    "change",
    [
        lambda body: body.pop("groups"),
        lambda body: body.pop("pages"),
        lambda body: body.pop("offsets"),
        lambda body: body.update(offsets=7),
        lambda body: body.update(offsets="0" * 32),
        lambda body: body.update(groups=[[None]]),
        lambda body: body["groups"].pop(),
        lambda body: body["groups"][1].append(body["groups"][0][0]),
        lambda body: body["groups"][0].insert(0, {**body["groups"][0][1], "shape": [2**45]}),
        lambda body: body["groups"][0][0].update(shape=[2**62, 2**62]),
        lambda body: body["groups"][0][1].update(shape=[2**40]),
        lambda body: body["groups"][0][0].update(shape=[-1]),
        lambda body: body["groups"][0][0].update(dtype="load"),
        lambda body: body["groups"][0][0].update(shape=[1] * 17),
        lambda body: body["groups"][0][0].update(elementwise="no"),
        lambda body: body.update(pages=7),
        lambda body: body["pages"].pop(),
        lambda body: body["pages"].reverse(),
        lambda body: body["pages"][0].__setitem__(0, 99),
        lambda body: body["pages"][0].__setitem__(1, []),
        lambda body: body["pages"][0][1][0].__setitem__(0, -1),
        lambda body: body["pages"][0][1][0].__setitem__(1, []),
        lambda body: body["pages"][0][1][0][1][0].__setitem__(1, [2**62, 2**62]),
    ],
)
def test_layouts_sealed_by_somebody_else(
    change: Callable[[dict[str, Any]], None], published: Path, run: Path, tmp_path: Path
) -> None:
    reseal_layout(published / f"{RANK}.commit", change)
    for suffix in ("commit", "layout"):
        relist(published, f"{RANK}.{suffix}")
    reseal_layout(run / RANK / f"commit-{STEPS:010d}", change)
    assert_reported(published, run, tmp_path)


def assert_reported(published: Path, run: Path, tmp_path: Path) -> None:
    assert not check(published).good
    assert not check(run).good
    for directory in (published, run):
        assert summarize(directory).step in (None, STEPS - 1, STEPS)
    toy = Toy(tmp_path / "new")
    with pytest.raises(tierstore.CorruptionError):
        toy.store.restore(checkpoint=published)
    toy.store.close()


@pytest.mark.parametrize(
    "change",
    [
        lambda body: body.update(hyperparameters=5),
        lambda body: body.update(extra={"$unknown": 1}),
        lambda body: body.pop("first"),
    ],
)
def test_a_restart_ignores_a_hostile_manifest(
    change: Callable[[dict[str, Any]], None], run: Path
) -> None:
    """The restart uses the commit before it, as for a damaged manifest."""
    reseal(run / RANK / f"commit-{STEPS:010d}", "commit", change)
    resumed(run, STEPS - 1, groups=[*MODEL, [TWIN]]).store.close()


@pytest.mark.parametrize(
    "change",
    [
        lambda body: body.pop("files"),
        lambda body: body.update(files=[]),
        lambda body: body.update(world_size=3),
        lambda body: body.update(world_size=-1),
        lambda body: body.update(step="3"),
        lambda body: body.update(run_id="another"),
        lambda body: body.pop("name"),
        lambda body: body.update(name=7),
        lambda body: body.update(world_size=0),
        lambda body: body["files"].update({"../x": {"nbytes": 1, "xxh3_128": None}}),
        lambda body: body["files"].update({"x": {"nbytes": 1, "xxh3_128": None}}),
        lambda body: body["files"]["unpaged"].update(xxh3_128=None),
        lambda body: body["files"]["unpaged"].update(nbytes=0),
        lambda body: body["files"].pop(".metadata"),
        lambda body: body["files"].pop(f"{RANK}.page-000000"),
    ],
)
def test_hostile_markers(change: Callable[[dict[str, Any]], None], published: Path) -> None:
    reseal(published / "tierstore.json", "checkpoint", change)
    assert not check(published).good


def test_a_marker_that_lists_a_file_in_a_folder(published: Path) -> None:
    """Its size and checksum are right, but the name is not of a flat directory."""
    (published / "x").mkdir()
    (published / "x" / "y").write_bytes(b"")
    relist(published, "x/y")
    (fault,) = check(published).faults
    assert fault.place == "tierstore.json"


def test_a_later_version(published: Path) -> None:
    path = published / "tierstore.json"
    path.write_bytes(path.read_bytes().replace(b" checkpoint 1 ", b" checkpoint 2 ", 1))
    (fault,) = check(published).faults
    assert "has format version 2" in fault.what
    assert "use the version of tierstore that wrote it; if there is none" in fault.what


def test_files_that_do_not_belong(published: Path) -> None:
    (published / "README.md").write_text("mine")
    report = check(published)
    assert report.good
    assert report.notes == ("not part of the checkpoint: README.md",)


# ------------------------------------------------------------------------------------ a run


def test_nothing_was_committed(tmp_path: Path) -> None:
    Toy(tmp_path).store.close()
    report = check(tmp_path)
    assert (report.good, report.step) == (True, None)
    assert report.notes == ("nothing was committed yet, so there is nothing to check",)


def test_a_run_without_its_commits(run: Path) -> None:
    for path in (run / RANK).glob("commit-*"):
        path.unlink()
    (fault,) = check(run).faults
    assert fault.place == RANK
    assert "has a layout but no commit" in fault.what
    with pytest.raises(tierstore.RunDirectoryError, match="its commits are missing"):
        Toy(run, [*MODEL, [TWIN]], resume=True)
    assert not check(run).good
    Toy(run, [*MODEL, [TWIN]], overwrite=True).store.close()
    assert check(run).good


def test_a_run_that_was_stopped_while_overwriting(tmp_path: Path) -> None:
    toy = Toy(tmp_path, commit_every=None)
    toy.step()
    toy.store.close()
    assert check(tmp_path).good
    dirty = tmp_path / RANK / "dirty"
    dirty.write_text(json.dumps({"overwriting": "commit-0000000000"}))
    assert check(tmp_path).good  # The crash came after the next commit.
    for content in (
        json.dumps({"overwriting": "commit-0000000001"}),
        "",
        "[]",
        '{"overwriting": null}',
        '{"overwriting": "something else"}',
    ):
        dirty.write_text(content)
        (fault,) = check(tmp_path).faults
        assert fault.place == f"{RANK}/dirty"
        assert "some of its pages are of a later step" in fault.what


@pytest.fixture
def two_ranks(tmp_path: Path) -> Path:
    """A run of two ranks. Each rank owns a part."""

    def train(ranks: Ranks) -> None:
        toy = Toy(tmp_path / "two ranks", [*MODEL, [TWIN]], process_group=ranks)
        for _ in range(STEPS):
            toy.step()
        toy.store.close()

    assert ThreadJob(2).run(train) == [None, None]
    return tmp_path / "two ranks"


def test_two_ranks(two_ranks: Path) -> None:
    pages = [committed_pages(two_ranks, rank=rank) for rank in (RANK, "rank-00001")]
    assert all(pages)
    nbytes = sum((two_ranks / page).stat().st_size for page in itertools.chain(*pages))
    report = check(two_ranks)
    assert (report.good, report.step, report.bytes_checked) == (True, STEPS, nbytes)
    for page in itertools.chain(*pages):
        flip(two_ranks / page, 600)
        assert places(check(two_ranks)) == {page}
        flip(two_ranks / page, 600)


@pytest.mark.parametrize("absent", [RANK, "rank-00001"])
def test_an_absent_rank_is_one_fault_by_its_name(absent: str, two_ranks: Path) -> None:
    """Neither a fault per file of the rank, nor one per parameter that it owned a part of."""
    shutil.rmtree(two_ranks / absent)
    report = check(two_ranks)
    (fault,) = report.faults
    assert (fault.place, report.step) == (absent, STEPS)
    assert "is missing, and the run has 2 ranks: if it is on the disk of another" in fault.what
    code, out, _ = call("verify", "--json", two_ranks)
    assert code == 1
    assert [found["place"] for found in json.loads(out)["faults"]] == [absent]


def test_a_rank_with_a_newer_commit(two_ranks: Path) -> None:
    newest = f"rank-00001/commit-{STEPS:010d}"
    (two_ranks / newest).unlink()
    report = check(two_ranks)
    assert (report.good, report.step) == (True, STEPS - 1)
    assert "rank-00000 committed more than step 2" in report.notes[0]


def test_a_step_of_two_attempts(two_ranks: Path) -> None:
    reseal(
        two_ranks / "rank-00001" / f"commit-{STEPS:010d}",
        "commit",
        lambda body: body.update(attempt="another"),
    )
    report = check(two_ranks)
    assert (report.good, report.step) == (True, STEPS - 1)
    reseal(
        two_ranks / "rank-00001" / f"commit-{STEPS - 1:010d}",
        "commit",
        lambda body: body.update(attempt="another"),
    )
    assert "no committed step in common" in text(check(two_ranks))


def test_ranks_of_two_runs(two_ranks: Path) -> None:
    for name in ("run.json", *(f"commit-{step:010d}" for step in (STEPS - 1, STEPS))):
        kind = "run" if name == "run.json" else "commit"
        reseal(two_ranks / "rank-00001" / name, kind, lambda body: body.update(run_id="f" * 32))
    assert "holds ranks of different runs" in text(check(two_ranks))


def test_a_folder_of_another_rank(run: Path) -> None:
    os.rename(run / RANK, run / "rank-00001")
    report = check(run)
    assert {"rank-00000", "rank-00001/run.json"} <= places(report)
