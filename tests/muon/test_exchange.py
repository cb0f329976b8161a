"""Exchange of matrices over a simulated wire and between real ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from random import Random
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from muon.exchange import Exchange, Parts, pack, unpack
from muon.rounds import Round, SharedMatrix, assign_owners, plan_rounds
from tests.rank_programs import exchange
from tests.rank_programs.exchange import Outcome
from tests.support.rank_pool import RankPool
from tests.support.tilings import any_matrix, by_rows
from tierstore.layout.chunks import Chunk


class Wire:
    """Process group of all ranks in one process, with messages as late as possible.

    A collective transfers its data only when some rank waits for it.
    """

    def __init__(self, world_size: int) -> None:
        self.elements_sent = [0] * world_size
        self._started: list[list[dict[str, Any]]] = [[] for _ in range(world_size)]
        self._arrived = 0

    def exchange(self, rank: int) -> Exchange:
        group: Any = (self, rank)
        return Exchange(group, wait=self._wait, device=torch.device("cpu"))

    def start(self, rank: int, **call: Any) -> Any:
        self._started[rank].append(call)
        return len(self._started[rank])

    def _wait(self, number: Any) -> None:
        while self._arrived < number:
            # Fails unless every rank has started the collective.
            calls = [started[self._arrived] for started in self._started]
            for sender, call in enumerate(calls):
                parts = call["input"].split(call["input_counts"])
                for receiver, part in enumerate(parts):
                    outputs = calls[receiver]["output"].split(calls[receiver]["output_counts"])
                    outputs[sender].copy_(part)
                    self.elements_sent[sender] += part.numel() if sender != receiver else 0
            self._arrived += 1


def start_on_wire(
    output: torch.Tensor,
    input_: torch.Tensor,
    output_counts: list[int],
    input_counts: list[int],
    group: tuple[Wire, int],
    async_op: bool,
) -> Any:
    assert async_op
    wire, rank = group
    return wire.start(
        rank, output=output, input=input_, output_counts=output_counts, input_counts=input_counts
    )


@contextmanager
def wires() -> Iterator[Callable[[int], Wire]]:
    with (
        mock.patch.object(dist, "get_rank", lambda group: group[1]),
        mock.patch.object(dist, "all_to_all_single", start_on_wire),
    ):
        yield Wire


def planned(matrices: list[SharedMatrix], bytes_max: int, itemsize: int = 4) -> list[Round]:
    owners, _ = assign_owners(matrices, [0] * len(matrices[0].chunks))
    return plan_rounds(matrices, owners, bytes_max=bytes_max, itemsize=itemsize)


def fake_update(matrix: torch.Tensor) -> torch.Tensor:
    """A function of the whole matrix, returned as a transposed view."""
    return (2 * matrix.T + matrix.sum()).contiguous().T


def averages_of(matrix: torch.Tensor) -> torch.Tensor:
    """Float32 numbers that no narrower dtype has, (rows, 1)."""
    return matrix.float().sum(dim=1, keepdim=True) / 3


class CheckedRound:
    """A round on all ranks, as steps that check the results on each rank."""

    def __init__(
        self,
        round_: Round,
        exchanges: list[Exchange],
        wholes: list[torch.Tensor],
        with_averages: bool = False,
    ) -> None:
        self._round, self._wholes, self._with_averages = round_, wholes, with_averages
        self.parts: list[Parts] = []
        stages = [
            exchange.stages(
                round_,
                wholes[0].dtype,
                with_averages=with_averages,
                write_inputs=partial(self._write_inputs, rank),
                orthogonalize=partial(self._gathered, rank),
                apply_updates=partial(self._check_updates, rank),
            )
            for rank, exchange in enumerate(exchanges)
        ]
        self.steps = 3 * [lambda: [next(rank_stages, None) for rank_stages in stages]]

    def _chunks(self, rank: int, parts: Parts) -> Iterator[tuple[int, torch.Tensor, Chunk]]:
        assert list(parts) == list(self._round.matrices)
        for index, views in parts.items():
            chunks = self._round.matrices[index].chunks[rank]
            for view, chunk in zip(views, chunks, strict=True):
                yield index, view, chunk

    def _averages(self, rank: int, rows: Parts) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """The averages on the wire, and those that a part of the matrix has in the first stage."""
        for index, wire, chunk in self._chunks(rank, rows):
            if self._with_averages:
                first, count = chunk.offsets[0], chunk.sizes[0]
                yield wire, averages_of(self._wholes[index])[first : first + count]
            else:
                assert wire.numel() == 0

    def _write_inputs(self, rank: int, parts: Parts, rows: Parts) -> None:
        self.parts.append(parts)
        for index, view, chunk in self._chunks(rank, parts):
            view.copy_(chunk.select(self._wholes[index]))
        for wire, averages in self._averages(rank, rows):
            pack(averages, wire)

    def _gathered(
        self, rank: int, matrices: list[torch.Tensor], averages: list[torch.Tensor]
    ) -> list[torch.Tensor]:
        owned = [index for index, owner in self._round.owners.items() if owner == rank]
        for index, of_rows in zip(owned, averages, strict=True):
            if self._with_averages:
                assert torch.equal(of_rows, averages_of(self._wholes[index]))
            of_rows.mul_(-7)
        for index, matrix in zip(owned, matrices, strict=True):
            assert torch.equal(matrix, self._wholes[index])
            assert matrix.dtype == self._wholes[index].dtype
            assert matrix.is_contiguous()
            assert matrix.data_ptr() % 64 == 0
        updates = [fake_update(matrix) for matrix in matrices]
        for matrix in matrices:
            matrix.fill_(-1)  # Matrices may be overwritten.
        return updates

    def _check_updates(self, rank: int, parts: Parts, rows: Parts) -> None:
        for wire, averages in self._averages(rank, rows):
            returned = torch.empty_like(averages)
            unpack(wire, returned)
            assert torch.equal(returned, averages * -7)
        for index, view, chunk in self._chunks(rank, parts):
            assert torch.equal(view, chunk.select(fake_update(self._wholes[index])))
            view.fill_(-2)  # The memory belongs to this round until its end.


@given(
    st.integers(2, 6),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float64]),
    st.booleans(),
    st.randoms(use_true_random=False),
)
def test_matrices_are_gathered_and_updates_return(
    world_size: int, dtype: torch.dtype, with_averages: bool, random: Random
) -> None:
    """Several rounds are in flight at random stages."""
    matrices = [any_matrix(world_size, random) for _ in range(random.randrange(1, 12))]
    bytes_max = 3 * dtype.itemsize * max(matrix.numel for matrix in matrices)
    generator = torch.Generator().manual_seed(random.randrange(2**32))
    wholes = [torch.randn(matrix.shape, generator=generator).to(dtype) for matrix in matrices]
    with wires() as make_wire:
        wire = make_wire(world_size)
        exchanges = [wire.exchange(rank) for rank in range(world_size)]
        left = [
            CheckedRound(round_, exchanges, wholes, with_averages).steps
            for round_ in planned(matrices, bytes_max, dtype.itemsize)
        ]
        while left:
            round_ = random.choice(left[:3])
            round_.pop(0)()
            left = [steps for steps in left if steps]
    for rank, used in enumerate(exchanges):
        assert used.bytes_sent == dtype.itemsize * wire.elements_sent[rank]


def addresses_of(rounds: list[CheckedRound]) -> list[int]:
    """Return where the parts of each rank are in memory."""
    parts = [next(iter(parts.values()))[0] for round_ in rounds for parts in round_.parts]
    return [part.untyped_storage().data_ptr() for part in parts]


def test_memory_of_a_round_is_reused_by_the_next() -> None:
    small, large = by_rows((4, 4), 2), by_rows((8, 8), 2)
    with wires() as make_wire:
        wire = make_wire(2)
        exchanges = [wire.exchange(rank) for rank in range(2)]

        def addresses(matrix: SharedMatrix) -> list[int]:
            wholes = [torch.zeros(matrix.shape)]
            checked = CheckedRound(planned([matrix], 10000)[0], exchanges, wholes)
            for step in checked.steps:
                step()
            return addresses_of([checked])

        first = addresses(large)
        assert addresses(small) == first
        assert addresses(large) == first


def test_rounds_in_flight_share_no_memory() -> None:
    """Dtypes differ; the memory of an ended round serves a round of another dtype."""
    round_ = planned([by_rows((8, 8), 2)], 10000)[0]
    with wires() as make_wire:
        wire = make_wire(2)
        exchanges = [wire.exchange(rank) for rank in range(2)]

        def begun(dtypes: list[torch.dtype]) -> list[CheckedRound]:
            rounds = [CheckedRound(round_, exchanges, [torch.ones(8, 8).to(d)]) for d in dtypes]
            for checked in rounds:
                checked.steps[0]()
            return rounds

        rounds = begun([torch.float32, torch.bfloat16, torch.float32])
        first = addresses_of(rounds)
        assert len(set(first)) == 6
        for checked in rounds:
            for step in checked.steps[1:]:
                step()
        assert sorted(addresses_of(begun(3 * [torch.bfloat16]))) == sorted(first)


@pytest.mark.parametrize("world_size", [2, 3, 4, 8])
def test_elements_travel_to_their_owner_and_back_once(world_size: int) -> None:
    """With equal shards, 4 ranks send half of the bytes of an all-gather, 8 ranks a quarter."""
    matrices = [by_rows((2 * world_size, 5), world_size) for _ in range(2 * world_size)]
    elements = sum(matrix.numel for matrix in matrices)
    with wires() as make_wire:
        wire = make_wire(world_size)
        exchanges = [wire.exchange(rank) for rank in range(world_size)]
        for round_ in planned(matrices, 10**6):
            wholes = [torch.zeros(matrix.shape) for matrix in matrices]
            checked = CheckedRound(round_, exchanges, wholes)
            for step in checked.steps:
                step()
    sent = [exchange.bytes_sent for exchange in exchanges]
    assert len(set(sent)) == 1
    assert sum(sent) * world_size == 2 * 4 * elements * (world_size - 1)
    all_gathered = 4 * elements * (world_size - 1)
    assert sum(sent) < all_gathered or world_size == 2


# ---------------------------------------------------------------------------- real ranks


@pytest.fixture(scope="module")
def outcomes(pool: RankPool) -> list[Outcome]:
    """The outcomes of all cases on all ranks."""
    return [
        outcome
        for world_size in exchange.WORLD_SIZES
        for rank_outcomes in pool.run(world_size, "tests.rank_programs.exchange:work")
        for outcome in rank_outcomes
    ]


def test_real_ranks_agree_with_an_all_gather(outcomes: list[Outcome]) -> None:
    assert len(outcomes) == sum(exchange.WORLD_SIZES) * 7 * 2 * 3
    for outcome in outcomes:
        assert outcome.differences == [], outcome
    # At least three rounds can be in flight.
    assert min(o.rounds for o in outcomes if o.case.startswith("all kinds")) > 2


def test_real_ranks_send_less_than_an_all_gather(outcomes: list[Outcome]) -> None:
    for world_size in exchange.WORLD_SIZES:
        world_outcomes = [o for o in outcomes if o.world_size == world_size]
        for case in {outcome.case for outcome in world_outcomes}:
            case_outcomes = [outcome for outcome in world_outcomes if outcome.case == case]
            sent = sum(outcome.bytes_sent for outcome in case_outcomes)
            if case.startswith("equal rows"):
                itemsize = 2 if "bfloat16" in case else 4
                elements = world_size * 2 * world_size * 6
                assert sent * world_size == 2 * itemsize * elements * (world_size - 1)
            if world_size > 2:
                assert sent < sum(o.reference_bytes for o in case_outcomes), case
