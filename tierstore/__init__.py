"""Optimizer state in pages on host memory or NVMe, streamed through few buffers."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tierstore.chunks import Chunk
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
    from tierstore.groups import PagedGroup, PagedParameter
    from tierstore.peers import Peers
    from tierstore.publication import Publication
    from tierstore.rank_partition import SharedShard, SharedSubgroup
    from tierstore.ranks import Ranks
    from tierstore.stats import Stats
    from tierstore.store import TierStore
    from tierstore.sweep import SteppedPages
    from tierstore.units import parse_bytes
    from tierstore.views import ChunkView, PageView, ShardView

__version__ = "0.1.0"

# Imported when first asked for, so that a command that needs no torch does not wait for it.
_MODULES = {
    "Chunk": "chunks",
    "ChunkView": "views",
    "PageView": "views",
    "PagedGroup": "groups",
    "PagedParameter": "groups",
    "Peers": "peers",
    "Publication": "publication",
    "Ranks": "ranks",
    "SharedShard": "rank_partition",
    "SharedSubgroup": "rank_partition",
    "ShardView": "views",
    "Stats": "stats",
    "SteppedPages": "sweep",
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
