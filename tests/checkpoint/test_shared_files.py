"""Page files with a second user: a checkpoint, a mapping, a forked child."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
import torch

import tierstore
from tests.support.faults import Fault, FaultyStorage
from tests.support.kept import commit_with, kept_by
from tests.support.thread_ranks import ThreadJob
from tests.support.toy import RANK, SECOND, THIRD, Spec, Toy, resumed
from tierstore.ranks.peers import Ranks
from tierstore.storage.memory import MemoryFiles, MemoryStorage
from tierstore.storage.select import open_storage

# Of the parameters that one rank owns whole, the second goes to another rank than the first.
OTHER: Spec = ("other", (3, 4), torch.float16, {}, False)


def test_a_forked_child_keeps_what_it_mapped(tmp_path: Path) -> None:
    toy = Toy(tmp_path)
    toy.step()
    states = toy.store.pages.read_states()
    before = states["second"]["average"].clone()
    go = os.pipe()
    child = os.fork()
    if not child:
        os.read(go[0], 1)
        os._exit(0 if torch.equal(states["second"]["average"], before) else 1)
    del states  # Here nobody uses it any more.
    for _ in range(4):
        toy.step()
    toy.store.synchronize()
    os.write(go[1], b"!")
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    for descriptor in go:
        os.close(descriptor)
    toy.store.close()


@pytest.mark.parametrize("commit_every", [1, None])
def test_no_space_for_a_shared_file_leaves_the_commit(
    commit_every: int | None, tmp_path: Path
) -> None:
    storage = FaultyStorage(open_storage(tmp_path / RANK))
    toy = Toy(storage, commit_every=commit_every)
    toy.step()
    toy.step()
    toy.store.synchronize()
    states = toy.store.pages.read_states()
    fault = Fault("error", "create", probability=1.0, errno=errno.ENOSPC)
    storage.arm(fault)
    if commit_every is not None:
        toy.step()  # Into the other copies, which nobody shares.
    with pytest.raises(tierstore.StorageError, match="No space"):
        toy.step()
    assert toy.store.committed.step in (2, 3)
    storage.disarm()
    assert toy.store.restore() == toy.store.committed.step
    toy.assert_at(toy.store.committed.step)
    assert states["second"]["average"].eq(2).all()
    toy.store.close()


def test_a_refused_restore_leaves_no_stale_spares(tmp_path: Path) -> None:
    toy = Toy(tmp_path / "run")
    toy.step()
    toy.store.checkpoint(tmp_path / "checkpoints" / "one")

    def refuse(committed: tierstore.CommittedStep) -> None:
        raise ValueError("not this one")

    with pytest.raises(ValueError, match="not this one"):
        toy.store.restore(check=refuse)
    for _ in range(4):
        toy.step()
    toy.store.close()
    Toy(tmp_path / "run", resume=True).store.close()


def test_a_failed_checkpoint_gives_its_space_back(tmp_path: Path) -> None:
    storage = FaultyStorage(open_storage(tmp_path / RANK))
    toy = Toy(storage)
    toy.step()
    storage.arm(Fault("error", "folder_put", call=2, errno=errno.ENOSPC))
    with pytest.raises(tierstore.StorageError, match="No space"):
        toy.store.checkpoint(tmp_path / "checkpoints" / "one")
    assert not list((tmp_path / RANK).glob("*.next"))
    assert not list((tmp_path / "checkpoints").iterdir())
    toy.step()
    toy.store.checkpoint(tmp_path / "checkpoints" / "one")
    toy.store.close()


def test_what_a_run_begins_with_can_be_committed(tmp_path: Path) -> None:
    """Before any step: the commit holds what was loaded, and its state."""
    toy = Toy(tmp_path)
    toy.store.pages.write_states({"second": {"average": torch.full((9,), 5.0)}})
    commit_with(toy.store, {"seed": 3})
    toy.store.close()
    again = Toy(tmp_path, resume=True)
    assert again.store.restore() == 0
    assert kept_by(again.store) == {"seed": 3}
    assert again.store.pages.read_states()["second"]["average"].eq(5).all()
    again.store.close()


def test_one_rank_links_and_another_copies() -> None:
    """Each rank links or copies its own pages; nothing is appended to a linked file."""
    folders: dict[str, dict[str, dict[str, bytearray]]] = {}
    files = [MemoryFiles(folders) for _ in range(2)]

    def run(ranks: Ranks) -> None:
        storage = FaultyStorage(MemoryStorage(files[ranks.rank]))
        toy = Toy(storage, [[SECOND], [THIRD, OTHER]], process_group=ranks)
        toy.step()
        if ranks.rank == 1:
            fault = Fault("error", "folder_link", probability=1.0, errno=errno.EXDEV)
            storage.arm(fault)
        toy.store.checkpoint("/checkpoints/one").wait()
        toy.step()
        toy.step()
        toy.store.close()

    assert ThreadJob(2).run(run) == [None, None]
    published = folders["/checkpoints"]["one"]
    for rank in range(2):
        names = [name for name in published if name.startswith(f"rank-0000{rank}.page")]
        assert names
        for name in names:
            own = files[rank].contents[f"{name.removeprefix(f'rank-0000{rank}.')}.a"]
            assert len(published[name]) == len(own)
            assert published[name] is not own


def test_the_run_resumes_after_these_failures(tmp_path: Path) -> None:
    toy = Toy(tmp_path)
    toy.step()
    states = toy.store.pages.read_states()
    toy.step()
    toy.step()
    toy.store.close()
    assert states["second"]["average"].eq(1).all()
    resumed(tmp_path, 3).store.close()
