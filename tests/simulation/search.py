"""Protocols with one thing wrong each, and the search for a schedule that shows it.

``python -m tests.simulation.search`` writes the table of docs/internals/simulation.md anew,
``table PART`` prints the rows that have PART in their name, ``replay 12/3/0 ["name of a mutant"]``
shows one schedule, and so do the other commands of THEMES for the schedules of their simulations.
``faults N`` prints the table of faults and promises for N seeds of each simulation.
"""

from __future__ import annotations

import functools
import logging
import multiprocessing
import re
import sys
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import torch

from tests.simulation.call_errors import ErrorSimulation, RankKilledSimulation
from tests.simulation.fault_simulation import FaultSimulation, WriteBackSimulation
from tests.simulation.moves import MoveSimulation
from tests.simulation.mutant import Mutant
from tests.simulation.mutants import mutants
from tests.simulation.second_process import SecondProcessSimulation
from tests.simulation.simulator import PROMISES, RecoverySimulation, Simulation, Violation

DOCUMENT = Path(__file__).resolve().parents[2] / "docs/internals/simulation.md"

SEEDS_MAX = 300

THEMES: dict[str, type[Simulation]] = {
    "replay": Simulation,
    "replay-fault": FaultSimulation,
    "replay-write-back": WriteBackSimulation,
    "replay-error": ErrorSimulation,
    "replay-killed-rank": RankKilledSimulation,
    "replay-second-process": SecondProcessSimulation,
    "replay-move": MoveSimulation,
    "replay-recovery": RecoverySimulation,
}
"""Command -> the simulation whose schedules it shows."""


def killer(mutant: Mutant, seeds: range = range(SEEDS_MAX)) -> Violation | None:
    """Return what the first schedule finds that shows the fault, and finds nothing without."""
    for seed in seeds:
        found = _first_violation(mutant, seed)
        if found is not None and replayed(found.schedule, mutant.unchanged) is None:
            return found
    return None


def _first_violation(mutant: Mutant, seed: int) -> Violation | None:
    with mutant.patched():
        try:
            for _ in mutant.simulation(seed).schedules():
                pass
        except Violation as violation:
            return violation
    return None


def replayed(name: str, mutant: Mutant) -> Violation | None:
    """Return what one schedule found."""
    with mutant.patched():
        try:
            mutant.simulation(int(name.split("/")[0])).replay(name)
        except Violation as violation:
            return violation
    return None


HARMLESS = {
    "fsync in run.committer.write_durably, called by run.committer.mark_dirty": (
        "harmless: a mark that is damaged refuses as one that is not"
    ),
    "in run.committer.write_durably, called by run.committer.mark_clean": (
        "harmless: without the mark the next opening takes the end for unclean"
    ),
    "fsync in run.committer.write_durably, called by run.opening._identify.<lambda>: too late": (
        "harmless: nothing needs the identity before a commit"
    ),
    "in checkpoint.verification._mark, called": (
        "harmless: a checkpoint whose mark is lost or damaged counts as not read"
    ),
    "in run.recovery.erase, called": (
        "harmless: the new identity is synced next, and with it all this"
    ),
}


def row(mutant: Mutant) -> str:
    """Return the line of the table about one mutant."""
    harmless = next((why for part, why in HARMLESS.items() if part in mutant.name), None)
    violation = killer(mutant, range(SEEDS_MAX if harmless is None else SEEDS_MAX // 10))
    if violation is None:
        return f"| {mutant.name} | - | {harmless or f'survived {SEEDS_MAX} seeds'} |"
    found = re.sub(r"[\s|]+", " ", violation.found)
    return f"| {mutant.name} | `{violation.schedule}` | {found[:80]} |"


def faults(seeds: int) -> list[str]:
    """Return the lines of the table of faults and promises: how often each was checked and kept."""
    parts = [(theme, seed) for theme in THEMES for seed in range(seeds)]
    counts: Counter[tuple[str, str]] = Counter()
    with ProcessPoolExecutor(2, multiprocessing.get_context("spawn"), initializer=quiet) as pool:
        for of_one in pool.map(_checked, *zip(*parts, strict=True), chunksize=4):
            counts += of_one
    lines = [f"| fault | {' | '.join(PROMISES)} |", "|---" * (1 + len(PROMISES)) + "|"]
    for fault in sorted({fault for fault, _ in counts}):
        cells = [
            f"{counts[fault, promise]:,}" if counts[fault, promise] else "" for promise in PROMISES
        ]
        lines.append(f"| {fault} | {' | '.join(cells)} |")
    return lines


def _checked(theme: str, seed: int) -> Counter[tuple[str, str]]:
    """Return what all schedules of one seed have checked."""
    simulation = THEMES[theme](seed)
    for _ in simulation.schedules():
        pass
    return simulation.checked


def rewrite(document: Path) -> None:
    """Put the table of all mutants at the end of a document, in place of the one there."""
    text, head, _ = document.read_text().rpartition("|---|---|---|\n")
    # Not forked: threads of torch are in this process.
    with ProcessPoolExecutor(2, multiprocessing.get_context("spawn"), initializer=quiet) as pool:
        rows = []
        for line in pool.map(_row_of, [mutant.name for mutant in mutants()]):
            print(line, flush=True)
            rows.append(line)
    document.write_text(text + head + "\n".join(rows) + "\n")


def _row_of(name: str) -> str:
    (mutant,) = [mutant for mutant in _all_mutants() if mutant.name == name]
    return row(mutant)


@functools.cache
def _all_mutants() -> list[Mutant]:
    return mutants()


def quiet() -> None:
    """Have one process of many compute in one thread, and log nothing."""
    torch.set_num_threads(1)
    logging.disable(logging.CRITICAL)


def main(arguments: list[str]) -> None:
    """Do what the first lines of this file say."""
    quiet()
    match arguments:
        case []:
            rewrite(DOCUMENT)
        case ["faults", seeds]:
            print(*faults(int(seeds)), sep="\n")
        case ["table", part]:
            for mutant in mutants():
                if part in mutant.name:
                    print(row(mutant), flush=True)
        case [kind, schedule, *names] if kind in THEMES:
            unchanged = Mutant(name="nothing wrong", simulated_by=THEMES[kind])
            for mutant in [m for m in mutants() if m.name in names] or [unchanged]:
                found = replayed(schedule, mutant)
                print(f"{mutant.name}: {found or 'no promise was broken'}")
        case _:
            sys.exit(__doc__)


if __name__ == "__main__":
    main(sys.argv[1:])
