"""The calls of a planned run, as Python code to copy into a training program."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import fields

from tierstore.tools.plan.footprint import StoreOptions
from tierstore.tools.plan.job import Job
from tierstore.tools.plan.plan import Plan
from tierstore.units import parse_bytes

_COLUMNS = 100


def calls_of(found: Plan, directories: Sequence[str] = ()) -> str:
    """Return the code that makes the store and the optimizer of a plan.

    Args:
        found: the plan.
        directories: one on each drive; none: names to replace.
    """
    return "\n".join([*_imports(found), "", *_made(found, directories)]) + "\n"


def _imports(found: Plan) -> list[str]:
    imports = {"import tierstore"}
    package = found.call.partition(".")[0]
    if package.isidentifier():
        imports.add(f"import {package}")
    if "torch." in found.call:
        imports.add("import torch")
    module = found.algorithm.rpartition(".")[0]
    if module not in ("", "torch.optim"):
        imports.add(f"import {module}")
    return sorted(imports)


def program_of(found: Plan, directories: Sequence[str] = ()) -> str:
    """Return the code of a training loop with the settings of a plan.

    Names that a program has are ``model``, ``batches`` and ``loss_of``.
    """
    job, count = found.job, found.job.micro_batches
    lines = [*_imports(found), *_sharded(job)]
    if job.checkpointing:
        lines.append(
            "model.gradient_checkpointing_enable()  # of transformers; or as yours does it"
        )
    lines += [*_made(found, directories), "optimizer.restore()", "for batch in batches:"]
    more = "" if job.loss_tokens is None else f", logits_at_once={job.loss_tokens}"
    if count == 1:
        lines.append(f"    loss_of(model, batch{more}).backward()")
    else:
        lines += [
            f"    parts = batch.chunk({count})  # {job.tokens_at_once:,} tokens on each rank",
            "    for part in parts:",
            f"        (loss_of(model, part{more}) / len(parts)).backward()",
        ]
    lines += ["    optimizer.step()", "    optimizer.zero_grad()"]
    return "\n".join(lines) + "\n"


def _sharded(job: Job) -> list[str]:
    """Return the lines that lay a model on ranks; layers have the names of transformers' Llama."""
    is_brought = job.on_gpu and not job.parameters_on_gpu
    if job.world_size == 1 and not is_brought:
        return [""]
    if job.partition == "ddp":
        imported = "from torch.nn.parallel import DistributedDataParallel"
        return [imported, "", "model = DistributedDataParallel(model)"]
    names, given, lines = ["fully_shard"], "", [""]
    if is_brought:
        names.insert(0, "CPUOffloadPolicy")
        given += ", offload_policy=CPUOffloadPolicy()"
    imports = [f"from torch.distributed.fsdp import {', '.join(names)}"]
    if job.partition == "hsdp":
        imports.insert(0, "from torch.distributed.device_mesh import init_device_mesh")
        kind, shape = "cuda" if job.on_gpu else "cpu", (job.nodes, job.node_size)
        named = 'mesh_dim_names=("replicas", "shards")'
        lines.append(f'mesh = init_device_mesh("{kind}", {shape}, {named})')
        given += ", mesh=mesh"
    if job.expert_parallel > 1:
        lines.append(f"# The experts of a layer are dealt to {job.expert_parallel} ranks before.")
    return [
        *imports,
        *lines,
        "for layer in model.model.layers:  # of transformers; or as yours are called",
        f"    fully_shard(layer{given})",
        f"fully_shard(model{given})",
    ]


def _made(found: Plan, directories: Sequence[str]) -> list[str]:
    places = list(directories) or _names(found.job)
    store = found.job.store
    given = [
        json.dumps(places[0] if len(places) == 1 else places),
        *(
            f"{one.name}={_text(one.name, getattr(store, one.name))}"
            for one in fields(StoreOptions)
            if getattr(store, one.name) != one.default or one.name == "host_memory"
        ),
    ]
    if found.job.offloads:
        given.append("free_gradients=True")
    given.append("resume=True")
    drives = found.job.drives
    if drives is not None and drives.endurance is not None:
        given.append(f'endurance="{drives.endurance / 1e12:.0f}TBW"')
    call = f"store = tierstore.TierStore({', '.join(given)})"
    if len(call) > _COLUMNS:
        call = "store = tierstore.TierStore(\n    " + ",\n    ".join(given) + ",\n)"
    return [call, f"optimizer = {found.call}"]


def size_text(nbytes: int) -> str:
    """Return a size in the largest unit that is exact: ``"57GiB"``."""
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        size = parse_bytes(f"1{unit}")
        if nbytes and nbytes % size == 0:
            return f"{nbytes // size}{unit}"
    return str(nbytes)


def _text(name: str, value: object) -> str:
    """Return a value as code."""
    if isinstance(value, int) and name not in ("buffers", "commit_every"):
        text = size_text(value)
        return text if text.isdecimal() else json.dumps(text)
    return json.dumps(value) if isinstance(value, str) else repr(value)


def _names(job: Job) -> list[str]:
    count = 1 if job.drives is None else job.drives.count
    return ["/nvme/run"] if count == 1 else [f"/nvme{number}/run" for number in range(count)]
