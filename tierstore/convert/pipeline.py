"""Pipeline: pieces of entries are read ahead by threads, in bounded memory."""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterable
from concurrent.futures import Future
from typing import NamedTuple

import torch

from tierstore.convert.entries import Entry, pieces
from tierstore.errors import BudgetError
from tierstore.layout.chunks import Chunk
from tierstore.threads import started_pool
from tierstore.units import format_bytes

MEMORY_MIN = 64 * 2**20
"""Least bytes of memory for a conversion."""

_PIECE_BYTES_MAX = 16 * 2**20
_THREADS = 4
_BUFFERS = 12


class Piece(NamedTuple):
    """A chunk of an entry, and its elements in a contiguous tensor of the chunk's shape."""

    entry: Entry
    chunk: Chunk
    tensor: torch.Tensor


def stream(entries: Iterable[Entry], memory: int) -> Generator[Piece]:
    """Yield all pieces of entries in order; each is valid until the next is asked for.

    Close the generator, or use it to its end, to end its threads.

    Args:
        entries: the entries.
        memory: most bytes of all pieces in memory, and of what readers need to convert dtypes.

    Raises:
        BudgetError: ``memory`` is less than MEMORY_MIN.
        TierstoreError, OSError: a piece cannot be read.
    """
    if memory < MEMORY_MIN:
        raise BudgetError(
            f"a conversion needs at least {format_bytes(MEMORY_MIN)} of memory, got "
            f"{format_bytes(memory)}"
        )
    piece_bytes = min(memory // (_BUFFERS + 2 * _THREADS), _PIECE_BYTES_MAX)
    free = [torch.empty(piece_bytes, dtype=torch.uint8) for _ in range(_BUFFERS)]
    todo = (
        (entry, chunk)
        for entry in entries
        for chunk in pieces(entry.shape, entry.dtype.itemsize, piece_bytes)
    )
    reading: deque[tuple[Piece, torch.Tensor, Future[None]]] = deque()
    pool = started_pool(_THREADS, "tierstore-convert")
    try:
        while True:
            while free and (item := next(todo, None)):
                entry, chunk = item
                buffer = free.pop()
                nbytes = chunk.numel * entry.dtype.itemsize
                tensor = buffer[:nbytes].view(entry.dtype).view(chunk.sizes)
                read = pool.submit(entry.read, chunk, tensor)
                reading.append((Piece(entry, chunk, tensor), buffer, read))
            if not reading:
                return
            piece, buffer, read = reading.popleft()
            read.result()
            yield piece
            free.append(buffer)
    finally:
        pool.shutdown(cancel_futures=True)


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """Return the memory of a contiguous CPU tensor with elements."""
    return tensor.view(-1).view(torch.uint8).numpy().data
