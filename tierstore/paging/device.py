"""Copies between page buffers and the device that computes.

On a GPU each direction has a stream. Events order the copies, so that only code that reads a
copied-back result waits for the device.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from typing_extensions import override

from tierstore.layout.page_layout import PageLayout, RecordViews


class Copy:
    """A copy in flight, which ends with an event. Without an event it has ended."""

    def __init__(
        self, event: torch.cuda.Event | None = None, device: torch.device | None = None
    ) -> None:
        self.event = event
        self._device = device

    def wait(self) -> None:
        """Block until the copy has ended."""
        if self.event is not None:
            # A thread without a device would make a context on the first GPU.
            with torch.cuda.device(self._device):
                self.event.synchronize()

    def done(self) -> bool:
        """Return whether the copy has ended. Never blocks."""
        with contextlib.nullcontext() if self.event is None else torch.cuda.device(self._device):
            return self.event is None or bool(self.event.query())  # type: ignore[no-untyped-call]


@dataclass(slots=True, eq=False)
class DeviceBuffer:
    """Memory of a device for one page."""

    tensor: torch.Tensor
    """uint8, one dimension."""
    last_use: torch.cuda.Event | None = None
    """The end of the last read or write of the memory on the device."""
    viewed: tuple[PageLayout, Sequence[RecordViews]] | None = None
    """The layout of the last page that was viewed here, and its records."""


class Device:
    """The device that computes steps. This base class is the CPU, where copies end at once."""

    is_host = True
    """True if pages are stepped in their host buffers."""
    device = torch.device("cpu")

    @property
    def gpu(self) -> torch.device | None:
        """The device, unless it is the host."""
        return None if self.is_host else self.device

    def allocate(self, nbytes: int) -> DeviceBuffer:
        """Return ``nbytes`` of device memory."""
        return DeviceBuffer(torch.empty(nbytes, dtype=torch.uint8, device="cpu"))

    def copy_in(self, host: torch.Tensor, memory: DeviceBuffer) -> Copy:
        """Copy to the beginning of ``memory``. Computation issued later sees the content."""
        # Without waiting for the current stream, which may be stepping another page.
        return self.copy_up([host], [memory.tensor[: host.numel()]], memory)

    def copy_out(self, memory: DeviceBuffer, host: torch.Tensor) -> Copy:
        """Copy the beginning of ``memory`` to the host, after computation issued before."""
        return self.copy_down([memory.tensor[: host.numel()]], [host], memory)

    def copy_down(
        self,
        sources: Sequence[torch.Tensor],
        hosts: Sequence[torch.Tensor],
        memory: DeviceBuffer | None = None,
    ) -> Copy:
        """Copy tensors to host tensors of the same shapes, after computation issued before.

        Args:
            sources: the tensors.
            hosts: page-locked.
            memory: holds all sources, and is not reused before the copy has ended.
        """
        for source, host in zip(sources, hosts, strict=True):
            host.copy_(source)
        return Copy()

    def copy_up(
        self,
        hosts: Sequence[torch.Tensor],
        targets: Sequence[torch.Tensor],
        memory: DeviceBuffer | None = None,
    ) -> Copy:
        """Copy tensors from the host; computation issued afterwards sees the content.

        Args:
            hosts: page-locked.
            targets: of the same shapes.
            memory: holds all targets. The copy waits only for the last use of this memory. None:
                the copy waits for all computation issued before.
        """
        return self.copy_down(hosts, targets)

    def follow(self, copy: Copy) -> None:
        """Make later copies to the device wait until this copy has ended."""

    def fetch(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Copy]:
        """Start to copy a small tensor to the host; return the host tensor and the copy."""
        return tensor, Copy()

    def note_use(self, memory: DeviceBuffer) -> None:
        """Keep the memory unchanged until all work issued so far has ended."""


class CudaDevice(Device):
    """A GPU with a stream for each direction. Steps are computed on the current stream."""

    is_host = False

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._in = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._out = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    @override
    def allocate(self, nbytes: int) -> DeviceBuffer:
        memory = DeviceBuffer(torch.empty(nbytes, dtype=torch.uint8, device=self.device))
        self.note_use(memory)  # Earlier owners of these bytes may still be using them.
        return memory

    @override
    def copy_down(
        self,
        sources: Sequence[torch.Tensor],
        hosts: Sequence[torch.Tensor],
        memory: DeviceBuffer | None = None,
    ) -> Copy:
        self._out.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._out):
            for source, host in zip(sources, hosts, strict=True):
                host.copy_(source, non_blocking=True)
                # Else torch could reuse the bytes as soon as the caller drops the tensor.
                source.record_stream(self._out)
        ended = self._recorded(self._out)
        if memory is not None:
            memory.last_use = ended
        return Copy(ended, self.device)

    @override
    def copy_up(
        self,
        hosts: Sequence[torch.Tensor],
        targets: Sequence[torch.Tensor],
        memory: DeviceBuffer | None = None,
    ) -> Copy:
        current = torch.cuda.current_stream(self.device)
        if memory is None:
            self._in.wait_stream(current)
        elif memory.last_use is not None:
            self._in.wait_event(memory.last_use)
        with torch.cuda.stream(self._in):
            for host, target in zip(hosts, targets, strict=True):
                target.copy_(host, non_blocking=True)
                target.record_stream(self._in)
        ended = self._recorded(self._in)
        if memory is not None:
            memory.last_use = ended
        current.wait_event(ended)
        return Copy(ended, self.device)

    @override
    def follow(self, copy: Copy) -> None:
        if copy.event is not None:
            self._in.wait_event(copy.event)

    @override
    def fetch(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Copy]:
        host = tensor.to("cpu", non_blocking=True)  # To page-locked memory of torch.
        ended = self._recorded(torch.cuda.current_stream(self.device))
        return host, Copy(ended, self.device)

    @override
    def note_use(self, memory: DeviceBuffer) -> None:
        memory.last_use = self._recorded(torch.cuda.current_stream(self.device))

    def _recorded(self, stream: torch.cuda.Stream) -> torch.cuda.Event:
        # Blocking: a thread that waits for the event sleeps.
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        event.record(stream)
        return event


def open_device(device: torch.device) -> Device:
    """Return the Device of a CPU or CUDA device.

    Raises:
        ValueError: torch finds no CUDA device.
    """
    if device.type != "cuda":
        return Device()
    if not torch.cuda.is_available():
        raise ValueError(
            f"torch {torch.__version__} finds no GPU to step on: see `tierstore doctor`, or leave "
            "step_on out"
        )
    # Resolve the index now: the current device differs between threads.
    index = torch.cuda.current_device() if device.index is None else device.index
    return CudaDevice(torch.device("cuda", index))
