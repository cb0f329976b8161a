"""The subgroups of a store as one rank has them, with its page of each."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from tierstore.layout.ownership import SharedSubgroup
from tierstore.layout.page_layout import PageLayout, lay_out
from tierstore.layout.parameters import PagedGroup, PagedParameter, ParameterSpec
from tierstore.paging.page import Content, Page
from tierstore.paging.views import Direct, PageView, Source
from tierstore.run.committer import encode_hyperparameters


def check_groups(
    groups: Sequence[PagedGroup], known: Collection[str], *, first_group: int
) -> dict[str, ParameterSpec]:
    """Return the specs of groups by parameter name, after checking that a store can keep them.

    Args:
        groups: the groups to attach.
        known: names of the parameters that are attached already.
        first_group: number of the first of these groups.

    Raises:
        ValueError, TypeError: two parameters have one name, or no commit can hold a
            hyperparameter.
    """
    specs: dict[str, ParameterSpec] = {}
    for spec in (parameter.spec for group in groups for parameter in group.parameters):
        if spec.name in specs or spec.name in known:
            raise ValueError(f"two parameters are named {spec.name!r}: names must be unique")
        specs[spec.name] = spec
    for index, group in enumerate(groups, start=first_group):
        encode_hyperparameters(index, group)  # Raises now instead of in a later commit.
    return specs


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LocalSubgroup:
    """A subgroup, and this rank's page of it."""

    index: int
    layout: PageLayout
    parameters: Mapping[str, PagedParameter]
    """All parameters of the subgroup, by name."""
    direct: Direct
    """Finds the parameters and their gradients."""
    page: Page | None
    """None on a rank that owns nothing of the subgroup."""
    shared: SharedSubgroup
    """What each rank owns of it."""

    @property
    def is_fresh(self) -> bool:
        """Whether there is a page, and it was never stepped or written."""
        return self.page is not None and self.page.content is Content.FRESH

    def view(self, source: Source, present: Collection[str]) -> PageView:
        """Return the tensors to step, given the names of parameters that have a gradient."""
        memory = torch.empty(0, dtype=torch.uint8) if self.page is None else self.page.memory
        return PageView(self.layout, self.parameters, memory, source, present)


def local_subgroups(
    groups: Sequence[PagedGroup],
    shared: Sequence[SharedSubgroup],
    *,
    rank: int,
    first_subgroup: int,
    first_page: int,
) -> list[LocalSubgroup]:
    """Lay out the pages of one rank.

    Args:
        groups: the groups to page.
        shared: their subgroups.
        rank: the rank.
        first_subgroup: number of the first subgroup.
        first_page: number of the first page; a rank has no page of a subgroup that it owns
            nothing of.
    """
    members = {parameter.name: parameter for group in groups for parameter in group.parameters}
    subgroups = []
    for number, subgroup in enumerate(shared, start=first_subgroup):
        layout = lay_out(subgroup.of(rank))
        parameters = {name: members[name] for name in layout.parameter_names}
        direct, page = Direct(subgroup.places(rank)), None
        if layout.nbytes:
            page = Page(first_page, layout, parameters, direct)
            first_page += 1
        subgroups.append(
            LocalSubgroup(
                index=number,
                layout=layout,
                parameters=parameters,
                direct=direct,
                page=page,
                shared=subgroup,
            )
        )
    return subgroups


def pages_of(subgroups: Iterable[LocalSubgroup]) -> list[Page]:
    """Return the pages of some subgroups, in order."""
    return [subgroup.page for subgroup in subgroups if subgroup.page is not None]


def device_of(groups: Sequence[PagedGroup]) -> torch.device:
    """Return the device that all parameters are on.

    Raises:
        ValueError: they are on several devices.
    """
    members = [parameter for group in groups for parameter in group.parameters]
    devices = {parameter.tensor.device: parameter.name for parameter in members}
    if len(devices) > 1:
        places = " and ".join(f"{name!r} on {device}" for device, name in devices.items())
        raise ValueError(f"one store pages the parameters of one device, got {places}")
    return next(iter(devices), torch.device("cpu"))
