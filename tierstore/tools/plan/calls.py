"""The calls of a planned run, as Python code to copy into a training program."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import fields

from tierstore.tools.plan.footprint import StoreOptions
from tierstore.tools.plan.job import Job
from tierstore.tools.plan.plan import Plan
from tierstore.units import parse_bytes


def calls_of(found: Plan, directories: Sequence[str] = ()) -> str:
    """Return the code that makes the store and the optimizer of a plan.

    Args:
        found: the plan.
        directories: one on each drive; none: names to replace.
    """
    places = list(directories) or _names(found.job)
    place = json.dumps(places[0] if len(places) == 1 else places)
    store = found.job.store
    given = "".join(
        f"\n    {one.name}={_text(one.name, getattr(store, one.name))},"
        for one in fields(StoreOptions)
        if getattr(store, one.name) != one.default or one.name == "host_memory"
    )
    lines = [f"store = tierstore.TierStore(\n    {place},{given}\n)", f"optimizer = {found.call}"]
    imports = {"import tierstore"}
    package = found.call.partition(".")[0]
    if package.isidentifier():
        imports.add(f"import {package}")
    if "torch." in found.call:
        imports.add("import torch")
    module = found.algorithm.rpartition(".")[0]
    if module not in ("", "torch.optim"):
        imports.add(f"import {module}")
    return "\n".join([*sorted(imports), "", *lines]) + "\n"


def _text(name: str, value: object) -> str:
    """Return a value as code: sizes in the largest unit that is exact."""
    if isinstance(value, int) and name not in ("buffers", "commit_every"):
        for unit in ("TiB", "GiB", "MiB"):
            size = parse_bytes(f"1{unit}")
            if value and value % size == 0:
                return f'"{value // size}{unit}"'
    return json.dumps(value) if isinstance(value, str) else repr(value)


def _names(job: Job) -> list[str]:
    count = 1 if job.drives is None else job.drives.count
    return ["/nvme/run"] if count == 1 else [f"/nvme{number}/run" for number in range(count)]
