from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.rank_programs import sharding
from tests.rank_programs.sharding import Placed
from tests.support.rank_pool import RankPool
from tierstore.layout.chunks import Chunk
from tierstore.layout.sharding import (
    HeldChunk,
    Sharded,
    Sharding,
    held_chunks,
    local_shape,
    owned_chunks,
    with_bounds,
)


def positions(shape: tuple[int, ...]) -> torch.Tensor:
    """A tensor that holds the flat position of each of its elements."""
    return torch.arange(math.prod(shape)).reshape(shape)


def coordinates(sharding: Sharding) -> list[tuple[int, ...]]:
    return list(itertools.product(*map(range, sharding.mesh_shape)))


def assert_held(
    shape: tuple[int, ...], sharding: Sharding, coordinate: tuple[int, ...], local: torch.Tensor
) -> None:
    """The local tensor, of positions in the whole one, is what is said of it."""
    held = held_chunks(shape, sharding, coordinate)
    assert sum(chunk.whole.numel for chunk in held) == local.numel()
    assert all(chunk.whole.numel for chunk in held)
    for chunk in held:
        whole = chunk.whole.select(positions(shape))
        assert torch.equal(chunk.local.select(local), whole)
    # In row-major order of the local tensor.
    assert [chunk.local.offsets for chunk in held] == sorted(c.local.offsets for c in held)
    if local.numel():
        assert local_shape(shape, sharding, coordinate) == tuple(local.shape)
    assert math.prod(local_shape(shape, sharding, coordinate)) == local.numel()


# ---------------------------------------------------------------------------- arithmetic


def torch_chunk(tensor: torch.Tensor, count: int, index: int, dim: int) -> torch.Tensor:
    """One of the shards of torch.chunk, which gives fewer where there are not enough rows."""
    shards = torch.chunk(tensor, count, dim)
    return shards[index] if index < len(shards) else tensor.narrow(dim, 0, 0)


@st.composite
def cases(draw: st.DrawFn) -> tuple[tuple[int, ...], Sharding, list[int]]:
    """A shape, a sharding, and the order in which dimensions of the mesh do their cuts."""
    shape = tuple(draw(st.lists(st.integers(0, 9), max_size=3)))
    mesh_shape = tuple(draw(st.lists(st.integers(1, 4), max_size=3)))
    dims = st.sampled_from([None, *range(len(shape))])
    cut = [draw(dims) for _ in mesh_shape]
    order = draw(st.permutations(range(len(mesh_shape))))
    placements: list[Sharded | None] = []
    for mesh_dim, dim in enumerate(cut):
        if dim is None:
            placements.append(None)
            continue
        # What a split factor is said to mean: later in the mesh, but cut before.
        before = order[: order.index(mesh_dim)]
        earlier = [mesh_shape[d] for d in before if d > mesh_dim and cut[d] == dim]
        placements.append(Sharded(dim=dim, split_factor=math.prod(earlier)))
    return shape, Sharding(mesh_shape=mesh_shape, placements=tuple(placements)), order


def locals_of(
    shape: tuple[int, ...], sharding: Sharding, order: list[int]
) -> dict[tuple[int, ...], torch.Tensor]:
    """The local tensor of each rank, cut by torch.chunk."""
    found = {}
    for coordinate in coordinates(sharding):
        local = positions(shape)
        for mesh_dim in order:
            placement = sharding.placements[mesh_dim]
            if isinstance(placement, Sharded):
                size, index = sharding.mesh_shape[mesh_dim], coordinate[mesh_dim]
                local = torch_chunk(local, size, index, placement.dim)
        found[coordinate] = local
    return found


def assert_sound(
    shape: tuple[int, ...], sharding: Sharding, locals_: dict[tuple[int, ...], torch.Tensor]
) -> None:
    """The parts that ranks hold and own equal their local tensors."""
    for coordinate, local in locals_.items():
        assert_held(shape, sharding, coordinate, local)
    held = Counter(position for local in locals_.values() for position in local.flatten().tolist())
    replicas = math.prod(
        size
        for size, placement in zip(sharding.mesh_shape, sharding.placements, strict=True)
        if placement is None
    )
    assert held == dict.fromkeys(range(math.prod(shape)), replicas)
    # Which coordinates differ along replicated dimensions alone, in row-major order.
    sharing = defaultdict(list)
    for coordinate in sorted(locals_):
        pairs = zip(coordinate, sharding.placements, strict=True)
        fixed = tuple(index for index, placement in pairs if isinstance(placement, Sharded))
        sharing[fixed].append(coordinate)
    for ranks in sharing.values():
        assert len(ranks) == replicas
        for replica, coordinate in enumerate(ranks):
            local = locals_[coordinate]
            numel = local.numel()
            start, stop = numel * replica // replicas, numel * (replica + 1) // replicas
            owned = owned_chunks(shape, sharding, coordinate)
            elements = [chunk.local.select(local).flatten() for chunk in owned]
            found = sorted(torch.cat(elements).tolist()) if elements else []
            assert found == sorted(local.flatten().tolist()[start:stop])
            firsts = [chunk.local.offsets for chunk in owned]
            assert firsts == sorted(firsts)
            held_here = held_chunks(shape, sharding, coordinate)
            for chunk in owned:
                assert chunk.whole.numel
                whole = chunk.whole.select(positions(shape))
                assert torch.equal(chunk.local.select(local), whole)
                assert any(contains(holding, chunk) for holding in held_here)


def contains(held: HeldChunk, owned: HeldChunk) -> bool:
    """True if a chunk lies in another, in the whole tensor and in the local one."""
    return all(
        outer_at <= inner_at and inner_at + inner_size <= outer_at + outer_size
        for outer, inner in ((held.whole, owned.whole), (held.local, owned.local))
        for outer_at, outer_size, inner_at, inner_size in zip(
            outer.offsets, outer.sizes, inner.offsets, inner.sizes, strict=True
        )
    )


@settings(max_examples=300)
@given(cases())
def test_ranks_hold_what_torch_chunk_gives(
    case: tuple[tuple[int, ...], Sharding, list[int]],
) -> None:
    shape, sharding, order = case
    assert_sound(shape, sharding, locals_of(shape, sharding, order))


@given(st.lists(st.integers(0, 9), min_size=1, max_size=3), st.data())
def test_a_strided_shard_of_many_runs(sizes: list[int], data: st.DataObject) -> None:
    """As a tensor that was cut elsewhere before, and then gathered over there."""
    shape = tuple(sizes)
    dims = data.draw(st.permutations(range(len(shape))))[:2]
    mesh_shape = tuple(data.draw(st.integers(1, 4)) for _ in dims)
    factors = [data.draw(st.integers(1, 5)) for _ in dims]
    replicas = data.draw(st.integers(1, 3))
    sharding = Sharding(
        mesh_shape=(*mesh_shape, replicas),
        placements=(
            *(Sharded(dim=d, split_factor=f) for d, f in zip(dims, factors, strict=True)),
            None,
        ),
    )
    found = {}
    for coordinate in coordinates(sharding):
        local = positions(shape)
        for dim, factor, size, index in zip(dims, factors, mesh_shape, coordinate, strict=False):
            pieces = [torch_chunk(local, factor, piece, dim) for piece in range(factor)]
            local = torch.cat([torch_chunk(piece, size, index, dim) for piece in pieces], dim)
        found[coordinate] = local
    assert_sound(shape, sharding, found)


def rows_on(*mesh_shape: int, split_factor: int = 1) -> Sharding:
    """Rows cut along the first dimension of the mesh, and whole along the others."""
    first = Sharded(dim=0, split_factor=split_factor)
    others = [None] * (len(mesh_shape) - 1)
    return Sharding(mesh_shape=mesh_shape, placements=(first, *others))


def both(whole: Chunk, local: tuple[int, ...]) -> HeldChunk:
    return HeldChunk(whole=whole, local=Chunk(local, whole.sizes))


def test_uneven_rows_by_hand() -> None:
    found = [held_chunks((5, 2), rows_on(4), (rank,)) for rank in range(4)]
    assert found == [
        [both(Chunk((0, 0), (2, 2)), (0, 0))],
        [both(Chunk((2, 0), (2, 2)), (0, 0))],
        [both(Chunk((4, 0), (1, 2)), (0, 0))],
        [],
    ]


def test_runs_by_hand() -> None:
    # 7 rows in pieces of 4 and 3; of each the first half.
    assert held_chunks((7, 2), rows_on(2, 2, split_factor=2), (0, 1)) == [
        both(Chunk((0, 0), (2, 2)), (0, 0)),
        both(Chunk((4, 0), (2, 2)), (2, 0)),
    ]
    # Of those 8 elements the second half.
    assert owned_chunks((7, 2), rows_on(2, 2, split_factor=2), (0, 1)) == [
        both(Chunk((4, 0), (2, 2)), (2, 0))
    ]


def test_replicas_share_in_the_middle_of_a_row() -> None:
    # Rows 0 and 1 of three elements each, among four replicas: 1, 2, 1 and 2 elements.
    found = [owned_chunks((4, 3), rows_on(2, 4), (0, replica)) for replica in range(4)]
    assert found == [
        [both(Chunk((0, 0), (1, 1)), (0, 0))],
        [both(Chunk((0, 1), (1, 2)), (0, 1))],
        [both(Chunk((1, 0), (1, 1)), (1, 0))],
        [both(Chunk((1, 1), (1, 2)), (1, 1))],
    ]


def test_fsdp_over_tensor_parallel_by_hand() -> None:
    """Rows 0 to 3 and 4 to 6 first, and each of those among three ranks."""
    placements = (Sharded(dim=0, split_factor=2), Sharded(dim=0))
    sharding = Sharding(mesh_shape=(3, 2), placements=placements)
    found = {at: held_chunks((7,), sharding, at) for at in coordinates(sharding)}
    rows = {at: [chunk.whole for chunk in held] for at, held in found.items()}
    assert rows == {
        (0, 0): [Chunk((0,), (2,))],
        (1, 0): [Chunk((2,), (2,))],
        (2, 0): [],
        (0, 1): [Chunk((4,), (1,))],
        (1, 1): [Chunk((5,), (1,))],
        (2, 1): [Chunk((6,), (1,))],
    }


def test_runs_that_follow_each_other_are_one() -> None:
    # Pieces of one row each, all of them on the first of two ranks.
    assert held_chunks((3,), rows_on(2, split_factor=4), (0,)) == [both(Chunk((0,), (3,)), (0,))]
    assert held_chunks((3,), rows_on(2, split_factor=4), (1,)) == []


def test_a_mesh_dimension_of_one_rank_cuts_nothing() -> None:
    sharding = Sharding(
        mesh_shape=(2, 1), placements=(Sharded(dim=0, split_factor=2), Sharded(dim=0))
    )
    found = [held_chunks((4,), sharding, (rank, 0)) for rank in range(2)]
    assert found == [
        [both(Chunk((0,), (1,)), (0,)), both(Chunk((2,), (1,)), (1,))],
        [both(Chunk((1,), (1,)), (0,)), both(Chunk((3,), (1,)), (1,))],
    ]


def test_sizes_beyond_32_bits() -> None:
    (chunk,) = owned_chunks((2**33, 2**10), rows_on(2, 2), (1, 1))
    assert chunk == both(Chunk((3 * 2**31, 0), (2**31, 2**10)), (2**31, 0))


def test_a_plain_tensor_lies_on_a_mesh_without_dimensions() -> None:
    alone = Sharding(mesh_shape=(), placements=())
    for shape in [(), (3, 2)]:
        whole = both(Chunk((0,) * len(shape), shape), (0,) * len(shape))
        assert held_chunks(shape, alone, ()) == owned_chunks(shape, alone, ()) == [whole]


@pytest.mark.parametrize(
    ("mesh_shape", "factors"),
    [((2, 2), (3, 1)), ((2, 2), (4, 1)), ((2, 2), (1, 2)), ((2, 3, 2), (4, 1, 1))],
)
def test_split_factors_that_tell_nothing_are_refused(
    mesh_shape: tuple[int, ...], factors: tuple[int, ...]
) -> None:
    placements = tuple(Sharded(dim=1, split_factor=factor) for factor in factors)
    with pytest.raises(ValueError, match="the indices of dimension 1 that a rank holds") as caught:
        Sharding(mesh_shape=mesh_shape, placements=placements)
    assert f"split_factor={max(factors)}" in str(caught.value)


@pytest.mark.parametrize(
    ("mesh_shape", "placements", "message"),
    [
        ((2,), (), "needs one placement"),
        ((), (None,), "needs one placement"),
        ((2, 0), (None, None), "needs a rank"),
    ],
)
def test_impossible_meshes_are_refused(
    mesh_shape: tuple[int, ...], placements: tuple[None, ...], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        Sharding(mesh_shape=mesh_shape, placements=placements)


def test_impossible_cuts_are_refused() -> None:
    with pytest.raises(ValueError, match="dim must be counted from the first"):
        Sharded(dim=-1)
    with pytest.raises(ValueError, match="split_factor must be at least 1"):
        Sharded(dim=0, split_factor=0)


@pytest.mark.parametrize("function", [local_shape, held_chunks, owned_chunks])
def test_what_does_not_fit_mesh_or_tensor_is_refused(function: Callable[..., Any]) -> None:
    for coordinate in [(), (2,), (-1,), (0, 0)]:
        with pytest.raises(ValueError, match=r"does not lie within a mesh of shape \[2\]"):
            function((4,), rows_on(2), coordinate)
    with pytest.raises(ValueError, match=r"shape \[\] has no dimension for Sharded\(dim=0"):
        function((), rows_on(2), (0,))


# ---------------------------------------------------------------------------- real ranks


@pytest.fixture(scope="module")
def placed(pool: RankPool) -> list[Placed]:
    """The part of every tensor of every program that a real rank held."""
    return [
        placed
        for world_size in sharding.WORLDS
        for of_rank in pool.run(world_size, "tests.rank_programs.sharding:place")
        for placed in of_rank
    ]


@pytest.mark.long
def test_real_ranks_hold_what_is_said(placed: list[Placed]) -> None:
    tensors: dict[tuple[int, str, tuple[int, ...], Sharding], dict[tuple[int, ...], torch.Tensor]]
    tensors = defaultdict(dict)
    for one in placed:
        local = torch.tensor(one.local_values, dtype=torch.int64).reshape(one.local_shape)
        ranks = tensors[one.world_size, one.case, one.shape, one.sharding]
        # Two ranks of one coordinate, where a mesh has not all ranks, hold the same.
        assert torch.equal(ranks.setdefault(one.coordinate, local), local)
    for (_, _, shape, held), ranks in tensors.items():
        assert sorted(ranks) == coordinates(held)
        assert_sound(shape, held, ranks)


@pytest.mark.long
def test_real_ranks_had_every_kind_of_shard(placed: list[Placed]) -> None:
    """Or the test above would show less than it seems to."""
    held = [(one, held_chunks(one.shape, one.sharding, one.coordinate)) for one in placed]
    cases = {one.case.partition(",")[0] for one, chunks in held if not chunks}
    assert cases >= {"rows", "columns", "two dimensions", "fully_shard", "tensor parallel"}
    assert {one.case for one, chunks in held if len(chunks) > 1} == {"strided"}
    strided = (Sharded(dim=0, split_factor=2), Sharded(dim=0))
    over = {one.sharding.mesh_shape for one in placed if one.sharding.placements == strided}
    assert over == {(2, 2), (3, 2)}


# ---------------------------------------------------------------------------- uneven parts


@settings(max_examples=300)
@given(st.data())
def test_uneven_parts_follow_each_other(data: st.DataObject) -> None:
    """Along any dimensions of a mesh; some hold copies."""
    shape = tuple(data.draw(st.lists(st.integers(1, 7), min_size=1, max_size=3)))
    dims = data.draw(st.lists(st.sampled_from([None, *range(len(shape))]), max_size=3))
    dims = [dim if dim not in dims[:place] else None for place, dim in enumerate(dims)]
    mesh_shape = tuple(data.draw(st.integers(1, 3)) for _ in dims)
    bounds = []
    for dim, size in zip(dims, mesh_shape, strict=True):
        extent = 0 if dim is None else shape[dim]
        cuts = st.lists(st.integers(0, extent), min_size=size - 1, max_size=size - 1)
        bounds.append([0, *sorted(data.draw(cuts)), extent])

    def part_of(coordinate: tuple[int, ...]) -> torch.Tensor:
        part = positions(shape)
        for index, dim, inner in zip(coordinate, dims, bounds, strict=True):
            if dim is not None:
                part = part.narrow(dim, inner[index], inner[index + 1] - inner[index])
        return part

    cut = tuple(None if dim is None else Sharded(dim=dim) for dim in dims)
    even = Sharding(mesh_shape=mesh_shape, placements=cut)
    locals_ = {coordinate: part_of(coordinate) for coordinate in coordinates(even)}
    # Without elements a part may have any shape.
    shapes = [part.shape if part.numel() else (0,) * len(shape) for part in locals_.values()]
    assert_sound(shape, with_bounds(even, shape, shapes), locals_)


def test_parts_that_are_not_the_whole_are_refused() -> None:
    with pytest.raises(ValueError, match="have 11 elements together, but it has 12"):
        with_bounds(rows_on(2), (12, 3), [(5, 3), (6, 3)])
    copies = Sharding(mesh_shape=(2, 1), placements=(None, Sharded(dim=0)))
    with pytest.raises(ValueError, match=r"index 0 of dimension 1 .* have \[4, 5\] elements"):
        with_bounds(copies, (12, 3), [(5, 3), (4, 3)])


@pytest.mark.parametrize(
    "placements",
    [(Sharded(dim=0), Sharded(dim=0)), (None, Sharded(dim=0, split_factor=2))],
    ids=["twice", "strided"],
)
def test_a_dimension_with_another_order_of_cuts_is_not_cut_unevenly(
    placements: tuple[Sharded | None, ...],
) -> None:
    sharding = Sharding(mesh_shape=(2, 2), placements=placements)
    with pytest.raises(ValueError, match="dimension 0 is cut several times or strided: redistr"):
        with_bounds(sharding, (12, 3), [(12, 3), (0, 3), (0, 3), (0, 3)])


def test_a_local_tensor_of_other_dimensions_is_refused() -> None:
    with pytest.raises(ValueError, match=r"the dimensions of the shape \[12, 3\]"):
        with_bounds(rows_on(2), (12, 3), [(5, 3), (21,)])
