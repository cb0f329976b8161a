"""The interface of this optimizer to plans of runs; see ``tierstore.tools.plan``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

import tierstore
from muon import newton_schulz
from muon.kernels.rules import problem_of_kernels
from muon.keys import KEYS, from_text
from muon.optimizer import Muon
from muon.pipeline import ROUNDS_MAX, PagePlan, plan_pages
from muon.rates import ADAMW, MASTERS, MUON, NEWTON_SCHULZ, STATES, Work, operations, rates
from muon.rounds import Round, memory_needed
from muon.routing import param_groups

# Arguments of Muon() that affect a plan. A plan may change them.
_OPTIONS = (
    *(key.name for key in KEYS.values() if key.is_planned),
    *("gather_memory", "partition"),
)


def paged_groups(
    groups: Iterable[Mapping[str, Any]], **options: Any
) -> list[tierstore.pages.PagedGroup]:
    """Return param groups as a store would page them, without memory for any value.

    Args:
        groups: the param groups, with named parameters as from ``param_groups()``. Parameters may
            be on the meta device.
        options: arguments of ``Muon`` other than ``store``.

    Raises:
        ValueError, TypeError: as in the constructor of ``Muon``.
    """
    return _without_values(groups, options).paged_groups()


def _without_values(groups: Iterable[Mapping[str, Any]], options: Mapping[str, Any]) -> Muon:
    """Return an optimizer over one-element tensors that are expanded to the parameter shapes."""
    expanded = []
    for group in groups:
        params = [
            (name, nn.Parameter(torch.zeros((), dtype=p.dtype, device="cpu").expand(p.shape)))
            for name, p in group["params"]
        ]
        expanded.append({**group, "params": params})
    return Muon(expanded, **options)


_GATHER_MEMORY, _GATHER_MEMORY_MAX = "2GiB", 2**40
"""The default, and a value larger than any matrix needs."""


class MuonPlan:
    """The entry point ``muon`` of the group ``tierstore.optimizers``."""

    algorithms = ("muon", "adamw")
    narrower: Sequence[tuple[str, Mapping[str, Any], bool]] = (
        ("masters as remainders", {"master": "remainder"}, True),
        ("momentum in bfloat16", {"momentum_dtype": torch.bfloat16}, False),
        ("momentum in 8 bits", {"momentum_dtype": torch.int8}, False),
        ("moments of AdamW in 8 bits", {"moments_dtype": torch.int8}, False),
    )

    def rates(self, device: torch.device) -> Iterator[tuple[Work, list[float]]]:
        """Measure the computations of Muon on a device; see ``muon.rates.rates``."""
        return rates(device)

    def problem(self, device: torch.device) -> str | None:
        """Return the reason why steps on a device take more passes over memory, or None."""
        return problem_of_kernels(device)

    def operations(self, work: Work) -> tuple[float, float]:
        """Return floating-point operations and bytes of memory; see ``muon.rates.operations``."""
        return operations(work)

    def plan(
        self, model: nn.Module, algorithm: str, *, on_gpu: bool, options: Mapping[str, Any]
    ) -> PlannedMuon:
        """Return Muon for a model on the meta device.

        Args:
            model: the model.
            algorithm: "muon", with AdamW where ``param_groups()`` puts it, or "adamw" for all
                parameters.
            on_gpu: whether a GPU computes steps. Small matrices are then batched.
            options: some arguments of ``Muon``: gather_memory, partition, and the keys that affect
                a plan; see ``muon.keys``. Values may be texts, such as "int8".

        Raises:
            ValueError, TypeError: as in ``Muon``.
        """
        unknown = sorted(options.keys() - set(_OPTIONS))
        if unknown:
            raise ValueError(
                f"option {unknown[0]!r} does not affect a plan, expected {', '.join(_OPTIONS)}"
            )
        chosen = {
            name: from_text(name, value) if name in KEYS and isinstance(value, str) else value
            for name, value in options.items()
        }
        if on_gpu:
            chosen = {"ns_batched": True, **chosen}
        is_adamw = algorithm == "adamw"
        groups = param_groups(model, is_muon=(lambda name, parameter: False) if is_adamw else None)
        return PlannedMuon(groups, chosen, is_adamw=is_adamw, on_gpu=on_gpu)


class PlannedMuon:
    """Muon over param groups without values.

    Args:
        groups: as in ``paged_groups()``.
        options: arguments of ``Muon``. Without ``gather_memory``, the default is doubled until the
            largest matrix fits.
        is_adamw: whether AdamW steps all groups.
        on_gpu: whether steps are computed on a GPU.
    """

    whole = False
    """Ranks may hold parts of parameters: matrices are gathered."""

    def __init__(
        self,
        groups: Iterable[Mapping[str, Any]],
        options: Mapping[str, Any],
        *,
        is_adamw: bool = False,
        on_gpu: bool = False,
    ) -> None:
        optimizer = _without_values(groups, options)
        self.groups = optimizer.paged_groups()
        """The param groups in the form in which the store would page them."""
        self._options, self._is_adamw = dict(options), is_adamw
        self._on_gpu = on_gpu
        self._hyperparameters = [dict(group) for group in optimizer.param_groups]
        self._names = frozenset(p.name for group in self.groups for p in group.parameters)

    @property
    def call(self) -> str:
        """Python code that makes the optimizer. After works() it includes the needed memory."""
        return _call(self._options, is_adamw=self._is_adamw)

    def works(
        self,
        subgroups: Sequence[tierstore.pages.SharedSubgroup],
        ranks: Sequence[int],
        world_size: int,
    ) -> tuple[list[list[tuple[Mapping[Work, int], int, int]]], int]:
        """Return the computations and messages of each rank for its page of each subgroup.

        Args:
            subgroups: all subgroups, in the order of the sweep.
            ranks: the ranks to return.
            world_size: number of ranks.

        Returns:
            For each of the ranks and each subgroup: how often each work is done, and the bytes of
            matrices that the rank sends and receives in the gather. The scatter sends updates the
            other way. Then the most bytes that a rank holds besides pages: matrices, their
            products, and the rounds in flight.

        Raises:
            ValueError: one matrix needs more than the ``gather_memory`` that was given.
        """
        plans = self._plan_pages(subgroups, world_size)
        found: list[list[tuple[Mapping[Work, int], int, int]]] = [[] for _ in ranks]
        largest = in_flight = 0
        for subgroup, plan in zip(subgroups, plans, strict=True):
            group = self._hyperparameters[subgroup.group]
            is_muon = group["algorithm"] == "muon"
            itemsize = group["ns_dtype"].itemsize if is_muon else 0
            for position, rank in enumerate(ranks):
                counts = _elements(subgroup, rank, is_muon=is_muon)
                pairs = zip(plan.places, plan.owners, strict=True)
                owned = [matrix.shape for (_, matrix), owner in pairs if owner == rank]
                orthogonalized = _newton_schulz(owned, group)
                counts += orthogonalized
                for _, (count, *shape), _ in orthogonalized:
                    method = group["ns_method"]
                    numel = newton_schulz.numel_needed(
                        shape, count, on_gpu=self._on_gpu, method=method
                    )
                    largest = max(largest, itemsize * numel)
                sent, received = _exchanged(plan.rounds, rank)
                found[position].append((counts, itemsize * sent, itemsize * received))
            for round_ in plan.rounds:
                needs = [memory_needed(m, round_.owners[i]) for i, m in round_.matrices.items()]
                in_flight = max(in_flight, itemsize * max(map(sum, zip(*needs, strict=True))))
        return found, largest + ROUNDS_MAX * in_flight

    def _plan_pages(
        self, subgroups: Sequence[tierstore.pages.SharedSubgroup], world_size: int
    ) -> list[PagePlan]:
        given = self._options.get("gather_memory")
        size = tierstore.pages.parse_bytes(_GATHER_MEMORY if given is None else given)
        while True:
            try:
                return plan_pages(
                    subgroups,
                    self._hyperparameters,
                    self._names,
                    world_size=world_size,
                    gather_memory=size,
                )
            except ValueError:
                if given is not None or size > _GATHER_MEMORY_MAX:
                    raise
            size *= 2
            self._options["gather_memory"] = f"{size >> 30}GiB"


def _elements(
    subgroup: tierstore.pages.SharedSubgroup, rank: int, *, is_muon: bool
) -> Counter[Work]:
    """Return the elementwise works of a rank: one for each matrix, or one for AdamW together."""
    works: Counter[Work] = Counter()
    together: Counter[tuple[str, str]] = Counter()
    for shard in subgroup.shards:
        start, stop = shard.ranges[rank]
        dtype = str(shard.spec.dtype).removeprefix("torch.")
        encoded = {state for state, _ in shard.spec.encodings}
        end = STATES if encoded - {"master"} else MASTERS if encoded else ""
        if stop > start and is_muon:
            works[MUON + end, (1, 1, stop - start), dtype] += 1
        elif stop > start:
            together[ADAMW + end, dtype] += stop - start
    for (name, dtype), numel in together.items():
        works[name, (1, 1, numel), dtype] += 1
    return works


def _newton_schulz(shapes: Sequence[tuple[int, int]], group: Mapping[str, Any]) -> Counter[Work]:
    """Return the works of matrices, or of batches of them."""
    dtype = str(group.get("ns_dtype")).removeprefix("torch.")
    works: Counter[Work] = Counter()
    batched = bool(group.get("ns_batched"))
    for batch in newton_schulz.batches(shapes, batched=batched):
        shape = shapes[batch[0]]
        count = newton_schulz.batch_count(shape) if batched else 1
        works[NEWTON_SCHULZ, (count, *shape), dtype] += 1
    return works


def _exchanged(rounds: Sequence[Round], rank: int) -> tuple[int, int]:
    """Return the elements that a rank sends and receives in the gathers."""
    sent = received = 0
    for round_ in rounds:
        for index, matrix in round_.matrices.items():
            if round_.owners[index] == rank:
                received += matrix.numel - matrix.numels[rank]
            else:
                sent += matrix.numels[rank]
    return sent, received


def _call(options: Mapping[str, Any], *, is_adamw: bool) -> str:
    """Return the code of the optimizer, with options that differ from the defaults."""
    given = "".join(f", {name}={value!r}" for name, value in options.items())
    groups = "muon.param_groups(model, lr=0.02, adamw_lr=3e-4)"
    if is_adamw:
        groups = "muon.param_groups(model, adamw_lr=3e-4, is_muon=lambda name, parameter: False)"
    return f"muon.Muon({groups}, store=store{given})"
