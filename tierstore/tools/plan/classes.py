"""Answers of ``tierstore.Paged`` to plans of runs, for classes of optimizers."""

from __future__ import annotations

import ast
import contextlib
import importlib
import math
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import Any

import torch
from torch import nn

from tierstore.layout.ownership import SharedSubgroup
from tierstore.layout.parameters import ParameterSpec, dtype_name, master_dtype
from tierstore.optim.classes import ELEMENTWISE, Class
from tierstore.optim.paged import Paged
from tierstore.tools.plan.models import DTYPES
from tierstore.tools.probe.optimizers import PageWorks, Work

_SIZES = (256, 2048)  # One shows what a call takes, the other is more than caches hold.
_ROUNDS = 5
_TEMPORARIES = 3
"""Tensors of a page that a step makes in the dtype of masters: a gradient, and two of the class."""
_OF_FACTORS = 8
"""Tensors that a step makes in the size of the largest factor, as for its eigenvectors."""


class ClassPlan:
    """The entry point ``torch`` of the group ``tierstore.optimizers``."""

    algorithms = tuple(
        sorted(f"torch.optim.{cls.__name__}" for cls in (*ELEMENTWISE, torch.optim.Adafactor))
    )
    narrower: Sequence[tuple[str, Mapping[str, Any], bool]] = ()

    def rates(self, device: torch.device) -> Iterator[tuple[Work, list[float]]]:
        """Measure steps of each class in memory, for square parameters in float32 and in bfloat16.

        Yields:
            The work, whose shape is (tensors of pages that have the shape of the parameter, 1,
            elements), and the seconds of each round.
        """
        kinds = product(self.algorithms, (torch.float32, torch.bfloat16), _SIZES)
        for algorithm, dtype, size in kinds:
            parameter = nn.Parameter(torch.ones(size, size, device=device, dtype=dtype))
            parameter.grad = torch.ones_like(parameter)
            optimizer = Paged([parameter], _class_of(algorithm))
            [spec] = [p.spec for group in optimizer.paged_groups() for p in group.parameters]
            optimizer.step()  # Creates the states.
            yield (
                (algorithm, (_tensors(spec), 1, parameter.numel()), dtype_name(dtype)),
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
            algorithm: one of ``algorithms``, or another class, as "module.Class".
            on_gpu: whether steps are computed on a GPU, where fused kernels may cut parameters.
            options: arguments of the class, or of Paged. Values may be texts, such as "0.9".

        Raises:
            ValueError, TypeError: as Paged, or the class cannot be imported or tried.
        """
        given = {name: _value(value) for name, value in options.items()}
        params = [
            (name, nn.Parameter(torch.zeros((), dtype=p.dtype, device="cpu").expand(p.shape)))
            for name, p in model.named_parameters()
        ]
        taken = {name: of for name, of in given.items() if not (on_gpu and name == "fused")}
        try:
            return PlannedClass(Paged(params, _class_of(algorithm), **taken), algorithm, given)
        except (ValueError, TypeError):
            raise
        except Exception as error:  # Classes of packages may raise anything.
            raise ValueError(f"{algorithm}: {type(error).__name__}: {error}") from error


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
        parameters = [parameter for group in self.groups for parameter in group.parameters]
        self.whole = not all(parameter.elementwise for parameter in parameters)
        """True if ranks must hold whole parameters."""
        self._factor_bytes = {
            parameter.name: max(
                (
                    math.prod(shape) * parameter.states[state].itemsize
                    for state, shape in parameter.shapes.items()
                ),
                default=0,
            )
            for parameter in parameters
        }

    def works(
        self, subgroups: Sequence[SharedSubgroup], ranks: Sequence[int], world_size: int
    ) -> tuple[list[list[PageWorks]], int]:
        """Return the elements that each rank steps of each subgroup; see PlannedOptimizer.

        Elementwise ones are one work; of others each parameter is one. A class that is not measured
        has none.
        """
        found: list[list[PageWorks]] = [[] for _ in ranks]
        largest = 0
        for subgroup in subgroups:
            for position, rank in enumerate(ranks):
                together: Counter[tuple[int, str]] = Counter()
                works: Counter[Work] = Counter()
                nbytes = factor_bytes = 0
                for shard in subgroup.shards:
                    start, stop = shard.ranges[rank]
                    spec, numel = shard.spec, stop - start
                    tensors, dtype = _tensors(spec), dtype_name(spec.dtype)
                    master_bytes = master_dtype(spec.dtype).itemsize * numel
                    nbytes += _TEMPORARIES * master_bytes
                    if spec.elementwise:
                        together[tensors, dtype] += numel
                    elif numel:
                        works[self._algorithm, (tensors, 1, numel), dtype] += 1
                        # The first step creates all states beside the page, others copy some.
                        nbytes += spec.nbytes - master_bytes
                        factor_bytes = max(factor_bytes, self._factor_bytes[spec.name])
                for (tensors, dtype), numel in together.items():
                    if numel:
                        works[self._algorithm, (tensors, 1, numel), dtype] += 1
                is_measured = self._algorithm in ClassPlan.algorithms
                found[position].append((works if is_measured else {}, 0, 0))
                largest = max(largest, nbytes + _OF_FACTORS * factor_bytes)
        return found, largest


def _tensors(spec: ParameterSpec) -> int:
    """Return how many tensors of pages have the shape of the parameter."""
    return len(spec.stored) - len(spec.shapes)


def _value(value: Any) -> Any:
    """Return an argument, which may be a text of Python, such as "True" or "(0.9, 0.95)"."""
    with contextlib.suppress(ValueError, SyntaxError):
        return ast.literal_eval(value) if isinstance(value, str) else value
    return value


def _class_of(algorithm: str) -> Class:
    """Return a class by its name, as "module.Class"."""
    module, _, name = algorithm.rpartition(".")
    try:
        found: Class = getattr(importlib.import_module(module), name)
    except Exception as error:  # A module may raise anything while it is imported.
        raise ValueError(
            f"{algorithm} cannot be imported ({type(error).__name__}: {error}), expected a "
            "module and its class, such as torch.optim.Adam: install its package"
        ) from error
    return found


def _seconds(optimizer: Paged, device: torch.device) -> float:
    began = time.perf_counter()
    optimizer.step()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - began
