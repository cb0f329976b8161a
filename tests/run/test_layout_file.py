"""Layout files: what is in pages is read from them, whatever version of the code cut the pages."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import tierstore
from tests.support.independent_reader import read_run
from tests.support.kept import commit_with
from tests.support.originals import flip, reseal, reseal_layout
from tests.support.toy import FIRST, FOURTH, MODEL, RANK, SECOND, THIRD, Toy, make_run, resumed
from tierstore.checkpoint.publish_stopped import publish_run
from tierstore.layout import ownership
from tierstore.layout.subgroups import Elements, Piece
from tierstore.tools.inspect.verify import verify

LATE = ("late", (3,), torch.float32, {}, True)


def layouts_in(run: Path) -> set[str]:
    return {path.name for path in (run / RANK).glob("layout-*")}


def manifest_in(run: Path, step: int) -> dict[str, Any]:
    data = (run / RANK / f"commit-{step:010d}").read_bytes()
    body: dict[str, Any] = json.loads(data.partition(b"\n")[2])
    return body


def test_commits_of_one_layout_name_one_file(tmp_path: Path) -> None:
    make_run(tmp_path, steps=5)
    assert layouts_in(tmp_path) == {
        f"layout-{manifest_in(tmp_path, step)['layout']}" for step in (4, 5)
    }
    assert len(layouts_in(tmp_path)) == 1


def test_a_layout_is_removed_with_the_last_manifest_that_names_it(tmp_path: Path) -> None:
    toy = Toy(tmp_path)
    toy.step()
    toy.store.synchronize()
    (first,) = layouts_in(tmp_path)
    toy.attach([LATE])
    toy.step()
    toy.store.synchronize()
    assert len(layouts_in(tmp_path)) == 2  # The commit before may still be needed.
    toy.step()
    toy.store.synchronize()
    (second,) = layouts_in(tmp_path)
    assert second != first
    toy.store.close()
    again = Toy(tmp_path, [*MODEL, [LATE]], resume=True)
    assert again.store.restore() == 3
    again.store.close()
    assert verify(tmp_path).good


def test_a_restart_removes_layouts_that_no_manifest_names(tmp_path: Path) -> None:
    make_run(tmp_path)
    used = layouts_in(tmp_path)
    for name in (f"layout-{'0' * 32}", f"layout-{'0' * 32}.tmp"):
        (tmp_path / RANK / name).write_bytes(b"left by a crash")
    assert verify(tmp_path).good
    resumed(tmp_path, 3).store.close()
    assert layouts_in(tmp_path) == used


def test_a_restart_heals_a_damaged_layout(tmp_path: Path) -> None:
    """Only a reader that has no model needs the file."""
    make_run(tmp_path)
    (name,) = layouts_in(tmp_path)
    for damage in (lambda path: flip(path, 200), Path.unlink):
        damage(tmp_path / RANK / name)
        assert [fault.place for fault in verify(tmp_path).faults] == [f"{RANK}/{name}"]
        toy = resumed(tmp_path, 3)
        commit_with(toy.store, damage.__name__)
        toy.store.close()
        assert verify(tmp_path).good


def test_a_manifest_is_small(tmp_path: Path) -> None:
    """Each page adds at most 64 bytes and its checksums; a parameter adds nothing."""
    specs = [
        (f"parameter-{i}", (40, 40), torch.float32, {"sum": torch.float32}, True)
        for i in range(150)
    ]
    sizes = []
    for count in (50, 150):
        run = tmp_path / str(count)
        toy = Toy(run, [specs[:count]], page_bytes=16384)
        toy.step()
        toy.store.pages.scalars.update({name: {"step": 1.0} for name, *_ in specs[:count]})
        commit_with(toy.store, {"position": 1})
        pages = toy.store.stats().pages
        toy.store.close()
        manifest = manifest_in(run, 1)
        checksums = sum(len(text) for *_, text in manifest["pages"])
        nbytes = (run / RANK / "commit-0000000001").stat().st_size
        sizes.append((pages, nbytes - checksums))
        assert len(json.dumps(manifest["pages"])) - checksums <= 64 * pages
    (few, small), (many, large) = sizes
    assert many >= 3 * few >= 60
    assert large - small <= 64 * (many - few)
    assert small < 64 * few + 1024


def cut_after_each(
    sequences: Sequence[Elements], page_bytes: int, *, may_cut: bool
) -> list[list[Piece]]:
    """Another way to cut: each parameter in two pages."""
    pages = []
    for number, elements in enumerate(sequences):
        numel, spec = elements.numel, elements.parameter
        unit = numel // spec.shape[0] if spec.shape else 1
        cut = numel // 2 // unit * unit if spec.elementwise else numel
        for start, stop in itertools.pairwise(sorted({0, cut, numel})):
            pages.append([Piece(parameter=number, start=start, stop=stop)])
    return pages


def test_a_run_that_other_code_has_cut_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    groups = [[FIRST, SECOND], [THIRD], [FOURTH]]
    with monkeypatch.context() as patched:
        patched.setattr(ownership, "cut_into_pages", cut_after_each)
        toy = Toy(tmp_path / "run", groups)
        for _ in range(3):
            toy.step()
        toy.store.checkpoint(tmp_path / "published")
        assert toy.store.stats().pages == 6
        toy.store.close()
    assert verify(tmp_path / "run").good
    assert verify(tmp_path / "published").good
    assert read_run(tmp_path / "run").step == 3
    publish_run(tmp_path / "run", tmp_path / "out")
    for name in ("published", "out"):
        toy = Toy(tmp_path / f"from {name}", groups)
        assert toy.store.stats().pages == 3
        assert toy.store.restore(checkpoint=tmp_path / name) == 3
        toy.assert_at(3)
        toy.store.close()
    toy = Toy(tmp_path / "run", groups, resume=True)
    with pytest.raises(tierstore.RunMismatchError, match=r"in other pages.*tierstore checkpoint"):
        toy.store.restore()
    toy.store.close()


def test_a_layout_with_records_elsewhere_is_corrupt(tmp_path: Path) -> None:
    make_run(tmp_path)
    reseal_layout(tmp_path / RANK / "commit-0000000003", lambda body: body.update(offsets="0" * 32))
    (fault,) = verify(tmp_path).faults
    assert "at other places" in fault.what


@pytest.mark.parametrize(
    "change",
    [lambda body: body["pages"].pop(), lambda body: body["pages"].append(body["pages"][0])],
)
def test_a_commit_with_another_number_of_pages_is_corrupt(
    change: Callable[[dict[str, Any]], None], tmp_path: Path
) -> None:
    make_run(tmp_path)
    reseal(tmp_path / RANK / "commit-0000000003", "commit", change)
    toy = Toy(tmp_path, resume=True)
    with pytest.raises(tierstore.CorruptionError, match="pages, but its layout has 2"):
        toy.store.restore()
    toy.store.close()
