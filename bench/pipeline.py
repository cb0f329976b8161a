"""Timeline of one step on two ranks: computation while pages and matrices are in flight.

The model is cut at rows, as FSDP2 does. Ranks are processes that talk over loopback. An exchange
begins when it is issued and ends when the rank has received its messages.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated

import torch
import torch.distributed as dist
import typer
from distributed import Plan, make_optimizer, make_parameters
from measuring import MIB, DirectoryOption, SmallOption, profile_threads, scratch_folder
from ranks import start_world
from timeline import draw, read_spans
from torch.profiler import ProfilerActivity

import tierstore
from muon.newton_schulz import fastest_dtype

RANKS = 2

PLANS = {
    "small": Plan(
        width=64,
        key_width=16,
        mlp_width=224,
        layers=1,
        vocabulary=512,
        page_bytes=MIB // 16,
        world_sizes=(RANKS,),
        rounds=1,
    ),
    "default": Plan(
        width=512,
        key_width=128,
        mlp_width=1792,
        layers=3,
        vocabulary=4096,
        page_bytes=2 * MIB,
        world_sizes=(RANKS,),
        rounds=1,
    ),
}


@contextlib.contextmanager
def serve(folder: Path, plan: Plan, ns_dtype: torch.dtype) -> Iterator[Callable[[int], Path]]:
    """Serve one rank: yields a function that profiles a step and returns the path of its trace."""
    with tierstore.TierStore(
        folder / "run",
        host_memory=8 * plan.page_bytes,
        page_bytes=plan.page_bytes,
        buffers=6,
    ) as store:
        optimizer = make_optimizer(store, make_parameters(plan, sharded=True), ns_dtype)

        def profile_step(steps_before: int) -> Path:
            for _ in range(steps_before):
                optimizer.step()
            store.synchronize()
            with profile_threads(ProfilerActivity.CPU) as profiled:
                dist.barrier()
                optimizer.step()
                store.synchronize()
            trace = folder / f"trace-{dist.get_rank()}.json"
            profiled.export_chrome_trace(str(trace))
            return trace

        yield profile_step


def main(
    picture: Annotated[Path, typer.Option(help="The picture to write.")] = Path("pipeline.png"),
    directory: DirectoryOption = Path("."),
    small: SmallOption = False,
) -> None:
    """Draw the timeline of one step on two ranks."""
    plan = PLANS["small" if small else "default"]
    torch.set_num_threads(1)
    ns_dtype = fastest_dtype((plan.mlp_width, plan.width), torch.device("cpu"))
    with (
        scratch_folder(directory) as scratch,
        start_world(RANKS, scratch, serve, plan, ns_dtype) as world,
    ):
        traces = world.ask(3)  # The first write of a file costs more.
        draw({f"rank {rank}: ": read_spans(trace) for rank, trace in enumerate(traces)}, picture)


if __name__ == "__main__":
    typer.run(main)
