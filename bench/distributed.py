"""Cost of a step on several ranks, and the parts of its time.

Ranks are processes with one thread each that talk over loopback. 1, 2 and 4 ranks step the same
model with its state on disk in three cases: "sharded", cut at rows as FSDP2 does; "sharded,
all-gather", where every rank gathers and orthogonalizes all matrices; and "replicated", where every
rank holds the model and steps its part. Cases take turns, and the reference runs twice in each
round to show the noise. A turn is a timed step and a profiled step.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import allgather_reference
import torch
import torch.distributed as dist
import typer
from measuring import (
    MIB,
    DirectoryOption,
    JsonOption,
    SmallOption,
    ratio_text,
    rotated,
    scratch_folder,
    spread,
    write_report,
)
from ranks import World, start_world
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.profiler import ProfilerActivity, profile, record_function

import muon
import tierstore
from muon.matrices import matrices_of
from muon.newton_schulz import fastest_dtype
from muon.rounds import SharedMatrix
from muon.rules import Extras, apply_updates, own_matrices, step_adamw, write_inputs

SHARDED, AGAIN, ALL_GATHER, REPLICATED = (
    "sharded",
    "sharded again",
    "sharded, all-gather",
    "replicated",
)

# Part of a step -> its ranges in the profiler.
SPLIT = {
    "page": ("tierstore::stall", "tierstore::check", "tierstore::checksums"),
    "exchange": ("muon::gather", "muon::scatter", "reference::gather"),
    "newton_schulz": ("muon::newton_schulz", "reference::newton_schulz"),
    "apply": ("muon::momentum", "muon::apply", "muon::adamw"),
    "spread": ("tierstore::spread",),
}
PART_OF = {name: part for part, names in SPLIT.items() for name in names}
STEP = "bench::step"


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Parameters of one run. Shapes have the proportions of Llama 3.1 8B."""

    width: int
    key_width: int
    mlp_width: int
    layers: int
    vocabulary: int
    page_bytes: int
    world_sizes: tuple[int, ...]
    rounds: int


PLANS = {
    "small": Plan(
        width=64,
        key_width=16,
        mlp_width=224,
        layers=2,
        vocabulary=512,
        page_bytes=MIB // 16,
        world_sizes=(1, 2),
        rounds=2,
    ),
    "default": Plan(
        width=512,
        key_width=128,
        mlp_width=1792,
        layers=4,
        vocabulary=16032,
        page_bytes=4 * MIB,
        world_sizes=(1, 2, 4),
        rounds=9,
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One turn, in seconds."""

    step_s: float
    """Of the timed step, until the last rank has ended."""
    parts_s: dict[str, float]
    """Of the profiled step, the time of the training thread in each part; the mean of the ranks.

    Waiting for other ranks belongs to the part that waits.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One line of the result: medians over all rounds."""

    ranks: int
    case: str
    step_s: float
    parts_s: dict[str, float]
    ratio: tuple[float, ...]
    """Over "sharded" on as many ranks in the same round: extremes, quartiles, median."""
    ratio_to_one_rank: tuple[float, ...]
    """Over "sharded" on one rank."""


def make_parameters(plan: Plan, *, sharded: bool) -> dict[str, torch.nn.Parameter]:
    """Return parameters in bfloat16 with gradients, the same on all ranks."""
    shapes = {"embedding": (plan.vocabulary, plan.width)}
    for layer in range(plan.layers):
        shapes |= {
            f"{layer}.query": (plan.width, plan.width),
            f"{layer}.key": (plan.key_width, plan.width),
            f"{layer}.value": (plan.key_width, plan.width),
            f"{layer}.out": (plan.width, plan.width),
            f"{layer}.gate": (plan.mlp_width, plan.width),
            f"{layer}.up": (plan.mlp_width, plan.width),
            f"{layer}.down": (plan.width, plan.mlp_width),
        }
    mesh = init_device_mesh("cpu", (dist.get_world_size(),)) if sharded else None
    generator = torch.Generator().manual_seed(0)

    def make(shape: tuple[int, int]) -> torch.Tensor:
        tensor = torch.randn(shape, generator=generator).bfloat16()
        return tensor if mesh is None else distribute_tensor(tensor, mesh, [Shard(0)])

    parameters = {}
    for name, shape in shapes.items():
        parameters[name] = torch.nn.Parameter(make(shape))
        parameters[name].grad = make(shape)
    return parameters


def make_optimizer(
    store: tierstore.TierStore,
    parameters: Mapping[str, torch.nn.Parameter],
    ns_dtype: torch.dtype,
) -> muon.Muon:
    """Return the optimizer of these parameters."""
    matrices = [(name, p) for name, p in parameters.items() if name != "embedding"]
    groups = [
        {"params": matrices},
        {"params": [("embedding", parameters["embedding"])], "algorithm": "adamw"},
    ]
    return muon.Muon(groups, store=store, partition="by_parameter", ns_dtype=ns_dtype)


class AllGather:
    """Takes the place of the optimizer's pipeline: every rank gathers all matrices."""

    def open(
        self, pages: tierstore.pages.SteppedPages, groups: Sequence[Mapping[str, Any]], options: str
    ) -> None:
        """Do nothing: the default process group serves."""

    def step_pages(
        self,
        pages: tierstore.pages.SteppedPages,
        groups: Sequence[Mapping[str, Any]],
        steps: Mapping[str, float],
        window: int,
        extras: Extras,
    ) -> None:
        """Step all pages of a sweep."""
        for page, subgroup in zip(pages, pages.shared, strict=True):
            group = groups[page.group]
            if group["algorithm"] == "muon":
                self._step_matrices(page, subgroup, group["ns_dtype"], group, extras)
            else:
                step_adamw(page.shards, group, steps, extras.scales)

    def _step_matrices(
        self,
        page: tierstore.pages.PageView,
        subgroup: tierstore.pages.SharedSubgroup,
        dtype: torch.dtype,
        group: Mapping[str, Any],
        extras: Extras,
    ) -> None:
        matrices = [
            SharedMatrix(shape=shard.spec.shape, chunks=shard.chunks) for shard in subgroup.shards
        ]
        places = [
            (position, *matrices_of(shard.spec.shape)) for position, shard in enumerate(page.shards)
        ]
        own, inputs = own_matrices(page.shards, group, places), []
        for one in own:
            parts = [torch.empty(part.chunk.sizes, dtype=dtype) for part in one.parts]
            write_inputs(one, group, parts)
            inputs.append(parts)
        updates, _ = allgather_reference.updates(matrices, inputs, dtype)
        for one, parts in zip(own, updates, strict=True):
            apply_updates(one, group, parts, extras)


@contextlib.contextmanager
def serve(folder: Path, plan: Plan, ns_dtype: torch.dtype) -> Iterator[Any]:
    """Serve one rank: yields a function that does a turn of a case."""
    with contextlib.ExitStack() as stack:
        optimizers = {}
        for case in (SHARDED, ALL_GATHER, REPLICATED)[:: 2 if dist.get_world_size() == 1 else 1]:
            store = tierstore.TierStore(
                folder / case,
                host_memory=16 * plan.page_bytes,
                page_bytes=plan.page_bytes,
                buffers=6,
            )
            stack.enter_context(store)
            parameters = make_parameters(plan, sharded=case != REPLICATED)
            optimizer = optimizers[case] = make_optimizer(store, parameters, ns_dtype)
            if case == ALL_GATHER:
                optimizer._pipeline = AllGather()
            for _ in range(2):  # The first write of a file costs more.
                optimizer.step()
                store.synchronize()
        yield lambda case: turn(optimizers[case])


def turn(optimizer: muon.Muon) -> Turn:
    """Do a timed step and a profiled step; all ranks call this."""
    dist.barrier()
    began = time.perf_counter()
    optimizer.step()
    step_s = time.perf_counter() - began
    optimizer.store.synchronize()
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        dist.barrier()
        with record_function(STEP):
            optimizer.step()
    optimizer.store.synchronize()
    return Turn(step_s=step_s, parts_s=split(profiled))


def split(profiled: profile) -> dict[str, float]:
    """Return the seconds of each part of a profiled step, without nested parts."""
    ranges = sorted(
        (event.time_range.start, -event.time_range.end, event.name)
        for event in profiled.events()
        if event.name in PART_OF or event.name == STEP
    )
    parts = dict.fromkeys([*SPLIT, "other"], 0.0)
    around: list[tuple[float, str]] = []  # End and part of each open range.
    for start, negative_end, name in ranges:
        seconds = (-negative_end - start) / 1e6
        while around and around[-1][0] <= start:
            around.pop()
        if around:
            parts[around[-1][1]] -= seconds
        part = PART_OF.get(name, "other")
        parts[part] += seconds
        around.append((-negative_end, part))
    return parts


def together(turns: Sequence[Turn]) -> Turn:
    """Combine the turns of all ranks."""
    return Turn(
        step_s=max(turn.step_s for turn in turns),
        parts_s={
            part: statistics.mean(turn.parts_s[part] for turn in turns) for part in turns[0].parts_s
        },
    )


def take_turns(worlds: Mapping[int, World], rounds: int) -> dict[tuple[int, str], list[Turn]]:
    """Measure all cases on all numbers of ranks in turn."""
    order = [
        (ranks, case)
        for ranks in worlds
        for case in (SHARDED, AGAIN, ALL_GATHER, REPLICATED)
        if ranks > 1 or case != ALL_GATHER
    ]
    turns: dict[tuple[int, str], list[Turn]] = {case: [] for case in order}
    for index in track(range(rounds), description="steps on several ranks"):
        for ranks, case in rotated(order, index):
            measured = SHARDED if case == AGAIN else case
            turns[ranks, case].append(together(worlds[ranks].ask(measured)))
    return turns


def rows_of(turns: Mapping[tuple[int, str], Sequence[Turn]]) -> list[Row]:
    """Return the medians of all cases."""

    def ratios(taken: Sequence[Turn], bound: Sequence[Turn]) -> tuple[float, ...]:
        return spread([a.step_s / b.step_s for a, b in zip(taken, bound, strict=True)])

    return [
        Row(
            ranks=ranks,
            case=case,
            step_s=statistics.median(turn.step_s for turn in taken),
            parts_s={
                part: statistics.median(turn.parts_s[part] for turn in taken)
                for part in taken[0].parts_s
            },
            ratio=ratios(taken, turns[ranks, SHARDED]),
            ratio_to_one_rank=ratios(taken, turns[1, SHARDED]),
        )
        for (ranks, case), taken in turns.items()
    ]


def report(rows: Sequence[Row], parameters: int, ns_dtype: torch.dtype) -> Table:
    """Return the result as a table."""
    table = Table(
        title=f"{parameters / 1e6:.1f}M parameters in bfloat16, matrices exchanged and "
        f"orthogonalized in {str(ns_dtype).removeprefix('torch.')}; ms, medians (quartiles)"
    )
    for heading in ("ranks", "case", "step", *(part.replace("_", "-") for part in rows[0].parts_s)):
        table.add_column(heading, justify="left" if heading == "case" else "right")
    table.add_column("of sharded", justify="right")
    table.add_column("of one rank", justify="right")
    for row in rows:
        table.add_row(
            str(row.ranks),
            row.case,
            *(f"{1e3 * seconds:.0f}" for seconds in (row.step_s, *row.parts_s.values())),
            ratio_text(row.ratio),
            ratio_text(row.ratio_to_one_rank),
            end_section=row.case == REPLICATED,
        )
    return table


def main(
    directory: DirectoryOption = Path("."),
    small: SmallOption = False,
    json_path: JsonOption = None,
) -> None:
    """Compare steps on several ranks, and the parts of their time."""
    plan = PLANS["small" if small else "default"]
    torch.set_num_threads(1)
    ns_dtype = fastest_dtype((plan.mlp_width, plan.width), torch.device("cpu"))
    with scratch_folder(directory) as scratch, contextlib.ExitStack() as stack:
        worlds = {}
        for ranks in plan.world_sizes:
            folder = scratch / str(ranks)
            folder.mkdir()
            world = start_world(ranks, folder, serve, plan, ns_dtype)
            worlds[ranks] = stack.enter_context(world)
        turns = take_turns(worlds, plan.rounds)
    rows = rows_of(turns)
    parameters = plan.vocabulary * plan.width + plan.layers * plan.width * (
        2 * plan.width + 2 * plan.key_width + 3 * plan.mlp_width
    )
    Console(width=150).print(report(rows, parameters, ns_dtype))
    write_report(
        json_path,
        plan=asdict(plan),
        parameters=parameters,
        ns_dtype=str(ns_dtype),
        rows=[asdict(row) for row in rows],
        turns=[
            {"ranks": ranks, "case": case, "turns": [asdict(turn) for turn in taken]}
            for (ranks, case), taken in turns.items()
        ],
    )


if __name__ == "__main__":
    typer.run(main)
