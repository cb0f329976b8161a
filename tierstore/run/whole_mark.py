"""The mark of a whole checkpoint: a sealed file that a rank puts into the checkpoint.

It says that the rank has read all its page files there, and that every block matched.
"""

from __future__ import annotations

import xxhash

from tierstore.run.manifest import Manifest
from tierstore.run.sealed import body_errors, is_count, require, seal, unseal

_KIND = "whole"


def mark_of(manifest: Manifest) -> bytes:
    """Return the content of the mark of a rank that has verified the pages of its manifest."""
    digest = xxhash.xxh3_128_hexdigest(manifest.to_bytes())
    return seal(_KIND, {"step": manifest.step, "manifest": digest})


def manifest_in(data: bytes, where: str) -> str:
    """Return the XXH3-128 of the published manifest that a mark is about.

    Raises:
        CorruptionError: the mark is not what was written.
        RunDirectoryError: another version wrote it.
    """
    body = unseal(_KIND, data, where)
    with body_errors(where):
        require(is_count(body["step"]), type(body["manifest"]) is str)
        digest: str = body["manifest"]
        return digest
