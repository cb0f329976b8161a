"""The exchange of matrices: over a wire of this process, and between real ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from random import Random
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from muon.exchange import Exchange, RoundInFlight
from muon.rounds import Round, SharedMatrix, assign_owners, plan_rounds
from tests.rank_programs import exchange
from tests.rank_programs.exchange import Outcome
from tests.support.rank_pool import RankPool
from tests.support.tilings import any_matrix, by_rows


class Wire:
    """Stands for the process group of all ranks; nothing arrives before somebody waits for it.

    Then everything that was started together does, as late as it may.
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
            # Every rank must have started it.
            calls = [started[self._arrived] for started in self._started]
            for sender, call in enumerate(calls):
                parts = call["input"].split(call["input_counts"])
                for receiver, part in enumerate(parts):
                    places = calls[receiver]["output"].split(calls[receiver]["output_counts"])
                    places[sender].copy_(part)
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


def update_of(matrix: torch.Tensor) -> torch.Tensor:
    """Any function of a whole matrix, returned as a transposed view."""
    return (2 * matrix.T + matrix.sum()).contiguous().T


class Checked:
    """A round on all ranks, whose next step is checked on each of them."""

    def __init__(self, round_: Round, exchanges: list[Exchange], wholes: list[torch.Tensor]):
        self._round, self._wholes = round_, wholes
        self._in_flight: list[RoundInFlight] = []
        self.steps = [
            lambda: self._in_flight.extend(
                each.begin(round_, wholes[0].dtype) for each in exchanges
            ),
            self._send,
            self._gather_and_send_back,
            self._check_updates,
        ]

    def _send(self) -> None:
        for rank, each in enumerate(self._in_flight):
            assert list(each.inputs) == list(self._round.matrices)
            for index, views in each.inputs.items():
                chunks = self._round.matrices[index].chunks[rank]
                for view, chunk in zip(views, chunks, strict=True):
                    view.copy_(chunk.select(self._wholes[index]))
            each.send_inputs()

    def _gather_and_send_back(self) -> None:
        for rank, each in enumerate(self._in_flight):
            gathered = each.receive_matrices()
            owned = [index for index, owner in self._round.owners.items() if owner == rank]
            assert list(gathered) == owned
            for index, matrix in gathered.items():
                assert torch.equal(matrix, self._wholes[index])
                assert matrix.dtype == self._wholes[index].dtype
                assert matrix.is_contiguous()
                assert matrix.data_ptr() % 64 == 0
            updates = {index: update_of(matrix) for index, matrix in gathered.items()}
            for matrix in gathered.values():
                matrix.fill_(-1)  # May be used up.
            each.send_updates(updates)

    def _check_updates(self) -> None:
        for rank, each in enumerate(self._in_flight):
            updates = each.receive_updates()
            assert list(updates) == list(self._round.matrices)
            for index, views in updates.items():
                expected = update_of(self._wholes[index])
                chunks = self._round.matrices[index].chunks[rank]
                for view, chunk in zip(views, chunks, strict=True):
                    assert torch.equal(view, chunk.select(expected))
                    view.fill_(-2)  # Theirs until they are done.
            each.release()


@settings(deadline=None)
@given(
    st.integers(2, 6),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float64]),
    st.randoms(use_true_random=False),
)
def test_matrices_come_together_and_updates_back(
    world_size: int, dtype: torch.dtype, random: Random
) -> None:
    """Several rounds in flight, each at any point of its way."""
    matrices = [any_matrix(world_size, random) for _ in range(random.randrange(1, 12))]
    bytes_max = 3 * dtype.itemsize * max(matrix.numel for matrix in matrices)
    generator = torch.Generator().manual_seed(random.randrange(2**32))
    wholes = [torch.randn(each.shape, generator=generator).to(dtype) for each in matrices]
    with wires() as make_wire:
        wire = make_wire(world_size)
        exchanges = [wire.exchange(rank) for rank in range(world_size)]
        left = [
            Checked(round_, exchanges, wholes).steps
            for round_ in planned(matrices, bytes_max, dtype.itemsize)
        ]
        while left:
            round_ = random.choice(left[:3])
            round_.pop(0)()
            left = [steps for steps in left if steps]
    for rank, made in enumerate(exchanges):
        assert made.bytes_sent == dtype.itemsize * wire.elements_sent[rank]


def test_memory_of_a_round_serves_the_next() -> None:
    small, large = by_rows((4, 4), 2), by_rows((8, 8), 2)
    with wires() as make_wire:
        wire = make_wire(2)
        exchanges = [wire.exchange(rank) for rank in range(2)]

        def places(matrix: SharedMatrix) -> list[int]:
            wholes = [torch.zeros(matrix.shape)]
            checked = Checked(planned([matrix], 10000)[0], exchanges, wholes)
            for step in checked.steps:
                step()
            parts = [next(iter(each.inputs.values()))[0] for each in checked._in_flight]
            return [part.untyped_storage().data_ptr() for part in parts]

        first = places(large)
        assert places(small) == first
        assert places(large) == first


def test_rounds_in_flight_have_memory_of_their_own() -> None:
    """Whatever their dtypes are; and what a round has left serves one of another dtype."""
    round_ = planned([by_rows((8, 8), 2)], 10000)[0]

    def places(rounds: list[list[RoundInFlight]]) -> list[int]:
        inputs = [each.inputs[0][0] for in_flight in rounds for each in in_flight]
        return [each.untyped_storage().data_ptr() for each in inputs]

    with wires() as make_wire:
        wire = make_wire(2)
        exchanges = [wire.exchange(rank) for rank in range(2)]
        dtypes = [torch.float32, torch.bfloat16, torch.float32]
        rounds = [[each.begin(round_, dtype) for each in exchanges] for dtype in dtypes]
        first = places(rounds)
        assert len(set(first)) == 6
        for in_flight in rounds:
            for each in in_flight:
                each.release()
        again = [[each.begin(round_, torch.bfloat16) for each in exchanges] for _ in rounds]
        assert sorted(places(again)) == sorted(first)


@pytest.mark.parametrize("world_size", [2, 3, 4, 8])
def test_each_element_is_sent_twice_where_its_owner_lacks_it(world_size: int) -> None:
    """Equal shards: half of what an all-gather sends on 4 ranks, a quarter on 8."""
    matrices = [by_rows((2 * world_size, 5), world_size) for _ in range(2 * world_size)]
    elements = sum(matrix.numel for matrix in matrices)
    with wires() as make_wire:
        wire = make_wire(world_size)
        exchanges = [wire.exchange(rank) for rank in range(world_size)]
        for round_ in planned(matrices, 10**6):
            checked = Checked(round_, exchanges, [torch.zeros(each.shape) for each in matrices])
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
    """What real ranks found in every case."""
    return [
        outcome
        for world_size in exchange.WORLD_SIZES
        for of_rank in pool.run(world_size, "tests.rank_programs.exchange:work")
        for outcome in of_rank
    ]


def test_real_ranks_find_what_an_all_gather_gives(outcomes: list[Outcome]) -> None:
    assert len(outcomes) == sum(exchange.WORLD_SIZES) * 7 * 2 * 3
    for outcome in outcomes:
        assert outcome.differences == [], outcome
    # Enough to have three in flight.
    assert min(each.rounds for each in outcomes if each.case.startswith("all kinds")) > 2


def test_real_ranks_send_less_than_an_all_gather(outcomes: list[Outcome]) -> None:
    for world_size in exchange.WORLD_SIZES:
        of_world = [each for each in outcomes if each.world_size == world_size]
        for case in {each.case for each in of_world}:
            mine = [each for each in of_world if each.case == case]
            sent = sum(each.bytes_sent for each in mine)
            if case.startswith("equal rows"):
                itemsize = 2 if "bfloat16" in case else 4
                elements = world_size * 2 * world_size * 6
                assert sent * world_size == 2 * itemsize * elements * (world_size - 1)
            if world_size > 2:
                assert sent < sum(each.reference_bytes for each in mine), case
