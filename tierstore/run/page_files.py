"""Page files of a run: allocate them, check them, and lay out their pages from a manifest."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest

from tierstore.errors import CorruptionError, RunMismatchError, StorageError
from tierstore.layout.ownership import SharedParameter, partition_ranks
from tierstore.layout.page_layout import PageLayout, lay_out, layout_digest
from tierstore.layout.parameters import PagedGroup, ParameterSpec
from tierstore.layout.sharding import whole_on
from tierstore.run.file_names import page_file
from tierstore.run.manifest import Manifest
from tierstore.storage.base import Storage
from tierstore.units import format_bytes


def create_files(storage: Storage, layouts: Mapping[int, PageLayout], slots: str) -> list[str]:
    """Allocate the files of pages that have none yet, for all pages or for none.

    Args:
        storage: the storage of the rank.
        layouts: page number -> layout of the page.
        slots: the slots that each page has.

    Returns:
        The names of the files that existed.

    Raises:
        StorageError: the disk is full, say. No new file is left.
    """
    existing = set(storage.list())
    found: list[str] = []
    created: list[str] = []
    try:
        for page, layout in layouts.items():
            for slot in slots:
                name = page_file(page, slot)
                if name in existing and storage.size(name) == layout.nbytes:
                    found.append(name)
                    continue
                storage.create(name, layout.nbytes)
                created.append(name)
    except StorageError as error:
        total = len(slots) * sum(layout.nbytes for layout in layouts.values())
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


def check_files(storage: Storage, layouts: Sequence[PageLayout], manifest: Manifest) -> None:
    """Check that the file of every committed page exists and has its full length.

    Raises:
        CorruptionError: a file is missing or has another length; the message names the first.
    """
    existing = set(storage.list())
    for page, (layout, entry) in enumerate(zip(layouts, manifest.pages, strict=True)):
        name = page_file(page, entry.copy)
        found = storage.size(name) if name in existing else None
        if found != layout.nbytes:
            state = "is missing" if found is None else f"has {found} bytes"
            raise CorruptionError(
                f"{storage.home(name).location}/{name} {state}, but commit {manifest.step} needs "
                f"it with {layout.nbytes} bytes: go back to a checkpoint of the run, if there "
                "is one"
            )


def check_same_model(
    manifest: Manifest, groups: Sequence[PagedGroup], layouts: Sequence[PageLayout]
) -> None:
    """Check that a commit holds these groups, laid out in these pages.

    Raises:
        RunMismatchError: it does not; the message names the first difference.
    """
    for committed, attached in zip_longest(_specs(manifest.groups), _specs(specs_of(groups))):
        if committed != attached:
            raise RunMismatchError(
                "this model is not the one of the run. First difference: the run has "
                f"{_describe(committed)}; this model has {_describe(attached)}. Build the model "
                "and its param groups as they were, or start over with overwrite=True"
            )
    if manifest.layout != layout_digest(layouts):
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


def specs_of(groups: Sequence[PagedGroup]) -> list[list[ParameterSpec]]:
    """Return the specs of the parameters of each group."""
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


def layouts_of(manifest: Manifest) -> list[PageLayout]:
    """Lay out the pages of a commit of one rank.

    Raises:
        RunMismatchError: another version of tierstore laid them out differently.
    """
    if manifest.subgroups is None:
        layouts = [
            lay_out(subgroup.of(0))
            for number, group in enumerate(manifest.groups)
            for subgroup in partition_ranks(
                number, list(map(_alone, group)), manifest.page_bytes, world_size=1
            )
        ]
    else:
        layouts = [lay_out(subgroup) for subgroup in manifest.subgroups]
    if layout_digest(layouts) != manifest.layout or len(layouts) != len(manifest.pages):
        raise RunMismatchError(
            f"commit {manifest.step} of run {manifest.run_id} was laid out by another version "
            "of tierstore: use the version that wrote it"
        )
    return layouts


def _alone(spec: ParameterSpec) -> SharedParameter:
    return SharedParameter(spec=spec, holding=whole_on([0]), flat=True, cost=0)
