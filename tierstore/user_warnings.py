"""Warnings at the line of the program that caused them."""

from __future__ import annotations

import sys
import threading
import warnings
from types import FrameType

from tierstore.compiling import not_compiled

# Context managers add frames of contextlib.
_NOT_OF_USERS = frozenset({"tierstore", "muon", "torch", "contextlib"})


@not_compiled
def warn_user(text: str) -> None:
    """Issue a UserWarning at the innermost line outside of tierstore, muon and torch.

    A thread of autograd has no such line. The warning is then at the line of the main thread, which
    waits in ``backward()``.

    Args:
        text: says what is wrong, and what to type.
    """
    frame = _of_user(sys._getframe())
    if frame is None:
        frame = _of_user(sys._current_frames().get(threading.main_thread().ident or 0))
    if frame is None:
        warnings.warn(text, stacklevel=2)
        return
    warnings.warn_explicit(
        text,
        UserWarning,
        frame.f_code.co_filename,
        frame.f_lineno,
        module=frame.f_globals.get("__name__"),
        registry=frame.f_globals.setdefault("__warningregistry__", {}),
    )


def _of_user(frame: FrameType | None) -> FrameType | None:
    """Return the innermost frame of a stack that is not of these libraries."""
    while frame is not None and _package(frame) in _NOT_OF_USERS:
        frame = frame.f_back
    return frame


def _package(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]
