"""Whether chunks cover a tensor exactly once."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from tierstore.layout.chunks import Chunk
from tierstore.run.manifest import Manifest


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


def coverage_faults(manifests: Sequence[Manifest]) -> Iterator[tuple[str, str]]:
    """Yield a place and what is wrong there.

    Args:
        manifests: of one commit of all ranks, each whole.
    """
    first = manifests[0]
    if any((other.subgroups is None) != (first.subgroups is None) for other in manifests):
        yield _place(first), "says that ranks share the parameters, or does not, unlike others"
        return
    if first.subgroups is None:  # Each rank has its own, and all of them.
        return
    for other in manifests[1:]:
        for field in ("groups", "page_bytes", "hyperparameters", "scalars"):
            if getattr(other, field) != getattr(first, field):
                yield _place(other), f"has other {field} than that of rank {first.rank}"
                return
    names = [spec.name for group in first.groups for spec in group]
    if len(set(names)) < len(names):
        yield _place(first), "has two parameters of one name"
        return
    chunks: dict[str, list[Chunk]] = {name: [] for name in names}
    for manifest in manifests:
        for subgroup in manifest.subgroups or ():
            for shard in subgroup.shards:
                chunks[shard.parameter.name] += shard.chunks
    for spec in (spec for group in first.groups for spec in group):
        for fault in tiling_faults(spec.shape, chunks[spec.name]):
            yield f"parameter {spec.name!r}", f"on all ranks together: {fault}"


def _place(manifest: Manifest) -> str:
    return f"the commit of rank {manifest.rank}"
