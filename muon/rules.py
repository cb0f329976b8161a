"""Update rules applied to the matrices and parameter shards of a page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.profiler import record_function

import tierstore
from muon import newton_schulz
from muon.matrices import Matrix, declared, matrices_of
from muon.update import adamw_, adjust_lr, fused_adamw_, momentum_, muon_


@dataclass(frozen=True, slots=True)
class OwnPart:
    """The elements of a matrix in one chunk of this rank."""

    chunk: tierstore.Chunk
    """Place in the matrix, of shape ``Matrix.sizes``."""
    grad: torch.Tensor
    momentum: torch.Tensor
    master: torch.Tensor


@dataclass(frozen=True, slots=True)
class OwnMatrix:
    """A matrix of a page, and this rank's parts of it."""

    matrix: Matrix
    parts: Sequence[OwnPart]

    def select(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Return the parts of a tensor of shape (rows, columns)."""
        whole = tensor.view(self.matrix.sizes)
        return [part.chunk.select(whole) for part in self.parts]


def own_matrices(
    shards: Sequence[tierstore.ShardView],
    group: Mapping[str, Any],
    places: Sequence[tuple[int, Matrix]] | None = None,
) -> list[OwnMatrix]:
    """Return the matrices of shards with a gradient.

    Args:
        shards: the shards.
        group: their hyperparameters.
        places: for each matrix the position of its shard; None: the matrices that this rank has
            parts of.
    """
    chunks = []
    for shard in shards:
        grads = [chunk.grad for chunk in shard.chunks]
        chunks.append(list(zip(shard.chunks, grads, strict=True)))
    is_alone = places is None
    if places is None:
        places = [
            (position, matrix)
            for position, shard in enumerate(shards)
            for matrix in matrices_of(shard.spec.shape, declared(group))
        ]
    found = [OwnMatrix(matrix, _own_parts(matrix, chunks[at])) for at, matrix in places]
    return [one for one in found if one.parts] if is_alone else found


def _own_parts(
    matrix: Matrix, chunks: Sequence[tuple[tierstore.ChunkView, torch.Tensor | None]]
) -> list[OwnPart]:
    parts = []
    for chunk, grad in chunks:
        part = matrix.part(chunk.chunk)
        if part is not None:
            assert grad is not None
            momentum = chunk.states["momentum_buffer"]
            tensors = (tensor[part.index] for tensor in (grad, momentum, chunk.master))
            parts.append(OwnPart(part.chunk, *tensors))
    return parts


def write_inputs(matrix: OwnMatrix, group: Mapping[str, Any], outs: Sequence[torch.Tensor]) -> None:
    """Update the momentum of a matrix and write the input of Newton-Schulz.

    Args:
        matrix: the matrix.
        group: its hyperparameters.
        outs: one tensor for each part, in the shape of the part; overwritten.
    """
    with record_function("muon::momentum"):
        for part, out in zip(matrix.parts, outs, strict=True):
            momentum_(
                part.grad,
                part.momentum,
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
    matrix: OwnMatrix, group: Mapping[str, Any], updates: Sequence[torch.Tensor]
) -> None:
    """Step the parts of a matrix, given one update for each in its shape."""
    lr = group["lr"]
    adjusted_lr = adjust_lr(lr, group["adjust_lr_fn"], *matrix.matrix.outputs_and_inputs)
    with record_function("muon::apply"):
        for part, update in zip(matrix.parts, updates, strict=True):
            muon_(
                part.master,
                update,
                lr=lr,
                adjusted_lr=adjusted_lr,
                weight_decay=group["weight_decay"],
                cautious=bool(group.get("cautious_wd")),
            )


def step_whole(matrices: Sequence[OwnMatrix], group: Mapping[str, Any]) -> None:
    """Step matrices whose parts all lie in this page."""
    shapes = [own.matrix.shape for own in matrices]
    for batch in newton_schulz.batches(shapes, batched=group["ns_batched"]):
        inputs = []
        for index in batch:
            device = matrices[index].parts[0].master.device
            tensor = torch.empty(shapes[index], dtype=group["ns_dtype"], device=device)
            inputs.append(tensor)  # (rows, columns)
            write_inputs(matrices[index], group, matrices[index].select(tensor))
        for index, update in zip(batch, orthogonalize(inputs, group), strict=True):
            apply_updates(matrices[index], group, matrices[index].select(update))


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
