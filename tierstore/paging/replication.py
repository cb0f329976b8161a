"""What was stepped on one rank, sent to the others that hold the same elements."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch.profiler import record_function

from tierstore.layout.dtensors import local_tensor
from tierstore.layout.ownership import SharedSubgroup
from tierstore.layout.sharding import HeldChunk
from tierstore.paging.local_subgroups import LocalSubgroup
from tierstore.paging.views import Source
from tierstore.ranks.peers import Ranks
from tierstore.units import align_up

# While so many bytes are on their way, the next are packed. A subgroup of many ranks has more,
# and what one rank sends of it, about a page at most, goes at once.
_BYTES_MAX = 2**28

_ALIGNMENT = 16


@dataclass(frozen=True, slots=True)
class _Route:
    """What one rank has to send of one subgroup."""

    replicas: tuple[int, ...]
    """The ranks that hold it, the owner among them."""
    owner: int
    parts: Sequence[tuple[str, HeldChunk]]
    """Names of parameters, and what is owned of them; it lies in the same place on all."""


@dataclass(frozen=True, slots=True)
class _Message:
    """What one rank sends, on its way."""

    buffer: torch.Tensor
    """uint8; not to be touched before the work is done."""
    work: Any
    """To wait for; see Ranks.broadcast."""
    values: Sequence[tuple[torch.Tensor, torch.Tensor]]
    """Each part of the buffer, with the part of a parameter that it is the value of."""
    is_own: bool


class Spread:
    """Broadcasts from owners to replicas, subgroup by subgroup, in the same order everywhere.

    Args:
        ranks: all of the job; each makes the same calls in the same order.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._groups: dict[tuple[int, ...], Any] = {}
        self._routes: dict[int, list[_Route]] = {}
        self._sent: deque[_Message] = deque()
        self._bytes_on_their_way = 0
        self.bytes_sent = 0
        """What this rank sent, counted once for each rank that it went to."""

    def prepare(self, subgroups: Iterable[SharedSubgroup]) -> None:
        """Make the process groups that some subgroups need."""
        replicas = {
            each
            for subgroup in subgroups
            for shard in subgroup.shards
            for each in shard.parameter.holding.replicas()
        }
        for each in sorted(replicas - self._groups.keys()):
            self._groups[each] = self._ranks.new_group(each)

    def begin(
        self,
        subgroup: LocalSubgroup,
        source: Source,
        names: Collection[str],
        tensors: Mapping[str, torch.Tensor] | None = None,
    ) -> None:
        """Start to send what this rank owns of a subgroup, and to receive the rest.

        Args:
            subgroup: what was stepped.
            source: where the parameters are that this rank owns.
            names: the parameters that were stepped.
            tensors: by name, what to send instead of the parameters, and to receive into: plain
                tensors of the shape that this rank holds of them, on any device.
        """
        if subgroup.index not in self._routes:
            self._routes[subgroup.index] = self._plan(subgroup)
        routes = self._routes[subgroup.index]
        if not routes:
            return
        with record_function("tierstore::spread"):
            for route in routes:
                parts = [part for part in route.parts if part[0] in names]
                if parts:
                    self._send(subgroup, source, tensors, route, parts)

    def finish(self) -> None:
        """Block until all that was begun has arrived."""
        with record_function("tierstore::spread"):
            while self._sent:
                self._arrive()

    def _plan(self, subgroup: LocalSubgroup) -> list[_Route]:
        rank = self._ranks.rank
        parts: dict[tuple[tuple[int, ...], int], list[tuple[str, HeldChunk]]] = {}
        for shard in subgroup.shared.shards:
            for replicas in shard.parameter.holding.replicas():
                if rank in replicas:
                    for owner in replicas:
                        owned = [(shard.spec.name, held) for held in shard.owned(owner)]
                        parts.setdefault((replicas, owner), []).extend(owned)
        return [_Route(*key, found) for key, found in sorted(parts.items())]

    def _send(
        self,
        subgroup: LocalSubgroup,
        source: Source,
        tensors: Mapping[str, torch.Tensor] | None,
        route: _Route,
        parts: Sequence[tuple[str, HeldChunk]],
    ) -> None:
        is_own = route.owner == self._ranks.rank
        places = []
        for name, held in parts:
            parameter = subgroup.parameters[name]
            if tensors is not None:
                places.append(held.local.select(tensors[name]))
            elif is_own:
                places.append(source.values(parameter, held.whole))
            else:
                places.append(held.local.select(local_tensor(parameter.tensor)))
        sizes = [align_up(place.nbytes, _ALIGNMENT) for place in places]
        while self._sent and self._bytes_on_their_way + sum(sizes) > _BYTES_MAX:
            self._arrive()
        # Not where the places are, which may be on the host of this rank alone.
        device = subgroup.parameters[parts[0][0]].tensor.device
        buffer = torch.empty(sum(sizes), dtype=torch.uint8, device=device)
        values = []
        for place, end in zip(places, accumulate(sizes), strict=True):
            start = end - align_up(place.nbytes, _ALIGNMENT)
            value = buffer[start : start + place.nbytes].view(place.dtype).view(place.shape)
            if is_own:
                value.copy_(place)
            values.append((value, place))
        if is_own:
            self.bytes_sent += buffer.nbytes * (len(route.replicas) - 1)
        work = self._ranks.broadcast(buffer, source=route.owner, group=self._groups[route.replicas])
        self._sent.append(_Message(buffer, work, values, is_own))
        self._bytes_on_their_way += buffer.nbytes

    def _arrive(self) -> None:
        """Block until what is longest on its way has arrived, and put it where it belongs."""
        message = self._sent[0]
        self._ranks.wait(message.work)
        if not message.is_own:
            for value, place in message.values:
                place.copy_(value)
        self._sent.popleft()
        self._bytes_on_their_way -= message.buffer.nbytes
