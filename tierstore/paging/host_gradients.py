"""Gradients leave the GPU during backward, each as soon as it is there."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import torch

from tierstore.layout.host_gradient import HostGradient
from tierstore.layout.parameters import PagedParameter
from tierstore.paging.buffers import BufferPool
from tierstore.paging.device import Copy, Device
from tierstore.units import align_up

_ALIGNMENT = 64
_BYTES_MAX = 1 << 28  # On their way to the host, while backward makes further gradients.


class HostGradients:
    """Host memory for the gradients of all parameters, and the hooks that fill it.

    A hook copies a gradient to its place, and lets a HostGradient be the ``.grad``. The memory on
    the device is free for the rest of the backward once the copy has ended.

    Args:
        device: the device of the gradients.
        parameters: all parameters, of one process.
    """

    def __init__(self, device: Device, parameters: Sequence[PagedParameter]) -> None:
        self._parameters = list(parameters)
        self._device = device
        self._in_flight: deque[tuple[Copy, int]] = deque()  # With the bytes of each.
        self._bytes_in_flight = 0
        pool = BufferPool(1, gradients_bytes(parameters), page_locked=not device.is_host)
        memory = pool.acquire().tensor
        self._places: dict[str, torch.Tensor] = {}
        for parameter in parameters:
            tensor, place = parameter.tensor, memory[: parameter.tensor.nbytes]
            self._places[parameter.name] = place.view(tensor.dtype).view(tensor.shape)
            memory = memory[align_up(tensor.nbytes, _ALIGNMENT) :]
        self._hooks: dict[str, Any] = {}
        self._add_hooks()

    def are_of(self, parameters: Sequence[PagedParameter]) -> bool:
        """Return whether these are the parameters."""
        own = [id(parameter.tensor) for parameter in self._parameters]
        return own == [id(parameter.tensor) for parameter in parameters]

    def offload_rest(self) -> None:
        """Copy what no hook copied, and block until all gradients are on the host.

        Those are gradients of the first step, and those that a program assigned to ``.grad``.
        """
        self._add_hooks()
        for parameter in self._parameters:
            self._offload(parameter)
        self._wait_until(0)

    def close(self) -> None:
        """Leave gradients where they are from now on; block until no copy is in flight."""
        for hook in self._hooks.values():
            hook.remove()
        self._hooks.clear()
        self._places.clear()
        self._wait_until(0)

    def _add_hooks(self) -> None:
        for parameter in self._parameters:  # Some may be unfrozen later.
            if parameter.tensor.requires_grad and parameter.name not in self._hooks:
                add = parameter.tensor.register_post_accumulate_grad_hook
                hook = add(partial(self._offload, parameter))  # type: ignore[no-untyped-call]
                self._hooks[parameter.name] = hook

    @torch.no_grad()
    def _offload(self, parameter: PagedParameter, tensor: torch.Tensor | None = None) -> None:
        """Copy a gradient to the host, unless it is there."""
        gradient, place = parameter.tensor.grad, self._places[parameter.name]
        if gradient is None or isinstance(gradient, HostGradient):
            return
        is_converted = parameter.tensor.dtype != place.dtype or gradient.shape != place.shape
        if is_converted or gradient.layout != torch.strided:  # The step refuses it.
            return
        if gradient.dtype != place.dtype:
            raise ValueError(
                f"the gradient of {parameter.name!r} is {gradient.dtype}, the parameter is "
                f"{place.dtype}: with free_gradients='backward' they must be equal; else pass "
                "free_gradients=True"
            )
        copy = self._device.copy_down([gradient], [place])
        parameter.tensor.grad = HostGradient(parameter.name, gradient, place, copy.wait)
        self._in_flight.append((copy, gradient.nbytes))
        self._bytes_in_flight += gradient.nbytes
        self._wait_until(_BYTES_MAX)

    def _wait_until(self, bytes_max: int) -> None:
        """Block until copies of at most so many bytes are in flight; forget those that ended."""
        while self._in_flight:
            copy, nbytes = self._in_flight[0]
            if self._bytes_in_flight > bytes_max:
                copy.wait()
            elif not copy.done():
                return
            self._in_flight.popleft()
            self._bytes_in_flight -= nbytes


def gradients_bytes(parameters: Iterable[PagedParameter]) -> int:
    """Return the bytes of the gradients of parameters in host memory."""
    return sum(align_up(parameter.tensor.nbytes, _ALIGNMENT) for parameter in parameters)
