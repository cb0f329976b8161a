"""Worked plans of docs/guide/planning.md and published cases: their answers, and pictures."""

from __future__ import annotations

import json
import re
import resource
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer
from measuring import JsonOption, SmallOption, write_report
from rich.console import Console
from rich.table import Table

from tierstore.tools.plan.drives import parse_drives
from tierstore.tools.plan.footprint import StoreOptions
from tierstore.tools.plan.job import Job
from tierstore.tools.plan.model_configs import parameters_of
from tierstore.tools.plan.pictures import step_picture
from tierstore.tools.plan.plan import Plan, plan
from tierstore.tools.plan.rates import assumed_rates
from tierstore.tools.plan.wording import days_text, seconds_text, short_text
from tierstore.units import format_bytes

ROOT = Path(__file__).resolve().parents[1]
CONFIGS = ROOT / "tests/tools/plan/configs"
GIB = 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """One worked plan."""

    config: str
    drives: str = "4x3.84TB@7/5GB/s,1DWPD"
    network: float | None = None
    fields: dict[str, Any] = field(default_factory=dict)
    """Of the job."""


EXAMPLES = {
    "8b": Example(
        config="llama-3.1-8b",
        drives="1x3.84TB@7/5GB/s,1DWPD",
        fields={
            "gpus": 1,
            "host_memory": 256 * GIB,
            "tokens": 500_000,
            "store": StoreOptions(host_memory=8 * GIB),
        },
    ),
    "70b": Example(
        config="llama-3.1-70b",
        fields={
            "gpus": 8,
            "host_memory": 1024 * GIB,
            "tokens": 4_000_000,
            "activation_bytes": 20 * GIB,
        },
    ),
    "1t": Example(
        config="kimi-k2",
        network=50e9,
        fields={
            "nodes": 64,
            "gpus": 8,
            "host_memory": 2048 * GIB,
            "tokens": 64_000_000,
            "active_parameters": 32_000_000_000,
            "expert_parallel": 64,
            "activation_bytes": 30 * GIB,
        },
    ),
}


_CARD = "--gpus 1 --gpu-memory 24GB --host-memory 64GB --drives 1x2TB@7/5GB/s,1200TBW --tflops 80"
_NODE = "--drives 4x3.84TB@7/5GB/s,1DWPD --tflops 400 --algorithm adamw"
FITS = {
    "7B, one card, AdamW": f"llama-2-7b --tokens 64k {_CARD} --algorithm adamw",
    "7B, one card, Muon": f"llama-2-7b --tokens 64k {_CARD}",
    "8B, one card, AdamW": f"llama-3.1-8b --tokens 64k {_CARD} --algorithm adamw",
    "8B, one card, Muon": f"llama-3.1-8b --tokens 64k {_CARD}",
    "32B, one GPU of 96 GB": "qwen3-32b --tokens 64k --gpus 1 --gpu-memory 96GB "
    f"--host-memory 744GB {_NODE}",
    "70B, one GPU of 80 GB": "llama-3.1-70b --tokens 64k --gpus 1 --gpu-memory 80GB "
    f"--host-memory 1TB {_NODE}",
    "70B, 8 GPUs": "llama-3.1-70b --tokens 4M --gpus 8 --gpu-memory 80GB "
    f"--host-memory 1TB {_NODE}",
    "671B, 64 nodes of 8": "deepseek-v3 --tokens 64M --nodes 64 --gpus 8 --gpu-memory 80GB "
    f"--host-memory 2TB {_NODE}",
}
"""Case -> arguments of ``tierstore fit``."""


def fitted(arguments: str) -> tuple[dict[str, Any], float]:
    """Return the answer of ``tierstore fit``, and the seconds of processor time of its process."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    done = subprocess.run(
        [sys.executable, "-m", "tierstore.tools", "fit", *arguments.split(), "--json"],
        capture_output=True,
        check=True,
    )
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer, resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before


def best_of(answer: dict[str, Any]) -> dict[str, Any]:
    """Return the options of the quickest plan, its step, and its needs."""
    best = answer["plans"][0]
    plan = best["plan"]
    return {
        "options": best["options"],
        "step_seconds": plan["step"]["seconds"],
        "steps_allowed": plan["wear"]["steps"],
        "needs": {need["place"]: need["parts"] for need in plan["needs"]},
    }


def fits_table(answers: dict[str, tuple[dict[str, Any], float]]) -> Table:
    """Return the quickest plan of each case."""
    table = Table(title="Settings that fit")
    for heading in ("case", "step", "GPU", "host", "drives", "steps", "searched in"):
        table.add_column(heading, justify="left" if heading == "case" else "right")
    for case, (answer, seconds) in answers.items():
        best = answer["plans"][0]["plan"]
        needs = {need["place"]: format_bytes(need["bytes"]) for need in best["needs"]}
        table.add_row(
            case,
            seconds_text(best["step"]["seconds"]),
            *(needs[place] for place in ("GPU", "host", "NVMe")),
            f"{best['wear']['steps']:,.0f}",
            seconds_text(seconds),
        )
    return table


def planned(example: Example) -> Plan:
    """Return the plan of an example: GPUs of 80 GiB that achieve 400 TFLOP/s."""
    config = json.loads((CONFIGS / f"{example.config}.json").read_text(encoding="utf-8"))
    job = Job(
        gpu_memory=80 * GIB, flops=4e14, drives=parse_drives(example.drives), **example.fields
    )
    rates = assumed_rates(job.drives, on_gpu=True, flops=job.flops, network=example.network)
    return plan(parameters_of(config), job, rates)


def picture_of(found: Plan) -> str:
    """Return the lanes of the step as an SVG file, on white whatever the page around it."""
    svg = step_picture(found.time, "How long each lane of a step works")
    svg = svg.replace("currentColor", "#1a1a1a")
    return re.sub(
        r"(<svg[^>]*>)", r'\1<rect width="100%" height="100%" fill="white"/>', svg, count=1
    )


def main(
    pictures: Annotated[
        Path | None, typer.Option(help="Folder for the pictures; docs/guide has those in use.")
    ] = None,
    small: SmallOption = False,
    json_path: JsonOption = None,
) -> None:
    """Print the worked plans, and write their pictures."""
    names = ["8b"] if small else list(EXAMPLES)
    found = {name: planned(EXAMPLES[name]) for name in names}
    table = Table(title="Worked plans")
    for heading in ("model", "fits", "step", "paging adds", "free from", "written a day", "last"):
        table.add_column(heading, justify="left" if heading == "model" else "right")
    for name, one in found.items():
        wear, tokens = one.wear, one.free_tokens
        table.add_row(
            name,
            "yes" if one.fits else "no",
            seconds_text(one.time.seconds),
            seconds_text(one.time.exposed_s),
            "-" if tokens is None else f"{short_text(tokens)} tokens",
            "-" if wear is None else format_bytes(round(wear.bytes_per_day)),
            days_text(one.days),
        )
        if pictures is not None:
            (pictures / f"plan-{name}.svg").write_text(picture_of(one), encoding="utf-8")
    cases = {case: FITS[case] for case in list(FITS)[: 1 if small else None]}
    answers = {case: fitted(arguments) for case, arguments in cases.items()}
    console = Console(width=120)
    console.print(table)
    console.print(fits_table(answers))
    fits = {case: best_of(answer) for case, (answer, _) in answers.items()}
    plans = {
        name: {"fits": one.fits, "step_seconds": one.time.seconds, "days": one.days}
        for name, one in found.items()
    }
    write_report(json_path, fits=fits, plans=plans)


if __name__ == "__main__":
    typer.run(main)
