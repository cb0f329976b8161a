"""Answers of ``tierstore.Paged`` to plans of runs, for the classes of ``torch.optim``."""

from __future__ import annotations

import ast
import contextlib
import math
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from tierstore.layout.ownership import SharedSubgroup
from tierstore.layout.parameters import dtype_name, master_dtype
from tierstore.optim.classes import ELEMENTWISE
from tierstore.optim.paged import Paged
from tierstore.tools.plan.models import DTYPES
from tierstore.tools.probe.optimizers import PageWorks, Work

_ELEMENTS = "class_elements"
"""Name of the only work: a step of (states, rows, columns) elements with so many states each."""
_SIZES = (1 << 16, 1 << 24)  # One shows what a call takes, the other is more than caches hold.
_ROUNDS = 5
_TEMPORARIES = 3
"""Tensors of a page that a step makes in the dtype of masters: a gradient, and two of the class."""


class ClassPlan:
    """The entry point ``torch`` of the group ``tierstore.optimizers``."""

    algorithms = tuple(sorted(f"torch.optim.{cls.__name__}" for cls in ELEMENTWISE))
    narrower: Sequence[tuple[str, Mapping[str, Any]]] = ()

    def rates(self, device: torch.device) -> Iterator[tuple[Work, list[float]]]:
        """Measure steps of AdamW in memory, for parameters in float32 and in bfloat16.

        Yields:
            The work, and the seconds of each round.
        """
        for dtype in (torch.float32, torch.bfloat16):
            for numel in _SIZES:
                parameter = nn.Parameter(torch.zeros(numel, device=device, dtype=dtype))
                parameter.grad = torch.ones_like(parameter)
                optimizer = Paged([parameter], torch.optim.AdamW)
                optimizer.step()  # Creates the states.
                yield (
                    (_ELEMENTS, (2, 1, numel), dtype_name(dtype)),
                    [_seconds(optimizer, device) for _ in range(_ROUNDS)],
                )

    def problem(self, device: torch.device) -> None:
        """Return None: the classes have the kernels of torch."""

    def operations(self, work: Work) -> tuple[float, float]:
        """Return 0, and the bytes of memory that a work reads and writes.

        These are gradient, parameter, master and states.
        """
        _, (states, *shape), dtype = work
        of_pages = 2 * (1 + states) * master_dtype(DTYPES[dtype]).itemsize
        return 0.0, float(math.prod(shape) * (of_pages + 3 * DTYPES[dtype].itemsize))

    def plan(
        self, model: nn.Module, algorithm: str, *, on_gpu: bool, options: Mapping[str, Any]
    ) -> PlannedClass:
        """Return Paged for a model on the meta device.

        Args:
            model: the model.
            algorithm: one of ``algorithms``.
            on_gpu: of no effect.
            options: arguments of the class, or of Paged. Values may be texts, such as "0.9".

        Raises:
            ValueError, TypeError: as Paged.
        """
        given = {name: _value(value) for name, value in options.items()}
        cls = getattr(torch.optim, algorithm.removeprefix("torch.optim."))
        params = [
            (name, nn.Parameter(torch.zeros((), dtype=p.dtype, device="cpu").expand(p.shape)))
            for name, p in model.named_parameters()
        ]
        return PlannedClass(Paged(params, cls, **given), _call(algorithm, given))


class PlannedClass:
    """Paged over parameters without values.

    Args:
        optimizer: the optimizer.
        call: Python code that makes it.
    """

    def __init__(self, optimizer: Paged, call: str) -> None:
        self.groups = optimizer.paged_groups()
        """The param groups, as the store would page them."""
        self.call = call
        """Python code that makes the optimizer."""

    def works(
        self, subgroups: Sequence[SharedSubgroup], ranks: Sequence[int], world_size: int
    ) -> tuple[list[list[PageWorks]], int]:
        """Return the elements that each rank steps of each subgroup; see PlannedOptimizer."""
        found: list[list[PageWorks]] = [[] for _ in ranks]
        largest = 0
        for subgroup in subgroups:
            for position, rank in enumerate(ranks):
                numels: Counter[tuple[int, str]] = Counter()
                nbytes = 0
                for shard in subgroup.shards:
                    start, stop = shard.ranges[rank]
                    dtype = shard.spec.dtype
                    numels[len(shard.spec.states), dtype_name(dtype)] += stop - start
                    nbytes += master_dtype(dtype).itemsize * (stop - start)
                works = {(_ELEMENTS, (n, 1, size), d): 1 for (n, d), size in numels.items() if size}
                found[position].append((works, 0, 0))
                largest = max(largest, nbytes)
        return found, _TEMPORARIES * largest


def _value(value: Any) -> Any:
    """Return an argument, which may be a text of Python, such as "True" or "(0.9, 0.95)"."""
    with contextlib.suppress(ValueError, SyntaxError):
        return ast.literal_eval(value) if isinstance(value, str) else value
    return value


def _call(algorithm: str, options: Mapping[str, Any]) -> str:
    given = "".join(f", {name}={value!r}" for name, value in options.items())
    return f"tierstore.Paged(model.named_parameters(), {algorithm}, store=store{given})"


def _seconds(optimizer: Paged, device: torch.device) -> float:
    began = time.perf_counter()
    optimizer.step()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - began
