"""Sources: the gradients and parameters of pages, copied to the device that steps the pages.

Parameters, gradients and steps each have a place: a GPU, or the host. A slab is memory for one page
at the place of the step. Tensors from another place are copied there, and parameters copied back.

    parameters   gradients   stepped on   slabs hold
    GPU          GPU         GPU          nothing: no slab is needed
    GPU          host        GPU          gradients
    GPU          GPU         host         gradients and parameters
    GPU          host        host         parameters, and gradients that were clipped
    host         host        GPU          gradients and parameters
    host         host        host         nothing
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass

import torch
from typing_extensions import override

from tierstore.layout.chunks import Chunk
from tierstore.layout.dtensors import local_tensor
from tierstore.layout.encodings import MASTER
from tierstore.layout.page_layout import PageLayout
from tierstore.layout.parameters import PagedParameter
from tierstore.paging.buffers import BufferPool
from tierstore.paging.device import Copy, Device, DeviceBuffer
from tierstore.paging.host_gradients import LeftGradient, left_gradient
from tierstore.paging.page import Page
from tierstore.paging.tier_plan import MOVING_PAGES, MOVING_PAGES_OF_GPU
from tierstore.paging.views import Source
from tierstore.units import SECTOR_BYTES, align_up

_ALIGNMENT = 64

_Key = tuple[str, Chunk]


@dataclass(frozen=True, slots=True, kw_only=True)
class Places:
    """The devices of a step: at most one GPU and the host."""

    parameters: Device
    step: Device
    offloads: bool = False
    """True if gradients leave the GPU of the parameters during backward."""
    gradient_dtype: torch.dtype | None = None
    """Dtype of gradients in memory of the store; None: the dtype of each parameter."""

    @property
    def gpu(self) -> Device:
        """The GPU, if one of the devices is a GPU; else the host."""
        return self.step if self.parameters.is_host else self.parameters

    @property
    def moves_parameters(self) -> bool:
        """True if parameters are not on the device that steps pages."""
        return self.parameters.is_host != self.step.is_host

    @property
    def has_slabs(self) -> bool:
        """True if gradients or parameters are copied to the device that steps pages."""
        return self.moves_parameters or (self.offloads and not self.parameters.is_host)

    def dtype_of(self, parameter: torch.dtype) -> torch.dtype:
        """Return the dtype of gradients in slabs, given the dtype of their parameters."""
        return self.gradient_dtype or parameter

    def slabs_bytes(self, layouts: Iterable[PageLayout], window: int) -> int:
        """Return the bytes of the slabs of some pages with the settings of these places."""
        if not self.has_slabs:
            return 0
        return slabs_bytes(
            layouts,
            slabs_count(window, on_gpu=not self.step.is_host),
            moves_parameters=self.moves_parameters,
            gradient_dtype=self.gradient_dtype,
        )


def slabs_count(window: int, *, on_gpu: bool) -> int:
    """Return the number of slabs.

    Args:
        window: most pages that are stepped at once.
        on_gpu: whether a GPU steps pages.
    """
    return window + (MOVING_PAGES_OF_GPU if on_gpu else MOVING_PAGES)


def slabs_bytes(
    layouts: Iterable[PageLayout],
    count: int,
    *,
    moves_parameters: bool,
    gradient_dtype: torch.dtype | None,
) -> int:
    """Return the bytes of the slabs of some pages if all their parameters have gradients.

    Args:
        layouts: the layouts of the pages.
        count: number of slabs.
        moves_parameters: whether slabs also hold parameters.
        gradient_dtype: dtype of gradients; None: the dtype of each parameter.
    """

    def slab_bytes(layout: PageLayout) -> int:
        nbytes = 0
        for (_, chunk), records in layout.records.items():
            dtype = records[MASTER][0].parameter.dtype
            sizes = [(gradient_dtype or dtype).itemsize, dtype.itemsize * moves_parameters]
            nbytes += sum(align_up(chunk.numel * size, _ALIGNMENT) for size in sizes)
        return align_up(nbytes, SECTOR_BYTES)

    return count * max(map(slab_bytes, layouts), default=0)


def require_page_locked(parameter: PagedParameter) -> None:
    """Refuse a parameter on the host if a GPU cannot copy it during computation.

    Raises:
        ValueError: its memory is pageable.
    """
    own = local_tensor(parameter.tensor)
    if own.numel() and not own.is_pinned():
        raise ValueError(
            f"parameter {parameter.name!r} is in pageable host memory, and step_on is a GPU, which "
            "copies parameters from page-locked memory only: put them there with FSDP2's "
            "CPUOffloadPolicy() or tensor.pin_memory()"
        )


class Moved(Source):
    """The gradients and parameters of one page, some of them as copies in a slab.

    Args:
        slab: memory where the page is stepped.
        places: the devices.
        page: the page.
    """

    def __init__(self, slab: DeviceBuffer, places: Places, page: Page) -> None:
        super().__init__(page.source.local_chunks)
        self.slab = slab
        self._page = page
        self._places = places
        self._values: dict[_Key, torch.Tensor] = {}
        self._gradients: dict[_Key, torch.Tensor] = {}
        self._left: dict[_Key, LeftGradient] = {}
        self._position = 0
        sources, targets = [], []
        for key in page.layout.records:
            name, chunk = key
            parameter = page.parameters[name]
            if places.moves_parameters:
                sources.append(page.source.values(parameter, chunk))
                self._values[key] = self._reserve(sources[-1], sources[-1].dtype)
                targets.append(self._values[key])
            gradient = page.source.gradient(parameter, chunk)
            if gradient is None:
                continue
            left = left_gradient(parameter)
            if left is not None:
                self._left[key] = left
            is_on_host = left is not None or places.parameters.is_host
            if is_on_host == places.step.is_host:
                self._gradients[key] = gradient
                continue
            self._gradients[key] = self._reserve(gradient, places.dtype_of(parameter.tensor.dtype))
            sources.append(gradient)
            targets.append(self._gradients[key])
        if places.step.is_host:
            self._copy = places.gpu.copy_down(sources, targets)
        else:
            for left in self._left.values():
                places.gpu.follow(left.copy)
            self._copy = places.gpu.copy_up(sources, targets, slab)
        self.back: Copy | None = None
        """The copy of the parameters back."""
        self._is_given_back = False

    def _reserve(self, like: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return memory of the slab for a tensor."""
        nbytes = like.numel() * dtype.itemsize
        memory = self.slab.tensor[self._position : self._position + nbytes]
        self._position += align_up(nbytes, _ALIGNMENT)
        return memory.view(dtype).view(like.shape)

    def arrive(self) -> None:
        """Order later computation after the copies of gradients and parameters. The host waits."""
        if self._places.step.is_host:
            self._copy.wait()
            for left in self._left.values():
                left.copy.wait()
        scaled: dict[int, tuple[torch.Tensor, list[torch.Tensor]]] = {}
        for key, left in self._left.items():
            if left.factor is None:
                continue
            if self._places.step.is_host:  # The kept gradient does not change.
                gradient = self._gradients[key]
                self._gradients[key] = self._reserve(gradient, gradient.dtype).copy_(gradient)
            _, gradients = scaled.setdefault(id(left.factor), (left.factor, []))
            gradients.append(self._gradients[key])
        for factor, gradients in scaled.values():
            torch._foreach_mul_(gradients, factor.to(gradients[0].device))

    @override
    def gradient(self, parameter: PagedParameter, chunk: Chunk) -> torch.Tensor | None:
        return self._gradients.get((parameter.name, chunk))

    @override
    def values(self, parameter: PagedParameter, chunk: Chunk) -> torch.Tensor:
        found = self._values.get((parameter.name, chunk))
        return self._page.source.values(parameter, chunk) if found is None else found

    @override
    def send_back(self) -> None:
        page, places = self._page, self._places
        own = list(self._values.values())
        if own:
            targets = [
                page.source.values(page.parameters[name], chunk) for name, chunk in self._values
            ]
            if places.step.is_host:
                self.back = places.gpu.copy_up(own, targets)
            else:
                self.back = places.gpu.copy_down(own, targets, self.slab)
        else:
            places.step.note_use(self.slab)
        self._is_given_back = True

    def is_free(self) -> bool:
        """Return whether another page may use the slab."""
        if not self._is_given_back:
            return False
        return not self._places.step.is_host or self.back is None or self.back.done()

    def drain(self) -> None:
        """Block until no copy uses the slab, the parameters or the gradients."""
        self._copy.wait()
        if self.back is not None:
            self.back.wait()
        elif not self._is_given_back:  # The step ended with an error.
            self._places.step.note_use(self.slab)


class Sources:
    """Slabs, used in turn for pages in the order of a sweep.

    Args:
        places: the devices.
        nbytes: bytes of all slabs, as Places.slabs_bytes().
        window: most pages that are stepped at once.
    """

    def __init__(self, places: Places, nbytes: int, window: int) -> None:
        self._places = places
        self.nbytes = nbytes
        """Bytes of all slabs."""
        count = slabs_count(window, on_gpu=not places.step.is_host) if nbytes else 0
        slab_bytes = nbytes // max(count, 1)
        self._free: deque[DeviceBuffer] = deque()
        if places.step.is_host:
            pool = BufferPool(count, slab_bytes, page_locked=places.gpu.gpu if count else None)
            self._free += [DeviceBuffer(pool.acquire().tensor) for _ in range(count)]
        else:
            self._free += [places.step.allocate(slab_bytes) for _ in range(count)]
        self._last_back = Copy()  # Of reused slabs. Copies of one direction end in order.
        self._behind: deque[Moved] = deque()  # Stepped, or their parameters may be in flight.

    def of(self, pages: Sequence[Page]) -> Generator[Source, None, None]:
        """Yield a source of each page.

        During a step on the host, the slabs of the next pages are filled. A GPU computes behind the
        calling thread, so the copies of a page overlap with the computation of earlier pages.
        """
        if not self.nbytes:
            yield from (page.source for page in pages)
            return
        waiting, ahead = deque(pages), deque[Moved]()
        try:
            while waiting or ahead:
                while self._behind and (self._behind[0].is_free() or not (ahead or self._free)):
                    self._reclaim()
                while waiting and self._free and (self._places.step.is_host or not ahead):
                    ahead.append(Moved(self._free[0], self._places, waiting.popleft()))
                    self._free.popleft()  # Last: if a copy cannot begin, the slab stays free.
                ahead[0].arrive()
                self._behind.append(ahead.popleft())
                yield self._behind[-1]
        finally:
            self._behind.extend(ahead)
            self.finish()  # Nobody may write parameters that a copy still writes.

    def finish(self) -> None:
        """Block until parameters on the host are whole, at the end of a sweep."""
        if self._places.parameters.is_host:
            self._last_back.wait()
            for moved in self._behind:
                moved.drain()

    def close(self) -> None:
        """Wait until no copy uses the slabs, and free them."""
        for moved in self._behind:
            moved.drain()
        self._behind.clear()
        self._free.clear()
        self.nbytes = 0

    def _reclaim(self) -> None:
        moved = self._behind[0]
        if not moved.is_free():
            moved.drain()
        self._last_back = moved.back or self._last_back
        self._free.append(moved.slab)
        self._behind.popleft()
