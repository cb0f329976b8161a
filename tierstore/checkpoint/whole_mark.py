"""The mark of a whole checkpoint: a sealed file that a rank puts into the checkpoint.

It says that the rank has read all its page files there, and that every block matched.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import Any

import xxhash

from tierstore.errors import TierstoreError
from tierstore.inspection.run_reader import RANKS_MAX
from tierstore.run.file_names import published_manifest, published_mark
from tierstore.run.manifest import Manifest
from tierstore.run.sealed import body_errors, is_count, require, seal, unseal

_KIND = "whole"


def mark_of(manifest: Manifest) -> bytes:
    """Return the content of the mark of a rank that has verified the pages of its manifest."""
    digest = xxhash.xxh3_128_hexdigest(manifest.to_bytes())
    return seal(_KIND, {"step": manifest.step, "manifest": digest})


def marked_ranks(marker: Mapping[str, Any], get: Callable[[str], bytes]) -> set[int]:
    """Return the ranks that have verified their page files in a published checkpoint.

    A mark that cannot be read, or is of another manifest, does not count.

    Args:
        marker: the content of tierstore.json.
        get: returns the content of a file of the checkpoint.
    """
    marked = set()
    for rank in range(min(marker["world_size"], RANKS_MAX)):
        name, manifest = published_mark(rank), marker["files"].get(published_manifest(rank))
        with contextlib.suppress(TierstoreError, OSError):
            if manifest is not None and _manifest_in(get(name), name) == manifest["xxh3_128"]:
                marked.add(rank)
    return marked


def is_marked_whole(marker: Mapping[str, Any] | None, get: Callable[[str], bytes]) -> bool:
    """Return whether all ranks have verified a published checkpoint, according to its marks.

    Args:
        marker: the content of tierstore.json; None if it cannot be read.
        get: as in marked_ranks().
    """
    return marker is not None and len(marked_ranks(marker, get)) == marker["world_size"]


def _manifest_in(data: bytes, where: str) -> str:
    """Return the XXH3-128 of the published manifest that a mark refers to.

    Raises:
        CorruptionError: the mark is not what was written.
        RunDirectoryError: another version wrote it.
    """
    body = unseal(_KIND, data, where)
    with body_errors(where):
        require(is_count(body["step"]), type(body["manifest"]) is str)
        digest: str = body["manifest"]
        return digest
