"""The ranks of a job, as far as a store needs them: a way to tell each other plain values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from tierstore.errors import PeerFailed

T = TypeVar("T")


class Peers(Protocol):
    """All ranks of a job, seen from one. Every rank makes the same calls in the same order."""

    @property
    def rank(self) -> int:
        """This rank, from 0 on."""

    @property
    def world_size(self) -> int:
        """Number of ranks."""

    def gather(self, value: Any) -> list[Any]:
        """Tell a plain value to all ranks; return that of each, in order of rank.

        Raises:
            PeerFailed: another rank will not answer any more.
        """


class Alone:
    """The one rank of a job of one."""

    rank = 0
    world_size = 1

    def gather(self, value: Any) -> list[Any]:
        """See Peers.gather."""
        return [value]


def agree(peers: Peers, act: Callable[[], T]) -> list[T]:
    """Do something on every rank; return what each got, or raise on all of them.

    Raises:
        Exception: what ``act`` raised here.
        PeerFailed: it raised on another rank only, or that one does something else.
    """
    failure: Exception | None = None
    value: T | None = None
    try:
        value = act()
    except Exception as error:  # Whatever it is, the others wait for an answer.
        failure = error
    here = act.__qualname__
    reason = None if failure is None else str(failure) or type(failure).__name__
    try:
        outcomes = peers.gather((here, value, reason))
    except PeerFailed as peer_failed:
        raise peer_failed from failure  # Which may be why, or follow from it.
    if failure is not None:
        raise failure
    for rank, outcome in enumerate(outcomes):
        there = outcome[0] if isinstance(outcome, tuple) else "another call"
        if there != here:
            raise PeerFailed(
                rank,
                f"makes another call than this rank ({there}, here {here}): all ranks call step(), "
                "state_dict() and the like together, in the same order",
            )
        if outcome[2] is not None:
            raise PeerFailed(rank, outcome[2])
    return [outcome[1] for outcome in outcomes]
