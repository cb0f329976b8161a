"""Publishing a committed step compared with saving the same state, and loading of both.

Savers take turns, and every turn gives one ratio; dcp.save over itself shows the noise. The writes
of the step end before: they are the cost of the commit, with or without a checkpoint.
"""

from __future__ import annotations

import os
import shutil
import statistics
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
import typer
from measuring import (
    MIB,
    DirectoryOption,
    JsonOption,
    SmallOption,
    drop_from_cache,
    scratch_folder,
    write_report,
)
from rich.console import Console
from rich.table import Table
from torch import nn

import muon
import tierstore

COLUMNS = 4096
PARAMETERS = 32
BYTES_PER_ELEMENT = 12
"""A float32 master and two moments."""

State = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Parameters of one run of the benchmark."""

    state_bytes: int
    """Approximate bytes that are published and saved."""
    page_bytes: int
    rounds: int
    """Turns of each saver and each loader; medians are taken over them."""
    grid_state_bytes: tuple[int, int]
    """Two sizes of a state."""
    grid_pages: tuple[int, int]
    """Approximate numbers of pages for each of the two sizes."""


PLANS = {
    "small": Plan(
        state_bytes=24 * MIB,
        page_bytes=2 * MIB,
        rounds=2,
        grid_state_bytes=(12 * MIB, 24 * MIB),
        grid_pages=(4, 16),
    ),
    "default": Plan(
        state_bytes=2000 * 10**6,
        page_bytes=64 * MIB,
        rounds=7,
        grid_state_bytes=(250 * 10**6, 2000 * 10**6),
        grid_pages=(8, 64),
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One saver or loader: medians and extremes over all rounds."""

    case: str
    rounds: int
    seconds: float
    seconds_min: float
    seconds_max: float
    cpu_s: float
    """Processor time of all threads of this process."""
    ratio_median: float
    """Seconds over the seconds of the first case in the same round."""
    ratio_min: float
    ratio_max: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """Time of publishing for one size and number of pages."""

    state_bytes: int
    pages: int
    rounds: int
    seconds: float
    seconds_min: float
    seconds_max: float


class Job:
    """A model under AdamW with its state in a run; a step changes the whole state."""

    def __init__(self, directory: Path, state_bytes: int, page_bytes: int) -> None:
        rows = max(1, state_bytes // (BYTES_PER_ELEMENT * COLUMNS * PARAMETERS))
        self.parameters = {
            f"layers.{index}.weight": nn.Parameter(torch.randn(rows, COLUMNS))
            for index in range(PARAMETERS)
        }
        for parameter in self.parameters.values():
            parameter.grad = torch.full_like(parameter, 0.5)
        self.store = tierstore.TierStore(
            directory, host_memory=max(8 * page_bytes, 64 * MIB), page_bytes=page_bytes
        )
        group = {"params": list(self.parameters.items()), "algorithm": "adamw"}
        self.optimizer = muon.Muon([group], store=self.store)

    def step(self) -> None:
        """Do a step and return when it is durable and the machine is idle."""
        self.optimizer.step()
        self.store.synchronize()
        os.sync()

    def state(self) -> State:
        """Return copies of the whole state under the keys of a checkpoint."""
        optimizer: dict[str, dict[str, torch.Tensor]] = {}
        for name, states in self.store.pages.read_states().items():
            optimizer[name] = {state: tensor.clone() for state, tensor in states.items()}
            optimizer[name]["step"] = torch.tensor(self.store.pages.scalars[name]["step"])
        model = {name: parameter.detach().clone() for name, parameter in self.parameters.items()}
        return {"model": model, "optimizer": {"state": optimizer}}


@dataclass(frozen=True, slots=True, kw_only=True)
class Taken:
    """Cost of one call."""

    seconds: float
    cpu_s: float


def timed(action: Callable[[], object]) -> Taken:
    """Call an action and return its cost."""
    began, cpu_began = time.perf_counter(), time.process_time()
    action()
    seconds, cpu_s = time.perf_counter() - began, time.process_time() - cpu_began
    return Taken(seconds=seconds, cpu_s=cpu_s)


def take_turns(
    actions: dict[str, Callable[[int], Taken]], rounds: int, before: Callable[[], None]
) -> list[Row]:
    """Measure all actions in each round; the order alternates."""
    taken: dict[str, list[Taken]] = {case: [] for case in actions}
    for number in range(rounds):
        before()
        for case in list(actions) if number % 2 else reversed(list(actions)):
            taken[case].append(actions[case](number))
    first = taken[next(iter(actions))]
    rows = []
    for case, values in taken.items():
        ratios = [a.seconds / b.seconds for a, b in zip(values, first, strict=True)]
        seconds = [value.seconds for value in values]
        rows.append(
            Row(
                case=case,
                rounds=rounds,
                seconds=statistics.median(seconds),
                seconds_min=min(seconds),
                seconds_max=max(seconds),
                cpu_s=statistics.median(value.cpu_s for value in values),
                ratio_median=statistics.median(ratios),
                ratio_min=min(ratios),
                ratio_max=max(ratios),
            )
        )
    return rows


def save_with_torch(state: State, path: Path) -> None:
    """Write one file with torch.save(), durably, as DCP's writer does."""
    with path.open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())


def measure_saving(job: Job, state: State, scratch: Path, rounds: int) -> list[Row]:
    """Publish each step, and save the same state twice with DCP and once with torch.save()."""

    def saver(name: str, save: Callable[[Path], object]) -> Callable[[int], Taken]:
        def act(number: int) -> Taken:
            path = scratch / f"{name}-{number}"
            taken = timed(lambda: save(path))
            # Files are removed outside of the timed call.
            shutil.rmtree(path) if path.is_dir() else path.unlink()
            os.sync()
            return taken

        return act

    def dcp_save(path: Path) -> None:
        dcp.save(state, checkpoint_id=path, no_dist=True)

    actions = {
        "store.checkpoint()": saver("published", job.store.checkpoint),
        "dcp.save": saver("dcp", dcp_save),
        "dcp.save again": saver("again", dcp_save),
        "torch.save, fsync": saver("torch", lambda path: save_with_torch(state, path)),
    }
    return take_turns(actions, rounds, before=job.step)


def forget(path: Path) -> None:
    """Drop the files of a checkpoint from the page cache, so that they are read from the disk."""
    for file in path.iterdir():
        with file.open("rb") as opened:
            os.fsync(opened.fileno())
        drop_from_cache(file)


def same(mine: Any, other: Any) -> bool:
    """True if two state dicts hold the same bits."""
    if isinstance(other, dict):
        return mine.keys() == other.keys() and all(same(mine[key], other[key]) for key in other)
    return torch.equal(mine, other)


def measure_loading(job: Job, scratch: Path, rounds: int) -> list[Row]:
    """Load a published checkpoint, and one of dcp.save of the same state, with stock dcp.load."""
    job.step()
    state = job.state()
    job.store.checkpoint(scratch / "published")
    for name in ("dcp", "again"):
        dcp.save(state, checkpoint_id=scratch / name, no_dist=True)
    target = {
        "model": {name: torch.zeros_like(tensor) for name, tensor in state["model"].items()},
        "optimizer": {
            "state": {
                name: {key: torch.zeros_like(tensor) for key, tensor in states.items()}
                for name, states in state["optimizer"]["state"].items()
            }
        },
    }

    def loader(name: str) -> Callable[[int], Taken]:
        def act(number: int) -> Taken:
            forget(scratch / name)
            taken = timed(lambda: dcp.load(target, checkpoint_id=scratch / name, no_dist=True))
            if not same(target, state):
                raise RuntimeError(f"{name} was loaded with other values than were saved")
            target["model"]["layers.0.weight"].zero_()
            return taken

        return act

    actions = {
        "of dcp.save": loader("dcp"),
        "of dcp.save again": loader("again"),
        "published": loader("published"),
    }
    rows = take_turns(actions, rounds, before=lambda: None)
    for name in ("published", "dcp", "again"):
        shutil.rmtree(scratch / name)
    return rows


def measure_point(scratch: Path, state_bytes: int, pages: int, rounds: int) -> Point:
    """Publish a state of one size in about ``pages`` pages."""
    job = Job(scratch / "run", state_bytes, state_bytes // pages)
    seconds = []
    with job.store as store:
        for number in range(rounds):
            job.step()
            path = scratch / f"published-{number}"
            seconds.append(timed(lambda: store.checkpoint(path)).seconds)  # noqa: B023 - now.
            shutil.rmtree(path)
        stats = store.stats()
    shutil.rmtree(scratch / "run")
    return Point(
        state_bytes=stats.state_bytes,
        pages=stats.pages,
        rounds=rounds,
        seconds=statistics.median(seconds),
        seconds_min=min(seconds),
        seconds_max=max(seconds),
    )


def report(title: str, heading: str, rows: list[Row]) -> Table:
    """Return a comparison as a table."""
    table = Table(title=title)
    for column in ("case", "s (min..max)", heading, "CPU s"):
        table.add_column(column, justify="left" if column == "case" else "right", no_wrap=True)
    for row in rows:
        table.add_row(
            row.case,
            f"{row.seconds:.4f} ({row.seconds_min:.4f}..{row.seconds_max:.4f})",
            f"{row.ratio_median:.2f} ({row.ratio_min:.2f}..{row.ratio_max:.2f})",
            f"{row.cpu_s:.3f}",
        )
    return table


def report_points(points: list[Point]) -> Table:
    """Return the times of publishing as a table."""
    table = Table(title="Publishing, by size")
    for column in ("MB", "pages", "ms (min..max)"):
        table.add_column(column, justify="right", no_wrap=True)
    for point in points:
        extremes = f"({point.seconds_min * 1e3:.1f}..{point.seconds_max * 1e3:.1f})"
        table.add_row(
            f"{point.state_bytes / 1e6:.0f}",
            str(point.pages),
            f"{point.seconds * 1e3:.1f} {extremes}",
        )
    return table


def main(
    directory: DirectoryOption = Path("."),
    small: SmallOption = False,
    json_path: JsonOption = None,
) -> None:
    """Compare publishing with dcp.save and torch.save, and loading of both."""
    plan = PLANS["small" if small else "default"]
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")
    with scratch_folder(directory) as scratch:
        job = Job(scratch / "run", plan.state_bytes, plan.page_bytes)
        with job.store:
            job.step()
            stats = job.store.stats()
            saving = measure_saving(job, job.state(), scratch, plan.rounds)
            loading = measure_loading(job, scratch, plan.rounds)
        shutil.rmtree(scratch / "run")
        points = [
            measure_point(scratch, state_bytes, pages, plan.rounds)
            for state_bytes in plan.grid_state_bytes
            for pages in plan.grid_pages
        ]
    console = Console(width=120)
    size = f"{stats.state_bytes / 1e6:.0f} MB in {stats.pages} pages"
    console.print(report(f"Saving {size}", "times store.checkpoint()", saving))
    console.print(report(f"dcp.load of {size}", "times dcp.load of dcp.save", loading))
    console.print(report_points(points))
    write_report(
        json_path,
        plan=asdict(plan),
        engine=stats.engine,
        state_bytes=stats.state_bytes,
        pages=stats.pages,
        saving=[asdict(row) for row in saving],
        loading=[asdict(row) for row in loading],
        points=[asdict(point) for point in points],
    )


if __name__ == "__main__":
    typer.run(main)
