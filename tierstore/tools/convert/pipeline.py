"""Pipeline: threads read pieces of entries ahead, another one writes them, in bounded memory."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable
from contextlib import ExitStack
from typing import NamedTuple

import torch

from tierstore.errors import BudgetError
from tierstore.layout.chunks import Chunk
from tierstore.threads import Result, Threads
from tierstore.tools.convert.entries import Entry, pieces
from tierstore.units import format_bytes

MEMORY_MIN = 64 * 2**20
"""Least bytes of memory for a conversion."""

_PIECE_BYTES_MAX = 16 * 2**20
_READERS = 4
_BUFFERS = 12


class Piece(NamedTuple):
    """A chunk of an entry, and its elements in a contiguous tensor of the chunk's shape."""

    entry: Entry
    chunk: Chunk
    tensor: torch.Tensor


def stream(entries: Iterable[Entry], memory: int, put: Callable[[Piece], None]) -> Generator[Piece]:
    """Yield all pieces of entries in order, and give them to ``put`` in this order.

    A thread calls ``put`` with a piece after the next one was asked for. After the last piece all
    calls have ended. Close the generator, or use it to its end, to end its threads.

    Args:
        entries: the entries.
        memory: most bytes of all pieces in memory, and of what readers need to convert dtypes.
        put: writes a piece. It is called by one thread at a time.

    Raises:
        BudgetError: ``memory`` is less than MEMORY_MIN.
        TierstoreError, OSError: a piece cannot be read.
        BaseException: what ``put`` raised.
    """
    if memory < MEMORY_MIN:
        raise BudgetError(
            f"a conversion needs at least {format_bytes(MEMORY_MIN)} of memory, got "
            f"{format_bytes(memory)}"
        )
    piece_bytes = min(memory // (_BUFFERS + 2 * _READERS), _PIECE_BYTES_MAX)
    free = [torch.empty(piece_bytes, dtype=torch.uint8) for _ in range(_BUFFERS)]
    todo = (
        (entry, chunk)
        for entry in entries
        for chunk in pieces(entry.shape, entry.dtype.itemsize, piece_bytes)
    )
    reading: deque[tuple[Piece, torch.Tensor, Result[None]]] = deque()
    writing: deque[tuple[torch.Tensor, Result[None]]] = deque()
    with ExitStack() as stack:
        readers = Threads(_READERS, "tierstore-convert-read")
        stack.callback(readers.close, cancel=True)
        writer = Threads(1, "tierstore-convert-write")
        stack.callback(writer.close, cancel=True)
        while True:
            while writing and (writing[0][1].is_set or not (free or reading)):
                buffer, written = writing.popleft()
                written.result()
                free.append(buffer)
            while free and (item := next(todo, None)):
                entry, chunk = item
                buffer = free.pop()
                nbytes = chunk.numel * entry.dtype.itemsize
                tensor = buffer[:nbytes].view(entry.dtype).view(chunk.sizes)
                read = readers.submit(entry.read, chunk, tensor)
                reading.append((Piece(entry, chunk, tensor), buffer, read))
            if not reading:
                break
            piece, buffer, read = reading.popleft()
            read.result()
            yield piece
            writing.append((buffer, writer.submit(put, piece)))
        for _, written in writing:
            written.result()


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """Return the memory of a contiguous CPU tensor with elements."""
    return tensor.view(-1).view(torch.uint8).numpy().data
