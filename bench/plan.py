"""Predictions of ``tierstore plan``, compared with the runs that they are about.

Each case is a run of a store on this machine. A probe just before the run gives the rates of the
plan; a probe just after it shows how much the machine has changed meanwhile. The run has no forward
and backward: gradients are fixed, and the plan is told so.

Wanted: bytes of files, bytes that the store reads and writes, and memory of the store
are exact. Bytes that the kernel counts, with manifests, are within 1%. Peak memory of the process
is within 10%. The time of a step, commits included, is within 5% in the median over all cases; in
the worst case it is within 10% and the change between the probes where a step waits for the drives,
and within 15% otherwise.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import typer
from measuring import (
    MIB,
    DirectoryOption,
    JsonOption,
    SmallOption,
    kernel_bytes,
    peak_anonymous_bytes,
    scratch_folder,
    write_report,
)
from ranks import start_world
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.profiler import ProfilerActivity, profile

import muon
import tierstore
from tierstore.paging.tier_plan import STREAM_BUFFERS
from tierstore.tools.plan.footprint import Footprint, StoreOptions, footprint_of
from tierstore.tools.plan.job import Job
from tierstore.tools.plan.memory import model_bytes
from tierstore.tools.plan.models import model_from_module
from tierstore.tools.plan.rates import Rates, measured_rates
from tierstore.tools.plan.skeleton import skeleton_of
from tierstore.tools.plan.step import Ranks, formula_of, lay_out_ranks
from tierstore.tools.probe.optimizers import load_optimizers
from tierstore.tools.probe.probe import probe
from tierstore.tools.probe.result import Probe
from tierstore.units import SECTOR_BYTES

RUN = "run"  # A question to ranks.
OPTIONS: dict[str, Any] = {"ns_dtype": "auto"}
"""Arguments of ``Muon``: products of bfloat16 would take hours on some CPUs."""
PAGED = 0.05  # A step waits for the drives if paging adds this share of it, or more.


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A run."""

    algorithm: str
    """ "muon", with AdamW for the embedding and the norms, or "adamw" for all."""
    width: int
    layers: int
    """Pairs of matrices, the one four times as wide as the other, with a norm before."""
    rows: int
    """Of the embedding."""
    dtype: str = "bfloat16"
    """Of parameters and gradients."""
    page_bytes: int = 16 * MIB
    buffers: int | None = None
    resident: float = 0.0
    """Share of the state that stays in host memory; needs ``buffers`` None if above 0."""
    commit_every: int | None = 1
    ranks: int = 1
    partition: str = "fsdp"
    cycles: int = 6
    """Number of times that the steps from one commit to the next are measured."""

    @property
    def cycle(self) -> int:
        """Number of steps from one commit to the next; 1 without commits."""
        return self.commit_every or 1

    @property
    def steps(self) -> int:
        """Number of steps after the first cycle. The first cycle of these is not timed."""
        return (1 + self.cycles) * self.cycle

    @property
    def commits(self) -> int:
        """Number of commits in these steps; without any, the end of the run writes all pages."""
        return 1 if self.commit_every is None else 1 + self.cycles

    def describe(self, parameters: int) -> str:
        """Return the case as text."""
        dtype = {"bfloat16": "bf16", "float32": "fp32"}[self.dtype]
        buffers = "" if self.buffers is None else f", {self.buffers} buffers"
        resident = f", {self.resident:.0%} resident" if self.resident else ""
        commits = "no commit" if self.commit_every is None else f"commit every {self.commit_every}"
        ranks = f", {self.ranks} ranks {self.partition.upper()}" if self.ranks > 1 else ""
        model = f"{self.algorithm} {parameters / 1e6:.3g}M {dtype}"
        return f"{model}{buffers}{resident}, {commits}{ranks}"


SMALL = (
    Case(algorithm="muon", width=64, layers=2, rows=512, page_bytes=MIB // 32, buffers=3, cycles=2),
    Case(
        algorithm="adamw",
        width=64,
        layers=2,
        rows=512,
        dtype="float32",
        page_bytes=MIB // 32,
        resident=0.5,
        commit_every=2,
        ranks=2,
        cycles=2,
    ),
)

# Cases of equal pages and ranks stand together, so that they share the probes between them.
DEFAULT = (
    Case(algorithm="adamw", width=1024, layers=8, rows=32768, buffers=4),
    Case(algorithm="adamw", width=1024, layers=8, rows=32768, dtype="float32", buffers=2),
    Case(algorithm="adamw", width=1024, layers=8, rows=32768, buffers=6, commit_every=None),
    Case(algorithm="adamw", width=1024, layers=8, rows=32768, resident=0.5),
    Case(
        algorithm="adamw",
        width=1024,
        layers=16,
        rows=65536,
        resident=0.5,
        commit_every=4,
        cycles=3,
    ),
    Case(algorithm="adamw", width=1024, layers=8, rows=32768, resident=1.0),
    Case(algorithm="adamw", width=1024, layers=16, rows=262144, buffers=8, cycles=3),
    Case(algorithm="muon", width=512, layers=9, rows=2048, buffers=4),
    Case(algorithm="muon", width=768, layers=10, rows=2048, dtype="float32", resident=0.5),
    Case(
        algorithm="muon",
        width=256,
        layers=180,
        rows=8192,
        buffers=3,
        commit_every=4,
        cycles=2,
    ),
    Case(algorithm="muon", width=512, layers=9, rows=2048, resident=1.0, commit_every=None),
    Case(
        algorithm="adamw",
        width=1024,
        layers=8,
        rows=32768,
        ranks=2,
        buffers=6,
    ),
    Case(
        algorithm="muon",
        width=512,
        layers=9,
        rows=32768,
        ranks=2,
        buffers=6,
    ),
    Case(
        algorithm="muon",
        width=512,
        layers=9,
        rows=32768,
        ranks=2,
        partition="ddp",
        resident=0.5,
        commit_every=4,
        cycles=3,
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bytes:
    """Bytes of one rank."""

    files: int
    """Of page files."""
    host: int
    device: int
    read: int
    """Of all counted steps."""
    written: int
    memory: int
    """Peak of the process beside what it has before there is a model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Measurements of one rank."""

    nbytes: Bytes
    kernel_read: int
    """Bytes that the process read from drives; 0 if the directory is in memory."""
    kernel_written: int
    step_s: list[float]
    ranges_s: dict[str, float]
    """Name of a range -> its seconds in a profiled step, and "step" for all of it; a range within
    another one counts in both."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One line of the result. Errors are relative to what was measured."""

    case: Case
    description: str
    parameters: int
    predicted_s: float
    measured_s: float
    """Median over cycles of the mean of a step, on the slowest rank."""
    error: float
    drift: float
    """Change of the predicted time from the probe before the run to the one after it."""
    allowed: float
    """Largest error that is expected."""
    paging: float
    """Share of the step that paging and commits are predicted to add."""
    predicted: list[Bytes]
    """Of each rank."""
    measured: list[Measured]
    lanes_s: dict[str, float]
    """Lane -> its predicted seconds in a step, on the slowest rank."""
    rates: list[dict[str, float]]
    """Before and after the run."""


class Block(nn.Module):
    """A norm and a pair of matrices."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(width)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)


class Model(nn.Module):
    """The parameters of a case, on the meta device."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        with torch.device("meta"):
            self.embed = nn.Embedding(case.rows, case.width)
            self.layers = nn.ModuleList(Block(case.width) for _ in range(case.layers))
        self.to(getattr(torch, case.dtype))


def make_groups(case: Case, model: nn.Module) -> list[dict[str, Any]]:
    """Return the param groups that the plan is about."""
    is_adamw = case.algorithm == "adamw"
    return muon.param_groups(model, is_muon=(lambda name, parameter: False) if is_adamw else None)


def allocate(case: Case, model: nn.Module) -> None:
    """Give parameters of the meta device fixed values and gradients, of this rank's shards."""
    if case.ranks > 1 and case.partition == "fsdp":
        fully_shard(model, mesh=init_device_mesh("cpu", (case.ranks,)))
    model.to_empty(device="cpu")
    torch.manual_seed(0)
    for parameter in model.parameters():
        parameter.grad = torch.empty_like(parameter)
        for tensor in (parameter.detach(), parameter.grad):
            local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
            local.normal_()


def load_kernels() -> None:
    """Do a step of both algorithms, so that what they load counts before there is a model."""
    groups: list[dict[str, Any]] = []
    for algorithm in ("muon", "adamw"):
        parameter = nn.Parameter(torch.ones(64, 64, dtype=torch.bfloat16))
        parameter.grad = torch.ones_like(parameter)
        groups.append({"params": [parameter], "algorithm": algorithm})
    muon.Muon(groups).step()


@contextlib.contextmanager
def serve(folder: Path, case: Case, options: StoreOptions, threads: int) -> Iterator[Any]:
    """Serve one rank: yields a function that does the run."""
    torch.set_num_threads(threads)
    yield lambda _: run(folder / "run", case, options)


def run(directory: Path, case: Case, options: StoreOptions) -> Measured:
    """Do the run of a case on one rank of a fresh process."""
    load_kernels()
    idle_memory = peak_anonymous_bytes()
    model = Model(case)
    allocate(case, model)
    with tierstore.TierStore(directory, **asdict(options)) as store:
        optimizer = muon.Muon(make_groups(case, model), store=store, **OPTIONS)
        for _ in range(case.cycle):
            optimizer.step()
        store.synchronize()
        before, kernel_before = store.stats(), kernel_bytes()
        step_s = []
        for _ in range(case.steps):
            began = time.perf_counter()
            optimizer.step()
            step_s.append(time.perf_counter() - began)
        store.synchronize()
        after, kernel_after = store.stats(), kernel_bytes()
        memory = peak_anonymous_bytes() - idle_memory
        own = directory if case.ranks == 1 else directory / f"rank-{dist.get_rank():05d}"
        return Measured(
            nbytes=Bytes(
                files=sum(path.stat().st_size for path in own.rglob("page-*")),
                host=after.host_bytes_peak,
                device=after.device_bytes_peak,
                read=after.bytes_read - before.bytes_read,
                written=after.bytes_written - before.bytes_written,
                memory=memory,
            ),
            kernel_read=kernel_after[0] - kernel_before[0],
            kernel_written=kernel_after[1] - kernel_before[1],
            step_s=step_s[case.cycle :],
            ranges_s=ranges(optimizer, case.cycle),
        )


def ranges(optimizer: muon.Muon, steps: int) -> dict[str, float]:
    """Return the seconds of the ranges of a step, from a profile of several."""
    found: defaultdict[str, float] = defaultdict(float)
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        began = time.perf_counter()
        for _ in range(steps):
            optimizer.step()
        found["step"] = (time.perf_counter() - began) / steps
    for event in profiled.events():
        if event.name.startswith(("tierstore::", "muon::")):
            found[event.name.split()[0]] += event.time_range.elapsed_us() / 1e6 / steps
    return dict(found)


@contextlib.contextmanager
def serve_network(folder: Path, nbytes: int) -> Iterator[Any]:
    """Serve one rank: yields a function that measures the seconds of an exchange."""
    sent = list(torch.ones(dist.get_world_size(), nbytes, dtype=torch.uint8))
    received = [torch.empty_like(tensor) for tensor in sent]

    def exchange(_: Any) -> float:
        dist.barrier()
        began = time.perf_counter()
        dist.all_to_all(received, sent)
        return time.perf_counter() - began

    yield exchange


def network_rate(folder: Path, nbytes: int) -> float:
    """Return the bytes per second that each of two ranks sends, and receives meanwhile."""
    folder.mkdir()
    with start_world(2, folder, serve_network, nbytes) as world:
        seconds: list[float] = [max(world.ask(RUN)) for _ in range(7)]
    return nbytes / statistics.median(seconds)


class Prober:
    """Probes a directory, unless it has just done so in the same way.

    Args:
        directory: the directory.
        once: never probe it twice in the same way, so that there is no drift.
    """

    def __init__(self, directory: Path, *, once: bool) -> None:
        self._directory = directory
        self._once = once
        self._last: tuple[tuple[int, int], Probe] | None = None

    def before(self, page_bytes: int, threads: int) -> Probe:
        """Return the probe that was made last, or a new one if that was another one."""
        if self._last is not None and self._last[0] == (page_bytes, threads):
            return self._last[1]
        torch.set_num_threads(threads)
        found = probe([self._directory], page_bytes=page_bytes)
        self._last = (page_bytes, threads), found
        return found

    def after(self, page_bytes: int, threads: int) -> Probe:
        """Return a new probe, except with ``once``."""
        if not self._once:
            self._last = None
        return self.before(page_bytes, threads)


def lay_out(case: Case, options: StoreOptions) -> Ranks:
    """Return the pages of all ranks of a case."""
    job = Job(cpu_ranks=case.ranks, partition=case.partition, model_s=0.0, store=options)
    optimizer = load_optimizers()["muon"]
    skeleton = skeleton_of(model_from_module(Model(case)))
    planned = optimizer.plan(skeleton, case.algorithm, on_gpu=False, options=OPTIONS)
    return lay_out_ranks(job, planned, optimizer)


def options_of(case: Case) -> StoreOptions:
    """Return the arguments of the store: what stays in memory is a share of the state."""
    options = StoreOptions(
        host_memory=2**50,
        page_bytes=case.page_bytes,
        buffers=case.buffers,
        commit_every=case.commit_every,
    )
    ranks = lay_out(case, options)
    largest = max(layout.nbytes for one in ranks.classes for layout in one.footprint.layouts)
    buffers = (case.buffers or STREAM_BUFFERS) * (largest + SECTOR_BYTES)
    nbytes = buffers + int(case.resident * ranks.most("state_bytes"))
    return replace(options, host_memory=nbytes)


def predict_bytes(case: Case, ranks: Ranks) -> list[Bytes]:
    """Return the bytes of each rank, of all counted steps."""
    beside = ranks.matrix_bytes + max(one.in_flight_bytes for one in ranks.classes)
    model = 2 * model_bytes(ranks.job, model_from_module(Model(case))).held

    def bytes_of(footprint: Footprint) -> Bytes:
        written = case.steps * footprint.step_written_bytes
        return Bytes(
            files=footprint.file_bytes,
            host=footprint.host_bytes,
            device=footprint.device_bytes,
            read=case.steps * footprint.step_read_bytes,
            written=written + case.commits * footprint.commit_written_bytes,
            memory=model + footprint.host_bytes + beside,
        )

    return [
        bytes_of(footprint_of(ranks.subgroups, ranks.job.store, world_size=case.ranks, rank=rank))
        for rank in range(case.ranks)
    ]


def rates_of(rates: Rates) -> dict[str, float]:
    """Return the rates that a prediction was made from."""
    disk = rates.disk
    assert disk is not None
    return {
        "read": disk.read,
        "write": disk.write,
        "mixed_read": disk.mixed_read,
        "commit_s": rates.commit_s,
        "checksum": rates.checksum,
        "network": rates.network,
        **{
            f"{one.work} {'x'.join(map(str, one.shape))} {one.dtype} s": one.seconds.median
            for one in rates.measured
        },
    }


def compare(case: Case, scratch: Path, prober: Prober, threads: int, network: float) -> Row:
    """Predict a run and do it."""
    threads = max(1, threads // case.ranks)
    options = options_of(case)
    ranks = lay_out(case, options)
    before = measured_rates(prober.before(case.page_bytes, threads), on_gpu=False, network=network)
    with (
        scratch_folder(scratch) as folder,
        start_world(case.ranks, folder, serve, case, options, threads) as world,
    ):
        measured = world.ask(RUN)
    after = measured_rates(prober.after(case.page_bytes, threads), on_gpu=False, network=network)
    predicted = formula_of(ranks, before).step(0.0)
    measured_s = max(cycle_s(one.step_s, case.cycle) for one in measured)
    paging = predicted.exposed_s / predicted.seconds
    drift = relative(formula_of(ranks, after).step(0.0).seconds, predicted.seconds)
    parameters = model_from_module(Model(case)).parameter_count
    return Row(
        case=case,
        description=case.describe(parameters),
        parameters=parameters,
        predicted_s=predicted.seconds,
        measured_s=measured_s,
        error=relative(predicted.seconds, measured_s),
        drift=drift,
        allowed=0.1 + abs(drift) if paging >= PAGED else 0.15,
        paging=paging,
        predicted=predict_bytes(case, ranks),
        measured=measured,
        lanes_s=dict(predicted.lanes),
        rates=[rates_of(before), rates_of(after)],
    )


def cycle_s(step_s: Sequence[float], cycle: int) -> float:
    """Return the median over cycles of the mean of their steps."""
    return statistics.median(
        statistics.fmean(step_s[start : start + cycle]) for start in range(0, len(step_s), cycle)
    )


def worst(row: Row, name: str) -> float:
    """Return the largest error of a number of bytes over all ranks."""
    pairs = zip(row.predicted, row.measured, strict=True)
    errors = [relative(getattr(a, name), getattr(b.nbytes, name)) for a, b in pairs]
    return max(errors, key=abs)


def worst_of_kernel(row: Row) -> float | None:
    """Return the largest error of the kernel's counts over all ranks; None if it has none."""
    errors = []
    for predicted, measured in zip(row.predicted, row.measured, strict=True):
        if measured.kernel_written:
            errors.append(relative(predicted.read, measured.kernel_read))
            errors.append(relative(predicted.written, measured.kernel_written))
    return max(errors, key=abs, default=None)


def relative(predicted: float, measured: float) -> float:
    """Return the error of a prediction."""
    if predicted == measured:
        return 0.0
    return predicted / measured - 1 if measured else float("inf")


def report(rows: Sequence[Row]) -> Table:
    """Return all cases as a table."""
    table = Table(title="Predicted and measured; errors of the prediction")
    headings = ("step s", "measured", "error", "allowed", "drift", "paging")
    counts = ("files", "host memory", "read", "written", "by the kernel", "process MB", "error")
    for heading in ("case", *headings, *counts):
        table.add_column(heading, justify="left" if heading == "case" else "right")
    for row in rows:
        kernel = worst_of_kernel(row)
        table.add_row(
            row.description,
            f"{row.predicted_s:.3f}",
            f"{row.measured_s:.3f}",
            f"{row.error:+.1%}",
            f"{row.allowed:.1%}",
            f"{row.drift:+.1%}",
            f"{row.paging:.0%}",
            *(exact(worst(row, name)) for name in ("files", "host", "read", "written")),
            "-" if kernel is None else f"{kernel:+.2%}",
            f"{max(one.nbytes.memory for one in row.measured) / 1e6:.0f}",
            f"{worst(row, 'memory'):+.1%}",
        )
    return table


def exact(error: float) -> str:
    """Format an error that is expected to be zero."""
    return "exact" if error == 0 else f"{error:+.2%}"


def main(
    directory: DirectoryOption = Path("."),
    small: SmallOption = False,
    json_path: JsonOption = None,
) -> None:
    """Compare predictions of ``tierstore plan`` with real runs."""
    cases = SMALL if small else DEFAULT
    threads = 1 if small else torch.get_num_threads()
    console = Console(width=200)
    rows = []
    with scratch_folder(directory) as scratch:
        network = network_rate(scratch / "network", MIB if small else 32 * MIB)
        prober = Prober(scratch, once=small)
        for case in track(cases, description="runs"):
            rows.append(compare(case, scratch, prober, threads, network))
    console.print(report(rows))
    errors = [abs(row.error) for row in rows]
    console.print(f"error of the step: {statistics.median(errors):.1%} in the median")
    write_report(
        json_path,
        threads=threads,
        rows=[asdict(row) for row in rows],
        median_error=statistics.median(errors),
    )


if __name__ == "__main__":
    typer.run(main)
