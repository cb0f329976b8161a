"""No crash and no fault loses a commit, or hands out a wrong tensor: thousands of schedules."""

from __future__ import annotations

import dataclasses
import logging
import random
import re
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch

from tests.simulation.call_errors import ErrorSimulation, RankKilledSimulation
from tests.simulation.fault_simulation import FaultSimulation, WriteBackSimulation
from tests.simulation.log import Weakening
from tests.simulation.many import go_through
from tests.simulation.moves import KINDS, MoveSimulation
from tests.simulation.mutant import Mutant
from tests.simulation.mutants import mutants
from tests.simulation.plan import MOVING_KINDS
from tests.simulation.search import DOCUMENT, THEMES, killer, replayed
from tests.simulation.second_process import SecondProcessSimulation
from tests.simulation.session import Memory, Protocol, Settings
from tests.simulation.simulator import FOUND, TYPED, Simulation
from tierstore.store import TierStore

ROWS = re.findall(r"^\| (.+) \| `([\d/]+)` \| .* \|$", DOCUMENT.read_text(), re.MULTILINE)


# A mutant hands out wrong parameters.
pytestmark = pytest.mark.filterwarnings("ignore:parameter .* was changed outside")


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """Restarts warn of what the simulation did."""
    logging.disable(logging.ERROR)
    yield
    logging.disable(logging.NOTSET)


def run_seeds(crashes: range, faults: range) -> Counter[str]:
    """Go through all schedules of some seeds; return how many there were of each kind."""
    torch.set_num_threads(1)
    logging.disable(logging.ERROR)
    counts: Counter[str] = Counter()
    for simulation in (*map(Simulation, crashes), *map(FaultSimulation, faults)):
        counts["schedules"] += sum(1 for _ in simulation.schedules())
        counts += simulation.counts
    return counts


def report(counts: Counter[str], capsys: pytest.CaptureFixture[str]) -> None:
    with capsys.disabled():
        print()
        for kind, count in counts.most_common():
            print(f"{count:>8} {kind}")


def test_a_few_schedules() -> None:
    assert run_seeds(range(1), range(1))["schedules"] >= 40


@pytest.mark.long
def test_schedules(capsys: pytest.CaptureFixture[str]) -> None:
    counts = run_seeds(range(30), range(10))
    report(counts, capsys)
    assert counts["schedules"] >= 2000
    assert counts["3 ranks, power lost"] >= 100
    assert counts["1 rank, power lost after two restarts"] >= 100
    assert counts["refused"] < counts["schedules"] / 20


@pytest.mark.long
@pytest.mark.parametrize(
    ("simulation", "fault"),
    [
        (WriteBackSimulation, "failed write back"),
        (ErrorSimulation, "error of read"),
        (RankKilledSimulation, "killed rank"),
        (SecondProcessSimulation, "second process"),
    ],
)
def test_schedules_of_further_faults(simulation: type[Simulation], fault: str) -> None:
    torch.set_num_threads(1)
    checked: Counter[tuple[str, str]] = Counter()
    for seed in range(4):
        schedules = simulation(seed)
        assert sum(1 for _ in schedules.schedules()) > 5
        checked += schedules.checked
    assert checked[fault, FOUND] > 5
    assert checked[fault, TYPED] > 0


REWRITTEN: dict[str, tuple[Callable[[Settings], Settings], Any, Callable[[Any], bool]]] = {
    "are rewound": (
        Settings.rewinding,
        TierStore.restore,
        lambda call: bool(call.kwargs.get("rewind")),
    ),
}


@pytest.mark.long
@pytest.mark.parametrize(("changed", "method", "counts"), REWRITTEN.values(), ids=REWRITTEN)
def test_schedules_of_runs_that(
    changed: Callable[[Settings], Settings], method: Any, counts: Callable[[Any], bool]
) -> None:
    torch.set_num_threads(1)
    found: Counter[str] = Counter()
    for seed in range(12):
        settings = changed(Settings.drawn(random.Random(f"{seed} settings")))
        for simulation in (Simulation, FaultSimulation) if seed % 3 == 0 else (Simulation,):
            schedules = simulation(seed, settings=settings, widths=(12, 3, 1)).schedules()
            watch = mock.patch.object(TierStore, method.__name__, autospec=True, side_effect=method)
            with watch as made:
                found[f"schedules of {settings.world_size}"] += sum(1 for _ in schedules)
            found[f"calls of {settings.world_size}"] += sum(map(counts, made.call_args_list))
    for world_size in (1, 3):
        assert found[f"schedules of {world_size}"] > 50
        assert found[f"calls of {world_size}"] > 10


def moved(seeds: range) -> Counter[str]:
    torch.set_num_threads(1)
    logging.disable(logging.ERROR)
    counts: Counter[str] = Counter()
    for simulation in map(MoveSimulation, seeds):
        counts["schedules"] += sum(1 for _ in simulation.schedules())
        counts += simulation.counts
    return counts


@pytest.mark.long
def test_schedules_of_directories_that_are_moved(capsys: pytest.CaptureFixture[str]) -> None:
    counts = moved(range(5))
    report(counts, capsys)
    assert counts["schedules"] >= 200
    assert all(counts[kind] >= 10 for kind in KINDS)
    assert counts["refused"] >= 5


@pytest.mark.long
def test_schedules_of_one_of_several_directories_that_is_moved() -> None:
    for seed in range(2):
        settings = Settings.drawn(random.Random(f"{seed} settings"))
        striped = dataclasses.replace(settings, directories=2 + seed)
        assert sum(1 for _ in MoveSimulation(seed, settings=striped).schedules()) >= 48


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("first", range(1000, 1220, 20))
def test_many_schedules(first: int, capsys: pytest.CaptureFixture[str]) -> None:
    """More than 100,000 in all blocks, which processes of tests share among them."""
    outcome = go_through(range(first, first + 20), workers=1)
    report(outcome.counts, capsys)
    assert sum(outcome.counts[theme] for theme in THEMES) >= 7500
    assert all(outcome.counts[theme] > 150 for theme in THEMES)


def small(commit_every: int | None, **settings: Any) -> Settings:
    return Settings(world_size=1, commit_every=commit_every, keep_last=1, actions=5, **settings)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(1, 7))
@pytest.mark.parametrize("commit_every", [1, None])
def test_every_crash_of_a_small_run(commit_every: int | None, seed: int) -> None:
    simulation = Simulation(seed, settings=small(commit_every))
    assert sum(1 for _ in simulation.every_crash()) > 500


@pytest.mark.long
@pytest.mark.parametrize("commit_every", [2, None])
def test_every_crash_of_a_small_run_with_pages_in_memory(commit_every: int | None) -> None:
    kinds = ("synchronize", *MOVING_KINDS)
    memory = Memory(host_memory=2**15, device_memory=2**15)
    settings = small(commit_every, kinds=kinds, memories=(memory,))
    assert sum(1 for _ in Simulation(2, settings=settings).every_crash()) > 200


@pytest.mark.long
@pytest.mark.parametrize("seed", [29, 187])
def test_every_crash_of_a_small_run_that_is_rewound(seed: int) -> None:
    """A step, a checkpoint, another step, and back; seed 187 goes on from there."""
    settings = small(1, kinds=("rewind",), page_bytes=2**20)
    simulation = Simulation(seed, settings=dataclasses.replace(settings, actions=6))
    assert sum(1 for _ in simulation.every_crash()) > 500


def without_ids(text: str) -> str:
    """The text without run ids and attempts, which are drawn anew, and all as long."""
    return re.sub(r"[0-9a-f]{8,}", "id", text)


@pytest.fixture(scope="module")
def by_name() -> dict[str, Mutant]:
    return {mutant.name: mutant for mutant in mutants()}


@pytest.mark.quick(1)
@pytest.mark.parametrize(("name", "schedule"), ROWS[::9], ids=[row[0] for row in ROWS[::9]])
def test_a_schedule_replays_exactly(name: str, schedule: str, by_name: dict[str, Mutant]) -> None:
    """Twice the same operations in the same order, and the same outcome."""
    first, second = (replayed(schedule, by_name[name]) for _ in range(2))
    assert first is not None
    assert len(first.log.splitlines()) > 5
    assert without_ids(str(first)) == without_ids(str(second))


def test_all_mutants_are_in_the_document(by_name: dict[str, Mutant]) -> None:
    """To bring it up to date: ``python -m tests.simulation.search``."""
    survivors = re.findall(r"^\| (.+) \| - \| harmless: .* \|$", DOCUMENT.read_text(), re.MULTILINE)
    assert {*survivors, *(name for name, _ in ROWS)} == by_name.keys()


@pytest.mark.quick(6)
@pytest.mark.parametrize(("name", "schedule"), ROWS, ids=[row[0] for row in ROWS])
def test_mutant_is_killed(name: str, schedule: str, by_name: dict[str, Mutant]) -> None:
    found = replayed(schedule, by_name[name])
    assert found is not None
    # By the protocol, and not because the mutant no longer fits the code.
    assert found.schedule == schedule
    assert not re.search("TypeError|AttributeError", found.found)
    assert replayed(schedule, by_name[name].unchanged) is None


def test_a_log_names_who_asked_for_durability() -> None:
    simulation = Simulation(0, widths=(1,))
    list(simulation.schedules())
    assert any("committer.write_durably" in site for site in simulation.sites)
    everything = Protocol(weakening=Weakening(dropped=frozenset(simulation.sites)))
    violation = killer(Mutant(name="no sync at all", protocol=everything), range(1))
    assert violation is not None
    assert "(left out)" in violation.log
