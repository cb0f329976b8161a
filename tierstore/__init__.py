"""Optimizer state in pages on host memory or NVMe, streamed through few buffers."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from tierstore.errors import (
    BudgetError,
    CheckpointError,
    CorruptionError,
    NonFiniteGradientError,
    PeerFailed,
    RollCallError,
    RunDirectoryError,
    RunLockedError,
    RunMismatchError,
    StorageError,
    StoreClosedError,
    StoreFailedError,
    SweepError,
    ThreadError,
    TierstoreError,
)

if TYPE_CHECKING:
    from tierstore import pages
    from tierstore.averaged_model import AveragedModel
    from tierstore.checkpoint.publication import Publication
    from tierstore.optim.base import PagedOptimizer
    from tierstore.optim.paged import Paged
    from tierstore.paging.stats import Stats
    from tierstore.run.random_state import RandomState
    from tierstore.run.registered import CommittedStep
    from tierstore.store import TierStore
    from tierstore.tools.plan.module_fit import fit

__version__ = "0.2.0"

# Imported when first asked for, so that a command that needs no torch does not wait for it.
_MODULES = {
    "AveragedModel": "averaged_model",
    "CommittedStep": "run.registered",
    "Paged": "optim.paged",
    "PagedOptimizer": "optim.base",
    "Publication": "checkpoint.publication",
    "RandomState": "run.random_state",
    "Stats": "paging.stats",
    "TierStore": "store",
    "fit": "tools.plan.module_fit",
    "pages": "pages",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = importlib.import_module(f"tierstore.{_MODULES[name]}")
    value = globals()[name] = getattr(module, name, module)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


__all__ = [
    "AveragedModel",
    "BudgetError",
    "CheckpointError",
    "CommittedStep",
    "CorruptionError",
    "NonFiniteGradientError",
    "Paged",
    "PagedOptimizer",
    "PeerFailed",
    "Publication",
    "RandomState",
    "RollCallError",
    "RunDirectoryError",
    "RunLockedError",
    "RunMismatchError",
    "Stats",
    "StorageError",
    "StoreClosedError",
    "StoreFailedError",
    "SweepError",
    "ThreadError",
    "TierStore",
    "TierstoreError",
    "fit",
    "pages",
]
