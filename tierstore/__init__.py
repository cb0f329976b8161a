"""Optimizer state in pages on host memory or NVMe, streamed through few buffers."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tierstore.checkpoint.publication import Publication
    from tierstore.errors import (
        BudgetError,
        CheckpointError,
        CorruptionError,
        PeerFailed,
        RunDirectoryError,
        RunLockedError,
        RunMismatchError,
        StorageError,
        StoreClosedError,
        StoreFailedError,
        SweepError,
        TierstoreError,
    )
    from tierstore.layout.chunks import Chunk
    from tierstore.layout.ownership import SharedShard, SharedSubgroup
    from tierstore.layout.parameters import PagedGroup, PagedParameter
    from tierstore.paging.sweep import SteppedPages
    from tierstore.paging.views import ChunkView, PageView, ShardView
    from tierstore.ranks.peers import Peers, Ranks
    from tierstore.store import Stats, TierStore
    from tierstore.units import parse_bytes

__version__ = "0.1.0"

# Imported when first asked for, so that a command that needs no torch does not wait for it.
_MODULES = {
    "Chunk": "layout.chunks",
    "ChunkView": "paging.views",
    "PageView": "paging.views",
    "PagedGroup": "layout.parameters",
    "PagedParameter": "layout.parameters",
    "Peers": "ranks.peers",
    "Publication": "checkpoint.publication",
    "Ranks": "ranks.peers",
    "SharedShard": "layout.ownership",
    "SharedSubgroup": "layout.ownership",
    "ShardView": "paging.views",
    "Stats": "store",
    "SteppedPages": "paging.sweep",
    "TierStore": "store",
    "parse_bytes": "units",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = importlib.import_module(f"tierstore.{_MODULES.get(name, 'errors')}")
    value = globals()[name] = getattr(module, name)
    return value


__all__ = [
    "BudgetError",
    "CheckpointError",
    "Chunk",
    "ChunkView",
    "CorruptionError",
    "PageView",
    "PagedGroup",
    "PagedParameter",
    "PeerFailed",
    "Peers",
    "Publication",
    "Ranks",
    "RunDirectoryError",
    "RunLockedError",
    "RunMismatchError",
    "ShardView",
    "SharedShard",
    "SharedSubgroup",
    "Stats",
    "SteppedPages",
    "StorageError",
    "StoreClosedError",
    "StoreFailedError",
    "SweepError",
    "TierStore",
    "TierstoreError",
    "parse_bytes",
]
