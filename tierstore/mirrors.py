"""Gradients and parameters of a page on the host, where it is stepped though they are elsewhere.

Copies go both ways while other pages are stepped: gradients and parameters come down ahead,
updated parameters go up behind.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterable, Mapping, Sequence

import torch

from tierstore.buffers import BufferPool
from tierstore.chunks import Chunk
from tierstore.device import Copy, Device
from tierstore.groups import PagedParameter
from tierstore.page import PageLayout
from tierstore.transit import Page
from tierstore.units import align_up

# One page is stepped, the next one's gradients come down, the last one's parameters go up.
MIRRORS = 3

_ALIGNMENT = 64

Key = tuple[str, Chunk]


class Mirror:
    """The gradients and parameters of one page, in host memory."""

    def __init__(self, memory: torch.Tensor, device: Device, page: Page) -> None:
        self.memory = memory
        self.page = page
        self._device = device
        self._values: dict[Key, torch.Tensor] = {}
        self._gradients: dict[Key, torch.Tensor] = {}
        position = 0
        sources, targets = [], []
        for (name, chunk), tensor, found in _places(page.layout, page.parameters):
            nbytes = chunk.numel * tensor.dtype.itemsize
            host = memory[position : position + nbytes].view(tensor.dtype).view(chunk.sizes)
            found_in = self._gradients if found else self._values
            found_in[name, chunk] = host
            position += align_up(nbytes, _ALIGNMENT)
            sources.append(chunk.select(tensor))
            targets.append(host)
        self._down = device.copy_down(sources, targets)
        self._up: Copy | None = None

    def arrive(self) -> None:
        """Block until everything is here."""
        self._down.wait()

    def gradient(self, parameter: PagedParameter, chunk: Chunk) -> torch.Tensor | None:
        """See Source.gradient."""
        return self._gradients.get((parameter.name, chunk))

    def values(self, parameter: PagedParameter, chunk: Chunk) -> torch.Tensor:
        """See Source.values."""
        return self._values[parameter.name, chunk]

    def send_back(self) -> None:
        """Start to copy the parameters to where they came from."""
        parameters = self.page.parameters
        self._up = self._device.copy_up(
            list(self._values.values()),
            [chunk.select(parameters[name].tensor.detach()) for name, chunk in self._values],
        )

    def has_left(self) -> bool:
        """Return whether leave() would return at once."""
        return self._up is None or self._up.done()

    def leave(self) -> None:
        """Block until nothing uses the memory any more."""
        self._down.wait()
        if self._up is not None:
            self._up.wait()


class Mirrors:
    """A few mirrors that take turns, for pages in the order of a sweep.

    Args:
        device: where parameters and gradients are.
        nbytes: those of the largest mirror; see mirror_bytes().
    """

    def __init__(self, device: Device, nbytes: int) -> None:
        self._device = device
        self._pool = BufferPool(MIRRORS, nbytes, page_locked=not device.is_host)
        self._free = deque(self._pool.acquire().tensor for _ in range(MIRRORS))
        self._behind: deque[Mirror] = deque()  # Their parameters may be on their way back.

    @property
    def nbytes(self) -> int:
        """Bytes of all of them."""
        return self._pool.nbytes

    def of(self, pages: Sequence[Page]) -> Generator[Mirror, None, None]:
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


def mirror_bytes(layout: PageLayout, parameters: Mapping[str, PagedParameter]) -> int:
    """Return how many bytes the mirror of a page takes when all parameters have gradients."""
    nbytes = 0
    for name, chunk in layout.records:
        itemsize = parameters[name].tensor.dtype.itemsize
        nbytes += align_up(chunk.numel * itemsize, _ALIGNMENT)
        # A gradient may be of higher precision than its parameter.
        nbytes += align_up(chunk.numel * torch.float64.itemsize, _ALIGNMENT)
    return nbytes


def _places(
    layout: PageLayout, parameters: Mapping[str, PagedParameter]
) -> Iterable[tuple[Key, torch.Tensor, bool]]:
    """Yield each chunk with the parameter, and with the gradient where there is one."""
    for name, chunk in layout.records:
        tensor = parameters[name].tensor
        yield (name, chunk), tensor.detach(), False
        if tensor.grad is not None:
            yield (name, chunk), tensor.grad, True
