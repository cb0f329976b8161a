"""The ranks of a job, as far as a store needs them: a way to tell each other plain values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeVar, cast

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


def agree(peers: Peers, call: str, act: Callable[[], T]) -> list[T]:
    """Do something on every rank; return the value of every rank, or raise on all of them.

    Args:
        peers: all ranks. They make this call together.
        call: names the call in the error of a rank that makes another one, as in
            "erase the old run".
        act: called on this rank. Its value must be plain.

    Raises:
        Exception: what ``act`` raised here.
        PeerFailed: ``act`` raised on another rank only, or another rank makes another call.
    """
    values, _ = _meet(peers, call, act, send=lambda value: value)
    return values


def together(peers: Peers, call: str, act: Callable[[], T]) -> T:
    """Do something on every rank; return the value of this rank, or raise on all of them.

    Unlike agree(), the value stays on this rank and may be anything.
    """
    _, value = _meet(peers, call, act, send=lambda value: None)
    return value


def on_rank_0(peers: Peers, call: str, act: Callable[[], T]) -> T:
    """Do something on rank 0 alone; return its value on every rank, or raise on all of them."""
    values = agree(peers, call, act if peers.rank == 0 else lambda: None)
    return cast(T, values[0])


def _meet(
    peers: Peers, call: str, act: Callable[[], T], *, send: Callable[[T], Any]
) -> tuple[list[Any], T]:
    failure: Exception | None = None
    try:
        value = act()
        sent = send(value)
    except Exception as error:  # The other ranks wait for an answer, whatever the error is.
        failure, sent = error, None
    reason = None if failure is None else str(failure) or type(failure).__name__
    try:
        outcomes = peers.gather((call, sent, reason))
    except PeerFailed as peer_failed:
        raise peer_failed from failure  # The local error may be the cause, or follow from it.
    if failure is not None:
        raise failure
    for rank, outcome in enumerate(outcomes):
        other_call = outcome[0] if isinstance(outcome, tuple) else "another call"
        if other_call != call:
            raise PeerFailed(
                rank,
                f"makes another call than this rank ({other_call!r}, here {call!r}): all ranks "
                "call step(), state_dict() and the like together, in the same order",
            )
        if outcome[2] is not None:
            raise PeerFailed(rank, outcome[2])
    return [outcome[1] for outcome in outcomes], value
