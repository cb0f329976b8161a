"""A rank of a job on several nodes: trains, commits each step, and notes what it did.

Usage: python -m tests.rank_programs.nodes DIRECTORY NOTES STEPS
"""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path

import torch
import torch.distributed as dist

import muon
import tierstore
from tests.support import training


def digest(parameters: dict[str, torch.nn.Parameter]) -> str:
    found = hashlib.sha256()
    for parameter in parameters.values():
        found.update(parameter.detach().numpy().tobytes())
    return found.hexdigest()


def main(directory: str, notes: str, steps: str) -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()

    def note(kind: str, value: object) -> None:
        with Path(notes).open("a") as file:
            file.write(f"{kind} {rank} {value}\n")

    parameters = training.make_parameters(torch.float32)
    with tierstore.TierStore(directory, resume=True) as store:
        groups = training.make_groups(parameters)
        optimizer = muon.Muon(groups, store=store, ns_dtype=torch.float32)
        committed = optimizer.restore()
        note("resumed", committed)
        for step in range(committed + 1, int(steps) + 1):
            training.set_gradients(parameters, step)
            optimizer.step()
            store.commit()
            note("step", step)
    note("ended", digest(parameters))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
