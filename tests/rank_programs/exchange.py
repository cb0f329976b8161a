"""Ranks that exchange matrices over gloo and compare with the all-gather reference."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from random import Random

import torch
import torch.distributed as dist

from bench import allgather_reference
from muon import newton_schulz
from muon.exchange import Exchange, Parts
from muon.rounds import Round, SharedMatrix, assign_owners, plan_rounds
from tests.support.tilings import any_matrix, by_flat_ranges, by_rectangles, by_rows

WORLD_SIZES = (2, 3, 4)
DTYPES = (torch.bfloat16, torch.float32)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Result of one rank that exchanged the matrices of a case."""

    world_size: int
    rank: int
    case: str
    rounds: int
    differences: list[str]
    bytes_sent: int
    reference_bytes: int


def cases(world_size: int) -> dict[str, list[SharedMatrix]]:
    random = Random(world_size)
    return {
        "equal rows": [by_rows((2 * world_size, 6), world_size) for _ in range(world_size)],
        "uneven rows": [
            by_rows((rows, 5), world_size) for rows in (1, 2, 3, world_size + 1, 7, 13, 33)
        ],
        "columns": [by_rows((6, columns), world_size, dim=1) for columns in (3, 5, 8)],
        "flat ranges": [
            by_flat_ranges((7, 9), [11 + 5 * index for index in range(world_size - 1)]),
            by_flat_ranges((70, 33), [1000] * (world_size - 1)),
        ],
        "rectangles": [by_rectangles((12, 20), world_size, random) for _ in range(9)],
        "a rank without a part": [
            SharedMatrix(shape=matrix.shape, chunks=[*matrix.chunks, []])
            for matrix in (by_rows((8, 8), world_size - 1), by_rows((3, 4), world_size - 1))
        ],
        "all kinds": [any_matrix(world_size, random) for _ in range(16)],
    }


def work() -> list[Outcome]:
    """Exchange the matrices of all cases on one rank; return one outcome for each."""
    return [
        outcome
        for name, matrices in cases(dist.get_world_size()).items()
        for dtype in DTYPES
        for outcome in _exchange(f"{name}, {dtype}", matrices, dtype)
    ]


def _exchange(case: str, matrices: Sequence[SharedMatrix], dtype: torch.dtype) -> list[Outcome]:
    """Exchange matrices with one, two and three rounds in flight."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    group = dist.group.WORLD
    assert group is not None
    generator = torch.Generator().manual_seed(len(matrices))
    wholes = [torch.randn(matrix.shape, generator=generator).to(dtype) for matrix in matrices]
    owners, _ = assign_owners(matrices, [0] * world_size)
    bytes_max = 3 * dtype.itemsize * max(matrix.numel for matrix in matrices)
    rounds = plan_rounds(matrices, owners, bytes_max=bytes_max, itemsize=dtype.itemsize)
    exchanged = [index for round_ in rounds for index in round_.matrices]
    inputs = [
        [chunk.select(wholes[index]) for chunk in matrices[index].chunks[rank]]
        for index in exchanged
    ]
    expected, reference_bytes = allgather_reference.updates(
        [matrices[index] for index in exchanged], inputs, dtype
    )
    expected_updates = dict(zip(exchanged, expected, strict=True))
    matrix_inputs = dict(zip(exchanged, inputs, strict=True))

    def begin(exchange: Exchange, round_: Round, differences: list[str]) -> Iterator[None]:
        def write_inputs(parts: Parts, _: Parts) -> None:
            for index, views in parts.items():
                for view, part in zip(views, matrix_inputs[index], strict=True):
                    view.copy_(part)

        def updates(gathered: list[torch.Tensor], _: list[torch.Tensor]) -> list[torch.Tensor]:
            for index, whole in zip(round_.owned(rank), gathered, strict=True):
                if not torch.equal(whole, wholes[index]):
                    differences.append(f"matrix {index}")
            return newton_schulz.orthogonalize_all(gathered, batched=False)

        def check_updates(parts: Parts, _: Parts) -> None:
            for index, views in parts.items():
                for view, part in zip(views, expected_updates[index], strict=True):
                    if not torch.equal(view, part):
                        differences.append(f"update of matrix {index}")

        stages = exchange.stages(
            round_,
            dtype,
            with_averages=False,
            write_inputs=write_inputs,
            orthogonalize=updates,
            apply_updates=check_updates,
        )
        next(stages)
        return stages

    outcomes = []
    for depth in (1, 2, 3):
        exchange = Exchange(group, wait=lambda work: work.wait(), device=torch.device("cpu"))
        differences: list[str] = []
        waiting: deque[Iterator[None]] = deque()
        for round_ in rounds:
            waiting.append(begin(exchange, round_, differences))
            if len(waiting) == depth:
                assert len(list(waiting.popleft())) == 1
        while waiting:
            assert len(list(waiting.popleft())) == 1
        outcomes.append(
            Outcome(
                world_size=world_size,
                rank=rank,
                case=f"{case}, {depth} in flight",
                rounds=len(rounds),
                differences=differences,
                bytes_sent=exchange.bytes_sent,
                reference_bytes=reference_bytes,
            )
        )
    return outcomes
