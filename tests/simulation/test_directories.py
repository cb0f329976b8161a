"""Several disks that crash and fail each for itself: no commit of a striped run is lost."""

from __future__ import annotations

import dataclasses
import logging
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from tests.simulation.fault_simulation import FaultSimulation
from tests.simulation.session import Settings
from tests.simulation.simulator import Simulation, Violation
from tierstore.run import striped_storage
from tierstore.run.striped_storage import StripedStorage


def settings(seed: int) -> Settings:
    """Return the settings that a seed draws, with two or three directories."""
    drawn = Settings.drawn(random.Random(f"{seed} settings"))
    return dataclasses.replace(drawn, directories=2 + seed % 2)


def simulate(crashes: range, faults: range) -> Counter[str]:
    counts: Counter[str] = Counter()
    for seed in crashes:
        simulation = Simulation(seed, settings=settings(seed))
        counts["schedules"] += sum(1 for _ in simulation.schedules())
        counts += simulation.counts
    for seed in faults:
        simulation = FaultSimulation(seed, settings=settings(seed))
        counts["schedules"] += sum(1 for _ in simulation.schedules())
        counts += simulation.counts
    return counts


@pytest.fixture
def _quiet() -> Iterator[None]:
    """Restarts warn of what the simulation did."""
    logging.disable(logging.ERROR)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.long
@pytest.mark.usefixtures("_quiet")
def test_no_crash_and_no_fault_of_any_disk_loses_a_commit() -> None:
    counts = simulate(range(8), range(4))
    assert counts["schedules"] > 500
    assert counts["refused"] < counts["schedules"] / 20


@pytest.mark.long
@pytest.mark.usefixtures("_quiet")
@pytest.mark.parametrize("first", range(0, 60, 20))
def test_more_crashes_and_faults(first: int) -> None:
    simulate(range(first, first + 20), range(first, first + 4))


@pytest.mark.long
@pytest.mark.usefixtures("_quiet")
def test_every_crash_of_a_small_run() -> None:
    small = Settings(world_size=1, commit_every=1, keep_last=1, actions=4, directories=2)
    assert sum(1 for _ in Simulation(1, settings=small).every_crash()) > 500


def _only_the_first_is_synced(self: StripedStorage) -> None:
    self._parts[0].sync_directory()


def _only_the_first_is_flushed(self: StripedStorage, names: Sequence[str]) -> None:
    self._parts[0].flush([name for name in names if self._part(name) is self._parts[0]])


def _the_striping_is_not_synced(part: Any, name: str, data: bytes) -> None:
    part.put(f"{name}.tmp", data)
    part.rename(f"{name}.tmp", name)


def _the_striping_is_put_in_its_place(part: Any, name: str, data: bytes) -> None:
    part.put(name, data)
    part.sync_directory()


@pytest.mark.quick(1)
@pytest.mark.usefixtures("_quiet")
@pytest.mark.filterwarnings("ignore:parameter .* was changed outside")
@pytest.mark.parametrize(
    ("place", "name", "wrong", "seed"),
    [
        (StripedStorage, "sync_directory", _only_the_first_is_synced, 0),
        (StripedStorage, "flush", _only_the_first_is_flushed, 0),
        pytest.param(
            *(striped_storage, "write_durably", _the_striping_is_not_synced, 1),
            marks=pytest.mark.long,
        ),
        (striped_storage, "write_durably", _the_striping_is_put_in_its_place, 3),
    ],
)
def test_the_simulation_sees_what_would_be_wrong(
    place: Any, name: str, wrong: Any, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    seeds = range(seed, seed + 1)
    simulate(seeds, range(0))
    monkeypatch.setattr(place, name, wrong)
    with pytest.raises(Violation):
        simulate(seeds, range(0))
