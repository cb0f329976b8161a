"""The memory of an optimizer's Newton-Schulz."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import tierstore
from muon import newton_schulz
from muon.matrices import declared, matrices_of
from muon.pipeline import compute_device


def matrix_bytes(store: tierstore.TierStore, groups: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """Return the bytes of Newton-Schulz of the largest batch, by the place of the computation."""
    found: dict[str, int] = {}
    for group in groups:
        for parameter in group["params"] if group["algorithm"] == "muon" else ():
            on_gpu = compute_device(store, parameter).type != "cpu"
            place = "GPU" if on_gpu else "host"
            for matrix in matrices_of(parameter.shape, declared(group)):
                numel = newton_schulz.numel_needed(
                    matrix.shape,
                    newton_schulz.batch_count(matrix.shape) if group["ns_batched"] else 1,
                    on_gpu=on_gpu,
                    method=group["ns_method"],
                )
                found[place] = max(found.get(place, 0), numel * group["ns_dtype"].itemsize)
    return found
