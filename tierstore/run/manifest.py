"""The identity of a run and the manifest of a commit: two kinds of sealed files."""

from __future__ import annotations

import json
import marshal
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from tierstore.run import tagged_json
from tierstore.run.checksums import CHECKSUM_BYTES
from tierstore.run.file_names import Revision
from tierstore.run.sealed import body_errors, fields_of, is_count, require, seal, unseal


@dataclass(frozen=True, slots=True, kw_only=True)
class RunIdentity:
    """The properties of a run that never change."""

    run_id: str
    rank: int
    world_size: int
    page_bytes: int

    def to_bytes(self) -> bytes:
        """Return the content of the file IDENTITY_NAME."""
        return seal("run", fields_of(self))

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
    """The slot with the committed content of a page, and the checksums of the content."""

    slot: str
    """The file of the page: "a" or "b"."""
    step: int
    """The step in which the page was written."""
    checksums: tuple[int, ...]
    """Checksums of the blocks of the layout."""

    def to_json(self) -> list[Any]:
        """Return plain values, at most 64 bytes of JSON besides the checksums."""
        return [self.slot, self.step, _hex(self.checksums)]

    @classmethod
    def from_json(cls, slot: Any, step: Any, checksums: Any) -> Self:
        """Rebuild an entry from to_json()."""
        require(slot in ("a", "b"), is_count(step))
        return cls(slot=slot, step=step, checksums=_checksums(checksums))


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """One committed step of one rank: everything that a restart needs besides pages and layout."""

    run_id: str
    attempt: str
    """Identifies one opening of the run, so that steps of two histories differ."""
    rank: int
    world_size: int
    step: int
    number: int
    """1 for the first commit of the step. Later ones may have other states in ``extra``."""
    epoch: int = 0
    """Number of rewinds of the run before this commit."""
    first: bool
    """True in the first commit of the run. If False, all ranks have had an earlier commit."""
    page_bytes: int
    hyperparameters: Any
    """One dict per group, as tagged_json.encode() returns it."""
    extra: Any
    """Name -> state of each registered object, as tagged_json.encode() returns it; or None."""
    scalars: Any
    """Scalars of parameters, as pack_scalars() returns them."""
    layout: str
    """Digest of the layout file. The file has the parameters and the chunks in each page."""
    pages: Sequence[PageEntry]
    """Page of the layout -> its content."""

    @property
    def revision(self) -> Revision:
        """The epoch, step and number of the commit. They make the name of its file."""
        return Revision(self.epoch, self.step, self.number)

    @property
    def entries(self) -> dict[int, PageEntry]:
        """Page number -> content."""
        return dict(enumerate(self.pages))

    @property
    def states(self) -> dict[str, Any]:
        """Name -> state of each registered object, as tagged_json.encode() returns it."""
        return self.extra or {}

    def to_bytes(self) -> bytes:
        """Return the content of the file manifest_name(revision)."""
        body = fields_of(self) | {"pages": [page.to_json() for page in self.pages]}
        if not self.epoch:
            del body["epoch"]
        return seal("commit", body)

    @classmethod
    def from_bytes(cls, data: bytes, where: str) -> Self:
        """Read a manifest and check its tagged values; ``where`` names it in errors.

        Raises:
            CorruptionError: the content is not what was written.
            RunDirectoryError: another version wrote it.
        """
        body = unseal("commit", data, where)
        with body_errors(where):
            pages = [PageEntry.from_json(*page) for page in body["pages"]]
            manifest = cls(**{**body, "pages": pages})
            _check(manifest)
            return manifest


def are_states(value: object) -> bool:
    """Return whether a value is a dict of the names and states of registered objects."""
    return isinstance(value, dict) and all(
        isinstance(name, str) and not name.startswith("$") for name in value
    )


def _check(manifest: Manifest) -> None:
    """Raise ValueError, TypeError or LookupError unless all fields have their types."""
    names = (manifest.run_id, manifest.attempt, manifest.layout)
    numbers = (manifest.rank, manifest.world_size, *manifest.revision)
    require(*(isinstance(name, str) for name in names), isinstance(manifest.first, bool))
    require(*map(is_count, (*numbers, manifest.page_bytes)), manifest.page_bytes > 0)
    require(manifest.extra is None or are_states(manifest.extra))
    tagged_json.decode(manifest.extra)
    scalars = tagged_json.decode(manifest.scalars)
    require(scalars.keys() == {"groups", "parameters"})
    for found in (*scalars["groups"], *scalars["parameters"].values()):
        require(found is None or isinstance(found, dict))
    require(isinstance(manifest.hyperparameters, list))
    require(len(manifest.hyperparameters) == len(scalars["groups"]))
    require(*(isinstance(tagged_json.decode(group), dict) for group in manifest.hyperparameters))


Scalars = Mapping[str, Mapping[str, float]]
"""Parameter name -> scalar name -> value."""

_NUMBERS = frozenset([int, float])


def pack_scalars(scalars: Scalars, groups: Sequence[Sequence[str]]) -> Any:
    """Return scalars in the form of a manifest: the most common scalars of each group, and others.

    Example, for the groups [["a", "b", "c"], ["d"]]::

        {"a": {"step": 7.0}, "b": {"step": 7.0}, "c": {"step": 3.0}}
        {"groups": [{"step": 7.0}, None], "parameters": {"c": {"step": 3.0}}}

    Args:
        scalars: the scalars.
        groups: the names of the parameters of each group.

    Raises:
        TypeError, ValueError: a commit cannot hold a value; the message names it.
    """
    keys: dict[str, bytes] = {}
    encoded: dict[bytes, Any] = {}  # Key -> encoded scalars.
    for name, values in scalars.items():
        # Nearly all parameters share their scalars with another. Encoding is 20 times slower.
        key = _key_of(values)
        if key is None or key not in encoded:
            found = tagged_json.encode(values, name=f"scalars[{name!r}]")
            key = key or json.dumps(found).encode()
            encoded[key] = found
        keys[name] = key
    commonest = []
    exceptions: dict[str, Mapping[str, float] | None] = dict(scalars)
    for names in groups:
        group_keys = [keys.get(name) for name in names]
        counts = Counter(group_keys)
        common = max(counts, key=counts.__getitem__, default=None)
        commonest.append(None if common is None else encoded[common])
        for name, own_key in zip(names, group_keys, strict=True):
            if own_key == common:
                exceptions.pop(name, None)
            else:
                exceptions.setdefault(name, None)
    return {"groups": commonest, "parameters": tagged_json.encode(exceptions)}


def _key_of(values: Mapping[str, float]) -> bytes | None:
    """Return a key that only equal scalars share; None if the scalars must be encoded instead."""
    if type(values) is dict and _NUMBERS.issuperset(map(type, values.values())):
        try:
            # The bytes of version 2 do not depend on other references to the values.
            return marshal.dumps(values, 2)
        except ValueError:  # A name of a type that a commit cannot hold.
            return None
    return None


def unpack_scalars(packed: Any, groups: Sequence[Sequence[str]]) -> dict[str, dict[str, float]]:
    """Return the scalars that were packed by pack_scalars()."""
    found = tagged_json.decode(packed)
    scalars = {
        name: None if shared is None else dict(shared)
        for names, shared in zip(groups, found["groups"], strict=True)
        for name in names
    } | found["parameters"]
    return {name: values for name, values in scalars.items() if values is not None}


def _hex(checksums: Sequence[int]) -> str:
    return b"".join(checksum.to_bytes(CHECKSUM_BYTES) for checksum in checksums).hex()


def _checksums(text: str) -> tuple[int, ...]:
    data = bytes.fromhex(text)
    return tuple(
        int.from_bytes(data[start : start + CHECKSUM_BYTES])
        for start in range(0, len(data), CHECKSUM_BYTES)
    )
