"""Cost of a commit of many parameters: on the training thread, on the commit thread, in the disk.

A turn is a step, commit(), and a wait until the commit is durable. Every case has the same
parameters, gradients and hyperparameters; cases take turns. The last case runs on two ranks, which
hold the whole model each; its times are measured on rank 0.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
import typer
from measuring import (
    MIB,
    DirectoryOption,
    JsonOption,
    SmallOption,
    rotated,
    scratch_folder,
    write_report,
)
from ranks import start_world
from rich.console import Console
from rich.progress import track
from rich.table import Table

import muon
import tierstore

BUFFERS = 4
PAGE_BYTES = 16 * MIB
WARMUP_TURNS = 3
"""Turns that lay out pages, write the layout file, and write each slot of a page once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Parameters of one run of the benchmark."""

    layers: int
    vectors: int
    """Vectors of each layer, stepped by AdamW."""
    matrices: int
    """Matrices of each layer, stepped by Muon."""
    rows: int
    columns: int
    rounds: int


PLANS = {
    "small": Plan(layers=2, vectors=9, matrices=1, rows=16, columns=32, rounds=2),
    "default": Plan(layers=25, vectors=180, matrices=20, rows=64, columns=128, rounds=40),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A way to keep and commit the parameters."""

    name: str
    groups_per_layer: bool
    """True if each layer has param groups of its own, as with learning rates by layer."""
    in_memory: bool
    """True if pages rest in host memory between steps, instead of in their files alone."""
    ranks: int = 1


CASES = (
    Case(name="2 groups, pages on disk", groups_per_layer=False, in_memory=False),
    Case(name="2 groups, pages in memory", groups_per_layer=False, in_memory=True),
    Case(name="2 groups per layer, pages on disk", groups_per_layer=True, in_memory=False),
    Case(name="2 groups per layer, pages in memory", groups_per_layer=True, in_memory=True),
    Case(
        name="2 groups, pages in memory, 2 ranks", groups_per_layer=False, in_memory=True, ranks=2
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One commit, in seconds."""

    commit_s: float
    """Until commit() returned."""
    commit_cpu_s: float
    """Processor time of the training thread in commit()."""
    durable_s: float
    """From the call of commit() until the commit was durable."""
    thread_cpu_s: float
    """Processor time of the commit thread."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """One time over all rounds, in seconds."""

    least: float
    median: float
    p95: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Spread:
        """Summarize the times of all rounds."""
        least, median, p95 = (float(value) for value in np.quantile(seconds, (0, 0.5, 0.95)))
        return cls(least=least, median=median, p95=p95)

    def text_ms(self) -> str:
        """Return the times in milliseconds."""
        return f"{self.least * 1e3:.1f}, {self.median * 1e3:.1f}, {self.p95 * 1e3:.1f}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """Facts of the store of a case."""

    engine: str
    pages: int
    state_bytes: int
    tiers: list[str]
    """The tiers that have pages."""
    first: Turn
    """The first commit, which also makes the layout file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One line of the result."""

    case: str
    facts: Facts
    commit_s: Spread
    commit_cpu_s: Spread
    durable_s: Spread
    thread_cpu_s: Spread


def make_groups(plan: Plan, *, per_layer: bool) -> list[dict[str, Any]]:
    """Return param groups of parameters in bfloat16 with gradients."""
    torch.manual_seed(0)
    shapes = {
        "adamw": (plan.vectors, (plan.columns,)),
        "muon": (plan.matrices, (plan.rows, plan.columns)),
    }
    groups: list[dict[str, Any]] = []
    for layer in range(plan.layers):
        for algorithm, (count, shape) in shapes.items():
            members = []
            for index in range(count):
                parameter = torch.nn.Parameter(torch.randn(shape, dtype=torch.bfloat16))
                parameter.grad = torch.randn_like(parameter)
                members.append((f"layers.{layer}.{algorithm}.{index}.weight", parameter))
            groups.append({"params": members, "algorithm": algorithm, "lr": 1e-3})
    if per_layer:
        return groups
    return [
        {
            "params": [member for group in groups[first::2] for member in group["params"]],
            "algorithm": algorithm,
            "lr": 1e-3,
        }
        for first, algorithm in enumerate(shapes)
    ]


class Job:
    """A model with its optimizer and store, which commits once per turn."""

    def __init__(self, directory: Path, plan: Plan, case: Case) -> None:
        before = set(threading.enumerate())
        self.store = tierstore.TierStore(
            directory,
            host_memory=1024 * MIB if case.in_memory else 2 * BUFFERS * PAGE_BYTES,
            page_bytes=PAGE_BYTES,
            buffers=None if case.in_memory else BUFFERS,
        )
        groups = make_groups(plan, per_layer=case.groups_per_layer)
        # Few iterations: the step is not measured.
        self._optimizer = muon.Muon(groups, store=self.store, ns_steps=1, ns_dtype="auto")
        self._data = {"batch": 0}
        self.store.register(data=self._data, random=tierstore.RandomState())
        self._thread = next(
            thread
            for thread in threading.enumerate()
            if thread not in before and thread.name.startswith("tierstore-commit")
        )
        first, *_ = [self.turn() for _ in range(WARMUP_TURNS)]
        stats = self.store.stats()
        self.facts = Facts(
            engine=stats.engine,
            pages=stats.pages,
            state_bytes=stats.state_bytes,
            tiers=sorted(stats.pages_in),
            first=first,
        )

    def turn(self) -> Turn:
        """Step, commit, and wait until the commit is durable."""
        self._optimizer.step()
        self._data["batch"] += 1
        thread_began_s = self._thread_cpu_s()
        began_s, cpu_began_s = time.perf_counter(), time.thread_time()
        self.store.commit()
        ended_s, cpu_ended_s = time.perf_counter(), time.thread_time()
        self.store.synchronize()
        durable_s = time.perf_counter()
        return Turn(
            commit_s=ended_s - began_s,
            commit_cpu_s=cpu_ended_s - cpu_began_s,
            durable_s=durable_s - began_s,
            thread_cpu_s=self._thread_cpu_s() - thread_began_s,
        )

    def _thread_cpu_s(self) -> float:
        assert self._thread.ident is not None
        return time.clock_gettime(time.pthread_getcpuclockid(self._thread.ident))


@contextlib.contextmanager
def serve(folder: Path, plan: Plan, case: Case) -> Iterator[Callable[[str], Turn | Facts]]:
    """Yield the answers of one rank to "turn" and "facts"."""
    job = Job(folder / "run", plan, case)
    with job.store:
        yield lambda question: job.facts if question == "facts" else job.turn()


@contextlib.contextmanager
def start(folder: Path, plan: Plan, case: Case) -> Iterator[Callable[[str], Any]]:
    """Yield the answers of a case, or of rank 0 of its ranks."""
    folder.mkdir()
    if case.ranks == 1:
        with serve(folder, plan, case) as answer:
            yield answer
        return
    with start_world(case.ranks, folder, serve, plan, case) as world:
        yield lambda question: world.ask(question)[0]


def measure(folder: Path, plan: Plan) -> list[Row]:
    """Measure all cases in turn."""
    turns: dict[str, list[Turn]] = {case.name: [] for case in CASES}
    with contextlib.ExitStack() as stack:
        answers = {
            case.name: stack.enter_context(start(folder / str(index), plan, case))
            for index, case in enumerate(CASES)
        }
        for index in track(range(plan.rounds), description="Commits"):
            for name in rotated(list(answers), index):
                turns[name].append(answers[name]("turn"))
        facts = {name: answer("facts") for name, answer in answers.items()}
    return [
        Row(
            case=name,
            facts=facts[name],
            **{
                field.name: Spread.of([getattr(turn, field.name) for turn in taken])
                for field in fields(Turn)
            },
        )
        for name, taken in turns.items()
    ]


def report(rows: Sequence[Row], parameters: int) -> Table:
    """Return the results as a table."""
    table = Table(title=f"Commits of {parameters} parameters, ms: minimum, median, 95th percentile")
    headings = ("commit()", "its CPU time", "until durable", "CPU time of the commit thread")
    table.add_column("case")
    table.add_column("engine")
    for heading in ("pages", *headings):
        table.add_column(heading, justify="right")
    for row in rows:
        times = (row.commit_s, row.commit_cpu_s, row.durable_s, row.thread_cpu_s)
        texts = [taken.text_ms() for taken in times]
        table.add_row(row.case, row.facts.engine, str(row.facts.pages), *texts)
    return table


def main(
    directory: DirectoryOption = Path("."),
    small: SmallOption = False,
    json_path: JsonOption = None,
) -> None:
    """Measure commits of many parameters in several arrangements."""
    torch.set_num_threads(1)  # Steps are not measured, and threads that wait keep a core busy.
    plan = PLANS["small" if small else "default"]
    parameters = plan.layers * (plan.vectors + plan.matrices)
    with scratch_folder(directory) as scratch:
        rows = measure(scratch, plan)
    Console(width=150).print(report(rows, parameters))
    write_report(
        json_path, plan=asdict(plan), parameters=parameters, rows=[asdict(row) for row in rows]
    )


if __name__ == "__main__":
    typer.run(main)
