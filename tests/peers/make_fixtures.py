"""Copy small checkpoints that peers wrote to ``tests/tools/convert/fixtures``.

Run ``make peer-fixtures``: it writes all of them anew, with the versions in ``constraints.txt``.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from tests.peers import deepspeed_cases, huggingface_cases, torch_checkpointing_cases
from tests.peers.deepspeed_cases import UNIVERSAL_FIXTURES, to_universal

ROOT = Path(__file__).resolve().parents[1] / "tools/convert/fixtures"

# What a peer writes beside a checkpoint, and no reader needs. Arguments have paths of the machine.
LEFT_OUT = shutil.ignore_patterns(
    "zero_to_*.py", "nvme", "rng_state*", "random_states*", "training_args*"
)


def main() -> None:
    """Write the fixtures of all or some peers below a folder, and copy them."""
    folder, wanted = Path(sys.argv[1]), sys.argv[2:]
    writers = {
        "deepspeed": (deepspeed_cases.run_deepspeed, deepspeed_cases),
        "huggingface": (huggingface_cases.run_huggingface, huggingface_cases),
        "torch_checkpointing": (
            torch_checkpointing_cases.run_torch_checkpointing,
            torch_checkpointing_cases,
        ),
    }
    for peer in wanted or writers:
        write, known = writers[peer]
        cases = {name: known.CASES[name] for name in known.FIXTURES}
        for name, path in write(folder / peer, cases).items():
            target = ROOT / peer / name
            shutil.rmtree(target, ignore_errors=True)
            shutil.copytree(path, target, ignore=LEFT_OUT)
    for name in UNIVERSAL_FIXTURES if "deepspeed" in (wanted or writers) else ():
        target = ROOT / "universal" / name
        shutil.rmtree(target, ignore_errors=True)
        to_universal(ROOT / "deepspeed" / name / "checkpoint", target)


if __name__ == "__main__":
    main()
