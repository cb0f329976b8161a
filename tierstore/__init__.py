"""Optimizer state in pages on host memory or NVMe, streamed through few buffers."""

from tierstore.errors import (
    BudgetError,
    CorruptionError,
    RunDirectoryError,
    RunLockedError,
    RunMismatchError,
    StorageError,
    StoreClosedError,
    StoreFailedError,
    SweepError,
    TierstoreError,
)
from tierstore.groups import PagedGroup, PagedParameter
from tierstore.stats import Stats
from tierstore.store import TierStore
from tierstore.views import ChunkView, PageView, ShardView

__version__ = "0.1.0"

__all__ = [
    "BudgetError",
    "ChunkView",
    "CorruptionError",
    "PageView",
    "PagedGroup",
    "PagedParameter",
    "RunDirectoryError",
    "RunLockedError",
    "RunMismatchError",
    "ShardView",
    "Stats",
    "StorageError",
    "StoreClosedError",
    "StoreFailedError",
    "SweepError",
    "TierStore",
    "TierstoreError",
]
