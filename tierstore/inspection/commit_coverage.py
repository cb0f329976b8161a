"""Whether the commits of all ranks hold each element of each parameter exactly once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tierstore.inspection.coverage import tiling_faults
from tierstore.layout.chunks import Chunk
from tierstore.run.manifest import Manifest


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
