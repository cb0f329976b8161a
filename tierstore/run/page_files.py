"""Page files of a run: allocate them, and check them against a commit."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import zip_longest

from tierstore.errors import CorruptionError, RunMismatchError, StorageError
from tierstore.layout.page_layout import PageLayout
from tierstore.layout.parameters import ParameterSpec, unwrapped_names
from tierstore.run.commit import load_commit
from tierstore.run.file_names import page_file, page_number
from tierstore.run.layout_file import RankLayout
from tierstore.run.manifest import Manifest
from tierstore.run.sealed import checksum_of
from tierstore.storage.base import Storage
from tierstore.units import format_bytes

_Place = tuple[int, ParameterSpec | None]
"""A group, and a parameter of it; None ends the group."""


def create_all(storage: Storage, sizes: Mapping[str, int]) -> None:
    """Create files of these sizes in bytes: all or none, even after an interrupt.

    Raises:
        StorageError: for example, the disk is full. No new file is left.
    """
    created: list[str] = []
    try:
        for name, nbytes in sizes.items():
            storage.create(name, nbytes)
            created.append(name)
    except BaseException:
        for name in created:
            with contextlib.suppress(StorageError):  # The user has to fix the first error.
                storage.unlink(name)
        raise


def create_files(storage: Storage, layouts: Mapping[int, PageLayout], slots: str) -> list[str]:
    """Allocate the missing files of pages, for all pages or for none.

    The names of new files become durable with the layout file of the next commit.

    Args:
        storage: the storage of the rank.
        layouts: page number -> layout of the page.
        slots: the slots of each page.

    Returns:
        The names of the files that existed.

    Raises:
        StorageError: the disk is full, for example. No new file is left.
    """
    existing = set(storage.list())
    sizes = {
        page_file(page, slot): layout.nbytes for page, layout in layouts.items() for slot in slots
    }
    missing = {
        name: nbytes
        for name, nbytes in sizes.items()
        if name not in existing or storage.size(name) != nbytes
    }
    try:
        create_all(storage, missing)
    except StorageError as error:
        error.add_note(
            f"The pages of this run take {format_bytes(sum(sizes.values()))} in "
            f"{storage.location}: free that much, or name another directory. No new file was kept."
        )
        raise
    return [name for name in sizes if name not in missing]


def remove_other_files(storage: Storage, needed: Collection[str]) -> None:
    """Remove all page files that a commit does not need. New files then replace them.

    After a failed write or flush the kernel may keep the new data only in memory, and report later
    writes and flushes of the same file as successful. After a restart the affected files are
    unknown. In a new file, data is durable after a successful flush.

    Raises:
        StorageError: a file cannot be removed. Another call removes the rest.
    """
    for name in storage.list():
        if page_number(name) is not None and name not in needed:
            storage.unlink(name)


def check_files(storage: Storage, layouts: Sequence[PageLayout], manifest: Manifest) -> None:
    """Check that the file of every committed page exists and has the length of its layout.

    Raises:
        CorruptionError: a file is missing or has another length; the message names the first.
    """
    existing = set(storage.list())
    for page, entry in manifest.entries.items():
        name = page_file(page, entry.slot)
        found = storage.size(name) if name in existing else None
        if found != layouts[page].nbytes:
            state = "is missing" if found is None else f"has {found} bytes"
            raise CorruptionError(
                f"{storage.home(name).location}/{name} {state}, but commit {manifest.step} needs "
                f"it with {layouts[page].nbytes} bytes: go back to a checkpoint of the run, if "
                "one exists"
            )


def check_same_model(
    storage: Storage,
    manifest: Manifest,
    attached: RankLayout,
) -> dict[str, str]:
    """Check that a commit holds these groups, laid out in these pages.

    Names may differ in the parts that wrappers add, such as "module." and "_orig_mod.".

    Args:
        storage: the rank's files. The layout file is read only to name a difference.
        manifest: the commit.
        attached: all groups and pages.

    Returns:
        Parameter name -> its name in the commit, if the names differ.

    Raises:
        RunMismatchError: the commit is of another model; the message names the first difference.
        CorruptionError: the numbers of pages in the commit and in its layout differ; or the commit
            is of another model, and the layout file is missing or damaged.
    """
    if checksum_of(attached.to_bytes()) == manifest.layout:
        if len(manifest.pages) != len(attached.subgroups):
            raise CorruptionError(
                f"commit {manifest.step} in {storage.location} has {len(manifest.pages)} pages, "
                f"but its layout has {len(attached.subgroups)}: go back to a checkpoint of the "
                "run, if one exists"
            )
        return {}
    committed = load_commit(storage, manifest)
    _require_same_names(committed.groups, attached.groups)
    found, expected = _first_difference(committed.groups, attached.groups)
    if found != expected:
        raise RunMismatchError(
            "this model is not the one of the run. First difference: the run has "
            f"{_describe(found)}; this model has {_describe(expected)}. {_ADVICE}"
        )
    now = dict(zip(_unwrapped(committed.groups), _unwrapped(attached.groups), strict=True))
    if committed.layout.renamed(now).to_bytes() == attached.to_bytes():
        return {name: former for former, name in now.items() if name != former}
    raise RunMismatchError(
        "the run has the parameters of this model, but in other pages: ranks held or owned the "
        "parameters in a different way, or another version of tierstore cut them. Restore the old "
        "placements and partition, or begin a new run with restore(checkpoint=OUT) after "
        "`tierstore checkpoint RUN OUT`"
    )


def _require_same_names(
    committed: Sequence[Sequence[ParameterSpec]], groups: Sequence[Sequence[ParameterSpec]]
) -> None:
    """Refuse a model with fewer or further parameters.

    Raises:
        RunMismatchError: names three of each.
    """
    in_run, here = _unwrapped(committed), _unwrapped(groups)
    differences = []
    for what, ours, others in (("lacks", in_run, here), ("has further", here, in_run)):
        known = {*others.values()}
        names = [name for name in ours if ours[name] not in known]
        if names:
            some = ", ".join(map(repr, names[:3])) + ", ..." * (len(names) > 3)
            differences.append(f"{what} {len(names)} parameters ({some})")
    if differences:
        raise RunMismatchError(
            f"this model is not the one of the run: it {' and '.join(differences)}. {_ADVICE} A "
            "new run may begin with part of a model: `tierstore checkpoint RUN OUT`, then "
            "restore(checkpoint=OUT) with fewer parameters, or weights that the program loads"
        )


_ADVICE = (
    "Build the model and its param groups as they were, and freeze parameters after that with "
    "requires_grad_(False); or name another directory for another run. (overwrite=True deletes "
    "the run.)"
)


def _first_difference(
    committed: Sequence[Sequence[ParameterSpec]], groups: Sequence[Sequence[ParameterSpec]]
) -> tuple[_Place | None, _Place | None]:
    """Return the first specs that differ in more than wrappers, or (None, None)."""
    in_run, here = _unwrapped(committed), _unwrapped(groups)
    for found, expected in zip_longest(_specs(committed), _specs(groups)):
        if _without_wrappers(found, in_run) != _without_wrappers(expected, here):
            return found, expected
    return None, None


def _specs(groups: Sequence[Sequence[ParameterSpec]]) -> Iterator[tuple[int, ParameterSpec | None]]:
    """Yield every spec with its group. None ends each group, so that lengths are compared."""
    for index, group in enumerate(groups):
        yield from ((index, spec) for spec in group)
        yield index, None


def _unwrapped(groups: Sequence[Sequence[ParameterSpec]]) -> dict[str, str]:
    return unwrapped_names(spec.name for group in groups for spec in group)


def _without_wrappers(
    place: tuple[int, ParameterSpec | None] | None, plain: Mapping[str, str]
) -> tuple[int, ParameterSpec | None] | None:
    if place is None:
        return None
    index, spec = place
    return index, spec and replace(spec, name=plain[spec.name])


def _describe(place: tuple[int, ParameterSpec | None] | None) -> str:
    if place is None:
        return "no further group"
    index, spec = place
    return f"in group {index} {spec.describe() if spec else 'no further parameter'}"
