"""Whole states of parameters, gathered from pages and scattered into them, outside a step."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Mapping, Sequence

import torch

from tierstore.groups import MASTER
from tierstore.manifest import PageEntry
from tierstore.residency import Page, Pager, PageState


def read_states(
    pager: Pager, pages: Sequence[Page], names: Collection[str]
) -> dict[str, dict[str, torch.Tensor]]:
    """Return copies of the states of some parameters; see TierStore.read_states()."""
    holding = [
        page
        for page in pages
        if page.state is not PageState.FRESH and not page.parameters.keys().isdisjoint(names)
    ]
    result: dict[str, dict[str, torch.Tensor]] = {}
    stream = pager.stream(holding, lambda page: page.layout.readable)
    with contextlib.closing(stream):
        for page in stream:
            for shard in page.view().shards:
                if shard.spec.name not in names:
                    continue
                states = result.setdefault(shard.spec.name, {})
                for state, dtype in shard.spec.all_states:
                    if state == MASTER and shard.spec.owns_master:
                        continue
                    if state not in states:
                        states[state] = torch.empty(shard.spec.shape, dtype=dtype)
                    for chunk in shard.chunks:
                        chunk.chunk.select(states[state]).copy_(chunk.state(state))
            pager.release(page)
    return result


def write_states(
    pager: Pager,
    pages: Sequence[Page],
    values: Mapping[str, Mapping[str, torch.Tensor]],
    swap_out: Callable[[Page], None],
) -> None:
    """Make every page anew from these states; see TierStore.write_states()."""
    stream = pager.stream(pages, lambda page: [])
    with contextlib.closing(stream):
        for page in stream:
            view = page.view()
            view.initialize()
            for shard in view.shards:
                for state, whole in values.get(shard.spec.name, {}).items():
                    for chunk in shard.chunks:
                        chunk.state(state).copy_(chunk.chunk.select(whole))
            view.read_parameters()
            swap_out(page)


def restore_parameters(pager: Pager, pages: Sequence[Page], entries: Sequence[PageEntry]) -> None:
    """Take what a commit says of each page for its content, and copy masters to parameters."""
    for page, entry in zip(pages, entries, strict=True):
        page.state, page.entry = PageState.STORED, entry
    stream = pager.stream(pages, lambda page: page.layout.sections_of(MASTER))
    with contextlib.closing(stream):
        for page in stream:
            page.view().restore_parameters()
            pager.release(page)
