"""Update rules on states in fewer bytes as kernels of Triton: decode, step and encode in one pass.

Results have the bits of ``muon.kernels.plain`` between ``read()`` and ``write()`` of the states. A
program steps some rows and up to 256 columns of a chunk: one scale of a row of an 8-bit state.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

import tierstore
from muon.kernels import plain, rounding
from muon.kernels.gpu import adamw_stepped, adopted, averaged, is_small, places_of
from muon.kernels.gpu import fit as fit_tensors
from muon.kernels.gpu_encodings import (
    joined,
    moment,
    random_bits,
    roots,
    store_moment,
    store_roots,
    store_split,
    tile,
)
from muon.kernels.rules import AnyState, opened

_BLOCK = 1024  # Elements of one program.
_COLUMNS = tierstore.pages.EncodedState.BLOCK_COLUMNS


class _Form(NamedTuple):
    """The memory of a state in the form that kernels take."""

    kind: str
    """"float32"; for a master also "split"; for others also "bfloat16", "int8" or "uint8"."""
    values: torch.Tensor
    """The values; bfloat16 as int16."""
    beside: torch.Tensor
    """The remainders or scales of the values; without them the values."""
    chances: rounding.Chances | None = None

    @property
    def digest(self) -> int:
        return 0 if self.chances is None else self.chances.digest


def _form(state: Any) -> _Form | None:
    """Return the form of a state, or None if no kernel takes it."""
    if isinstance(state, tierstore.pages.SplitMaster):
        parameter, remainder = state.stored.values()
        return _Form("split", parameter.view(torch.int16), remainder)
    chances = None
    if isinstance(state, rounding.Rounded):
        state, chances = state.state, state.chances
    if isinstance(state, tierstore.pages.RootState):
        numbers, scales = state.stored.values()
        return _Form(str(numbers.dtype).removeprefix("torch."), numbers, scales, chances)
    if isinstance(state, torch.Tensor) and chances is not None:
        bits = state.view(torch.int16)
        return _Form("bfloat16", bits, bits, chances)
    if isinstance(state, torch.Tensor) and state.dtype == torch.float32:
        return _Form("float32", state, state)
    return None


def fit(
    tensors: Sequence[torch.Tensor],
    states: Sequence[AnyState],
    parameter: torch.Tensor | None,
    *,
    has_master: bool,
) -> bool:
    """Return whether the kernels take a chunk.

    Args:
        tensors: the other tensors that the rule reads or writes.
        states: a master and its moments, or a momentum.
        parameter: the 16-bit rounded master, or None.
        has_master: whether the first state is a master.
    """
    shape = tensors[0].shape
    beside = () if parameter is None else (parameter,)
    if not shape or any(tensor.shape != shape for tensor in (*tensors, *beside)):
        return False
    if not fit_tensors(*tensors, *beside) or any(each.dtype == torch.float32 for each in beside):
        return False
    for place, state in enumerate(states):
        form = _form(state)
        if form is None or form.values.shape != shape:
            return False
        if not (form.values.is_contiguous() and form.beside.is_contiguous()):
            return False
        if place == 0:
            kinds = ("float32", "split") if has_master else ("int8",)
            is_taken = form.kind in kinds and form.chances is None
        elif form.chances is None:  # Without stochastic rounding.
            is_taken = form.kind == "float32"
        else:
            is_taken = form.chances.first is not None
        if not is_taken:
            return False
    return True


def momentum_(
    grad: torch.Tensor,
    buffer: AnyState,
    out: torch.Tensor,
    *,
    momentum: float,
    nesterov: bool,
    maximize: bool,
) -> None:
    """Do what ``muon.kernels.plain.momentum_`` does, on a momentum in 8 bits."""
    form = _form(buffer)
    assert form is not None
    rows, columns, grid, tile = _tiles(grad)
    with torch.cuda.device_of(grad):
        _momentum[grid](
            grad,
            form.values,
            form.beside,
            out,
            rows,
            columns,
            1 - momentum,
            momentum,
            nesterov=nesterov,
            maximize=maximize,
            grad_weight_small=is_small(1 - momentum),
            average_weight_small=is_small(momentum),
            enable_fp_fusion=False,
            **tile,
        )


def muon_(
    master: AnyState,
    parameter: torch.Tensor | None,
    update: torch.Tensor,
    *,
    decay: float,
    alpha: float,
) -> torch.Tensor | None:
    """Do what ``muon.kernels.plain.muon_`` does, on a parameter and a remainder."""
    form = _form(master)
    assert form is not None
    assert parameter is None
    numel = update.numel()
    with torch.cuda.device_of(update):
        _muon[(triton.cdiv(numel, _BLOCK),)](
            form.values,
            form.beside,
            update,
            numel,
            decay,
            alpha,
            block=_BLOCK,
            enable_fp_fusion=False,
        )
    torch.autograd.graph.increment_version(form.values)
    return None


def adamw_(
    masters: Sequence[AnyState],
    parameters: Sequence[torch.Tensor | None],
    grads: Sequence[torch.Tensor],
    exp_avgs: Sequence[AnyState],
    exp_avg_sqs: Sequence[AnyState],
    *,
    sizes: Sequence[float],
    epsilons: Sequence[float],
    decay: float,
    betas: tuple[float, float],
    maximize: bool,
) -> list[torch.Tensor | None]:
    """Do what ``muon.kernels.plain.adamw_`` does, on states that fit() takes."""
    chunks = zip(masters, parameters, grads, exp_avgs, exp_avg_sqs, sizes, epsilons, strict=True)
    options: dict[str, Any] = {"decay": decay, "betas": betas, "maximize": maximize}
    return [_step_adamw(*chunk, **options) for chunk in chunks]


def _step_adamw(
    master: AnyState,
    parameter: torch.Tensor | None,
    grad: torch.Tensor,
    exp_avg: AnyState,
    exp_avg_sq: AnyState,
    size: float,
    epsilon: float,
    *,
    decay: float,
    betas: tuple[float, float],
    maximize: bool,
) -> torch.Tensor | None:
    own, mean, mean_sq = _form(master), _form(exp_avg), _form(exp_avg_sq)
    assert own is not None
    assert mean is not None
    assert mean_sq is not None
    changed = None
    if parameter is not None:
        changed = torch.zeros((), dtype=torch.uint8, device=grad.device)
        own = _Form("rounded", own.values, parameter)
    chances = mean.chances or mean_sq.chances  # Both belong to the same elements.
    first_row, first_column = (0, 0) if chances is None else chances.first or (0, 0)
    rows, columns, grid, tile = _tiles(grad)
    with torch.cuda.device_of(grad):
        _adamw[grid](
            own.values,
            own.beside,
            grad,
            mean.values,
            mean.beside,
            mean_sq.values,
            mean_sq.beside,
            own.values if changed is None else changed,
            rows,
            columns,
            first_row,
            first_column,
            mean.digest,
            mean_sq.digest,
            decay,
            betas[0],
            1 - betas[0],
            betas[1],
            1 - betas[1],
            size,
            epsilon,
            of_master=own.kind,
            of_mean=mean.kind,
            of_mean_sq=mean_sq.kind,
            maximize=maximize,
            enable_fp_fusion=False,
            **tile,
        )
    torch.autograd.graph.increment_version(own.values if parameter is None else parameter)
    return None if changed is None else changed.view(torch.bool)


def _tiles(tensor: torch.Tensor) -> tuple[int, int, tuple[int], dict[str, int]]:
    """Return rows and columns of a tensor, the grid, and the rows and columns of a program.

    Example: 10 rows of 300 columns are 3 x 2 programs of 4 rows and 256 columns.
    """
    columns = tensor.shape[-1]
    rows = tensor.numel() // columns
    width = min(_COLUMNS, 1 << (columns - 1).bit_length())
    height = _BLOCK // width
    grid = triton.cdiv(rows, height) * triton.cdiv(columns, width)
    return rows, columns, (grid,), {"height": height, "width": width}


def agree(device: torch.device) -> bool:
    """Return whether the kernels give the bits of the operations, for a few numbers."""
    random = torch.Generator(device).manual_seed(0)
    numbers = torch.randn((4, 9, 700), generator=random, device=device, dtype=torch.float32)
    numbers[:, -1] *= 1e-15  # Scales of second moments are then subnormal.
    grad, shape = numbers[0].bfloat16(), numbers[0].shape
    chunk = tierstore.pages.Chunk((0, 0), tuple(shape))

    def zeros(dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    def in_8_bits(dtype: torch.dtype) -> tierstore.pages.RootState:
        return tierstore.pages.RootState("", zeros(dtype), zeros(torch.float32)[:, :3].contiguous())

    def split(dtype: torch.dtype) -> tierstore.pages.SplitMaster:
        return tierstore.pages.SplitMaster(zeros(torch.bfloat16), zeros(dtype))

    own: Any = (momentum_, muon_, adamw_, contextlib.nullcontext)
    operations: Any = (plain.momentum_, plain.muon_, plain.adamw_, opened)
    found = []
    for of_momentum, of_weights, of_adamw, reading in (own, operations):
        buffer, out, master = in_8_bits(torch.int8), torch.empty_like(grad), split(torch.int16)
        buffer.write(numbers[1])
        master.write(numbers[3])
        with reading([buffer]) as [values]:
            of_momentum(grad, values, out, momentum=0.95, nesterov=True, maximize=False)
        with reading([master]) as [values]:
            of_weights(values, None, grad, decay=0.998, alpha=-0.03)
        kept = [out, *buffer.stored.values(), *master.stored.values()]
        for remainder, mean, mean_sq in (
            (torch.int16, zeros(torch.bfloat16), zeros(torch.bfloat16)),
            (torch.int8, in_8_bits(torch.int8), in_8_bits(torch.uint8)),
        ):
            moments = [rounding.rounded(state, "", shape, chunk) for state in (mean, mean_sq)]
            states: list[Any] = [split(remainder), *moments]
            given = (numbers[3], numbers[1], numbers[2].square())
            for state, value in zip(states, given, strict=True):
                state.write(value)
            with reading(states) as [master, *values]:
                of_adamw(
                    *([master], [None], [grad], *([value] for value in values)),
                    sizes=[1e-3],
                    epsilons=[1e-8],
                    decay=1 - 1e-3 * 0.1,
                    betas=(0.9, 0.95),
                    maximize=False,
                )
            for form in map(_form, states):
                assert form is not None
                kept += [form.values, form.beside]
        found.append(kept)
    return all(map(torch.equal, *found))


@triton.jit(do_not_specialize=["rows"])
def _momentum(
    grad_at,
    numbers_at,
    scale_at,
    out_at,
    rows,
    columns,
    grad_weight,
    average_weight,
    nesterov: tl.constexpr,
    maximize: tl.constexpr,
    grad_weight_small: tl.constexpr,
    average_weight_small: tl.constexpr,
    height: tl.constexpr,
    width: tl.constexpr,
):
    _, _, places, inside, scale_places, has_row = tile(rows, columns, height, width)
    grad = tl.load(grad_at + places, mask=inside).to(tl.float32)
    average = roots(numbers_at, scale_at, places, inside, scale_places, has_row)
    average, out = averaged(
        grad,
        average,
        grad_weight,
        average_weight,
        nesterov,
        maximize,
        grad_weight_small,
        average_weight_small,
    )
    store_roots(average, 0.5, numbers_at, scale_at, places, inside, scale_places, has_row, 127)
    tl.store(out_at + places, out.to(out_at.dtype.element_ty), mask=inside)


@triton.jit
def _muon(parameter_at, remainder_at, update_at, numel, decay, alpha, block: tl.constexpr):
    places, inside = places_of(numel, block)
    master = joined(parameter_at, remainder_at, places, inside)
    update = tl.load(update_at + places, mask=inside).to(tl.float32)
    master = tl.fma(alpha, update, master * decay)
    store_split(master, parameter_at, remainder_at, places, inside)


@triton.jit(
    do_not_specialize=["rows", "first_row", "first_column", "mean_digest", "mean_sq_digest"]
)
def _adamw(
    master_at,
    beside_at,
    grad_at,
    mean_at,
    mean_scale_at,
    mean_sq_at,
    mean_sq_scale_at,
    changed_at,
    rows,
    columns,
    first_row,
    first_column,
    mean_digest,
    mean_sq_digest,
    decay,
    beta1,
    grad_weight,
    beta2,
    square_weight,
    size,
    epsilon,
    of_master: tl.constexpr,
    of_mean: tl.constexpr,
    of_mean_sq: tl.constexpr,
    maximize: tl.constexpr,
    height: tl.constexpr,
    width: tl.constexpr,
):
    row, column, places, inside, scale_places, has_row = tile(rows, columns, height, width)
    if of_master == "split":
        master = joined(master_at, beside_at, places, inside)
    else:
        master = tl.load(master_at + places, mask=inside, other=0.0)
    if of_master == "rounded":
        master = adopted(master, beside_at, changed_at, places, inside)
    grad = tl.load(grad_at + places, mask=inside).to(tl.float32)
    mean = moment(mean_at, mean_scale_at, places, inside, scale_places, has_row, of_mean)
    mean_sq = moment(
        mean_sq_at, mean_sq_scale_at, places, inside, scale_places, has_row, of_mean_sq
    )
    master, mean, mean_sq = adamw_stepped(
        master,
        grad,
        mean,
        mean_sq,
        decay,
        beta1,
        grad_weight,
        beta2,
        square_weight,
        size,
        epsilon,
        maximize,
    )
    row, column = row + first_row, column + first_column
    bits = random_bits(row, column, mean_digest)
    store_moment(mean, bits, mean_at, mean_scale_at, places, inside, scale_places, has_row, of_mean)
    bits = random_bits(row, column, mean_sq_digest)
    store_moment(
        mean_sq,
        bits,
        mean_sq_at,
        mean_sq_scale_at,
        places,
        inside,
        scale_places,
        has_row,
        of_mean_sq,
    )
    if of_master == "split":
        store_split(master, master_at, beside_at, places, inside)
    else:
        tl.store(master_at + places, master, mask=inside)
    if of_master == "rounded":
        tl.store(beside_at + places, master.to(beside_at.dtype.element_ty), mask=inside)
