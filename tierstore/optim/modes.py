"""Modes of the caller that would change the bits of a step: they count for the model alone."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def without_callers_modes() -> Iterator[None]:
    """Compute as without ``torch.autocast``, and with the smallest numbers kept."""
    with contextlib.ExitStack() as stack:
        for device in ("cpu", "cuda"):
            if torch.is_autocast_enabled(device):
                stack.enter_context(torch.autocast(device, enabled=False))
        if not torch.full((), 2.0**-149, dtype=torch.float32, device="cpu").mul_(1.0):
            torch.set_flush_denormal(False)
            stack.callback(torch.set_flush_denormal, True)
        yield
