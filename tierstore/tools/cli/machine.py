"""Options and values that ``plan`` and ``fit`` share: the model, the machines, their rates.

Functions import the modules that are slow to import, so that ``--help`` is printed at once.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tierstore.tools.cli.arguments import size_of
from tierstore.tools.cli.output import OutputError
from tierstore.units import format_bytes

if TYPE_CHECKING:
    from tierstore.tools.plan.job import Job
    from tierstore.tools.plan.models import Model
    from tierstore.tools.plan.rates import Rates
    from tierstore.tools.probe.result import Probe

_COUNT = re.compile(r"\s*(\d+(?:\.\d+)?(?:[eE]\+?\d{1,2})?)\s*([kKMGBT]?)\s*")
_SCALES = {"": 1.0, "k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "B": 1e9, "T": 1e12}

ModelArgument = Annotated[
    Path,
    typer.Argument(
        metavar="MODEL",
        help="A config.json, a directory with one, a listing of parameters, or a model such as "
        "llama-3.1-8b.",
    ),
]
NodesOption = Annotated[int, typer.Option(help="Number of nodes.")]
GpusOption = Annotated[int, typer.Option(help="GPUs of each node, a rank on each; 0: none.")]
CpuRanksOption = Annotated[int, typer.Option(help="Ranks of each node without GPUs.")]
GpuMemoryOption = Annotated[str | None, typer.Option(help="Memory of one GPU.")]
HostMemoryOption = Annotated[str | None, typer.Option(help="Memory of one node.")]
DrivesOption = Annotated[
    str | None, typer.Option(help="Drives of each node, as 4x3.84TB@7/5GB/s,1DWPD.")
]
ProbeOption = Annotated[
    Path | None,
    typer.Option(help="A file that `tierstore probe --json` printed; its rates are taken."),
]
NetworkOption = Annotated[
    str | None, typer.Option(help="Bytes per second that a rank sends, as 50GB.")
]
PcieOption = Annotated[
    str | None, typer.Option(help="Bytes per second between host and GPU, as 50GB.")
]
PartitionOption = Annotated[str, typer.Option(help="fsdp, hsdp or ddp.")]
TokensOption = Annotated[str | None, typer.Option(help="Tokens of a step, as 4M.")]
TflopsOption = Annotated[
    float | None, typer.Option(help="TFLOP/s that a rank achieves in forward and backward.")
]
DtypeOption = Annotated[
    str | None, typer.Option(help="Dtype of the parameters; by default the config says it.")
]
AlgorithmOption = Annotated[
    str | None, typer.Option(help="muon, adamw, or a class of optimizers, as torch.optim.Adam.")
]
SettingsOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set", help="Argument of the optimizer, as momentum_dtype=int8; may be repeated."
    ),
]
CheckpointsOption = Annotated[int, typer.Option(help="Published checkpoints that are kept.")]
StepsOption = Annotated[int | None, typer.Option(help="Steps of the run.")]
EnduranceOption = Annotated[
    float, typer.Option(help="Percent of the drives' rated life that the run may use.")
]
UsedOption = Annotated[
    float | None,
    typer.Option(help="Percent of their life that is used already; by default as the probe found."),
]


def job_values(
    measured: Probe | None,
    *,
    gpu_memory: str | None,
    host_memory: str | None,
    drives: str | None,
    tokens: str | None,
    tflops: float | None,
    endurance: float,
    used: float | None,
    settings: Sequence[str] | None,
    **others: Any,
) -> dict[str, Any]:
    """Return the fields of a job that options and a probe of the machine tell, without torch."""
    from tierstore.tools.plan.drives import drives_of

    return {
        "gpu_memory": size_of("--gpu-memory", gpu_memory),
        "host_memory": _node_memory(size_of("--host-memory", host_memory), measured),
        "drives": drives_of(drives, probed=measured is not None),
        "tokens": whole_number("--tokens", tokens),
        "flops": None if tflops is None else 1e12 * number_of("--tflops", tflops),
        "endurance": number_of("--endurance", endurance) / 100,
        "wear": _used_share(measured, used),
        "optimizer": _settings_of(settings or []),
        **others,
    }


def model_of(path: Path, dtype: str | None) -> Model:
    """Return the model of the first argument."""
    from tierstore.tools.plan.model_files import read_model

    model = read_model(path)
    if dtype is None:
        return model
    wanted = _dtype(dtype)
    return replace(model, parameters=tuple(replace(p, dtype=wanted) for p in model.parameters))


def probe_of(path: Path | None) -> Probe | None:
    """Return what a probe measured."""
    from tierstore.tools.probe.result import Probe

    return None if path is None else Probe.read(path)


def _node_memory(given: int | None, measured: Probe | None) -> int | None:
    """Return the memory of a node: what the probe found, unless the job has less."""
    from tierstore.errors import PlanError

    if measured is None:
        return given
    machine = measured.machine
    if given is not None and given > machine.memory_bytes:
        raise PlanError(
            f"the probe is of another machine: {machine.host} has "
            f"{format_bytes(machine.memory_bytes)} of memory, and the nodes of the job have "
            f"{format_bytes(given)}. Probe a node of the job, or plan with --drives"
        )
    return machine.memory_bytes if given is None else given


def rates_of(
    job: Job, measured: Probe | None, network: str | None, pcie: str | None
) -> dict[bool, Rates]:
    """Return the rates of the machines, by whether pages are stepped on GPUs."""
    from tierstore.tools.plan.rates import rates_for

    given = {"network": size_of("--network", network), "pcie": size_of("--pcie", pcie)}
    return {
        on_gpu: rates_for(job, measured, on_gpu=on_gpu, **given)
        for on_gpu in {False, job.on_gpu, job.steps_on_gpu}
    }


def _settings_of(texts: Sequence[str]) -> dict[str, str]:
    """Return the values of --set."""
    from tierstore.errors import PlanError

    for text in texts:
        if not re.fullmatch(r"\w+=.+", text):
            raise PlanError(
                f"--set takes an argument of the optimizer and its value, as momentum_dtype=int8, "
                f"got {text!r}"
            )
    names = [text.split("=")[0] for text in texts]
    for name in names:
        if names.count(name) > 1:
            raise PlanError(f"--set {name}= is given twice: give it once")
    return dict(text.split("=", 1) for text in texts)


def _dtype(text: str) -> Any:
    from tierstore.errors import PlanError
    from tierstore.tools.plan.models import DTYPES

    if text not in DTYPES:
        raise PlanError(f"a dtype is one of {', '.join(DTYPES)}, got {text!r}")
    return DTYPES[text]


def number_of(option: str, value: float) -> float:
    """Return the value of an option that is a finite number, 0 or more."""
    from tierstore.errors import PlanError

    if not 0 <= value < math.inf:
        raise PlanError(f"{option} must be a finite number, 0 or more, got {value:g}")
    return value


def _used_share(measured: Probe | None, used: float | None) -> float:
    """Return the share of the drives' rated life that is used, as given or as a probe found."""
    if used is not None:
        return number_of("--used", used) / 100
    return 0.0 if measured is None else measured.life_used


def check_outputs(*paths: Path | None) -> None:
    """Refuse outputs that exist, or that cannot be written, before anything is computed."""
    from tierstore.errors import PlanError

    given = [path for path in paths if path is not None]
    for path in given:
        if path.exists() or given.count(path) > 1:
            raise PlanError(f"{path} exists or is named twice: name a new file")
        if not path.absolute().parent.is_dir():
            raise PlanError(f"{path.absolute().parent} is not a directory: make it first")


def write_file(path: Path, text: str) -> None:
    """Write a new file, or nothing.

    Raises:
        OutputError: it cannot be written.
    """
    try:
        with path.open("x", encoding="utf-8") as file:
            try:
                file.write(text)
                file.flush()
            except OSError:
                path.unlink()
                raise
    except OSError as error:
        raise OutputError(f"{path} cannot be written: {error.strerror}") from error


def whole_number(option: str, text: str | None) -> int | None:
    """Return the number that an option names, as 4M."""
    from tierstore.errors import PlanError

    if text is None:
        return None
    match = _COUNT.fullmatch(text)
    if match is None or not 1 <= float(match[1]) * _SCALES[match[2]] < 1e18:
        raise PlanError(f"{option} must be a number such as 500k, 4M or 37B, got {text!r}")
    return int(float(match[1]) * _SCALES[match[2]])
