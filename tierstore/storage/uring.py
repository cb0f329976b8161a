"""Direct I/O through io_uring, by a native thread that never takes the GIL."""

from __future__ import annotations

import errno
import logging
import resource
import threading
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from typing_extensions import override

from tierstore.errors import errno_text
from tierstore.storage._native import Ticket, UringEngine
from tierstore.storage.engine import QUEUE_DEPTH, REQUEST_BYTES
from tierstore.storage.engine_storage import EngineStorage, Operation
from tierstore.units import format_bytes

if TYPE_CHECKING:
    import numpy.typing as npt

_log = logging.getLogger("tierstore")


class UringStorage(EngineStorage[Ticket]):
    """Files of one directory, opened with O_DIRECT, moved by one ring.

    Args:
        directory: made with mode 0700 where absent.

    Raises:
        OSError: the kernel refuses the ring (EPERM, ENOSYS, ENOMEM, ...).
        RunDirectoryError: the directory cannot be made.
    """

    engine = "io_uring"
    direct = True
    _engine: UringEngine

    def __init__(self, directory: Path) -> None:
        # Memory that the kernel may have registered. More than one entry only after an interrupt.
        self._registered: list[npt.NDArray[np.uint8]] = []
        self._register_mutex = threading.Lock()
        self._refusal_logged = False
        super().__init__(directory, partial(UringEngine, QUEUE_DEPTH, REQUEST_BYTES), Ticket)

    def __del__(self) -> None:
        # If a storage is dropped unclosed, its transfers end before their buffers are freed. The
        # ring's thread runs no Python, so this is safe in any thread and at exit.
        self.close()

    @override
    def register(self, memory: memoryview) -> None:
        """Register memory. If the system refuses, log the reason once; transfers still work."""
        self._check_usable()
        array = np.frombuffer(memory, np.uint8) if memory.nbytes else np.empty(0, np.uint8)
        with self._register_mutex:
            self._registered.append(array)
            operation = Operation("register", self._directory, [], Ticket(), memory=array)
            address, nbytes = array.ctypes.data, array.nbytes
            self.start(
                operation,
                None,
                lambda ticket, _: self._engine.submit_register(ticket, address, nbytes),
            )
            self.wait_for(operation)
            self._registered = [] if operation.failure else [array]
        if operation.failure and not self._refusal_logged:
            self._refusal_logged = True
            _log.warning(
                "%s: memory of %s is not registered with io_uring, so transfers take more "
                "processor time: %s",
                self.location,
                format_bytes(array.nbytes),
                _reason(operation.failure[-1]),
            )

    @override
    def _release_all(self) -> None:
        super()._release_all()
        self._registered = []


def _reason(error: int) -> str:
    what = errno_text(error)
    if error not in (errno.ENOMEM, errno.EPERM):
        return what
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    allowed = "no limit" if limit == resource.RLIM_INFINITY else format_bytes(limit)
    return (
        f"{what}; this user may lock {allowed}: raise it with `ulimit -l`, in a container with "
        "`--ulimit memlock=-1`, in a systemd unit with LimitMEMLOCK="
    )
