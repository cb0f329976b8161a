"""Update rules of Muon in numpy, with the roundings of torch's kernels on a GPU.

All arrays are float32. The compiler of torch's kernels joins a product and a sum: fma(). Functions
with an underscore at the end are from ``muon.kernels.plain``, for tensors on a CPU. AdamW has
the same bits there, so it is the rule itself.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

import tierstore
from muon.kernels.plain import adamw_ as adamw_


def fma(a: Any, b: Any, c: Any) -> np.ndarray:
    """Return a * b + c, rounded from float64, in which the product is exact."""
    found: np.ndarray = np.float64(np.float32(a)) * np.float32(b) + np.float32(c)
    return found.astype(np.float32)


def lerp(start: np.ndarray, end: np.ndarray, weight: float) -> np.ndarray:
    w = np.float32(weight)
    return fma(w, end - start, start) if abs(w) < 0.5 else fma(start - end, np.float32(1) - w, end)


def momentum(
    grad: np.ndarray, average: np.ndarray, *, momentum: float, nesterov: bool, maximize: bool
) -> tuple[np.ndarray, np.ndarray]:
    """Return the average, and the input of Newton-Schulz."""
    g = grad * np.float32(-1 if maximize else 1)
    average = lerp(average, g, 1 - momentum)
    return average, lerp(g, average, momentum) if nesterov else average


def weights(master: np.ndarray, update: np.ndarray, *, decay: float, alpha: float) -> np.ndarray:
    return fma(alpha, update, master * np.float32(decay))


def momentum_(grad: torch.Tensor, buffer: torch.Tensor, out: torch.Tensor, **options: Any) -> None:
    average, given = momentum(grad.float().numpy(), buffer.float().numpy(), **options)
    buffer.copy_(torch.from_numpy(average))
    out.copy_(torch.from_numpy(given))


def muon_(
    master: torch.Tensor, parameter: torch.Tensor | None, update: torch.Tensor, **options: Any
) -> torch.Tensor | None:
    changed = _adopt(master, parameter)
    master.copy_(torch.from_numpy(weights(master.numpy(), update.float().numpy(), **options)))
    if parameter is not None:
        parameter.copy_(master)
    return changed


def _adopt(master: torch.Tensor, parameter: torch.Tensor | None) -> torch.Tensor | None:
    """Take over what was changed in the parameter; return whether anything was, None for no."""
    found: list[torch.Tensor] = []
    if parameter is not None:
        tierstore.pages.RoundedMaster(master, parameter, found.append).read()
    return found[0] if found else None
