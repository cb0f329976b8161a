"""The parameters of all ranks: which rank holds what, and whether replicas are equal."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from itertools import zip_longest

import torch
import xxhash

from tierstore.errors import RunMismatchError
from tierstore.layout.dtensors import holding_of, listed_chunks, local_tensor, same_shape
from tierstore.layout.ownership import SharedParameter, SharedSubgroup
from tierstore.layout.parameters import PagedGroup, PagedParameter, ParameterSpec
from tierstore.layout.sharding import Holding, stacked, whole_on, with_bounds
from tierstore.paging.gradients import (
    sample_of,
)
from tierstore.ranks.peers import Peers, Ranks, agree, together


def describe_groups(ranks: Ranks, groups: Sequence[PagedGroup]) -> list[list[SharedParameter]]:
    """Return the parameters of groups with all ranks that hold them. All ranks call this.

    Raises:
        ValueError: a parameter has placements that cannot be paged.
        RunMismatchError: the ranks have different parameters; the message names the first.
        PeerFailed: a ValueError on another rank.
    """
    shared: list[list[SharedParameter]] = []

    def describe() -> tuple[str, list[str]]:
        shared.extend([_describe(member, ranks) for member in group.parameters] for group in groups)
        pairs = _pairs(groups, shared)
        uneven = [member.name for member, of_all in pairs if not _has_part(member, of_all, ranks)]
        return xxhash.xxh3_128_hexdigest(repr(shared).encode()), uneven

    digests, uneven_names = zip(*agree(ranks, "describe the parameters", describe), strict=True)
    if len(set(digests)) > 1:
        shared = [
            [_combined(parameters) for parameters in zip_longest(*rank_groups)]
            for rank_groups in zip_longest(*ranks.gather(shared), fillvalue=())
        ]
    if names := {name for of_rank in uneven_names for name in of_rank}:
        shared = _with_bounds(ranks, groups, shared, names)

    def check() -> None:
        for member, of_all in _pairs(groups, shared):
            _check_part(member, of_all, ranks)

    together(ranks, "check the parts of parameters", check)
    return shared


def shared_parameter(parameter: PagedParameter, holding: Holding) -> SharedParameter:
    """Return a parameter with the ranks that hold it."""
    spec = parameter.spec
    return SharedParameter(
        spec=spec,
        holding=holding,
        flat=spec.elementwise if parameter.partition is None else parameter.partition == "flat",
        cost=math.prod(spec.shape) if parameter.cost is None else parameter.cost,
    )


def require_same_values(
    peers: Peers, groups: Sequence[PagedGroup], subgroups: Sequence[SharedSubgroup]
) -> None:
    """Raise if replicas have different values. Compares a sample of the elements.

    Otherwise plain tensors that are shards would pass as replicas.

    Args:
        peers: all ranks, which call this together.
        groups: all groups.
        subgroups: the subgroups of these groups.

    Raises:
        RunMismatchError: two replicas differ; the message names the parameter.
    """
    members = [parameter for group in groups for parameter in group.parameters]
    samples = peers.gather([_sample(parameter.tensor) for parameter in members])
    shared = {
        shard.spec.name: shard.parameter for subgroup in subgroups for shard in subgroup.shards
    }
    for index, member in enumerate(members):
        parameter = shared.get(member.name)
        for replicas in parameter.holding.replicas() if parameter else ():
            for rank in replicas:
                if samples[rank][index] != samples[replicas[0]][index]:
                    raise RunMismatchError(
                        f"ranks {replicas[0]} and {rank} hold the same elements of parameter "
                        f"{member.name!r} with different values: give all ranks the same values, "
                        "by a common seed or by broadcasting them; a parameter that is sharded "
                        "must be a DTensor"
                    )


def _pairs(
    groups: Sequence[PagedGroup], shared: Sequence[Sequence[SharedParameter]]
) -> list[tuple[PagedParameter, SharedParameter]]:
    return [
        pair
        for group, of_group in zip(groups, shared, strict=True)
        for pair in zip(group.parameters, of_group, strict=True)
    ]


def _with_bounds(
    ranks: Ranks,
    groups: Sequence[PagedGroup],
    shared: Sequence[Sequence[SharedParameter]],
    names: Collection[str],
) -> list[list[SharedParameter]]:
    """Return parameters, with the actual sharding if it differs from their placements.

    The parts of ranks follow each other. All ranks call this.
    """
    tensors = {
        member.name: member.tensor
        for group in groups
        for member in group.parameters
        if member.name in names
    }
    rank_shapes = agree(
        ranks,
        "exchange the shapes of uneven parts",
        lambda: {name: tuple(local_tensor(tensor).shape) for name, tensor in tensors.items()},
    )

    def described(parameter: SharedParameter) -> SharedParameter:
        name, holding = parameter.spec.name, parameter.holding
        if name not in names:
            return parameter
        shapes = [rank_shapes[rank][name] for rank in holding.ranks]
        with _named_error(name):
            sharding = with_bounds(holding.sharding, parameter.spec.shape, shapes)
        return replace(parameter, holding=replace(holding, sharding=sharding))

    return together(
        ranks, "describe uneven parts", lambda: [list(map(described, group)) for group in shared]
    )


@contextlib.contextmanager
def _named_error(name: str) -> Iterator[None]:
    """Name the parameter in a ValueError."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"parameter {name!r} cannot be paged: {error}") from error


def _describe(parameter: PagedParameter, ranks: Ranks) -> SharedParameter:
    """Return the spec of a parameter and the ranks that hold it, as known to this rank."""
    with _named_error(parameter.name):
        holding = _holding(parameter, ranks)
        if ranks.rank not in holding.ranks:
            raise ValueError(
                f"its mesh has ranks {list(holding.ranks)} and not this rank, {ranks.rank}: ranks "
                "that train different parts of a model need separate stores, directories and "
                "process groups"
            )
    return shared_parameter(parameter, holding)


def _has_part(parameter: PagedParameter, shared: SharedParameter, ranks: Ranks) -> bool:
    """Return whether the local tensor has the shape of this rank's part."""
    with _named_error(parameter.name):
        expected = shared.holding.local_shape(shared.spec.shape, ranks.rank)
    return same_shape(local_tensor(parameter.tensor).shape, expected)


def _check_part(parameter: PagedParameter, shared: SharedParameter, ranks: Ranks) -> None:
    """Check that a parameter can be paged with this rank's part."""
    spec, holding = shared.spec, shared.holding
    found = tuple(local_tensor(parameter.tensor).shape)
    with _named_error(spec.name):
        if not _has_part(parameter, shared, ranks):
            raise ValueError(
                f"the local tensor of this rank has shape {list(found)}, but its placements need "
                f"{list(holding.local_shape(spec.shape, ranks.rank))}"
            )
        listed = listed_chunks(parameter.tensor)
        if listed is not None:
            held = [chunk.whole for chunk in holding.held(spec.shape, ranks.rank)]
            if set(listed) != set(held):
                raise ValueError(
                    f"by its chunk list this rank holds {listed}. Its placements and the shapes "
                    f"on all ranks give {held}: parts must be in the order of the ranks of the "
                    "mesh"
                )
        if math.prod(spec.shape) > 0:
            _check_states(spec, found)
        if spec.column_block > 1:
            _require_whole_blocks(spec, holding, ranks.rank)


def _check_states(spec: ParameterSpec, found: Sequence[int]) -> None:
    """Check that this rank can hold its part of states whose shape differs from the parameter."""
    for tensor in spec.stored:
        if tensor.is_free and tuple(found) != spec.shape:
            raise ValueError(
                f"a rank has a part of it, and its state {tensor.name!r} of shape "
                f"{list(tensor.shape or ())} needs all of it: use DDP"
            )
        if tensor.shared is None or 0 not in found:
            continue
        if all(size for size, shared in zip(found, tensor.shared, strict=True) if not shared):
            dimension = found.index(0)
            raise ValueError(
                f"this rank has empty rows or columns of it, and {tensor.name!r} has an element "
                f"for each row or column: cut its dimension {dimension} over "
                f"{spec.shape[dimension]} ranks or fewer"
            )


def _require_whole_blocks(spec: ParameterSpec, holding: Holding, rank: int) -> None:
    """Check that this rank holds whole blocks of columns, at the same places in its tensor."""
    columns, block = spec.shape[-1], spec.column_block
    for chunk in holding.owned(spec.shape, rank, block):
        first, end = chunk.whole.offsets[-1], chunk.whole.offsets[-1] + chunk.whole.sizes[-1]
        for cut in (first, chunk.local.offsets[-1], 0 if end == columns else end):
            if cut % block:
                raise ValueError(
                    f"a rank has its columns {first} to {end}, but a state is in blocks of "
                    f"{block} columns: cut its rows, or its columns at multiples of {block}"
                )


def _holding(parameter: PagedParameter, ranks: Ranks) -> Holding:
    if ranks.world_size > 1:
        return holding_of(parameter.tensor, ranks.global_ranks)
    # In a job of one rank, a parameter replicated over other ranks is stepped by this rank alone.
    local, shape = local_tensor(parameter.tensor).shape, parameter.tensor.shape
    if local != shape:
        raise ValueError(
            f"its shape {list(shape)} is sharded over ranks, and this rank has {list(local)}, but "
            "the store has this rank only: open it with a process_group of all ranks that have a "
            "shard"
        )
    return whole_on([0])


def _combined(parameters: Sequence[SharedParameter | None]) -> SharedParameter:
    """Return a parameter with all ranks that hold it, given its description by each rank."""
    first = parameters[0]
    for rank, other in enumerate(parameters):
        if first is None or other is None or replace(other, holding=first.holding) != first:
            raise RunMismatchError(
                f"the ranks have different parameters. First difference: rank 0 has "
                f"{_named(first)}, rank {rank} has {_named(other)}. Build the same model and param "
                "groups on all ranks; ranks that train different parts of a model need separate "
                "stores, directories and process groups"
            )
    assert first is not None
    holdings = dict.fromkeys(other.holding for other in parameters if other is not None)
    try:
        return replace(first, holding=stacked(list(holdings)))
    except ValueError as error:
        raise RunMismatchError(f"parameter {first.spec.name!r} lies on {error}") from error


def _named(parameter: SharedParameter | None) -> str:
    if parameter is None:
        return "no further parameter"
    partition = "flat" if parameter.flat else "by_parameter"
    return f"{parameter.spec.describe()}, partition {partition!r}"


def _sample(tensor: torch.Tensor) -> int:
    """Return a hash of some elements of the local tensor."""
    elements = sample_of(tensor).cpu()
    return xxhash.xxh3_64_intdigest(elements.view(torch.uint8).numpy().tobytes())
