"""Answers of ``tierstore.Paged`` to plans of runs, for the classes of ``torch.optim``."""

from __future__ import annotations

import ast
import contextlib
import math
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import Any

import torch
from torch import nn

from tierstore.layout.ownership import SharedSubgroup
from tierstore.layout.parameters import dtype_name, master_dtype
from tierstore.optim.classes import ELEMENTWISE, Class
from tierstore.optim.paged import Paged
from tierstore.tools.plan.models import DTYPES
from tierstore.tools.probe.optimizers import PageWorks, Work

_SIZES = (1 << 16, 1 << 22)  # One shows what a call takes, the other is more than caches hold.
_ROUNDS = 5
_TEMPORARIES = 3
"""Tensors of a page that a step makes in the dtype of masters: a gradient, and two of the class."""


class ClassPlan:
    """The entry point ``torch`` of the group ``tierstore.optimizers``."""

    algorithms = tuple(sorted(f"torch.optim.{cls.__name__}" for cls in ELEMENTWISE))
    narrower: Sequence[tuple[str, Mapping[str, Any]]] = ()

    def rates(self, device: torch.device) -> Iterator[tuple[Work, list[float]]]:
        """Measure steps of each class in memory, for parameters in float32 and in bfloat16.

        Yields:
            The work, whose shape is (tensors of pages, 1, elements), and the seconds of each round.
        """
        kinds = product(self.algorithms, (torch.float32, torch.bfloat16), _SIZES)
        for algorithm, dtype, numel in kinds:
            parameter = nn.Parameter(torch.ones(numel, device=device, dtype=dtype))
            parameter.grad = torch.ones_like(parameter)
            optimizer = Paged([parameter], _class_of(algorithm))
            [spec] = [p.spec for group in optimizer.paged_groups() for p in group.parameters]
            optimizer.step()  # Creates the states.
            yield (
                (algorithm, (len(spec.stored), 1, numel), dtype_name(dtype)),
                [_seconds(optimizer, device) for _ in range(_ROUNDS)],
            )

    def problem(self, device: torch.device) -> None:
        """Return None: the classes have the kernels of torch."""

    def operations(self, work: Work) -> tuple[float, float]:
        """Return 0, and the bytes of memory that a work reads and writes.

        These are gradient, parameter, master and states.
        """
        _, (tensors, *shape), dtype = work
        of_pages = 2 * tensors * master_dtype(DTYPES[dtype]).itemsize
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
        params = [
            (name, nn.Parameter(torch.zeros((), dtype=p.dtype, device="cpu").expand(p.shape)))
            for name, p in model.named_parameters()
        ]
        return PlannedClass(Paged(params, _class_of(algorithm), **given), algorithm, given)


class PlannedClass:
    """Paged over parameters without values.

    Args:
        optimizer: the optimizer.
        algorithm: the name of its class.
        options: its arguments.
    """

    def __init__(self, optimizer: Paged, algorithm: str, options: Mapping[str, Any]) -> None:
        self.groups = optimizer.paged_groups()
        """The param groups, as the store would page them."""
        given = "".join(f", {name}={value!r}" for name, value in options.items())
        self.call = f"tierstore.Paged(model.named_parameters(), {algorithm}, store=store{given})"
        """Python code that makes the optimizer."""
        self._algorithm = algorithm

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
                    numels[len(shard.spec.stored), dtype_name(dtype)] += stop - start
                    nbytes += master_dtype(dtype).itemsize * (stop - start)
                works = {
                    (self._algorithm, (n, 1, size), d): 1 for (n, d), size in numels.items() if size
                }
                found[position].append((works, 0, 0))
                largest = max(largest, nbytes)
        return found, _TEMPORARIES * largest


def _value(value: Any) -> Any:
    """Return an argument, which may be a text of Python, such as "True" or "(0.9, 0.95)"."""
    with contextlib.suppress(ValueError, SyntaxError):
        return ast.literal_eval(value) if isinstance(value, str) else value
    return value


def _class_of(algorithm: str) -> Class:
    found: Class = getattr(torch.optim, algorithm.removeprefix("torch.optim."))
    return found


def _seconds(optimizer: Paged, device: torch.device) -> float:
    began = time.perf_counter()
    optimizer.step()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - began
