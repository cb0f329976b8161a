"""All schedules of many seeds, in blocks that may run on different days and machines.

``python -m tests.simulation.many 1000 2000 100`` goes through the seeds 1000 to 1999 of every
simulation and prints a row of the table in docs/internals/simulation.md for each 100 of them.
"""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import sys
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from itertools import cycle, islice
from multiprocessing.queues import Queue

from tests.simulation.search import THEMES, quiet
from tests.support import thread_ranks


@dataclass
class Outcome:
    """Counts of the schedules of some seeds. No schedule broke a promise."""

    counts: Counter[str] = field(default_factory=Counter)
    """Schedules by command of THEMES, and how many there were of each kind."""
    digest: str = ""
    """Of the names of all schedules: equal on every machine if nothing but the seed decides."""


def go_through(seeds: Sequence[int], workers: int = 2) -> Outcome:
    """Go through all schedules of every simulation.

    Raises:
        Violation: a schedule broke a promise.
    """
    parts = [(theme, seed) for seed in seeds for theme in THEMES]
    outcome, names = Outcome(), hashlib.sha256()
    # Not forked: this process may have threads of other tests.
    context = multiprocessing.get_context("spawn")
    processors: Queue[int] = context.Queue()
    for processor in islice(cycle(sorted(os.sched_getaffinity(0))), workers):
        processors.put(processor)
    with ProcessPoolExecutor(workers, context, _begin, (processors,)) as pool:
        for counts, digest in pool.map(_of_one, *zip(*parts, strict=True), chunksize=8):
            outcome.counts += counts
            names.update(digest)
    outcome.digest = names.hexdigest()
    return outcome


def _begin(processors: Queue[int]) -> None:
    """Have one process use one processor.

    Its threads are ranks, and hand one another the interpreter's lock at each tensor operation:
    between two processors a schedule takes twice the processor time. A rank that other programs
    keep from running for seconds has not failed.
    """
    quiet()
    thread_ranks.DEADLINE_S = 600.0
    os.sched_setaffinity(0, {processors.get()})


def _of_one(theme: str, seed: int) -> tuple[Counter[str], bytes]:
    simulation = THEMES[theme](seed)
    names = [f"{theme} {name}" for name in simulation.schedules()]
    return simulation.counts + Counter({theme: len(names)}), hashlib.sha256(
        "\n".join(names).encode()
    ).digest()


def main(first: int, end: int, step: int) -> None:
    """Print a row for each block: seeds, number of schedules, digest."""
    for begin in range(first, end, step):
        seeds = range(begin, min(begin + step, end))
        outcome = go_through(seeds)
        schedules = sum(outcome.counts[theme] for theme in THEMES)
        print(
            f"| {seeds[0]} to {seeds[-1]} | {schedules:,} | `{outcome.digest[:32]}` |", flush=True
        )


if __name__ == "__main__":
    main(*(int(argument) for argument in sys.argv[1:]))
