"""The update rules of muon.update, in one pass over memory where the device has kernels for them.

Both give the same bits. Kernels for a GPU need Triton, which builds of torch for GPUs bring along,
and a C compiler; those for a CPU are built with the package.
"""

from __future__ import annotations

import functools
import importlib
import logging
from collections.abc import Sequence
from typing import Any

import torch

import tierstore
from muon import update as plain
from muon.encoded import AnyState, opened

logger = logging.getLogger("muon")

_SMALL_NUMEL = 1 << 16  # Smaller tensors of AdamW take less time in batches.


def momentum_(
    grad: torch.Tensor,
    momentum_buffer: AnyState,
    *,
    momentum: float,
    nesterov: bool,
    out: torch.Tensor,
    maximize: bool = False,
) -> None:
    """Do ``muon.update.momentum_``."""
    if _needs_opening(momentum_buffer):
        for grad_piece, state, out_piece in plain.pieces(grad, momentum_buffer, out):
            with opened([state]) as [buffer]:
                momentum_(
                    grad_piece,
                    buffer,
                    momentum=momentum,
                    nesterov=nesterov,
                    out=out_piece,
                    maximize=maximize,
                )
        return
    kernels = kernels_for(grad.device)
    fits = kernels is not None and _fit(kernels, grad, momentum_buffer, out)
    rule = kernels.momentum_ if fits else plain.momentum_
    rule(grad, momentum_buffer, momentum=momentum, nesterov=nesterov, out=out, maximize=maximize)


def muon_(
    master: AnyState,
    update: torch.Tensor,
    *,
    lr: float | torch.Tensor,
    adjusted_lr: float | torch.Tensor,
    weight_decay: float,
    cautious: bool = False,
) -> None:
    """Do ``muon.update.muon_``."""
    options: dict[str, Any] = {
        "lr": lr,
        "adjusted_lr": adjusted_lr,
        "weight_decay": weight_decay,
        "cautious": cautious,
    }
    if _needs_opening(master):
        for update_piece, state in plain.pieces(update, master):
            with opened([state]) as [piece]:
                muon_(piece, update_piece, **options)
        return
    kernels = kernels_for(update.device)
    values, parameter = _parts(master)
    if kernels is not None and not cautious and _fit_masters(kernels, values, parameter):
        dense = update.contiguous()  # That of a tall matrix is a transposed view.
        if _fit(kernels, values, dense):
            decay, alpha = float(1 - lr * weight_decay), -float(adjusted_lr)
            changed = kernels.muon_(values, parameter, dense, decay=decay, alpha=alpha)
            _note_write(master, changed)
            return
    plain.muon_(master, update, **options)


def adamw_(
    masters: Sequence[AnyState],
    grads: Sequence[torch.Tensor],
    exp_avgs: Sequence[AnyState],
    exp_avg_sqs: Sequence[AnyState],
    *,
    steps: Sequence[float],
    lr: float | torch.Tensor,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    maximize: bool = False,
    cautious: bool = False,
) -> None:
    """Do ``muon.update.adamw_``."""
    options: dict[str, Any] = {
        "lr": lr,
        "betas": betas,
        "eps": eps,
        "weight_decay": weight_decay,
        "maximize": maximize,
        "cautious": cautious,
    }
    kernels = kernels_for(grads[0].device) if grads else None
    columns: Sequence[Sequence[Any]] = masters, grads, exp_avgs, exp_avg_sqs, steps
    # A learning rate that is a tensor decays some chunks in its own precision.
    if kernels is not None and not cautious and not isinstance(lr, torch.Tensor):
        left = []
        for row in zip(*columns, strict=True):
            master, grad, *moments, step = row
            values, parameter = _parts(master)
            if grad.numel() < _SMALL_NUMEL:
                left.append(row)
            elif any(map(_needs_opening, (master, *moments))):
                for piece in plain.pieces(grad, master, *moments):
                    _adamw_encoded(*piece, step=step, **options)
            elif not _fit_masters(kernels, values, parameter, *moments) or not _fit(
                kernels, values, grad
            ):
                left.append(row)
            else:
                sizes = _adamw_sizes(step, lr, betas=betas, eps=eps, weight_decay=weight_decay)
                changed = kernels.adamw_(
                    values, parameter, grad, *moments, maximize=maximize, **sizes
                )
                _note_write(master, changed)
        columns = list(zip(*left, strict=True)) or [()] * len(columns)
    *tensors, steps = columns
    plain.adamw_(*tensors, steps=steps, **options)


def _adamw_encoded(grad: torch.Tensor, *states: AnyState, step: float, **options: Any) -> None:
    """Do adamw_() for a piece of which states are encoded."""
    with opened([_parts(state)[0] for state in states]) as decoded:
        master = states[0] if isinstance(states[0], tierstore.RoundedMaster) else decoded[0]
        adamw_([master], [grad], decoded[1:2], decoded[2:], steps=[step], **options)


def _parts(master: AnyState) -> tuple[Any, torch.Tensor | None]:
    """Return master, and the parameter that is the master rounded or None."""
    if isinstance(master, tierstore.RoundedMaster):
        return master.master, master.parameter
    return master, None


def _needs_opening(state: AnyState) -> bool:
    """Return whether a step computes with what opened() gives, not with the state itself."""
    return not isinstance(_parts(state)[0], torch.Tensor)


def _fit(kernels: Any, *states: Any) -> bool:
    """Return whether kernels take states, which have one shape; None stands for none."""
    return bool(kernels.fit(*states)) and len({s.shape for s in states if s is not None}) == 1


def _fit_masters(
    kernels: Any, values: Any, parameter: torch.Tensor | None, *moments: AnyState
) -> bool:
    """Return whether kernels take masters with their moments: in float32, parameters in less."""
    return (
        all(getattr(state, "dtype", None) == torch.float32 for state in (values, *moments))
        and (parameter is None or parameter.dtype != torch.float32)
        and _fit(kernels, values, parameter, *moments)
    )


def _note_write(master: Any, changed: torch.Tensor | None) -> None:
    """Tell the store what kernels found changed, and autograd that they wrote.

    Args:
        master: what they wrote, of which they had only the address.
        changed: whether elements of the parameter were changed; None if not.
    """
    values, parameter = _parts(master)
    if changed is not None:
        master.note_changed(changed)
    torch.autograd.graph.increment_version(values if parameter is None else parameter)


@functools.cache
def kernels_for(device: torch.device) -> Any:
    """Return the module of kernels that run on a device, or None."""
    name = {"cpu": "muon.cpu_kernels", "cuda": "muon.gpu_kernels"}.get(device.type)
    if name is None:
        return None
    if device.type == "cpu" and torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"):
        return None
    kernels = None
    try:
        kernels = importlib.import_module(name)
        are_equal = _agree(kernels, device)
        problem: object = "other bits than torch"
    except Exception as error:
        # Triton or a compiler may be absent, or too old for the GPU; nothing native may be built.
        are_equal, problem = False, error
    if not are_equal:
        logger.warning("steps on %s take more passes over memory: %s", device, problem)
    return kernels if are_equal else None


def _agree(kernels: Any, device: torch.device) -> bool:
    """Return whether kernels give the bits of the plain rules, for a few numbers."""
    random = torch.Generator(device).manual_seed(0)
    numbers = torch.randn((5, 4099), generator=random, device=device, dtype=torch.float32)
    grad, buffer, update = numbers[0].bfloat16(), numbers[1].bfloat16(), numbers[2].bfloat16()
    found = []
    for rules in (kernels, plain):
        values, moments = numbers[3].clone(), [numbers[1].clone(), numbers[4].square()]
        parameter = values.bfloat16()
        parameter[::7] += 1
        master = tierstore.RoundedMaster(values, parameter, lambda changed: None)
        average, out = buffer.clone(), torch.empty_like(grad)
        rules.momentum_(grad, average, momentum=0.95, nesterov=True, out=out, maximize=False)
        if rules is plain:
            plain.muon_(master, update, lr=0.02, adjusted_lr=0.03, weight_decay=0.1)
            plain.adamw_([master], [grad], moments[:1], moments[1:], steps=[3.0], lr=1e-3, **_ADAMW)
        else:
            rules.muon_(values, parameter, update, decay=float(1 - 0.02 * 0.1), alpha=-0.03)
            sizes = _adamw_sizes(3.0, 1e-3, **_ADAMW)
            rules.adamw_(values, parameter, grad, *moments, maximize=False, **sizes)
        found.append([average, out, values, parameter, *moments])
    return all(map(torch.equal, *found))


_ADAMW: dict[str, Any] = {"betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}


def _adamw_sizes(
    step: float, lr: float, *, betas: tuple[float, float], eps: float, weight_decay: float
) -> dict[str, Any]:
    """Return the numbers that the kernel of AdamW takes for a step."""
    return {
        "decay": 1 - lr * weight_decay,
        "betas": betas,
        "root": (1 - betas[1] ** step) ** 0.5,
        "eps": eps,
        "size": lr / (1 - betas[0] ** step),
    }
