"""Balance of the work of a step over ranks, computed without ranks or devices.

The matrices of a model of 32 layers are laid out, assigned to owners and cut into rounds as in a
step. Work is counted in multiplications of Newton-Schulz.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

import torch
import typer
from measuring import GIB, MIB, JsonOption, SmallOption, write_report
from rich.console import Console
from rich.progress import track
from rich.table import Table

import tierstore
from muon import newton_schulz
from muon.pipeline import ROUNDS_MAX, plan_pages
from muon.rounds import Round
from tierstore.layout.ownership import SharedParameter, partition_ranks
from tierstore.layout.parameters import ParameterSpec
from tierstore.layout.sharding import Holding, Sharded, Sharding, whole_on

LAYERS = 32
HIDDEN = 4096
KEYS = 1024
MLPS = (11008, 14336)
PAGE_BYTES = 256 * MIB
GATHER_MEMORY = 2 * GIB
PARTITIONS = ("sharded", "flat", "by_parameter")


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Parameters of one run of the program."""

    world_sizes: tuple[int, ...]
    mlps: tuple[int, ...]


PLANS = {
    "small": Plan(world_sizes=(8, 64), mlps=MLPS),
    "default": Plan(world_sizes=(8, 64, 512), mlps=MLPS),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One line of the result. Work is relative to the mean of the ranks."""

    mlp: int
    partition: str
    world_size: int
    pages: int
    rounds: int
    busiest: float
    """Work of the busiest rank."""
    bound: float
    """Lower bound of the busiest rank's work: the mean, or the largest matrix."""
    makespan: float
    """Time until the last rank ends, if sending takes no time."""


def shapes(mlp: int) -> list[tuple[int, int]]:
    """Return the matrices of all layers: q, k, v, o, gate, up, down."""
    layer = [(HIDDEN, HIDDEN), (KEYS, HIDDEN), (KEYS, HIDDEN), (HIDDEN, HIDDEN)]
    return [*layer, (mlp, HIDDEN), (mlp, HIDDEN), (HIDDEN, mlp)] * LAYERS


def subgroups(
    matrices: Sequence[tuple[int, int]], partition: str, world_size: int
) -> list[tierstore.SharedSubgroup]:
    """Lay out matrices as an optimizer's only group."""
    holding = whole_on(range(world_size))
    if partition == "sharded":
        rows = Sharding(mesh_shape=(world_size,), placements=(Sharded(dim=0),))
        holding = Holding(ranks=tuple(range(world_size)), sharding=rows)
    parameters = [
        SharedParameter(
            spec=ParameterSpec(
                name=f"{number}",
                shape=shape,
                dtype=torch.bfloat16,
                states=(("momentum_buffer", torch.bfloat16),),
                elementwise=False,
            ),
            holding=holding,
            flat=partition == "flat",
            cost=newton_schulz.cost(shape),
        )
        for number, shape in enumerate(matrices)
    ]
    return partition_ranks(0, parameters, PAGE_BYTES, world_size)


def work(
    pages: Sequence[tierstore.SharedSubgroup], rounds: Sequence[Sequence[Round]], world_size: int
) -> list[list[list[int]]]:
    """Return the work of each rank for each page: first whole matrices, then each round."""
    found = []
    for page, page_rounds in zip(pages, rounds, strict=True):
        whole = [0] * world_size
        exchanged = {index for round_ in page_rounds for index in round_.matrices}
        for index, shard in enumerate(page.shards):
            if index not in exchanged:
                (owner,) = (rank for rank, (start, stop) in enumerate(shard.ranges) if start < stop)
                whole[owner] += newton_schulz.cost(_matrix(shard.spec.shape))
        parts = [whole]
        for round_ in page_rounds:
            owned = [0] * world_size
            for index, owner in round_.owners.items():
                owned[owner] += newton_schulz.cost(round_.matrices[index].shape)
            parts.append(owned)
        found.append(parts)
    return found


def _matrix(shape: tuple[int, ...]) -> tuple[int, int]:
    rows, columns = shape
    return rows, columns


def makespan(pages: Sequence[Sequence[Sequence[int]]], world_size: int) -> int:
    """Return when the last rank ends, with the order of work of muon.pipeline.

    A round is sent. Whole matrices of its page are orthogonalized. The previous round is
    received and orthogonalized, and its updates are sent. The updates of the round before the
    previous one are received.
    """
    clocks = [0] * world_size
    rounds: list[tuple[Sequence[int], int]] = []  # Work, and when all ranks have sent the round.
    back: list[int] = []  # When all updates of a round have been sent.

    def wait(until: int) -> None:
        clocks[:] = [max(clock, until) for clock in clocks]

    def orthogonalize() -> None:
        owned, sent = rounds[len(back)]
        wait(sent)
        clocks[:] = [clock + own for clock, own in zip(clocks, owned, strict=True)]
        back.append(max(clocks))

    for whole, *exchanged in pages:
        for owned in exchanged:
            rounds.append((owned, max(clocks)))
            if owned is exchanged[0]:
                clocks[:] = [clock + own for clock, own in zip(clocks, whole, strict=True)]
            while len(back) < len(rounds) - 1:
                orthogonalize()
            if len(rounds) >= ROUNDS_MAX:
                wait(back[len(rounds) - ROUNDS_MAX])
        if not exchanged:
            clocks[:] = [clock + own for clock, own in zip(clocks, whole, strict=True)]
    while len(back) < len(rounds):
        orthogonalize()
    return max(clocks)


def compute(mlp: int, partition: str, world_size: int) -> Row:
    """Plan a step of one model on ``world_size`` ranks."""
    matrices = shapes(mlp)
    pages = subgroups(matrices, partition, world_size)
    plans = plan_pages(
        pages,
        [{"algorithm": "muon", "ns_dtype": torch.bfloat16}],
        frozenset(shard.spec.name for page in pages for shard in page.shards),
        world_size=world_size,
        gather_memory=GATHER_MEMORY,
    )
    rounds = [plan.rounds for plan in plans]
    parts = work(pages, rounds, world_size)
    loads = [sum(part[rank] for page in parts for part in page) for rank in range(world_size)]
    costs = list(map(newton_schulz.cost, matrices))
    assert sum(loads) == sum(costs)
    mean = sum(costs) / world_size
    return Row(
        mlp=mlp,
        partition=partition,
        world_size=world_size,
        pages=len(pages),
        rounds=sum(map(len, rounds)),
        busiest=max(loads) / mean,
        bound=max(mean, max(costs)) / mean,
        makespan=makespan(parts, world_size) / mean,
    )


def report(rows: list[Row]) -> Table:
    """Return the result as a table."""
    table = Table(title="Work of a step, relative to the mean of the ranks")
    for heading in ("mlp", "partition", "ranks", "pages", "rounds"):
        table.add_column(heading, justify="left" if heading == "partition" else "right")
    for heading in ("busiest", "lower bound", "makespan"):
        table.add_column(heading, justify="right")
    for row in rows:
        counts = (row.world_size, row.pages, row.rounds)
        figures = (row.busiest, row.bound, row.makespan)
        table.add_row(
            str(row.mlp), row.partition, *map(str, counts), *(f"{each:.3f}" for each in figures)
        )
    return table


def main(small: SmallOption = False, json_path: JsonOption = None) -> None:
    """Compute how evenly ranks share the work of a step."""
    plan = PLANS["small" if small else "default"]
    rows = [
        compute(mlp, partition, world_size)
        for mlp in plan.mlps
        for partition in PARTITIONS
        for world_size in track(plan.world_sizes, description=f"{mlp}, {partition}")
    ]
    Console(width=120).print(report(rows))
    write_report(json_path, plan=asdict(plan), rows=[asdict(row) for row in rows])


if __name__ == "__main__":
    typer.run(main)
