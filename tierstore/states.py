"""Whole states of parameters, gathered from pages and scattered into them, outside a step."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Mapping, Sequence

import torch

from tierstore.groups import MASTER
from tierstore.manifest import PageEntry
from tierstore.residency import Pager
from tierstore.transit import Page
from tierstore.views import PageView, ShardView


def read_states(
    pager: Pager, pages: Sequence[Page], names: Collection[str]
) -> dict[str, dict[str, torch.Tensor]]:
    """Return the states of some parameters; see TierStore.read_states()."""
    wanted = [page for page in pages if not page.parameters.keys().isdisjoint(names)]
    result: dict[str, dict[str, torch.Tensor]] = {}
    stream = pager.stream(wanted, lambda page: page.layout.readable)
    with contextlib.closing(stream):
        for page in stream:
            content = pager.map(page)
            for shard in page.view().shards:
                if shard.spec.name in names:
                    states = result.setdefault(shard.spec.name, {})
                    _collect(pager, page, shard, content, states)
            pager.release(page)
    return result


def _collect(
    pager: Pager,
    page: Page,
    shard: ShardView,
    content: memoryview | None,
    states: dict[str, torch.Tensor],
) -> None:
    """Add what a page holds of the states of one parameter.

    Args:
        pager: gives memory.
        page: held, with all that is read of it.
        shard: the parameter's.
        content: the page's file as memory, or None if there is none.
        states: state name -> tensor of the parameter's shape, in the making.
    """
    spec = shard.spec
    for state, dtype in spec.all_states:
        if state == MASTER and spec.owns_master:
            continue
        for view in shard.chunks:
            if content is not None and view.chunk.sizes == spec.shape:
                states[state] = page.layout.records[spec.name, view.chunk][state].over(content)
                continue
            # Pieces of several pages, or of none yet, have no place in one file.
            if state not in states:
                states[state] = pager.scratch(spec.shape, dtype)
            view.chunk.select(states[state]).copy_(view.state(state))


def write_pages(
    pager: Pager,
    pages: Sequence[Page],
    fill: Callable[[PageView], None],
    swap_out: Callable[[Page], None],
) -> None:
    """Make every page anew: from zeros and the parameters, then by what ``fill`` does."""
    stream = pager.stream(pages, lambda page: [])
    with contextlib.closing(stream):
        for page in stream:
            view = page.view()
            view.initialize()
            fill(view)
            view.read_parameters()
            swap_out(page)


def fill_states(view: PageView, values: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
    """Copy whole states of parameters into a page; see TierStore.write_states()."""
    for shard in view.shards:
        for state, whole in values.get(shard.spec.name, {}).items():
            for chunk in shard.chunks:
                chunk.state(state).copy_(chunk.chunk.select(whole))


def restore_parameters(pager: Pager, pages: Sequence[Page], entries: Sequence[PageEntry]) -> None:
    """Take what a commit says of each page for its content, and copy masters to parameters."""
    for page, entry in zip(pages, entries, strict=True):
        page.go_back_to(entry)
    stream = pager.stream(pages, lambda page: page.layout.sections_of(MASTER))
    with contextlib.closing(stream):
        for page in stream:
            page.view().restore_parameters()
            pager.release(page)
