"""Copy small checkpoints that peers wrote to ``tests/convert/fixtures``, for tests without peers.

Run ``make peer-fixtures``: it writes all of them anew, with the versions in ``constraints.txt``.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from tests.peers.deepspeed_cases import FIXTURES, run_deepspeed

ROOT = Path(__file__).resolve().parents[1] / "convert" / "fixtures"

# What a peer writes beside a checkpoint, and no reader needs.
LEFT_OUT = shutil.ignore_patterns("zero_to_*.py", "nvme")


def main() -> None:
    """Write all fixtures below a folder, and copy them."""
    folder = Path(sys.argv[1])
    for name, path in run_deepspeed(folder, FIXTURES).items():
        target = ROOT / "deepspeed" / name
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(path, target, ignore=LEFT_OUT)


if __name__ == "__main__":
    main()
