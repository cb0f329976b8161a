"""A day on a machine with one GPU, in calls of some minutes.

Each call does one part: tests, copies of pages, products of Newton-Schulz, or trainings: of ours
in memory, of ours on NVMe, or beside peers. Each training has a process of its own, whose memory is
measured.
What fails is a row with its error. What no longer fits into the time is a row that says so.
"""

from __future__ import annotations

import contextlib
import importlib.util
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Annotated, Any
from xml.etree import ElementTree

import newton_schulz
import torch
import typer
from gpu_contenders import CONTENDERS, SIZES, Job, Measured, Size, work
from gpu_copies import Copies, measure_copies, report_copies
from measuring import GIB, MIB, DirectoryOption, JsonOption, scratch_folder, write_report
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).parents[1]
ROUNDS = 5


class Part(StrEnum):
    """The work of one call."""

    TESTS = "tests"
    COPIES = "copies"
    STEPS = "steps"
    NVME = "nvme"
    PEERS = "peers"
    NEWTON_SCHULZ = "newton_schulz"


# What trains in each part. Those that may end badly, or take long, come last.
TRAINED = {
    Part.STEPS: (
        *("torch", "device", "host", "host-offload", "device-offload", "parameters-host"),
        *("adamw-host", "adamw-host-offload", "adamw-8bit-host"),
    ),
    Part.NVME: ("host", "nvme", "nvme-offload"),
    Part.PEERS: (
        *("adamw-host", "adamw-host-offload", "adamw-cpu"),
        *("torchao", "fsdp2", "deepspeed"),
    ),
}
SizeName = StrEnum("SizeName", [*SIZES])


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """Result of tests, or of the doctor."""

    passed: int
    """Number of tests that passed, or of lines that are good."""
    skipped: int
    failed: list[str]
    """Names of the tests that failed, or the lines that are not good."""


Result = Checked | Copies | Measured | newton_schulz.Row
Task = Callable[[float], Result]
"""Raises its error as an exception. The argument is the seconds that are left for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One task of a call."""

    name: str
    error: str | None = None
    """Reason of a lacking result; None: there is a result."""
    seconds: float = 0.0
    """Duration of the task, with the start of its process."""
    result: Result | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """Comparison of the losses of contenders of ours with one rule, bit for bit."""

    rule: str
    contenders: list[str]
    differing: list[str]
    """Contenders whose losses differ from the losses of the first."""


class Failed(Exception):  # noqa: N818
    """A task has no result; the message says why."""


def do(name: str, task: Task, seconds: float) -> Row:
    """Do a task within some seconds."""
    began_s = time.monotonic()
    result = error = None
    try:
        result = task(seconds)
    except (subprocess.TimeoutExpired, TimeoutError):
        error = f"stopped after {seconds:.0f} s"
    except Failed as failed:
        error = str(failed)
    except Exception as failed:
        error = f"{type(failed).__name__}: {failed}"
    return Row(name=name, error=error, seconds=time.monotonic() - began_s, result=result)


def do_all(
    tasks: Mapping[str, Task], seconds: float, after_each: Callable[[list[Row]], None]
) -> list[Row]:
    """Do tasks in order until the time is over.

    A task begins if the seconds that are left are at least as many as the quickest task took.

    Args:
        tasks: by name.
        seconds: for all of them.
        after_each: called with the rows so far: a call may be cut off.
    """
    ends_s = time.monotonic() + seconds
    rows: list[Row] = []
    for name, task in tasks.items():
        left_s = max(0.0, ends_s - time.monotonic())
        needed_s = min((row.seconds for row in rows if row.result is not None), default=0.0)
        if left_s > 0 and left_s >= needed_s:
            rows.append(do(name, task, left_s))
        else:
            rows.append(Row(name=name, error=f"not run: {left_s:.0f} s were left"))
        print(f"{name}: {rows[-1].error or 'done'}, {rows[-1].seconds:.1f} s", file=sys.stderr)
        after_each(rows)
    return rows


def run_alone(job: Job, seconds: float) -> Measured:
    """Do a training in a process of its own.

    Raises:
        Failed: the contender raised, or its process died.
        TimeoutError: the time was over, and the process was killed.
    """
    context = multiprocessing.get_context("spawn")
    results, theirs = context.Pipe(duplex=False)
    with tempfile.TemporaryDirectory(dir=job.directory) as folder:
        process = context.Process(target=work, args=(replace(job, directory=Path(folder)), theirs))
        process.start()
        theirs.close()
        try:
            if not results.poll(seconds):
                raise TimeoutError
            result = results.recv()
        except EOFError:
            process.join()
            raise Failed(f"the process ended with {process.exitcode}") from None
        finally:
            process.kill()
            with contextlib.suppress(ProcessLookupError):  # It has no others, or did not get there.
                os.killpg(process.pid, signal.SIGKILL)
            process.join()
    if isinstance(result, str):
        raise Failed(result)
    return result


def trainings(names: Sequence[str], job: Job, traces: Path | None) -> dict[str, Task]:
    """Return a task for each contender."""
    if traces is not None:
        traces.mkdir(parents=True, exist_ok=True)
    tasks = {}
    for name in names:
        trace = None if traces is None else traces / f"{name}.json"
        tasks[name] = partial(run_alone, replace(job, contender=name, trace=trace))
    return tasks


def has_package(name: str) -> bool:
    """Return whether a package is installed."""
    return importlib.util.find_spec(name) is not None


def run_pytest(files: Sequence[str], environment: Mapping[str, str], seconds: float) -> Checked:
    """Run test files in a process of their own; what pytest prints goes to stderr."""
    command = [sys.executable, "-m", "pytest", "-q", "-rs", *files]
    if has_package("xdist"):
        command += ["-n", str(min(8, len(os.sched_getaffinity(0))))]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "report.xml"
        done = subprocess.run(
            [*command, f"--junit-xml={path}"],
            cwd=ROOT,
            env={**os.environ, **environment},
            stdout=sys.stderr.fileno(),
            timeout=seconds,
            check=False,
        )
        if not path.exists():
            raise Failed(f"pytest ended with {done.returncode}")
        cases = [*ElementTree.parse(path).iter("testcase")]
    if not cases:
        raise Failed("pytest found no test")
    failed = [c for c in cases if c.find("failure") is not None or c.find("error") is not None]
    skipped = sum(case.find("skipped") is not None for case in cases)
    return Checked(
        passed=len(cases) - len(failed) - skipped,
        skipped=skipped,
        failed=[f"{case.get('classname')}.{case.get('name')}" for case in failed],
    )


def run_doctor(directory: Path, seconds: float) -> Checked:
    """Run `tierstore doctor` on a directory."""
    done = subprocess.run(
        [sys.executable, "-m", "tierstore.tools", "doctor", str(directory)],
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
    )
    print(done.stdout, done.stderr, file=sys.stderr)
    lines = [line for line in done.stdout.splitlines() if not line.startswith(" ")]
    good = [line for line in lines if line.startswith("good")]
    if not good:
        raise Failed(f"the doctor ended with {done.returncode}")
    return Checked(passed=len(good), skipped=0, failed=[line for line in lines if line not in good])


def checks(directory: Path) -> dict[str, Task]:
    """Return a task for the doctor and for each file with tests that need CUDA or run its kernels.

    The last one runs tests/test_cuda.py again, with segments of torch's allocator that expand.
    """
    tests = sorted((ROOT / "tests").rglob("test_*.py"))
    files = [
        str(path.relative_to(ROOT))
        for path in tests
        if path.match("muon/test_gpu_*.py") or "needs_cuda" in path.read_text()
    ]
    segments = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    return {
        "doctor": partial(run_doctor, directory),
        **{file: partial(run_pytest, [file], {}) for file in files},
        "expandable segments": partial(run_pytest, ["tests/test_cuda.py"], segments),
    }


def products(size: Size, device: torch.device) -> dict[str, Task]:
    """Return a task for each shape of a matrix of the model."""

    def measure(shape: tuple[int, int], seconds: float) -> newton_schulz.Row:
        return newton_schulz.measure(shape, torch.bfloat16, ROUNDS, device)

    h = size.hidden
    shapes = ((h, h), (size.kv, h), (size.mlp, h), (h, size.mlp))
    return {f"{rows} x {columns}": partial(measure, (rows, columns)) for rows, columns in shapes}


def copies(device: torch.device, *, tiny: bool) -> dict[str, Task]:
    """Return one task: all copies take turns."""
    page_bytes, copied_bytes = (MIB, 8 * MIB) if tiny else (256 * MIB, 8 * GIB)

    def measure(seconds: float) -> Copies:
        return measure_copies(
            device, page_bytes=page_bytes, copied_bytes=copied_bytes, rounds=ROUNDS
        )

    return {"copies": measure}


def agreements(rows: Sequence[Row]) -> list[Agreement]:
    """Compare the losses of contenders of ours, by rule."""
    found: dict[str, list[tuple[str, list[float]]]] = {}
    for row in rows:
        rule = CONTENDERS[row.name].rule if row.name in CONTENDERS else None
        if rule is not None and isinstance(row.result, Measured):
            found.setdefault(rule, []).append((row.name, row.result.losses))
    return [
        Agreement(
            rule=rule,
            contenders=[name for name, _ in measured],
            differing=[name for name, losses in measured if losses != measured[0][1]],
        )
        for rule, measured in found.items()
    ]


def table_of(rows: Sequence[Row], title: str) -> Table:
    """Return trainings as a table."""
    table = Table(title=title)
    table.add_column("contender", no_wrap=True)
    for heading in ("first step s", "model s", "step s", "issued s", "tokens/s"):
        table.add_column(heading, justify="right")
    for heading in ("GPU GiB", "host GiB", "taken GiB", "losses"):
        table.add_column(heading, justify="right")
    for row in rows:
        if not isinstance(found := row.result, Measured):
            continue
        seconds = (found.first_step_s, found.model_s, found.step_s, found.issued_s)
        table.add_row(
            row.name,
            *(f"{each:.3f}" for each in seconds),
            f"{found.tokens_per_s:.0f}",
            "-" if found.gpu_gib is None else f"{found.gpu_gib:.1f}",
            f"{found.host_gib:.1f}",
            f"{found.taken_gib:.1f}",
            f"{found.losses[0]:.4f}..{found.losses[-1]:.4f}",
        )
    return table


def report(console: Console, rows: Sequence[Row], title: str) -> None:
    """Print the results of a call, and what has none."""
    results = [row.result for row in rows if row.result is not None]
    products = [result for result in results if isinstance(result, newton_schulz.Row)]
    if products:
        console.print(newton_schulz.report(products))
    if any(isinstance(result, Measured) for result in results):
        console.print(table_of(rows, title))
    for row in rows:
        if isinstance(row.result, Copies):
            console.print(report_copies(row.result))
        elif isinstance(row.result, Checked):
            counts = f"{row.result.passed} passed, {row.result.skipped} skipped"
            console.print(f"{row.name}: {counts}, {len(row.result.failed)} failed")
            for failed in row.result.failed:
                console.print(f"  {failed}", markup=False)
        elif row.error is not None:
            console.print(f"{row.name}: {row.error}", markup=False)
    for found in agreements(rows):
        if found.differing:
            console.print(
                f"{found.rule}: losses DIFFER from {found.contenders[0]}: {found.differing}"
            )
        elif len(found.contenders) > 1:
            console.print(f"{found.rule}: losses are equal in {', '.join(found.contenders)}")


def main(
    part: Annotated[Part, typer.Argument(help="What to do.")] = Part.STEPS,
    size_name: Annotated[
        SizeName, typer.Option("--size", help="Of the model, or of the model of the matrices.")
    ] = SizeName["3b"],
    tokens: Annotated[int, typer.Option(help="Of a micro-batch.", min=2)] = 8192,
    micro_batches: Annotated[int, typer.Option(help="Backwards before a step.", min=1)] = 1,
    steps: Annotated[int, typer.Option(help="Measured steps of each training.", min=1)] = 4,
    only: Annotated[
        list[str] | None, typer.Option(help="Do only what has this name. May be repeated.")
    ] = None,
    seconds: Annotated[float, typer.Option(help="For everything.")] = 540,
    directory: DirectoryOption = Path("."),
    json_path: JsonOption = None,
    traces: Annotated[
        Path | None, typer.Option(help="A folder for a trace of one step of each training.")
    ] = None,
    device_name: Annotated[
        str, typer.Option("--device", help="cpu is only a test of the program.")
    ] = "cuda",
) -> None:
    """Do one part of a day on a machine with one GPU."""
    device = torch.device(device_name)
    if device.type == "cuda" and not torch.cuda.is_available():
        typer.echo("not measured: there is no CUDA device")
        return
    size = SIZES[size_name]
    with scratch_folder(directory) as scratch:
        job = Job(
            contender="",
            size=size_name.value,
            tokens=tokens,
            micro_batches=micro_batches,
            steps=steps,
            device=device_name,
            directory=scratch,
        )
        if part in TRAINED:
            tasks = trainings(TRAINED[part], job, traces)
        elif part is Part.TESTS:
            tasks = checks(scratch)
        elif part is Part.COPIES:
            tasks = copies(device, tiny=size_name == "tiny")
        else:
            tasks = products(size, device)
        unknown = sorted(set(only or ()) - set(tasks))
        if unknown:
            raise typer.BadParameter(f"{', '.join(unknown)}: not one of {', '.join(tasks)}")

        def write(rows: list[Row]) -> None:
            options: dict[str, Any] = asdict(job)
            write_report(
                json_path,
                part=part,
                **{key: options[key] for key in ("size", "tokens", "micro_batches", "steps")},
                device=device_name,
                rows=[asdict(row) for row in rows],
                agreements=[asdict(agreement) for agreement in agreements(rows)],
            )

        chosen = {name: task for name, task in tasks.items() if not only or name in only}
        rows = do_all(chosen, seconds, write)
    title = f"{size_name}, {micro_batches} x {tokens} tokens, {steps} steps, on {device_name}"
    report(Console(width=140), rows, title)


if __name__ == "__main__":
    typer.run(main)
