"""Answers of this optimizer to plans of runs; see ``tierstore.plan``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

import tierstore
from muon.optimizer import Muon
from muon.rates import rates


def paged_groups(groups: Iterable[Mapping[str, Any]], **options: Any) -> list[tierstore.PagedGroup]:
    """Return param groups as a store would page them, without memory for any value.

    Args:
        groups: the param groups, with named parameters as from ``param_groups()``; they may be on
            the meta device.
        options: arguments of ``Muon`` other than ``store``.

    Raises:
        ValueError, TypeError: as the constructor of ``Muon``.
    """
    optimizer = Muon([_without_values(group) for group in groups], **options)
    return optimizer.paged_groups()


def _without_values(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return a group whose parameters are tensors of one element, expanded to their shapes."""
    params = [
        (name, nn.Parameter(torch.zeros((), dtype=p.dtype, device="cpu").expand(p.shape)))
        for name, p in group["params"]
    ]
    return {**group, "params": params}


class MuonPlan:
    """The entry point ``muon`` of the group ``tierstore.optimizers``."""

    def rates(
        self, device: torch.device
    ) -> Iterator[tuple[tuple[int, int, int], str, list[float]]]:
        """Measure Newton-Schulz on a device; see ``muon.rates.rates``."""
        return rates(device)
