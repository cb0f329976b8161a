"""Gradients and parameters of a page on the host, where it is stepped though they are elsewhere.

Copies go both ways while other pages are stepped: gradients and parameters come down ahead,
updated parameters go up behind.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterable, Sequence

import torch
from typing_extensions import override

from tierstore.layout.chunks import Chunk
from tierstore.layout.parameters import PagedParameter
from tierstore.paging.buffers import BufferPool
from tierstore.paging.device import MOVING_PAGES, Copy, Device
from tierstore.paging.page import Page
from tierstore.paging.views import Source
from tierstore.units import SECTOR_BYTES, align_up

_ALIGNMENT = 64

Key = tuple[str, Chunk]


class Mirror(Source):
    """The gradients and parameters of one page, in host memory."""

    def __init__(self, memory: torch.Tensor, device: Device, page: Page) -> None:
        self.memory = memory
        self.page = page
        self._device = device
        self._values: dict[Key, torch.Tensor] = {}
        self._gradients: dict[Key, torch.Tensor] = {}
        position = 0
        sources, targets = [], []
        for key, tensor, found in _places(page):
            host = memory[position : position + tensor.nbytes].view(tensor.dtype)
            host = host.view(tensor.shape)
            found_in = self._gradients if found else self._values
            found_in[key] = host
            position += align_up(tensor.nbytes, _ALIGNMENT)
            sources.append(tensor)
            targets.append(host)
        self._down = device.copy_down(sources, targets)
        self._up: Copy | None = None

    def arrive(self) -> None:
        """Block until everything is here."""
        self._down.wait()

    @override
    def gradient(self, parameter: PagedParameter, chunk: Chunk) -> torch.Tensor | None:
        return self._gradients.get((parameter.name, chunk))

    @override
    def values(self, parameter: PagedParameter, chunk: Chunk) -> torch.Tensor:
        return self._values[parameter.name, chunk]

    @override
    def place(self, name: str, chunk: Chunk) -> Chunk:
        return self.page.direct.place(name, chunk)

    @override
    def send_back(self) -> None:
        page = self.page
        self._up = self._device.copy_up(
            list(self._values.values()),
            [page.direct.values(page.parameters[name], chunk) for name, chunk in self._values],
        )

    def has_left(self) -> bool:
        """Return whether the parameters were sent back, and are there."""
        return self._up is not None and self._up.done()

    def leave(self) -> None:
        """Block until nothing uses the memory any more."""
        self._down.wait()
        if self._up is not None:
            self._up.wait()


class NoMirrors:
    """The mirrors of a store that steps pages where the parameters are: none."""

    nbytes = 0

    def of(self, pages: Sequence[Page]) -> Generator[Source, None, None]:
        """Yield the parameters and gradients of each page themselves."""
        yield from (page.direct for page in pages)

    def close(self) -> None:
        """Do nothing."""


class Mirrors:
    """A few mirrors that take turns, for pages in the order of a sweep.

    Args:
        device: where parameters and gradients are.
        nbytes: those of all mirrors; see mirrors_bytes().
        held: how many of them are used for steps at once.
    """

    def __init__(self, device: Device, nbytes: int, held: int) -> None:
        self._device = device
        count = held + MOVING_PAGES
        self._pool = BufferPool(count, nbytes // count, page_locked=not device.is_host)
        self._free = deque(self._pool.acquire().tensor for _ in range(count))
        self._behind: deque[Mirror] = deque()  # Their parameters may be on their way back.

    @property
    def nbytes(self) -> int:
        """Bytes of all of them."""
        return self._pool.nbytes

    def of(self, pages: Sequence[Page]) -> Generator[Source, None, None]:
        """Yield a mirror of each page when it is filled; the next ones are being filled."""
        waiting, ahead = deque(pages), deque[Mirror]()
        try:
            while waiting or ahead:
                while self._behind and (self._behind[0].has_left() or not (ahead or self._free)):
                    self._take_back()
                while waiting and self._free:
                    ahead.append(Mirror(self._free[0], self._device, waiting.popleft()))
                    self._free.popleft()  # Not before: it stays if the copies cannot begin.
                ahead[0].arrive()
                yield ahead[0]
                self._behind.append(ahead.popleft())
        finally:
            self._behind.extend(ahead)

    def close(self) -> None:
        """Wait until nothing uses the memory, and give it back."""
        while self._behind:
            self._take_back()
        self._free.clear()
        self._pool = BufferPool(0, 0)

    def _take_back(self) -> None:
        self._behind[0].leave()
        self._free.append(self._behind.popleft().memory)


def mirrors_bytes(pages: Iterable[Page], held: int) -> int:
    """Return how many bytes the mirrors of some pages take when all parameters have gradients.

    Args:
        pages: all that there may be a mirror of.
        held: how many are used for steps at once.
    """
    # Of the others one is filled with gradients, and of one the parameters go back.
    return (held + MOVING_PAGES) * max(map(_mirror_bytes, pages), default=0)


def _mirror_bytes(page: Page) -> int:
    nbytes = 0
    for name, chunk in page.layout.records:
        itemsize = page.parameters[name].tensor.dtype.itemsize
        nbytes += align_up(chunk.numel * itemsize, _ALIGNMENT)
        # A gradient may be of higher precision than its parameter.
        nbytes += align_up(chunk.numel * torch.float64.itemsize, _ALIGNMENT)
    return align_up(nbytes, SECTOR_BYTES)


def _places(page: Page) -> Iterable[tuple[Key, torch.Tensor, bool]]:
    """Yield each chunk of the parameters, and of the gradients where there is one."""
    for name, chunk in page.layout.records:
        parameter = page.parameters[name]
        yield (name, chunk), page.direct.values(parameter, chunk), False
        gradient = page.direct.gradient(parameter, chunk)
        if gradient is not None:
            yield (name, chunk), gradient, True
