"""A run of the simulated model goes on, with all states, on another number of ranks."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.simulation.plan import PAGE_BYTES, Model, Plan, beginning
from tests.support.kept import commit_with, unwanted
from tests.support.thread_ranks import ThreadJob
from tierstore.ranks.peers import Ranks
from tierstore.store import TierStore

PLAN = Plan([beginning(3)], random.Random(0), "resharded", 6, ("synchronize",))


def on_ranks(world_size: int, directory: Path, act: Callable[[TierStore, Model], str]) -> None:
    """Open a run on some ranks, and require that ``act`` returns nothing on each of them."""

    def run(ranks: Ranks) -> str:
        store = TierStore(
            directory,
            page_bytes=PAGE_BYTES,
            host_memory=2**20,
            resume=True,
            process_group=ranks,
        )
        model = Model(world_size)
        store.pages.attach(model.groups)
        for name in PLAN.versions[-1].counts:
            store.pages.scalars[name] = {"count": 0}
        found = act(unwanted(store), model)
        store.close()
        return found

    assert ThreadJob(world_size).run(run) == [""] * world_size


@pytest.mark.filterwarnings("ignore:the run in .* goes from 3 to")
@pytest.mark.parametrize(("world_size", "from_checkpoint"), [(2, False), (4, True)])
def test_all_states_are_there_on_other_ranks(
    tmp_path: Path, world_size: int, from_checkpoint: bool
) -> None:
    run, published = tmp_path / "run", tmp_path / "published"

    def train(store: TierStore, model: Model) -> str:
        store.restore()
        for action in PLAN.actions:
            if action.kind == "step":
                model.step(store, action.value)
            elif action.kind == "rates":
                model.set_rates(action.value)
            elif action.kind == "commit":
                commit_with(store, action.value)
        store.checkpoint(published)
        return model.difference(store, PLAN.versions[-1], restored=False)

    def go_on(store: TierStore, model: Model) -> str:
        store.restore(checkpoint=published if from_checkpoint else None)
        return model.difference(store, PLAN.versions[-1], restored=False)

    on_ranks(3, run, train)
    on_ranks(world_size, tmp_path / "another" if from_checkpoint else run, go_on)
