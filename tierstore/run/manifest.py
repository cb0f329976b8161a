"""The files that say what a directory holds: a run's identity, and one manifest per commit.

They are JSON that a person can read, behind a first line that names the format and
carries a checksum of everything after it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

from tierstore.layout.chunks import Chunk
from tierstore.layout.parameters import ParameterSpec
from tierstore.layout.records import RECORD_DIMENSIONS_MAX
from tierstore.layout.subgroups import ParameterShard, Subgroup
from tierstore.run import tagged_json
from tierstore.run.checksums import CHECKSUM_BYTES
from tierstore.run.file_names import Revision
from tierstore.run.sealed import body_errors, is_count, require, seal, unseal


@dataclass(frozen=True, slots=True, kw_only=True)
class RunIdentity:
    """What stays the same for as long as a run directory exists."""

    run_id: str
    rank: int
    world_size: int
    page_bytes: int

    def to_bytes(self) -> bytes:
        """Return the content of the file IDENTITY_NAME."""
        body = {
            "run_id": self.run_id,
            "rank": self.rank,
            "world_size": self.world_size,
            "page_bytes": self.page_bytes,
        }
        return seal("run", body)

    @classmethod
    def from_bytes(cls, data: bytes, where: str) -> Self:
        """Read the content of the file IDENTITY_NAME; ``where`` names it in errors.

        Raises:
            CorruptionError: the content is not what was written.
            RunDirectoryError: another version wrote it.
        """
        body = unseal("run", data, where)
        with body_errors(where):
            identity = cls(**body)
            require(isinstance(identity.run_id, str))
            require(*map(is_count, (identity.rank, identity.world_size, identity.page_bytes)))
            return identity


@dataclass(frozen=True, slots=True, kw_only=True)
class PageEntry:
    """Where the committed content of a page is, and how to recognize it."""

    copy: str
    """Which of the two files of the page: "a" or "b"."""
    step: int
    """The step in which it was written."""
    checksums: tuple[int, ...]
    """One for each block of the layout; empty where checksums are off."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """One committed step of one rank: everything that a restart needs besides the pages."""

    run_id: str
    attempt: str
    """Names one opening of the run, so that steps of two histories are told apart."""
    rank: int
    world_size: int
    step: int
    number: int
    """1, or more where the step was committed before, with another ``extra`` say."""
    first: bool
    """Whether no commit of this run was before it. Any other one all ranks have."""
    page_bytes: int
    """What the groups were cut into pages by."""
    groups: Sequence[Sequence[ParameterSpec]]
    layout: str
    """Digest of where every chunk of every state lies in which page."""
    pages: Sequence[PageEntry]
    subgroups: Sequence[Subgroup] | None
    """What lies in each page, if ranks share the parameters; None: all of the groups, cut
    by ``page_bytes``."""
    scalars: Any
    """Parameter name -> scalar name -> value, as tagged.encode() leaves it."""
    hyperparameters: Any
    """One dict per group, as tagged.encode() leaves it."""
    extra: Any
    """What the user gave to commit(), as tagged.encode() leaves it."""

    @property
    def revision(self) -> Revision:
        """What the manifest is of, and what it is named by."""
        return self.step, self.number

    def to_bytes(self) -> bytes:
        """Return the content of the file manifest_name(revision)."""
        body = {
            "run_id": self.run_id,
            "attempt": self.attempt,
            "rank": self.rank,
            "world_size": self.world_size,
            "step": self.step,
            "number": self.number,
            "first": self.first,
            "page_bytes": self.page_bytes,
            "hyperparameters": self.hyperparameters,
            "extra": self.extra,
            "scalars": self.scalars,
            "layout": self.layout,
            "groups": [[spec.to_json() for spec in group] for group in self.groups],
            "pages": [
                {"copy": page.copy, "step": page.step, "checksums": _hex(page.checksums)}
                for page in self.pages
            ],
        }
        if self.subgroups is not None:
            body["subgroups"] = _places(self.groups, self.subgroups)
        return seal("commit", body)

    @classmethod
    def from_bytes(cls, data: bytes, where: str) -> Self:
        """Read a manifest, whose tagged values can be decoded; ``where`` names it in errors.

        Raises:
            CorruptionError: the content is not what was written.
            RunDirectoryError: another version wrote it.
        """
        body = unseal("commit", data, where)
        with body_errors(where):
            groups = [[ParameterSpec.from_json(spec) for spec in group] for group in body["groups"]]
            pages = [
                PageEntry(
                    copy=page["copy"], step=page["step"], checksums=_checksums(page["checksums"])
                )
                for page in body["pages"]
            ]
            subgroups = None
            if "subgroups" in body:
                subgroups = [_subgroup(groups, *page) for page in body["subgroups"]]
            manifest = cls(**{**body, "groups": groups, "pages": pages, "subgroups": subgroups})
            _check(manifest)
            return manifest


def _check(manifest: Manifest) -> None:
    """Look at the types of all that a manifest says."""
    names = (manifest.run_id, manifest.attempt, manifest.layout)
    numbers = (manifest.rank, manifest.world_size, manifest.step, manifest.number)
    require(*(isinstance(name, str) for name in names), isinstance(manifest.first, bool))
    require(*map(is_count, (*numbers, manifest.page_bytes)), manifest.page_bytes > 0)
    for page in manifest.pages:
        require(page.copy in ("a", "b"), is_count(page.step))
    if manifest.subgroups is not None:
        require(len(manifest.subgroups) == len(manifest.pages))
        for subgroup in manifest.subgroups:  # A rank has no page where it owns nothing.
            require(len(subgroup.shards) > 0, *(len(s.chunks) > 0 for s in subgroup.shards))
    for spec in (spec for group in manifest.groups for spec in group):
        require(isinstance(spec.name, str), isinstance(spec.elementwise, bool))
        require(*map(is_count, spec.shape), len(spec.shape) <= RECORD_DIMENSIONS_MAX)
    tagged_json.decode(manifest.extra)
    scalars = tagged_json.decode(manifest.scalars)
    require(isinstance(scalars, dict), *(isinstance(s, dict) for s in scalars.values()))
    require(isinstance(manifest.hyperparameters, list))
    require(len(manifest.hyperparameters) == len(manifest.groups))
    require(*(isinstance(tagged_json.decode(group), dict) for group in manifest.hyperparameters))


def _places(groups: Sequence[Sequence[ParameterSpec]], subgroups: Sequence[Subgroup]) -> Any:
    """Return what lies in each page: a group, and its parameters with their chunks."""
    positions = [{spec.name: index for index, spec in enumerate(group)} for group in groups]
    return [
        [
            subgroup.group,
            [
                [
                    positions[subgroup.group][shard.parameter.name],
                    [[chunk.offsets, chunk.sizes] for chunk in shard.chunks],
                ]
                for shard in subgroup.shards
                if shard.chunks
            ],
        ]
        for subgroup in subgroups
    ]


def _subgroup(groups: Sequence[Sequence[ParameterSpec]], group: Any, shards: Any) -> Subgroup:
    """Return what lies in one page, from what _places() made of it."""
    require(is_count(group))
    return Subgroup(
        group,
        tuple(
            ParameterShard(
                _at(groups[group], position),
                tuple(_chunk(_at(groups[group], position), *places) for places in chunks),
            )
            for position, chunks in shards
        ),
    )


def _at(group: Sequence[ParameterSpec], position: int) -> ParameterSpec:
    require(is_count(position))
    return group[position]


def _chunk(spec: ParameterSpec, offsets: Any, sizes: Any) -> Chunk:
    require(*map(is_count, (*offsets, *sizes)), all(sizes))
    ends = (offset + size for offset, size in zip(offsets, sizes, strict=True))
    require(*(end <= extent for end, extent in zip(ends, spec.shape, strict=True)))
    return Chunk(tuple(offsets), tuple(sizes))


def _hex(checksums: Sequence[int]) -> str:
    return b"".join(checksum.to_bytes(CHECKSUM_BYTES) for checksum in checksums).hex()


def _checksums(text: str) -> tuple[int, ...]:
    data = bytes.fromhex(text)
    return tuple(
        int.from_bytes(data[start : start + CHECKSUM_BYTES])
        for start in range(0, len(data), CHECKSUM_BYTES)
    )
