"""Checks that all ranks of a job have the same options, hyperparameters and scalars."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import xxhash

from tierstore.layout.parameters import PagedGroup
from tierstore.ranks.peers import Peers, agree
from tierstore.run import tagged_json
from tierstore.run.manifest import pack_scalars


def require_same_options(peers: Peers, options: Mapping[str, Any]) -> None:
    """Raise if ranks open a store with different options. All ranks call this.

    Raises:
        ValueError: an option differs; the message names the first.
    """
    if found := _first_difference(peers.gather(dict(options))):
        raise ValueError(f"{found}: open the store with the same options on every rank")


def require_same_commit(
    peers: Peers,
    groups: Sequence[PagedGroup],
    scalars: Mapping[str, Mapping[str, float]],
    registered: Iterable[str],
) -> None:
    """Raise if ranks are about to commit different hyperparameters, scalars or objects.

    Raises:
        ValueError: a value differs; the message names the first.
        PeerFailed: another rank makes another call.
    """
    if peers.world_size > 1:
        objects = {"what is registered": ", ".join(sorted(registered)) or "nothing"}

        def digest() -> int:
            names = [[parameter.name for parameter in group.parameters] for group in groups]
            return digest_of([hyperparameters_of(groups, objects), pack_scalars(scalars, names)])

        require_equal(peers, agree(peers, "commit a step", digest), groups, objects)


def hyperparameters_of(
    groups: Sequence[PagedGroup], options: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Return the values that all ranks must have in common, by the text that errors use."""
    return dict(options or {}) | {
        f"{key} of param group {number}": tagged_json.encode(
            value, f"{key} of param group {number}"
        )
        for number, group in enumerate(groups)
        for key, value in group.own_hyperparameters().items()
    }


def digest_of(values: Any) -> int:
    """Return a hash of JSON values."""
    return xxhash.xxh3_64_intdigest(json.dumps(values, sort_keys=True).encode())


def require_equal(
    peers: Peers,
    digests: Sequence[int],
    groups: Sequence[PagedGroup],
    options: Mapping[str, str] | None = None,
) -> None:
    """Raise if hyperparameters or scalars differ, given their digest on every rank."""
    if len(set(digests)) > 1:
        found = _first_difference(peers.gather(hyperparameters_of(groups, options)))
        raise ValueError(
            f"{found or 'the scalars differ between ranks'}: all ranks step one model, so give "
            "them the same hyperparameters, schedulers and registered names"
        )


def _first_difference(rank_values: Sequence[Mapping[str, Any]]) -> str | None:
    """Describe the first value that differs between ranks; None if all are equal."""
    for key in dict.fromkeys(key for values in rank_values for key in values):
        found = [values.get(key, "absent") for values in rank_values]
        for rank, value in enumerate(found):
            if value != found[0]:
                return f"{key} is {found[0]} on rank 0 and {value} on rank {rank}"
    return None
