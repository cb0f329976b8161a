"""A reader of run directories and published checkpoints, made from docs/reference/format.md alone.

It uses numpy, json and xxhash, and neither tierstore nor torch, so that what it gives is
evidence that the format is what that page says. bfloat16 comes as float32 of the same value,
and elements without a dtype in numpy as their bytes, one more dimension at the end.
"""

from __future__ import annotations

import base64
import json
import math
import re
import struct
from collections import Counter, OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

VERSION = 1
BLOCK_BYTES = 8 << 20
RECORD_BYTES_MAX = 2**31 - 8192

ITEM_BYTES = {
    **{"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2},
    **{"int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1, "bool": 1},
    **{"float8_e4m3fn": 1, "float8_e5m2": 1},
}


# Encoding -> dtype of its numbers.
BLOCK_DTYPES = {"int8_root": "int8", "uint8_root": "uint8"}


class FormatError(Exception):
    """The bytes read violate the format."""


@dataclass(frozen=True, kw_only=True)
class Content:
    """One committed step."""

    run_id: str
    epoch: int
    step: int
    states: dict[str, dict[str, np.ndarray]]
    """Parameter name -> state -> the whole tensor."""
    scalars: dict[str, dict[str, float]]
    hyperparameters: list[dict[str, Any]]
    extra: Any
    marked: frozenset[int] = frozenset()
    """The ranks that have marked a published checkpoint as whole."""


@dataclass(frozen=True)
class Chunk:
    """A rectangle of a tensor."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.sizes)


@dataclass(frozen=True)
class Record:
    """Position of a chunk of one state in a page."""

    name: str
    state: str
    dtype: str
    chunk: Chunk
    offset: int

    @property
    def nbytes(self) -> int:
        return self.chunk.numel * ITEM_BYTES[self.dtype]


def read_run(directory: Path) -> Content:
    """Return the committed step of a run directory that nobody uses."""
    folders = sorted(path for path in directory.iterdir() if re.fullmatch(r"rank-\d{5}", path.name))
    require(bool(folders), f"{directory} holds no ranks")
    ranks = []
    for rank, folder in enumerate(folders):
        identity = unseal("run", folder / "run.json")
        require(folder.name == f"rank-{rank:05d}", f"a rank below {folder.name} is missing")
        require((identity["rank"], identity["world_size"]) == (rank, len(folders)), "wrong rank")
        ranks.append((folder, identity, commits_of(folder, identity)))
    common = set.intersection(
        *({(key, commit["attempt"]) for key, commit in commits.items()} for *_, commits in ranks)
    )
    require(bool(common), f"{directory} holds no committed step")
    newest = max(key for key, _ in common)
    pages, layouts = [], []
    for folder, _, commits in ranks:
        refuse_dirty(folder, newest)
        commit = commits[newest]
        layouts.append(read_layout(folder / f"layout-{commit['layout']}", commit))
        entries = enumerate(commit["pages"])
        pages.append([entry and folder / f"page-{page:06d}.{entry[0]}" for page, entry in entries])
    return content_of([commits[newest] for *_, commits in ranks], layouts, pages)


def read_checkpoint(directory: Path) -> Content:
    """Return what tierstore published, but for what is in no page."""
    marker = unseal("checkpoint", directory / "tierstore.json")
    for name, file in marker["files"].items():
        require("/" not in name and name not in (".", ".."), f"{name!r} is not a plain name")
        if name == ".metadata":
            continue  # Not needed, so it need not be there.
        data = (directory / name).read_bytes()
        require(len(data) == file["nbytes"], f"{name} has {len(data)} bytes")
        if file["xxh3_128"] is not None:
            require(xxhash.xxh3_128_hexdigest(data) == file["xxh3_128"], f"{name} is damaged")
    commits, layouts, pages = [], [], []
    for rank in range(marker["world_size"]):
        commit = unseal("commit", directory / f"rank-{rank:05d}.commit")
        expected = (marker["run_id"], marker["step"], marker["world_size"], rank)
        found = tuple(commit[key] for key in ("run_id", "step", "world_size", "rank"))
        require(commit.get("epoch", 0) == marker.get("epoch", 0), "the commit is of another epoch")
        require(found == expected, f"the commit of rank {rank} is of another checkpoint")
        commits.append(commit)
        layouts.append(read_layout(directory / f"rank-{rank:05d}.layout", commit))
        entries = enumerate(commit["pages"])
        pages.append(
            [entry and directory / f"rank-{rank:05d}.page-{page:06d}" for page, entry in entries]
        )
    require(len({(c["number"], c["attempt"]) for c in commits}) == 1, "of several commits")
    ranks = range(marker["world_size"])
    marked = frozenset(rank for rank in ranks if is_marked(directory, rank, marker))
    return replace(content_of(commits, layouts, pages), marked=marked)


def is_marked(directory: Path, rank: int, marker: dict[str, Any]) -> bool:
    """A mark that cannot be read, or is about another manifest, does not count."""
    try:
        body = unseal("whole", directory / f"rank-{rank:05d}.whole")
    except (FormatError, OSError, ValueError):
        return False
    digest: str = marker["files"][f"rank-{rank:05d}.commit"]["xxh3_128"]
    return bool(body["manifest"] == digest)


# ------------------------------------------------------------------------- sealed files


def unseal(kind: str, path: Path) -> dict[str, Any]:
    head, _, text = path.read_bytes().partition(b"\n")
    match = re.fullmatch(rb"tierstore (\w+) (\d+) ([0-9a-f]{32})", head)
    if match is None or match[1].decode() != kind:
        raise FormatError(f"{path} is not a {kind}")
    require(int(match[2]) == VERSION, f"{path} is of version {int(match[2])}")
    require(xxhash.xxh3_128_hexdigest(text).encode() == match[3], f"{path} is damaged")
    body: dict[str, Any] = json.loads(text)
    return body


def read_layout(path: Path, commit: dict[str, Any]) -> dict[str, Any]:
    """Return the layout that a manifest names."""
    layout = unseal("layout", path)
    require(path.read_bytes().split()[3].decode() == commit["layout"], f"{path} is another layout")
    require(len(commit["pages"]) == len(layout["pages"]), "other pages than the layout")
    for values in (commit["hyperparameters"], commit["scalars"]["groups"]):
        require(len(values) == len(layout["groups"]), "other groups than the layout")
    return layout


CommitKey = tuple[int, int, int]
"""Epoch, step and number of a commit."""


def commit_key(name: str) -> CommitKey | None:
    """Return the key of the commit whose manifest is called so."""
    match = re.fullmatch(r"commit-(?:e(\d+)-)?(\d{10,})(?:\.(\d+))?", name)
    return (int(match[1] or 0), int(match[2]), int(match[3] or 1)) if match else None


def commits_of(folder: Path, identity: dict[str, Any]) -> dict[CommitKey, dict[str, Any]]:
    """Return key -> manifest, of those that are whole."""
    commits = {}
    for path in folder.iterdir():
        key = commit_key(path.name)
        if key is None:
            continue
        try:
            commit = unseal("commit", path)
        except FormatError as error:
            if "damaged" not in str(error):
                raise
            continue
        found = (commit.get("epoch", 0), commit["step"], commit["number"])
        require(found == key, f"{path} is of another step")
        for field in ("run_id", "rank", "world_size"):
            require(commit[field] == identity[field], f"{path} is of another {field}")
        commits[key] = commit
    return commits


def refuse_dirty(folder: Path, newest: CommitKey) -> None:
    if (folder / "dirty").exists():
        try:
            overwritten = commit_key(json.loads((folder / "dirty").read_bytes())["overwriting"])
        except (ValueError, TypeError):
            overwritten = None
        late = overwritten is not None and overwritten < newest
        require(late, f"the pages of {folder} are of mixed steps")


# -------------------------------------------------------------------------------- pages


def content_of(
    commits: list[dict[str, Any]], layouts: list[dict[str, Any]], pages: list[list[Path | None]]
) -> Content:
    first = commits[0]
    for field in ("page_bytes", "hyperparameters", "scalars"):
        require(all(commit[field] == first[field] for commit in commits), f"other {field}")
    groups = layouts[0]["groups"]
    require(all(layout["groups"] == groups for layout in layouts), "other groups")
    parameters = [parameter for group in groups for parameter in group]
    data = {parameter["name"]: empty_states(parameter) for parameter in parameters}
    require(len(data) == len(parameters), "a parameter is there twice")
    times = {parameter["name"]: np.zeros(parameter["shape"], int) for parameter in parameters}
    for commit, layout, files in zip(commits, layouts, pages, strict=True):
        of_pages = list(pages_of(layout))
        require(digest_of(of_pages) == layout["offsets"], "the offsets are not the writer's")
        for number, (page, file) in enumerate(zip(of_pages, files, strict=True)):
            if file is not None:
                fill(data, times, page, read_page(commit, number, page, file))
    for parameter in parameters:
        name = parameter["name"]
        require(bool((times[name] == 1).all()), f"an element of {name} is not there once")
    return Content(
        run_id=first["run_id"],
        epoch=first.get("epoch", 0),
        step=first["step"],
        states={
            parameter["name"]: decoded(
                parameter,
                {
                    name: finished(data[parameter["name"]][name], dtype, shape_of(parameter, name))
                    for name, dtype in tensors_of(parameter).items()
                },
            )
            for parameter in parameters
        },
        scalars=scalars_of(decode(first["scalars"]), groups),
        hyperparameters=[decode(group) for group in first["hyperparameters"]],
        extra=decode(first["extra"]),
    )


def scalars_of(
    packed: dict[str, Any], groups: list[list[dict[str, Any]]]
) -> dict[str, dict[str, float]]:
    """Return parameter name -> scalar name -> number."""
    found = {
        parameter["name"]: shared
        for group, shared in zip(groups, packed["groups"], strict=True)
        for parameter in group
    }
    found |= packed["parameters"]
    return {name: scalars for name, scalars in found.items() if scalars is not None}


def empty_states(parameter: dict[str, Any]) -> dict[str, np.ndarray]:
    """Return for every state the bytes of all its elements, in a dimension of their own."""
    return {
        name: np.zeros((*shape_of(parameter, name), ITEM_BYTES[dtype]), np.uint8)
        for name, dtype in tensors_of(parameter).items()
    }


def decoded(parameter: dict[str, Any], tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return the states of a parameter, given the tensors in its pages."""
    states = {}
    encodings = parameter.get("encodings", {})
    for state in ["master", *parameter["states"]]:
        encoding = encodings.get(state)
        if encoding is None:
            states[state] = tensors[state]
        elif state == "master":
            rest = tensors["master_remainder"].astype(np.int64)
            rest = rest << {"remainder": 0, "24bit": 8}[encoding]
            bits = tensors["master"].view(np.uint32).astype(np.int64) + rest
            found = bits.astype(np.uint32).view(np.float32)
            states[state] = np.where(np.isnan(found), tensors["master"], found)
        else:
            numbers = tensors[f"{state}_{encoding}"].astype(np.float32)
            scales = tensors[f"{state}_scale"]
            of_columns = np.repeat(scales, 256, axis=-1)[..., : numbers.shape[-1]]
            states[state] = np.copysign((numbers**2) ** 2, numbers) * of_columns
    return states


def shape_of(parameter: dict[str, Any], state: str) -> list[int]:
    """Return the shape of a tensor: one of rows has 1 for the last dimension."""
    shape: list[int] = parameter.get("shapes", {}).get(state, parameter["shape"])
    shared = shared_columns(parameter, state)
    return shape if shared == 1 else [*shape[:-1], -(-shape[-1] // shared)]


def shared_columns(parameter: dict[str, Any], state: str) -> int:
    """Return the number of columns that share an element of a tensor."""
    encodings = parameter.get("encodings", {})
    return 256 if encodings.get(state.removesuffix("_scale")) in BLOCK_DTYPES else 1


def place_in(parameter: dict[str, Any], state: str, chunk: Chunk) -> Chunk:
    """Return the elements of a state that are with a chunk of the parameter."""
    if (shape := parameter.get("shapes", {}).get(state)) is not None:
        places = list(zip(shape, chunk.offsets, chunk.sizes, strict=True))
        return Chunk(
            tuple(0 if own == 1 else at for own, at, _ in places),
            tuple(1 if own == 1 else size for own, _, size in places),
        )
    shared = shared_columns(parameter, state)
    if shared == 1:
        return chunk
    first, size = chunk.offsets[-1], chunk.sizes[-1]
    return Chunk((*chunk.offsets[:-1], first // shared), (*chunk.sizes[:-1], -(-size // shared)))


def records_in(parameter: dict[str, Any], state: str, dtype: str, chunk: Chunk) -> list[Chunk]:
    """Return the places of the records of a state that are with a chunk of the parameter."""
    shape = parameter.get("shapes", {}).get(state)
    if shape is None or lies_along(shape, parameter["shape"]):
        return [place_in(parameter, state, chunk)]
    rest = math.prod(shape[1:])
    rows = RECORD_BYTES_MAX // (rest * ITEM_BYTES[dtype]) if shape else 1
    require(rows > 0, "a free state with rows that no record holds")
    if not shape or shape[0] <= rows:
        return [Chunk((0,) * len(shape), tuple(shape))]
    none = (0,) * (len(shape) - 1)
    return [
        Chunk((first, *none), (min(rows, shape[0] - first), *shape[1:]))
        for first in range(0, shape[0], rows)
    ]


def lies_along(shape: list[int], parameter: list[int]) -> bool:
    return len(shape) == len(parameter) and all(
        own in (1, size) for own, size in zip(shape, parameter, strict=True)
    )


def fill(
    data: dict[str, dict[str, np.ndarray]],
    times: dict[str, np.ndarray],
    layout: Layout,
    page: np.ndarray,
) -> None:
    """Copy the records of a page to where they belong, and count the elements of masters."""
    for record in layout.records:
        begin = record.offset + 512
        end = begin + record.nbytes
        require(page[record.offset : record.offset + 4].tobytes() == b"PK\3\4", "no record")
        require(page[end + 222 : end + 226].tobytes() == b"PK\5\6", "no end of a record")
        chunk = record.chunk
        place = tuple(slice(o, o + n) for o, n in zip(chunk.offsets, chunk.sizes, strict=True))
        elements = page[begin:end].reshape(*chunk.sizes, ITEM_BYTES[record.dtype])
        data[record.name][record.state][place] = elements
        if record.state == "master":
            times[record.name][place] += 1


def finished(data: np.ndarray, dtype: str, shape: list[int]) -> np.ndarray:
    data = data.reshape(-1)
    if dtype == "bfloat16":  # The upper half of a float32.
        return (data.view("<u2").astype(np.uint32) << 16).view(np.float32).reshape(shape)
    if dtype.startswith("float8"):
        return data.reshape(*shape, 1)
    return data.view(np.dtype(dtype).newbyteorder("<")).reshape(shape)


def read_page(commit: dict[str, Any], number: int, layout: Layout, file: Path) -> np.ndarray:
    page = np.fromfile(file, np.uint8)
    require(len(page) == layout.nbytes, f"{file} has {len(page)} bytes, not {layout.nbytes}")
    _, step, text = commit["pages"][number]
    checksums = re.findall("[0-9a-f]{16}", text)
    require(len(checksums) == len(layout.blocks), "wrong number of checksums")
    for (start, stop), checksum in zip(layout.blocks, checksums, strict=True):
        place = commit["run_id"].encode() + struct.pack("<QQQ", number, start, step)
        found = xxhash.xxh3_64_hexdigest(page[start:stop], seed=xxhash.xxh3_64_intdigest(place))
        require(found == checksum, f"{file} is damaged at byte {start}")
    return page


# ------------------------------------------------------------------------------- layout


@dataclass(frozen=True)
class Section:
    """The records of one state of all shards of a page."""

    state: str
    offset: int
    nbytes: int
    records: list[Record]


@dataclass(frozen=True)
class Layout:
    """Positions of all sections of one page."""

    sections: list[Section]

    @property
    def records(self) -> list[Record]:
        return [record for section in self.sections for record in section.records]

    @property
    def blocks(self) -> list[tuple[int, int]]:
        return [
            (start, min(start + BLOCK_BYTES, section.offset + section.nbytes))
            for section in self.sections
            for start in range(section.offset, section.offset + section.nbytes, BLOCK_BYTES)
        ]

    @property
    def nbytes(self) -> int:
        return sum(section.nbytes for section in self.sections)


def digest_of(layouts: list[Layout]) -> str:
    """Return what a layout says in ``offsets``."""
    digests = ""
    for layout in layouts:
        places = [
            [section.state, section.offset, section.nbytes, list(map(place_of, section.records))]
            for section in layout.sections
        ]
        text = json.dumps(places, separators=(",", ":"), ensure_ascii=True)
        digests += xxhash.xxh3_128_hexdigest(text.encode())
    return xxhash.xxh3_128_hexdigest(digests.encode())


def place_of(record: Record) -> list[Any]:
    chunk = record.chunk
    return [record.name, chunk.offsets, chunk.sizes, record.dtype, record.offset]


def tensors_of(parameter: dict[str, Any]) -> dict[str, str]:
    """Return the name and dtype of each tensor in pages, the master first."""
    master = {"master": "float64" if parameter["dtype"] == "float64" else "float32"}
    encoding = parameter.get("encodings", {}).get("master")
    if encoding is not None:
        require(parameter["dtype"] == "bfloat16", "only bfloat16 has encoded masters")
        remainder = {"remainder": "int16", "24bit": "int8"}[encoding]
        master = {"master": "bfloat16", "master_remainder": remainder}
    states = {}
    for state, dtype in parameter["states"].items():
        if state in parameter.get("encodings", {}):
            require(dtype == "float32", "only float32 states are encoded")
            encoding = parameter["encodings"][state]
            states |= {f"{state}_{encoding}": BLOCK_DTYPES[encoding], f"{state}_scale": "float32"}
        else:
            states[state] = dtype
    return {**master, **states}


def pages_of(layout: dict[str, Any]) -> Iterator[Layout]:
    """Yield the layout of each page of a rank."""
    for number, shards in layout["pages"]:
        group = layout["groups"][number]
        yield layout_of([(group[i], list(map(chunk_of, chunks))) for i, chunks in shards])


Shard = tuple[dict[str, Any], list[Chunk]]


def chunk_of(place: list[list[int]]) -> Chunk:
    offsets, sizes = place
    require(all(sizes), "a chunk without elements")
    return Chunk(tuple(offsets), tuple(sizes))


def record_bytes(nbytes: int) -> int:
    return round_up(512 + nbytes + 244, 64)


def round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def layout_of(shards: list[Shard]) -> Layout:
    members: dict[tuple[str, bool], list[tuple[str, str, str, Chunk]]] = {}
    for parameter, chunks in shards:
        for state, dtype in tensors_of(parameter).items():
            own = state == "master" and parameter["dtype"] == dtype
            section = members.setdefault((state, own), [])
            for chunk in chunks:
                for place in records_in(parameter, state, dtype, chunk):
                    section.append((parameter["name"], state, dtype, place))
    sections = []
    position = 0
    for (state, _), records in sorted(members.items(), key=lambda item: not item[0][1]):
        sections.append(Section(state, position, 0, []))
        for member in records:
            sections[-1].records.append(Record(*member, position))
            position += record_bytes(sections[-1].records[-1].nbytes)
        position = round_up(position, 4096)
        sections[-1] = replace(sections[-1], nbytes=position - sections[-1].offset)
    return Layout(sections)


# ------------------------------------------------------------------------ tagged values


def decode(value: Any) -> Any:
    """Return what a tagged value is of; torch tensors, dtypes and sizes as numpy's or plain."""
    if isinstance(value, list):
        return [decode(item) for item in value]
    if not isinstance(value, dict):
        return value
    if not any(key.startswith("$") for key in value):
        return {key: decode(item) for key, item in value.items()}
    ((tag, payload),) = value.items()
    if tag == "$tuple":
        return tuple(decode(item) for item in payload)
    if tag in ("$dict", "$ordered_dict", "$counter"):
        kind = {"$dict": dict, "$ordered_dict": OrderedDict, "$counter": Counter}[tag]
        return kind({decode(key): decode(item) for key, item in payload})
    if tag == "$float":
        return float(payload)
    if tag == "$bytes":
        return base64.b64decode(payload)
    if tag == "$dtype":
        return payload
    if tag == "$tensor":
        data = np.frombuffer(base64.b64decode(payload["data"]), np.uint8)
        return finished(data, payload["dtype"], payload["shape"])
    if tag == "$array":
        data = np.frombuffer(base64.b64decode(payload["data"]), np.uint8)
        return data.view(payload["dtype"]).reshape(payload["shape"])
    if tag == "$scalar":
        return np.frombuffer(base64.b64decode(payload["data"]), payload["dtype"])[0]
    raise FormatError(f"unknown tag {tag!r}")


def require(good: bool, message: str) -> None:
    if not good:
        raise FormatError(message)
