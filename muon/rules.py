"""Update rules applied to the parameter shards of a page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.profiler import record_function

import tierstore
from muon import newton_schulz
from muon.update import adamw_, adjust_lr, fused_adamw_, momentum_, muon_


def write_inputs(
    shard: tierstore.ShardView, group: Mapping[str, Any], outs: Sequence[torch.Tensor]
) -> None:
    """Update the momentum of a shard and write the input of Newton-Schulz.

    Args:
        shard: a shard with a gradient.
        group: hyperparameters of the shard.
        outs: one tensor per chunk of the shard, in the shape of the chunk; overwritten.
    """
    with record_function("muon::momentum"):
        for chunk, out in zip(shard.chunks, outs, strict=True):
            assert chunk.grad is not None
            momentum_(
                chunk.grad,
                chunk.states["momentum_buffer"],
                momentum=group["momentum"],
                nesterov=group["nesterov"],
                out=out,
                maximize=bool(group.get("maximize")),
            )


def orthogonalize(matrices: Sequence[torch.Tensor], group: Mapping[str, Any]) -> list[torch.Tensor]:
    """Return the updates of whole matrices of shapes (rows, columns), which are overwritten."""
    with record_function("muon::newton_schulz"):
        return newton_schulz.orthogonalize_all(
            matrices,
            batched=group["ns_batched"],
            coefficients=group["ns_coefficients"],
            steps=group["ns_steps"],
            eps=group["eps"],
            norm=group["ns_norm"],
        )


def apply_updates(
    shard: tierstore.ShardView, group: Mapping[str, Any], updates: Sequence[torch.Tensor]
) -> None:
    """Step the chunks of a shard, given one update per chunk in the shape of the chunk."""
    lr = group["lr"]
    adjusted_lr = adjust_lr(lr, group["adjust_lr_fn"], *shard.spec.shape)
    with record_function("muon::apply"):
        for chunk, update in zip(shard.chunks, updates, strict=True):
            muon_(
                chunk.master,
                update,
                lr=lr,
                adjusted_lr=adjusted_lr,
                weight_decay=group["weight_decay"],
                cautious=bool(group.get("cautious_wd")),
            )


def step_whole(shards: Sequence[tierstore.ShardView], group: Mapping[str, Any]) -> None:
    """Step matrices with a gradient whose chunks all lie in this page."""
    shapes = [shard.spec.shape for shard in shards]
    for batch in newton_schulz.batches(shapes, batched=group["ns_batched"]):
        matrices = []
        for index in batch:
            device = shards[index].chunks[0].master.device
            matrix = torch.empty(shapes[index], dtype=group["ns_dtype"], device=device)
            matrices.append(matrix)  # (rows, columns)
            outs = [chunk.chunk.select(matrix) for chunk in shards[index].chunks]  # chunk.sizes
            write_inputs(shards[index], group, outs)
        for index, update in zip(batch, orthogonalize(matrices, group), strict=True):
            updates = [chunk.chunk.select(update) for chunk in shards[index].chunks]  # chunk.sizes
            apply_updates(shards[index], group, updates)


def step_adamw(
    shards: Sequence[tierstore.ShardView], group: Mapping[str, Any], steps: Mapping[str, float]
) -> None:
    """Step shards with a gradient.

    Args:
        shards: the shards.
        group: their hyperparameters.
        steps: parameter name -> number of this step.
    """
    chunks = [chunk for shard in shards for chunk in shard.chunks]
    grads = [grad for chunk in chunks if (grad := chunk.grad) is not None]
    options = {"cautious": True} if group.get("cautious_wd") else {}
    step = fused_adamw_ if group.get("fused") else adamw_
    with record_function("muon::adamw"):
        step(
            [chunk.master for chunk in chunks],
            grads,
            [chunk.states["exp_avg"] for chunk in chunks],
            [chunk.states["exp_avg_sq"] for chunk in chunks],
            steps=[steps[shard.parameter.name] for shard in shards for _ in shard.chunks],
            lr=group["lr"],
            betas=group["betas"],
            eps=group["eps"],
            weight_decay=group["weight_decay"],
            maximize=bool(group.get("maximize")),
            **options,
        )
