"""Gradients leave the GPU during backward, each as soon as it is there."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from functools import partial

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
        self.names = [parameter.name for parameter in parameters]
        """Names of the parameters."""
        self._parameters = parameters
        self._device = device
        self._in_flight: deque[tuple[Copy, int]] = deque()  # With the bytes of each.
        nbytes = gradients_bytes(parameters)
        pool = BufferPool(1, nbytes, page_locked=not device.is_host)
        memory = pool.acquire().tensor
        self._places: dict[str, torch.Tensor] = {}
        for parameter in parameters:
            tensor, place = parameter.tensor, memory[: parameter.tensor.nbytes]
            self._places[parameter.name] = place.view(tensor.dtype).view(tensor.shape)
            memory = memory[align_up(tensor.nbytes, _ALIGNMENT) :]
        self._hooks = [
            parameter.tensor.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                partial(self._take, parameter)
            )
            for parameter in parameters
            if parameter.tensor.requires_grad
        ]

    def take_rest(self) -> None:
        """Take the gradients that no hook took: of the first step, or assigned to ``.grad``."""
        for parameter in self._parameters:
            self._take(parameter)

    def close(self) -> None:
        """Leave gradients where they are from now on; block until no copy is in flight."""
        for hook in self._hooks:
            hook.remove()
        self._wait_until(0)

    def _take(self, parameter: PagedParameter, tensor: torch.Tensor | None = None) -> None:
        gradient = parameter.tensor.grad
        if gradient is None or isinstance(gradient, HostGradient):
            return
        if gradient.layout != torch.strided:  # The step refuses it.
            return
        place = self._places[parameter.name]
        if gradient.dtype != place.dtype:
            raise ValueError(
                f"the gradient of {parameter.name!r} is {gradient.dtype}, the parameter is "
                f"{place.dtype}: with free_gradients='backward' they must be equal"
            )
        copy = self._device.copy_down([gradient], [place])
        parameter.tensor.grad = HostGradient(parameter.name, gradient, place, copy.wait)
        self._in_flight.append((copy, gradient.nbytes))
        self._wait_until(_BYTES_MAX)

    def _wait_until(self, bytes_max: int) -> None:
        """Block until copies of at most so many bytes are in flight."""
        nbytes = sum(of_copy for _, of_copy in self._in_flight)
        while nbytes > bytes_max:
            copy, of_copy = self._in_flight.popleft()
            copy.wait()
            nbytes -= of_copy


def gradients_bytes(parameters: Iterable[PagedParameter]) -> int:
    """Return the bytes of the gradients of parameters in host memory."""
    return sum(align_up(parameter.tensor.nbytes, _ALIGNMENT) for parameter in parameters)
