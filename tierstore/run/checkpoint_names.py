"""The names of the files of a published checkpoint."""

METADATA_NAME = ".metadata"
"""What DCP reads first: which tensor is where."""

MARKER_NAME = "tierstore.json"
"""Says which run published which step, and lists all files with their checksums."""

UNPAGED_NAME = "unpaged"
"""The file of everything that lies in no page."""


def published_manifest(rank: int) -> str:
    """Return the name that the manifest of a rank has in a checkpoint."""
    return f"rank-{rank:05d}.commit"


def published_page(rank: int, page: int) -> str:
    """Return the name that a page file of a rank has in a checkpoint."""
    return f"rank-{rank:05d}.page-{page:06d}"
