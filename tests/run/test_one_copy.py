"""commit_every=None: half the space, and no restart from pages of mixed steps."""

from __future__ import annotations

from pathlib import Path

import pytest

import tierstore
from tests.support.toy import RANK, Toy, resumed, train_and_die, unchanged, unchanged_parameters


def page_blocks(directory: Path) -> int:
    return sum(path.stat().st_blocks for path in (directory / RANK).glob("page-*"))


def test_one_copy_takes_half_the_space(tmp_path: Path) -> None:
    for commit_every in (1, None):
        toy = Toy(tmp_path / str(commit_every), commit_every=commit_every)
        for _ in range(3):
            toy.step()
            toy.store.synchronize()
        toy.store.close()
    assert page_blocks(tmp_path / "1") == 2 * page_blocks(tmp_path / "None") > 0
    resumed(tmp_path / "None", 3, commit_every=None).store.close()


@pytest.mark.parametrize(
    ("calls", "overwritten", "commit_every"),
    [
        (["step", "synchronize", "step"], 1, None),
        (["step", "synchronize", "step"], 1, 1),
        (["step", "synchronize", "step", "commit", "step"], 1, None),
        (["step", "synchronize", "step", "synchronize", "step"], 2, None),
    ],
)
def test_killed_while_the_only_copy_was_overwritten(
    calls: list[str], overwritten: int, commit_every: int | None, tmp_path: Path
) -> None:
    train_and_die(tmp_path, calls, commit_every=None)
    expected = f"overwriting step {overwritten}: its pages come from different steps"
    for _ in range(2):
        with (
            unchanged(tmp_path),
            pytest.raises(tierstore.RunDirectoryError, match=expected) as caught,
        ):
            Toy(tmp_path, resume=True, commit_every=commit_every)
        assert "start over with overwrite=True" in str(caught.value)
    with unchanged(tmp_path), pytest.raises(tierstore.RunDirectoryError, match="overwrite=True"):
        Toy(tmp_path, commit_every=commit_every)
    toy = Toy(tmp_path, overwrite=True, commit_every=commit_every)
    toy.step()
    toy.store.close()
    resumed(tmp_path, 1, commit_every=commit_every).store.close()


@pytest.mark.parametrize("commit_every", [None, 1])
@pytest.mark.parametrize(
    ("calls", "step"),
    [
        (["step", "step"], 0),
        (["step", "step", "synchronize"], 2),
        (["step", "synchronize", "step", "synchronize"], 2),
        (["step", "synchronize", "commit", "synchronize"], 1),
        (["step", "step", "close"], 2),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, list) else str(value),
)
def test_killed_where_the_only_copy_is_whole(
    calls: list[str], step: int, commit_every: int | None, tmp_path: Path
) -> None:
    train_and_die(tmp_path, calls, commit_every=None)
    toy = resumed(tmp_path, step, commit_every=commit_every)
    toy.step()
    toy.store.close()
    resumed(tmp_path, step + 1, commit_every=commit_every).store.close()


def test_killed_between_a_commit_and_taking_back_the_mark(tmp_path: Path) -> None:
    calls = ["step", "synchronize", "step", "synchronize"]
    train_and_die(tmp_path, calls, before=("unlink", "dirty"), commit_every=None)
    assert (tmp_path / RANK / "dirty").exists()
    toy = resumed(tmp_path, 2, commit_every=None)
    assert not (tmp_path / RANK / "dirty").exists()
    toy.store.close()


def test_crash_between_a_second_commit_of_a_step_and_taking_back_the_mark(tmp_path: Path) -> None:
    """The mark is about the first commit of the step; the pages are from the second."""
    toy = Toy(tmp_path, commit_every=None)
    toy.step()
    toy.store.synchronize()
    states = toy.store.pages.read_states().items()
    toy.store.pages.write_states(
        {name: {s: t.clone() for s, t in own.items()} for name, own in states}
    )
    toy.store.close()
    mark = tmp_path / RANK / "dirty"
    mark.write_text('{"overwriting": "commit-0000000001"}')
    resumed(tmp_path, 1, commit_every=None).store.close()
    assert not mark.exists()
    mark.write_text('{"overwriting": "commit-0000000001.2"}')
    with pytest.raises(tierstore.RunDirectoryError, match="overwriting step 1"):
        Toy(tmp_path, resume=True, commit_every=None)


def test_going_back_is_refused_once_the_only_copy_was_overwritten(tmp_path: Path) -> None:
    toy = Toy(tmp_path, commit_every=None)
    toy.step()
    toy.store.synchronize()
    assert toy.store.restore() == 1
    toy.step()
    with (
        unchanged_parameters(toy),
        pytest.raises(tierstore.RunDirectoryError, match="overwriting step 1"),
    ):
        toy.store.restore()
    toy.step()
    toy.store.close()
    resumed(tmp_path, 3, commit_every=None).store.close()
