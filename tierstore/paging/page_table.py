"""From an optimizer's groups to the pages of a run and their files, and back again."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from tierstore.layout.ownership import SharedSubgroup
from tierstore.layout.page_layout import PageLayout, lay_out, lay_out_groups
from tierstore.layout.parameters import PagedGroup, PagedParameter, ParameterSpec
from tierstore.paging.page import Page
from tierstore.paging.views import Direct, PageView, Source
from tierstore.run.committer import encode_hyperparameters
from tierstore.run.page_files import specs_of


def check_groups(
    groups: Sequence[PagedGroup], known: Collection[str], *, first_group: int
) -> dict[str, ParameterSpec]:
    """Return the parameters of groups by name, after checking that a store can keep them.

    Args:
        groups: what is to be attached.
        known: names of the parameters that are attached already.
        first_group: number of the first of these groups.

    Raises:
        ValueError, TypeError: two parameters of one name, or a hyperparameter that no commit
            can hold.
    """
    specs: dict[str, ParameterSpec] = {}
    for spec in (parameter.spec for group in groups for parameter in group.parameters):
        if spec.name in specs or spec.name in known:
            raise ValueError(f"two parameters are named {spec.name!r}: names must be unique")
        specs[spec.name] = spec
    for index, group in enumerate(groups, start=first_group):
        encode_hyperparameters(index, group)  # Refuses now what could not be committed later.
    return specs


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LocalSubgroup:
    """A subgroup, and what this rank has of it."""

    index: int
    layout: PageLayout
    parameters: Mapping[str, PagedParameter]
    """All of the subgroup, by name."""
    direct: Direct
    """Where they and their gradients are."""
    page: Page | None
    """None where this rank owns nothing of it."""
    shared: SharedSubgroup | None
    """What each rank owns of it; None where there is one rank."""

    @property
    def is_fresh(self) -> bool:
        """Whether there is a page that was never written."""
        return self.page is not None and self.page.is_fresh

    def view(self, source: Source, present: Collection[str]) -> PageView:
        """Return the tensors to step, given the names of parameters that have a gradient."""
        memory = torch.empty(0, dtype=torch.uint8) if self.page is None else self.page.memory
        return PageView(self.layout, self.parameters, memory, source, present)


def make_subgroups(
    groups: Sequence[PagedGroup],
    shared: Sequence[SharedSubgroup] | None,
    *,
    rank: int,
    first_group: int,
    first_subgroup: int,
    first_page: int,
    page_bytes: int,
) -> list[LocalSubgroup]:
    """Lay out the pages of some groups.

    Args:
        groups: the groups.
        shared: their subgroups on all ranks; None: there is one rank.
        rank: this one.
        first_group: number of the first group.
        first_subgroup: number of the first subgroup.
        first_page: number of the first page; subgroups that this rank owns nothing of have none.
        page_bytes: about how large a page may be.
    """
    members = {parameter.name: parameter for group in groups for parameter in group.parameters}
    if shared is None:
        layouts = lay_out_groups(specs_of(groups), page_bytes, first_group=first_group)
    else:
        layouts = [lay_out(subgroup.of(rank)) for subgroup in shared]
    subgroups = []
    for number, layout in enumerate(layouts):
        parameters = {name: members[name] for name in layout.parameter_names}
        direct, page = Direct({} if shared is None else shared[number].places(rank)), None
        if layout.nbytes:
            page = Page(first_page, layout, parameters, direct)
            first_page += 1
        subgroups.append(
            LocalSubgroup(
                index=first_subgroup + number,
                layout=layout,
                parameters=parameters,
                direct=direct,
                page=page,
                shared=None if shared is None else shared[number],
            )
        )
    return subgroups


def pages_of(subgroups: Iterable[LocalSubgroup]) -> list[Page]:
    """Return the pages of some subgroups, in order."""
    return [subgroup.page for subgroup in subgroups if subgroup.page is not None]


def device_of(groups: Sequence[PagedGroup]) -> torch.device:
    """Return the device that all parameters are on.

    Raises:
        ValueError: they are on several.
    """
    members = [parameter for group in groups for parameter in group.parameters]
    devices = {parameter.tensor.device: parameter.name for parameter in members}
    if len(devices) > 1:
        places = " and ".join(f"{name!r} on {device}" for device, name in devices.items())
        raise ValueError(f"one store pages the parameters of one device, got {places}")
    return next(iter(devices), torch.device("cpu"))
