"""Coverage: whether chunks hold every element of a tensor exactly once."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence

from tierstore.inspection.reader import Fault
from tierstore.layout.chunks import Chunk
from tierstore.run.commit import Commit


def tiling_faults(shape: Sequence[int], chunks: Sequence[Chunk]) -> Iterator[str]:
    """Yield the faults of chunks that should cover a tensor of this shape exactly once.

    Chunks without elements are ignored. Takes O(n * m) steps for n chunks if at most m of them
    overlap along the dimension of the sweep.
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
            "a load would leave them unchanged and report nothing"
        )


def _overlap(chunks: Sequence[Chunk]) -> tuple[Chunk, Chunk] | None:
    """Return two chunks that have an element in common, or None.

    Sweeps along the dimension with the most different offsets. Compares each chunk with the chunks
    that have not ended at its offset.
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
        start = chunk.offsets[along]
        open_chunks = [c for c in open_chunks if c.offsets[along] + c.sizes[along] > start]
        for other in open_chunks:
            if _intersect(chunk, other):
                return other, chunk
        open_chunks.append(chunk)
    return None


def _intersect(one: Chunk, other: Chunk) -> bool:
    return all(
        a < b + b_size and b < a + a_size
        for a, a_size, b, b_size in zip(
            one.offsets, one.sizes, other.offsets, other.sizes, strict=True
        )
    )


def _text(chunk: Chunk) -> str:
    return f"the chunk at {list(chunk.offsets)} of size {list(chunk.sizes)}"


_COMMON_FIELDS = ("page_bytes", "hyperparameters", "scalars")
"""Fields of a manifest that are the same on all ranks."""


def coverage_faults(commits: Sequence[Commit]) -> Iterator[Fault]:
    """Yield the faults of the chunks that the ranks committed together.

    Args:
        commits: the whole commits of one revision. If a rank is absent, nothing is compared: the
            caller records the absence.
    """
    if not commits or len(commits) != commits[0].manifest.world_size:
        return
    first = commits[0]
    for other in commits[1:]:
        one, two = first.manifest, other.manifest
        differing = [name for name in _COMMON_FIELDS if getattr(one, name) != getattr(two, name)]
        if other.layout.groups != first.layout.groups:
            differing.append("groups")
        if differing:
            what = f"has different {differing[0]} than rank {one.rank}"
            yield Fault(f"the commit of rank {two.rank}", what)
            return
    chunks: dict[str, list[Chunk]] = defaultdict(list)
    for commit in commits:
        for page in commit.manifest.entries:
            for shard in commit.layout.subgroups[page].shards:
                chunks[shard.parameter.name] += shard.chunks
    for spec in (spec for group in first.groups for spec in group):
        for fault in tiling_faults(spec.shape, chunks[spec.name]):
            yield Fault(f"parameter {spec.name!r}", f"on all ranks together: {fault}")
