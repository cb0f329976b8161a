"""Start of the programs that have peers write checkpoints, in a process for each rank."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def run_all(program: Path, folder: Path, cases: Mapping[str, Mapping[str, Any]]) -> dict[str, Path]:
    """Run cases below a folder, cases with the same number of ranks together.

    Args:
        program: what a rank runs.
        folder: for the cases, and the logs of ranks.
        cases: name -> fields of the case, and "ranks".

    Returns:
        Name -> folder of the case.
    """
    by_ranks: dict[int, list[dict[str, Any]]] = defaultdict(list)
    paths = {name: folder / name for name in cases}
    for name, path in paths.items():
        fields = dict(cases[name])
        by_ranks[fields.pop("ranks")].append({"directory": str(path), **fields})
    for ranks, members in by_ranks.items():
        run_cases(program, folder, ranks, members)
    return paths


def run_cases(program: Path, folder: Path, ranks: int, cases: list[dict[str, Any]]) -> None:
    """Run a program in a process for each rank.

    Raises:
        RuntimeError: a rank failed; the message is the end of its output.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"cases-{ranks}.json"
    path.write_text(json.dumps(cases))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {
        **os.environ,
        # Builds of DeepSpeed's extensions are kept beside the interpreter.
        "TORCH_EXTENSIONS_DIR": str(Path(sys.prefix) / "torch_extensions"),
        # Compiling Newton-Schulz takes minutes on two cores.
        "TORCHDYNAMO_DISABLE": "1",
    }
    logs = [folder / f"rank-{rank}-of-{ranks}.log" for rank in range(ranks)]
    processes = []
    for rank, log in enumerate(logs):
        arguments = [sys.executable, str(program), str(path), str(rank), str(ranks), str(port)]
        with log.open("w") as output:
            processes.append(
                subprocess.Popen(arguments, stdout=output, stderr=output, env=environment)
            )
    failed = [rank for rank, process in enumerate(processes) if process.wait()]
    if failed:
        raise RuntimeError(f"rank {failed[0]} failed:\n{logs[failed[0]].read_text()[-4000:]}")
