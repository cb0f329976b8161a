"""Sums over the parameters of a model, from one parameter of each kind.

Layers are alike, so one parameter of each shape and place in a layer stands for all of them.
"""

from __future__ import annotations

import logging
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from tierstore.errors import PlanError
from tierstore.layout.ownership import SharedSubgroup, partition_ranks
from tierstore.layout.page_layout import PageLayout, lay_out
from tierstore.layout.sharding import whole_on
from tierstore.paging.shared_parameters import shared_parameter
from tierstore.paging.tier_plan import PAGE_BYTES_MAX
from tierstore.tools.plan.footprint import StoreOptions
from tierstore.tools.plan.models import Model
from tierstore.tools.plan.rates import Rates
from tierstore.tools.plan.skeleton import skeleton_of
from tierstore.tools.probe.optimizers import OptimizerPlan

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Totals:
    """Sums over all parameters of a model. Bytes are of pages."""

    state: int
    read: int
    """Bytes that a step reads of a page that rests on the drives."""
    written: int
    """Bytes that a step writes of such a page."""
    written_between: int
    """Bytes that a step without a commit writes of such a page."""
    compute_s: float
    """Seconds of one rank that steps all."""
    matrices: int
    """Bytes beside pages, for one parameter."""
    parameters: int
    """Bytes of the parameters."""
    uncut: int
    """Bytes in a page of the largest parameter that pages must not cut."""
    whole: bool
    """True if ranks must hold whole parameters."""


def totals_of(
    model: Model,
    optimizer: OptimizerPlan,
    algorithm: str,
    options: Mapping[str, Any],
    rates: Rates,
    *,
    on_gpu: bool,
) -> Totals:
    """Return the sums of a model under an optimizer.

    Raises:
        PlanError: the optimizer refuses the model or an option.
    """
    first, counts = _folded(model)
    try:
        with quiet():  # Warnings would be about a part of the model.
            planned = optimizer.plan(skeleton_of(first), algorithm, on_gpu=on_gpu, options=options)
    except (ValueError, TypeError) as error:
        raise PlanError(f"the optimizer refuses the job: {error}") from error
    subgroups: list[SharedSubgroup] = []
    for number, group in enumerate(planned.groups):
        for parameter in group.parameters:
            alone = [shared_parameter(parameter, whole_on([0]))]
            subgroups += partition_ranks(number, alone, PAGE_BYTES_MAX, 1)
    [works], matrices = planned.works(subgroups, [0], 1)
    found: Counter[str] = Counter()
    compute_s, uncut = 0.0, 0
    for subgroup, (own, _, _) in zip(subgroups, works, strict=True):
        count = counts[subgroup.shards[0].spec.name]
        layout, spec = lay_out(subgroup.of(0)), subgroup.shards[0].spec
        if not spec.elementwise:
            start, stop = subgroup.shards[0].ranges[0]
            rows = (stop - start) // math.prod(spec.shape[1:])
            uncut = max(uncut, layout.nbytes // (rows // spec.unit if spec.unit else 1))
        found["state"] += count * layout.nbytes
        found["read"] += count * _bytes_read(layout)
        found["written"] += count * StoreOptions(commit_every=1).written_bytes(layout)
        found["written_between"] += count * StoreOptions(commit_every=2).written_bytes(layout)
        compute_s += count * rates.seconds(own, optimizer)
    return Totals(
        **found,
        compute_s=compute_s,
        uncut=uncut,
        matrices=matrices,
        parameters=sum(p.numel * p.dtype.itemsize for p in model.parameters),
        whole=planned.whole,
    )


@contextmanager
def quiet() -> Iterator[None]:
    """Log no warning meanwhile."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)


def _bytes_read(layout: PageLayout) -> int:
    return sum(section.extent.nbytes for section in layout.readable)


def _folded(model: Model) -> tuple[Model, Counter[str]]:
    """Return one parameter of each kind, and how often each kind is in the model.

    Example: "model.layers.0.mlp.up_proj.weight" stands for the parameters of this shape and place
    of all layers.
    """
    names: dict[object, str] = {}
    counts: Counter[str] = Counter()
    for parameter in model.parameters:
        key = _NUMBER.sub("", parameter.name), parameter.shape, parameter.dtype
        counts[names.setdefault(key, parameter.name)] += 1
    kept = tuple(parameter for parameter in model.parameters if counts[parameter.name])
    return Model(model.name, kept), counts
