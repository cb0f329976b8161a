"""Whether chunks cover a tensor exactly once."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from tierstore.layout.chunks import Chunk
from tierstore.run.commit import Commit


def tiling_faults(shape: Sequence[int], chunks: Sequence[Chunk]) -> Iterator[str]:
    """Yield what is wrong with chunks that should cover a tensor of this shape once.

    Takes about n * m steps for n chunks of which m lie side by side. Chunks without
    elements cover nothing and are never wrong.
    """
    chunks = [chunk for chunk in chunks if chunk.numel > 0]
    outside = [chunk for chunk in chunks if not chunk.lies_within(shape)]
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


def coverage_faults(commits: Sequence[Commit]) -> Iterator[tuple[str, str]]:
    """Yield a place and what is wrong there.

    Args:
        commits: one commit of all ranks, each whole.
    """
    first = commits[0]
    for other in commits[1:]:
        for name in ("page_bytes", "dropped", "hyperparameters", "scalars"):
            if getattr(other.manifest, name) != getattr(first.manifest, name):
                yield _place(other), f"has other {name} than rank {first.manifest.rank}"
                return
        if other.layout.groups != first.layout.groups:
            yield _place(other), f"has other groups than rank {first.manifest.rank}"
            return
    chunks: dict[str, list[Chunk]] = {
        spec.name: [] for group in first.layout.groups for spec in group
    }
    for commit in commits:
        for page in commit.manifest.entries:
            for shard in commit.layout.subgroups[page].shards:
                chunks[shard.parameter.name] += shard.chunks
    for spec in (spec for group in first.groups for spec in group):
        for fault in tiling_faults(spec.shape, chunks[spec.name]):
            yield f"parameter {spec.name!r}", f"on all ranks together: {fault}"


def _place(commit: Commit) -> str:
    return f"the commit of rank {commit.manifest.rank}"
