"""Sweeps that compute nothing, compared with fio that reads and writes as many bytes.

Such a sweep measures paging: transfers and checksums. Sweeps and fio take turns, and fio runs twice
in each round to show the noise. A sweep that is committed waits until the disk keeps what the one
before it wrote, since a page has two files, and is compared with fio until the disk keeps what it
wrote. States of several sizes under one ``host_memory`` show which costs grow with the
state.
"""

from __future__ import annotations

import math
import multiprocessing
import os
import shutil
import statistics
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import typer
from measuring import (
    GIB,
    MIB,
    DirectoryOption,
    JsonOption,
    SmallOption,
    cpu_seconds,
    medians,
    peak_anonymous_bytes,
    ratio_text,
    rotated,
    scratch_folder,
    spread,
    write_report,
)
from rich.console import Console
from rich.progress import track
from rich.table import Table
from storage import Pages, measure_fio

import tierstore
from tierstore.storage import open_storage
from tierstore.units import format_bytes

COLUMNS = 4096
PARAMETERS = 8
MOMENTUM = {"momentum_buffer": torch.bfloat16}
"""Beside the float32 master: 6 bytes per element each way."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Parameters of one run of the benchmark."""

    state_bytes: int
    """Bytes that each step reads, and writes."""
    page_bytes: int
    rounds: int
    steps: int
    """Consecutive steps in each round."""
    growth_bytes: tuple[int, ...]
    """Sizes of states that take turns."""
    growth_rounds: int


PLANS = {
    "small": Plan(
        state_bytes=24 * MIB,
        page_bytes=4 * MIB,
        rounds=2,
        steps=1,
        growth_bytes=(12 * MIB, 24 * MIB),
        growth_rounds=2,
    ),
    "default": Plan(
        state_bytes=GIB,
        page_bytes=32 * MIB,
        rounds=15,
        steps=1,
        growth_bytes=(400_000_000, 1_600_000_000, 6_400_000_000),
        growth_rounds=15,
    ),
}


class Idle:
    """An optimizer that computes nothing.

    Args:
        parameters: by name; parameters with a gradient are stepped.
        states: name and dtype of each state besides the master.
        store: keeps the states.
    """

    def __init__(
        self,
        parameters: Mapping[str, torch.Tensor],
        states: Mapping[str, torch.dtype],
        store: tierstore.TierStore,
    ) -> None:
        self.store = store
        paged = [
            tierstore.pages.PagedParameter(
                name=name, tensor=tensor, states=states, elementwise=True
            )
            for name, tensor in parameters.items()
        ]
        store.pages.attach([tierstore.pages.PagedGroup(parameters=paged, hyperparameters={})])

    def step(self) -> None:
        """Page all states in and out."""
        with self.store.pages.sweep() as pages:
            for _ in pages:
                pass


def make_parameters(
    state_bytes: int, device: torch.device | None = None
) -> dict[str, torch.Tensor]:
    """Return parameters with ``state_bytes`` of state, and gradients that take no memory."""
    rows = math.ceil(state_bytes / 6 / COLUMNS / PARAMETERS)
    parameters = {}
    for index in range(PARAMETERS):
        parameter = torch.nn.Parameter(
            torch.zeros(rows, COLUMNS, dtype=torch.bfloat16, device=device)
        )
        parameter.grad = parameter.new_zeros(()).expand_as(parameter)
        parameters[f"parameters.{index}"] = parameter
    return parameters


@dataclass(frozen=True, slots=True, kw_only=True)
class Taken:
    """Cost of consecutive steps, and of what follows them."""

    mib_per_s: float
    cpu_s_per_gib: float
    """Of all threads."""
    thread_s_per_gib: float
    """Of the training thread alone."""
    stall: float
    """Fraction of the time in which the training thread waited."""
    commit_s: float
    """Seconds of the training thread in commit() per step; 0 if it was not called."""
    drain_s: float
    """Seconds until the writes of the last step had ended."""
    synchronize_s: float
    """Seconds from then until the step was durable: the rest of flush and commit."""


def measure_sweep(idle: Idle, steps: int, *, commits: bool) -> Taken:
    """Measure consecutive steps after one more step, which leaves as many writes in flight."""
    store = idle.store
    idle.step()
    before = store.stats()
    commit_s = 0.0
    began_cpu_s, began_thread_s, began_s = cpu_seconds(), time.thread_time(), time.perf_counter()
    for _ in range(steps):
        if commits:
            commit_began_s = time.perf_counter()
            store.commit()
            commit_s += time.perf_counter() - commit_began_s
        idle.step()
    ended_s, ended_thread_s, ended_cpu_s = time.perf_counter(), time.thread_time(), cpu_seconds()
    after = store.stats()
    store.move("nvme")  # Waits for the writes.
    drained_s = time.perf_counter()
    store.synchronize()
    durable_s = time.perf_counter()
    moved = (after.bytes_read - before.bytes_read) + (after.bytes_written - before.bytes_written)
    return Taken(
        mib_per_s=moved / MIB / (ended_s - began_s),
        cpu_s_per_gib=(ended_cpu_s - began_cpu_s) / (moved / GIB),
        thread_s_per_gib=(ended_thread_s - began_thread_s) / (moved / GIB),
        stall=(after.stall_seconds - before.stall_seconds) / (ended_s - began_s),
        commit_s=commit_s / steps,
        drain_s=drained_s - ended_s,
        synchronize_s=durable_s - drained_s,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One line of the comparison: medians over all rounds; None without fio."""

    case: str
    rounds: int
    mib_per_s: float
    ratio: tuple[float, ...] | None
    """Speed over the mean of both runs of fio in the same round, durable ones for what is
    committed: extremes and quartiles."""
    cpu_s_per_gib: float
    thread_s_per_gib: float
    stall: float
    commit_s: float
    drain_s: float
    synchronize_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Growth:
    """Costs of a state of one size: medians."""

    state_bytes: int
    pages: int
    mib_per_s: float
    ratio: tuple[float, ...]
    """Speed over the speed of the smallest state in the same round: quartiles and extremes."""
    peak_bytes: int
    """Peak anonymous memory of the process, without the parameters."""
    start_s: float
    """Seconds to open the store and allocate its files."""
    synchronize_s: float


def open_store(directory: Path, plan: Plan, *, commits: bool) -> tierstore.TierStore:
    """Return a store that streams all pages; with ``commits`` each page has two files."""
    buffers = max(4, 256 * MIB // plan.page_bytes)
    return tierstore.TierStore(
        directory,
        host_memory=2 * buffers * plan.page_bytes,
        page_bytes=plan.page_bytes,
        buffers=buffers,
        commit_every=1 if commits else None,
    )


def begin(directory: Path, plan: Plan, state_bytes: int, *, commits: bool) -> Idle:
    """Return an optimizer with its state in files."""
    store = open_store(directory, plan, commits=commits)
    idle = Idle(make_parameters(state_bytes), MOMENTUM, store)
    for _ in range(2):  # The first write of a file costs more.
        idle.step()
        store.synchronize()
    return idle


@dataclass(frozen=True, slots=True, kw_only=True)
class Fio:
    """Speeds of one run of fio."""

    mib_per_s: float
    durable_mib_per_s: float
    """Until the disk keeps what was written."""


LIKE = {"sweep": "mib_per_s", "sweep, every step committed": "durable_mib_per_s"}
"""Speed of fio that each kind of sweep is compared with."""


def measure_durable(pages: Pages) -> Fio:
    """Read and write as many bytes with fio, and make them durable."""
    speed = measure_fio(pages, "mixed")
    began_s = time.perf_counter()
    for name in pages.names["write"]:
        with (pages.directory / name).open("rb") as file:
            os.fdatasync(file.fileno())
    synced_s = time.perf_counter() - began_s
    moved_mib = 2 * len(pages.names["write"]) * pages.page_bytes / MIB
    durable_mib_per_s = moved_mib / (moved_mib / speed.mib_per_s + synced_s)
    return Fio(mib_per_s=speed.mib_per_s, durable_mib_per_s=durable_mib_per_s)


def measure_beside_fio(
    directory: Path, plan: Plan
) -> tuple[dict[str, list[Taken]], list[tuple[Fio, Fio]]]:
    """Return the turns of each kind of sweep, and both runs of fio in each round."""
    taken: dict[str, list[Taken]] = {}
    fio: list[tuple[Fio, Fio]] = []
    turns: dict[str, Callable[[], Any]] = {}
    with ExitStack() as stack:
        for case, commits in zip(LIKE, (False, True), strict=True):
            run = directory / f"run-{commits}"
            idle = begin(run, plan, plan.state_bytes, commits=commits)
            stack.enter_context(idle.store)
            taken[case] = []
            turns[case] = partial(measure_sweep, idle, plan.steps, commits=commits)
        if shutil.which("fio") is not None:
            pages = Pages(directory / "fio", plan.page_bytes, idle.store.stats().pages)
            with closing(open_storage(pages.directory)) as storage:
                pages.create(storage)
            turns["fio"] = turns["fio again"] = partial(measure_durable, pages)
        for index in track(range(plan.rounds), description="beside fio"):
            results = {case: turns[case]() for case in rotated([*turns], index)}
            for case in taken:
                taken[case].append(results[case])
            if "fio" in turns:
                fio.append((results["fio"], results["fio again"]))
    return taken, fio


def rows_of(taken: dict[str, list[Taken]], fio: list[tuple[Fio, Fio]]) -> list[Row]:
    """Return one row for each kind of sweep."""
    rows = []
    for case, turns in taken.items():
        ratios = [
            turn.mib_per_s / statistics.mean(getattr(run, LIKE[case]) for run in runs)
            for turn, runs in zip(turns, fio, strict=False)
        ]
        ratio = spread(ratios) if ratios else None
        rows.append(Row(case=case, rounds=len(turns), ratio=ratio, **medians(turns)))
    return rows


def serve(connection: Connection, directory: Path, plan: Plan, state_bytes: int) -> None:
    """Sweep over a state of one size in this process whenever asked to."""
    parameters = make_parameters(state_bytes)
    began_s = time.perf_counter()
    store = open_store(directory, plan, commits=False)
    idle = Idle(parameters, MOMENTUM, store)
    connection.send(time.perf_counter() - began_s)
    with store:
        for _ in range(2):
            idle.step()
            store.synchronize()
        while connection.recv():
            connection.send(measure_sweep(idle, 1, commits=False))
        nbytes = sum(parameter.nbytes for parameter in parameters.values())
        connection.send((store.stats(), peak_anonymous_bytes() - nbytes))


def measure_growth(directory: Path, plan: Plan) -> list[Growth]:
    """Measure states of several sizes in turn."""
    context = multiprocessing.get_context("spawn")
    processes, ends, start_s, taken = [], [], [], []
    for state_bytes in plan.growth_bytes:
        ours, theirs = context.Pipe()
        run = directory / f"run-{state_bytes}"
        arguments = (theirs, run, plan, state_bytes)
        processes.append(context.Process(target=serve, args=arguments, daemon=True))
        processes[-1].start()
        theirs.close()  # recv() ends if the process dies.
        ends.append(ours)
        start_s.append(ours.recv())
    for _ in track(range(plan.growth_rounds), description="growth"):
        turns = []
        for end in ends:
            end.send(True)
            turns.append(end.recv())
        taken.append(turns)
    growths = []
    for index, end in enumerate(ends):
        end.send(False)
        stats, peak_bytes = end.recv()
        processes[index].join()  # It closes its store before the caller removes the directory.
        growths.append(
            Growth(
                state_bytes=stats.state_bytes,
                pages=stats.pages,
                mib_per_s=statistics.median(turns[index].mib_per_s for turns in taken),
                ratio=spread([turns[index].mib_per_s / turns[0].mib_per_s for turns in taken]),
                peak_bytes=peak_bytes,
                start_s=start_s[index],
                synchronize_s=statistics.median(turns[index].synchronize_s for turns in taken),
            )
        )
    return growths


def report(plan: Plan, rows: list[Row], fio: list[tuple[Fio, Fio]]) -> Table:
    """Return the comparison with fio as a table."""
    table = Table(
        title=f"Sweeps over {format_bytes(plan.state_bytes)} that compute nothing, medians"
    )
    table.add_column("case")
    for heading in ("MiB/s", "of fio", "CPU s/GiB", "of the thread", "waiting"):
        table.add_column(heading, justify="right")
    for heading in ("commit ms", "drain ms", "flush and commit ms"):
        table.add_column(heading, justify="right")
    for row in rows:
        table.add_row(
            row.case,
            f"{row.mib_per_s:.0f}",
            ratio_text(row.ratio),
            f"{row.cpu_s_per_gib:.3f}",
            f"{row.thread_s_per_gib:.3f}",
            f"{row.stall:.0%}",
            f"{row.commit_s * 1e3:.1f}",
            f"{row.drain_s * 1e3:.1f}",
            f"{row.synchronize_s * 1e3:.1f}",
        )
    for case, like in LIKE.items() if fio else ():
        speeds = [(getattr(first, like), getattr(again, like)) for first, again in fio]
        speed = statistics.median(first for first, _ in speeds)
        itself = ratio_text(spread([again / first for first, again in speeds]))
        table.add_row(f"fio like {case}, again over first", f"{speed:.0f}", itself)
    return table


def report_growth(growths: list[Growth]) -> Table:
    """Return the costs of all sizes as a table."""
    table = Table(title="States of several sizes under one host_memory, medians (quartiles)")
    for heading in ("MB", "pages", "MiB/s", "of the smallest", "peak MB without parameters"):
        table.add_column(heading, justify="right")
    for heading in ("start, ms per page", "flush and commit, ms per page"):
        table.add_column(heading, justify="right")
    for growth in growths:
        table.add_row(
            f"{growth.state_bytes / 1e6:.0f}",
            str(growth.pages),
            f"{growth.mib_per_s:.0f}",
            ratio_text(growth.ratio),
            f"{growth.peak_bytes / 1e6:.0f}",
            f"{growth.start_s / growth.pages * 1e3:.2f}",
            f"{growth.synchronize_s / growth.pages * 1e3:.2f}",
        )
    return table


def main(
    directory: DirectoryOption = Path("."),
    small: SmallOption = False,
    json_path: JsonOption = None,
) -> None:
    """Compare sweeps that compute nothing with fio, and with sweeps over other sizes."""
    plan = PLANS["small" if small else "default"]
    with scratch_folder(directory) as scratch:
        taken, fio = measure_beside_fio(scratch, plan)
    with scratch_folder(directory) as scratch:
        growths = measure_growth(scratch, plan)
    rows = rows_of(taken, fio)
    console = Console(width=120)
    console.print(report(plan, rows, fio))
    console.print(report_growth(growths))
    if not fio:
        typer.echo("fio is not installed: no comparison")
    write_report(
        json_path,
        plan=asdict(plan),
        rows=[asdict(row) for row in rows],
        growth=[asdict(growth) for growth in growths],
        turns={case: [asdict(turn) for turn in turns] for case, turns in taken.items()},
        fio=[[asdict(run) for run in runs] for runs in fio],
    )


if __name__ == "__main__":
    typer.run(main)
