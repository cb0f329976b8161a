"""One step of Muon over pages that ranks share: gather, Newton-Schulz, scatter, overlapping.

While the matrices of one round are orthogonalized, those of the next come together and the
updates of the one before go back. It all happens in one order, the same on every rank.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.profiler import record_function

import tierstore
from muon.exchange import Exchange, RoundInFlight
from muon.rounds import Round, SharedMatrix, assign_owners, bytes_needed, plan_rounds
from muon.rules import apply_updates, orthogonalize, step_whole, write_inputs

# One is gathered, one is orthogonalized, and of one the updates come back.
ROUNDS_MAX = 3


def plan_pages(
    subgroups: Sequence[tierstore.SharedSubgroup],
    groups: Sequence[Mapping[str, Any]],
    present: frozenset[str],
    *,
    world_size: int,
    gather_memory: int,
) -> list[list[Round]]:
    """Return the rounds in which each page of a step is exchanged.

    They count the shards that have a gradient.

    Args:
        subgroups: those that are stepped, in order.
        groups: the param groups that they are of.
        present: names of the parameters that have a gradient.
        world_size: number of ranks.
        gather_memory: most bytes of matrices, in all rounds in flight, that a rank may have.

    Raises:
        ValueError: a matrix alone takes more than ``gather_memory``.
    """
    known: dict[tuple[Any, ...], SharedMatrix] = {}
    pages, names, itemsizes = [], [], []
    for subgroup in subgroups:
        group = groups[subgroup.group]
        is_muon = group["algorithm"] == "muon"
        shards = [shard for shard in subgroup.shards if is_muon and shard.spec.name in present]
        pages.append([_matrix(shard, known) for shard in shards])
        names += [shard.spec.name for shard in shards]
        itemsizes += [group["ns_dtype"].itemsize for _ in shards]
    matrices = [matrix for page in pages for matrix in page]
    # All at once, which balances better; equal ones go to the ranks in turn, so that those
    # stepped at one time are balanced, too.
    owners, _ = assign_owners(matrices, [0] * world_size)
    needs = list(map(bytes_needed, matrices, owners, itemsizes))
    if needs and ROUNDS_MAX * max(needs) > gather_memory:
        most = needs.index(max(needs))
        raise ValueError(
            f"gather_memory is {gather_memory} bytes, but with {ROUNDS_MAX} matrices such as "
            f"{names[most]!r}, of shape {list(matrices[most].shape)}, on their way at once a rank "
            f"needs {ROUNDS_MAX * max(needs)}: pass gather_memory={ROUNDS_MAX * max(needs)} or "
            "more"
        )
    ends = itertools.accumulate(map(len, pages))
    return [
        plan_rounds(
            page,
            owners[end - len(page) : end],
            bytes_max=gather_memory // ROUNDS_MAX,
            itemsize=groups[subgroup.group]["ns_dtype"].itemsize,
        )
        if page
        else []
        for subgroup, page, end in zip(subgroups, pages, ends, strict=True)
    ]


def _matrix(
    shard: tierstore.SharedShard, known: dict[tuple[Any, ...], SharedMatrix]
) -> SharedMatrix:
    """Return how a matrix lies on the ranks, one object for all that lie alike."""
    rows, columns = shard.spec.shape
    chunks = tuple(tuple(part) for part in shard.chunks)
    key = rows, columns, chunks
    if key not in known:
        known[key] = SharedMatrix(shape=(rows, columns), chunks=chunks)
    return known[key]


class Exchanges:
    """What the steps of one optimizer exchange between ranks.

    Args:
        store: keeps the states, and knows the ranks.
        gather_memory: most bytes of matrices, in all rounds in flight, that a rank may have.
    """

    def __init__(self, store: tierstore.TierStore, gather_memory: int) -> None:
        self._store = store
        self._gather_memory = gather_memory
        self._exchange: Exchange | None = None
        self._planned: tuple[Any, list[list[Round]]] = (None, [])

    def open(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Have a way between ranks for the matrices of some groups; all ranks call it together."""
        ranks = self._store.ranks
        muon = [each for each in groups if each["algorithm"] == "muon" and each["params"]]
        if ranks is None or self._exchange is not None or not muon:
            return
        device = muon[0]["params"][0].device
        if self._store.compute == "host":
            device = torch.device("cpu")
        # All cut their matrices into the same rounds, so what one has no memory for none has.
        self._gather_memory = min(ranks.training.gather(self._gather_memory))
        # What is on a CPU no backend of a GPU sends.
        backend = "gloo" if device.type == "cpu" else None
        process_group = ranks.new_group(range(ranks.world_size), backend=backend)
        assert process_group is not None
        self._exchange = Exchange(process_group, wait=ranks.wait, device=device)

    @property
    def bytes_sent(self) -> int:
        """What this rank has sent to others so far."""
        return 0 if self._exchange is None else self._exchange.bytes_sent

    def pipeline(
        self, pages: tierstore.SteppedPages, groups: Sequence[Mapping[str, Any]], window: int
    ) -> Pipeline:
        """Return what steps the pages of a sweep.

        Raises:
            ValueError: a matrix alone takes more than ``gather_memory``.
        """
        ranks = self._store.ranks
        # The dtype of a group may change: restore() brings that of the run.
        key = pages.present, pages.count, [group.get("ns_dtype") for group in groups]
        if self._planned[0] != key:
            rounds: list[list[Round]] = [[] for _ in range(pages.count)]
            if ranks is not None:
                rounds = plan_pages(
                    pages.shared,
                    groups,
                    pages.present,
                    world_size=ranks.world_size,
                    gather_memory=self._gather_memory,
                )
            self._planned = key, rounds
        return Pipeline(self._exchange, self._planned[1], window)


@dataclass(slots=True)
class _Flight:
    """A round on its way."""

    page: int
    shards: Sequence[tierstore.ShardView]
    group: Mapping[str, Any]
    round: RoundInFlight
    is_back: bool = False
    """Whether the updates are on their way back."""


class Pipeline:
    """Steps the pages of one sweep.

    Args:
        exchange: what matrices are exchanged by; None where no rank shares one.
        rounds: those of each page of the sweep.
        window: how many pages are valid at once.
    """

    def __init__(
        self,
        exchange: Exchange | None,
        rounds: Sequence[Sequence[Round]],
        window: int,
    ) -> None:
        self._exchange = exchange
        self._rounds = rounds
        self._window = window
        self._flights: deque[_Flight] = deque()

    def step(self, number: int, page: tierstore.PageView, group: Mapping[str, Any]) -> None:
        """Begin to step a page of a Muon group; matrices that it has whole are stepped at once.

        Args:
            number: of the page in the sweep, from 0 on.
            page: the page.
            group: its hyperparameters.
        """
        shards = [shard for shard in page.shards if shard.has_gradient]
        rounds = self._rounds[number]
        exchanged = {index for round_ in rounds for index in round_.matrices}
        whole = [s for i, s in enumerate(shards) if i not in exchanged and s.chunks]
        for round_ in rounds:
            assert self._exchange is not None
            flight = self._exchange.begin(round_, group["ns_dtype"])
            for index, inputs in flight.inputs.items():
                write_inputs(shards[index], group, inputs)
            with record_function("muon::gather"):
                flight.send()
            self._flights.append(_Flight(number, shards, group, flight))
            step_whole(whole, group)
            whole = []
            self._orthogonalize(len(self._flights) - 1)
            while len(self._flights) == ROUNDS_MAX:
                self._apply()
        step_whole(whole, group)

    def finish(self, number: int) -> None:
        """Step to the end what is not valid any more when the page after this one is asked for.

        That is everything after the last page.
        """
        is_last = number + 1 == len(self._rounds)
        oldest_valid = number + 1 if is_last else number + 2 - self._window
        while self._flights and self._flights[0].page < oldest_valid:
            self._orthogonalize(1)
            self._apply()

    def _orthogonalize(self, count: int) -> None:
        """Orthogonalize what this rank owns of the rounds longest on their way."""
        for flight in itertools.islice(self._flights, count):
            if flight.is_back:
                continue
            with record_function("muon::gather"):
                matrices = flight.round.gathered()
            updates = orthogonalize(list(matrices.values()), flight.group)
            with record_function("muon::scatter"):
                flight.round.send_back(dict(zip(matrices, updates, strict=True)))
            flight.is_back = True

    def _apply(self) -> None:
        """Apply the updates of the round that is longest on its way."""
        flight = self._flights[0]
        with record_function("muon::scatter"):
            updates = flight.round.updates()
        for index, parts in updates.items():
            apply_updates(flight.shards[index], flight.group, parts)
        flight.round.done()
        self._flights.popleft()
