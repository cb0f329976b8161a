"""What the ranks of a job have in common: the same parameters, each held in one way."""

from __future__ import annotations

import functools
import json
import math
import operator
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Any, NoReturn

import numpy as np
import torch
import xxhash

from tierstore.errors import RunMismatchError
from tierstore.layout.dtensors import holding_of, local_tensor
from tierstore.layout.ownership import (
    SharedParameter,
    SharedSubgroup,
    owned_costs,
    partition_ranks,
)
from tierstore.layout.parameters import PagedGroup, PagedParameter, ParameterSpec, check_unchanged
from tierstore.layout.sharding import Holding, stacked, whole_on
from tierstore.paging.fsdp import reshard
from tierstore.ranks.peers import Peers, Ranks, agree, together
from tierstore.run import tagged_json

# So many elements tell whether two ranks have the same values.
_SAMPLE_ELEMENTS = 64


def require_same_options(peers: Peers, options: Mapping[str, Any]) -> None:
    """Refuse ranks that open a store in another way each; all of them call this.

    Raises:
        ValueError: naming the first option that differs.
    """
    if found := _first_difference(peers.gather(dict(options))):
        raise ValueError(f"{found}: all ranks share one store, so open it alike on all of them")


def partition_groups(
    ranks: Ranks,
    groups: Sequence[PagedGroup],
    *,
    earlier: Sequence[SharedSubgroup],
    first_group: int,
    page_bytes: int,
) -> list[SharedSubgroup]:
    """Cut groups into subgroups, of which every rank owns a part; all ranks call this together.

    Args:
        ranks: all ranks.
        groups: the groups to cut.
        earlier: the subgroups of groups attached before.
        first_group: number of the first group to cut.
        page_bytes: about how much of a subgroup a rank may own.

    Raises:
        ValueError: a parameter is placed in a way that cannot be paged.
        RunMismatchError: the ranks have different parameters; the message names the first.
        PeerFailed: a ValueError on another rank.
    """

    def describe() -> list[list[SharedParameter]]:
        return [[_describe(each, ranks) for each in group.parameters] for group in groups]

    shared = together(ranks, "describe the parameters", describe)
    digests = ranks.gather(xxhash.xxh3_128_hexdigest(repr(shared).encode()))
    if len(set(digests)) > 1:
        everyone = ranks.gather(shared)
        shared = [
            [_combined(theirs) for theirs in zip_longest(*group)]
            for group in zip_longest(*everyone, fillvalue=())
        ]
    loads = owned_costs(earlier, ranks.world_size)
    return [
        subgroup
        for number, parameters in enumerate(shared, start=first_group)
        for subgroup in partition_ranks(number, parameters, page_bytes, ranks.world_size, loads)
    ]


def names_with_gradient(
    peers: Peers, groups: Sequence[PagedGroup], specs: Mapping[str, ParameterSpec]
) -> frozenset[str]:
    """Return the parameters of which any rank has a gradient, after checking all of them.

    Args:
        peers: all ranks, which call this together.
        groups: the groups, the same on all of them.
        specs: what the parameters were when they were attached, by name.

    Raises:
        ValueError: a parameter or gradient does not fit, or the ranks have different
            hyperparameters; the message names the first.
        PeerFailed: a parameter or gradient does not fit on another rank.
    """
    members = [parameter for group in groups for parameter in group.parameters]

    def look() -> tuple[int, int]:
        reshard(members)
        found = 0  # A bit for each parameter: what every step sends shall be small.
        for index, parameter in enumerate(members):
            check_unchanged(parameter, specs[parameter.name])
            found |= (parameter.tensor.grad is not None) << index
        if peers.world_size == 1:
            return found, 0
        values = json.dumps(_hyperparameters(groups), sort_keys=True)
        return found, xxhash.xxh3_64_intdigest(values.encode())

    gradients, digests = zip(*agree(peers, "begin a step", look), strict=True)
    if len(set(digests)) > 1:
        _refuse_hyperparameters(peers, groups)
    found = functools.reduce(operator.or_, gradients)
    return frozenset(member.name for index, member in enumerate(members) if found >> index & 1)


def require_same_commit(
    peers: Peers, groups: Sequence[PagedGroup], scalars: Mapping[str, Mapping[str, float]]
) -> None:
    """Refuse ranks that are about to commit different hyperparameters or scalars.

    Raises:
        ValueError: naming the first that differs.
        PeerFailed: another rank does something else.
    """
    if peers.world_size == 1:
        return

    def look() -> int:
        values = json.dumps([_hyperparameters(groups), scalars], sort_keys=True)
        return xxhash.xxh3_64_intdigest(values.encode())

    if len(set(agree(peers, "commit a step", look))) > 1:
        _refuse_hyperparameters(peers, groups)


def _hyperparameters(groups: Sequence[PagedGroup]) -> dict[str, Any]:
    return {
        f"{key} of param group {number}": tagged_json.encode(
            value, f"{key} of param group {number}"
        )
        for number, group in enumerate(groups)
        for key, value in group.own_hyperparameters().items()
    }


def _refuse_hyperparameters(peers: Peers, groups: Sequence[PagedGroup]) -> NoReturn:
    found = _first_difference(peers.gather(_hyperparameters(groups)))
    raise ValueError(
        f"{found or 'the scalars differ between ranks'}: all ranks step one model, so give them "
        "the same hyperparameters and schedulers"
    )


def _first_difference(of_ranks: Sequence[Mapping[str, Any]]) -> str | None:
    """Say which value is the first that not all ranks have alike."""
    for key in dict.fromkeys(key for values in of_ranks for key in values):
        found = [values.get(key, "absent") for values in of_ranks]
        for rank, value in enumerate(found):
            if value != found[0]:
                return f"{key} is {found[0]} on rank 0 and {value} on rank {rank}"
    return None


def _describe(parameter: PagedParameter, ranks: Ranks) -> SharedParameter:
    spec = parameter.spec
    partition = parameter.partition or ("flat" if spec.elementwise else "by_parameter")
    try:
        holding = _holding(parameter, ranks)
        if ranks.rank not in holding.ranks:
            raise ValueError(
                f"its mesh has ranks {list(holding.ranks)} and not this one, {ranks.rank}: ranks "
                "that train other parts of a model need a store, a directory and a process_group "
                "of their own"
            )
        found = tuple(local_tensor(parameter.tensor).shape)
        expected = holding.local_shape(spec.shape, ranks.rank)
        # FSDP leaves shards without elements in another shape.
        if found != expected and math.prod(found) + math.prod(expected) > 0:
            raise ValueError(
                f"this rank has {list(found)} of it, and by its placements should have "
                f"{list(expected)}"
            )
    except ValueError as error:
        raise ValueError(f"parameter {spec.name!r} cannot be paged: {error}") from error
    return SharedParameter(
        spec=spec,
        holding=holding,
        flat=partition == "flat",
        cost=math.prod(spec.shape) if parameter.cost is None else parameter.cost,
    )


def _holding(parameter: PagedParameter, ranks: Ranks) -> Holding:
    if ranks.world_size > 1:
        return holding_of(parameter.tensor, ranks.global_ranks)
    # A replica of ranks outside of this job of one is stepped as a parameter of this rank alone.
    local, shape = local_tensor(parameter.tensor).shape, parameter.tensor.shape
    if local != shape:
        raise ValueError(
            f"its shape {list(shape)} is sharded over ranks, and this rank has {list(local)}, but "
            "the store is of this rank alone: open it with a process_group of all ranks that "
            "have a shard"
        )
    return whole_on([0])


def _combined(theirs: Sequence[SharedParameter | None]) -> SharedParameter:
    """Return one parameter as it lies on all ranks, from what each says of it."""
    first = theirs[0]
    for rank, other in enumerate(theirs):
        if first is None or other is None or _fixed(other) != _fixed(first):
            raise RunMismatchError(
                f"the ranks have different parameters. First difference: rank 0 has "
                f"{_named(first)}, rank {rank} has {_named(other)}. Build the same model and param "
                "groups on all ranks; ranks that train other parts of a model need a store, "
                "a directory and a process_group of their own"
            )
    assert first is not None
    holdings = dict.fromkeys(other.holding for other in theirs if other is not None)
    try:
        holding = stacked(list(holdings))
    except ValueError as error:
        raise RunMismatchError(f"parameter {first.spec.name!r} lies on {error}") from error
    return SharedParameter(spec=first.spec, holding=holding, flat=first.flat, cost=first.cost)


def _fixed(parameter: SharedParameter) -> tuple[Any, ...]:
    return parameter.spec, parameter.flat, parameter.cost


def _named(parameter: SharedParameter | None) -> str:
    if parameter is None:
        return "no further parameter"
    partition = "flat" if parameter.flat else "by_parameter"
    return f"{parameter.spec.describe()}, partition {partition!r}"


def require_same_values(
    peers: Peers, groups: Sequence[PagedGroup], subgroups: Sequence[SharedSubgroup]
) -> None:
    """Refuse parameters that are plain tensors and yet of other values on each rank.

    Tensors that are cut without being DTensors would else be taken for copies. A sample of
    their elements is compared.

    Args:
        peers: all ranks, which call this together.
        groups: those of this rank.
        subgroups: all that these groups are cut into.

    Raises:
        RunMismatchError: naming the first.
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
                        f"{member.name!r} and have other values: give all ranks the same "
                        "ones, as by a common seed or by broadcasting them; a parameter that is "
                        "cut must be a DTensor"
                    )


def _sample(tensor: torch.Tensor) -> int:
    """Return a hash of some elements of what this rank has of a tensor."""
    flat = local_tensor(tensor).reshape(-1)
    positions = np.linspace(0, max(0, flat.numel() - 1), _SAMPLE_ELEMENTS).astype(np.int64)
    if not flat.numel():
        return 0
    elements = flat[torch.from_numpy(positions).to(flat.device)].cpu()
    return xxhash.xxh3_64_intdigest(elements.view(torch.uint8).numpy().tobytes())
