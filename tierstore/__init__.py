"""Optimizer state in pages on host memory or NVMe, streamed through few buffers."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from tierstore.compiling import not_compiled
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
from tierstore.units import parse_bytes

if TYPE_CHECKING:
    from tierstore.averaged_model import AveragedModel
    from tierstore.checkpoint.publication import Publication
    from tierstore.layout.chunks import Chunk
    from tierstore.layout.encodings import EncodedState
    from tierstore.layout.ownership import SharedShard, SharedSubgroup
    from tierstore.layout.parameters import PagedGroup, PagedParameter
    from tierstore.paging.profiler_lanes import profiled
    from tierstore.paging.stats import Stats
    from tierstore.paging.sweep import SteppedPages
    from tierstore.paging.views import ChunkView, PageView, RoundedMaster, ShardView
    from tierstore.ranks.peers import Peers, Ranks
    from tierstore.run.random_state import RandomState
    from tierstore.run.registered import CommittedStep
    from tierstore.store import TierStore

__version__ = "0.1.0"

# Imported when first asked for, so that a command that needs no torch does not wait for it.
_NAMES = {
    "averaged_model": ("AveragedModel",),
    "checkpoint.publication": ("Publication",),
    "layout.chunks": ("Chunk",),
    "layout.encodings": ("EncodedState",),
    "layout.ownership": ("SharedShard", "SharedSubgroup"),
    "layout.parameters": ("PagedGroup", "PagedParameter"),
    "paging.profiler_lanes": ("profiled",),
    "paging.stats": ("Stats",),
    "paging.sweep": ("SteppedPages",),
    "paging.views": ("ChunkView", "PageView", "RoundedMaster", "ShardView"),
    "ranks.peers": ("Peers", "Ranks"),
    "run.random_state": ("RandomState",),
    "run.registered": ("CommittedStep",),
    "store": ("TierStore",),
}


def __getattr__(name: str) -> Any:
    for module, names in _NAMES.items():
        if name in names:
            value = globals()[name] = getattr(importlib.import_module(f"tierstore.{module}"), name)
            return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


__all__ = [
    "AveragedModel",
    "BudgetError",
    "CheckpointError",
    "Chunk",
    "ChunkView",
    "CommittedStep",
    "CorruptionError",
    "EncodedState",
    "NonFiniteGradientError",
    "PageView",
    "PagedGroup",
    "PagedParameter",
    "PeerFailed",
    "Peers",
    "Publication",
    "RandomState",
    "Ranks",
    "RollCallError",
    "RoundedMaster",
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
    "ThreadError",
    "TierStore",
    "TierstoreError",
    "not_compiled",
    "parse_bytes",
    "profiled",
]
