"""The worked plans of docs/guide/planning.md: their answers as a table, and their pictures."""

from __future__ import annotations

import json
import re
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
from tierstore.tools.plan.plan import Plan, plan, to_plain
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
            "optimizer": {"gather_memory": 4 * GIB},
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
            "optimizer": {"gather_memory": 4 * GIB},
        },
    ),
}


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
    Console(width=120).print(table)
    write_report(json_path, plans={name: to_plain(one) for name, one in found.items()})


if __name__ == "__main__":
    typer.run(main)
