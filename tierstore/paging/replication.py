"""Replication: owners broadcast stepped parameters to the other ranks that hold them."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.profiler import record_function

from tierstore.layout.dtensors import local_tensor
from tierstore.layout.encodings import MASTER
from tierstore.layout.sharding import HeldChunk
from tierstore.paging.page import Page
from tierstore.paging.views import Source
from tierstore.ranks.peers import Ranks
from tierstore.units import align_up

# Most bytes in flight while the next message is packed. One message, about a page at most, is
# always sent. A subgroup of many ranks may therefore have more in flight.
_BYTES_MAX = 2**28

_ALIGNMENT = 16


def bytes_in_flight(messages: Collection[int]) -> int:
    """Return the most bytes in flight at once in a sweep, given the bytes of each message."""
    return min(sum(messages), max(_BYTES_MAX, max(messages, default=0)))


@dataclass(frozen=True, slots=True)
class _Route:
    """The elements of one subgroup that one rank sends to the other ranks that hold them."""

    replicas: tuple[int, ...]
    """The ranks that hold the elements, with the owner."""
    owner: int
    parts: Sequence[tuple[str, HeldChunk]]
    """Parameter name and chunk; the local chunk is the same on all replicas."""


@dataclass(frozen=True, slots=True)
class _Message:
    """A broadcast in flight."""

    buffer: torch.Tensor
    """uint8; unchanged until the work is done."""
    work: Any
    """For Ranks.wait()."""
    received: Sequence[tuple[torch.Tensor, torch.Tensor]]
    """Pairs of a part of the buffer and the tensor to copy it to; empty on the owner."""


class Replication:
    """Broadcasts from owners to replicas, subgroup by subgroup, in the same order on all ranks.

    Args:
        ranks: all ranks of the job, which make the same calls.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._groups: dict[tuple[int, ...], Any] = {}
        self._routes: dict[Page, list[_Route]] = {}
        self._in_flight: deque[_Message] = deque()
        self._bytes_in_flight = 0
        self.device = torch.device("cpu")
        """The GPU of parameters or steps, else the CPU: a GPU backend may send GPU tensors only."""
        self.bytes_sent = 0
        """Bytes that this rank sent, counted once per replica."""

    def prepare(self, pages: Sequence[Page]) -> None:
        """Make the process groups that the subgroups of these pages need."""
        replicas = {
            members
            for page in pages
            for shard in page.shared.shards
            for members in shard.parameter.holding.replicas()
        }
        for members in sorted(replicas - self._groups.keys()):
            self._groups[members] = self._ranks.new_group(members)
        for page in pages:
            self._routes[page] = self._plan(page)

    def begin(
        self,
        page: Page,
        source: Source,
        names: Collection[str],
        tensors: Mapping[str, torch.Tensor] | None = None,
        state: str = MASTER,
    ) -> None:
        """Start to send the elements of a subgroup that this rank owns, and to receive the rest.

        Args:
            page: this rank's page of the subgroup.
            source: finds the parameters that this rank owns.
            names: the parameters that were stepped.
            tensors: parameter name -> tensor to send and receive instead of the parameter: a
                plain tensor with this rank's part of a state, on any device.
            state: the state.
        """
        if not self._routes[page]:
            return
        with record_function("tierstore::spread"):
            for route in self._routes[page]:
                parts = [part for part in route.parts if part[0] in names]
                if parts:
                    self._send(page, source, tensors, state, route, parts)

    def finish(self) -> None:
        """Block until all messages in flight have arrived."""
        with record_function("tierstore::spread"):
            while self._in_flight:
                self._receive()

    def _plan(self, page: Page) -> list[_Route]:
        """Return the routes on which this rank sends or receives."""
        parts: dict[tuple[tuple[int, ...], int], list[tuple[str, HeldChunk]]] = {}
        for shard in page.shared.shards:
            for replicas in shard.parameter.holding.replicas():
                for owner in replicas if self._ranks.rank in replicas else ():
                    owned = [(shard.spec.name, chunk) for chunk in shard.owned(owner)]
                    parts.setdefault((replicas, owner), []).extend(owned)
        return [_Route(*key, parts[key]) for key in sorted(parts)]

    def _send(
        self,
        page: Page,
        source: Source,
        tensors: Mapping[str, torch.Tensor] | None,
        state: str,
        route: _Route,
        parts: Sequence[tuple[str, HeldChunk]],
    ) -> None:
        is_owner = route.owner == self._ranks.rank
        targets = []
        for name, chunk in parts:
            parameter = page.parameters[name]
            if tensors is not None:
                place = parameter.spec.state_chunk(state, chunk.local)
                targets.append(place.select(tensors[name]))
            elif is_owner:
                targets.append(source.values(parameter, chunk.whole))
            else:
                targets.append(chunk.local.select(local_tensor(parameter.tensor)))
        sizes = [align_up(target.nbytes, _ALIGNMENT) for target in targets]
        while self._in_flight and self._bytes_in_flight + sum(sizes) > _BYTES_MAX:
            self._receive()
        buffer = torch.empty(sum(sizes), dtype=torch.uint8, device=self.device)
        values = []
        for target, memory in zip(targets, torch.split(buffer, sizes), strict=True):
            value = memory[: target.nbytes].view(target.dtype).view(target.shape)
            if is_owner:
                value.copy_(target)
            else:
                values.append((value, target))
        if is_owner:
            self.bytes_sent += buffer.nbytes * (len(route.replicas) - 1)
        work = self._ranks.broadcast(buffer, source=route.owner, group=self._groups[route.replicas])
        self._in_flight.append(_Message(buffer, work, values))
        self._bytes_in_flight += buffer.nbytes

    def _receive(self) -> None:
        """Block until the oldest message has arrived, and copy its values to their targets."""
        message = self._in_flight[0]
        self._ranks.wait(message.work)
        for value, target in message.received:
            target.copy_(value)
        self._in_flight.popleft()
        self._bytes_in_flight -= message.buffer.nbytes
