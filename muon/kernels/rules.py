"""The update rules: they open states, cut them into pieces, and choose the implementation.

If the device has kernels of one pass over memory (``cpu``, ``gpu``, and ``gpu_encoded`` for states
in fewer bytes) and they take the tensors, they compute. Otherwise torch operations (``plain``) do.
Both give the same bits, except the sign of a zero if ``momentum`` is 0 or 1: in this case loops of
torch differ from each other. GPU kernels need a C compiler and Triton, which GPU builds of torch
include. CPU kernels are built with the package.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol, TypeAlias

import torch

import tierstore
from muon.kernels import plain

logger = logging.getLogger("muon")

_PIECE_NUMEL = 1 << 18
_SMALL_NUMEL = 1 << 16  # Smaller tensors of AdamW take less time in batches on a GPU.


class Readable(Protocol):
    """A state whose values are read, changed and written back."""

    def read(self) -> torch.Tensor:
        """Return the values in separate memory."""

    def write(self, values: torch.Tensor) -> None:
        """Take the changed values."""

    def __getitem__(self, index: Any) -> Any:
        """Return a part of the state."""


AnyState: TypeAlias = torch.Tensor | Readable


@contextlib.contextmanager
def opened(states: Sequence[AnyState]) -> Iterator[list[torch.Tensor]]:
    """Yield the values of states to change in place: the tensors themselves, or decoded values.

    Decoded values are encoded when the context ends without an error.
    """
    values = [state if isinstance(state, torch.Tensor) else state.read() for state in states]
    yield values
    for state, value in zip(states, values, strict=True):
        if not isinstance(state, torch.Tensor):
            state.write(value)


def momentum_(
    grad: torch.Tensor,
    momentum_buffer: AnyState,
    *,
    momentum: float,
    nesterov: bool,
    out: torch.Tensor,
    maximize: bool = False,
) -> None:
    """Update the momentum and write the input of Newton-Schulz to ``out``.

    As in ``torch.optim.Muon``: the average m is ``momentum * m + (1 - momentum) * grad``, and the
    input is m, or with ``nesterov`` ``(1 - momentum) * grad + momentum * m``. Both are computed
    in float32 or wider; a buffer of lower precision stores m rounded.

    Args:
        grad: shape (rows, columns) of the chunk, any floating-point dtype.
        momentum_buffer: the shape of ``grad``; updated in place.
        momentum: weight of the past, in [0, 1].
        nesterov: look one step ahead.
        out: the shape of ``grad``, in the dtype of Newton-Schulz; overwritten.
        maximize: follow the gradient upwards: ``grad`` is negated.
    """
    kernels = kernels_for(grad.device)
    for rules, tensors, [buffer], _ in _parts(kernels, [grad, out], [momentum_buffer]):
        rules.momentum_(
            tensors[0],
            buffer,
            tensors[1],
            momentum=momentum,
            nesterov=nesterov,
            maximize=maximize,
        )


def muon_(
    master: AnyState,
    update: torch.Tensor,
    *,
    lr: float | torch.Tensor,
    adjusted_lr: float | torch.Tensor,
    weight_decay: float,
    cautious: bool = False,
) -> None:
    """Decay the master, then subtract the orthogonalized update, as ``torch.optim.Muon`` does.

    master = (1 - lr * weight_decay) * master - adjusted_lr * update.

    Args:
        master: shape (rows, columns) of the chunk; updated in place.
        update: the shape of ``master``, in the dtype of Newton-Schulz.
        lr: learning rate before adjust_lr(), which scales the weight decay.
        adjusted_lr: learning rate after adjust_lr(), which scales the update.
        weight_decay: decoupled, as in AdamW.
        cautious: decay only elements that the update does not move away from zero.
    """
    options: dict[str, Any] = {
        "decay": float(1 - lr * weight_decay),
        "alpha": -float(adjusted_lr),
        **({"cautious": True} if cautious else {}),
    }
    kernels = None if cautious else kernels_for(update.device)
    for rules, [part], [values], parameter in _parts(kernels, [update], [master], has_master=True):
        _note_changed(master, rules.muon_(values, parameter, part, **options))


def adamw_(
    masters: Sequence[AnyState],
    grads: Sequence[torch.Tensor],
    exp_avgs: Sequence[AnyState],
    exp_avg_sqs: Sequence[AnyState],
    *,
    steps: Sequence[float],
    lr: float | torch.Tensor,
    betas: tuple[float | torch.Tensor, float | torch.Tensor],
    eps: float | torch.Tensor,
    weight_decay: float | torch.Tensor,
    maximize: bool = False,
    cautious: bool = False,
) -> None:
    """Do one step of AdamW (https://arxiv.org/abs/1711.05101), with one division.

    Each operation is rounded separately, as IEEE 754 defines it, so every processor
    computes the same bits. In the dtype of the master, with g = ``grad``::

        w = w * (1 - lr * weight_decay)
        m = (beta1 * m) + ((1 - beta1) * g)
        v = (beta2 * v) + ((1 - beta2) * (g * g))
        w = w - ((size * m) / (sqrt(v) + epsilon))

    See _corrected() for size and epsilon. Numbers that are not tensors are computed in float64 and
    then rounded. The root in float64 is torch's. Its last bit may depend on the processor.

    Each sequence has one item for each chunk; the tensors of a chunk have one shape.

    Args:
        masters: w, of any shape; updated in place.
        grads: of any floating-point dtype.
        exp_avgs: running means m of gradients, of the dtype of the master; updated in place.
        exp_avg_sqs: running means v of squared gradients, of the dtype of the master; updated in
            place.
        steps: number of this step for the parameter, a whole number from 1.
        lr: learning rate. A tensor here and below has one element.
        betas: weights of the past in m and v.
        eps: added to the root of v, before its bias is corrected.
        weight_decay: decoupled: the masters shrink by ``lr * weight_decay``.
        maximize: follow the gradients upwards: they are negated.
        cautious: decay only elements that the step does not move away from zero.
    """
    lr, betas = float(lr), (float(betas[0]), float(betas[1]))
    numbers = {step: _corrected(lr, betas, float(eps), step) for step in set(steps)}
    options: dict[str, Any] = {
        "decay": 1 - lr * float(weight_decay),
        "betas": betas,
        "maximize": maximize,
        **({"cautious": True} if cautious else {}),
    }
    kernels = kernels_for(grads[0].device) if grads and not cautious else None
    left = []
    for row in zip(steps, grads, masters, exp_avgs, exp_avg_sqs, strict=True):
        step, grad, *states = row
        # On a GPU a state that is not a tensor needs more launches than a kernel.
        is_joined = not grad.is_cpu and grad.numel() < _SMALL_NUMEL and _are_tensors(states)
        if kernels is None or is_joined:
            left.append(row)
            continue
        for rules, part, values, parameter in _parts(kernels, [grad], states, has_master=True):
            columns = [[value] for value in (values[0], parameter, *part, *values[1:])]
            size, epsilon = numbers[step]
            [changed] = rules.adamw_(*columns, sizes=[size], epsilons=[epsilon], **options)
            _note_changed(states[0], changed)
    for some_steps, some_grads, some_masters, means, mean_sqs in _batches(left):
        own, parameters = zip(*map(_split, some_masters), strict=True)
        sizes, epsilons = zip(*map(numbers.__getitem__, some_steps), strict=True)
        count = len(own)
        with opened([*own, *means, *mean_sqs]) as values:
            found = plain.adamw_(
                values[:count],
                parameters,
                some_grads,
                values[count : 2 * count],
                values[2 * count :],
                sizes=sizes,
                epsilons=epsilons,
                **options,
            )
        for master, changed in zip(some_masters, found, strict=True):
            _note_changed(master, changed)


@functools.lru_cache  # Groups mostly have the same numbers.
def _corrected(
    lr: float, betas: tuple[float, float], eps: float, step: float
) -> tuple[float, float]:
    """Return the size and the epsilon of a step, corrected for the biases of both means.

    This is the definition of AdamW multiplied by the root of the correction of v:
    lr m / (1 - beta1^t) / (sqrt(v) / root + eps) = size m / (sqrt(v) + epsilon).
    """
    root = math.sqrt(1 - _power(betas[1], step))
    return lr / (1 - _power(betas[0], step)) * root, eps * root


def _power(base: float, exponent: float) -> float:
    """Return a power by products, because ``**`` is a function of the C library."""
    found, left = 1.0, int(exponent)
    while left:
        if left % 2:
            found *= base
        base *= base
        left //= 2
    return found


def _parts(
    kernels: Any,
    tensors: Sequence[torch.Tensor],
    states: Sequence[AnyState],
    *,
    has_master: bool = False,
) -> Iterator[tuple[Any, Sequence[torch.Tensor], Sequence[Any], torch.Tensor | None]]:
    """Yield parts of tensors and states. Step each part before asking for the next.

    If kernels take the tensors and states, including encoded states, the part is the whole.
    Otherwise parts are pieces, with decoded values of encoded states.

    Args:
        kernels: a module of kernels, or None.
        tensors: the other tensors that the rule reads or writes; all have one shape.
        states: the states that the rule changes.
        has_master: whether the states are a master and its moments. The rule then only reads the
            tensors.

    Yields:
        The module of the rule, the tensors, the states in the form of the rule, and the parameter
        (the rounded master) or None.
    """
    own, parameter = _split(states[0])
    values: list[Any] = [own, *states[1:]]
    if _are_tensors(values):
        taken = _taken(kernels, tensors, values, parameter, has_master)
        if taken is not None:
            yield kernels, taken, values, parameter
            return
    elif kernels is not None and (encoded := encoded_kernels_for(tensors[0].device)) is not None:
        whole = [tensor.contiguous() for tensor in tensors] if has_master else tensors
        if encoded.fit(whole, values, parameter, has_master=has_master):
            yield encoded, whole, values, parameter
            return
    for piece in _pieces(*tensors, *states):
        given, (first, *others) = piece[: len(tensors)], piece[len(tensors) :]
        own, parameter = _split(first)
        with opened([own, *others]) as values:
            taken = _taken(kernels, given, values, parameter, has_master)
            if taken is None:
                yield plain, given, values, parameter
            else:
                yield kernels, taken, values, parameter


def _taken(
    kernels: Any,
    tensors: Sequence[torch.Tensor],
    values: Sequence[torch.Tensor],
    parameter: torch.Tensor | None,
    has_master: bool,
) -> Sequence[torch.Tensor] | None:
    """Return the tensors in the form that kernels take; None if kernels cannot take them.

    Kernels take masters and moments in float32, and parameters in fewer bits.
    """
    if kernels is None:
        return None
    if has_master:
        if {value.dtype for value in values} != {torch.float32}:
            return None
        if parameter is not None and parameter.dtype == torch.float32:
            return None
        # The update of a tall matrix is a transposed view.
        tensors = [tensor.contiguous() for tensor in tensors]
    beside = () if parameter is None else (parameter,)
    are_equal = len({each.shape for each in (*tensors, *values, *beside)}) == 1
    return tensors if are_equal and kernels.fit(*tensors, *values, *beside) else None


def _split(state: AnyState) -> tuple[AnyState, torch.Tensor | None]:
    """Return a state, and the parameter if it is the rounded state, else None."""
    if isinstance(state, tierstore.pages.RoundedMaster):
        return state.master, state.parameter
    return state, None


def _are_tensors(states: Sequence[AnyState]) -> bool:
    return not [state for state in states if not isinstance(state, torch.Tensor)]


def _note_changed(master: Any, changed: torch.Tensor | None) -> None:
    """Report to the store whether elements of the parameter were changed; None means no."""
    if changed is not None:
        master.note_changed(changed)


def _batches(
    rows: Sequence[tuple[Any, ...]],
) -> Iterator[list[list[Any]]]:
    """Yield rows in batches. A batch has one list for each column.

    Small tensors are joined, and large ones are cut as by _pieces(). The temporaries of a batch
    then stay in the cache.

    Args:
        rows: the number of the step, and tensors or states of one shape.
    """
    batch: list[tuple[Any, ...]] = []
    numel = 0
    for step, *row in rows:
        for piece in _pieces(*row):
            if batch and numel + piece[0].numel() > _PIECE_NUMEL:
                yield [list(column) for column in zip(*batch, strict=True)]
                batch, numel = [], 0
            batch.append((step, *piece))
            numel += piece[0].numel()
    if batch:
        yield [list(column) for column in zip(*batch, strict=True)]


def _pieces(first: torch.Tensor, *others: AnyState) -> Iterator[tuple[Any, ...]]:
    """Yield the same part of all tensors, small enough that temporaries fit in the cache.

    On a CPU, larger temporaries would be allocated from the system and returned each time. This
    takes several times as long as the computation. Rows of a matrix are not cut. Tensors on a GPU
    are yielded whole.
    """
    if first.is_cpu:
        yield from _cut((first, *others), 0)
    else:
        yield first, *others


def _cut(tensors: tuple[Any, ...], dimension: int) -> Iterator[tuple[Any, ...]]:
    """Cut along a dimension, and along the next dimensions if this does not suffice."""
    first = tensors[0]
    if first.numel() <= _PIECE_NUMEL or dimension == max(1, first.ndim - 1):
        yield tensors
        return
    size = first.shape[dimension]
    rows = max(1, _PIECE_NUMEL * size // first.numel())
    for start in range(0, size, rows):
        part = (*(slice(None),) * dimension, slice(start, start + rows))
        yield from _cut(tuple(tensor[part] for tensor in tensors), dimension + 1)


@functools.cache
def kernels_for(device: torch.device) -> Any:
    """Return the module of kernels that run on a device, or None."""
    name = {"cpu": "muon.kernels.cpu", "cuda": "muon.kernels.gpu"}.get(device.type)
    if name is None:
        return None
    if device.type == "cpu" and torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"):
        return None
    return _checked(name, device, "steps", _agree)


@functools.cache
def encoded_kernels_for(device: torch.device) -> Any:
    """Return the module of kernels that step encoded states directly, or None.

    On a CPU, kernels of ``tierstore`` decode and encode their values.
    """
    if device.type != "cuda":
        return None
    of_states = "steps of states in fewer bytes"
    name = "muon.kernels.gpu_encoded"
    return _checked(name, device, of_states, lambda kernels, device: kernels.agree(device))


_problems: dict[tuple[str, str], str] = {}  # (device, module of kernels) -> why it is not used.


def problem_of_kernels(device: torch.device) -> str | None:
    """Return the reason why some steps on a device do not use kernels, or None."""
    kernels_for(device)
    encoded_kernels_for(device)
    found = [text for (where, _), text in _problems.items() if where == str(device)]
    return "; ".join(dict.fromkeys(found)) or None


def _checked(
    name: str,
    device: torch.device,
    steps: str,
    agree: Callable[[Any, torch.device], bool],
) -> Any:
    """Return a module of kernels if they have the bits of torch operations. Else warn; None."""
    kernels = None
    try:
        kernels = importlib.import_module(name)
        are_equal = agree(kernels, device)
        problem: object = "other bits than torch"
    except Exception as error:
        # Triton or a compiler may be absent, or too old for the GPU. Native kernels may be absent.
        are_equal, problem = False, error
    if not are_equal:
        _problems[str(device), name] = str(problem).strip().partition("\n")[0]
        logger.warning("%s on %s take more passes over memory: %s", steps, device, problem)
    return kernels if are_equal else None


def _agree(kernels: Any, device: torch.device) -> bool:
    """Return whether kernels give the bits of the plain rules, for a few numbers."""
    random = torch.Generator(device).manual_seed(0)
    numbers = torch.randn((5, 4099), generator=random, device=device, dtype=torch.float32)
    for row, size in zip(numbers, (1e-40, 1e-40, 1.0, 1e-40, 1e-20), strict=True):
        row[::11] *= size  # Compilers may flush subnormal numbers to zero.
    grad, buffer, update = numbers[0].bfloat16(), numbers[1].bfloat16(), numbers[2].bfloat16()
    found = []
    for rules in (kernels, plain):
        master, mean, mean_sq = numbers[3].clone(), numbers[1].clone(), numbers[4].square()
        parameter = master.bfloat16()
        parameter[::7] += 1
        average, out = buffer.clone(), torch.empty_like(grad)
        rules.momentum_(grad, average, out, momentum=0.95, nesterov=True, maximize=False)
        rules.muon_(master, parameter, update, decay=0.998, alpha=-0.03)
        rules.adamw_(
            *([master], [parameter], [grad], [mean], [mean_sq]),
            sizes=[1e-3],
            epsilons=[1e-25],
            decay=1 - 1e-3 * 0.1,
            betas=(0.9, 0.95),
            maximize=False,
        )
        found.append([average, out, master, parameter, mean, mean_sq])
    return all(map(torch.equal, *found))
