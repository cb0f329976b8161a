"""Update rules applied to the matrices and parameter shards of a page."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

import tierstore
from muon import newton_schulz, normuon
from muon.hooks import UpdateHook, WeightUpdate
from muon.kernels.rounding import rounded
from muon.kernels.rules import AnyState, adamw_, momentum_, muon_, opened
from muon.matrices import Matrix, declared, matrices_of
from muon.qk_clip import Scale, factors
from muon.scales import adjust_lr


@dataclass(frozen=True, slots=True, kw_only=True)
class Extras:
    """Work of a step in addition to the rule of each group."""

    hooks: Sequence[UpdateHook] = ()
    scales: Mapping[str, Sequence[Scale]] = field(default_factory=dict)
    """Parameter name -> scales of QK-clip in this step."""
    sum: Callable[[torch.Tensor], torch.Tensor] = lambda tensor: tensor
    """Sums a tensor over the ranks that share a matrix."""


@dataclass(frozen=True, slots=True)
class OwnPart:
    """The elements of a matrix in one chunk of this rank."""

    chunk: tierstore.pages.Chunk
    """Place in the matrix, of shape ``Matrix.sizes``."""
    grad: torch.Tensor
    momentum: AnyState
    master: AnyState
    averages: torch.Tensor | None
    """Averages of the rows, shape (..., 1), with NorMuon; else None."""
    factors: Sequence[torch.Tensor]
    """Factors of QK-clip. They broadcast to the master."""


@dataclass(frozen=True, slots=True)
class OwnMatrix:
    """A matrix of a page, and this rank's parts of it."""

    name: str
    """Name of the parameter that holds the matrix."""
    matrix: Matrix
    parts: Sequence[OwnPart]

    def select(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Return the parts of a tensor of shape (rows, columns)."""
        whole = tensor.view(self.matrix.sizes)
        return [part.chunk.select(whole) for part in self.parts]

    def averages(self, whole: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield the averages of NorMuon of each part, and their view in ``whole``, (rows, 1).

        Yields nothing without NorMuon.
        """
        for part in self.parts:
            if part.averages is not None:
                yield part.averages, normuon.rows_of(self.matrix.sizes, part.chunk, whole)


def own_matrices(
    shards: Sequence[tierstore.pages.ShardView],
    group: Mapping[str, Any],
    places: Sequence[tuple[int, Matrix]] | None = None,
    scales: Mapping[str, Sequence[Scale]] | None = None,
) -> list[OwnMatrix]:
    """Return the matrices of shards with a gradient.

    Args:
        shards: the shards.
        group: their hyperparameters.
        places: for each matrix the position of its shard; None: the matrices with parts on this
            rank.
        scales: parameter name -> scales of QK-clip.
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
    found = []
    for at, matrix in places:
        name = shards[at].spec.name
        parts = _own_parts(matrix, chunks[at], (scales or {}).get(name, ()))
        if parts or not is_alone:
            found.append(OwnMatrix(name, matrix, parts))
    return found


def _own_parts(
    matrix: Matrix,
    chunks: Sequence[tuple[tierstore.pages.ChunkView, torch.Tensor | None]],
    scales: Sequence[Scale],
) -> list[OwnPart]:
    parts = []
    for chunk, grad in chunks:
        part = matrix.part(chunk.chunk)
        if part is not None:
            assert grad is not None
            averages = chunk.states.get(normuon.STATE)
            own = OwnPart(
                part.chunk,
                grad=grad[part.index],
                momentum=chunk.states["momentum_buffer"][part.index],
                master=chunk.master_parts[part.index],
                averages=None if averages is None else averages[part.index[:-1]],
                factors=[
                    factor.expand(chunk.chunk.sizes)[part.index]
                    for factor in factors(scales, chunk.chunk, chunk.values)
                ],
            )
            parts.append(own)
    return parts


def write_inputs(matrix: OwnMatrix, group: Mapping[str, Any], outs: Sequence[torch.Tensor]) -> None:
    """Update the momentum of a matrix and write the input of Newton-Schulz.

    Args:
        matrix: the matrix.
        group: its hyperparameters.
        outs: one tensor for each part, in the shape of the part; overwritten.
    """
    with tierstore.pages.profiled("muon::momentum"):
        for part, out in zip(matrix.parts, outs, strict=True):
            momentum_(
                part.grad,
                part.momentum,
                momentum=group["momentum"],
                nesterov=group["nesterov"],
                out=out,
                maximize=bool(group.get("maximize")),
            )


def orthogonalize(
    matrices: Sequence[torch.Tensor],
    averages: Sequence[torch.Tensor],
    *,
    group: Mapping[str, Any],
    owned: Sequence[OwnMatrix],
    hooks: Sequence[UpdateHook],
) -> list[torch.Tensor]:
    """Return the updates of whole matrices of shapes (rows, columns). Overwrites the matrices.

    Args:
        matrices: the inputs.
        averages: averages of the rows of each, shape (rows, 1); updated in place with NorMuon.
        group: their hyperparameters.
        owned: each matrix, for the hooks.
        hooks: called with the inputs.
    """
    for hook in hooks:
        for own, matrix in zip(owned, matrices, strict=True):
            given = matrix.T if own.matrix.is_transposed else matrix
            hook.before_orthogonalization(own.name, own.matrix.starts, given)
    with tierstore.pages.profiled("muon::newton_schulz"):
        updates = newton_schulz.orthogonalize_all(
            matrices,
            batched=group["ns_batched"],
            coefficients=group["ns_coefficients"],
            steps=group["ns_steps"],
            eps=group["eps"],
            norm=group["ns_norm"],
            method=group["ns_method"],
        )
    if normuon.is_used(group):
        for update, of_rows in zip(updates, averages, strict=True):
            normuon.normalize_rows_(update, of_rows, group["normuon_beta"])
    return updates


def apply_updates(
    matrix: OwnMatrix, group: Mapping[str, Any], updates: Sequence[torch.Tensor], extras: Extras
) -> None:
    """Step the parts of a matrix, given one update in the shape of each part."""
    lr = group["lr"]
    adjusted_lr = adjust_lr(lr, group["adjust_lr_fn"], *matrix.matrix.outputs_and_inputs)
    masters: Sequence[Any] = [part.master for part in matrix.parts]
    opens = extras.hooks or any(part.factors for part in matrix.parts)
    with contextlib.ExitStack() as stack:
        if opens:  # Otherwise encoded masters are decoded in pieces.
            masters = stack.enter_context(opened(masters))
        with (
            tierstore.pages.profiled("muon::apply"),
            _hooked(matrix, group, adjusted_lr, updates, masters, extras) as hooked,
        ):
            for master, update in zip(masters, hooked, strict=True):
                muon_(
                    master,
                    update,
                    lr=lr,
                    adjusted_lr=adjusted_lr,
                    weight_decay=group["weight_decay"],
                    cautious=bool(group.get("cautious_wd")),
                )
        for part, master in zip(matrix.parts, masters, strict=True):
            for factor in part.factors:
                master.mul_(factor)


@contextlib.contextmanager
def _hooked(
    matrix: OwnMatrix,
    group: Mapping[str, Any],
    adjusted_lr: float | torch.Tensor,
    updates: Sequence[torch.Tensor],
    masters: Sequence[torch.Tensor],
    extras: Extras,
) -> Iterator[Sequence[torch.Tensor]]:
    """Call the hooks before and after the weights change; yield the updates that they leave."""
    if not extras.hooks:
        yield updates
        return
    update = WeightUpdate(
        name=matrix.name,
        starts=matrix.matrix.starts,
        shape=matrix.matrix.shape,
        group=group,
        lr=adjusted_lr,
        weights=masters,
        # In the dtype of the masters: a hook that scales the updates then does not round.
        updates=[narrow.to(own.dtype) for narrow, own in zip(updates, masters, strict=True)],
        _sum=extras.sum,
    )
    for hook in extras.hooks:
        hook.before(update)
    yield update.updates
    for hook in extras.hooks:
        hook.after(update)


def step_whole(matrices: Sequence[OwnMatrix], group: Mapping[str, Any], extras: Extras) -> None:
    """Step matrices whose parts all lie in this page."""
    shapes = [own.matrix.shape for own in matrices]
    for batch in newton_schulz.batches(shapes, batched=group["ns_batched"]):
        inputs, averages = [], []
        for index in batch:
            device = matrices[index].parts[0].grad.device
            tensor = torch.empty(shapes[index], dtype=group["ns_dtype"], device=device)
            inputs.append(tensor)  # (rows, columns)
            write_inputs(matrices[index], group, matrices[index].select(tensor))
            averages.append(torch.empty((len(tensor), 1), dtype=torch.float32, device=device))
            for own, of_whole in matrices[index].averages(averages[-1]):
                of_whole.copy_(own)
        owned = [matrices[index] for index in batch]
        updates = orthogonalize(inputs, averages, group=group, owned=owned, hooks=extras.hooks)
        for one, update, of_rows in zip(owned, updates, averages, strict=True):
            for own, of_whole in one.averages(of_rows):
                own.copy_(of_whole)
            apply_updates(one, group, one.select(update), extras)


@functools.cache
def _plain(name: str) -> str:
    """Return a name that is equal with and without torch.compile. The bits are then equal."""
    return tierstore.pages.unwrapped_names([name])[name]


def step_adamw(
    shards: Sequence[tierstore.pages.ShardView],
    group: Mapping[str, Any],
    steps: Mapping[str, float],
    scales: Mapping[str, Sequence[Scale]],
) -> None:
    """Step shards with a gradient.

    Args:
        shards: the shards.
        group: their hyperparameters.
        steps: parameter name -> number of this step.
        scales: parameter name -> scales of QK-clip.
    """
    chunks = [chunk for shard in shards for chunk in shard.chunks]
    grads = [grad for chunk in chunks if (grad := chunk.grad) is not None]
    exp_avgs, exp_avg_sqs = (
        [
            rounded(
                chunk.states[state],
                f"{_plain(shard.spec.name)} {state} {steps[shard.spec.name]}",
                shard.spec.shape,
                chunk.chunk,
            )
            for shard in shards
            for chunk in shard.chunks
        ]
        for state in ("exp_avg", "exp_avg_sq")
    )
    with tierstore.pages.profiled("muon::adamw"):
        adamw_(
            [chunk.master_parts for chunk in chunks],
            grads,
            exp_avgs,
            exp_avg_sqs,
            steps=[steps[shard.parameter.name] for shard in shards for _ in shard.chunks],
            lr=group["lr"],
            betas=group["betas"],
            eps=group["eps"],
            weight_decay=group["weight_decay"],
            maximize=bool(group.get("maximize")),
            cautious=bool(group.get("cautious_wd")),
        )
        for shard in shards if scales else ():
            for chunk in shard.chunks:
                found = factors(scales.get(shard.spec.name, ()), chunk.chunk, chunk.values)
                with opened([chunk.master_parts] if found else []) as masters:
                    for factor in found:
                        masters[0].mul_(factor)
