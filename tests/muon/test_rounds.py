"""Owners and rounds of matrices, planned without communication."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import replace
from fractions import Fraction
from random import Random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from muon import newton_schulz
from muon.pipeline import plan_pages
from muon.rounds import Round, SharedMatrix, assign_owners, memory_needed, plan_rounds
from tests.layout.test_ownership import PAGE_BYTES, groups
from tests.support.tilings import any_matrix, by_flat_ranges, by_rows
from tierstore.layout.chunks import Chunk
from tierstore.layout.ownership import SharedParameter, SharedSubgroup, partition_ranks

world_sizes = st.integers(1, 6)
randoms = st.randoms(use_true_random=False)
ITEMSIZE = 2


def some_matrices(world_size: int, random: Random, count: int = 8) -> list[SharedMatrix]:
    return [any_matrix(world_size, random) for _ in range(random.randrange(count))]


def elements_on(matrix: SharedMatrix, rank: int) -> int:
    return sum(chunk.sizes[0] * chunk.sizes[1] for chunk in matrix.chunks[rank])


def cost(matrix: SharedMatrix) -> int:
    """Multiplications of one step: X X^T, its square, the product with X."""
    rows, columns = min(matrix.shape), max(matrix.shape)
    return rows * rows * columns + rows * rows * rows + rows * rows * columns


# ---------------------------------------------------------------------------- owners


def test_owners_by_hand() -> None:
    whole = Chunk((0, 0), (4, 8))
    matrices = [
        by_rows((4, 4), 3),  # Rank 2 holds no part of a matrix of four rows.
        SharedMatrix(shape=(4, 8), chunks=[[whole], [], []]),
        by_rows((4, 10), 3),
        by_rows((1, 5), 3, dim=1),
    ]
    assert [newton_schulz.cost(matrix.shape) for matrix in matrices] == [192, 320, 384, 11]
    # 320 stay on rank 0, and 384 go to rank 1. With 192 more rank 0 would have 512, far above the
    # mean of 302, so 192 go to rank 2, which holds no part of the matrix; another 11 go there.
    assert assign_owners(matrices, [0, 0, 0]) == ([2, 0, 1, 2], [320, 384, 203])
    assert assign_owners(matrices, [1000, 0, 900]) == ([1, 0, 1, 1], [1320, 587, 900])
    # Rank 2 has the least load but no part of the matrix; 944 on rank 0 is close to the mean, 865.
    far = by_flat_ranges((4, 10), [20, 40])
    assert assign_owners([far], [560, 1100, 550]) == ([0], [944, 1100, 550])
    # Among equal loads the rank with the largest part owns the matrix.
    assert assign_owners([by_flat_ranges((2, 3), [1, 4])], [0, 0, 0])[0] == [1]
    assert assign_owners([], [1, 2]) == ([], [1, 2])


@given(world_sizes, randoms)
def test_costly_matrices_go_to_the_rank_with_the_least_load(
    world_size: int, random: Random
) -> None:
    matrices = some_matrices(world_size, random)
    before = [random.randrange(500) for _ in range(world_size)]
    owners, sums = assign_owners(matrices, before)
    mean = Fraction(sum(before) + sum(map(cost, matrices)), world_size)
    assigned = [index for index, matrix in enumerate(matrices) if matrix.whole_rank is None]
    # Undo assignments from the last to the first: each went to the holder with the least load, or
    # to any rank with the least load if that holder would exceed the mean by more than a tenth.
    for index in sorted(assigned, key=lambda index: (cost(matrices[index]), -index)):
        matrix, owner = matrices[index], owners[index]
        sums[owner] -= cost(matrix)
        holders = [rank for rank in range(world_size) if elements_on(matrix, rank)]
        if min(sums[rank] for rank in holders) + cost(matrix) > mean * Fraction(11, 10):
            holders = list(range(world_size))
        assert owner in holders
        least = [rank for rank in holders if sums[rank] == min(sums[r] for r in holders)]
        assert sums[owner] == sums[least[0]]
        most = max(elements_on(matrix, rank) for rank in least)
        assert owner == next(rank for rank in least if elements_on(matrix, rank) == most)
    for index in set(range(len(matrices))) - set(assigned):
        assert elements_on(matrices[index], owners[index]) == matrices[index].numel
        sums[owners[index]] -= cost(matrices[index])
    assert sums == before


def test_a_matrix_is_whole_on_one_rank_in_any_number_of_chunks() -> None:
    halves = [Chunk((0, 0), (1, 3)), Chunk((1, 0), (1, 3))]
    assert SharedMatrix(shape=(2, 3), chunks=[[], halves]).whole_rank == 1
    assert SharedMatrix(shape=(2, 3), chunks=[[halves[0]], [halves[1]]]).whole_rank is None
    assert SharedMatrix(shape=(0, 3), chunks=[[], []]).whole_rank == 0
    assert by_rows((1, 3), 2).whole_rank == 0


@pytest.mark.parametrize(
    ("chunks", "message"),
    [
        ([[Chunk((0, 0), (1, 3))], []], "must have 6 elements in total, got 3"),
        ([[Chunk((0, 0), (2, 3))], [Chunk((0, 0), (1, 1))]], "6 elements in total, got 7"),
        ([[Chunk((0, 1), (2, 3))]], r"does not lie within a matrix of shape \[2, 3\]"),
        ([[Chunk((0,), (6,))]], "does not lie within a matrix"),
    ],
)
def test_chunks_that_do_not_cover_the_matrix_are_refused(
    chunks: list[list[Chunk]], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        SharedMatrix(shape=(2, 3), chunks=chunks)


def test_matrices_over_another_number_of_ranks_are_refused() -> None:
    with pytest.raises(ValueError, match="matrix 1 lies on 3 ranks, but there are 2 loads"):
        assign_owners([by_rows((4, 4), 2), by_rows((4, 4), 3)], [0, 0])


# ---------------------------------------------------------------------------- balance


def llama(mlp: int) -> list[tuple[int, int]]:
    """The matrices of 32 layers: q, k, v, o, gate, up, down."""
    hidden, kv = 4096, 1024
    layer = [(hidden, hidden), (kv, hidden), (kv, hidden), (hidden, hidden)]
    return [*layer, (mlp, hidden), (mlp, hidden), (hidden, mlp)] * 32


def busiest(mlp: int, world_size: int) -> tuple[float, float]:
    """Load of the busiest rank, and cost of the largest matrix, over the mean load."""
    by_shape = {shape: by_rows(shape, world_size) for shape in set(llama(mlp))}
    matrices = [by_shape[shape] for shape in llama(mlp)]
    _, loads = assign_owners(matrices, [0] * world_size)
    mean = sum(cost(matrix) for matrix in matrices) / world_size
    return max(loads) / mean, max(map(cost, matrices)) / mean


@pytest.mark.parametrize("mlp", [11008, 14336])
def test_loads_are_balanced(mlp: int) -> None:
    assert busiest(mlp, 8)[0] < 1.01
    assert busiest(mlp, 64)[0] < 1.06
    # With more ranks than matrices, one matrix on a rank is optimal.
    most, largest = busiest(mlp, 512)
    assert most == largest


# ---------------------------------------------------------------------------- rounds


def needed(matrices: list[SharedMatrix], owners: list[int], rank: int) -> int:
    """Bytes that a rank needs to exchange these matrices together."""
    sent = sum(elements_on(matrix, rank) for matrix in matrices)
    owned = [
        matrix.shape[0] * matrix.shape[1]
        for matrix, owner in zip(matrices, owners, strict=True)
        if owner == rank
    ]
    received = whole = sum(owned)
    return ITEMSIZE * (sent + received + whole)


@given(world_sizes, randoms, st.floats(0, 4))
def test_rounds_are_as_large_as_memory_allows(
    world_size: int, random: Random, times: float
) -> None:
    matrices = some_matrices(world_size, random, 20)
    owners, _ = assign_owners(matrices, [0] * world_size)
    ranks = range(world_size)

    def most(indices: list[int]) -> int:
        members, theirs = [matrices[i] for i in indices], [owners[i] for i in indices]
        return max(needed(members, theirs, rank) for rank in ranks)

    shared = [index for index, matrix in enumerate(matrices) if matrix.whole_rank is None]
    smallest = max((most([index]) for index in shared), default=0)
    bytes_max = int(smallest * (1 + times))
    rounds = plan_rounds(matrices, owners, bytes_max=bytes_max, itemsize=ITEMSIZE)
    cuts = [list(round_.matrices) for round_ in rounds]
    assert list(itertools.chain.from_iterable(cuts)) == shared
    for round_ in rounds:
        assert round_.matrices == {index: matrices[index] for index in round_.matrices}
        assert round_.owners == {index: owners[index] for index in round_.matrices}
        assert most(list(round_.matrices)) <= bytes_max
    for cut, following in itertools.pairwise(cuts):
        assert most([*cut, following[0]]) > bytes_max
    for index, (matrix, owner) in enumerate(zip(matrices, owners, strict=True)):
        alone = ITEMSIZE * max(memory_needed(matrix, owner))
        assert alone == (most([index]) if index in shared else 0)


@given(st.integers(2, 6), randoms)
def test_receivers_expect_what_senders_send(world_size: int, random: Random) -> None:
    matrices = some_matrices(world_size, random)
    owners, _ = assign_owners(matrices, [0] * world_size)
    for round_ in plan_rounds(matrices, owners, bytes_max=1000, itemsize=ITEMSIZE):
        received = [round_.received(rank) for rank in range(world_size)]
        arrived: Counter[tuple[int, Chunk]] = Counter()
        for sender in range(world_size):
            sent = round_.sent(sender)
            assert len(sent) == len(received[sender]) == world_size
            for owner in range(world_size):
                assert sent[owner] == received[owner][sender]
                assert {owners[index] for index, _ in sent[owner]} <= {owner}
                arrived.update(sent[owner])
        assert arrived == Counter(
            (index, chunk)
            for index, matrix in round_.matrices.items()
            for chunks in matrix.chunks
            for chunk in chunks
        )


@given(st.integers(0, 2**32))
def test_planning_is_deterministic(seed: int) -> None:
    found = []
    for _ in range(2):
        matrices = some_matrices(4, Random(seed))
        owners, sums = assign_owners(matrices, [0, 5, 3, 5])
        found.append((owners, sums, plan_rounds(matrices, owners, bytes_max=1000, itemsize=4)))
    assert found[0] == found[1]


def test_one_rank_exchanges_nothing() -> None:
    matrices = [by_rows((4, 4), 1), by_flat_ranges((3, 5), [])]
    owners, _ = assign_owners(matrices, [0])
    assert plan_rounds(matrices, owners, bytes_max=0, itemsize=4) == []


# ---------------------------------------------------------------------------- pages


def rounds_of(subgroups: list[SharedSubgroup], world_size: int) -> list[list[Round]]:
    plans = plan_pages(
        subgroups,
        [{"algorithm": "muon", "ns_dtype": torch.bfloat16}],
        frozenset(shard.spec.name for each in subgroups for shard in each.shards),
        world_size=world_size,
        gather_memory=2**30,
    )
    return [plan.rounds for plan in plans]


@given(groups())
def test_pages_exchange_the_chunks_of_their_shards(
    drawn: tuple[int, list[SharedParameter]],
) -> None:
    """Also of those that are cut like one before."""
    world_size, parameters = drawn
    layers = [
        replace(
            p, spec=replace(p.spec, name=f"{layer}.{p.spec.name}", elementwise=False, unit=None)
        )
        for layer in range(2)
        for p in parameters
    ]
    subgroups = partition_ranks(0, layers, PAGE_BYTES, world_size)
    for subgroup, rounds in zip(subgroups, rounds_of(subgroups, world_size), strict=True):
        found = {index: matrix for each in rounds for index, matrix in each.matrices.items()}
        chunks = [tuple(map(tuple, shard.chunks)) for shard in subgroup.shards]
        is_exchanged = [sum(map(bool, ranks)) > 1 for ranks in chunks]
        assert list(found) == [index for index, is_shared in enumerate(is_exchanged) if is_shared]
        for index, matrix in found.items():
            assert matrix.shape == subgroup.shards[index].spec.shape
            assert matrix.chunks == chunks[index]
