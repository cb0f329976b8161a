"""Epochs: a commit after a rewind is newer than every commit before it, whatever its step is."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.toy import RANK, make_run
from tierstore.errors import CorruptionError
from tierstore.run.file_names import Revision, manifest_name, manifest_revision
from tierstore.run.manifest import Manifest
from tierstore.run.recovery import newest_in_common


@pytest.mark.parametrize(
    ("revision", "name"),
    [
        (Revision(0, 7, 1), "commit-0000000007"),
        (Revision(0, 7, 12), "commit-0000000007.12"),
        (Revision(1, 5, 1), "commit-e1-0000000005"),
        (Revision(23, 10**11, 4), "commit-e23-100000000000.4"),
    ],
)
def test_the_name_of_a_manifest(revision: Revision, name: str) -> None:
    assert manifest_name(revision) == name
    assert manifest_revision(name) == revision


@pytest.mark.parametrize(
    "name", ["commit-e0-0000000005", "commit-e01-0000000005", "commit-e1-5", "commit-e-0000000005"]
)
def test_other_names_are_not_manifests(name: str) -> None:
    assert manifest_revision(name) is None


def test_a_later_epoch_is_newer_than_a_later_step() -> None:
    before, rewound, unfinished = Revision(0, 9, 2), Revision(1, 5, 1), Revision(1, 6, 1)
    ranks = [{before: "x", rewound: "y", unfinished: "y"}, {before: "x", rewound: "y"}]
    assert newest_in_common(ranks) == rewound
    assert newest_in_common([*ranks, {before: "x"}]) == before


def first_manifest(directory: Path) -> bytes:
    make_run(directory, steps=1)
    return (directory / RANK / "commit-0000000001").read_bytes()


def test_the_first_epoch_is_not_in_the_file(tmp_path: Path) -> None:
    data = first_manifest(tmp_path)
    manifest = Manifest.from_bytes(data, "it")
    assert manifest.epoch == 0
    assert "epoch" not in json.loads(data.partition(b"\n")[2])
    later = Manifest.from_bytes(replace(manifest, epoch=3).to_bytes(), "it")
    assert later == replace(manifest, epoch=3)
    assert later.revision == (3, 1, 1)


def test_an_epoch_is_a_count(tmp_path: Path) -> None:
    manifest = Manifest.from_bytes(first_manifest(tmp_path), "it")
    with pytest.raises(CorruptionError, match="does not have the content of its kind"):
        Manifest.from_bytes(replace(manifest, epoch=-1).to_bytes(), "it")
