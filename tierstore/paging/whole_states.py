"""Whole states of parameters, read from pages and written to pages outside of a step."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Mapping, Sequence

import torch

from tierstore.errors import RunMismatchError
from tierstore.layout.dtensors import is_dtensor, local_tensor, placed_as
from tierstore.layout.parameters import PagedGroup, ParameterSpec, check_states
from tierstore.paging.page import Needed, Page, PageFiles
from tierstore.paging.page_table import PageTable
from tierstore.paging.views import PageView
from tierstore.ranks.peers import Peers, agree

States = Mapping[str, Mapping[str, torch.Tensor]]


def agree_to_read(peers: Peers, names: Collection[str]) -> None:
    """Check that all ranks read the states of the same parameters.

    Raises:
        RunMismatchError: the names differ.
        PeerFailed: another rank makes another call.
    """
    _require_same(agree(peers, "read states", lambda: sorted(names)))


def agree_to_write(peers: Peers, groups: Sequence[PagedGroup], values: States) -> None:
    """Check that states fit the parameters, and that all ranks write the same states.

    Raises:
        ValueError: a state does not fit.
        RunMismatchError: the ranks passed different states.
        PeerFailed: a state does not fit on another rank.
    """
    parameters = {member.name: member for group in groups for member in group.parameters}

    def check() -> list[str]:
        for name, states in values.items():
            if name not in parameters:
                raise ValueError(f"there is no parameter {name!r} in this store")
            check_states(parameters[name], states)
        return sorted(f"{state} of {name}" for name in values for state in values[name])

    _require_same(agree(peers, "write states", check))


def _require_same(lists: Sequence[Sequence[str]]) -> None:
    for rank, names in enumerate(lists):
        if names != lists[0]:
            found = sorted(set(names) ^ set(lists[0]))
            raise RunMismatchError(
                f"all ranks must name the same states; ranks 0 and {rank} differ in {found[:3]}"
            )


def read_states(table: PageTable, names: Collection[str]) -> dict[str, dict[str, torch.Tensor]]:
    """Return the states of some parameters; see TierStore.read_states().

    Args:
        table: all subgroups, in order.
        names: the parameters, the same on all ranks.
    """
    pager = table.pager
    members = [member for member in table.parameters if member.name in names]
    shapes = {member.name: tuple(local_tensor(member.tensor).shape) for member in members}
    found: dict[str, dict[str, torch.Tensor]] = {name: {} for name in shapes}
    wanted = [page for page in table.all_pages if not page.parameters.keys().isdisjoint(shapes)]
    with contextlib.closing(pager.stream(wanted, Needed.STEP)) as stream:
        for page in stream:
            _collect(pager.files, page, shapes, found)
            pager.release(page)
            _complete(table, page, shapes, found)
    table.replication.finish()
    for member in members:
        shape, states = shapes[member.name], found[member.name]
        for state, dtype in _readable_states(member.spec):
            if state not in states:  # The parameter has no elements.
                states[state] = torch.zeros(shape, dtype=dtype)
            states[state] = placed_as(member.tensor, states.pop(state))
    return found


def _readable_states(spec: ParameterSpec) -> Sequence[tuple[str, torch.dtype]]:
    """Return the states that a user reads: without the master if the parameter is its master."""
    return spec.states if spec.owns_master else spec.all_states


def _collect(
    files: PageFiles,
    page: Page,
    shapes: Mapping[str, tuple[int, ...]],
    found: Mapping[str, dict[str, torch.Tensor]],
) -> None:
    """Add the states that a page holds.

    Args:
        files: provide memory.
        page: the page, held, with the sections of a step.
        shapes: name of a parameter -> shape of this rank's tensor.
        found: name of a parameter -> state name -> tensor of that shape; completed page by page.
    """
    content = files.map(page)
    for shard in page.view().shards:
        name = shard.spec.name
        for state, dtype in _readable_states(shard.spec) if name in shapes else ():
            for view in shard.chunks:
                if content is not None and view.local.sizes == shapes[name]:
                    found[name][state] = page.layout.records[name, view.chunk][state].over(content)
                    continue
                # The state is in several pages, or in none yet: there is no file to map.
                if state not in found[name]:
                    found[name][state] = files.scratch(shapes[name], dtype)
                view.local.select(found[name][state]).copy_(view.state(state))


def _complete(
    table: PageTable,
    page: Page,
    shapes: Mapping[str, tuple[int, ...]],
    found: Mapping[str, dict[str, torch.Tensor]],
) -> None:
    """Send the states of a subgroup from their owners to the ranks that hold replicas."""
    state_tensors: dict[str, dict[str, torch.Tensor]] = {}
    for name in (name for name in page.parameters if name in shapes):
        for state, dtype in _readable_states(page.parameters[name].spec):
            if state not in found[name]:
                found[name][state] = table.pager.files.scratch(shapes[name], dtype)
            state_tensors.setdefault(state, {})[name] = found[name][state]
    for tensors in state_tensors.values():
        table.replication.begin(page, page.source, tensors, tensors)


def write_pages(
    table: PageTable,
    fill: Callable[[PageView], None],
    scalars: Mapping[str, Mapping[str, float]],
) -> None:
    """Make all pages anew, outside of a step. An error leaves old and new pages.

    Args:
        table: the pages.
        fill: fills a page that holds zeros and the parameters.
        scalars: updates the scalars of the committer.
    """
    with contextlib.closing(table.pager.stream(table.pages, Needed.NOTHING)) as stream:
        for page in stream:
            view = page.view()
            view.initialize()
            fill(view)
            view.read_parameters()
            table.pager.swap_out(page)
    for name, values in scalars.items():
        table.committer.scalars[name] = dict(values)
    table.committer.note_written(len(table.groups))
    table.replicate()


def fill_states(view: PageView, values: States) -> None:
    """Copy states of parameters into a page; see TierStore.write_states()."""
    for shard in view.shards:
        for state, value in values.get(shard.spec.name, {}).items():
            tensor = local_tensor(value)
            for chunk in shard.chunks:
                position = chunk.local if is_dtensor(value) else chunk.chunk
                chunk.state(state).copy_(position.select(tensor))


def restore_parameters(table: PageTable) -> None:
    """Copy the masters in all pages to the parameters, on their owners and replicas."""
    with contextlib.closing(table.pager.stream(table.pages, Needed.MASTERS)) as stream:
        for page in stream:
            page.view().restore_parameters()
            table.pager.release(page)
    table.replicate()
