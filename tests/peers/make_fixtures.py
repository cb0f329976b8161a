"""Copy small checkpoints that peers wrote to ``tests/convert/fixtures``, for tests without peers.

Run ``make peer-fixtures``: it writes all of them anew, with the versions in ``constraints.txt``.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from tests.peers.deepspeed_cases import (
    CASES,
    FIXTURES,
    UNIVERSAL_FIXTURES,
    run_deepspeed,
    to_universal,
)

ROOT = Path(__file__).resolve().parents[1] / "convert" / "fixtures"

# What a peer writes beside a checkpoint, and no reader needs.
LEFT_OUT = shutil.ignore_patterns("zero_to_*.py", "nvme")


def main() -> None:
    """Write all fixtures below a folder, and copy them."""
    folder = Path(sys.argv[1])
    for name, path in run_deepspeed(folder, {name: CASES[name] for name in FIXTURES}).items():
        target = ROOT / "deepspeed" / name
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(path, target, ignore=LEFT_OUT)
    for name in UNIVERSAL_FIXTURES:
        target = ROOT / "universal" / name
        shutil.rmtree(target, ignore_errors=True)
        to_universal(ROOT / "deepspeed" / name / "checkpoint", target)


if __name__ == "__main__":
    main()
