"""How each rule steps a shard of a page."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.profiler import record_function

import tierstore
from muon import newton_schulz
from muon.update import adamw_, adjust_lr, momentum_, muon_


def step_muon(shard: tierstore.ShardView, group: Mapping[str, Any]) -> None:
    """Step a whole matrix that has a gradient, however many chunks it is in."""
    rows, columns = shard.parameter.tensor.shape
    lr = group["lr"]
    matrix = torch.empty(
        rows, columns, dtype=group["ns_dtype"], device=shard.chunks[0].master.device
    )
    with record_function("muon::momentum"):
        for chunk in shard.chunks:
            assert chunk.grad is not None
            momentum_(
                chunk.grad,
                chunk.states["momentum_buffer"],
                momentum=group["momentum"],
                nesterov=group["nesterov"],
                out=chunk.chunk.select(matrix),
            )
    with record_function("muon::newton_schulz"):
        update = newton_schulz.orthogonalize_(
            matrix,
            coefficients=group["ns_coefficients"],
            steps=group["ns_steps"],
            eps=group["eps"],
        )
    with record_function("muon::apply"):
        for chunk in shard.chunks:
            muon_(
                chunk.master,
                chunk.chunk.select(update),
                lr=lr,
                adjusted_lr=adjust_lr(lr, group["adjust_lr_fn"], rows, columns),
                weight_decay=group["weight_decay"],
            )


def step_adamw(shard: tierstore.ShardView, group: Mapping[str, Any], step: float) -> None:
    """Step a shard that has a gradient; ``step`` counts those of its parameter, from 1."""
    with record_function("muon::adamw"):
        for chunk in shard.chunks:
            assert chunk.grad is not None
            adamw_(
                chunk.master,
                chunk.grad,
                chunk.states["exp_avg"],
                chunk.states["exp_avg_sq"],
                step=step,
                lr=group["lr"],
                betas=group["betas"],
                eps=group["eps"],
                weight_decay=group["weight_decay"],
            )
