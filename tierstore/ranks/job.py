"""The ranks of a torch.distributed job: messages between them, and waits for collectives.

Every wait polls the failure detector. If a rank failed, died or is stuck, all other ranks raise an
error that names this rank, instead of blocking.
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import json
import logging
import math
import os
import pickle
import queue
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import AllgatherOptions, PrefixStore, Store
from torch.distributed import distributed_c10d
from typing_extensions import override

from tierstore.errors import PeerFailed, RollCallError, StoreClosedError, ThreadError
from tierstore.ranks.failure_detector import (
    ACCUSE_S,
    FOREVER,
    KEY_VALUE_STORE,
    TELL_S,
    FailureDetector,
    clone,
)
from tierstore.ranks.peers import Alone, Peers, Ranks
from tierstore.ranks.roll_call import RollCalls
from tierstore.threads import Latch, Result, start_thread

logger = logging.getLogger("tierstore")

T = TypeVar("T")

# A collective is polled again after this fraction of the time that it has taken so far.
_PAUSE_PER_WAITED = 1 / 16
_PAUSE_S_MIN = 20e-6
_PAUSE_S_MAX = 5e-3
# A roll call that takes longer watches the connections to the other ranks.
_WATCH_S = 0.5

# A gather sends this many bytes. It sends a second time only if the value of a rank needs more.
FRAME_BYTES = 256
_LENGTH_BYTES = 8

# A thread should not return from a call into torch while the interpreter exits.
_WORKER_END_S = 2.0


class ProcessGroupRanks(Ranks):
    """The ranks of a process group of torch.distributed. All ranks open and close it together.

    Args:
        group: the process group; None is the default group. Nothing is ever sent over it.
        timeout_s: seconds that other ranks wait for a rank, in a roll call or in one collective.

    Attributes:
        rank: this rank, within the group.
        world_size: number of ranks of the group.
        global_ranks: rank of the group -> its rank in the default group.
        commits: the channel of the commit thread. The other methods are for the training thread.
        torch_timeout: how long torch lets a collective wait.

    Raises:
        ValueError: torch.distributed is not initialized, or the group lacks this process.
        RollCallError: another rank did not open the store in time. You may open it again.
        PeerFailed: another rank failed.
    """

    def __init__(self, group: dist.ProcessGroup | None, *, timeout_s: float) -> None:
        if not 0 < timeout_s < math.inf:
            raise ValueError(f"timeout must be a positive number of seconds, got {timeout_s}")
        if not dist.is_initialized():
            raise ValueError("torch.distributed is not initialized: call init_process_group()")
        self.rank = dist.get_rank(group)
        if self.rank < 0:
            raise ValueError(
                f"global rank {dist.get_rank()} is not in the process group: only its ranks may "
                "open a store on it"
            )
        self.world_size = dist.get_world_size(group)
        self.global_ranks = dist.get_process_group_ranks(group)
        self._is_world = self.world_size == dist.get_world_size()
        self._pid = os.getpid()
        self._timeout_s = timeout_s
        # A message may arrive one timeout early, and then wait for a full timeout.
        self.torch_timeout = timedelta(seconds=2 * timeout_s + 10)
        self._waiting_since: dict[str, float] = {}
        self._groups: list[dist.ProcessGroup] = []
        self._host = self.global_ranks.index(0) if 0 in self.global_ranks else self.rank
        # Calls into torch cannot be interrupted. A thread makes them, one at a time.
        self._tasks: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._worker = threading.Thread(target=self._work, name="tierstore-ranks", daemon=True)
        start_thread(self._worker)
        try:
            self._open()
        except BaseException:
            self._tasks.put(None)
            raise
        atexit.register(self.close)

    def _open(self) -> None:
        """Meet the other ranks and connect to them."""
        try:
            self._roll_calls, store = self._meet()
            self._failures = FailureDetector(
                PrefixStore("failures", store),
                rank=self.rank,
                world_size=self.world_size,
                host=self._host,
                waits=self._waits,
            )
        except ThreadError:
            raise
        except RuntimeError as error:
            raise PeerFailed(self._host, f"{KEY_VALUE_STORE} is gone: {error}") from error
        try:
            self._training = self._connect(lambda: _Channel(self, "training", store))
            self.commits = self._connect(lambda: _Channel(self, "commit", store))
            self._connections = self._connect(lambda: _Channel(self, "roll call", store))
        except BaseException:
            self._failures.close()
            raise

    @override
    def gather(self, value: Any) -> list[Any]:
        return self._training.gather(value)

    @override
    def roll_call(self, call: str) -> None:
        self._require_open()
        self.check()  # A failed rank must not seem to go on.
        interrupted = Latch()
        # A rank that is stuck in the previous collective is found first and reported to all ranks.
        timeout_s = self._timeout_s + ACCUSE_S

        def take_part() -> None:
            options: Any = {"timeout_s": timeout_s, "interrupted": interrupted}
            while not self._roll_calls.take_part(call, **options):
                pass

        watched_from = time.monotonic() + _WATCH_S

        def is_done() -> bool:
            if time.monotonic() > watched_from and not came.is_set:
                self._connections.watch()
            return came.wait(_PAUSE_S_MAX)

        came = self._submit(take_part)
        try:
            # If the key-value store answers, the roll call ends by itself.
            self._poll(is_done, "training", timeout_s=timeout_s + ACCUSE_S)
        except Exception:
            raise
        except BaseException as error:
            interrupted.set()
            if not _was_refused(came):  # The other ranks now wait for this rank.
                self.fail(error)
            raise
        try:
            came.result()
        except RuntimeError as error:
            raise self._failures.connection_lost(error) from error
        self._tasks.put(self._roll_calls.remove_keys)

    @override
    def fail(self, error: BaseException, *, other_group: bool = False) -> None:
        # Takes milliseconds, or seconds if the key-value store does not answer.
        if isinstance(error, PeerFailed) and not other_group:
            self._failures.report(error.rank, error.reason)
        else:
            self._failures.report(self.rank, str(error) or type(error).__name__)

    @override
    def broadcast(
        self, tensor: torch.Tensor, *, source: int, group: dist.ProcessGroup
    ) -> dist.Work:
        work = dist.broadcast(tensor, src=self.global_ranks[source], group=group, async_op=True)
        return cast(dist.Work, work)

    @override
    def wait(self, work: dist.Work, thread: str = "training") -> None:
        # Work on a device counts as done when it is on its stream: later work of the current
        # stream follows it. A callback of the future would run in a thread of gloo. Such a thread
        # must not call Python while the process exits.
        self._wait_until(work.get_future().done, thread)
        self.end_collective(work)

    @override
    def new_group(
        self, ranks: Sequence[int], *, backend: str | None = None
    ) -> dist.ProcessGroup | None:
        # torch names a group made by only some ranks of the job after the number of its groups.
        known = None if self._is_world else len(distributed_c10d._world.pg_names)
        asked = self._training.gather((list(ranks), known if self.rank in ranks else None))
        if len({str(members) for members, _ in asked}) > 1:
            raise ValueError(f"all ranks must ask for the same group, but they ask for {asked}")
        counts = [asked[rank][1] for rank in ranks]
        if len(set(counts)) > 1:
            raise ValueError(
                f"ranks {list(ranks)} are in {counts} process groups, but torch makes a group of "
                "them only if these numbers are equal: open the store on the default group instead"
            )
        group: dist.ProcessGroup = self._connect(
            lambda: dist.new_group(
                [self.global_ranks[rank] for rank in ranks],
                timeout=self.torch_timeout,
                backend=backend,
                use_local_synchronization=not self._is_world,
            )
        )
        if self.rank not in ranks:
            return None
        self._groups.append(group)
        return group

    @override
    def close(self) -> None:
        # Takes seconds at most, even if other ranks failed.
        if self._pid != os.getpid():
            return
        self._pid = -1
        atexit.unregister(self.close)
        self._failures.close()
        for group in self._groups:
            if self._failures.failure:
                group.abort()
            break_connections(group)
            # If torch names groups by their number, the next group would get the name of this
            # group and look for its connections.
            if self._is_world:
                with contextlib.suppress(ValueError):  # The process has destroyed all groups.
                    dist.destroy_process_group(group)
        self._groups.clear()
        self._roll_calls.closing = True
        self._tasks.put(None)
        self._worker.join(_WORKER_END_S)
        for channel in (self._training, self.commits, self._connections):
            channel.close()

    def _meet(self) -> tuple[RollCalls, Store]:
        """Meet the other ranks; return a key-value store that only these ranks use."""
        ranks = hashlib.sha256(str(self.global_ranks).encode()).hexdigest()[:16]
        default = clone(distributed_c10d._get_default_store())
        meetings = PrefixStore(f"tierstore/{ranks}", default)
        opening = PrefixStore("tierstore/opening", default)
        me = str(self.global_ranks[self.rank])
        ours = [str(rank) for rank in self.global_ranks]
        has_met = False

        def awaits_this_rank(rank: int) -> bool:
            # compare_set() reads the key, or returns the expected value if the key is absent.
            # get() would wait if the key was deleted in between.
            text = opening.compare_set(str(self.global_ranks[rank]), "null", "null")
            opened = json.loads(text)
            # A rank that opens the same store will come to this meeting.
            return opened is not None and me in opened and (has_met or opened != ours)

        interrupted = Latch()

        def come_to_meeting() -> tuple[RollCalls, Store] | None:
            number = meetings.compare_set("number", "", "0").decode()
            store = PrefixStore(number, meetings)
            calls = RollCalls(
                store,
                rank=self.rank,
                world_size=self.world_size,
                awaits_this_rank=awaits_this_rank,
            )
            options: Any = {"timeout_s": self._timeout_s, "interrupted": interrupted}
            try:
                came = calls.take_part("TierStore()", **options)
            finally:  # Ranks that arrive from now on go to another meeting.
                meetings.compare_set("number", number, str(int(number) + 1))
            return (calls, store) if came else None

        def meet() -> tuple[RollCalls, Store]:
            nonlocal has_met
            opening.set(me, json.dumps(ours))
            try:
                while (met := come_to_meeting()) is None:
                    pass
                has_met = True
                return met
            finally:
                opening.delete_key(me)

        met = self._submit(meet)
        try:
            answered = met.wait(self._timeout_s + ACCUSE_S)
        except BaseException:
            interrupted.set()
            _was_refused(met)
            raise
        if not answered:
            raise PeerFailed(self._host, f"{KEY_VALUE_STORE} does not answer")
        return met.result()

    def _waits(self) -> dict[str, float]:
        now = time.monotonic()
        return {thread: now - since for thread, since in self._waiting_since.copy().items()}

    def _require_open(self) -> None:
        if self._roll_calls.closing:
            raise StoreClosedError("the ranks were closed: make others")

    def check(self) -> None:
        """Raise PeerFailed if a rank failed."""
        if failure := self._failures.failure:
            raise failure

    def _connect(self, connect: Callable[[], T]) -> T:
        """Run an uninterruptible call into torch, with the timeout of a collective."""
        result = self._submit(connect)
        self._wait_until(lambda: result.is_set, "training")
        try:
            return result.result()
        except RuntimeError as error:
            raise self._failures.connection_lost(error) from error

    def _submit(self, act: Callable[[], T]) -> Result[T]:
        """Call a function in the worker thread."""
        result: Result[T] = Result()
        self._tasks.put(lambda: result.settle(act))
        return result

    def _work(self) -> None:
        while (task := self._tasks.get()) is not None:
            with contextlib.suppress(RuntimeError):  # The failure detector reports a lost store.
                task()

    def _wait_until(self, is_done: Callable[[], bool], thread: str) -> None:
        try:
            self._poll(is_done, thread, timeout_s=self._timeout_s)
        except Exception:
            raise
        except BaseException as error:  # The other ranks may finish this collective without it.
            self.fail(error)
            raise

    def _poll(self, is_done: Callable[[], bool], thread: str, *, timeout_s: float) -> None:
        began = self._waiting_since[thread] = time.monotonic()
        try:
            while not is_done():
                self.check()
                waited = time.monotonic() - began
                if waited > timeout_s:
                    raise self._failures.timed_out(thread, timeout_s)
                time.sleep(min(max(waited * _PAUSE_PER_WAITED, _PAUSE_S_MIN), _PAUSE_S_MAX))
        finally:
            del self._waiting_since[thread]

    def end_collective(self, work: Any) -> None:
        """Finish a collective that is done, or raise PeerFailed if it broke."""
        try:
            work.wait()
        except RuntimeError as error:
            raise self._failures.connection_lost(error) from error


class _Channel(Peers):
    """A gloo group for one thread of each rank; see Peers. Made by all ranks.

    Args:
        ranks: the ranks. They end a wait if one of them failed.
        thread: name of the thread in errors; unique among the channels of a rank.
        store: a key-value store for the channels of these ranks.
    """

    def __init__(self, ranks: ProcessGroupRanks, thread: str, store: Store) -> None:
        self.rank, self.world_size = ranks.rank, ranks.world_size
        self._ranks = ranks
        self._thread = thread
        # Not dist.new_group(): its names depend on the other groups of this process.
        # Any, because torch's type hints lack the collectives.
        self._group: Any = dist.ProcessGroupGloo(
            PrefixStore(thread, store), self.rank, self.world_size, ranks.torch_timeout
        )
        self._watch: Any = None

    @override
    def gather(self, value: Any) -> list[Any]:
        data = pickle.dumps(value)
        start = len(data).to_bytes(_LENGTH_BYTES, "little") + data
        frames = self._gather_bytes(start[:FRAME_BYTES], FRAME_BYTES)
        lengths = [int.from_bytes(frame[:_LENGTH_BYTES], "little") for frame in frames]
        found = [frame[_LENGTH_BYTES:] for frame in frames]
        if max(lengths) > FRAME_BYTES - _LENGTH_BYTES:
            found = self._gather_bytes(data, max(lengths))
        return [pickle.loads(data[:n]) for data, n in zip(found, lengths, strict=True)]

    def watch(self) -> None:
        """Raise PeerFailed if the connection to a rank broke; never block.

        Only a waiting collective detects a broken connection. The collective of watch() ends when
        all ranks have watched, and the next call begins another one.
        """
        if self._watch is None:
            own = torch.zeros(1)
            everyone = [torch.empty(1) for _ in range(self.world_size)]
            options = AllgatherOptions()
            options.timeout = FOREVER  # A timeout would break the connections.
            self._watch = self._group.allgather([everyone], [own], options)
        if self._watch.get_future().done():
            watch, self._watch = self._watch, None
            self._ranks.end_collective(watch)

    def close(self) -> None:
        """End the group, even if a collective waits for ranks that will never come."""
        group, self._group = self._group, None
        break_connections(group)

    def _gather_bytes(self, data: bytes, nbytes: int) -> list[memoryview]:
        group = self._group
        if group is None:
            raise StoreClosedError("the ranks were closed: make others")
        own = torch.frombuffer(bytearray(data.ljust(nbytes, b"\0")), dtype=torch.uint8)  # (nbytes,)
        everyone = torch.empty(self.world_size, nbytes, dtype=torch.uint8, device="cpu")
        self._ranks.check()  # A failed rank must not appear to continue.
        self._ranks.wait(group.allgather([list(everyone)], [own]), self._thread)
        return [memoryview(row.numpy()) for row in everyone]


def _was_refused(roll_call: Result[Any]) -> bool:
    """Return whether a roll call that this rank leaves was refused on all ranks."""
    return roll_call.wait(TELL_S) and isinstance(roll_call.error, RollCallError)


def ranks_of(group: dist.ProcessGroup | Ranks | None, *, timeout_s: float) -> Ranks:
    """Return the ranks of the job that opens a store.

    Args:
        group: the process group; None is the default group, or this process alone if
            torch.distributed is not initialized. ``Ranks`` are returned unchanged.
        timeout_s: see ProcessGroupRanks.
    """
    if group is not None and not isinstance(group, dist.ProcessGroup):
        return group
    if group is None and not (dist.is_available() and dist.is_initialized()):
        launched = os.environ.get("WORLD_SIZE", "1")
        if launched != "1":
            logger.warning(
                "WORLD_SIZE is %s, but torch.distributed is not initialized: each process opens "
                "its own store. For one store, call torch.distributed.init_process_group() before "
                "TierStore()",
                launched,
            )
        return Alone()
    if dist.get_world_size(group) == 1:
        return Alone()
    return ProcessGroupRanks(group, timeout_s=timeout_s)


def break_connections(group: Any) -> None:
    """End the collectives that wait in a gloo group, so that the group can be freed."""
    # Gloo has no abort(), but a wait that times out breaks all connections of its group. A wait for
    # a rank with a broken connection raises at once and breaks no other connection.
    for peer in range(group.size()):
        if peer != group.rank():
            with contextlib.suppress(RuntimeError):
                group.recv([torch.empty(1, device="cpu")], peer, 0).wait(timedelta(milliseconds=1))
