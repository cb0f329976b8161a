"""Threads and calls on threads. They survive interrupts, and report if the system has no thread.

``threading.Event``, ``Condition``, ``Future`` and ``ThreadPoolExecutor`` take their lock in Python
code. An interrupt between taking the lock and entering the ``with`` block leaves the lock taken,
and the other thread waits for it forever. The classes here use only locks and a queue written
in C.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, Generic, Self, TypeAlias, TypeVar

from tierstore.errors import ThreadError

_T = TypeVar("_T")


def start_thread(thread: threading.Thread) -> None:
    """Start a thread.

    Raises:
        ThreadError: the system starts no further thread.
    """
    try:
        thread.start()
    except RuntimeError as error:
        raise ThreadError(str(error)) from error


class Latch:
    """An event that one thread sets and others wait for."""

    def __init__(self) -> None:
        self.is_set = False
        self._unset = [True]  # Taken by the one call that sets the latch.
        self._lock = threading.Lock()
        self._lock.acquire()

    def set(self) -> None:
        """Let all threads continue. May be called again.

        If threads wait without a timeout, it must be called in a thread without interrupts.
        """
        self.is_set = True
        while self._unset:
            self._unset.pop()
            self._lock.release()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Block until the latch is set, or for ``timeout_s``. Only one thread may pass a timeout.

        Returns:
            Whether the latch is set.
        """
        if self.is_set:
            return True
        if timeout_s is None:
            with self._lock:
                pass
        elif self._lock.acquire(timeout=timeout_s):
            # An interrupt here leaves the lock taken. A latch that is set ignores the lock.
            self._lock.release()
        return self.is_set


class Result(Latch, Generic[_T]):
    """The result of a call that may still run: a value or an error.

    Attributes:
        error: the error that the call has raised, or None.
    """

    _value: _T

    def __init__(self) -> None:
        super().__init__()
        self.error: BaseException | None = None

    def settle(self, act: Callable[[], _T]) -> None:
        """Make the call. Called once."""
        try:
            self._value = act()
        except BaseException as error:
            self.error = error
            self.set()
            del self, act  # Break a cycle: the error refers to this frame.
        else:
            self.set()

    def result(self) -> _T:
        """Wait for the end of the call; return its value or raise its error."""
        self.wait()
        if self.error is not None:
            try:
                raise self.error
            finally:
                del self  # As in settle().
        return self._value


_Calls: TypeAlias = SimpleQueue[tuple[Result[Any], Callable[[], Any]] | None]


class Threads:
    """Threads that make calls in the order in which they are submitted.

    All threads are started at once: if the system cannot start one, the error is raised here. They
    end after the submitted calls, with close() or when this object is dropped. A process that exits
    waits for them.

    Args:
        count: number of threads.
        name: prefix of their names.

    Raises:
        ThreadError: the system does not start all threads.
    """

    def __init__(self, count: int, name: str) -> None:
        self._calls: _Calls = SimpleQueue()
        self._mutex = threading.Lock()
        self._closed = False
        self._pid = os.getpid()
        self._ends: list[Result[None]] = [Result() for _ in range(count)]
        weakref.finalize(self, self._calls.put, None).atexit = False
        try:
            for index, end in enumerate(self._ends):
                work = partial(end.settle, partial(_work, self._calls))
                # A daemon, because an interrupt in start() may leave a thread that never begins.
                start_thread(threading.Thread(target=work, name=f"{name}_{index}", daemon=True))
        except BaseException:
            self._calls.put(None)
            raise
        _note(self, self._ends)

    def submit(self, act: Callable[..., _T], *arguments: Any) -> Result[_T]:
        """Let a thread call ``act(*arguments)``.

        Raises:
            RuntimeError: close() was called, for example because the process ends.
        """
        result: Result[_T] = Result()
        with self._mutex:
            if self._closed:
                raise RuntimeError("the threads have ended")
            self._calls.put((result, partial(act, *arguments)))
        return result

    def close(self, *, cancel: bool = False) -> None:
        """End the threads after all calls, and wait for that. Call it again after an interrupt.

        Args:
            cancel: drop the calls that have not begun. No one may wait for them.
        """
        if self._pid != os.getpid():  # A forked child does not have the threads.
            return
        with self._mutex:
            self._closed = True
            while cancel:
                try:
                    self._calls.get_nowait()
                except Empty:
                    break
            self._calls.put(None)
        for end in self._ends:
            end.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def at_once(calls: Sequence[Callable[[], _T]], name: str) -> list[_T]:
    """Make each call on its own thread; return the results.

    Args:
        calls: the calls.
        name: prefix of the names of the threads.

    Raises:
        ThreadError: the system starts no further thread. No call was made.
        Exception: the error of the first failed call, after all calls have ended.
    """
    with Threads(len(calls), name) as threads:
        made = [threads.submit(call) for call in calls]
    return [call.result() for call in made]


def _work(calls: _Calls) -> None:
    while (call := calls.get()) is not None:
        result, act = call
        result.settle(act)
        del call, result, act  # Otherwise they stay alive until the next call.
    calls.put(None)  # For the next thread.


_all: dict[int, tuple[weakref.ref[Threads], Sequence[Result[None]]]] = {}
"""All threads that may run, including threads of dropped objects, in the order of their start."""

os.register_at_fork(after_in_child=_all.clear)


def _note(threads: Threads, ends: Sequence[Result[None]]) -> None:
    for key, (_, of_others) in list(_all.items()):
        if all(end.is_set for end in of_others):
            _all.pop(key, None)
    _all[id(ends)] = weakref.ref(threads), ends


def _end_all() -> None:
    # End the last ones first: a commit needs the threads of its engine, which started earlier.
    for reference, ends in reversed(list(_all.values())):
        if (threads := reference()) is not None:
            threads.close()
        for end in ends:
            end.wait()


# Not atexit: its hooks run later, after the hooks of torch. Here the hook registered first runs
# last. A module that commits at exit imports this module, so its hook still finds the threads.
threading._register_atexit(_end_all)  # type: ignore[attr-defined]
