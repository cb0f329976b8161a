"""Conversion compared with the tools of PyTorch and DeepSpeed, and with copying the same bytes.

Cases take turns, each in a new process, with the source not in the page cache, until the result is
durable. Starting Python and importing torch is not timed; the verification of a conversion is timed
apart.
"""

from __future__ import annotations

import importlib
import importlib.util
import multiprocessing
import os
import shutil
import statistics
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import typer
from measuring import (
    DirectoryOption,
    JsonOption,
    SmallOption,
    drop_from_cache,
    peak_anonymous_bytes,
    ratio_text,
    rotated,
    scratch_folder,
    spread,
    write_report,
)
from rich.console import Console
from rich.table import Table
from torch import nn

ABSENT = "zero_to_fp32 is not measured: DeepSpeed is not installed (make test-peers installs it)"

BYTES_PER_ELEMENT = 12
"""A float32 weight and two moments."""

COPY = "cp, fsync"


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Parameters of one run of the benchmark."""

    columns: int
    parameters: int
    """Matrices of the model, each of ``columns`` x ``columns``."""
    rounds: int


PLANS = {
    "small": Plan(columns=512, parameters=4, rounds=2),
    "default": Plan(columns=4096, parameters=15, rounds=7),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Taken:
    """Cost of one turn."""

    seconds: float
    verification_s: float
    peak_bytes: int
    """Most memory of the process, without mapped files."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One case: medians over all rounds."""

    case: str
    seconds: float
    verification_s: float
    peak_bytes: float
    written_bytes: int
    ratios: tuple[float, ...]
    """Seconds over those of the copy in the same round: extremes, quartiles and median."""


def model_of(plan: Plan) -> nn.Module:
    """Return a model of square matrices, on the CPU, with random float32 weights."""
    layers = (nn.Linear(plan.columns, plan.columns, bias=False) for _ in range(plan.parameters))
    return nn.Sequential(*layers)


# ------------------------------------------------------- what runs in a process of its own


def write_dcp(source: Path, plan: Plan) -> None:
    """Save a model and its AdamW with torch.distributed.checkpoint."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict

    model = model_of(plan)
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    states = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    dcp.save(states, checkpoint_id=source, no_dist=True)


def write_zero(source: Path, plan: Plan) -> None:
    """Have DeepSpeed save a model and its AdamW, on one rank of ZeRO-2."""
    import deepspeed

    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # Its build takes minutes.
    deepspeed.init_distributed("gloo")
    model = model_of(plan)
    config = {
        "train_batch_size": 1,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 2},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
    }
    engine = deepspeed.initialize(model=model, config=config)[0]
    inputs = torch.ones(1, plan.columns, dtype=torch.bfloat16)
    engine.backward(engine(inputs).float().sum())
    engine.step()
    engine.save_checkpoint(str(source), tag="step1")
    torch.distributed.destroy_process_group()


def copy(source: Path, destination: Path) -> float:
    """Copy all files."""
    subprocess.run(["cp", "-r", "--reflink=never", source, destination], check=True)
    make_durable(destination)
    return 0.0


def convert_all(source: Path, destination: Path) -> float:
    """Convert everything to torch.save's format; return the time at which verification began."""
    return _convert(source, destination, None)


def convert_model(source: Path, destination: Path) -> float:
    """Convert the float32 weights, as zero_to_fp32 does."""
    return _convert(source, destination, "model")


def _convert(source: Path, destination: Path, only: str | None) -> float:
    from tierstore.tools.convert.convert import convert

    began = 0.0

    def look(phase: str, done: int, total: int) -> None:
        nonlocal began
        if phase == "verify" and not began:
            began = time.perf_counter()

    convert(source, destination, to="torch", only=only, on_progress=look)
    return began


def dcp_to_torch_save(source: Path, destination: Path) -> float:
    """Convert with PyTorch's own tool."""
    from torch.distributed.checkpoint import format_utils

    format_utils.dcp_to_torch_save(source, destination)
    make_durable(destination)
    return 0.0


def zero_to_fp32(source: Path, destination: Path) -> float:
    """Convert with DeepSpeed's own tool."""
    from deepspeed.utils import zero_to_fp32

    zero_to_fp32.convert_zero_checkpoint_to_fp32_state_dict(str(source), str(destination))
    make_durable(destination)
    return 0.0


def timed(case: Callable[[Path, Path], float], source: Path, destination: Path) -> Taken:
    """Do one turn."""
    for name in ("torch.distributed.checkpoint.format_utils", "tierstore.tools.convert.convert"):
        importlib.import_module(name)

    began = time.perf_counter()
    verified_from = case(source, destination)
    ended = time.perf_counter()
    return Taken(
        seconds=(verified_from or ended) - began,
        verification_s=ended - (verified_from or ended),
        peak_bytes=peak_anonymous_bytes(),
    )


# --------------------------------------------------------------------------------- the rounds


def make_durable(path: Path) -> None:
    """Flush a file, or all files of a directory."""
    for file in files_of(path):
        with file.open("rb") as opened:
            os.fsync(opened.fileno())


def files_of(path: Path) -> list[Path]:
    """Return a file, or all files of a directory."""
    return [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]


def in_new_process(function: Callable[..., object], *arguments: object) -> object:
    """Return what a function returns in a process of its own."""
    context = multiprocessing.get_context("spawn")
    with context.Pool(1) as pool:
        return pool.apply(function, arguments)


def measure(
    scratch: Path, source: Path, cases: dict[str, Callable[[Path, Path], float]], rounds: int
) -> list[Row]:
    """Take turns; the first of each round goes round."""
    taken: dict[str, list[Taken]] = {case: [] for case in cases}
    written: dict[str, int] = {}
    make_durable(source)
    for number in range(rounds):
        for case in rotated(list(cases), number):
            for file in files_of(source):
                drop_from_cache(file)
            destination = scratch / "result"
            turn = in_new_process(timed, cases[case], source, destination)
            assert isinstance(turn, Taken)
            taken[case].append(turn)
            written[case] = sum(file.stat().st_size for file in files_of(destination))
            shutil.rmtree(destination) if destination.is_dir() else destination.unlink()
            os.sync()
    return [row_of(case, turns, taken[COPY], written[case]) for case, turns in taken.items()]


def row_of(case: str, turns: Sequence[Taken], copies: Sequence[Taken], written: int) -> Row:
    """Summarize the turns of a case."""
    return Row(
        case=case,
        seconds=statistics.median(turn.seconds for turn in turns),
        verification_s=statistics.median(turn.verification_s for turn in turns),
        peak_bytes=statistics.median(turn.peak_bytes for turn in turns),
        written_bytes=written,
        ratios=spread([a.seconds / b.seconds for a, b in zip(turns, copies, strict=True)]),
    )


def report(title: str, rows: Sequence[Row]) -> Table:
    """Return a comparison as a table."""
    table = Table(title=title)
    for column in ("case", "s", "times cp", "verification, s", "MB written", "peak memory, MB"):
        table.add_column(column, justify="left" if column == "case" else "right", no_wrap=True)
    for row in rows:
        table.add_row(
            row.case,
            f"{row.seconds:.2f}",
            ratio_text(row.ratios),
            f"{row.verification_s:.2f}" if row.verification_s else "-",
            f"{row.written_bytes / 1e6:.0f}",
            f"{row.peak_bytes / 1e6:.0f}",
        )
    return table


def main(
    directory: DirectoryOption = Path("."),
    small: SmallOption = False,
    json_path: JsonOption = None,
) -> None:
    """Convert a DCP directory, and a ZeRO checkpoint if DeepSpeed is installed."""
    plan = PLANS["small" if small else "default"]
    console = Console(width=120)
    measured: dict[str, list[Row]] = {}
    with scratch_folder(directory) as scratch:
        source = scratch / "dcp"
        in_new_process(write_dcp, source, plan)
        cases = {
            COPY: copy,
            "tierstore convert": convert_all,
            "dcp_to_torch_save, fsync": dcp_to_torch_save,
        }
        measured["dcp"] = measure(scratch, source, cases, plan.rounds)
        console.print(report("From DCP to torch.save", measured["dcp"]))
        shutil.rmtree(source)
        if importlib.util.find_spec("deepspeed") is None:
            console.print(ABSENT)
        else:
            source = scratch / "zero"
            in_new_process(write_zero, source, plan)
            cases = {
                COPY: copy,
                "tierstore convert": convert_all,
                "tierstore convert --only model": convert_model,
                "zero_to_fp32, fsync": zero_to_fp32,
            }
            measured["zero"] = measure(scratch, source, cases, plan.rounds)
            console.print(report("From ZeRO-2 to torch.save", measured["zero"]))
    write_report(
        json_path,
        plan=asdict(plan),
        state_bytes=plan.parameters * plan.columns**2 * BYTES_PER_ELEMENT,
        **{name: [asdict(row) for row in rows] for name, rows in measured.items()},
    )


if __name__ == "__main__":
    typer.run(main)
