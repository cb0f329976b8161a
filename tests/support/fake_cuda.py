"""CUDA streams and events without a GPU: every copy runs as late as events allow.

Device memory is plain memory, registered memory counts as page-locked, and computation on the
current stream happens at once. A seed alone decides which copies end earlier than they must.

A copy to the host writes garbage first, and reads the device when it is waited for. A copy to the
device happens at once if the current stream waits for it; when it ends, it checks that its source
and its target were not changed.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import random
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode

from tierstore.paging import page, page_table, views
from tierstore.paging.device import CudaDevice, Device
from tierstore.threads import Result

GARBAGE = 205


def is_mapped(address: int, nbytes: int) -> bool:
    """Return whether this process maps all of this memory, of whole pages."""
    found = (ctypes.c_ubyte * (nbytes // mmap.PAGESIZE))()
    return ctypes.CDLL(None).mincore(ctypes.c_void_p(address), ctypes.c_size_t(nbytes), found) == 0


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)


class _Copy:
    """A copy on a stream, between page-locked and device memory."""

    def __init__(
        self, cuda: FakeCuda, source: torch.Tensor, target: torch.Tensor, *, to_host: bool
    ) -> None:
        self.cuda = cuda
        self.source = source
        self.target = target
        self.to_host = to_host
        self.taken: torch.Tensor | None = None  # The bytes that were read.
        self.is_checked = self.has_ended = False

    def take(self) -> None:
        """Take effect for computation on the device."""
        if self.has_ended:
            return
        if self.taken is None and self.to_host:
            self.taken = self.source.clone()
        elif self.taken is None:
            self.taken = self._read()
            self.target.copy_(self.taken)

    def _read(self) -> torch.Tensor:
        """Return the source as the device sees it: with what events say was copied there."""
        arrived = [c for c in self.cuda.outgoing if c.taken is not None and self.reads(c.target)]
        before = [copy.target.clone() for copy in arrived]
        for copy in arrived:
            copy.target.copy_(copy.taken)
        found = self.source.clone()
        for copy, bytes_ in zip(arrived, before, strict=True):
            copy.target.copy_(bytes_)
        return found

    def end(self) -> None:
        """Also take effect for the host."""
        self.take()
        if self.to_host:
            self.target.copy_(self.taken)
            self.cuda.outgoing.remove(self)
        else:
            self.check()
            self.cuda.incoming.remove(self)
        self.has_ended = True
        del self.source, self.target, self.taken  # The memory may be reused now.

    def reads(self, memory: torch.Tensor) -> bool:
        """Return whether the source and this memory overlap."""
        distance = memory.data_ptr() - self.source.data_ptr()
        return -memory.nbytes < distance < self.source.nbytes

    def check(self) -> None:
        """Note a hazard if the source was changed after it was read."""
        assert self.taken is not None
        if not self.is_checked and not torch.equal(_bytes(self._read()), _bytes(self.taken)):
            self.cuda.hazards.append("memory was changed while it was copied to the device")
        self.is_checked = True


class _Fetch:
    """A copy on the current stream to memory that torch keeps until it has ended."""

    def __init__(self, source: torch.Tensor) -> None:
        self.value = source.clone()
        self.host = ~self.value

    def take(self) -> None:
        """Do nothing: the device never uses the host's memory."""

    def end(self) -> None:
        """Take effect for the host."""
        self.host.copy_(self.value)


class _Stream:
    def __init__(self, cuda: FakeCuda) -> None:
        self.cuda = cuda
        self.items: list[_Copy | _Fetch | _Event] = []  # An event in the list is waited for.
        self.taken = self.ended = 0  # Number of items done, for the device and for the host.
        self.seen = 0  # Computation before this time ends before the next item.
        cuda.streams.append(self)

    def wait_event(self, event: _Event) -> None:
        with self.cuda.mutex:
            self.items.append(event)
            self.seen = max(self.seen, event.covers)
            if self is self.cuda.current:
                event.take()

    def wait_stream(self, stream: _Stream) -> None:
        event = _Event(self.cuda)
        event.record(stream)
        self.wait_event(event)


class _Event:
    def __init__(self, cuda: FakeCuda) -> None:
        self.cuda = cuda

    def record(self, stream: _Stream) -> None:
        with self.cuda.mutex:
            self.stream, self.position = stream, len(stream.items)
            now = self.cuda.tick()
            self.covers = now if stream is self.cuda.current else stream.seen

    def synchronize(self) -> None:
        with self.cuda.mutex:
            self.cuda.need_device()
            self.end()

    def query(self) -> bool:
        with self.cuda.mutex:
            self.cuda.need_device()
            self.cuda.go_on()
            return self.stream.ended >= self.position

    def take(self) -> None:
        """Let everything before the event take effect for the device."""
        while self.stream.taken < self.position:
            self.stream.taken += 1
            self.stream.items[self.stream.taken - 1].take()

    def end(self) -> None:
        """Let everything before the event also take effect for the host."""
        while self.stream.ended < self.position:
            self.stream.ended += 1  # First: memory that is freed then may end the rest.
            self.stream.items[self.stream.ended - 1].end()


class _OnStream(TorchFunctionMode):
    """Puts copies on a stream instead of making them."""

    def __init__(self, cuda: FakeCuda, stream: _Stream) -> None:
        super().__init__()
        self.cuda = cuda
        self.stream = stream

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.Tensor.copy_ and kwargs == {"non_blocking": True}:
            self.cuda.issue(self.stream, args[1], args[0])
            return args[0]
        return func(*args, **(kwargs or {}))


class FakeCuda:
    """Replacement of torch.cuda for CudaDevice.

    Args:
        seed: decides what ends when.
        pace: how likely it is that something ends where it could: 0 for as late as possible.
    """

    def __init__(self, seed: int, pace: float) -> None:
        self.mutex = threading.RLock()
        self.streams: list[_Stream] = []
        self.current = _Stream(self)
        self.incoming: list[_Copy] = []  # Copies to the device that have not ended.
        self.outgoing: list[_Copy] = []  # Copies to the host that have not ended.
        self.hazards: list[str] = []
        """Descriptions of races that were found."""
        self.threads: list[_LateThread] = []
        self._random = random.Random(seed)
        self._pace = pace
        self._clock = 0
        self._own = threading.local()  # The device of each thread.
        self.bytes_up = self.bytes_down = 0
        self.locked: dict[int, int] = {}
        """Address -> bytes of page-locked memory."""
        self._uses: dict[int, int] = {}  # Address -> time of the last computation there.

    @property
    def pending(self) -> int:
        """Number of copies that have not ended."""
        with self.mutex:
            return sum(
                isinstance(item, _Copy)
                for stream in self.streams
                for item in stream.items[stream.ended :]
            )

    def tick(self) -> int:
        self._clock += 1
        return self._clock

    def chance(self) -> bool:
        return self._random.random() < self._pace

    def go_on(self) -> None:
        """End some of the items in flight."""
        while self.chance():
            stream = self._random.choice(self.streams)
            event = _Event(self)
            event.stream, event.position = stream, min(stream.ended + 1, len(stream.items))
            event.end()

    def run_late(self) -> None:
        """Run the tasks of late threads that were not waited for."""
        for thread in self.threads:
            thread.close()

    def issue(self, stream: _Stream, source: torch.Tensor, target: torch.Tensor) -> None:
        with self.mutex:
            if not target.numel():
                return
            self.go_on()
            to_host = self.is_locked(target)
            if to_host == self.is_locked(source):
                self.hazards.append("a copy is not between page-locked and device memory")
            self._look_for_uses(stream, source if to_host else target)
            if to_host:
                for copy in self.incoming:
                    if copy.reads(target):  # It has taken effect for the device.
                        copy.check()
                _bytes(target).fill_(GARBAGE)
            copy = _Copy(self, source, target, to_host=to_host)
            stream.items.append(copy)
            if to_host:
                self.bytes_down += source.nbytes
                self.outgoing.append(copy)
            else:
                self.bytes_up += source.nbytes
                self.incoming.append(copy)
                self.computes_in(target)

    def fetch(self, source: torch.Tensor) -> torch.Tensor:
        with self.mutex:
            fetch = _Fetch(source)
            self.current.items.append(fetch)
            return fetch.host

    def computes_in(self, memory: torch.Tensor) -> None:
        """Note that something is computed in this device memory from now on.

        So it is with all that was copied there.
        """
        with self.mutex:
            self._uses[memory.data_ptr()] = self.tick()

    def _look_for_uses(self, stream: _Stream, memory: torch.Tensor) -> None:
        start = memory.data_ptr()
        used = [at for at in self._uses if start <= at < start + memory.nbytes]
        if any(self._uses[at] > stream.seen for at in used):
            self.hazards.append("a copy does not wait for what is computed in its memory")
        for at in used:
            del self._uses[at]

    def lock(self, *tensors: torch.Tensor) -> None:
        """Let tensors be in page-locked memory."""
        for tensor in tensors:
            self.locked[tensor.data_ptr()] = tensor.nbytes

    def is_locked(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor is in page-locked memory."""
        address = tensor.data_ptr()
        return any(start <= address < start + size for start, size in self.locked.items())

    @contextlib.contextmanager
    def on_device(self, device: torch.device) -> Iterator[None]:
        """Make this the device of the thread."""
        before, self._own.device = getattr(self._own, "device", None), device
        yield
        self._own.device = before

    def need_device(self) -> None:
        """Note a thread that would make a context on the first GPU."""
        if getattr(self._own, "device", None) is None:
            self.hazards.append("a thread calls CUDA without the device of the parameters")

    def synchronize(self) -> None:
        """Let everything end that was issued."""
        with self.mutex:
            for stream in self.streams:
                event = _Event(self)
                event.stream, event.position = stream, len(stream.items)
                event.end()

    def register(self, address: int, nbytes: int, flags: int) -> int:
        with self.mutex:
            self.need_device()
            self.locked[address] = nbytes
        return 0

    def unregister(self, address: int) -> None:
        with self.mutex:
            if not is_mapped(address, self.locked.pop(address)):
                self.hazards.append("memory was unmapped while it was page-locked")


class _Task(Result[Any]):
    def __init__(self, thread: _LateThread, call: Callable[[], Any]) -> None:
        self._thread = thread
        super().__init__()
        self.call = call

    @property  # type: ignore[override]
    def is_set(self) -> bool:
        if not self._has_ended and self._thread.cuda.chance():
            self._thread.run_to(self)
        return self._has_ended

    @is_set.setter
    def is_set(self, value: bool) -> None:
        self._has_ended = value

    def wait(self, timeout_s: float | None = None) -> bool:
        self._thread.run_to(self)
        return super().wait(timeout_s)


class _LateThread:
    """One thread, which runs a task when the task is waited for."""

    def __init__(self, cuda: FakeCuda) -> None:
        self.cuda = cuda
        self._tasks: list[_Task] = []
        cuda.threads.append(self)

    def submit(self, function: Callable[..., Any], *args: Any) -> _Task:
        with self.cuda.mutex:
            task = _Task(self, lambda: function(*args))
            self._tasks.append(task)
            return task

    def run_to(self, last: _Task) -> None:
        with self.cuda.mutex:
            while last in self._tasks:
                self._run_first()

    def close(self) -> None:
        with self.cuda.mutex:
            while self._tasks:
                self._run_first()

    def _run_first(self) -> None:
        task = self._tasks.pop(0)
        task.settle(task.call)


@contextlib.contextmanager
def fake_cuda(
    seed: int = 0, pace: float = 0, *, real_thread: bool = False, parameters: str = "cuda"
) -> Iterator[FakeCuda]:
    """Have a CUDA device that there is not, with all parameters, for the stores opened within.

    Afterwards nothing may be under way, and nothing have gone wrong.

    Args:
        seed: decides what ends when.
        pace: how likely something ends earlier than it has to.
        real_thread: keep the store's thread for late writes; else what it does is done
            when it is waited for, or when the seed says so.
        parameters: the device that they are on: "cuda", or "cpu" beside it.
    """
    cuda = FakeCuda(seed, pace)
    runtime = SimpleNamespace(cudaHostRegister=cuda.register, cudaHostUnregister=cuda.unregister)
    with contextlib.ExitStack() as stack:
        stack.enter_context(
            mock.patch.multiple(
                torch.cuda,
                Stream=lambda device: _Stream(cuda),
                Event=lambda blocking: _Event(cuda),
                stream=lambda stream: _OnStream(cuda, stream),
                current_stream=lambda device: cuda.current,
                cudart=lambda: runtime,
                device=cuda.on_device,
                synchronize=lambda device: cuda.synchronize(),
            )
        )
        # Copies in flight keep their tensors here in any case.
        stack.enter_context(mock.patch.object(torch.Tensor, "record_stream"))
        convert = torch.Tensor.to

        def to(tensor: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
            is_fetch = args == ("cpu",) and options == {"non_blocking": True}
            return cuda.fetch(tensor) if is_fetch else convert(tensor, *args, **options)

        stack.enter_context(mock.patch.object(torch.Tensor, "to", to))
        # Tiers are planned for a GPU; tensors of the device are plain tensors.
        place = mock.patch.object(page_table, "device_of", return_value=torch.device(parameters))
        stack.enter_context(place)
        stack.enter_context(
            mock.patch.object(torch.Tensor, "is_pinned", lambda tensor: cuda.is_locked(tensor))
        )
        plain = mock.patch.object(page_table, "open_device")
        stack.enter_context(plain).side_effect = lambda device: (
            CudaDevice(torch.device("cpu")) if device.type == "cuda" else Device()
        )
        # Changes of parameters on a device are not known before the sweep ends.
        stack.enter_context(mock.patch.object(views, "_rounds_to", return_value=False))
        if not real_thread:
            threads = mock.patch.object(page, "Threads")
            stack.enter_context(threads).side_effect = lambda *_, **__: _LateThread(cuda)
        yield cuda
    assert not cuda.hazards
    assert not cuda.pending
