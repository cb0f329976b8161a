"""print() of a store, its counters, a checkpoint and an optimizer."""

from __future__ import annotations

import copy
import os
from pathlib import Path
from typing import Any

import pytest
import torch

import muon
import tierstore
from tests.support.thread_ranks import ThreadJob
from tests.support.toy import Toy, step_on_two_ranks
from tests.support.twins import parameter
from tierstore.storage.memory import MemoryStorage


def optimizer_in(store: tierstore.TierStore | None) -> muon.Muon:
    groups: list[dict[str, Any]] = [
        {"params": [("a", parameter(0)), ("b", parameter(1))]},
        {"params": [("c", parameter(2))], "algorithm": "adamw"},
    ]
    for group in groups:
        for _, weight in group["params"]:
            weight.grad = torch.ones_like(weight)
    return muon.Muon(groups, store=store)


def test_a_store_from_its_beginning_to_its_end(tmp_path: Path) -> None:
    path = str(tmp_path)
    store = tierstore.TierStore(tmp_path)
    assert repr(store) == (
        f"TierStore({path!r}, step 0, no commit, no pages before the first step or restore())"
    )
    optimizer = optimizer_in(store)
    optimizer.step()
    store.synchronize()
    pages = f"{tierstore.pages.format_bytes(store.stats().state_bytes)} in 2 pages"
    assert repr(store) == f"TierStore({path!r}, step 1, committed 1, {pages}: host 2)"
    store.move("nvme")
    assert repr(store).endswith(f", {pages}: nvme 2)")
    store.close()
    assert repr(store) == f"TierStore({path!r}, closed, step 1, committed 1, {pages})"
    store = tierstore.TierStore(path, resume=True)
    assert repr(store).startswith(f"TierStore({path!r}, needs restore(), step 0, committed 1, no p")
    store.close()


def test_a_store_in_memory() -> None:
    optimizer = optimizer_in(None)
    optimizer.step()
    assert repr(optimizer.store).startswith("TierStore(None, step 1, ")
    assert repr(tierstore.TierStore(MemoryStorage())).startswith("TierStore('memory")


def test_a_store_of_several_directories(tmp_path: Path) -> None:
    paths = [str(tmp_path / name) for name in "ab"]
    with tierstore.TierStore(paths) as store:
        assert repr(store).startswith(f"TierStore({paths!r}, step 0, ")


def test_a_store_of_several_ranks(tmp_path: Path) -> None:
    """One rank prints alone: that is not a call of all ranks."""

    def act(ranks: tierstore.pages.Ranks) -> str:
        toy = Toy(tmp_path, process_group=ranks)
        toy.step()
        text = repr(toy.store) if ranks.rank else ""
        toy.store.close()
        return text

    first, second = ThreadJob(2).run(act)
    assert first == ""
    assert second.startswith(f"TierStore({str(tmp_path)!r}, rank 1 of 2, step 1, ")


def test_a_run_of_other_ranks(tmp_path: Path) -> None:
    step_on_two_ranks(tmp_path)
    with (
        pytest.warns(UserWarning, match="from 2 to 1 ranks"),
        tierstore.TierStore(tmp_path, resume=True) as store,
    ):
        assert repr(store).startswith(f"TierStore({str(tmp_path)!r}, needs restore(), step 0, no p")


def test_a_store_that_failed(tmp_path: Path) -> None:
    with tierstore.TierStore(tmp_path) as store:
        optimizer = optimizer_in(store)
        optimizer.step()
        sweep = store.pages.sweep()
        next(sweep.__enter__())
        assert "in a step, step" in repr(store)
        with pytest.raises(tierstore.SweepError):
            sweep.__exit__(None, None, None)
        assert "failed: SweepError, step" in repr(store)


def test_a_store_in_a_forked_process(tmp_path: Path) -> None:
    with tierstore.TierStore(tmp_path) as store:
        optimizer = optimizer_in(store)
        optimizer.step()
        pid = os.fork()
        if not pid:
            os._exit("opened by another process, step 1" not in repr(optimizer))
        assert os.waitpid(pid, 0)[1] == 0


def test_objects_whose_constructor_has_raised() -> None:
    """A debugger prints them."""
    assert repr(tierstore.TierStore.__new__(tierstore.TierStore)) == "TierStore(not open)"
    assert repr(muon.Muon.__new__(muon.Muon)) == "Muon(0 parameters in 0 groups; None)"
    paged = tierstore.Paged.__new__(tierstore.Paged)
    assert repr(paged) == "Paged(0 parameters in 0 groups; None)"


def test_an_optimizer() -> None:
    optimizer = optimizer_in(None)
    counts = "Muon(3 parameters in 2 groups: 2 muon, 1 adamw; "
    assert repr(optimizer) == f"{counts}{optimizer.store!r})"
    optimizer.step()
    for each in (optimizer, copy.deepcopy(optimizer)):
        assert repr(each).startswith(f"{counts}TierStore(None, step ")
    paged = tierstore.Paged([parameter()], torch.optim.SGD, lr=0.1)
    assert repr(paged).startswith("Paged(1 parameter in 1 group: 1 SGD; TierStore(None, step 0, ")


def test_a_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint"
    with tierstore.TierStore(tmp_path / "run") as store:
        optimizer_in(store).step()
        publication = store.checkpoint(path)
        publication.wait()
        nbytes = tierstore.pages.format_bytes(store.stats().state_bytes)
    assert repr(publication) == f"Publication({str(path)!r}, step 1, published, {nbytes} linked)"


def test_a_checkpoint_that_is_copied_or_failed() -> None:
    publication = tierstore.Publication("a", 7)
    publication.bytes_total, publication.bytes_copied = 2048, 1024
    text = "Publication('a', step 7, in progress, 1.0 KiB of 2.0 KiB copied)"
    assert repr(publication) == text

    def fail() -> None:
        raise tierstore.TierstoreError("a fault")

    publication.outcome.settle(fail)
    assert repr(publication) == text.replace("in progress", "failed: TierstoreError")


def test_counters_print_as_a_table(tmp_path: Path) -> None:
    with tierstore.TierStore(tmp_path, endurance="600TBW") as store:
        lines = str(store.stats()).splitlines()
        assert "steps                   0" in lines
        assert not any("per_step" in line or "days_left" in line for line in lines)
        optimizer_in(store).step()
        store.synchronize()
        stats = store.stats()
    table = dict(line.split(maxsplit=1) for line in str(stats).splitlines())
    assert table["state_bytes"] == tierstore.pages.format_bytes(stats.state_bytes)
    assert table["pages_in"] == "host 2"
    assert table["pages"] == "2"
    assert table["drive_life_used"].endswith("%")
    assert table["bytes_written_per_step"].endswith("KiB")
    assert repr(stats).startswith("Stats(engine=")
