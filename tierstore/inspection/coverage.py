"""Whether chunks cover a tensor exactly once."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from tierstore.layout.chunks import Chunk


def tiling_faults(shape: Sequence[int], chunks: Sequence[Chunk]) -> Iterator[str]:
    """Yield what is wrong with chunks that should cover a tensor of this shape once.

    Takes about n * m steps for n chunks of which m lie side by side. Chunks without
    elements cover nothing and are never wrong.
    """
    chunks = [chunk for chunk in chunks if chunk.numel > 0]
    outside = [chunk for chunk in chunks if not _lies_within(shape, chunk)]
    if outside:
        yield f"{_text(outside[0])} does not lie within the tensor {list(shape)}"
        return
    overlap = _overlap(chunks)
    if overlap is not None:
        yield f"{_text(overlap[0])} and {_text(overlap[1])} overlap"
        return
    covered, numel = sum(chunk.numel for chunk in chunks), math.prod(shape)
    if covered < numel:
        yield (
            f"{numel - covered} of {numel} elements of the tensor {list(shape)} are in no chunk: "
            "a load would leave them as they are, without a word"
        )


def _lies_within(shape: Sequence[int], chunk: Chunk) -> bool:
    return len(shape) == len(chunk.sizes) and all(
        offset + size <= extent
        for offset, size, extent in zip(chunk.offsets, chunk.sizes, shape, strict=True)
    )


def _overlap(chunks: Sequence[Chunk]) -> tuple[Chunk, Chunk] | None:
    """Return two chunks that share an element, if there are any.

    Walks along the dimension in which most chunks begin at different places, and compares
    each chunk with those that have not ended there.
    """
    if len(chunks) < 2:
        return None
    if not chunks[0].sizes:
        return chunks[0], chunks[1]
    along = max(
        range(len(chunks[0].sizes)),
        key=lambda dimension: len({chunk.offsets[dimension] for chunk in chunks}),
    )
    open_chunks: list[Chunk] = []
    for chunk in sorted(chunks, key=lambda chunk: chunk.offsets[along]):
        open_chunks = [
            other
            for other in open_chunks
            if other.offsets[along] + other.sizes[along] > chunk.offsets[along]
        ]
        for other in open_chunks:
            if _share(chunk, other):
                return other, chunk
        open_chunks.append(chunk)
    return None


def _share(one: Chunk, other: Chunk) -> bool:
    return all(
        a < b + b_size and b < a + a_size
        for a, a_size, b, b_size in zip(
            one.offsets, one.sizes, other.offsets, other.sizes, strict=True
        )
    )


def _text(chunk: Chunk) -> str:
    return f"the chunk at {list(chunk.offsets)} of size {list(chunk.sizes)}"
