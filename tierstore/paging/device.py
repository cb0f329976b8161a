"""Copies between page buffers and the memory of the device that computes.

On a GPU each direction has a stream of its own, and order is kept by events: nothing waits
for the device but who needs what a copy brought to the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

# Besides the pages that are stepped, one page is copied in and one is copied out.
MOVING_PAGES = 2


class Copy(Protocol):
    """A copy under way."""

    def wait(self) -> None:
        """Block until it has ended."""

    def done(self) -> bool:
        """Return whether it has. Never blocks."""


@dataclass(slots=True, eq=False)
class DeviceBuffer:
    """Room for one page in the memory of a device."""

    tensor: torch.Tensor
    """uint8, one dimension."""
    last_use: torch.cuda.Event | None = None
    """Until then something on the device reads it, or writes to it."""


class Device(Protocol):
    """Where steps are computed, and the way there and back."""

    @property
    def device(self) -> torch.device:
        """As torch names it."""

    @property
    def is_host(self) -> bool:
        """Whether pages are stepped in their host buffers."""

    def allocate(self, nbytes: int) -> DeviceBuffer:
        """Return ``nbytes`` of its memory."""

    def copy_in(self, host: torch.Tensor, memory: DeviceBuffer) -> Copy:
        """Copy to the beginning of ``memory``. What is computed there afterwards finds it."""

    def copy_out(self, memory: DeviceBuffer, host: torch.Tensor) -> Copy:
        """Copy the beginning of ``memory`` to the host, as computed before."""

    def copy_down(self, sources: Sequence[torch.Tensor], hosts: Sequence[torch.Tensor]) -> Copy:
        """Copy tensors to tensors on the host, of the same shapes."""

    def copy_up(self, hosts: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]) -> Copy:
        """Copy tensors from the host; what is computed afterwards finds them."""

    def fetch(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Copy]:
        """Return where on the host a small tensor will be, as computed before, and its copy."""

    def note_use(self, memory: DeviceBuffer) -> None:
        """Keep the memory as it is until all that was issued so far has ended."""


class _Ended:
    def wait(self) -> None:
        """See Copy.wait."""

    def done(self) -> bool:
        """See Copy.done."""
        return True


class PlainDevice:
    """The CPU: memory that is not page-locked, and copies that end at once."""

    device = torch.device("cpu")
    is_host = True

    def allocate(self, nbytes: int) -> DeviceBuffer:
        """See Device.allocate."""
        return DeviceBuffer(torch.empty(nbytes, dtype=torch.uint8))

    def copy_in(self, host: torch.Tensor, memory: DeviceBuffer) -> Copy:
        """See Device.copy_in."""
        return self.copy_up([host], [memory.tensor[: host.numel()]])

    def copy_out(self, memory: DeviceBuffer, host: torch.Tensor) -> Copy:
        """See Device.copy_out."""
        return self.copy_down([memory.tensor[: host.numel()]], [host])

    def copy_down(self, sources: Sequence[torch.Tensor], hosts: Sequence[torch.Tensor]) -> Copy:
        """See Device.copy_down."""
        for source, host in zip(sources, hosts, strict=True):
            host.copy_(source)
        return _Ended()

    def copy_up(self, hosts: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]) -> Copy:
        """See Device.copy_up."""
        return self.copy_down(hosts, targets)

    def fetch(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Copy]:
        """See Device.fetch."""
        return tensor, _Ended()

    def note_use(self, memory: DeviceBuffer) -> None:
        """See Device.note_use."""


class _EventCopy:
    def __init__(self, event: torch.cuda.Event) -> None:
        self._event = event

    def wait(self) -> None:
        """See Copy.wait."""
        self._event.synchronize()

    def done(self) -> bool:
        """See Copy.done."""
        return bool(self._event.query())  # type: ignore[no-untyped-call]


class CudaDevice:
    """A GPU, with a stream for each direction. Steps are computed on the current stream."""

    is_host = False

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._in = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._out = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def allocate(self, nbytes: int) -> DeviceBuffer:
        """See Device.allocate."""
        memory = DeviceBuffer(torch.empty(nbytes, dtype=torch.uint8, device=self.device))
        self.note_use(memory)  # Whoever had these bytes before may still be using them.
        return memory

    def copy_in(self, host: torch.Tensor, memory: DeviceBuffer) -> Copy:
        """See Device.copy_in."""
        # Not behind the current stream, where another page is being stepped.
        if memory.last_use is not None:
            self._in.wait_event(memory.last_use)
        with torch.cuda.stream(self._in):
            memory.tensor[: host.numel()].copy_(host, non_blocking=True)
        memory.last_use = self._recorded(self._in)
        torch.cuda.current_stream(self.device).wait_event(memory.last_use)
        return _EventCopy(memory.last_use)

    def copy_out(self, memory: DeviceBuffer, host: torch.Tensor) -> Copy:
        """See Device.copy_out."""
        copy = self.copy_down([memory.tensor[: host.numel()]], [host])
        memory.last_use = self._recorded(self._out)
        return copy

    def copy_down(self, sources: Sequence[torch.Tensor], hosts: Sequence[torch.Tensor]) -> Copy:
        """See Device.copy_down."""
        self._out.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._out):
            for source, host in zip(sources, hosts, strict=True):
                host.copy_(source, non_blocking=True)
                # Or its bytes could be given to others once the caller lets go of it.
                source.record_stream(self._out)
        return _EventCopy(self._recorded(self._out))

    def copy_up(self, hosts: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]) -> Copy:
        """See Device.copy_up."""
        current = torch.cuda.current_stream(self.device)
        self._in.wait_stream(current)
        with torch.cuda.stream(self._in):
            for host, target in zip(hosts, targets, strict=True):
                target.copy_(host, non_blocking=True)
                target.record_stream(self._in)
        ended = self._recorded(self._in)
        current.wait_event(ended)
        return _EventCopy(ended)

    def fetch(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Copy]:
        """See Device.fetch."""
        host = tensor.to("cpu", non_blocking=True)  # Into page-locked memory of torch.
        return host, _EventCopy(self._recorded(torch.cuda.current_stream(self.device)))

    def note_use(self, memory: DeviceBuffer) -> None:
        """See Device.note_use."""
        memory.last_use = self._recorded(torch.cuda.current_stream(self.device))

    def _recorded(self, stream: torch.cuda.Stream) -> torch.cuda.Event:
        # Who waits for it sleeps.
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        event.record(stream)
        return event


def open_device(device: torch.device) -> Device:
    """Return the way to a CPU or CUDA device."""
    return CudaDevice(device) if device.type == "cuda" else PlainDevice()
