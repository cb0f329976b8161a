"""A transfer that ends only when a test lets it."""

from __future__ import annotations

import fcntl
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.support.transfers import aligned_buffer
from tierstore.storage import Extent, Storage
from tierstore.units import SECTOR_BYTES


class BlockedWrite:
    """A write of one sector to "page" that cannot end before release()."""

    def __init__(self, storage: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
        storage.create("page", SECTOR_BYTES)
        buffer = aligned_buffer(b"n" * SECTOR_BYTES)
        self._go_on = threading.Event()
        self._pipe = os.pipe()
        with monkeypatch.context() as patch:
            if storage.engine != "aiofiles":
                # The "file" is a pipe with room for one sector, which is full.
                writer = self._pipe[1]
                fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, SECTOR_BYTES)
                os.write(writer, bytes(SECTOR_BYTES))
                patch.setattr(os, "open", lambda *_, **__: os.dup(writer))
            else:
                monkeypatch.setattr(os, "fdatasync", lambda _: self._go_on.wait())
            self.transfer = storage.write("page", Extent(0, SECTOR_BYTES), buffer)

    def release(self) -> None:
        """Let the write end, and close the pipe."""
        if not self._go_on.is_set():
            self._go_on.set()
            for end in self._pipe:  # Without its reader the write to the pipe fails.
                os.close(end)

    @contextmanager
    def interrupted(self) -> Iterator[None]:
        """Interrupt the block, which waits for the write, and expect a KeyboardInterrupt."""
        thread = threading.main_thread().ident
        assert thread is not None
        timers = [
            threading.Timer(0.2, signal.pthread_kill, (thread, signal.SIGINT)),
            threading.Timer(30, self.release),  # Otherwise a failing test would hang.
        ]
        for timer in timers:
            timer.start()
        try:
            with pytest.raises(KeyboardInterrupt):
                yield
        finally:
            for timer in timers:
                timer.cancel()
                timer.join()
