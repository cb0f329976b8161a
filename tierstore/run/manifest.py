"""The files that say what a directory holds: a run's identity, and one manifest per commit.

They are JSON that a person can read, behind a first line that names the format and
carries a checksum of everything after it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Self

import xxhash

from tierstore.errors import CorruptionError, RunDirectoryError
from tierstore.layout.chunks import Chunk
from tierstore.layout.parameters import ParameterSpec
from tierstore.layout.records import RECORD_DIMENSIONS_MAX
from tierstore.layout.subgroups import ParameterShard, Subgroup
from tierstore.run import tagged_json
from tierstore.run.checksums import CHECKSUM_BYTES

FORMAT_VERSION = 1

IDENTITY_NAME = "run.json"
MANIFEST_PATTERN = r"commit-(\d{10,})(?:\.([2-9]|[1-9]\d+))?"

Revision = tuple[int, int]
"""A step, and the how-manieth commit of it: nearly always the first."""


def manifest_name(revision: Revision) -> str:
    """Return the name of a manifest: that of its step, unless that was committed before."""
    step, number = revision
    return f"commit-{step:010d}" + (f".{number}" if number > 1 else "")


def manifest_revision(name: str) -> Revision | None:
    """Return what a file of this name is the manifest of, or None for any other file."""
    match = re.fullmatch(MANIFEST_PATTERN, name)
    return (int(match[1]), int(match[2] or 1)) if match else None


def page_file(page: int, copy: str) -> str:
    """Return the name of the file that holds copy "a" or "b" of a page."""
    return f"page-{page:06d}.{copy}"


def spare_file(page_file: str) -> str:
    """Return the name of the file that shall take the place of a shared page file."""
    return f"{page_file}.next"


def page_number(name: str) -> int | None:
    """Return which page a file is of, or would be of; None for any other file."""
    match = re.fullmatch(r"page-(\d+)\.[ab](\.next|\.copying-[0-9a-f]+)?", name)
    return int(match[1]) if match else None


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
            _require(isinstance(identity.run_id, str))
            _require(*map(is_count, (identity.rank, identity.world_size, identity.page_bytes)))
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
    _require(*(isinstance(name, str) for name in names), isinstance(manifest.first, bool))
    _require(*map(is_count, (*numbers, manifest.page_bytes)), manifest.page_bytes > 0)
    for page in manifest.pages:
        _require(page.copy in ("a", "b"), is_count(page.step))
    if manifest.subgroups is not None:
        _require(len(manifest.subgroups) == len(manifest.pages))
        for subgroup in manifest.subgroups:  # A rank has no page where it owns nothing.
            _require(len(subgroup.shards) > 0, *(len(s.chunks) > 0 for s in subgroup.shards))
    for spec in (spec for group in manifest.groups for spec in group):
        _require(isinstance(spec.name, str), isinstance(spec.elementwise, bool))
        _require(*map(is_count, spec.shape), len(spec.shape) <= RECORD_DIMENSIONS_MAX)
    tagged_json.decode(manifest.extra)
    scalars = tagged_json.decode(manifest.scalars)
    _require(isinstance(scalars, dict), *(isinstance(s, dict) for s in scalars.values()))
    _require(isinstance(manifest.hyperparameters, list))
    _require(len(manifest.hyperparameters) == len(manifest.groups))
    _require(*(isinstance(tagged_json.decode(group), dict) for group in manifest.hyperparameters))


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
    _require(is_count(group))
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
    _require(is_count(position))
    return group[position]


def _chunk(spec: ParameterSpec, offsets: Any, sizes: Any) -> Chunk:
    _require(*map(is_count, (*offsets, *sizes)), all(sizes))
    ends = (offset + size for offset, size in zip(offsets, sizes, strict=True))
    _require(*(end <= extent for end, extent in zip(ends, spec.shape, strict=True)))
    return Chunk(tuple(offsets), tuple(sizes))


def is_count(value: object) -> bool:
    """Return whether a value that was read is a number of things, and one that may be meant."""
    return type(value) is int and 0 <= value < 2**63


def _require(*conditions: bool) -> None:
    if not all(conditions):
        raise ValueError("a field is of another type")


def _hex(checksums: Sequence[int]) -> str:
    return b"".join(checksum.to_bytes(CHECKSUM_BYTES) for checksum in checksums).hex()


def _checksums(text: str) -> tuple[int, ...]:
    data = bytes.fromhex(text)
    return tuple(
        int.from_bytes(data[start : start + CHECKSUM_BYTES])
        for start in range(0, len(data), CHECKSUM_BYTES)
    )


def seal(kind: str, body: dict[str, Any]) -> bytes:
    """Return a file of some kind: the line that names it, then the body as JSON."""
    text = json.dumps(body, allow_nan=False, separators=(",", ":")).encode()
    return f"tierstore {kind} {FORMAT_VERSION} {xxhash.xxh3_128_hexdigest(text)}\n".encode() + text


def unseal(kind: str, data: bytes, where: str) -> dict[str, Any]:
    """Return the body of such a file; ``where`` names it in errors.

    Raises:
        CorruptionError: it is not what was written.
        RunDirectoryError: another version wrote it.
    """
    head, _, text = data.partition(b"\n")
    match = re.fullmatch(rb"tierstore (\w+) (\d+) ([0-9a-f]{32})", head)
    if match is None or match[1].decode() != kind:
        raise CorruptionError(f"{where} does not begin like a tierstore {kind} file")
    if int(match[2]) != FORMAT_VERSION:
        raise RunDirectoryError(
            f"{where} has format version {int(match[2])}, this tierstore reads version "
            f"{FORMAT_VERSION}: use the version of tierstore that wrote it"
        )
    if xxhash.xxh3_128_hexdigest(text) != match[3].decode():
        raise CorruptionError(f"{where} is damaged: its checksum does not match its content")
    with body_errors(where):
        body: dict[str, Any] = json.loads(text)
        _require(type(body) is dict)
        return body


@contextmanager
def body_errors(where: str) -> Iterator[None]:
    """Turn what a strange body leads the block into, sealed as it is, into CorruptionError."""
    try:
        yield
    except (LookupError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise CorruptionError(
            f"{where} has a right checksum but not the content of its kind"
        ) from error
