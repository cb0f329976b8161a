"""Gradients that leave the GPU during backward, each as soon as it is complete."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NoReturn, cast

import torch
from typing_extensions import override

from tierstore.layout.dtensors import is_dtensor, local_tensor, same_placement
from tierstore.layout.parameters import PagedParameter, dtype_name
from tierstore.paging.buffers import BufferPool
from tierstore.paging.device import Copy, Device
from tierstore.paging.fsdp import unreduced_bytes
from tierstore.units import align_up, format_bytes
from tierstore.user_warnings import warn_user

_ALIGNMENT = 64
LEAVING_BYTES_MAX = 1 << 28
"""Most bytes of gradients in flight to the host during backward. One gradient may be larger."""
_ORDERS = (2.0, math.inf)  # Orders of norms: for clipping, and for the largest magnitude.

_ops = torch.ops.aten


@dataclass(slots=True, eq=False)
class LeftGradient:
    """A gradient of this rank that left its device."""

    name: str
    """Name of the parameter."""
    host: torch.Tensor
    """Page-locked tensor of the gradient's shape; complete when ``copy`` has ended."""
    add: Callable[[LeftGradient, torch.Tensor], None]
    """Adds a tensor on the device to the gradient."""
    copy: Copy = field(default_factory=Copy)
    """The copy to ``host``."""
    norms: Mapping[float, torch.Tensor] = field(default_factory=dict)
    """Order -> norm of the gradient: of shape (), on the device."""
    factor: torch.Tensor | None = None
    """Tensor of shape () on the device. The step multiplies the gradient by it and rounds to the
    dtype of ``host``."""

    def refuse(self, what: str, advice: str = "") -> NoReturn:
        """Raise RuntimeError."""
        raise RuntimeError(
            f"the gradient of {self.name!r} is in host memory, and {what} does not reach it there: "
            + (advice or "discard it with zero_grad(set_to_none=True), or open the store without ")
            + ("" if advice else "offload_gradients")
        )


class HostGradient(torch.Tensor):
    """A ``.grad`` that is in host memory.

    It has shape, dtype and device of the gradient that it replaces, and no memory there. The
    operations of training loops give the same bits as on the device: a further backward adds to it,
    norms of order 2 and infinity are known, and the step multiplies it by a tensor of one element.
    ``torch.nn.utils.clip_grad_norm_`` therefore clips it. Any other computation with it raises
    RuntimeError.

    Args:
        left: the gradient.
        like: the tensor that it replaces.
    """

    left: LeftGradient

    @staticmethod
    def __new__(cls, left: LeftGradient, like: torch.Tensor) -> HostGradient:  # noqa: D102
        made: HostGradient = torch.Tensor._make_wrapper_subclass(
            cls, like.shape, dtype=like.dtype, device=like.device
        )
        torch._C._set_throw_on_mutable_data_ptr(made)  # Its address would be 0.
        made.left = left
        return made

    @override
    def __repr__(self) -> str:  # type: ignore[override]
        return f"<gradient of {self.left.name!r} in host memory, {list(self.shape)} {self.dtype}>"

    @override
    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        self.left.refuse("pickle")

    @override
    def share_memory_(self) -> NoReturn:
        """Refuse: the tensor has no memory."""
        self.left.refuse("share_memory_()")

    @override
    def __dlpack__(self, **options: Any) -> NoReturn:
        self.left.refuse("__dlpack__()")

    @property
    def data(self) -> torch.Tensor:
        """The gradient itself: it has no graph."""
        return self.detach()

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        self.left.refuse("an assignment to .data")

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        function: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run an operation of training loops, or refuse any other."""
        further = [*args[2:], *(kwargs or {}).values()]
        has_more = not all(value is None or value is False or value == [] for value in further)
        first, other = args[0], cast("Any", args[1] if len(args) > 1 else None)
        gradients = first if isinstance(first, list | tuple) else [first]
        if not has_more and all(isinstance(each, torch.Tensor) for each in gradients):
            if function is _ops.detach.default:
                return HostGradient(first.left, first)
            if function is _ops.add_.Tensor and _can_add(first, other):
                first.left.add(first.left, other)
                return first
            if function in (_ops.mul_.Tensor, _ops._foreach_mul_.Tensor) and _is_number(other):
                _scale(gradients, other)
                return first if gradients is not first else None
            if function in (_ops.linalg_vector_norm.default, _ops._foreach_norm.Scalar):
                norms = [_norm(each, 2.0 if other is None else float(other)) for each in gradients]
                return norms if gradients is first else norms[0]
        next(_gradients([*args, *(kwargs or {}).values()])).left.refuse(str(function))


def _can_add(gradient: Any, other: Any) -> bool:
    """Return whether a tensor on the device can be added to a gradient."""
    return (
        isinstance(gradient, HostGradient)
        and isinstance(other, torch.Tensor)
        and not isinstance(other, HostGradient)
        and (other.shape, other.device) == (gradient.shape, gradient.device)
    )


def _is_number(tensor: Any) -> bool:
    is_plain = isinstance(tensor, torch.Tensor) and not isinstance(tensor, HostGradient)
    return is_plain and tensor.numel() == 1


def _scale(gradients: Sequence[torch.Tensor], factor: torch.Tensor) -> None:
    for known in _gradients(gradients):  # Check all before one is scaled.
        if known.left.factor is not None:
            known.left.refuse("a second product", "clip once for each step")
    for gradient in gradients:
        if isinstance(gradient, HostGradient):
            gradient.left.factor = factor.detach().reshape(())
        else:
            gradient.mul_(factor)


def _norm(gradient: torch.Tensor, order: float) -> torch.Tensor:
    if not isinstance(gradient, HostGradient):
        return torch._foreach_norm([gradient], order)[0]
    left = gradient.left
    if order not in left.norms:
        left.refuse(f"a norm of order {order}", "norms of order 2 and infinity are known")
    if left.factor is None:
        return left.norms[order]
    if order != math.inf:
        left.refuse("a norm after a product", "clip once for each step")
    return left.norms[order] * left.factor.abs()  # Also of the rounded products.


def _gradients(arguments: Sequence[Any]) -> Iterator[HostGradient]:
    """Yield the HostGradients among arguments, and in lists among arguments."""
    for argument in arguments:
        if isinstance(argument, HostGradient):
            yield argument
        elif isinstance(argument, list | tuple):
            yield from _gradients(argument)


class HostGradients:
    """Host memory for the gradients of all parameters, and the hooks that fill it.

    A hook copies a gradient to its place in host memory. A HostGradient replaces the ``.grad``, or
    the local tensor of a DTensor ``.grad``. When the copy has ended, the rest of the backward can
    use the memory on the device.

    Args:
        device: the GPU of the gradients.
        parameters: the parameters of the pages of this rank.
        dtype: dtype in host memory; None: the dtype of each parameter.
    """

    def __init__(
        self, device: Device, parameters: Sequence[PagedParameter], dtype: torch.dtype | None
    ) -> None:
        self._parameters = list(parameters)
        self._device = device
        self._in_flight: deque[tuple[Copy, int]] = deque()  # Each copy with its bytes.
        self._bytes_in_flight = 0
        pool = BufferPool(1, gradients_bytes(parameters, dtype), page_locked=device.device)
        memory = pool.acquire().tensor
        self._places: dict[str, torch.Tensor] = {}
        for parameter in parameters:
            tensor, nbytes = local_tensor(parameter.tensor), _nbytes(parameter, dtype)
            place = memory[:nbytes].view(dtype or tensor.dtype)
            self._places[parameter.name] = place.view(tensor.shape)
            memory = memory[align_up(nbytes, _ALIGNMENT) :]
        self._hooks: dict[str, Any] = {}
        self._add_hooks()
        self._looks = True  # Look for gradients that FSDP2 keeps, in the first backward only.

    def are_of(self, parameters: Sequence[PagedParameter]) -> bool:
        """Return whether this object was made for these parameters."""
        own = [id(parameter.tensor) for parameter in self._parameters]
        return own == [id(parameter.tensor) for parameter in parameters]

    def take_rest(self) -> None:
        """Copy the gradients that no hook copied.

        These are gradients of the first step, and gradients that a program assigned to ``.grad``.
        """
        self._add_hooks()
        for parameter in self._parameters:
            self._take(parameter)

    def close(self) -> None:
        """Stop moving gradients; block until no copy is in flight."""
        for hook in self._hooks.values():
            hook.remove()
        self._hooks.clear()
        self._places.clear()
        self._wait_until(0)

    def _add_hooks(self) -> None:
        for parameter in self._parameters:  # Some may be unfrozen later.
            if parameter.tensor.requires_grad and parameter.name not in self._hooks:
                add = parameter.tensor.register_post_accumulate_grad_hook
                hook = add(partial(self._take, parameter))  # type: ignore[no-untyped-call]
                self._hooks[parameter.name] = hook

    @torch.no_grad()
    def _take(self, parameter: PagedParameter, tensor: torch.Tensor | None = None) -> None:
        """Copy a gradient to the host, unless it is there already."""
        gradient = parameter.tensor.grad
        if gradient is None or gradient.layout != torch.strided:  # The step refuses it.
            return
        if tensor is not None and gradient.requires_grad:
            return  # The gradient has a graph, which the program may use until the step.
        own, place = local_tensor(gradient), self._places[parameter.name]
        if isinstance(own, HostGradient) or own.shape != place.shape or not own.numel():
            return
        if not same_placement(gradient, parameter.tensor):  # Likewise.
            return
        if torch.promote_types(own.dtype, place.dtype) != place.dtype:
            raise ValueError(
                f"the gradient of {parameter.name!r} is {own.dtype}, but its memory on the host "
                f"is {place.dtype}: open the store with gradient_dtype={own.dtype}"
            )
        left = LeftGradient(parameter.name, place, self._add)
        self._leave(left, own)
        stand_in = HostGradient(left, own)
        if is_dtensor(gradient):
            self._warn_of_unreduced(parameter.tensor)
            # FSDP2 adds the next gradient to this tensor.
            cast("Any", gradient)._local_tensor = stand_in
        else:
            parameter.tensor.grad = stand_in

    def _warn_of_unreduced(self, reduced: torch.Tensor) -> None:
        """Warn if FSDP2 keeps unreduced gradients of other parameters."""
        if not self._looks:
            return
        self._looks = False
        if nbytes := unreduced_bytes(reduced):
            warn_user(
                f"FSDP2 keeps {format_bytes(nbytes)} of gradients on the GPU until the last "
                "backward of a step, because set_requires_gradient_sync(False) was called: "
                "offload_gradients moves only reduced gradients. Without that call, each backward "
                "is reduced, and its gradients leave the GPU",
            )

    @torch.no_grad()
    def _add(self, left: LeftGradient, value: torch.Tensor) -> None:
        """Add to a gradient on the device, so that sum and norm have the bits of torch's sum."""
        if left.factor is not None:
            left.refuse("a further backward", "it was clipped: call zero_grad() before backward()")
        self._wait_until(max(0, LEAVING_BYTES_MAX - left.host.nbytes))
        total = torch.empty(left.host.shape, dtype=left.host.dtype, device=value.device)
        self._device.follow(left.copy)
        self._device.copy_up([left.host], [total])
        self._leave(left, total.add_(value))

    def _leave(self, left: LeftGradient, value: torch.Tensor) -> None:
        """Start to copy a gradient to its place."""
        value = value.to(left.host.dtype)
        left.norms = {order: torch._foreach_norm([value], order)[0] for order in _ORDERS}
        left.copy = self._device.copy_down([value], [left.host])
        self._in_flight.append((left.copy, value.nbytes))
        self._bytes_in_flight += value.nbytes
        self._wait_until(LEAVING_BYTES_MAX)

    def _wait_until(self, bytes_max: int) -> None:
        """Block until at most ``bytes_max`` are in flight; forget copies that have ended."""
        while self._in_flight:
            copy, nbytes = self._in_flight[0]
            if self._bytes_in_flight > bytes_max:
                copy.wait()
            elif not copy.done():
                return
            self._in_flight.popleft()
            self._bytes_in_flight -= nbytes


def left_gradient(parameter: PagedParameter) -> LeftGradient | None:
    """Return the gradient of a parameter if it left its device, else None."""
    gradient = parameter.tensor.grad if parameter.gradient is None else None
    if gradient is None or type(gradient) is torch.Tensor:
        return None
    own = local_tensor(gradient)
    return own.left if isinstance(own, HostGradient) else None


def gradients_bytes(parameters: Iterable[PagedParameter], dtype: torch.dtype | None) -> int:
    """Return the bytes of the gradients of parameters in host memory."""
    return sum(align_up(_nbytes(parameter, dtype), _ALIGNMENT) for parameter in parameters)


def _nbytes(parameter: PagedParameter, dtype: torch.dtype | None) -> int:
    own = local_tensor(parameter.tensor)
    return own.numel() * (dtype or own.dtype).itemsize


def require_offloadable(parameter: PagedParameter, world_size: int) -> None:
    """Refuse a parameter whose gradient cannot leave during backward.

    Raises:
        ValueError: the gradient does not come from ``.grad``, or ranks reduce it after backward.
    """
    if parameter.gradient is not None:
        raise ValueError(
            f"offload_gradients moves `.grad`, but the gradient of {parameter.name!r} comes from "
            "elsewhere: leave offload_gradients out"
        )
    if world_size > 1 and not is_dtensor(parameter.tensor):
        raise ValueError(
            f"parameter {parameter.name!r} is a {dtype_name(parameter.tensor.dtype)} tensor that "
            f"{world_size} ranks hold whole. DDP or the program reduces its gradient after "
            "offload_gradients='backward' would move it: shard the model with FSDP2's "
            "fully_shard(), which reduces it before, or leave offload_gradients out"
        )
