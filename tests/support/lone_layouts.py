"""Subgroups and pages of a run of one rank."""

from __future__ import annotations

from collections.abc import Sequence

from tierstore.layout.ownership import SharedParameter, partition_ranks
from tierstore.layout.page_layout import PageLayout, lay_out
from tierstore.layout.parameters import ParameterSpec
from tierstore.layout.sharding import whole_on
from tierstore.layout.subgroups import Subgroup


def cut_alone(group: int, specs: Sequence[ParameterSpec], page_bytes: int) -> list[Subgroup]:
    """Cut one param group into the subgroups of the only rank."""
    parameters = [
        SharedParameter(spec=spec, holding=whole_on([0]), flat=spec.elementwise, cost=1)
        for spec in specs
    ]
    return [subgroup.of(0) for subgroup in partition_ranks(group, parameters, page_bytes, 1)]


def lay_out_alone(groups: Sequence[Sequence[ParameterSpec]], page_bytes: int) -> list[PageLayout]:
    """Lay out the pages of all param groups."""
    return [
        lay_out(subgroup)
        for number, specs in enumerate(groups)
        for subgroup in cut_alone(number, specs, page_bytes)
    ]
