"""Modes of the caller that would change the bits of a step. They apply only to the model."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def without_callers_modes() -> Iterator[None]:
    """Disable ``torch.autocast``, and keep subnormal numbers, during the block."""
    with contextlib.ExitStack() as stack:
        for device in ("cpu", "cuda"):
            if torch.is_autocast_enabled(device):
                stack.enter_context(torch.autocast(device, enabled=False))
        if not torch.full((), 2.0**-149, dtype=torch.float32, device="cpu").mul_(1.0):
            torch.set_flush_denormal(False)
            stack.callback(torch.set_flush_denormal, True)
        yield
