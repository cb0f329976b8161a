"""Training steps with the state on disk, compared with a lower bound.

If computing takes longer than paging, the bound is the same step with the state in memory; else it
is a sweep over the same bytes that computes nothing. All cases do a real forward and backward
before each step and take turns; the bound runs twice in each round to show the noise.

``--beside adamw`` compares Muon with AdamW instead, on one model with the state on disk.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from enum import StrEnum
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from measuring import (
    MIB,
    DirectoryOption,
    JsonOption,
    SmallOption,
    cpu_seconds,
    medians,
    ratio_text,
    rotated,
    scratch_folder,
    spread,
    write_report,
)
from rich.console import Console
from rich.progress import track
from rich.table import Table
from sweep import Idle
from torch import nn
from torch.profiler import record_function

import muon
import tierstore

AGAIN = " again"
# Few, because a CPU without instructions for bfloat16 multiplies it 24 times slower than float32.
BATCH = 16
BUFFERS = 4
ADAMW_STATES = {"exp_avg": torch.float32, "exp_avg_sq": torch.float32}
MUON_STATES = {"momentum_buffer": torch.bfloat16}


class Beside(StrEnum):
    """An algorithm that Muon is compared with."""

    ADAMW = "adamw"


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Parameters of one run of the benchmark."""

    width: int
    layers: int
    """Pairs of matrices for Muon, the one four times as wide as the other."""
    rows: int
    """Rows of the embedding for AdamW."""
    muon_page_bytes: int
    adamw_page_bytes: int
    rounds: int


PLANS = {
    "small": Plan(
        width=64, layers=4, rows=8192, muon_page_bytes=MIB // 8, adamw_page_bytes=MIB, rounds=2
    ),
    "default": Plan(
        width=768,
        layers=4,
        rows=65536,
        muon_page_bytes=16 * MIB,
        adamw_page_bytes=32 * MIB,
        rounds=15,
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One training step, in seconds."""

    cpu_s: float
    """Processor time of all threads, until the step is durable."""
    backward_s: float
    """Forward and backward."""
    step_s: float
    """Until step() has returned: parameters are updated, writes may be in flight."""
    drain_s: float
    """From then until all writes have ended."""
    commit_s: float
    """From then until the step is durable: flush and commit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One line of the result: medians over all rounds."""

    case: str
    rounds: int
    cpu_s: float
    added_cpu_s: float
    """Median of what the case takes more than the bound in the same round."""
    backward_s: float
    step_s: float
    drain_s: float
    commit_s: float
    ratio: tuple[float, ...]
    """Time over the time of the bound in the same round: extremes and quartiles."""
    read_bytes: float
    """Bytes of pages read in a step."""
    written_bytes: float
    host_bytes: int
    """Peak of the memory for pages."""
    gpu_bytes: int
    """Peak of the memory of the GPU in a step, beside what was there before; 0 without a GPU."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Cases that took turns, with the bound that they are compared with."""

    title: str
    bound: str
    """The case that all times are divided by."""
    drained: bool
    """True if times end when the writes have ended, instead of when step() returns."""
    parameters: int
    state_bytes: int
    rows: list[Row]
    turns: dict[str, list[Turn]]


class Model(nn.Sequential):
    """A model with its inputs."""

    inputs: torch.Tensor


def linear_pairs(width: int, count: int) -> list[nn.Module]:
    """Return pairs of matrices, the one four times as wide as the other."""
    layers: list[nn.Module] = []
    for _ in range(count):
        layers += [nn.Linear(width, 4 * width, bias=False), nn.ReLU()]
        layers += [nn.Linear(4 * width, width, bias=False)]
    return layers


class Matrices(Model):
    """A model of wide matrices, in bfloat16."""

    def __init__(self, plan: Plan) -> None:
        torch.manual_seed(0)
        super().__init__(*linear_pairs(plan.width, plan.layers))
        self.bfloat16()
        self.inputs = torch.randn(BATCH, plan.width, dtype=torch.bfloat16)


class Embedding(Model):
    """An embedding of some tokens, in bfloat16."""

    def __init__(self, plan: Plan) -> None:
        torch.manual_seed(0)
        super().__init__(nn.Embedding(plan.rows, plan.width, dtype=torch.bfloat16))
        self.inputs = torch.randint(plan.rows, (BATCH,))


def now_s() -> float:
    """Return the time after all work of the GPU has ended."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


class Contender:
    """A model with its optimizer, which does one training step per turn.

    Args:
        model: a model that no other contender trains.
        optimizer: steps the model's parameters; a store with a directory commits each step.
    """

    def __init__(self, model: Model, optimizer: muon.Muon | Idle) -> None:
        self._model = model
        self._optimizer = optimizer
        self.store = optimizer.store
        self.parameters = sum(parameter.numel() for parameter in model.parameters())
        for _ in range(2):  # The first write of a file costs more.
            self.turn()
        self._before = self.store.stats()

    def bytes_per_step(self) -> dict[str, Any]:
        """Return the bytes that a step moved on average, and the memory for pages."""
        before, after = self._before, self.store.stats()
        steps = after.steps - before.steps
        return {
            "read_bytes": (after.bytes_read - before.bytes_read) / steps,
            "written_bytes": (after.bytes_written - before.bytes_written) / steps,
            "host_bytes": after.host_bytes_peak,
            "gpu_bytes": self._gpu_bytes,
        }

    def turn(self) -> Turn:
        """Do one training step and wait until the disk is idle again."""
        began_cpu_s, times_s = cpu_seconds(), [now_s()]
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        gpu_bytes = torch.cuda.memory_allocated()
        with record_function("forward"):
            loss = self._model(self._model.inputs).square().mean()
        with record_function("backward"):
            loss.backward()
        times_s.append(now_s())
        self._optimizer.step()
        times_s.append(now_s())
        is_paged = self.store.stats().engine != "none"
        if is_paged:
            self.store.move("nvme")  # Waits for the writes.
        times_s.append(now_s())
        if is_paged:
            self.store.synchronize()
        times_s.append(now_s())
        cpu_s = cpu_seconds() - began_cpu_s
        self._gpu_bytes = torch.cuda.max_memory_allocated() - gpu_bytes
        self._model.zero_grad()
        backward_s, step_s, drain_s, commit_s = (b - a for a, b in pairwise(times_s))
        return Turn(
            cpu_s=cpu_s,
            backward_s=backward_s,
            step_s=step_s,
            drain_s=drain_s,
            commit_s=commit_s,
        )


def open_store(directory: Path, stack: ExitStack, page_bytes: int) -> tierstore.TierStore:
    """Return a store with a few buffers, which ``stack`` closes."""
    store = tierstore.TierStore(
        directory, host_memory=2 * BUFFERS * page_bytes, page_bytes=page_bytes, buffers=BUFFERS
    )
    return stack.enter_context(store)


def contender(model: Model, algorithm: str, store: tierstore.TierStore | None) -> Contender:
    """Return a contender that steps all parameters by one algorithm."""
    group = {"params": list(model.named_parameters()), "algorithm": algorithm}
    return Contender(model, muon.Muon([group], store=store, ns_dtype="auto"))


def make_contenders(
    directory: Path, stack: ExitStack, make: Callable[[], Matrices | Embedding], plan: Plan
) -> dict[str, Contender]:
    """Return the contenders by name, each with its own model."""
    model = make()
    is_muon = isinstance(model, Matrices)
    algorithm = "muon" if is_muon else "adamw"
    page_bytes = plan.muon_page_bytes if is_muon else plan.adamw_page_bytes
    idle = Idle(
        dict(model.named_parameters()),
        MUON_STATES if is_muon else ADAMW_STATES,
        open_store(directory / "idle", stack, page_bytes),
    )
    return {
        "in memory": contender(make(), algorithm, None),
        "I/O alone": Contender(model, idle),
        "on NVMe": contender(make(), algorithm, open_store(directory / "nvme", stack, page_bytes)),
    }


def muon_beside_adamw(directory: Path, stack: ExitStack, plan: Plan) -> dict[str, Contender]:
    """Return both algorithms on the same matrices, with pages of one size."""
    return {
        name: contender(
            Matrices(plan),
            name.lower(),
            open_store(directory / name, stack, plan.adamw_page_bytes),
        )
        for name in ("AdamW", "Muon")
    }


def compare(
    title: str, contenders: dict[str, Contender], *, bound: str, drained: bool, rounds: int
) -> Comparison:
    """Measure all contenders in turn, and the bound twice per round."""
    order = [*contenders, bound + AGAIN]
    turns: dict[str, list[Turn]] = {case: [] for case in order}
    for index in track(range(rounds), description=title):
        for case in rotated(order, index):
            turns[case].append(contenders[case.removesuffix(AGAIN)].turn())

    def seconds(turn: Turn) -> float:
        return turn.step_s + turn.drain_s if drained else turn.step_s

    rows = []
    for case, taken in turns.items():
        ratios = [seconds(a) / seconds(b) for a, b in zip(taken, turns[bound], strict=True)]
        moved = contenders[case.removesuffix(AGAIN)].bytes_per_step()
        added = [a.cpu_s - b.cpu_s for a, b in zip(taken, turns[bound], strict=True)]
        rows.append(
            Row(
                case=case,
                rounds=rounds,
                added_cpu_s=statistics.median(added),
                ratio=spread(ratios),
                **moved,
                **medians(taken),
            )
        )
    paged = [*contenders.values()][-1]
    return Comparison(
        title=title,
        bound=bound,
        drained=drained,
        parameters=paged.parameters,
        state_bytes=paged.store.stats().state_bytes,
        rows=rows,
        turns=turns,
    )


def report(comparison: Comparison) -> Table:
    """Return one comparison as a table."""
    table = Table(
        title=f"{comparison.title}: {comparison.parameters / 1e6:.1f}M parameters, "
        f"{comparison.state_bytes / 1e6:.0f} MB of state, medians (quartiles)"
    )
    what = "step + drain" if comparison.drained else "step"
    for heading in ("case", "backward s", "step s", "drain s", "flush and commit s"):
        table.add_column(heading, justify="left" if heading == "case" else "right")
    for heading in (f"{what}, of {comparison.bound}", "CPU s, added"):
        table.add_column(heading, justify="right")
    for heading in ("read, written B", "MB", "GPU MB"):
        table.add_column(heading, justify="right")
    for row in comparison.rows:
        moved = (row.read_bytes, row.written_bytes)
        table.add_row(
            row.case,
            *(f"{s:.3f}" for s in (row.backward_s, row.step_s, row.drain_s, row.commit_s)),
            ratio_text(row.ratio, digits=3),
            f"{row.cpu_s:.2f}, {row.added_cpu_s:+.3f}",
            ", ".join(f"{nbytes / comparison.parameters:.1f}" for nbytes in moved),
            f"{row.host_bytes / 1e6:.0f}",
            f"{row.gpu_bytes / 1e6:.0f}",
        )
    return table


def main(
    directory: DirectoryOption = Path("."),
    small: SmallOption = False,
    json_path: JsonOption = None,
    beside: Annotated[
        Beside | None, typer.Option(help="Compare Muon with another algorithm on one model.")
    ] = None,
) -> None:
    """Compare training steps with paged state with the resident one, and with the I/O alone."""
    plan = PLANS["small" if small else "default"]
    makers: list[tuple[str, Callable[[Path, ExitStack], dict[str, Contender]], str, bool]] = [
        (
            "Muon, compute exceeds I/O",
            partial(make_contenders, make=partial(Matrices, plan), plan=plan),
            "in memory",
            False,
        ),
        (
            "AdamW, I/O exceeds compute",
            partial(make_contenders, make=partial(Embedding, plan), plan=plan),
            "I/O alone",
            True,
        ),
    ]
    if beside is not None:
        title = "Muon beside AdamW, all matrices of one model"
        makers = [(title, partial(muon_beside_adamw, plan=plan), "AdamW", True)]
    comparisons = []
    for title, make, bound, drained in makers:
        with scratch_folder(directory) as scratch, ExitStack() as stack:
            contenders = make(scratch, stack)
            comparisons.append(
                compare(title, contenders, bound=bound, drained=drained, rounds=plan.rounds)
            )
    for comparison in comparisons:
        Console(width=140).print(report(comparison))
    write_report(
        json_path,
        plan=asdict(plan),
        comparisons=[asdict(comparison) for comparison in comparisons],
    )


if __name__ == "__main__":
    typer.run(main)
