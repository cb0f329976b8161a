"""The checkpoints that DeepSpeed writes in tests."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.peers.ranks import run_all

PROGRAM = Path(__file__).parent / "programs" / "deepspeed_writer.py"

# BF16_Optimizer, which DeepSpeed takes for ZeRO-1 with gradients accumulated in fp32.
_BF16 = {"stage": 1, "optimizer": "torch", "config": {"data_types": {"grad_accum_dtype": "fp32"}}}
_ROUND_ROBIN = {"round_robin_gradients": True}
# Each large matrix is a subgroup of its own: DeepSpeed 0.19.8 shifts the gradients of a subgroup
# on NVMe whose parts have no multiple of 1024 bytes, and then trains with parts of other elements.
_NVME = {"stage": 3, "offload": "nvme", "big": True, "zero": {"sub_group_size": 500_000}}
_ALONE = {"sub_group_size": 1}
_IN_MEMORY = {"sub_group_size": 500_000, "save_muon_momentum_buffer_in_memory": True}

CASES: dict[str, dict[str, Any]] = {
    "zero1-adamw-1": {"ranks": 1, "stage": 1, "optimizer": "adamw"},
    "zero2-muon-1": {"ranks": 1, "stage": 2, "optimizer": "muon"},
    "zero3-adamw-1": {"ranks": 1, "stage": 3, "optimizer": "adamw"},
    "zero3-muon-1": {"ranks": 1, "stage": 3, "optimizer": "muon"},
    "zero1-bf16-optimizer-1": {"ranks": 1, **_BF16},
    "zero2-fp32-1": {"ranks": 1, "stage": 2, "optimizer": "adamw", "dtype": "fp32"},
    "zero1-adamw": {"ranks": 2, "stage": 1, "optimizer": "adamw"},
    "zero1-muon": {"ranks": 2, "stage": 1, "optimizer": "muon"},
    "zero1-bf16-optimizer": {"ranks": 2, **_BF16},
    "zero2-adamw": {"ranks": 2, "stage": 2, "optimizer": "adamw"},
    "zero2-muon": {"ranks": 2, "stage": 2, "optimizer": "muon"},
    "zero2-round-robin": {"ranks": 2, "stage": 2, "optimizer": "adamw", "zero": _ROUND_ROBIN},
    "zero2-muon-round-robin": {"ranks": 2, "stage": 2, "optimizer": "muon", "zero": _ROUND_ROBIN},
    "zero2-elastic": {
        "ranks": 2,
        "stage": 2,
        "optimizer": "torch",
        "zero": {"elastic_checkpoint": True},
    },
    "zero2-adamw-cpu": {"ranks": 2, "stage": 2, "optimizer": "adamw", "offload": "cpu"},
    "zero2-muon-cpu": {"ranks": 2, "stage": 2, "optimizer": "muon", "offload": "cpu"},
    "zero3-adamw": {"ranks": 2, "stage": 3, "optimizer": "adamw", "zero": {"sub_group_size": 100}},
    "zero3-adamw-one-group": {"ranks": 2, "stage": 3, "optimizer": "adamw", "one_group": True},
    "zero3-own-adamw": {
        "ranks": 2,
        "stage": 3,
        "optimizer": "adamw",
        "own_adam": True,
        "zero": {"sub_group_size": 100},
    },
    "zero3-muon": {"ranks": 2, "stage": 3, "optimizer": "muon"},
    "zero3-muon-cpu": {"ranks": 2, "stage": 3, "optimizer": "muon", "offload": "cpu"},
    "zero3-adamw-nvme": {"ranks": 2, "optimizer": "adamw", **_NVME, "zero": _ALONE},
    "zero3-muon-nvme": {"ranks": 2, "optimizer": "muon", **_NVME},
    "zero3-muon-nvme-in-memory": {"ranks": 2, "optimizer": "muon", **_NVME, "zero": _IN_MEMORY},
}

FIXTURES = (
    *("zero1-adamw", "zero1-muon", "zero1-bf16-optimizer", "zero2-muon", "zero2-muon-cpu"),
    *("zero2-round-robin", "zero2-elastic", "zero2-fp32-1", "zero3-adamw", "zero3-muon"),
)
"""The cases that tests without peers read."""

UNIVERSAL_FIXTURES = ("zero1-adamw", "zero3-adamw")
"""The cases that they also read as universal checkpoints."""


def run_deepspeed(folder: Path, cases: Mapping[str, Mapping[str, Any]]) -> dict[str, Path]:
    """Have DeepSpeed run cases; return their folders by name."""
    return run_all(PROGRAM, folder, cases)


def to_universal(checkpoint: Path, out: Path) -> None:
    """Have DeepSpeed's own tool make a universal checkpoint of the only step of another one.

    Raises:
        RuntimeError: the tool failed.
    """
    (step,) = (path for path in checkpoint.iterdir() if path.is_dir())
    arguments = [
        "--input_folder",
        str(step),
        "--output_folder",
        str(out / f"{step.name}_universal"),
    ]
    arguments += [
        "--inject_missing_state",
        "--num_extract_workers",
        "1",
        "--num_merge_workers",
        "1",
    ]
    out.mkdir(parents=True)
    done = subprocess.run(
        [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal", *arguments],
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise RuntimeError(f"ds_to_universal failed:\n{done.stderr[-4000:]}")
