"""The command ``tierstore fit``."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tierstore.tools.cli.arguments import JsonOption
from tierstore.tools.cli.exit_codes import BAD_DATA, exit_codes
from tierstore.tools.cli.machine import (
    AlgorithmOption,
    CheckpointsOption,
    CpuRanksOption,
    DrivesOption,
    DtypeOption,
    EnduranceOption,
    GpuMemoryOption,
    GpusOption,
    HostMemoryOption,
    ModelArgument,
    NetworkOption,
    NodesOption,
    PartitionOption,
    PcieOption,
    ProbeOption,
    SettingsOption,
    StepsOption,
    TflopsOption,
    UsedOption,
    job_values,
    model_of,
    probe_of,
    rates_of,
)
from tierstore.tools.cli.output import plain, table, write_json, write_lines
from tierstore.tools.cli.plan_screen import (
    at_least,
    doubt_lines,
    memory_lines,
    nearest_lines,
    time_lines,
    wear_lines,
)
from tierstore.tools.plan.drives import SECONDS_PER_DAY
from tierstore.tools.plan.families import config_of, sizes_of
from tierstore.tools.plan.wording import days_text, seconds_text, short_text
from tierstore.units import format_bytes

if TYPE_CHECKING:
    from tierstore.tools.plan.fit import Fit, Fitted


def fit(
    model: ModelArgument,
    tokens: Annotated[str, typer.Option(help="Tokens of a step of all ranks, as 64k.")],
    nodes: NodesOption = 1,
    gpus: GpusOption = 0,
    cpu_ranks: CpuRanksOption = 1,
    gpu_memory: GpuMemoryOption = None,
    host_memory: HostMemoryOption = None,
    drives: DrivesOption = None,
    probe: ProbeOption = None,
    network: NetworkOption = None,
    pcie: PcieOption = None,
    partition: PartitionOption = "fsdp",
    tflops: TflopsOption = None,
    dtype: DtypeOption = None,
    algorithm: AlgorithmOption = None,
    settings: SettingsOption = None,
    checkpoints: CheckpointsOption = 1,
    steps: StepsOption = None,
    endurance: EnduranceOption = 100.0,
    used: UsedOption = None,
    largest: Annotated[
        bool,
        typer.Option("--largest", help="MODEL is a family, as qwen3: its largest size that fits."),
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Find the settings with which a model trains on a machine.

    If no settings fit, names the nearest machines on which some do, and exits with 1.
    """
    with exit_codes(as_json):
        measured = probe_of(probe)
        values = job_values(
            measured,
            nodes=nodes,
            gpus=gpus,
            cpu_ranks=cpu_ranks,
            gpu_memory=gpu_memory,
            host_memory=host_memory,
            drives=drives,
            partition=partition,
            tokens=tokens,
            tflops=tflops,
            checkpoints=checkpoints,
            steps=steps,
            endurance=endurance,
            used=used,
            settings=settings,
        )

        names = [model]
        if largest:
            names = [Path(f"{model}-{size}") for size in reversed(sizes_of(f"{model}"))]
        config_of(names[0])  # A wrong name is refused before the slow imports.

        from tierstore.tools.plan.fit import fit_job, fits
        from tierstore.tools.plan.job import Job

        gc.freeze()  # Collections would go through the objects of torch for each plan.
        job = Job(**values)
        rates = rates_of(job, measured, network, pcie)
        nvme_bytes = None if measured is None else measured.free_bytes
        given: dict[str, Any] = {"algorithm": algorithm, "nvme_bytes": nvme_bytes}
        for name in names:  # The smallest size is answered if none fits.
            found = model_of(name, dtype)
            if name == names[-1] or fits(found, job, rates, **given):
                answer = fit_job(found, job, rates, **given)
                if answer.plans:
                    break
        places = [] if measured is None else [one.path for one in measured.directories]
        if as_json:
            write_json(_to_plain(answer, places))
        else:
            write_lines(_lines(answer, places))
        if not answer.plans:
            raise typer.Exit(BAD_DATA)


def _lines(found: Fit, places: list[str]) -> Iterator[str]:
    from tierstore.tools.plan.calls import program_of

    job, count = found.job, short_text(found.model.parameter_count)
    yield plain(
        f"{found.model.name}: {count} parameters, {found.algorithm}, {job.describe()}, "
        f"{short_text(job.tokens or 0)} tokens a step"
    )
    yield ""
    if not found.plans:
        yield from nearest_lines(found)
        return
    first = found.plans[0]
    yield from memory_lines(first.plan)
    yield ""
    yield from time_lines(first.plan)
    yield from wear_lines(first.plan)
    yield ""
    places_of_memory = [need.place for need in first.plan.needs]
    yield from table(
        {
            "plan": lambda one: one.title,
            "step": lambda one: at_least(one.plan) + seconds_text(one.plan.time.seconds),
            "tokens a day": _tokens_a_day,
            **{place: partial(_needed, place) for place in places_of_memory},
            "drives last": lambda one: days_text(one.plan.days),
        },
        found.plans,
        right=("step", "tokens a day", "GPU", "host", "NVMe", "drives last"),
    )
    for one in found.plans:
        yield f"{one.title}: {_sentence(one, first)}"
    if found.nearest:
        steps = [f"{one.change}, {seconds_text(one.step_s)} a step" for one in found.nearest]
        yield f"What would help: {'; '.join(steps)}."
    shown = program_of(first.plan, places).splitlines()
    for one in found.plans:
        lines = program_of(one.plan, places).splitlines()
        yield ""
        if one is first:
            yield "# quickest: the program, with your model, batches and loss_of"
            yield from lines
        else:
            yield f"# {one.title}: the same but for"
            yield from changed_lines(shown, lines)
    yield ""
    yield from doubt_lines(first.plan)


def changed_lines(shown: list[str], lines: list[str]) -> list[str]:
    """Return the lines of a program that another one lacks; calls over several lines as a whole."""
    kept: list[list[str]] = []
    for line in lines:
        if line.startswith((" ", ")")) and kept:
            kept[-1].append(line)
        else:
            kept.append([line])
    text = "\n".join(shown)
    fresh = [line for call in kept if "\n".join(call) not in text for line in call]
    return [*fresh, *(f"# without {line.strip()}" for line in shown if _is_left_out(line, lines))]


def _is_left_out(line: str, lines: list[str]) -> bool:
    """Return whether another program lacks a call that is not part of the store or the loop."""
    return line not in lines and line.startswith(("model", "fully_shard", "for layer", "mesh"))


def _sentence(one: Fitted, first: Fitted) -> str:
    """Return what a plan costs against the quickest one."""
    parts = []
    lost = one.loses_steps
    if one.title == "quickest":
        parts.append("the shortest step" if lost > 1 else "the shortest step that is committed")
    elif one is first:
        parts.append("the only plan that fits so far")
    else:
        slower = one.plan.time.seconds - first.plan.time.seconds
        if abs(slower) < 0.005 * first.plan.time.seconds:
            parts.append("as quick")
        else:
            parts.append(
                f"{seconds_text(abs(slower))} {'more' if slower > 0 else 'less'} for each step"
            )
        memory = _memory(first) - _memory(one)
        if abs(memory) > 2**28:
            parts.append(f"{format_bytes(abs(memory))} {'less' if memory > 0 else 'more'} memory")
        now, before = one.plan.steps_allowed, first.plan.steps_allowed
        if now and before and abs(now - before) > 0.02 * before:
            parts.append(f"the drives last {now:,.0f} steps instead of {before:,.0f}")
    if lost > 1:
        work = seconds_text(lost * one.plan.time.seconds)
        parts.append(f"a crash loses up to {lost} steps ({work})")
    if not one.is_exact:
        parts.append("states lose bits: full ones do not fit, or wear the drives out")
    return f"{', '.join(parts)}."


def _memory(one: Fitted) -> int:
    return sum(need.nbytes for need in one.plan.needs if need.place != "NVMe")


def _needed(place: str, one: Fitted) -> str:
    return next(format_bytes(need.nbytes) for need in one.plan.needs if need.place == place)


def _tokens_a_day(one: Fitted) -> str:
    if one.plan.model_s is None or not one.plan.is_timed:
        return "unknown"
    return short_text(SECONDS_PER_DAY / one.plan.time.seconds * (one.plan.job.tokens or 0))


def _to_plain(found: Fit, places: list[str]) -> dict[str, Any]:
    from tierstore.tools.plan.calls import calls_of, program_of
    from tierstore.tools.plan.fit import options_of
    from tierstore.tools.plan.plan import to_plain

    return {
        "model": found.model.name,
        "fits": bool(found.plans),
        "plans": [
            {
                "title": one.title,
                "options": options_of(one.plan.job),
                "calls": calls_of(one.plan, places),
                "program": program_of(one.plan, places),
                "lossless": one.is_exact,
                "crash_loses_steps": one.loses_steps,
                "plan": to_plain(one.plan),
            }
            for one in found.plans
        ],
        "changes": [
            {"change": one.change, "step_seconds": one.step_s, "written_bytes": one.written}
            for one in found.nearest
        ],
    }
