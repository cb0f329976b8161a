"""Host copies of a page's gradients and parameters, for steps on the host beside a GPU.

While a page is stepped, gradients and parameters of the next pages are copied down, and updated
parameters of earlier pages are copied up.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterable, Sequence

import torch
from typing_extensions import override

from tierstore.layout.chunks import Chunk
from tierstore.layout.encodings import MASTER
from tierstore.layout.host_gradient import HostGradient
from tierstore.layout.page_layout import PageLayout
from tierstore.layout.parameters import PagedParameter
from tierstore.paging.buffers import BufferPool
from tierstore.paging.device import Copy, Device
from tierstore.paging.page import Page
from tierstore.paging.tier_plan import MOVING_PAGES
from tierstore.paging.views import Source
from tierstore.units import SECTOR_BYTES, align_up

_ALIGNMENT = 64


class Mirror(Source):
    """Host copies of the gradients and parameters of one page."""

    def __init__(self, memory: torch.Tensor, device: Device, page: Page) -> None:
        super().__init__(page.source.local_chunks)
        self.memory = memory
        self._page = page
        self._device = device
        self._values: dict[tuple[str, Chunk], torch.Tensor] = {}
        self._gradients: dict[tuple[str, Chunk], torch.Tensor] = {}
        position = 0
        sources, targets = [], []
        for name, chunk in page.layout.records:
            parameter = page.parameters[name]
            gradient = page.source.gradient(parameter, chunk)
            if gradient is not None and isinstance(parameter.tensor.grad, HostGradient):
                self._gradients[name, chunk] = gradient
                gradient = None
            for copies, tensor in (
                (self._values, page.source.values(parameter, chunk)),
                (self._gradients, gradient),
            ):
                if tensor is not None:
                    host = memory[position : position + tensor.nbytes].view(tensor.dtype)
                    copies[name, chunk] = host.view(tensor.shape)
                    position += align_up(tensor.nbytes, _ALIGNMENT)
                    sources.append(tensor)
                    targets.append(copies[name, chunk])
        self._down = device.copy_down(sources, targets)
        self._up: Copy | None = None

    def wait(self) -> None:
        """Block until gradients and parameters have arrived."""
        self._down.wait()

    @override
    def gradient(self, parameter: PagedParameter, chunk: Chunk) -> torch.Tensor | None:
        return self._gradients.get((parameter.name, chunk))

    @override
    def values(self, parameter: PagedParameter, chunk: Chunk) -> torch.Tensor:
        return self._values[parameter.name, chunk]

    @override
    def send_back(self) -> None:
        page = self._page
        self._up = self._device.copy_up(
            list(self._values.values()),
            [page.source.values(page.parameters[name], chunk) for name, chunk in self._values],
        )

    def is_free(self) -> bool:
        """Return whether the parameters were sent back and have arrived."""
        return self._up is not None and self._up.done()

    def drain(self) -> None:
        """Block until no copy uses the memory."""
        self._down.wait()
        if self._up is not None:
            self._up.wait()


class Mirrors:
    """Memory for a few mirrors, used in turn for pages in the order of a sweep.

    Args:
        device: the device of parameters and gradients.
        nbytes: bytes of all mirrors, as mirrors_bytes(). 0: pages are stepped where the parameters
            are, and no page has a mirror.
        window: most pages that are stepped at once.
    """

    def __init__(self, device: Device, nbytes: int, window: int) -> None:
        self._device = device
        count = window + MOVING_PAGES if nbytes else 0
        buffer_bytes = nbytes // max(count, 1)
        self._pool = BufferPool(count, buffer_bytes, page_locked=count > 0 and not device.is_host)
        self._free = deque(self._pool.acquire().tensor for _ in range(count))
        self._behind: deque[Mirror] = deque()  # Their parameters may be in flight to the device.

    @property
    def nbytes(self) -> int:
        """Bytes of all mirrors."""
        return self._pool.nbytes

    def of(self, pages: Sequence[Page]) -> Generator[Source, None, None]:
        """Yield a mirror of each page when it has arrived, while the next mirrors are filled."""
        if not self.nbytes:
            yield from (page.source for page in pages)
            return
        waiting, ahead = deque(pages), deque[Mirror]()
        try:
            while waiting or ahead:
                while self._behind and (self._behind[0].is_free() or not (ahead or self._free)):
                    self._reclaim()
                while waiting and self._free:
                    ahead.append(Mirror(self._free[0], self._device, waiting.popleft()))
                    self._free.popleft()  # Last: the memory stays free if a copy cannot begin.
                ahead[0].wait()
                yield ahead[0]
                self._behind.append(ahead.popleft())
        finally:
            self._behind.extend(ahead)

    def close(self) -> None:
        """Wait until no copy uses the memory, and free it."""
        while self._behind:
            self._reclaim()
        self._free.clear()
        self._pool = BufferPool(0, 0)

    def _reclaim(self) -> None:
        self._behind[0].drain()
        self._free.append(self._behind.popleft().memory)


def mirrors_bytes(layouts: Iterable[PageLayout], window: int) -> int:
    """Return the bytes of the mirrors of some pages if all parameters have gradients.

    Args:
        layouts: the layouts of the pages.
        window: most pages that are stepped at once.
    """
    return (window + MOVING_PAGES) * max(map(_mirror_bytes, layouts), default=0)


def _mirror_bytes(layout: PageLayout) -> int:
    nbytes = 0
    for (_, chunk), records in layout.records.items():
        itemsize = records[MASTER].parameter.dtype.itemsize
        nbytes += align_up(chunk.numel * itemsize, _ALIGNMENT)
        # A gradient may be of higher precision than its parameter.
        nbytes += align_up(chunk.numel * torch.float64.itemsize, _ALIGNMENT)
    return align_up(nbytes, SECTOR_BYTES)
