"""The checkpoints that torch_checkpointing writes in tests."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.peers.ranks import run_all

PROGRAM = Path(__file__).parent / "programs" / "torch_checkpointing_writer.py"

CASES: dict[str, dict[str, Any]] = {
    "lone": {"ranks": 1, "described": False},
    "lone-safetensors": {"ranks": 1, "safe": True},
    "sharded": {"ranks": 2},
    "sharded-safetensors": {"ranks": 2, "safe": True},
    "sharded-undescribed": {"ranks": 2, "described": False},
}

FIXTURES = [name for name in CASES if name != "sharded-undescribed"]
"""The cases that tests without the peer read."""


def run_torch_checkpointing(
    folder: Path, cases: Mapping[str, Mapping[str, Any]]
) -> dict[str, Path]:
    """Have torch_checkpointing write cases; return their folders by name."""
    return run_all(PROGRAM, folder, cases)
