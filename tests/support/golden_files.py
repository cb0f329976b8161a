"""Golden files beside the same files made again."""

from __future__ import annotations

from pathlib import Path

# They hold what torch pickles, which may change with torch.
PICKLED = {"published/.metadata", "published/unpaged", "published/tierstore.json"}


def assert_same_files(made: Path, golden: Path) -> None:
    """Check that both folders have files of the same names and bytes, except files of torch."""
    names, others = (
        {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
        for folder in (golden, made)
    )
    assert names == others
    for name in names - PICKLED:
        assert (made / name).read_bytes() == (golden / name).read_bytes(), name
