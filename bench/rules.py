"""Time of the elementwise rules: kernels in place of operations of torch.

Both have the same bits, which is checked. ``torch.optim.AdamW`` in several passes and in one
(``fused=True``) is rounded differently, and without a parameter in bfloat16. The state is larger
than the caches of most processors, as in training.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Annotated, Any
from unittest import mock

import torch
import typer
from measuring import MIB, JsonOption, SmallOption, ratio_text, rotated, spread, write_report
from rich.console import Console
from rich.progress import track
from rich.table import Table
from step import now_s

import tierstore
from muon.kernels import rounding, rules
from tierstore.layout import encoding_kernels
from tierstore.layout.encodings import ENCODINGS, EncodedState, StoredTensor

ADAMW: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
OF_TORCH: dict[str, dict[str, Any]] = {"torch.optim": {}, "fused": {"fused": True}}
ENCODED = "AdamW, 8 bits"
BYTES = {"momentum": 2 + 4 + 4, "weights": 8 + 4 + 4, "AdamW": 24 + 4 + 2, ENCODED: 10 + 2}
"""Bytes per element that a rule reads and writes in one pass, with the tensors of State."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Parameters of one run of the benchmark."""

    rows: int
    columns: int
    rounds: int


PLANS = {
    "small": Plan(rows=64, columns=2048, rounds=2),
    "default": Plan(rows=4096, columns=4096, rounds=15),
}


class State:
    """A bfloat16 parameter with its gradient, master, momentum and moments."""

    def __init__(self, plan: Plan, device: str) -> None:
        random = torch.Generator(device).manual_seed(0)
        shape = plan.rows, plan.columns

        def numbers() -> torch.Tensor:
            return torch.randn(shape, generator=random, device=device)

        self.grad = numbers().bfloat16()
        self.values = numbers()
        self.parameter = self.values.bfloat16()
        self.momentum = numbers().bfloat16()
        self.out = numbers()
        self.means, self.mean_sqs = numbers(), numbers().square()
        self.chunk = tierstore.pages.Chunk((0, 0), shape)
        self.encoded = [
            self._encoded("master", "24bit", self.values),
            self._encoded("exp_avg", "int8_root", self.means),
            self._encoded("exp_avg_sq", "uint8_root", self.mean_sqs),
        ]

    def _encoded(self, state: str, encoding: str, values: torch.Tensor) -> EncodedState:
        def zeros(stored: StoredTensor) -> torch.Tensor:
            sizes = stored.chunk(self.chunk).sizes
            return torch.zeros(sizes, dtype=stored.dtype, device=values.device)

        form = ENCODINGS[encoding]
        made = form.over(state, {stored.name: zeros(stored) for stored in form.stored(state)})
        made.write(values)
        return made

    def step(self, rule: str) -> None:
        """Do one rule."""
        master = tierstore.pages.RoundedMaster(self.values, self.parameter, lambda changed: None)
        if rule == "momentum":
            rules.momentum_(self.grad, self.momentum, momentum=0.95, nesterov=True, out=self.out)
        elif rule == "weights":
            rules.muon_(master, self.out, lr=0.02, adjusted_lr=0.02, weight_decay=0.1)
        elif rule == ENCODED:
            own, *means = self.encoded
            at_random = (
                [rounding.rounded(mean, "", self.chunk.sizes, self.chunk)] for mean in means
            )
            rules.adamw_([own], [self.grad], *at_random, steps=[1.0], **ADAMW)
        else:
            moments = [self.means], [self.mean_sqs]
            rules.adamw_([master], [self.grad], *moments, steps=[1.0], **ADAMW)

    def tensors(self) -> list[torch.Tensor]:
        """Return all that a step changes."""
        changed = [self.values, self.parameter, self.momentum, self.out]
        stored = [tensor for state in self.encoded for tensor in state.stored.values()]
        return [*changed, self.means, self.mean_sqs, *stored]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One line of the result: medians over all rounds. Ratios: extremes and quartiles."""

    rule: str
    operations_ns: float
    """Nanoseconds per element with operations of torch."""
    kernel_ns: float
    gb_per_s: float
    """Memory that the kernel reads and writes."""
    ratio: tuple[float, ...]
    """Time of the kernel over the time of the operations."""
    again: tuple[float, ...]
    """Time of a second turn of the operations over the time of the first."""
    optim_ns: float | None
    """Nanoseconds per element with ``torch.optim.AdamW``, for AdamW alone, as all figures below."""
    fused_ns: float | None
    """With ``torch.optim.AdamW(fused=True)``."""
    fused_ratio: tuple[float, ...] | None
    """Time of the kernel over the time of the fused one."""


def measure(rule: str, plan: Plan, device: str) -> Row:
    """Measure one rule in turns."""
    by_kernel, by_operations = State(plan, device), State(plan, device)

    def operate() -> None:
        with (
            mock.patch.object(encoding_kernels, "fit", return_value=False),
            mock.patch.object(rules, "kernels_for", return_value=None),
            mock.patch.object(rounding, "kernels_for", return_value=None),
        ):
            by_operations.step(rule)

    by_kernel.step(rule)
    operate()
    if not all(map(torch.equal, by_kernel.tensors(), by_operations.tensors())):
        raise SystemExit(f"the kernel of {rule} has other bits than the operations of torch")
    turns: dict[str, Callable[[], None]] = {
        "kernel": lambda: by_kernel.step(rule),
        "operations": operate,
        "operations again": operate,
    }
    for name, options in (OF_TORCH if rule == "AdamW" else {}).items():
        weight = torch.nn.Parameter(by_kernel.values.clone())
        weight.grad = by_kernel.grad.float()
        turns[name] = torch.optim.AdamW([weight], **options, **ADAMW).step
        turns[name]()  # Makes the states.
    seconds: dict[str, list[float]] = {name: [] for name in turns}
    for number in track(range(plan.rounds), description=rule):
        for name in rotated([*turns], number):
            began_s = now_s()
            turns[name]()
            seconds[name].append(now_s() - began_s)

    def ratio(name: str, bound: str) -> tuple[float, ...]:
        return spread([a / b for a, b in zip(seconds[name], seconds[bound], strict=True)])

    numel = plan.rows * plan.columns
    middle = {name: statistics.median(taken) / numel * 1e9 for name, taken in seconds.items()}
    return Row(
        rule=rule,
        operations_ns=middle["operations"],
        kernel_ns=middle["kernel"],
        gb_per_s=BYTES[rule] / middle["kernel"],
        ratio=ratio("kernel", "operations"),
        again=ratio("operations again", "operations"),
        optim_ns=middle.get("torch.optim"),
        fused_ns=middle.get("fused"),
        fused_ratio=ratio("kernel", "fused") if "fused" in turns else None,
    )


def report(rows: list[Row], device: str) -> Table:
    """Return the rules as a table."""
    threads = f", {torch.get_num_threads()} threads" if device == "cpu" else ""
    table = Table(title=f"Elementwise rules on {device}{threads}, medians (quartiles)")
    table.add_column("rule")
    for heading in ("kernel", "operations", "torch.optim", "fused"):
        table.add_column(f"{heading} ns", justify="right")
    for heading in ("GB/s", "of operations", "operations again", "of fused"):
        table.add_column(heading, justify="right")
    for row in rows:
        times = row.kernel_ns, row.operations_ns, row.optim_ns, row.fused_ns
        table.add_row(
            row.rule,
            *("-" if ns is None else f"{ns:.2f}" for ns in times),
            f"{row.gb_per_s:.1f}",
            *(ratio_text(ratio) for ratio in (row.ratio, row.again, row.fused_ratio)),
        )
    return table


def main(
    small: SmallOption = False,
    json_path: JsonOption = None,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
) -> None:
    """Compare kernels of one pass with operations of torch."""
    plan = PLANS["small" if small else "default"]
    if rules.kernels_for(torch.device(device)) is None:
        raise SystemExit(f"there are no kernels for {device} here")
    # As activations are freed in a training: glibc keeps temporaries from then on.
    torch.empty(30 * MIB, dtype=torch.uint8)
    rows = [measure(rule, plan, device) for rule in BYTES]
    Console(width=140).print(report(rows, device))
    write_report(json_path, plan=asdict(plan), device=device, rows=[asdict(row) for row in rows])


if __name__ == "__main__":
    typer.run(main)
