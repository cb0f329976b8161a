"""Scales of the learning rate by the shape of a matrix."""

from __future__ import annotations

import math

import torch

ADJUST_LR_FNS = (None, "original", "match_rms_adamw", "spectral", "unit")


def adjust_lr(
    lr: float | torch.Tensor, adjust_lr_fn: str | None, rows: int, columns: int
) -> float | torch.Tensor:
    """Return the learning rate for matrices of one shape.

    None and "original" scale by sqrt(max(1, rows / columns)), as Keller Jordan does.
    "match_rms_adamw" scales by 0.2 sqrt(max(rows, columns)): the update then has about the RMS
    of an AdamW update, and learning rates of AdamW carry over
    (https://arxiv.org/abs/2502.16982). "spectral" scales by sqrt(rows / columns): for any shape, an
    input whose elements have RMS 1 changes the output by an RMS of at most ``lr``
    (https://arxiv.org/abs/2310.17813). Megatron calls this scale "unit_rms_norm". Megatron's
    "spectral" is five times "match_rms_adamw". "unit" does not scale.
    """
    if adjust_lr_fn == "match_rms_adamw":
        return lr * (0.2 * math.sqrt(max(rows, columns)))
    if adjust_lr_fn == "spectral":
        return lr * math.sqrt(rows / columns)
    if adjust_lr_fn == "unit":
        return lr
    return lr * math.sqrt(max(1, rows / columns))
