"""The command ``tierstore plan``."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tierstore.tools.cli.arguments import JsonOption, size_of
from tierstore.tools.cli.exit_codes import BAD_DATA, exit_codes, fail
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
    TokensOption,
    UsedOption,
    check_outputs,
    job_values,
    model_of,
    number_of,
    probe_of,
    rates_of,
    whole_number,
    write_file,
)
from tierstore.tools.cli.output import write_json, write_lines
from tierstore.tools.plan.families import config_of

if TYPE_CHECKING:
    from tierstore.tools.plan.footprint import StoreOptions


def plan(
    model: ModelArgument,
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
    expert_parallel: Annotated[
        int, typer.Option(help="Ranks that the experts of a layer are dealt to, with fsdp.")
    ] = 1,
    parameters_on: Annotated[
        str, typer.Option(help="gpu, or host: FSDP2's CPUOffloadPolicy() keeps them there.")
    ] = "gpu",
    tokens: TokensOption = None,
    micro_tokens: Annotated[
        str | None, typer.Option(help="Tokens of one forward and backward of a rank; 4096.")
    ] = None,
    checkpointing: Annotated[
        bool, typer.Option("--checkpointing", help="Layers are computed again in backward.")
    ] = False,
    loss_tokens: Annotated[
        str | None, typer.Option(help="Most tokens whose logits exist at once; all by default.")
    ] = None,
    tflops: TflopsOption = None,
    model_seconds: Annotated[
        float | None, typer.Option(help="Seconds of forward and backward, if measured.")
    ] = None,
    active_parameters: Annotated[
        str | None,
        typer.Option(help="Parameters that a token passes, as 37B, if the model does not tell."),
    ] = None,
    activations: Annotated[
        str | None, typer.Option(help="Activations and logits of one rank, if measured.")
    ] = None,
    dtype: DtypeOption = None,
    algorithm: AlgorithmOption = None,
    settings: SettingsOption = None,
    store_memory: Annotated[
        str, typer.Option(help="host_memory of the store of each rank.")
    ] = "16GiB",
    device_memory: Annotated[str, typer.Option(help="device_memory of each store.")] = "0",
    page_bytes: Annotated[str | None, typer.Option(help="page_bytes of each store.")] = None,
    buffers: Annotated[int | None, typer.Option(help="buffers of each store.")] = None,
    commit_every: Annotated[str, typer.Option(help="commit_every: a number, or none.")] = "1",
    step_on: Annotated[
        str | None, typer.Option(help="cpu, to step on the host beside GPUs, or cuda.")
    ] = None,
    offload_gradients: Annotated[
        str | None, typer.Option(help="backward: gradients leave the GPU as they are made.")
    ] = None,
    checkpoints: CheckpointsOption = 1,
    steps: StepsOption = None,
    endurance: EnduranceOption = 100.0,
    used: UsedOption = None,
    html: Annotated[Path | None, typer.Option(help="A new file, for a page with pictures.")] = None,
    emit_config: Annotated[
        Path | None, typer.Option(help="A new file, for the calls of store and optimizer.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Say whether a job fits, its step time, and how drives wear.

    Exits with 1 if the job does not fit, or wears its drives out.
    """
    with exit_codes(as_json):
        check_outputs(html, emit_config)
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
            expert_parallel=expert_parallel,
            parameters_on=parameters_on,
            tokens=tokens,
            micro_tokens=whole_number("--micro-tokens", micro_tokens),
            checkpointing=checkpointing,
            loss_tokens=whole_number("--loss-tokens", loss_tokens),
            tflops=tflops,
            model_s=None if model_seconds is None else number_of("--model-seconds", model_seconds),
            active_parameters=whole_number("--active-parameters", active_parameters),
            activation_bytes=size_of("--activations", activations),
            checkpoints=checkpoints,
            steps=steps,
            endurance=endurance,
            used=used,
            settings=settings,
        )
        config_of(model)  # A wrong name is refused before the slow imports.

        from tierstore.errors import BudgetError
        from tierstore.tools.cli.plan_screen import advice, screen
        from tierstore.tools.plan.calls import calls_of
        from tierstore.tools.plan.job import Job
        from tierstore.tools.plan.plan import plan as plan_job
        from tierstore.tools.plan.plan import to_plain

        store = _store(
            store_memory,
            device_memory,
            page_bytes,
            buffers,
            commit_every,
            step_on=step_on,
            offload_gradients=offload_gradients,
        )
        job = Job(store=store, **values)
        rates = rates_of(job, measured, network, pcie)
        nvme_bytes = None if measured is None else measured.free_bytes
        planned = model_of(model, dtype)
        try:
            found = plan_job(
                planned,
                job,
                rates[job.steps_on_gpu],
                algorithm=algorithm,
                nvme_bytes=nvme_bytes,
            )
        except BudgetError as error:
            # As the option is called here, where --host-memory is the memory of a node.
            text = re.sub("host_memory=?", "--store-memory ", str(error)).replace("  ", " ")
            fail(f"it does not fit: {text}", as_json, BAD_DATA)
        if html is not None:
            from tierstore.tools.plan.page import html_of

            write_file(html, html_of(found))
        if emit_config is not None:
            places = [] if measured is None else [one.path for one in measured.directories]
            write_file(emit_config, calls_of(found, places))
        if as_json:
            write_json(to_plain(found))
        else:
            write_lines([*screen(found), *advice(found, rates, nvme_bytes)])
        if not (found.fits and found.lasts):
            raise typer.Exit(BAD_DATA)


def _store(
    store_memory: str,
    device_memory: str,
    page_bytes: str | None,
    buffers: int | None,
    commit_every: str,
    **places: str | None,
) -> StoreOptions:
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
        host_memory=size_of("--store-memory", store_memory) or 0,
        device_memory=size_of("--device-memory", device_memory) or 0,
        page_bytes=size_of("--page-bytes", page_bytes),
        buffers=buffers,
        commit_every=every,
        **places,
    )
