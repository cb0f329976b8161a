"""The layout file of a rank: its parameters, and the chunks in each page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Self

from tierstore.errors import CorruptionError
from tierstore.layout.chunks import Chunk
from tierstore.layout.encodings import encodings_of
from tierstore.layout.page_layout import PageLayout, lay_out, layout_digest
from tierstore.layout.parameters import ParameterSpec
from tierstore.layout.records import RECORD_DIMENSIONS_MAX
from tierstore.layout.state_parts import EMPTY
from tierstore.layout.subgroups import ParameterShard, Subgroup
from tierstore.run.file_names import layout_name
from tierstore.run.sealed import body_errors, checksum_of, is_count, require, seal, unseal
from tierstore.storage.base import Storage


@dataclass(frozen=True, slots=True, kw_only=True)
class RankLayout:
    """The content of the pages of one rank. Many commits have the same layout.

    The file is named by the checksum of its content, and a manifest names the file.
    """

    groups: Sequence[Sequence[ParameterSpec]]
    """Param groups in order, the same on all ranks."""
    subgroups: Sequence[Subgroup]
    """Page -> the chunks in it."""
    offsets: str
    """Digest of the place of each record in each page."""

    @classmethod
    def from_pages(
        cls, groups: Sequence[Sequence[ParameterSpec]], pages: Sequence[PageLayout]
    ) -> Self:
        """Return the layout of the pages of one rank, with parameters in these groups."""
        return cls(
            groups=groups,
            subgroups=[page.subgroup for page in pages],
            offsets=layout_digest(pages),
        )

    def to_bytes(self) -> bytes:
        """Return the content of the file."""
        body = {
            "groups": [[spec.to_json() for spec in group] for group in self.groups],
            "pages": _pages_to_json(self.groups, self.subgroups),
            "offsets": self.offsets,
        }
        return seal("layout", body)

    @classmethod
    def from_bytes(cls, data: bytes, where: str, *, digest: str) -> Self:
        """Read the content of the file that a manifest names.

        Args:
            data: the content.
            where: names the file in errors.
            digest: the name of the layout in the manifest.

        Raises:
            CorruptionError: the content is not what was written.
            RunDirectoryError: another version wrote it.
        """
        body = unseal("layout", data, where)
        if checksum_of(data) != digest:
            raise CorruptionError(f"{where} is the layout {checksum_of(data)}, expected {digest}")
        with body_errors(where):
            groups = [[ParameterSpec.from_json(spec) for spec in group] for group in body["groups"]]
            for spec in (spec for group in groups for spec in group):
                require(isinstance(spec.name, str), isinstance(spec.elementwise, bool))
                require(spec.unit is None or (is_count(spec.unit) and spec.unit > 0))
                require(*map(is_count, spec.shape), len(spec.shape) <= RECORD_DIMENSIONS_MAX)
                require({*dict(spec.shapes)} <= dict(spec.states).keys())
                for _, sizes in spec.shapes:
                    require(*map(is_count, sizes), len(sizes) <= RECORD_DIMENSIONS_MAX)
                is_whole = not spec.elementwise and spec.unit is None
                require(is_whole or not spec.free_states)
                require(*(kind in EMPTY for _, kind in spec.empty))
                require(*(name in encodings_of(state) for state, name in spec.encodings))
            names = [spec.name for group in groups for spec in group]
            require(len(set(names)) == len(names))
            pages = [_page_from_json(groups, *page) for page in body["pages"]]
            require(isinstance(body["offsets"], str))
            return cls(groups=groups, subgroups=pages, offsets=body["offsets"])

    def renamed(self, names: Mapping[str, str]) -> Self:
        """Return the layout under other names.

        Args:
            names: name of a parameter -> its new name, if the name changes.

        Raises:
            CorruptionError: as in lay_out().
        """
        self.lay_out()
        specs = {
            spec.name: replace(spec, name=names.get(spec.name, spec.name))
            for group in self.groups
            for spec in group
        }
        subgroups = [
            Subgroup(
                subgroup.group,
                tuple(
                    ParameterShard(specs[shard.parameter.name], shard.chunks)
                    for shard in subgroup.shards
                ),
            )
            for subgroup in self.subgroups
        ]
        groups = [[specs[spec.name] for spec in group] for group in self.groups]
        return self.from_pages(groups, list(map(lay_out, subgroups)))

    def lay_out(self) -> list[PageLayout]:
        """Return the layout of every page.

        Raises:
            CorruptionError: records are at other places than when the layout was written, or a
                record is larger than any record that tierstore writes.
        """
        try:
            pages = list(map(lay_out, self.subgroups))
        except ValueError as error:
            raise CorruptionError(f"a layout has an impossible page: {error}") from error
        if layout_digest(pages) != self.offsets:
            raise CorruptionError("a layout has records at other places than when it was written")
        return pages


def load_layout(storage: Storage, digest: str) -> RankLayout:
    """Return a layout that a manifest of this rank names.

    Raises:
        CorruptionError: the layout is missing, or not what was written.
        RunDirectoryError: another version wrote the layout.
    """
    name = layout_name(digest)
    where = f"{storage.location}/{name}"
    if name not in storage.list():
        raise CorruptionError(f"{where} is missing, though a commit names it")
    return RankLayout.from_bytes(storage.get(name), where, digest=digest)


def _pages_to_json(groups: Sequence[Sequence[ParameterSpec]], pages: Sequence[Subgroup]) -> Any:
    positions = [{spec.name: index for index, spec in enumerate(group)} for group in groups]
    return [
        [
            page.group,
            [
                [
                    positions[page.group][shard.parameter.name],
                    [[chunk.offsets, chunk.sizes] for chunk in shard.chunks],
                ]
                for shard in page.shards
                if shard.chunks
            ],
        ]
        for page in pages
    ]


def _page_from_json(groups: Sequence[Sequence[ParameterSpec]], group: Any, shards: Any) -> Subgroup:
    require(is_count(group), len(shards) > 0)
    return Subgroup(group, tuple(_shard_from_json(groups[group], *shard) for shard in shards))


def _shard_from_json(group: Sequence[ParameterSpec], position: Any, chunks: Any) -> ParameterShard:
    require(is_count(position), len(chunks) > 0)
    chunk_from_json = partial(_chunk_from_json, group[position])
    return ParameterShard(group[position], tuple(chunk_from_json(*chunk) for chunk in chunks))


def _chunk_from_json(spec: ParameterSpec, offsets: Any, sizes: Any) -> Chunk:
    require(*map(is_count, (*offsets, *sizes)), all(sizes))
    ends = (offset + size for offset, size in zip(offsets, sizes, strict=True))
    require(*(end <= extent for end, extent in zip(ends, spec.shape, strict=True)))
    return Chunk(tuple(offsets), tuple(sizes))
