"""Training steps with the state in file-backed mappings, beside pages of a store.

The obvious way to keep optimizer state on a drive is ``torch.UntypedStorage.from_file``: tensors
over a shared mapping, which the kernel reads and writes as it sees fit. Both train one bfloat16
model with AdamW and float32 masters, each in a process of its own, and take turns.

A mapping is as fast as memory while the page cache has room for it, and state that fits needs no
drive. So the mapping takes its turns twice: "mapped" begins each step without it in memory, as if
the room had been needed since; "mapped, in the page cache" keeps it there.

What both do on a full disk is tried on an ext4 of a few MB, which takes root to mount.
"""

from __future__ import annotations

import ctypes
import os
import statistics
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import typer
from measuring import (
    DirectoryOption,
    JsonOption,
    SmallOption,
    drop_from_cache,
    ratio_text,
    rotated,
    scratch_folder,
    spread,
    write_report,
)
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import nn
from training import LR, WEIGHT_DECAY, Contender, Model, Ours, Plan, Step, Worker
from typing_extensions import override

PLANS = {
    "small": Plan(
        width=64,
        layers=1,
        vocabulary=512,
        tokens=16,
        tuning_steps=0,
        pairs=2,
        page_bytes="256KiB",
        group_elements=0,
        block_bytes=0,
    ),
    "default": Plan(
        width=768,
        layers=6,
        vocabulary=32768,
        tokens=64,
        tuning_steps=0,
        pairs=15,
        page_bytes="32MiB",
        group_elements=0,
        block_bytes=0,
    ),
}

ROOM_BYTES = 64 << 20
"""Size of the filesystem that becomes full, and of the masters on it."""

_MADV_DONTNEED = 4
_LIBC = ctypes.CDLL(None, use_errno=True)


class Mapped(Contender):
    """torch.optim.AdamW on masters and moments in files that are mapped.

    Args:
        keeps_cache: whether the page cache keeps the files from one step to the next.
    """

    def __init__(self, plan: Plan, rule: str, directory: Path, keeps_cache: bool) -> None:
        super().__init__(plan, rule, directory)
        self.model.to(torch.bfloat16)
        self._keeps_cache = keeps_cache
        self._mapped: list[tuple[Path, torch.Tensor]] = []
        self._masters = {}
        for name, parameter in self.model.named_parameters():
            master = self._map(f"{name}.master", parameter)
            master.copy_(parameter.detach())
            self._masters[name] = nn.Parameter(master)
        self._optimizer = torch.optim.AdamW(
            self._masters.values(), lr=LR, weight_decay=WEIGHT_DECAY, foreach=False
        )
        for name, master in self._masters.items():
            self._optimizer.state[master] = {
                "step": torch.zeros(()),
                "exp_avg": self._map(f"{name}.exp_avg", master),
                "exp_avg_sq": self._map(f"{name}.exp_avg_sq", master),
            }

    def _map(self, name: str, like: torch.Tensor) -> torch.Tensor:
        """Return float32 zeros over a new file."""
        path = self.directory / name
        nbytes = like.numel() * 4
        storage = torch.UntypedStorage.from_file(str(path), shared=True, nbytes=nbytes)
        tensor = torch.empty(0, dtype=torch.float32).set_(storage, 0, like.shape)
        self._mapped.append((path, tensor))
        return tensor

    @override
    def forward_backward(self) -> float:
        for path, tensor in self._mapped if not self._keeps_cache else ():
            address, nbytes = ctypes.c_void_p(tensor.data_ptr()), ctypes.c_size_t(tensor.nbytes)
            if _LIBC.madvise(address, nbytes, _MADV_DONTNEED):
                raise OSError(ctypes.get_errno(), "madvise")
            drop_from_cache(path)
        loss = self.model(self.tokens)
        loss.backward()
        return float(loss.detach())

    @override
    def step(self) -> None:
        # One parameter at a time: the float32 gradients of all would be twice the model.
        for name, parameter in self.model.named_parameters():
            master = self._masters[name]
            assert parameter.grad is not None
            master.grad = parameter.grad.float()
            parameter.grad = None
            self._optimizer.param_groups[0]["params"] = [master]
            self._optimizer.step()
            master.grad = None
            parameter.detach().copy_(master)

    @override
    def synchronize(self) -> None:
        for path, _ in self._mapped:  # Also makes the changes of the mapping durable.
            fd = os.open(path, os.O_RDONLY)
            os.fsync(fd)
            os.close(fd)

    @override
    def facts(self) -> dict[str, Any]:
        return {"mapped_bytes": sum(tensor.nbytes for _, tensor in self._mapped)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One contender: medians over all rounds, ratios to "ours" in the same round."""

    contender: str
    step_s: float
    """Until the parameters are updated."""
    synchronize_s: float
    """From then until all is durable."""
    read_bytes: float
    written_bytes: float
    peak_bytes: int
    """Peak memory, without what is mapped."""
    mapped_bytes: int
    """Memory that the page cache needs so that the state stays in it."""
    ratio: tuple[float, ...]
    """Time of the step until it is durable: extremes and quartiles."""
    steps: list[Step]


def compare(plan: Plan, directory: Path) -> list[Row]:
    """Measure the contenders in turn."""
    with ExitStack() as stack:
        workers = {
            "ours": stack.enter_context(Worker(directory, Ours, plan, "adamw")),
            "ours again": stack.enter_context(Worker(directory, Ours, plan, "adamw")),
            "mapped": stack.enter_context(Worker(directory, Mapped, plan, "adamw", False)),
            "mapped, in the page cache": stack.enter_context(
                Worker(directory, Mapped, plan, "adamw", True)
            ),
        }
        for worker in workers.values():
            worker.receive()
        steps: dict[str, list[Step]] = {name: [] for name in workers}
        for index in track(range(plan.pairs), description="steps"):
            for name in rotated(list(workers), index):
                steps[name].append(workers[name].ask("step"))
        facts = {name: worker.ask("facts") for name, worker in workers.items()}
    return [row_of(name, steps, facts[name]) for name in workers]


def row_of(name: str, steps: dict[str, list[Step]], facts: dict[str, Any]) -> Row:
    """Return the row of a contender."""

    def middle(value: Callable[[Step], float]) -> float:
        return statistics.median(value(step) for step in steps[name])

    pairs = zip(steps[name], steps["ours"], strict=True)
    return Row(
        contender=name,
        step_s=middle(lambda step: step.step_s),
        synchronize_s=middle(lambda step: step.synchronize_s),
        read_bytes=middle(lambda step: step.read_bytes),
        written_bytes=middle(lambda step: step.written_bytes),
        peak_bytes=facts["peak_bytes"],
        mapped_bytes=facts.get("mapped_bytes", 0),
        ratio=spread([a.optimizer_s / b.optimizer_s for a, b in pairs]),
        steps=steps[name],
    )


FULL_DISK = {
    "ours": """
try:
    store = tierstore.TierStore("run")
    optimizer = muon.Muon([{"params": [weight], "algorithm": "adamw"}], store=store)
    optimizer.step()
except tierstore.StorageError as error:
    print(f"StorageError before the first step: {error}".replace(os.getcwd(), "DIRECTORY"))
""",
    "mapped": """
for state in ("master", "exp_avg", "exp_avg_sq"):
    storage = torch.UntypedStorage.from_file(state, shared=True, nbytes=weight.nbytes)
    torch.empty(0).set_(storage, 0, weight.shape).fill_(1)
""",
}
"""Programs that need more room for state than there is."""


def on_a_full_disk(directory: Path, program: str) -> str:
    """Return what a program does on a filesystem that is too small, or why it was not tried."""
    code = (
        "import os, sys, torch, muon, tierstore\n"
        f"weight = torch.nn.Parameter(torch.zeros({ROOM_BYTES // 4}))\n"
        f"weight.grad = torch.ones_like(weight)\n{program}"
    )
    room = directory / "room"
    room.mkdir(exist_ok=True)
    # The filesystem is seen, and exists, as long as the program runs.
    mount = (
        f'truncate --size={ROOM_BYTES} "$0.img" && mkfs.ext4 -q -F "$0.img" && '
        'mount -o loop "$0.img" "$0" && cd "$0" && exec "$@"'
    )
    command = ["unshare", "--mount", "sh", "-c", mount, str(room), sys.executable, "-c", code]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    if ended.returncode < 0:
        return f"the process is killed by signal {-ended.returncode}"
    return ended.stdout.strip() or f"not tried: {ended.stderr.strip()[-200:]}"


def main(
    directory: DirectoryOption = Path("."),
    small: SmallOption = False,
    json_path: JsonOption = None,
) -> None:
    """Compare training steps with state in pages and in file-backed mappings."""
    plan = PLANS["small" if small else "default"]
    parameters = sum(parameter.numel() for parameter in Model(plan).parameters())
    with scratch_folder(directory) as scratch:
        rows = compare(plan, scratch)
        full = {name: on_a_full_disk(scratch, program) for name, program in FULL_DISK.items()}
    table = Table(title=f"AdamW, {parameters / 1e6:.1f}M parameters: medians (quartiles)")
    table.add_column("")
    for heading in (
        "step s",
        "until durable s",
        "ratio",
        "read B",
        "written B",
        "MB",
        "+ cache MB",
    ):
        table.add_column(heading, justify="right")
    for row in rows:
        table.add_row(
            row.contender,
            f"{row.step_s:.3f}",
            f"{row.synchronize_s:.3f}",
            ratio_text(row.ratio),
            f"{row.read_bytes / parameters:.2f}",
            f"{row.written_bytes / parameters:.2f}",
            f"{row.peak_bytes / 1e6:.0f}",
            f"{row.mapped_bytes / 1e6:.0f}",
        )
    console = Console(width=120)
    console.print(table)
    console.print("Bytes are per parameter. On a full disk:")
    for name, found in full.items():
        console.print(f"  {name}: {found}")
    write_report(
        json_path,
        plan=asdict(plan),
        parameters=parameters,
        rows=[asdict(row) for row in rows],
        full_disk=full,
    )


if __name__ == "__main__":
    typer.run(main)
