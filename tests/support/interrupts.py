"""Interrupts at each place where a signal can raise one."""

from __future__ import annotations

import gc
import sys
from pathlib import Path
from types import FrameType
from typing import Self

import tierstore

PACKAGE = str(Path(tierstore.__file__).parent)


class InterruptedAfter:
    """Raises KeyboardInterrupt in the block where a signal would, after this number of calls.

    Python looks for signals as it enters a function and when a C function has returned. The
    collector rests in the block: it would run destructors of earlier tests, and a destructor loses
    an interrupt.

    Args:
        calls: number of calls after which the interrupt comes.
        path: a part of the paths of the modules whose calls count.
    """

    def __init__(self, calls: int, path: str = PACKAGE) -> None:
        self.left = calls
        self._path = path

    def __enter__(self) -> Self:
        gc.disable()
        sys.setprofile(self._look)
        return self

    def __exit__(self, *error: object) -> None:
        sys.setprofile(None)
        gc.enable()

    def _look(self, frame: FrameType, event: str, _: object) -> None:
        if event in ("call", "c_return") and self._path in frame.f_code.co_filename:
            self.left -= 1
            if self.left == 0:
                raise KeyboardInterrupt
