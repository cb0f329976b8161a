"""Plain values between the ranks of a gloo group, and an end of what waits in one."""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store

from tierstore.errors import StoreClosedError

# A gather sends this many bytes, and a second time only if any rank's value needs more.
FRAME_BYTES = 256
_LENGTH_BYTES = 8


class Channel:
    """A gloo group of one thread's own; see Peers. Made by all ranks.

    Args:
        store: a key-value store that this channel alone uses.
        rank: this rank.
        world_size: number of ranks.
        timeout: how long torch lets a collective wait.
        run: starts a collective and waits until it is done, or raises PeerFailed.

    Attributes:
        rank: this rank.
        world_size: number of ranks.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        world_size: int,
        *,
        timeout: timedelta,
        run: Callable[[Callable[[], dist.Work]], None],
    ) -> None:
        self.rank = rank
        self.world_size = world_size
        self._run = run
        # Not dist.new_group(), whose names depend on which other groups this process is in.
        # Any, because torch's type marks lack the collectives.
        self._group: Any = dist.ProcessGroupGloo(store, rank, world_size, timeout)

    def gather(self, value: Any) -> list[Any]:
        """See Peers.gather."""
        data = pickle.dumps(value)
        start = len(data).to_bytes(_LENGTH_BYTES, "little") + data
        frames = self._gather_bytes(start[:FRAME_BYTES], FRAME_BYTES)
        lengths = [int.from_bytes(frame[:_LENGTH_BYTES], "little") for frame in frames]
        found = [frame[_LENGTH_BYTES:] for frame in frames]
        if max(lengths) > FRAME_BYTES - _LENGTH_BYTES:
            found = self._gather_bytes(data, max(lengths))
        return [pickle.loads(data[:n]) for data, n in zip(found, lengths, strict=True)]

    def close(self) -> None:
        """End the group, also if a collective waits for ranks that will never come."""
        group, self._group = self._group, None
        break_connections(group)

    def _gather_bytes(self, data: bytes, nbytes: int) -> list[memoryview]:
        group = self._group
        if group is None:
            raise StoreClosedError("the ranks were closed: make others")
        own = torch.frombuffer(bytearray(data.ljust(nbytes, b"\0")), dtype=torch.uint8)
        everyone = torch.empty(self.world_size, nbytes, dtype=torch.uint8)
        self._run(lambda: group.allgather([list(everyone)], [own]))
        return [memoryview(row.numpy()) for row in everyone]


def break_connections(group: Any) -> None:
    """End what waits in a gloo group for ranks that will not come, so that it can be freed."""
    # Gloo has no abort(), but a wait that times out breaks all connections of its group. One
    # for a rank whose connection is broken already raises at once, and breaks no other.
    for peer in range(group.size()):
        if peer != group.rank():
            with contextlib.suppress(RuntimeError):
                group.recv([torch.empty(1)], peer, 0).wait(timedelta(milliseconds=1))
