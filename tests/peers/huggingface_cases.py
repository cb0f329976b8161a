"""The checkpoints that Trainer and accelerate write in tests."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.peers.ranks import run_all

PROGRAM = Path(__file__).parent / "programs" / "huggingface_writer.py"

CASES: dict[str, dict[str, Any]] = {
    "trainer-llama": {"ranks": 1, "kind": "trainer", "model": "llama", "layers": 1},
    # "layers.10" sorts before "layers.2".
    "trainer-llama-11": {"ranks": 1, "kind": "trainer", "model": "llama", "layers": 11},
    "trainer-gpt2-sharded": {
        **{"ranks": 1, "kind": "trainer", "model": "gpt2", "layers": 1},
        "shard_size": "1KB",
    },
    "accelerate": {"ranks": 1, "kind": "accelerate"},
    "accelerate-two": {"ranks": 1, "kind": "accelerate", "models": 2},
    "accelerate-two-bin": {"ranks": 1, "kind": "accelerate", "models": 2, "safe": False},
    "fsdp-full": {"ranks": 2, "kind": "fsdp"},
    "fsdp-sharded": {"ranks": 2, "kind": "fsdp", "state_dict_type": "SHARDED_STATE_DICT"},
    "fsdp-ranks": {
        **{"ranks": 2, "kind": "fsdp", "state_dict_type": "SHARDED_STATE_DICT"},
        "use_dcp": False,
    },
}

FIXTURES = [name for name in CASES if name not in ("trainer-llama-11", "accelerate")]
"""The cases that tests without peers read."""


def run_huggingface(folder: Path, cases: Mapping[str, Mapping[str, Any]]) -> dict[str, Path]:
    """Have Trainer and accelerate write cases; return their folders by name."""
    return run_all(PROGRAM, folder, cases)
