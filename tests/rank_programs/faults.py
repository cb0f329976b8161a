"""Ranks that train with a store until one of them dies, fails or gets stuck, and go on later."""

from __future__ import annotations

import itertools
import re
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch.distributed as dist

import muon
import tierstore
from tests.rank_programs.job import Failure, Here
from tests.rank_programs.training import (
    SHAPES,
    Case,
    Model,
    Tensors,
    Trained,
    local,
    trained_by,
    whole_gradients,
)
from tests.support.faults import Fault, FaultyStorage
from tests.support.kept import commit_with, wanted
from tests.support.training import make_groups
from tierstore.storage.select import open_storage

# Steps after those that were found.
GOES_ON = 3


@dataclass(frozen=True, slots=True)
class Durable:
    """A step that a rank knows to be durable on all of them."""

    step: int


@dataclass(frozen=True, slots=True)
class Restored:
    """The step that a rank restored, and the result of the restore."""

    step: int
    extra: object
    values: Tensors
    """Parameter name -> the elements that this rank holds, at that step."""
    trained: Trained


Wrong = Callable[[Here, FaultyStorage, int], None]
"""Does something to a rank as it begins a step, or has it happen within one."""


def train_until(here: Here, case: Case, wrong: Wrong | None, culprit: int) -> Failure:
    """Train, telling of each step as it is begun, until a rank cannot go on.

    Every third step is made durable on all ranks before the next begins.
    """
    model = Model(case)
    assert case.directory is not None
    where = case.directory / f"rank-{here.rank:05d}"
    storage = FaultyStorage(open_storage(where))
    try:
        with tierstore.TierStore(storage, **case.store_options(here.rank)) as store:
            groups = make_groups(model.parameters, SHAPES)
            optimizer = muon.Muon(groups, store=store, **case.options)
            for step in itertools.count(1):
                here.test.send(step)
                if here.rank == culprit and wrong is not None:
                    wrong(here, storage, step)
                model.set_gradients(whole_gradients(SHAPES, step))
                optimizer.step()
                commit_with(store, {"step": step})
                if step % 3 == 0:
                    store.synchronize()
                    here.test.send(Durable(step))
    except tierstore.PeerFailed as error:
        return Failure(_absent(error.reason, error.rank), error.reason, time.monotonic())
    except tierstore.RollCallError as error:
        return Failure(_absent(str(error), here.rank), str(error), time.monotonic())
    except (tierstore.StorageError, tierstore.StoreFailedError) as error:
        return Failure(here.rank, str(error), time.monotonic())
    raise AssertionError("nothing went wrong")


def _absent(reason: str, rank: int) -> int:
    """Return the rank that a refused commit waited for; ``rank`` for another error.

    A rank may be stuck between a step and its commit. The others do not wait for it there, and one
    of them may have ended when the last one comes.
    """
    found = re.match(r"rank (\d+) did not call commit\(\) within ", reason)
    return rank if found is None else int(found[1])


@dataclass(frozen=True, slots=True)
class FailAt:
    """A disk that has an error once, from a step on."""

    step: int
    fault: Fault

    def __call__(self, here: Here, storage: FaultyStorage, step: int) -> None:
        if step == self.step:
            storage.arm(self.fault)


def go_on(case: Case) -> Restored:
    """Restore what all ranks have, then train some more steps."""
    model = Model(case)
    with tierstore.TierStore(
        case.directory, resume=True, **case.store_options(dist.get_rank())
    ) as store:
        optimizer = muon.Muon(make_groups(model.parameters, SHAPES), store=store, **case.options)
        with wanted(store) as kept:
            step = optimizer.restore()
        values = {name: local(p).clone() for name, p in model.parameters.items()}
        for later in range(step + 1, step + GOES_ON + 1):
            model.set_gradients(whole_gradients(SHAPES, later))
            optimizer.step()
            store.commit()
        return Restored(step, kept.get("state"), values, trained_by(model, optimizer, []))
