"""Errors of calls, as text that ranks send to the test."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def attempt(call: Callable[[], Any]) -> str:
    """Return class and text of what a call raises; "" for nothing."""
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""
