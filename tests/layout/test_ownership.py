from __future__ import annotations

import itertools
import math
from collections import Counter
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tierstore.layout.chunks import Chunk
from tierstore.layout.ownership import (
    SharedParameter,
    SharedSubgroup,
    owned_costs,
    partition_ranks,
)
from tierstore.layout.parameters import ParameterSpec
from tierstore.layout.records import (
    RECORD_DATA_BYTES_MAX,
    record_nbytes,
)
from tierstore.layout.sharding import Holding, Sharded, Sharding, stacked, whole_on
from tierstore.layout.subgroups import Elements, cut_into_pages, record_chunks

PAGE_BYTES = 4096


def make_parameter(
    name: str,
    shape: tuple[int, ...],
    holding: Holding,
    *,
    elementwise: bool = False,
    flat: bool = False,
    cost: int | None = None,
    unit: int | None = None,
) -> SharedParameter:
    return SharedParameter(
        spec=ParameterSpec(
            name=name,
            shape=shape,
            dtype=torch.float32,
            states=(("momentum_buffer", torch.float32),),
            elementwise=elementwise,
            unit=unit,
        ),
        holding=holding,
        flat=flat,
        cost=math.prod(shape) if cost is None else cost,
    )


def holdings(world_size: int) -> st.SearchStrategy[Holding]:
    """Ways in which all ranks hold a matrix."""
    ranks = tuple(range(world_size))
    meshes = [(world_size,)]
    if world_size % 2 == 0:
        meshes += [(2, world_size // 2), (world_size // 2, 2)]
    placements = st.sampled_from([None, Sharded(dim=0), Sharded(dim=1)])

    @st.composite
    def draw_holding(draw: st.DrawFn) -> Holding:
        mesh = draw(st.sampled_from(meshes))
        sharding = Sharding(mesh_shape=mesh, placements=tuple(draw(placements) for _ in mesh))
        return Holding(ranks=ranks, sharding=sharding)

    return draw_holding()


@st.composite
def groups(draw: st.DrawFn) -> tuple[int, list[SharedParameter]]:
    world_size = draw(st.integers(1, 4))
    shapes = st.tuples(st.integers(0, 40), st.integers(0, 40))

    def draw_parameter(index: int) -> SharedParameter:
        shape, kind = draw(shapes), draw(st.sampled_from(["elementwise", "whole", "units"]))
        units = [rows for rows in range(1, shape[0] + 1) if shape[0] % rows == 0]
        return make_parameter(
            f"layers.{index}",
            shape,
            draw(holdings(world_size)),
            elementwise=kind == "elementwise",
            unit=draw(st.sampled_from(units)) if kind == "units" and units else None,
            flat=draw(st.booleans()),
        )

    return world_size, [draw_parameter(index) for index in range(draw(st.integers(0, 8)))]


def elements(chunk: Chunk) -> itertools.product[tuple[int, ...]]:
    return itertools.product(
        *(range(o, o + size) for o, size in zip(chunk.offsets, chunk.sizes, strict=True))
    )


def owned_elements(
    subgroups: list[SharedSubgroup], rank: int
) -> Counter[tuple[str, tuple[int, ...]]]:
    return Counter(
        (shard.parameter.name, element)
        for subgroup in subgroups
        for shard in subgroup.of(rank).shards
        for chunk in shard.chunks
        for element in elements(chunk)
    )


@given(groups())
def test_each_element_has_one_owner(case: tuple[int, list[SharedParameter]]) -> None:
    world_size, parameters = case
    subgroups = partition_ranks(0, parameters, PAGE_BYTES, world_size)
    owned: Counter[tuple[str, tuple[int, ...]]] = Counter()
    for rank in range(world_size):
        owned += owned_elements(subgroups, rank)
    assert owned == Counter(
        (parameter.spec.name, element)
        for parameter in parameters
        for element in itertools.product(*map(range, parameter.spec.shape))
    )


@given(groups())
def test_chunks_lie_where_the_rank_holds_them(case: tuple[int, list[SharedParameter]]) -> None:
    """A local chunk of the local tensor has the elements of the chunk of the whole tensor."""
    world_size, parameters = case
    by_name = {parameter.spec.name: parameter for parameter in parameters}
    for rank in range(world_size):
        for subgroup in partition_ranks(0, parameters, PAGE_BYTES, world_size):
            places = subgroup.places(rank)
            for shard in subgroup.of(rank).shards:
                name, shape = shard.parameter.name, shard.parameter.shape
                whole = torch.arange(math.prod(shape)).reshape(shape)
                for chunk in shard.chunks:
                    held = local_tensor(whole, by_name[name].holding, rank)
                    local = places.get((name, chunk), chunk)
                    assert torch.equal(local.select(held), chunk.select(whole))


def local_tensor(whole: torch.Tensor, holding: Holding, rank: int) -> torch.Tensor:
    """The part of a rank, cut by torch.chunk along one mesh dimension after the other."""
    position = holding.ranks.index(rank)
    for dimension, placement in enumerate(holding.sharding.placements):
        later = math.prod(holding.sharding.mesh_shape[dimension + 1 :])
        count = holding.sharding.mesh_shape[dimension]
        index = position // later % count
        if isinstance(placement, Sharded):
            size = -(-whole.size(placement.dim) // count)
            start = min(index * size, whole.size(placement.dim))
            stop = min(start + size, whole.size(placement.dim))
            whole = whole.narrow(placement.dim, start, stop - start)
    return whole


@given(groups())
def test_parameters_that_may_not_be_cut_are_in_one_subgroup(
    case: tuple[int, list[SharedParameter]],
) -> None:
    world_size, parameters = case
    subgroups = partition_ranks(0, parameters, PAGE_BYTES, world_size)
    names = [shard.parameter.spec.name for each in subgroups for shard in each.shards]
    for parameter in parameters:
        if not parameter.spec.elementwise and parameter.spec.unit is None:
            assert names.count(parameter.spec.name) == (math.prod(parameter.spec.shape) > 0)
    order = [parameter.spec.name for parameter in parameters]
    assert [order.index(name) for name in names] == sorted(order.index(name) for name in names)


@given(groups())
def test_all_parts_of_a_unit_are_in_one_subgroup(case: tuple[int, list[SharedParameter]]) -> None:
    world_size, parameters = case
    units = {one.spec.name: one.spec.unit for one in parameters if one.spec.unit is not None}
    places: dict[tuple[str, int], set[int]] = {}
    for number, subgroup in enumerate(partition_ranks(0, parameters, PAGE_BYTES, world_size)):
        for rank in range(world_size):
            for name, element in owned_elements([subgroup], rank):
                if name in units:
                    places.setdefault((name, element[0] // units[name]), set()).add(number)
    assert all(len(numbers) == 1 for numbers in places.values())


@pytest.mark.parametrize(
    ("mesh", "placements", "pages"),
    [
        ((1,), (None,), 8),
        ((4,), (None,), 8),  # Replicas: one owner for each page.
        ((4,), (Sharded(dim=0),), 2),  # Four experts on each rank.
        ((3,), (Sharded(dim=0),), 3),  # 6, 6 and 4.
        ((4,), (Sharded(dim=1),), 3),  # A third of each expert on three ranks: six fill a page.
        ((2, 2), (Sharded(dim=0), Sharded(dim=2)), 2),  # Halves of eight on each: four do.
    ],
)
def test_a_stack_of_matrices_spreads_over_pages(
    mesh: tuple[int, ...], placements: tuple[Sharded | None, ...], pages: int
) -> None:
    """16 experts of 6 x 10 elements with their momentum; two of them fill a page."""
    page_bytes = 2 * record_nbytes((2, 6, 10), torch.float32)
    world_size = math.prod(mesh)
    sharding = Sharding(mesh_shape=mesh, placements=placements)
    holding = Holding(ranks=tuple(range(world_size)), sharding=sharding)
    stack = make_parameter("experts", (16, 6, 10), holding, unit=1)
    assert len(partition_ranks(0, [stack], page_bytes, world_size)) == pages


@pytest.mark.parametrize(
    "placements", [(Sharded(dim=0), None), (None, Sharded(dim=0))], ids=["hsdp", "hsdp reversed"]
)
def test_a_parameter_whose_units_ranks_cut_stays_in_one_page(
    placements: tuple[Sharded | None, ...],
) -> None:
    replicated = Holding(
        ranks=(0, 1, 2, 3), sharding=Sharding(mesh_shape=(2, 2), placements=placements)
    )
    uneven = Holding(
        ranks=(0, 1, 2, 3), sharding=Sharding(mesh_shape=(4,), placements=(Sharded(dim=0),))
    )
    for holding, rows in ((replicated, 16), (uneven, 18)):
        stack = make_parameter("w", (rows, 60), holding, unit=2)
        assert len(partition_ranks(0, [stack], 2048, 4)) == 1


@given(groups())
def test_pages_of_elementwise_parameters_are_about_as_large_as_asked_for(
    case: tuple[int, list[SharedParameter]],
) -> None:
    world_size, parameters = case
    elementwise = [parameter for parameter in parameters if parameter.spec.elementwise]
    for subgroup in partition_ranks(0, elementwise, PAGE_BYTES, world_size):
        for rank in range(world_size):
            page = subgroup.of(rank)
            records = [
                (chunk.sizes, dtype)
                for shard in page.shards
                for chunk in shard.chunks
                for _, dtype in shard.parameter.all_states
            ]
            data = sum(math.prod(sizes) * dtype.itemsize for sizes, dtype in records)
            assert data <= PAGE_BYTES
            assert all(record_nbytes(*each) <= RECORD_DATA_BYTES_MAX for each in records)


@given(groups())
def test_one_rank_has_all_of_each_subgroup(
    case: tuple[int, list[SharedParameter]],
) -> None:
    _, parameters = case
    specs = [parameter.spec for parameter in parameters]
    elements = [Elements(parameter=spec, numel=math.prod(spec.shape)) for spec in specs]
    for flat in (False, True):
        alone = [replace(parameter, holding=whole_on([0]), flat=flat) for parameter in parameters]
        found = [subgroup.of(0) for subgroup in partition_ranks(3, alone, PAGE_BYTES, 1)]
        for subgroup, pieces in zip(found, cut_into_pages(elements, PAGE_BYTES), strict=True):
            assert subgroup.group == 3
            assert [(shard.parameter, shard.chunks) for shard in subgroup.shards] == [
                (specs[p.parameter], tuple(record_chunks(specs[p.parameter], p.start, p.stop)))
                for p in pieces
            ]


@given(groups())
def test_ranges_cover_what_ranks_own_of_sharded_parameters(
    case: tuple[int, list[SharedParameter]],
) -> None:
    world_size, parameters = case
    subgroups = partition_ranks(0, parameters, PAGE_BYTES, world_size)
    for parameter in parameters:
        holding, shape = parameter.holding, parameter.spec.shape
        if holding.is_whole:
            continue
        ranges = [s.ranges for each in subgroups for s in each.shards if s.parameter == parameter]
        numels = [
            sum(chunk.whole.numel for chunk in holding.owned(shape, rank))
            for rank in range(world_size)
        ]
        for rank, numel in enumerate(numels if ranges else ()):
            bounds = [each[rank] for each in ranges]
            assert bounds[0][0] == 0
            assert all(first[1] == second[0] for first, second in itertools.pairwise(bounds))
            assert bounds[-1][1] == numel


def test_meshes_have_some_of_the_ranks_in_any_order() -> None:
    rows = Sharding(mesh_shape=(2,), placements=(Sharded(dim=0),))
    parameters = [
        make_parameter(f"w{ranks}", (3, 2), Holding(ranks=ranks, sharding=rows))
        for ranks in ((0, 2), (2, 0), (3, 1), (3, 1))
    ]
    (subgroup,) = partition_ranks(0, parameters, 2**20, 4)
    assert [shard.ranges for shard in subgroup.shards] == [
        ((0, 4), (0, 0), (0, 2), (0, 0)),
        ((0, 2), (0, 0), (0, 4), (0, 0)),
        ((0, 0), (0, 2), (0, 0), (0, 4)),
        ((0, 0), (0, 2), (0, 0), (0, 4)),
    ]


def test_flat_gives_each_rank_an_equal_range_of_every_subgroup() -> None:
    parameters = [
        make_parameter(f"w{index}", (5, 7), whole_on(range(3)), flat=True) for index in range(6)
    ]
    (subgroup,) = partition_ranks(0, parameters, 2**20, 3)
    numels = [
        sum(chunk.numel for shard in subgroup.of(rank).shards for chunk in shard.chunks)
        for rank in range(3)
    ]
    assert numels == [70, 70, 70]
    # Two matrices each: none is cut.
    assert [len(shard.chunks) for shard in subgroup.of(1).shards] == [0, 0, 1, 1, 0, 0]


def test_by_parameter_balances_costs_over_subgroups() -> None:
    whole = whole_on(range(2))
    parameters = [make_parameter(f"w{index}", (8, 64), whole, cost=1) for index in range(3)]
    subgroups = partition_ranks(0, parameters, 8 * 64 * 8 + 4096, 2)
    owners = [
        rank
        for subgroup in subgroups
        for index in range(len(subgroup.shards))
        for rank in range(2)
        if subgroup.of(rank).shards[index].chunks
    ]
    assert owners == [0, 1, 0]
    assert sum(len(subgroup.shards) for subgroup in subgroups) == 3


def owners_of(subgroups: list[SharedSubgroup], world_size: int) -> list[int]:
    """Of each shard, one after the other, the one rank that owns it."""
    owners = []
    for subgroup in subgroups:
        of_ranks = [subgroup.of(rank).shards for rank in range(world_size)]
        for shards in zip(*of_ranks, strict=True):
            (owner,) = (rank for rank, shard in enumerate(shards) if shard.chunks)
            owners.append(owner)
    return owners


def test_by_parameter_balances_all_subgroups_of_a_group_at_once() -> None:
    """Page by page, the small ones would be dealt before the large ones come."""
    whole = whole_on(range(2))
    costs = [1, 2, 3, 4, 4]
    parameters = [
        make_parameter(f"w{index}", (8, 64), whole, cost=cost) for index, cost in enumerate(costs)
    ]
    subgroups = partition_ranks(0, parameters, 8 * 64 * 8 + 4096, 2)
    assert len(subgroups) > 2
    owners = owners_of(subgroups, 2)
    assert sum(cost for cost, owner in zip(costs, owners, strict=True) if owner == 0) == 7


def test_by_parameter_balances_several_groups() -> None:
    whole = whole_on(range(3))
    groups = [
        [
            make_parameter(f"matrix{number}", (8, 64), whole, cost=1000),
            make_parameter(f"table{number}", (5,), whole, elementwise=True),
        ]
        for number in range(6)
    ]
    loads = owned_costs([], 3)
    found = [partition_ranks(number, g, PAGE_BYTES, 3, loads) for number, g in enumerate(groups)]
    assert [owners_of(subgroups, 3) for subgroups in found] == [[n % 3] * 2 for n in range(6)]
    # What comes later, when a run was resumed or not, goes where it would have gone.
    earlier = owned_costs(itertools.chain.from_iterable(found[:4]), 3)
    assert [partition_ranks(n, groups[n], PAGE_BYTES, 3, earlier) for n in (4, 5)] == found[4:]
    assert earlier == loads == {False: [2000] * 3, True: [10] * 3}


def test_replicas_share_what_they_hold() -> None:
    """HSDP: two shards of rows, each on two ranks that own half of it."""
    holding = Holding(
        ranks=(0, 1, 2, 3),
        sharding=Sharding(mesh_shape=(2, 2), placements=(None, Sharded(dim=0))),
    )
    assert list(holding.replicas()) == [(0, 2), (1, 3)]
    (subgroup,) = partition_ranks(0, [make_parameter("w", (4, 3), holding)], 2**20, 4)
    owned = [[o.offsets for o in subgroup.of(rank).shards[0].chunks] for rank in range(4)]
    assert owned == [[(0, 0)], [(2, 0)], [(1, 0)], [(3, 0)]]


def test_copies_on_several_meshes_are_replicas() -> None:
    """Experts: every second rank holds the same half."""
    on_mesh = Sharding(mesh_shape=(2,), placements=(Sharded(dim=0),))
    holding = stacked([Holding(ranks=ranks, sharding=on_mesh) for ranks in ((0, 1), (2, 3))])
    assert list(holding.replicas()) == [(0, 2), (1, 3)]
    with pytest.raises(ValueError, match="neither one mesh nor replicas"):
        stacked([Holding(ranks=ranks, sharding=on_mesh) for ranks in ((0, 1), (1, 2))])


@st.composite
def encoded_groups(draw: st.DrawFn) -> tuple[int, list[SharedParameter]]:
    """Parameters with int8 states, in ways to hold them that cut columns at multiples of 256."""
    world_size = draw(st.integers(1, 4))
    parameters = []
    for index in range(draw(st.integers(1, 4))):
        holding = draw(holdings(world_size))
        columns = math.prod(
            size
            for size, placement in zip(
                holding.sharding.mesh_shape, holding.sharding.placements, strict=True
            )
            if placement is not None and placement.dim == 1
        )
        width = draw(st.integers(1, 900)) if columns == 1 else 256 * columns
        shape = (draw(st.integers(0, 9)), width)
        kind = draw(st.sampled_from(["elementwise", "whole"]))
        shared = make_parameter(
            f"layers.{index}",
            shape,
            holding,
            elementwise=kind == "elementwise",
            flat=draw(st.booleans()),
        )
        spec = replace(shared.spec, encodings=(("momentum_buffer", "int8_root"),))
        parameters.append(replace(shared, spec=spec))
    return world_size, parameters


@given(encoded_groups())
def test_blocks_of_encoded_states_are_not_cut(case: tuple[int, list[SharedParameter]]) -> None:
    world_size, parameters = case
    subgroups = partition_ranks(0, parameters, PAGE_BYTES, world_size)
    numels: Counter[str] = Counter()
    for subgroup in subgroups:
        for rank in range(world_size):
            for shard in subgroup.of(rank).shards:
                for chunk in shard.chunks:
                    end, columns = chunk.offsets[-1] + chunk.sizes[-1], shard.parameter.shape[-1]
                    assert chunk.offsets[-1] % 256 == 0
                    assert end % 256 == 0 or end == columns
                    numels[shard.parameter.name] += chunk.numel
    for shared in parameters:
        assert numels[shared.spec.name] == math.prod(shared.spec.shape)
