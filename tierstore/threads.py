"""Start of threads, which the system may refuse."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

from tierstore.errors import ThreadError


def start_thread(thread: threading.Thread) -> None:
    """Start a thread.

    Raises:
        ThreadError: the system starts no further thread.
    """
    try:
        thread.start()
    except RuntimeError as error:
        raise ThreadError(str(error)) from error


def started_pool(threads: int, name: str) -> ThreadPoolExecutor:
    """Return a pool whose threads have all been started.

    A pool that starts threads later may keep a call that it refused for want of a thread, and make
    the call once it has one.

    Args:
        threads: number of threads.
        name: prefix of their names.

    Raises:
        ThreadError: the system does not start all of them.
    """
    pool = ThreadPoolExecutor(threads, thread_name_prefix=name)
    all_started = threading.Barrier(threads)  # No thread takes two of the calls.
    try:
        for _ in range(threads):
            pool.submit(all_started.wait)
    except BaseException as error:
        all_started.abort()
        pool.shutdown(wait=False, cancel_futures=True)
        if isinstance(error, RuntimeError):
            raise ThreadError(str(error)) from error
        raise
    return pool
