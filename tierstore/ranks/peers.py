"""The interface of a store to the ranks of a job, a single process, and agreements of ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar, cast

import torch
from typing_extensions import override

from tierstore.errors import PeerFailed

T = TypeVar("T")


class Peers(Protocol):
    """All ranks of a job, seen from one rank. All ranks make the same calls in the same order."""

    rank: int
    """This rank, counted from 0."""

    world_size: int
    """Number of ranks."""

    def gather(self, value: Any) -> list[Any]:
        """Send a plain value to all ranks; return the values of all ranks, in order of rank.

        Raises:
            PeerFailed: another rank failed.
        """


class Ranks(Peers, Protocol):
    """The ranks of a job that trains one model, seen from the training thread of one rank.

    A torch.distributed job, a single process and a simulated job implement it. Every parameter is
    replicated or sharded over the ranks.
    """

    global_ranks: Sequence[int]
    """Rank -> its number in the meshes of DTensors."""

    commits: Peers
    """The same ranks, for the thread that commits."""

    def roll_call(self, call: str) -> None:
        """Block until all ranks make the same call. Called before the call's first collective.

        Args:
            call: names the call in errors, such as "state_dict()".

        Raises:
            RollCallError: another rank makes another call, or does not come in time. No rank
                begins the call.
            PeerFailed: another rank failed.
        """

    def new_group(self, ranks: Sequence[int], *, backend: str | None = None) -> Any:
        """Make a group of some of the ranks; all ranks call this, in the same order.

        Args:
            ranks: the members.
            backend: backend of torch.distributed; None is the backend of the default group.

        Returns:
            The group, valid until close(); None on a rank that is not a member.

        Raises:
            ValueError: the ranks ask for different groups.
            PeerFailed: another rank failed.
        """

    def broadcast(self, tensor: torch.Tensor, *, source: int, group: Any) -> Any:
        """Start to send a tensor from one member of a group to the other members.

        Args:
            tensor: contiguous, of the same dtype and shape on all members. Sent on the rank
                ``source``, overwritten on other members. The caller keeps the tensor alive until
                wait() returns.
            source: the rank that sends.
            group: a group of new_group().

        Returns:
            The work to wait() for.
        """

    def wait(self, work: Any) -> None:
        """Block until a collective of a group is done. Send and receive are not collectives.

        Raises:
            PeerFailed: another rank failed.
        """

    def fail(self, error: BaseException, *, other_group: bool = False) -> None:
        """Publish the failure of this rank; the first failure of any rank is raised on all ranks.

        Never raises.

        Args:
            error: the reason. A PeerFailed names the rank to blame.
            other_group: whether a PeerFailed may name a rank of another process group.
        """

    def close(self) -> None:
        """Release connections and threads."""


class Alone(Ranks):
    """The only rank of a single process. Messages to other ranks have no recipient."""

    rank = 0
    world_size = 1
    global_ranks = (0,)

    def __init__(self) -> None:
        self.commits = self

    @override
    def gather(self, value: Any) -> list[Any]:
        return [value]

    @override
    def roll_call(self, call: str) -> None:
        pass

    @override
    def new_group(self, ranks: Sequence[int], *, backend: str | None = None) -> Any:
        return None

    @override
    def broadcast(self, tensor: torch.Tensor, *, source: int, group: Any) -> Any:
        return None

    @override
    def wait(self, work: Any) -> None:
        pass

    @override
    def fail(self, error: BaseException, *, other_group: bool = False) -> None:
        pass

    @override
    def close(self) -> None:
        pass


def agree(peers: Peers, call: str, act: Callable[[], T]) -> list[T]:
    """Call a function on every rank; return the values of all ranks, or raise on all ranks.

    Args:
        peers: all ranks. They make this call together.
        call: names the call in the error of a rank that makes another call, such as
            "erase the old run".
        act: called on this rank. Its value must be plain.

    Raises:
        Exception: the error that ``act`` raised here.
        PeerFailed: ``act`` raised on another rank only, or another rank makes another call.
    """
    values, _ = _meet(peers, call, act, send=lambda value: value)
    return values


def together(peers: Peers, call: str, act: Callable[[], T]) -> T:
    """Call a function on every rank; return the value of this rank, or raise on all ranks.

    Unlike agree(), the value stays on this rank and may have any type.
    """
    _, value = _meet(peers, call, act, send=lambda value: None)
    return value


def on_rank_0(peers: Peers, call: str, act: Callable[[], T]) -> T:
    """Call a function on rank 0 only; return its value on every rank, or raise on all ranks."""
    values = agree(peers, call, act if peers.rank == 0 else lambda: None)
    return cast(T, values[0])


def _meet(
    peers: Peers, call: str, act: Callable[[], T], *, send: Callable[[T], Any]
) -> tuple[list[Any], T]:
    failure: Exception | None = None
    try:
        value = act()
        sent = send(value)
    except Exception as error:  # The other ranks wait for an answer, after any error.
        failure, sent = error, None
    reason = None if failure is None else str(failure) or type(failure).__name__
    try:
        outcomes = peers.gather((call, sent, reason))
    except PeerFailed as peer_failed:
        raise peer_failed from failure  # The local error may be the cause or the consequence.
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
