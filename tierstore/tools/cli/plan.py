"""``tierstore plan``: answers about a training run before it begins."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tierstore.tools.cli.arguments import JsonOption
from tierstore.tools.cli.exit_codes import BAD_DATA, exit_codes, fail
from tierstore.tools.cli.output import OutputError, plain, table, write_json, write_lines
from tierstore.tools.plan.wording import days_text, seconds_text, short_text
from tierstore.units import format_bytes, parse_bytes

if TYPE_CHECKING:
    from tierstore.tools.plan.job import Job
    from tierstore.tools.plan.models import Model
    from tierstore.tools.plan.plan import Plan
    from tierstore.tools.plan.rates import Rates
    from tierstore.tools.probe.result import Probe

_COLUMNS = 60  # Of the longest bar.
_COUNT = re.compile(r"\s*(\d+(?:\.\d+)?(?:[eE]\+?\d{1,2})?)\s*([kKMGBT]?)\s*")
_SCALES = {"": 1.0, "k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "B": 1e9, "T": 1e12}


def plan(
    model: Annotated[
        Path,
        typer.Argument(
            metavar="MODEL", help="A config.json, a directory with one, or a listing of parameters."
        ),
    ],
    nodes: Annotated[int, typer.Option(help="Number of nodes.")] = 1,
    gpus: Annotated[int, typer.Option(help="GPUs of each node, a rank on each; 0: none.")] = 0,
    cpu_ranks: Annotated[int, typer.Option(help="Ranks of each node without GPUs.")] = 1,
    gpu_memory: Annotated[str | None, typer.Option(help="Memory of one GPU.")] = None,
    host_memory: Annotated[str | None, typer.Option(help="Memory of one node.")] = None,
    drives: Annotated[
        str | None, typer.Option(help="Drives of each node, as 4x3.84TB@7/5GB/s,1DWPD.")
    ] = None,
    probe: Annotated[
        Path | None,
        typer.Option(help="A file that `tierstore probe --json` printed; its rates are taken."),
    ] = None,
    network: Annotated[
        str | None, typer.Option(help="Bytes per second that a rank sends, as 50GB.")
    ] = None,
    pcie: Annotated[
        str | None, typer.Option(help="Bytes per second between host and GPU, as 50GB.")
    ] = None,
    partition: Annotated[str, typer.Option(help="fsdp, hsdp or ddp.")] = "fsdp",
    expert_parallel: Annotated[
        int, typer.Option(help="Ranks that the experts of a layer are dealt to, with fsdp.")
    ] = 1,
    tokens: Annotated[str | None, typer.Option(help="Tokens of a step, as 4M.")] = None,
    tflops: Annotated[
        float | None, typer.Option(help="TFLOP/s that a rank achieves in forward and backward.")
    ] = None,
    model_seconds: Annotated[
        float | None, typer.Option(help="Seconds of forward and backward, if measured.")
    ] = None,
    active_parameters: Annotated[
        str | None, typer.Option(help="Parameters that a token passes, as 37B; all by default.")
    ] = None,
    activations: Annotated[str | None, typer.Option(help="Activations of one rank.")] = None,
    dtype: Annotated[
        str | None, typer.Option(help="Dtype of the parameters, if not that of the config.")
    ] = None,
    algorithm: Annotated[
        str | None,
        typer.Option(help="muon, adamw, or a class of optimizers, as torch.optim.Adam."),
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set", help="Argument of the optimizer, as momentum_dtype=int8; may be repeated."
        ),
    ] = None,
    store_memory: Annotated[
        str, typer.Option(help="host_memory of the store of each rank.")
    ] = "16GiB",
    device_memory: Annotated[str, typer.Option(help="device_memory of each store.")] = "0",
    page_bytes: Annotated[str | None, typer.Option(help="page_bytes of each store.")] = None,
    buffers: Annotated[int | None, typer.Option(help="buffers of each store.")] = None,
    commit_every: Annotated[str, typer.Option(help="commit_every: a number, or none.")] = "1",
    step_on: Annotated[
        str | None, typer.Option(help="cpu, to step on the host beside GPUs.")
    ] = None,
    offload_gradients: Annotated[
        str | None, typer.Option(help="backward: gradients leave the GPU as they are made.")
    ] = None,
    checkpoints: Annotated[int, typer.Option(help="Published checkpoints that are kept.")] = 1,
    steps: Annotated[int | None, typer.Option(help="Steps of the run.")] = None,
    endurance: Annotated[
        float, typer.Option(help="Percent of the drives' rated life that the run may use.")
    ] = 100.0,
    used: Annotated[
        float | None,
        typer.Option(help="Percent of it that is used already; by default as the probe found."),
    ] = None,
    html: Annotated[Path | None, typer.Option(help="A new file, for a page with pictures.")] = None,
    emit_config: Annotated[
        Path | None, typer.Option(help="A new file, for the calls of store and optimizer.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Say how long drives last, whether a job fits, and how long its steps take.

    Exits with 1 if the job does not fit, or wears its drives out.
    """
    with exit_codes(as_json):
        from tierstore.errors import BudgetError, PlanError
        from tierstore.tools.plan.calls import calls_of
        from tierstore.tools.plan.job import Job
        from tierstore.tools.plan.plan import plan as plan_job
        from tierstore.tools.plan.plan import to_plain

        if drives is None and probe is None:
            raise PlanError(
                "a plan needs --drives, such as 4x3.84TB@7/5GB/s,1DWPD, or --probe with a file "
                "that `tierstore probe --json` printed, or both"
            )
        _check_outputs(html, emit_config)
        measured = None if probe is None else _probe(probe)
        job = Job(
            nodes=nodes,
            gpus=gpus,
            cpu_ranks=cpu_ranks,
            gpu_memory=_size("--gpu-memory", gpu_memory),
            host_memory=_node_memory(_size("--host-memory", host_memory), measured),
            drives=None if drives is None else _drives(drives),
            partition=partition,
            expert_parallel=expert_parallel,
            tokens=_whole("--tokens", tokens),
            flops=None if tflops is None else 1e12 * _number("--tflops", tflops),
            model_s=None if model_seconds is None else _number("--model-seconds", model_seconds),
            active_parameters=_whole("--active-parameters", active_parameters),
            activation_bytes=_size("--activations", activations),
            checkpoints=checkpoints,
            steps=steps,
            endurance=_number("--endurance", endurance) / 100,
            wear=_used(measured) if used is None else _number("--used", used) / 100,
            store=_store(
                store_memory,
                device_memory,
                page_bytes,
                buffers,
                commit_every,
                step_on=step_on,
                offload_gradients=offload_gradients,
            ),
            optimizer=_settings(settings or []),
        )
        rates = _rates(job, measured, _size("--network", network), _size("--pcie", pcie))
        try:
            found = plan_job(
                _model(model, dtype),
                job,
                rates,
                algorithm=algorithm,
                nvme_bytes=_free_bytes(measured),
            )
        except BudgetError as error:
            # As the option is called here, where --host-memory is the memory of a node.
            text = re.sub("host_memory=?", "--store-memory ", str(error)).replace("  ", " ")
            fail(f"it does not fit: {text}", as_json, BAD_DATA)
        if html is not None:
            from tierstore.tools.plan.page import html_of

            _write(html, html_of(found))
        if emit_config is not None:
            places = [] if measured is None else [one.path for one in measured.directories]
            _write(emit_config, calls_of(found, places))
        if as_json:
            write_json(to_plain(found))
        else:
            write_lines(_lines(found))
        if not (found.fits and found.lasts):
            raise typer.Exit(BAD_DATA)


# -------------------------------------------------------------------------------- arguments


def _model(path: Path, dtype: str | None) -> Model:
    from tierstore.tools.plan.model_files import read_model

    model = read_model(path)
    if dtype is None:
        return model
    wanted = _dtype(dtype)
    return replace(model, parameters=tuple(replace(p, dtype=wanted) for p in model.parameters))


def _probe(path: Path) -> Probe:
    from tierstore.errors import PlanError
    from tierstore.tools.probe.result import Probe

    try:
        data = path.read_bytes()
    except OSError as error:
        raise PlanError(
            f"{path} cannot be read ({error.strerror}): make it with `tierstore probe --json DIR`"
        ) from error
    return Probe.from_json(data, str(path))


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


def _drives(text: str) -> Any:
    from tierstore.tools.plan.drives import parse_drives

    return parse_drives(text)


def _rates(job: Job, measured: Probe | None, network: int | None, pcie: int | None) -> Rates:
    from tierstore.tools.plan.rates import assumed_rates, measured_rates

    on_gpu = job.steps_on_gpu
    flops = job.flops if on_gpu or not job.on_gpu else None
    if measured is not None:
        return measured_rates(
            measured,
            on_gpu=on_gpu,
            cpu_ranks=job.node_size,
            flops=flops,
            pcie=pcie,
            network=network,
        )
    return assumed_rates(job.drives, on_gpu=on_gpu, flops=flops, pcie=pcie, network=network)


def _store(
    store_memory: str,
    device_memory: str,
    page_bytes: str | None,
    buffers: int | None,
    commit_every: str,
    **places: str | None,
) -> Any:
    from tierstore.errors import PlanError
    from tierstore.tools.plan.footprint import StoreOptions

    every = None
    if commit_every != "none":
        if not re.fullmatch("[1-9][0-9]{0,17}", commit_every):
            raise PlanError(
                f"--commit-every must be a number of steps from 1, or none, got {commit_every!r}"
            )
        every = int(commit_every)
    return StoreOptions(
        host_memory=_size("--store-memory", store_memory) or 0,
        device_memory=_size("--device-memory", device_memory) or 0,
        page_bytes=_size("--page-bytes", page_bytes),
        buffers=buffers,
        commit_every=every,
        **places,
    )


def _settings(texts: Sequence[str]) -> dict[str, str]:
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


def _size(option: str, text: str | None) -> int | None:
    from tierstore.errors import PlanError

    try:
        return None if text is None else parse_bytes(text)
    except ValueError as error:
        raise PlanError(f"{option}: {error}") from error


def _number(option: str, value: float) -> float:
    from tierstore.errors import PlanError

    if not 0 <= value < math.inf:
        raise PlanError(f"{option} must be a finite number, 0 or more, got {value:g}")
    return value


def _used(measured: Probe | None) -> float:
    """Return the share of the rated life that the most worn drive of a probe has used."""
    drives = [drive for one in measured.directories for drive in one.drives] if measured else []
    return max((drive.percentage_used or 0 for drive in drives), default=0) / 100


def _free_bytes(measured: Probe | None) -> int | None:
    if measured is None:
        return None
    return sum({one.filesystem: one.free_bytes for one in measured.directories}.values())


def _check_outputs(*paths: Path | None) -> None:
    """Refuse outputs that exist, or that cannot be written, before anything is computed."""
    from tierstore.errors import PlanError

    given = [path for path in paths if path is not None]
    for path in given:
        if path.exists() or given.count(path) > 1:
            raise PlanError(f"{path} exists or is named twice: name a new file")
        if not path.absolute().parent.is_dir():
            raise PlanError(f"{path.absolute().parent} is not a directory: make it first")


def _write(path: Path, text: str) -> None:
    """Write a new file, or nothing."""
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


def _whole(option: str, text: str | None) -> int | None:
    from tierstore.errors import PlanError

    if text is None:
        return None
    match = _COUNT.fullmatch(text)
    if match is None or not 1 <= float(match[1]) * _SCALES[match[2]] < 1e18:
        raise PlanError(f"{option} must be a number such as 500k, 4M or 37B, got {text!r}")
    return int(float(match[1]) * _SCALES[match[2]])


# ----------------------------------------------------------------------------------- report


def _lines(found: Plan) -> Iterator[str]:
    job = found.job
    count = short_text(found.model.parameter_count)
    yield plain(
        f"{found.model.name}: {count} parameters, {found.algorithm}, {job.describe()}, "
        f"{job.partition if job.world_size > 1 else 'one rank'}"
    )
    yield ""
    yield from _wear_lines(found)
    yield ""
    yield from _memory_lines(found)
    yield ""
    yield from _step_lines(found)
    yield ""
    if found.is_timed:
        yield _free_line(found)
        yield ""
    yield from table(
        {
            "beside": lambda one: one.algorithm,
            "step": lambda one: seconds_text(one.step_s),
            "state": lambda one: format_bytes(one.state_bytes),
            "written a step": lambda one: format_bytes(round(one.written_bytes)),
            "drives last": lambda one: days_text(one.days),
        },
        found.beside,
        right=("step", "state", "written a step", "drives last"),
    )
    if found.rates.assumed:
        yield ""
        yield f"assumed: {'; '.join(found.rates.assumed)}"


def _wear_lines(found: Plan) -> Iterator[str]:
    job, wear = found.job, found.wear
    if wear is None:
        yield "drives: wear is unknown, name them with --drives"
        return
    most = "" if found.is_timed else "at most "
    yield (
        f"drives: {most}{format_bytes(round(wear.bytes_per_day))} written a day in each node, "
        f"{most}{wear.drive_writes_per_day:.3g} drive writes per day"
    )
    steps = found.steps_allowed
    if steps is None:
        yield "drives: how long they last is unknown, name their endurance (as 1DWPD or 7PBW)"
    elif math.isinf(steps):
        yield "drives: nothing is written to them"
    else:
        share = f"{100 * job.endurance:g}% of their rated life"
        days = f", {days_text(found.days)}" if found.is_timed else ""
        yield f"drives: {share} is used after {steps:,.0f} steps{days}"
    if not found.lasts:
        run = "no step is left" if job.steps is None else f"the run has {job.steps:,} steps"
        yield (
            f"NOT ALLOWED: {run}: commit less often with the state in memory, or take more or "
            "better drives"
        )


def _memory_lines(found: Plan) -> Iterator[str]:
    rows = []
    for need in found.needs:
        whose = "one GPU" if need.place == "GPU" else f"{need.place} of a node"
        limit = "unknown" if need.limit is None else format_bytes(need.limit)
        verdict = "" if need.fits else "DOES NOT FIT"
        rows.append((whose, format_bytes(need.nbytes), limit, verdict))
        rows += [(f"  {part}", format_bytes(size), "", "") for part, size in need.parts.items()]
    yield from table(
        {
            "memory": lambda row: row[0],
            "needed": lambda row: row[1],
            "there is": lambda row: row[2],
            "": lambda row: row[3],
        },
        rows,
        right=("needed", "there is"),
    )
    if found.job.activation_bytes is None:
        yield "activations are left out, pass --activations"
    if not found.fits:
        yield f"it fits with {found.remedy}" if found.remedy else "no change that was tried fits"


def _step_lines(found: Plan) -> Iterator[str]:
    time = found.time
    if found.is_timed:
        yield (
            f"step: {seconds_text(time.seconds)}, of which paging and commits add "
            f"{seconds_text(time.exposed_s)}; busy longest: {found.bottleneck}"
        )
    else:
        yield (
            f"step: at least {seconds_text(time.seconds)}, without the computation of the "
            "optimizer, which is not known"
        )
    if found.model_s is None:
        yield "step: without forward and backward, pass --tokens and --tflops, or --model-seconds"
    longest = max(time.seconds, *time.lanes.values(), 0.0)
    for lane, busy_s in time.lanes.items():
        bar = "#" * math.ceil(_COLUMNS * busy_s / longest)
        yield f"  {lane:<9} |{bar:<{_COLUMNS}}| {seconds_text(busy_s)}"
    if found.changes:
        yield ""
        yield from table(
            {
                "change": lambda one: one.change,
                "step": lambda one: seconds_text(one.step_s),
                "gain": lambda one: seconds_text(max(0.0, time.seconds - one.step_s)),
                "drives last": lambda one: days_text(one.days),
            },
            found.changes,
            right=("step", "gain", "drives last"),
        )


def _free_line(found: Plan) -> str:
    if found.free_model_s is None:
        return "paging is never free: drives or commits are too slow"
    if found.free_model_s == 0:
        return "paging is free beside any step"
    tokens = found.free_tokens
    beside = f"forward and backward of {seconds_text(found.free_model_s)} or more"
    return f"paging is free (2% or less) beside {beside}" + (
        "" if tokens is None else f", that is from {short_text(tokens)} tokens a step"
    )
