"""The version of torch: `make test-torch` runs the tests with others than the pinned one."""

from __future__ import annotations

import torch


def torch_before(major: int, minor: int) -> bool:
    """Return whether torch is older than a version."""
    return tuple(map(int, torch.__version__.split(".")[:2])) < (major, minor)
