"""Settings that ``tierstore.fit`` chose, run as the program that it prints.

Each chosen job runs in a process of its own, and its memory, bytes and steps are compared with
the plan. A probe at the start, and a forward and backward of the model just before, give the rates.
Jobs that fit refused run with the leanest settings that fit knows, and must fail; then they run on
the nearest machine that fit names.

Expected before anything was measured: the kernel writes the predicted bytes within 1%. Peak memory
of a process is within 10%, and rather lower than predicted, because Python with torch takes less
than the 384 MiB that a plan counts. Steps are up to 15% longer than predicted: layers that are
computed again are counted as a third of the work, and the attention is not counted. All refused
jobs fail.
"""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import re
import resource
import shutil
import statistics
import subprocess
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import typer
from decoder import Decoder, loss_of
from measuring import (
    GIB,
    MIB,
    DirectoryOption,
    JsonOption,
    SmallOption,
    kernel_bytes,
    peak_anonymous_bytes,
    scratch_folder,
    write_report,
)
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import nn

import muon
import tierstore
from tierstore.tools.plan.fit import Fit, Fitted
from tierstore.tools.probe.probe import probe
from tierstore.units import format_bytes, parse_bytes

# Runs are forked by a server that has imported all modules, because importing takes seconds.
_processes = multiprocessing.get_context("forkserver")
_processes.set_forkserver_preload(["muon", "rich.table", "tierstore.tools.plan.fit", "typer"])

SEQUENCE = 1024
GROWTH = 1.1
"""Step of the search for the smallest machine."""
_M_MMAP_THRESHOLD = -3  # Of malloc.h.
ASSUMED = "1x1TB@1/1GB/s"
"""The drive of a small run, which has no probe."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A job, and the machine that it has."""

    algorithm: str
    width: int
    layers: int
    vocabulary: int
    tokens: int
    host_memory: int
    title: str = "quickest"
    """Title of the plan that runs; the first plan runs if no plan has it."""
    dtype: str = "float32"
    drives: int = 1
    capacity: int | None = None
    """Bytes of each drive; None: there are enough."""
    checkpoints: int = 0
    """Published checkpoints that are kept."""
    steps: int = 3
    """Number of measured steps, after one that is not measured."""

    def model(self, device: str = "meta") -> Decoder:
        """Return the model that the job trains."""
        with torch.device(device):
            model = Decoder(self.vocabulary, self.width, self.layers)
        return model.to(getattr(torch, self.dtype))

    def describe(self) -> str:
        """Return the job as text."""
        parameters = sum(parameter.numel() for parameter in self.model().parameters())
        dtype = {"bfloat16": "bf16", "float32": "fp32"}[self.dtype]
        drives = f", drive of {format_bytes(self.capacity)}" if self.capacity else ""
        model = f"{self.algorithm.removeprefix('torch.optim.')} {parameters / 1e6:.3g}M {dtype}"
        return f"{model}, {self.tokens} tokens, {format_bytes(self.host_memory)}{drives}"


_ADAMW: dict[str, Any] = {"algorithm": "adamw", "width": 512, "layers": 4, "vocabulary": 8192}
_MUON: dict[str, Any] = {"algorithm": "muon", "width": 512, "layers": 6, "vocabulary": 8192}
_BFLOAT16: dict[str, Any] = {"width": 512, "layers": 12, "vocabulary": 16384, "dtype": "bfloat16"}
_CLASS: dict[str, Any] = {"algorithm": "torch.optim.RMSprop", "width": 256, "layers": 4}
CHOSEN = (
    Case(**_ADAMW, tokens=4096, host_memory=3 * GIB),
    Case(**_ADAMW, tokens=4096, host_memory=3 * GIB, title="least memory"),
    Case(**_ADAMW, tokens=4096, host_memory=1000 * MIB),
    Case(**_ADAMW, tokens=4096, host_memory=1400 * MIB, title="longest life"),
    Case(**_MUON, tokens=2048, host_memory=4 * GIB),
    Case(**_MUON, tokens=2048, host_memory=1050 * MIB),
    Case(**_CLASS, vocabulary=32768, tokens=4096, host_memory=5 * GIB),
    Case(**_CLASS, vocabulary=32768, tokens=8192, host_memory=1200 * MIB),
    Case(**_BFLOAT16, algorithm="adamw", tokens=2048, host_memory=2 * GIB, capacity=700 * MIB),
    Case(**_BFLOAT16, algorithm="muon", tokens=2048, host_memory=2 * GIB, title="longest life"),
    Case(**_BFLOAT16, algorithm="muon", tokens=4096, host_memory=1200 * MIB),
    Case(
        algorithm="adamw",
        width=1024,
        layers=8,
        vocabulary=49152,
        dtype="bfloat16",
        tokens=1024,
        host_memory=3 * GIB,
    ),
)
_TINY: dict[str, Any] = {"width": 256, "layers": 4, "vocabulary": 8192, "steps": 1}
REFUSED = (
    Case(**_TINY, algorithm="adamw", tokens=2048, host_memory=340 * MIB),
    Case(**_TINY, algorithm="muon", tokens=2048, host_memory=340 * MIB),
    Case(**(_ADAMW | {"steps": 1}), tokens=2048, host_memory=440 * MIB),
    Case(**_TINY, algorithm="torch.optim.RMSprop", tokens=2048, host_memory=340 * MIB),
    Case(**_TINY, algorithm="adamw", tokens=2048, host_memory=GIB, capacity=80 * MIB),
    Case(
        **(_TINY | {"steps": 3}),
        algorithm="torch.optim.RMSprop",
        tokens=2048,
        host_memory=GIB,
        capacity=160 * MIB,
        checkpoints=1,
    ),
)
SMALL = (
    Case(
        algorithm="muon",
        width=128,
        layers=2,
        vocabulary=4096,
        tokens=2048,
        host_memory=GIB,
        steps=2,
    ),
    Case(
        algorithm="adamw",
        width=128,
        layers=4,
        vocabulary=4096,
        tokens=4096,
        host_memory=500 * MIB,
        title="least memory",
        steps=2,
    ),
)
SMALL_REFUSED = (
    Case(
        algorithm="adamw",
        width=128,
        layers=2,
        vocabulary=4096,
        tokens=2048,
        host_memory=200 * MIB,
        steps=1,
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """A run."""

    failure: str | None
    """Of a run that failed, which has no steps."""
    step_s: Sequence[float] = ()
    memory: int = 0
    """Peak of the process, without mapped files."""
    written: int = 0
    """Bytes that the kernel wrote to drives in the measured steps."""
    store_written: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A job that was chosen. Errors are relative to what was measured."""

    case: Case
    description: str
    settings: str
    title: str
    tflops: float
    predicted_memory: int
    parts: dict[str, int]
    """Of the predicted memory."""
    memory_error: float
    memory_returned: int
    """Peak of a process whose freed memory goes back to the system at once."""
    returned_error: float
    predicted_s: float
    measured_s: float
    step_error: float
    model_s: float
    """Of the predicted step."""
    predicted_written: float
    written_error: float
    measured: Measured


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """A job that was refused."""

    case: Case
    description: str
    failure: str | None
    """Of the run on the refused machine with the leanest settings."""
    least: str
    """The smallest machine that was found on which fit accepts the job."""
    least_failure: str | None
    """Of the same run on that machine."""
    change: str
    """The nearest change that fit names."""
    change_failure: str | None
    """Of the run with that change."""


def run(
    program: str,
    case: Case,
    directories: Sequence[Path],
    memory_limit: int | None,
    returns_memory: bool,
    threads: int,
) -> Measured:
    """Execute a program, in a process of its own.

    Args:
        program: ``Fitted.program``.
        case: the job.
        directories: one on each drive.
        memory_limit: bytes of memory that the process may have; None: no limit.
        returns_memory: whether freed memory goes back to the system at once, as glibc does for
            large blocks only: up to 32 MiB it keeps, and has then gaps between blocks in use.
        threads: of torch.
    """
    torch.set_num_threads(threads)
    if returns_memory:
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, 64 * 1024)
    names = [f"/nvme{number}/" for number in range(len(directories))]
    for name, directory in zip(names if len(names) > 1 else ["/nvme/"], directories, strict=True):
        program = program.replace(name, f"{directory}/")
    if memory_limit is not None:
        # The limit is of addresses, and memory that was never written takes none.
        limit = memory_limit + untouched_bytes()
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    step_s: list[float] = []
    counts: list[tuple[int, int]] = []

    def batches() -> Iterator[torch.Tensor]:
        """Yield the tokens of each step; the loop asks for the next ones when a step is done."""
        tokens = torch.randint(case.vocabulary, (case.tokens // SEQUENCE, SEQUENCE + 1))
        yield tokens
        count()
        for number in range(case.steps):
            began = time.perf_counter()
            yield tokens
            step_s.append(time.perf_counter() - began)
            if case.checkpoints:
                folder = directories[0] / "published" / f"{number}"
                around["store"].checkpoint(folder, keep_last=case.checkpoints)
        count()

    def count() -> None:
        store = around["store"]
        store.synchronize()
        counts.append((kernel_bytes()[1], store.stats().bytes_written))

    around: dict[str, Any] = {
        **{"tierstore": tierstore, "torch": torch, "muon": muon},
        **{"batches": batches(), "loss_of": loss_of},
    }
    try:
        around["model"] = case.model("cpu")
        exec(program, around)
        around["store"].close()
    except (MemoryError, RuntimeError, OSError, tierstore.TierstoreError) as error:
        text = f"{type(error).__name__}: {error}".replace(str(directories[0]), "/nvme")
        return Measured(failure=text.splitlines()[0].rstrip(": ")[:150])
    return Measured(
        failure=None,
        step_s=step_s,
        memory=peak_anonymous_bytes(),
        written=counts[1][0] - counts[0][0],
        store_written=counts[1][1] - counts[0][1],
    )


def untouched_bytes() -> int:
    """Return the bytes that this process has allocated and never written, as stacks of threads."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    kib = {key: int(status[key].split()[0]) for key in ("VmData", "RssAnon")}
    return max(0, kib["VmData"] - kib["RssAnon"]) * 1024


def run_apart(
    program: str,
    case: Case,
    drives: Sequence[Path],
    *,
    memory_limit: int | None = None,
    returns_memory: bool = False,
) -> Measured:
    """Run a program in a new process, and remove its files; see ``run``."""
    arguments = (program, case, drives, memory_limit, returns_memory, torch.get_num_threads())
    with ProcessPoolExecutor(1, mp_context=_processes) as pool:
        try:
            return pool.submit(run, *arguments).result()
        except BrokenProcessPool:
            return Measured(failure="the process was killed")
        finally:
            for drive in drives:
                for folder in ("run", "published"):
                    shutil.rmtree(drive / folder, ignore_errors=True)


class Fitter:
    """Asks fit about jobs on this machine.

    Args:
        probed: a file with a probe; None: a drive and a processor are assumed.
    """

    def __init__(self, probed: Path | None) -> None:
        self._probed = probed

    def fit(self, case: Case, tflops: float) -> Fit:
        """Return the answer for a job."""
        drives = None if self._probed else ASSUMED
        if case.capacity is not None:
            drives = f"{case.drives}x{case.capacity // 1024}KiB@1/1GB/s"
        return tierstore.fit(
            case.model(),
            tokens=case.tokens,
            host_memory=case.host_memory,
            drives=drives,
            probe=self._probed,
            tflops=tflops,
            algorithm=case.algorithm,
            checkpoints=case.checkpoints,
            optimizer={"ns_dtype": "auto"} if case.algorithm == "muon" else {},
        )

    def leanest(self, case: Case, tflops: float) -> tuple[Case, Fitted]:
        """Return a refused job on the smallest machine that fit accepts, and its settings."""
        while True:
            if case.capacity is None:
                case = replace(case, host_memory=int(GROWTH * case.host_memory))
            else:
                case = replace(case, capacity=int(GROWTH * case.capacity))
            plans = self.fit(case, tflops).plans
            if plans:
                lean = [one for one in plans if one.title == "least memory"]
                return case, (lean or plans)[0]


def tflops_of(case: Case, tokens: int) -> float:
    """Return what a forward and backward achieves, at 6 operations per parameter and token."""
    model = case.model("cpu")
    batch = torch.randint(case.vocabulary, (tokens // SEQUENCE, SEQUENCE + 1))
    loss_of(model, batch[:1]).backward()  # type: ignore[no-untyped-call]
    began = time.perf_counter()
    loss_of(model, batch).backward()  # type: ignore[no-untyped-call]
    return 6 * parameters_of(model) * tokens / (time.perf_counter() - began) / 1e12


def parameters_of(model: nn.Module) -> int:
    """Return the number of elements of all parameters."""
    return sum(parameter.numel() for parameter in model.parameters())


def compare(case: Case, fitter: Fitter, directory: Path) -> Row:
    """Predict a job and run it."""
    tflops = tflops_of(case, min(2048, case.tokens))
    plans = fitter.fit(case, tflops).plans
    chosen = next((one for one in plans if one.title == case.title), plans[0])
    measured = run_apart(chosen.program, case, [directory])
    if measured.failure is not None:
        raise RuntimeError(f"{chosen.program}\nfailed: {measured.failure}")
    once = replace(case, steps=0)
    returned = run_apart(chosen.program, once, [directory], returns_memory=True).memory
    plan = chosen.plan
    footprint = plan.ranks.classes[0].footprint
    # The last step is committed before bytes are counted.
    commits = case.steps if plan.job.store.commit_every == 1 else 1
    written = case.steps * footprint.step_written_bytes + commits * footprint.commit_written_bytes
    (host,) = (need for need in plan.needs if need.place == "host")
    measured_s = statistics.median(measured.step_s)
    return Row(
        case=case,
        description=case.describe(),
        settings=settings_of(chosen),
        title=chosen.title,
        tflops=tflops,
        predicted_memory=host.nbytes,
        parts=dict(host.parts),
        memory_error=relative(host.nbytes, measured.memory),
        memory_returned=returned,
        returned_error=relative(host.nbytes, returned),
        predicted_s=plan.time.seconds,
        measured_s=measured_s,
        step_error=relative(plan.time.seconds, measured_s),
        model_s=plan.model_s or 0.0,
        predicted_written=written,
        written_error=relative(written, measured.written or measured.store_written),
        measured=measured,
    )


def relative(predicted: float, measured: float) -> float:
    """Return the error of a prediction."""
    if predicted == measured:
        return 0.0
    return predicted / measured - 1 if measured else float("inf")


def settings_of(chosen: Fitted) -> str:
    """Return the settings that a plan has as text."""
    job = chosen.plan.job
    footprint = chosen.plan.ranks.classes[0].footprint
    resting = footprint.resting_bytes / footprint.state_bytes
    parts = [
        f"{job.micro_batches} x {job.tokens_at_once}",
        "layers again" if job.checkpointing else None,
        f"{job.loss_tokens} logits" if job.loss_tokens else None,
        f"store {format_bytes(job.store.host_memory)}, {resting:.0%} in memory",
        f"commit every {job.store.commit_every}" if job.store.commit_every != 1 else None,
        *(f"{name}={value}" for name, value in job.optimizer.items() if name != "ns_dtype"),
    ]
    return ", ".join(part for part in parts if part)


def refuse(case: Case, fitter: Fitter, directory: Path) -> Refusal | None:
    """Run a job that fit refuses, then on larger machines; None if no drive can be made."""
    tflops = tflops_of(case, SEQUENCE)
    refused = fitter.fit(case, tflops)
    if refused.plans:
        raise RuntimeError(f"fit accepts {case}")
    least, leanest = fitter.leanest(case, tflops)
    change = refused.nearest[0].change
    larger = changed(case, change)
    chosen = fitter.fit(larger, tflops).plans[0]
    failures = []
    for tried, one in ((case, leanest), (least, leanest), (larger, chosen)):
        with drives_of(tried, directory) as drives:
            if drives is None:
                return None
            limit = tried.host_memory if tried.capacity is None else None
            arguments = (one.program, tried, drives)
            found = run_apart(*arguments, memory_limit=limit, returns_memory=True)
            failures.append(found.failure)
    machine = least.capacity or least.host_memory
    return Refusal(
        case=case,
        description=case.describe(),
        least=format_bytes(machine),
        change=change,
        **dict(zip(("failure", "least_failure", "change_failure"), failures, strict=True)),
    )


def changed(case: Case, change: str) -> Case:
    """Return a job on the machine that a change of fit names.

    Raises:
        ValueError: the benchmark does not know such a change.
    """
    if change == "no published checkpoints":
        return replace(case, checkpoints=0)
    if found := re.fullmatch(r"(.*) more host memory", change):
        return replace(case, host_memory=case.host_memory + parse_bytes(found[1]))
    if found := re.match(r"(\d+) drives in each node", change):
        return replace(case, drives=int(found[1]))
    raise ValueError(f"cannot do {change!r}")


@contextlib.contextmanager
def drives_of(case: Case, directory: Path) -> Iterator[list[Path] | None]:
    """Yield a folder on each drive; None if this user may not mount drives of a capacity.

    A drive is an ext4 in a file, whose free space is the capacity.
    """
    if case.capacity is None:
        yield [directory]
        return
    with contextlib.ExitStack() as stack:
        folders = []
        for number in range(case.drives):
            image, folder = directory / f"drive-{number}.img", directory / f"drive-{number}"
            folder.mkdir()
            stack.callback(folder.rmdir)
            stack.callback(image.unlink, missing_ok=True)
            if not mount(image, folder, case.capacity):
                yield None
                return
            stack.callback(subprocess.run, ["umount", str(folder)], check=True)
            # What the file system has beyond the capacity is taken.
            with (folder / "taken").open("wb") as file:
                os.posix_fallocate(file.fileno(), 0, shutil.disk_usage(folder).free - case.capacity)
            folders.append(folder)
        yield folders


def mount(image: Path, folder: Path, capacity: int) -> bool:
    """Mount an ext4 with somewhat more than a capacity; return whether that is permitted."""
    with image.open("wb") as file:
        file.truncate(capacity + capacity // 8 + 32 * MIB)
    made = ["mkfs.ext4", "-q", "-F", "-m", "0", str(image)]
    try:
        for command in (made, ["mount", "-o", "loop", str(image), str(folder)]):
            subprocess.run(command, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        return False
    return True


def report(rows: Sequence[Row]) -> Table:
    """Return the chosen jobs as a table."""
    table = Table(title="Jobs that fit chose; errors of the prediction")
    numbers = (
        "memory",
        "measured",
        "error",
        "returned",
        "error",
        "step s",
        "measured",
        "error",
        "written, error",
    )
    for heading in ("job", "plan", "settings", *numbers):
        table.add_column(heading, justify="right" if heading in numbers else "left")
    for row in rows:
        table.add_row(
            *(row.description, row.title, row.settings),
            format_bytes(row.predicted_memory),
            format_bytes(row.measured.memory),
            f"{row.memory_error:+.1%}",
            format_bytes(row.memory_returned),
            f"{row.returned_error:+.1%}",
            f"{row.predicted_s:.2f}",
            f"{row.measured_s:.2f}",
            f"{row.step_error:+.1%}",
            f"{row.written_error:+.2%}",
        )
    return table


def report_refusals(rows: Sequence[Refusal]) -> Table:
    """Return the refused jobs as a table."""
    table = Table(title="Jobs that fit refused")
    for heading in ("job", "there", "smallest machine", "there", "nearest change", "there"):
        table.add_column(heading)
    for row in rows:
        table.add_row(
            *(row.description, row.failure or "runs"),
            *(row.least, row.least_failure or "runs"),
            *(row.change, row.change_failure or "runs"),
        )
    return table


def main(
    directory: DirectoryOption = Path("."),
    small: SmallOption = False,
    json_path: JsonOption = None,
) -> None:
    """Compare answers of ``tierstore fit`` with runs on this machine."""
    console = Console(width=200)
    with scratch_folder(directory) as scratch:
        probed = None
        if not small:
            probed = scratch / "probe.json"
            probed.write_text(probe([scratch]).to_json(), encoding="utf-8")
        fitter = Fitter(probed)
        chosen, refused = (SMALL, SMALL_REFUSED) if small else (CHOSEN, REFUSED)
        rows = [compare(case, fitter, scratch) for case in track(chosen, description="chosen")]
        refusals = [refuse(case, fitter, scratch) for case in track(refused, description="refused")]
    console.print(report(rows))
    known = [one for one in refusals if one is not None]
    console.print(report_refusals(known))
    if len(known) < len(refusals):
        console.print(f"{len(refusals) - len(known)} left out: drives cannot be mounted here")
    errors = [abs(row.step_error) for row in rows]
    console.print(f"error of the step: {statistics.median(errors):.1%} in the median")
    write_report(
        json_path,
        threads=torch.get_num_threads(),
        rows=[asdict(row) for row in rows],
        refused=[asdict(one) for one in known],
        median_error=statistics.median(errors),
    )


if __name__ == "__main__":
    typer.run(main)
