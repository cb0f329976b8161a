"""Update rules in numpy, with the roundings of torch's kernels on a GPU.

All arrays are float32. The compiler of torch's kernels joins a product and a sum: fma().
"""

from __future__ import annotations

from typing import Any

import numpy as np


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


def adamw(
    master: np.ndarray,
    grad: np.ndarray,
    mean: np.ndarray,
    mean_sq: np.ndarray,
    *,
    root: float,
    size: float,
    decay: float,
    betas: tuple[float, float],
    eps: float,
    maximize: bool,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the master and both moments."""
    g = grad * np.float32(-1 if maximize else 1)
    m = lerp(mean, g, 1 - betas[0])
    v = fma(1 - betas[1], g * g, mean_sq * np.float32(betas[1]))
    denominator = np.sqrt(v) / np.float32(root) + np.float32(eps)
    return fma(-size, m / denominator, master * np.float32(decay)), m, v
