"""One sweep of Muon over pages: momentum, gather, Newton-Schulz, scatter, apply.

Matrices that are on several ranks are exchanged in rounds. While one round is orthogonalized, the
next is gathered and the updates of the previous round return. Every rank issues these collectives
in the same order.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

import tierstore
from muon import newton_schulz, normuon
from muon.exchange import Exchange, Parts, pack, unpack
from muon.matrices import Declaration, Matrix, declared, matrices_of
from muon.rounds import Round, SharedMatrix, assign_owners, memory_needed, plan_rounds
from muon.rules import (
    Extras,
    apply_updates,
    orthogonalize,
    own_matrices,
    step_adamw,
    step_whole,
    write_inputs,
)

ROUNDS_MAX = 3
"""Rounds in flight: one is gathered, one is orthogonalized, and the updates of one return."""

_PLANS_MAX = 4
"""Plans kept: for whole matrices and for blocks, with and without some parameters."""

_InFlight = deque[tuple[int, Iterator[None]]]
"""Page number and stages of each round that has begun, oldest first: all but the newest have
sent their updates."""


@dataclass(frozen=True, slots=True)
class PagePlan:
    """The matrices of a page, and the rounds that exchange some of them."""

    places: Sequence[tuple[int, Matrix]]
    """Position of each matrix's parameter among the parameters of the page with a gradient."""
    owners: Sequence[int]
    """The rank that orthogonalizes each matrix."""
    rounds: Sequence[Round]
    """The rounds number the matrices by their positions in ``places``."""


def plan_pages(
    subgroups: Sequence[tierstore.pages.SharedSubgroup],
    groups: Sequence[Mapping[str, Any]],
    present: frozenset[str],
    *,
    world_size: int,
    gather_memory: int,
) -> list[PagePlan]:
    """Return the matrices of each page, and the rounds in which they are exchanged.

    Args:
        subgroups: the subgroups of a sweep, in order.
        groups: all param groups.
        present: names of the parameters that have a gradient.
        world_size: number of ranks.
        gather_memory: the most bytes of matrices that a rank may hold in all rounds in flight.

    Raises:
        ValueError: one matrix needs more than ``gather_memory``.
    """
    known: _Known = {}
    places: list[list[tuple[int, Matrix]]] = []
    pages: list[list[SharedMatrix]] = []
    itemsizes: list[int] = []
    names: list[str] = []
    for subgroup in subgroups:
        group = groups[subgroup.group]
        is_muon = group["algorithm"] == "muon"
        shards = [shard for shard in subgroup.shards if is_muon and shard.spec.name in present]
        places.append([])
        pages.append([])
        for position, shard in enumerate(shards):
            for matrix, shared in shared_matrices(shard, declared(group), known):
                places[-1].append((position, matrix))
                pages[-1].append(shared)
                names.append(shard.spec.name)
        itemsizes.append(group["ns_dtype"].itemsize if is_muon else 0)
    matrices = list(itertools.chain.from_iterable(pages))
    # Choose the owners of all pages at once, to balance the whole sweep. Equal matrices go to the
    # ranks in turn. This also balances the matrices that are stepped at the same time.
    owners = iter(assign_owners(matrices, [0] * world_size)[0])
    owners_by_page = [list(itertools.islice(owners, len(page))) for page in pages]
    needs = [
        itemsize * max(memory_needed(matrix, owner))
        for page, page_owners, itemsize in zip(pages, owners_by_page, itemsizes, strict=True)
        for matrix, owner in zip(page, page_owners, strict=True)
    ]
    gather_memory_min = ROUNDS_MAX * max(needs, default=0)
    if gather_memory_min > gather_memory:
        largest = needs.index(max(needs))
        raise ValueError(
            f"gather_memory is {gather_memory} bytes, but {ROUNDS_MAX} matrices such as "
            f"{names[largest]!r}, of shape {list(matrices[largest].shape)}, in flight at once "
            f"need {gather_memory_min} bytes on one rank: pass gather_memory={gather_memory_min} "
            "or more"
        )
    bytes_max = gather_memory // ROUNDS_MAX
    return [
        PagePlan(
            places=page_places,
            owners=owners,
            rounds=plan_rounds(page, owners, bytes_max=bytes_max, itemsize=itemsize),
        )
        for page_places, page, owners, itemsize in zip(
            places, pages, owners_by_page, itemsizes, strict=True
        )
    ]


_Known = dict[tuple[tierstore.pages.SharedShard, Declaration], list[tuple[Matrix, SharedMatrix]]]


def shared_matrices(
    shard: tierstore.pages.SharedShard, declaration: Declaration, known: _Known
) -> list[tuple[Matrix, SharedMatrix]]:
    """Return the matrices of a shard and the cuts of ranks. Shards cut alike share the result."""
    # Listing the chunks of all ranks is slow. The key has their inputs: all except the name.
    nameless = replace(shard.parameter, spec=replace(shard.spec, name=""))
    key = replace(shard, parameter=nameless), declaration
    if key not in known:
        ranks = shard.chunks
        known[key] = []
        for matrix in matrices_of(shard.spec.shape, declaration):
            parts = [[matrix.part(chunk) for chunk in chunks] for chunks in ranks]
            chunks = tuple(tuple(part.chunk for part in own if part) for own in parts)
            if any(chunks):  # Matrices without chunks are in other pages.
                shared = SharedMatrix(shape=matrix.shape, chunks=chunks, sizes=matrix.sizes)
                known[key].append((matrix, shared))
    return known[key]


class Pipeline:
    """Steps the pages of one optimizer, sweep after sweep.

    Args:
        store: keeps the states and knows the ranks.
        gather_memory: the most bytes of matrices that a rank may hold in all rounds in flight.
    """

    def __init__(self, store: tierstore.TierStore, gather_memory: int) -> None:
        self._store = store
        self._gather_memory = gather_memory
        self._exchange: Exchange | None = None
        self._planned: dict[Any, list[PagePlan | None]] = {}
        self._stepped: tuple[Any, Any, frozenset[str]] = ([], [], frozenset())

    @property
    def bytes_sent(self) -> int:
        """Bytes of matrices and updates that this rank has sent to other ranks."""
        return 0 if self._exchange is None else self._exchange.bytes_sent

    def flops_by_rank(self) -> list[int]:
        """Return the operations of Newton-Schulz that each rank owned in the last step."""
        shared, groups, present = self._stepped
        ranks = self._store.pages.ranks
        found = [0] * (1 if ranks is None else ranks.world_size)
        plans = plan_pages(
            shared,
            groups,
            present,
            world_size=len(found),
            gather_memory=self._gather_memory,
        )
        for subgroup, plan in zip(shared, plans, strict=True):
            for (_, matrix), owner in zip(plan.places, plan.owners, strict=True):
                steps = groups[subgroup.group]["ns_steps"]
                found[owner] += newton_schulz.flops(matrix.shape, steps)
        return found

    def open(
        self, pages: tierstore.pages.SteppedPages, groups: Sequence[Mapping[str, Any]], options: str
    ) -> None:
        """Make the process group for the exchange of matrices, if ranks share any matrix.

        All ranks call this together.

        Args:
            pages: the first sweep.
            groups: all param groups, with whole matrices in place of blocks.
            options: text for the options that must be the same on all ranks.

        Raises:
            ValueError: options differ between ranks, or a matrix needs more than ``gather_memory``.
        """
        ranks = self._store.pages.ranks
        matrices = [p for group in groups if group["algorithm"] == "muon" for p in group["params"]]
        if ranks is None or self._exchange is not None or not matrices:
            return
        device = compute_device(self._store, matrices[0])
        # Every rank must cut its matrices into the same rounds, so the least memory counts.
        memories, of_ranks = zip(*ranks.gather((self._gather_memory, options)), strict=True)
        for rank, found in enumerate(of_ranks):
            if found != of_ranks[0]:
                raise ValueError(
                    f"the optimizer has {of_ranks[0]} on rank 0 and {found} on rank {rank}: "
                    "all ranks step one model, so give them the same options"
                )
        self._gather_memory = min(memories)
        # Plan before ranks connect: a refused rank closes connections that others still make.
        self._plan(pages, groups)  # Steps of blocks would raise the error late.
        # The backend of a GPU does not send CPU tensors.
        backend = "gloo" if device.type == "cpu" else None
        process_group = ranks.new_group(range(ranks.world_size), backend=backend)
        assert process_group is not None
        self._exchange = Exchange(process_group, wait=ranks.wait, device=device)

    def step_pages(
        self,
        pages: tierstore.pages.SteppedPages,
        groups: Sequence[Mapping[str, Any]],
        steps: Mapping[str, float],
        window: int,
        extras: Extras,
    ) -> None:
        """Step all pages of a sweep.

        Args:
            pages: the sweep.
            groups: all param groups.
            steps: for each AdamW parameter with a gradient the number of this step, from 1.
            window: number of pages that are valid at once.
            extras: additional work; ``sum`` is not used.

        Raises:
            ValueError: one matrix needs more than ``gather_memory``. No page was stepped.
        """
        planned = self._plan(pages, groups)
        self._stepped = pages.shared, [dict(group) for group in groups], pages.present
        in_flight: _InFlight = deque()
        for number, page in enumerate(pages):
            group = groups[page.group]
            shards = [shard for shard in page.shards if shard.has_gradient]
            if group["algorithm"] == "muon":
                self._begin_matrices(number, shards, group, planned[number], in_flight, extras)
            else:
                step_adamw(shards, group, steps, extras.scales)
            # Asking for the next page writes the oldest valid page. The last page ends the sweep.
            is_last = number + 1 == pages.count
            oldest_valid = number + 1 if is_last else number + 2 - window
            while in_flight and in_flight[0][0] < oldest_valid:
                _end(in_flight.popleft()[1])

    def _begin_matrices(
        self,
        number: int,
        shards: Sequence[tierstore.pages.ShardView],
        group: Mapping[str, Any],
        plan: PagePlan | None,
        in_flight: _InFlight,
        extras: Extras,
    ) -> None:
        """Step the matrices that are whole on this rank, and begin to exchange the others."""
        places = None if plan is None else plan.places
        matrices = own_matrices(shards, group, places, extras.scales)
        rounds = [] if plan is None else plan.rounds
        exchanged = {index for round_ in rounds for index in round_.matrices}
        whole = [own for i, own in enumerate(matrices) if i not in exchanged and own.parts]

        def write_parts(parts: Parts, rows: Parts) -> None:
            for index, inputs in parts.items():
                write_inputs(matrices[index], group, inputs)
                for part, wire in zip(matrices[index].parts, rows[index], strict=True):
                    if part.averages is not None:
                        pack(part.averages, wire)

        def apply_parts(parts: Parts, rows: Parts) -> None:
            for index, updates in parts.items():
                assert self._exchange is not None
                for part, wire in zip(matrices[index].parts, rows[index], strict=True):
                    if part.averages is not None:
                        unpack(wire, part.averages)
                shared = replace(extras, sum=self._exchange.sum)
                apply_updates(matrices[index], group, updates, shared)

        for round_ in rounds:
            assert self._exchange is not None
            owned = [matrices[index] for index in round_.owned(self._exchange.rank)]
            stages = self._exchange.stages(
                round_,
                group["ns_dtype"],
                with_averages=normuon.is_used(group),
                write_inputs=write_parts,
                orthogonalize=partial(orthogonalize, group=group, owned=owned, hooks=extras.hooks),
                apply_updates=apply_parts,
            )
            in_flight.append((number, stages))
            next(stages)
            step_whole(whole, group, extras)  # Overlaps with the gather of the first round.
            whole = []
            if len(in_flight) > 1:
                _, previous = in_flight[-2]
                next(previous)
            if len(in_flight) == ROUNDS_MAX:
                _end(in_flight.popleft()[1])
        step_whole(whole, group, extras)

    def _plan(
        self, pages: tierstore.pages.SteppedPages, groups: Sequence[Mapping[str, Any]]
    ) -> Sequence[PagePlan | None]:
        ranks = self._store.pages.ranks
        if ranks is None:
            return [None] * pages.count
        # The dtype of a group may change: restore() brings the dtype of the run.
        changing = tuple((group.get("ns_dtype"), declared(group)) for group in groups)
        key = pages.present, pages.count, changing
        if key not in self._planned:
            if len(self._planned) == _PLANS_MAX:
                self._planned.clear()
            plans = plan_pages(
                pages.shared,
                groups,
                pages.present,
                world_size=ranks.world_size,
                gather_memory=self._gather_memory,
            )
            self._planned[key] = [*plans]
        return self._planned[key]


def _end(stages: Iterator[None]) -> None:
    """Run the remaining stages of a round."""
    for _ in stages:
        pass


def compute_device(store: tierstore.TierStore, parameter: torch.Tensor) -> torch.device:
    """Return the device that steps a parameter."""
    return store.pages.step_on or parameter.device
