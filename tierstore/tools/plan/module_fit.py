"""``tierstore.fit``: settings with which a module trains on a machine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn

from tierstore.tools.plan.drives import drives_of
from tierstore.tools.plan.fit import Fit, fit_job
from tierstore.tools.plan.job import Job
from tierstore.tools.plan.models import model_from_module
from tierstore.tools.plan.rates import rates_for
from tierstore.tools.probe.result import Probe
from tierstore.units import parse_bytes


def fit(
    module: nn.Module,
    *,
    tokens: int,
    host_memory: int | str,
    gpus: int = 0,
    gpu_memory: int | str | None = None,
    drives: str | None = None,
    probe: str | Path | None = None,
    tflops: float | None = None,
    algorithm: str | None = None,
    **machine: Any,
) -> Fit:
    """Return the settings with which a model trains on a machine, as ``tierstore fit`` does.

    Example::

        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        found = tierstore.fit(
            model,
            tokens=65_536,
            gpus=1,
            gpu_memory="24GiB",
            host_memory="64GiB",
            drives="1x2TB@7/5GB/s,1200TBW",
            tflops=80,
        )
        for one in found.plans:
            print(one.title, one.plan.time.seconds, one.program)

    Args:
        module: the model, which may be on the meta device. It is not changed.
        tokens: tokens of one step of all ranks.
        host_memory: memory of one node, in bytes or as "64GiB".
        gpus: GPUs of each node, a rank on each; 0: a rank that computes on the CPU.
        gpu_memory: memory of one GPU.
        drives: drives of each node: "4x3.84TB@7/5GB/s,1DWPD". None: those that ``probe`` found.
        probe: a file that ``tierstore probe --json`` printed, whose rates are taken.
        tflops: TFLOP/s that a rank achieves in forward and backward; None: they are left
            out of a step.
        algorithm: "muon", "adamw", or a class of optimizers, as "torch.optim.Adam".
        machine: other fields of ``tierstore.tools.plan.job.Job``, such as ``nodes``.

    Returns:
        Plans with their settings, seconds, needs of memory and code, or the nearest machines on
        which the model trains.

    Raises:
        PlanError: a value is wrong or missing, or the optimizer refuses the model.
    """
    measured = None if probe is None else Probe.read(Path(probe))
    if measured is not None:
        machine = {"wear": measured.life_used, **machine}
    job = Job(
        tokens=tokens,
        host_memory=parse_bytes(host_memory),
        gpus=gpus,
        gpu_memory=None if gpu_memory is None else parse_bytes(gpu_memory),
        drives=drives_of(drives, probed=measured is not None),
        flops=None if tflops is None else 1e12 * tflops,
        **machine,
    )
    rates = {on_gpu: rates_for(job, measured, on_gpu=on_gpu) for on_gpu in {False, job.on_gpu}}
    return fit_job(
        model_from_module(module),
        job,
        rates,
        algorithm=algorithm,
        nvme_bytes=None if measured is None else measured.free_bytes,
    )
