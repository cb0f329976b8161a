"""Whole states of parameters, gathered from pages and scattered into them, outside a step."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Mapping, Sequence

import torch

from tierstore.errors import RunMismatchError
from tierstore.layout.dtensors import is_dtensor, local_tensor, placed_as
from tierstore.layout.parameters import PagedGroup, ParameterSpec, check_states
from tierstore.paging.local_subgroups import LocalSubgroup
from tierstore.paging.page import Needed, Page
from tierstore.paging.page_table import PageTable
from tierstore.paging.pager import Pager
from tierstore.paging.views import PageView, ShardView
from tierstore.ranks.peers import Peers, agree
from tierstore.run.committer import Progress

States = Mapping[str, Mapping[str, torch.Tensor]]


def agree_to_read(peers: Peers, names: Collection[str]) -> None:
    """Check that all ranks want the states of the same parameters.

    Raises:
        RunMismatchError: they do not.
        PeerFailed: another rank wants no states at all.
    """
    _require_same(agree(peers, "read states", lambda: sorted(names)))


def agree_to_write(peers: Peers, groups: Sequence[PagedGroup], values: States) -> None:
    """Check that states fit the parameters, and that all ranks give the same ones.

    Raises:
        ValueError: one does not fit.
        RunMismatchError: the ranks give other ones each.
        PeerFailed: one of another rank does not fit.
    """
    parameters = {each.name: each for group in groups for each in group.parameters}

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
    pager, replication = table.pager, table.replication
    members = [each for each in table.parameters if each.name in names]
    shapes = {each.name: tuple(local_tensor(each.tensor).shape) for each in members}
    found: dict[str, dict[str, torch.Tensor]] = {name: {} for name in shapes}
    wanted = [each for each in table.subgroups if not each.parameters.keys().isdisjoint(shapes)]
    pages = [subgroup.page for subgroup in wanted if subgroup.page is not None]
    stream = pager.stream(pages, Needed.STEP)
    with contextlib.closing(stream):
        for subgroup in wanted:
            if subgroup.page is not None:
                page = next(stream)
                content = pager.files.map(page)
                for shard in page.view().shards:
                    if shard.spec.name in shapes:
                        name = shard.spec.name
                        _collect(pager, page, shard, content, shapes[name], found[name])
                pager.release(page)
            _complete(table, subgroup, shapes, found)
    replication.finish()
    for each in members:
        for state, dtype in _read_states_of(each.spec):
            if state not in found[each.name]:  # It has no elements.
                found[each.name][state] = torch.zeros(shapes[each.name], dtype=dtype)
        found[each.name] = {
            state: placed_as(each.tensor, found[each.name][state])
            for state, _ in _read_states_of(each.spec)
        }
    return found


def _read_states_of(spec: ParameterSpec) -> Sequence[tuple[str, torch.dtype]]:
    """Return the states of a parameter; one that is its own master has none beside it."""
    return spec.states if spec.owns_master else spec.all_states


def _collect(
    pager: Pager,
    page: Page,
    shard: ShardView,
    content: memoryview | None,
    shape: tuple[int, ...],
    states: dict[str, torch.Tensor],
) -> None:
    """Add what a page holds of the states of one parameter.

    Args:
        pager: gives memory.
        page: held, with all that is read of it.
        shard: the parameter's.
        content: the page's file as memory, or None if there is none.
        shape: of what this rank holds of the parameter.
        states: state name -> tensor of that shape, in the making.
    """
    spec = shard.spec
    for state, dtype in _read_states_of(spec):
        for view in shard.chunks:
            place = page.direct.place(spec.name, view.chunk)
            if content is not None and place.sizes == shape:
                states[state] = page.layout.records[spec.name, view.chunk][state].over(content)
                continue
            # Pieces of several pages, or of none yet, have no place in one file.
            if state not in states:
                states[state] = pager.files.scratch(shape, dtype)
            place.select(states[state]).copy_(view.state(state))


def _complete(
    table: PageTable,
    subgroup: LocalSubgroup,
    shapes: Mapping[str, tuple[int, ...]],
    found: Mapping[str, dict[str, torch.Tensor]],
) -> None:
    """Send the states of a subgroup from their owners to the ranks that hold replicas."""
    state_tensors: dict[str, dict[str, torch.Tensor]] = {}
    for name, parameter in subgroup.parameters.items():
        if name in shapes:
            for state, dtype in _read_states_of(parameter.spec):
                if state not in found[name]:
                    found[name][state] = table.pager.files.scratch(shapes[name], dtype)
                state_tensors.setdefault(state, {})[name] = found[name][state]
    for tensors in state_tensors.values():
        table.replication.begin(subgroup, subgroup.direct, tensors, tensors)


def write_pages(
    table: PageTable,
    committer: Progress,
    fill: Callable[[PageView], None],
    scalars: Mapping[str, Mapping[str, float]],
) -> None:
    """Make all pages anew, outside of a step. An error leaves pages of two kinds.

    Args:
        table: the pages.
        committer: told of the new pages, and of the scalars.
        fill: fills a page that holds zeros and the parameters.
        scalars: what to update the scalars with.
    """
    with contextlib.closing(table.pager.stream(table.pages, Needed.NOTHING)) as stream:
        for page in stream:
            view = page.view()
            view.initialize()
            fill(view)
            view.read_parameters()
            table.pager.swap_out(page)
    for name, values in scalars.items():
        committer.scalars[name] = dict(values)
    committer.note_written(len(table.groups))
    table.replicate()


def fill_states(view: PageView, values: States) -> None:
    """Copy states of parameters into a page; see TierStore.write_states()."""
    for shard in view.shards:
        for state, value in values.get(shard.spec.name, {}).items():
            local = local_tensor(value)
            for chunk in shard.chunks:
                place = chunk.place if is_dtensor(value) else chunk.chunk
                chunk.state(state).copy_(place.select(local))


def restore_parameters(table: PageTable) -> None:
    """Copy the masters in all pages to the parameters, on their owners and replicas."""
    with contextlib.closing(table.pager.stream(table.pages, Needed.MASTERS)) as stream:
        for page in stream:
            page.view().restore_parameters()
            table.pager.release(page)
    table.replicate()
