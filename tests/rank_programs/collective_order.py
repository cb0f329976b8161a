"""Record of the collectives that a rank issues, and a check that their order cannot deadlock."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch.distributed as dist


@dataclass(frozen=True, slots=True, kw_only=True)
class Issued:
    """A collective that a rank has issued."""

    kind: str
    ranks: tuple[int, ...]
    """The ranks of its group."""
    what: tuple[int, ...] = ()
    """Arguments on which the ranks of the group must agree."""


@contextmanager
def recorded(everyone: Sequence[int]) -> Iterator[list[Issued]]:
    """Yield the list of collectives that the calling thread issues, with a store of these ranks."""
    issued: list[Issued] = []
    thread = threading.current_thread()

    def note(kind: str, ranks: Sequence[int], *what: int) -> None:
        if threading.current_thread() is thread:
            issued.append(Issued(kind=kind, ranks=tuple(ranks), what=what))

    real_all_to_all, real_broadcast = dist.all_to_all_single, dist.broadcast
    real_new_group, real_gloo = dist.new_group, dist.ProcessGroupGloo

    def all_to_all(*arguments: Any, group: Any, **options: Any) -> Any:
        note("all-to-all", dist.get_process_group_ranks(group))
        return real_all_to_all(*arguments, group=group, **options)

    def broadcast(tensor: Any, *, src: int, group: Any, **options: Any) -> Any:
        note("broadcast", dist.get_process_group_ranks(group), src, tensor.nbytes)
        return real_broadcast(tensor, src=src, group=group, **options)

    def new_group(ranks: Sequence[int], **options: Any) -> Any:
        note("new group", everyone, *ranks)
        return real_new_group(ranks, **options)

    class Gloo:
        """The gloo group of the store's control channel."""

        def __init__(self, *arguments: Any) -> None:
            self._group = real_gloo(*arguments)

        def allgather(self, outputs: Any, inputs: Any, *options: Any) -> Any:
            if not options:  # Nothing waits for the all-gather that watches connections.
                note("all-gather", everyone, inputs[0].nbytes)
            return self._group.allgather(outputs, inputs, *options)

        def __getattr__(self, name: str) -> Any:
            return getattr(self._group, name)

    with (
        mock.patch.object(dist, "all_to_all_single", all_to_all),
        mock.patch.object(dist, "broadcast", broadcast),
        mock.patch.object(dist, "new_group", new_group),
        mock.patch.object(dist, "ProcessGroupGloo", Gloo),
    ):
        yield issued


def assert_one_order(issued_by_rank: Sequence[Sequence[Issued]]) -> None:
    """Check that all ranks would end if every collective waited for all ranks of its group.

    On a device, a collective that is not the next one on another rank may wait forever.
    """
    left = [deque(issued) for issued in issued_by_rank]
    while any(left):
        heads = [issued[0] if issued else None for issued in left]
        ready = next(
            (
                head
                for rank, head in enumerate(heads)
                if head is not None
                and rank == head.ranks[0]
                and all(heads[member] == head for member in head.ranks)
            ),
            None,
        )
        assert ready is not None, f"these collectives wait for each other: {heads}"
        for member in ready.ranks:
            left[member].popleft()
