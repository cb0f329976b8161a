"""Balance of the work of a step over ranks, computed without ranks or devices.

The matrices of a model are laid out, assigned to owners and cut into rounds as in a step. Work is
counted in multiplications of Newton-Schulz.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
import typer
from measuring import GIB, MIB, JsonOption, SmallOption, write_report
from rich.console import Console
from rich.progress import track
from rich.table import Table

import tierstore
from muon import newton_schulz
from muon.matrices import Declaration, matrices_of, unit_of
from muon.pipeline import ROUNDS_MAX, PagePlan, plan_pages, shared_matrices
from tierstore.layout.ownership import SharedParameter, partition_ranks
from tierstore.layout.parameters import ParameterSpec
from tierstore.layout.sharding import Holding, Sharded, Sharding, whole_on

PAGE_BYTES = 256 * MIB
GATHER_MEMORY = 2 * GIB

_Parameters = list[tuple[tuple[int, ...], Declaration]]
STACK: Declaration = (("stack",),)


def llama(mlp: int) -> _Parameters:
    """Return the matrices of 32 layers of hidden size 4096: q, k, v, o, gate, up, down."""
    layer = [(4096, 4096), (1024, 4096), (1024, 4096), (4096, 4096)]
    return [(shape, ()) for shape in [*layer, (mlp, 4096), (mlp, 4096), (4096, mlp)] * 32]


def qwen3_30b() -> _Parameters:
    """Return the matrices of Qwen3-30B-A3B: 48 layers of 128 experts each, gate and up stacked."""
    attention: _Parameters = [
        (shape, ()) for shape in ((4096, 2048), (512, 2048), (512, 2048), (2048, 4096))
    ]
    gate_up: Declaration = (*STACK, ("split", 1, (768, 768)))
    experts: _Parameters = [((128, 1536, 2048), gate_up), ((128, 2048, 768), STACK)]
    return [*attention, *experts] * 48


def deepseek_v3() -> _Parameters:
    """Return the matrices of DeepSeek-V3: 61 layers, 58 with 256 experts and a shared one."""
    latent = [(1536, 7168), (24576, 1536), (576, 7168), (32768, 512), (7168, 16384)]
    attention: _Parameters = [(shape, ()) for shape in latent]
    gate_up: Declaration = (*STACK, ("split", 1, (2048, 2048)))
    experts: _Parameters = [((256, 4096, 7168), gate_up), ((256, 7168, 2048), STACK)]

    def mlp(size: int) -> _Parameters:
        return [(shape, ()) for shape in ((size, 7168), (size, 7168), (7168, size))]

    return [*attention, *mlp(18432)] * 3 + [*attention, *mlp(2048), *experts] * 58


MODELS = {
    "MLP of 11008": llama(11008),
    "MLP of 14336": llama(14336),
    "Qwen3-30B-A3B": qwen3_30b(),
    "DeepSeek-V3": deepseek_v3(),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Parameters of one run of the program."""

    cases: dict[str, tuple[tuple[str, ...], tuple[int, ...]]]
    """Model -> partitions and numbers of ranks. Experts are cut at experts, which is the only
    partition of them in use."""


_ALL = ("sharded", "flat", "by_parameter")
PLANS = {
    "small": Plan(
        cases={
            "MLP of 11008": (_ALL, (8, 64)),
            "MLP of 14336": (("flat",), (64,)),
            "Qwen3-30B-A3B": (("sharded",), (64,)),
        }
    ),
    "default": Plan(
        cases={
            "MLP of 11008": (_ALL, (8, 64, 512)),
            "MLP of 14336": (_ALL, (8, 64, 512)),
            "Qwen3-30B-A3B": (("sharded",), (8, 64)),
            "DeepSeek-V3": (("sharded",), (64,)),
        }
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One line of the result. Work is relative to the mean of the ranks."""

    model: str
    partition: str
    world_size: int
    matrices: int
    pages: int
    rounds: int
    busiest: float
    """Work of the busiest rank."""
    bound: float
    """Lower bound of the busiest rank's work: the mean, or the largest matrix."""
    makespan: float
    """Time until the last rank ends, if sending takes no time."""


def subgroups(
    parameters: Sequence[tuple[int, tuple[int, ...]]],
    declaration: Declaration,
    number: int,
    partition: str,
    world_size: int,
) -> list[tierstore.pages.SharedSubgroup]:
    """Lay out the parameters of one group, each with its number in the model."""
    holding = whole_on(range(world_size))
    if partition == "sharded":
        rows = Sharding(mesh_shape=(world_size,), placements=(Sharded(dim=0),))
        holding = Holding(ranks=tuple(range(world_size)), sharding=rows)
    shared = [
        SharedParameter(
            spec=ParameterSpec(
                name=f"{position}",
                shape=shape,
                dtype=torch.bfloat16,
                states=(("momentum_buffer", torch.bfloat16),),
                elementwise=False,
                unit=unit_of(shape, declaration),
            ),
            holding=holding,
            flat=partition == "flat",
            cost=sum(newton_schulz.cost(m.shape) for m in matrices_of(shape, declaration)),
        )
        for position, shape in parameters
    ]
    return partition_ranks(number, shared, PAGE_BYTES, world_size)


def work(
    pages: Sequence[tierstore.pages.SharedSubgroup],
    plans: Sequence[PagePlan],
    groups: Sequence[dict[str, Any]],
    world_size: int,
) -> list[list[list[int]]]:
    """Return the work of each rank for each page: first whole matrices, then each round."""
    found = []
    known: dict[Any, Any] = {}
    for page, plan in zip(pages, plans, strict=True):
        whole = [0] * world_size
        exchanged = {index for round_ in plan.rounds for index in round_.matrices}
        declaration = groups[page.group]["matrices"]
        matrices = [
            shared
            for shard in page.shards
            for _, shared in shared_matrices(shard, declaration, known)
        ]
        for index, matrix in enumerate(matrices):
            if index not in exchanged:
                assert matrix.whole_rank is not None
                whole[matrix.whole_rank] += newton_schulz.cost(matrix.shape)
        parts = [whole]
        for round_ in plan.rounds:
            owned = [0] * world_size
            for index, owner in round_.owners.items():
                owned[owner] += newton_schulz.cost(round_.matrices[index].shape)
            parts.append(owned)
        found.append(parts)
    return found


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


def compute(model: str, partition: str, world_size: int) -> Row:
    """Plan a step of one model on ``world_size`` ranks."""
    parameters = MODELS[model]
    by_declaration: dict[Declaration, list[tuple[int, tuple[int, ...]]]] = {}
    for position, (shape, declaration) in enumerate(parameters):
        by_declaration.setdefault(declaration, []).append((position, shape))
    groups = [
        {"algorithm": "muon", "ns_dtype": torch.bfloat16, "matrices": declaration}
        for declaration in by_declaration
    ]
    pages = [
        page
        for number, (declaration, members) in enumerate(by_declaration.items())
        for page in subgroups(members, declaration, number, partition, world_size)
    ]
    plans = plan_pages(
        pages,
        groups,
        frozenset(shard.spec.name for page in pages for shard in page.shards),
        world_size=world_size,
        gather_memory=GATHER_MEMORY,
    )
    parts = work(pages, plans, groups, world_size)
    loads = [sum(part[rank] for page in parts for part in page) for rank in range(world_size)]
    costs = [
        newton_schulz.cost(matrix.shape)
        for shape, declaration in parameters
        for matrix in matrices_of(shape, declaration)
    ]
    assert sum(loads) == sum(costs)
    mean = sum(costs) / world_size
    return Row(
        model=model,
        partition=partition,
        world_size=world_size,
        matrices=len(costs),
        pages=len(pages),
        rounds=sum(len(plan.rounds) for plan in plans),
        busiest=max(loads) / mean,
        bound=max(mean, max(costs)) / mean,
        makespan=makespan(parts, world_size) / mean,
    )


def report(rows: list[Row]) -> Table:
    """Return the result as a table."""
    table = Table(title="Work of a step, relative to the mean of the ranks")
    for heading in ("model", "partition"):
        table.add_column(heading)
    for heading in ("ranks", "matrices", "pages", "rounds"):
        table.add_column(heading, justify="right")
    for heading in ("busiest", "lower bound", "makespan"):
        table.add_column(heading, justify="right")
    for row in rows:
        counts = (row.world_size, row.matrices, row.pages, row.rounds)
        figures = (row.busiest, row.bound, row.makespan)
        table.add_row(
            row.model, row.partition, *map(str, counts), *(f"{each:.3f}" for each in figures)
        )
    return table


def main(small: SmallOption = False, json_path: JsonOption = None) -> None:
    """Compute how evenly ranks share the work of a step."""
    plan = PLANS["small" if small else "default"]
    rows = [
        compute(model, partition, world_size)
        for model, (partitions, world_sizes) in plan.cases.items()
        for partition in partitions
        for world_size in track(world_sizes, description=f"{model}, {partition}")
    ]
    Console(width=120).print(report(rows))
    write_report(json_path, plan=asdict(plan), rows=[asdict(row) for row in rows])


if __name__ == "__main__":
    typer.run(main)
