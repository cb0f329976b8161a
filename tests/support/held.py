"""Threads and file descriptors that this process holds."""

from __future__ import annotations

import os
import threading
from contextlib import suppress


class Held:
    """The threads and file descriptors of this process at the time when the object is made.

    Tests compare these and not their numbers: what an earlier test left, for example in the
    traceback of an error, may end during a later test.
    """

    def __init__(self) -> None:
        self.threads = set(threading.enumerate())
        self.descriptors = _descriptors()

    def assert_nothing_new(self, when: str = "now") -> None:
        """Fail if the process holds more ``when`` this is called. Ending threads may end first."""
        self.assert_no_new_thread(when)
        assert _descriptors() <= self.descriptors, when

    def assert_no_new_thread(self, when: str = "now") -> None:
        """Fail if the process has a further thread that does not end."""
        for thread in set(threading.enumerate()) - self.threads:
            thread.join(10)
        assert set(threading.enumerate()) <= self.threads, when


def _descriptors() -> set[tuple[str, str]]:
    """Return number and file of each descriptor."""
    found = set()
    for number in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # The descriptor of this listing.
            found.add((number, os.readlink(f"/proc/self/fd/{number}")))
    return found
