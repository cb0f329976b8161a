"""From an optimizer's groups to the pages of a run and their files, and back again."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import torch
import xxhash

from tierstore.errors import CorruptionError, RunMismatchError, StorageError
from tierstore.layout.ownership import SharedSubgroup
from tierstore.layout.page_layout import PageLayout, lay_out, lay_out_groups
from tierstore.layout.parameters import PagedGroup, PagedParameter, ParameterSpec
from tierstore.paging.page import Page
from tierstore.paging.views import Direct, PageView, Source
from tierstore.run import tagged_json
from tierstore.run.manifest import Manifest, page_file
from tierstore.storage.base import Storage
from tierstore.units import format_bytes


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
        layouts = lay_out_groups(_own(groups), page_bytes, first_group=first_group)
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


def create_files(storage: Storage, pages: Sequence[Page], copies: str) -> list[str]:
    """Allocate the files of pages that do not have theirs yet, all or none.

    Returns:
        The names of those that were there.
    """
    existing = set(storage.list())
    found: list[str] = []
    created: list[str] = []
    try:
        for page in pages:
            for copy in copies:
                name = page_file(page.index, copy)
                if name in existing and storage.size(name) == page.layout.nbytes:
                    found.append(name)
                    continue
                storage.create(name, page.layout.nbytes)
                created.append(name)
    except StorageError as error:
        total = len(copies) * sum(page.layout.nbytes for page in pages)
        error.add_note(
            f"The pages of this run take {format_bytes(total)} in {storage.location}: free "
            "that much, or name another directory. Nothing was kept of them."
        )
        for name in created:
            with contextlib.suppress(StorageError):  # The first error is the one to mend.
                storage.unlink(name)
        raise
    if created:
        storage.sync_directory()
    return found


def check_files(storage: Storage, pages: Sequence[Page], manifest: Manifest) -> None:
    """Check that the file of every committed page is there in full.

    Raises:
        CorruptionError: naming the first that is not.
    """
    existing = set(storage.list())
    for page, entry in zip(pages, manifest.pages, strict=True):
        name = page_file(page.index, entry.copy)
        found = storage.size(name) if name in existing else None
        if found != page.layout.nbytes:
            state = "is missing" if found is None else f"has {found} bytes"
            raise CorruptionError(
                f"{storage.home(name).location}/{name} {state}, but commit {manifest.step} needs "
                f"it with {page.layout.nbytes} bytes: go back to a checkpoint of the run, if there "
                "is one"
            )


def encode_hyperparameters(index: int, group: PagedGroup) -> Any:
    """Return the hyperparameters of a group as a manifest holds them.

    Raises:
        TypeError, ValueError: one that no commit can hold, by name.
    """
    return tagged_json.encode(group.own_hyperparameters(), name=f"param_groups[{index}]")


def layout_digest(layouts: Iterable[PageLayout]) -> str:
    """Return a digest of the partition: which bytes of which page are what."""
    return xxhash.xxh3_128_hexdigest("".join(layout.digest for layout in layouts).encode())


def check_same_model(
    manifest: Manifest, groups: Sequence[PagedGroup], pages: Sequence[Page]
) -> None:
    """Check that a commit is of these groups, and has them in these pages.

    Raises:
        RunMismatchError: naming the first difference.
    """
    for committed, attached in zip_longest(_specs(manifest.groups), _specs(_own(groups))):
        if committed != attached:
            raise RunMismatchError(
                "this model is not the one of the run. First difference: the run has "
                f"{_describe(committed)}; this model has {_describe(attached)}. Build the model "
                "and its param groups as they were, or start over with overwrite=True"
            )
    if manifest.layout != layout_digest(page.layout for page in pages):
        if manifest.subgroups is not None:
            raise RunMismatchError(
                "the run has the parameters of this model, but ranks held or owned them in "
                "another way: give them the placements and the partition that they had, or "
                "begin a new run with restore(checkpoint=OUT) after `tierstore checkpoint RUN OUT`"
            )
        raise RunMismatchError(
            "the run has the parameters of this model, but another version of tierstore laid "
            "them out in other pages: resume it with the version that wrote it"
        )


def _own(groups: Sequence[PagedGroup]) -> list[list[ParameterSpec]]:
    return [[parameter.spec for parameter in group.parameters] for group in groups]


def _specs(groups: Sequence[Sequence[ParameterSpec]]) -> Iterator[tuple[int, ParameterSpec | None]]:
    """Yield every spec with its group; a None ends each group, so that its length counts."""
    for index, group in enumerate(groups):
        yield from ((index, spec) for spec in group)
        yield index, None


def _describe(place: tuple[int, ParameterSpec | None] | None) -> str:
    if place is None:
        return "no further group"
    index, spec = place
    return f"in group {index} {spec.describe() if spec else 'no further parameter'}"
