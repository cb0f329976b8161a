"""A reader of run directories and published checkpoints, made from docs/reference/format.md alone.

It uses numpy, json and xxhash, and neither tierstore nor torch, so that what it gives is
evidence that the format is what that page says. bfloat16 comes as float32 of the same value,
and elements of which numpy has no dtype as their bytes, one more dimension at the end.
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
RECORD_BYTES_MAX = 2147475456
BLOCK_BYTES = 8 << 20

ITEM_BYTES = {
    **{"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2},
    **{"int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1, "bool": 1},
    **{"float8_e4m3fn": 1, "float8_e5m2": 1},
}


class FormatError(Exception):
    """What is read is not what the format says."""


@dataclass(frozen=True, kw_only=True)
class Content:
    """One committed step."""

    run_id: str
    step: int
    states: dict[str, dict[str, np.ndarray]]
    """Parameter name -> state -> the whole tensor."""
    scalars: dict[str, dict[str, float]]
    hyperparameters: list[dict[str, Any]]
    extra: Any


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
    """Where a chunk of one state lies in a page."""

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
    pages = []
    for folder, _, commits in ranks:
        refuse_dirty(folder, newest)
        entries = enumerate(commits[newest]["pages"])
        pages.append([folder / f"page-{page:06d}.{entry['copy']}" for page, entry in entries])
    return content_of([commits[newest] for *_, commits in ranks], pages)


def read_checkpoint(directory: Path) -> Content:
    """Return what tierstore published, but for what is in no page."""
    marker = unseal("checkpoint", directory / "tierstore.json")
    for name, file in marker["files"].items():
        require("/" not in name and name not in (".", ".."), f"{name!r} is no plain name")
        if name == ".metadata":
            continue  # Not needed, so it need not be there.
        data = (directory / name).read_bytes()
        require(len(data) == file["nbytes"], f"{name} has {len(data)} bytes")
        if file["xxh3_128"] is not None:
            require(xxhash.xxh3_128_hexdigest(data) == file["xxh3_128"], f"{name} is damaged")
    commits, pages = [], []
    for rank in range(marker["world_size"]):
        commit = unseal("commit", directory / f"rank-{rank:05d}.commit")
        expected = (marker["run_id"], marker["step"], marker["world_size"], rank)
        found = tuple(commit[key] for key in ("run_id", "step", "world_size", "rank"))
        require(found == expected, f"the commit of rank {rank} is of another checkpoint")
        commits.append(commit)
        numbers = range(len(commit["pages"]))
        pages.append([directory / f"rank-{rank:05d}.page-{page:06d}" for page in numbers])
    require(len({(c["number"], c["attempt"]) for c in commits}) == 1, "of several commits")
    return content_of(commits, pages)


# ------------------------------------------------------------------------- sealed files


def unseal(kind: str, path: Path) -> dict[str, Any]:
    head, _, text = path.read_bytes().partition(b"\n")
    match = re.fullmatch(rb"tierstore (\w+) (\d+) ([0-9a-f]{32})", head)
    if match is None or match[1].decode() != kind:
        raise FormatError(f"{path} is no {kind}")
    require(int(match[2]) == VERSION, f"{path} is of version {int(match[2])}")
    require(xxhash.xxh3_128_hexdigest(text).encode() == match[3], f"{path} is damaged")
    body: dict[str, Any] = json.loads(text)
    return body


def commit_key(name: str) -> tuple[int, int] | None:
    """Return (step, number) of the commit whose manifest is called so."""
    match = re.fullmatch(r"commit-(\d{10,})(?:\.(\d+))?", name)
    return (int(match[1]), int(match[2] or 1)) if match else None


def commits_of(folder: Path, identity: dict[str, Any]) -> dict[tuple[int, int], dict[str, Any]]:
    """Return (step, number) -> manifest, of those that are whole."""
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
        require((commit["step"], commit["number"]) == key, f"{path} is of another step")
        for field in ("run_id", "rank", "world_size"):
            require(commit[field] == identity[field], f"{path} is of another {field}")
        commits[key] = commit
    return commits


def refuse_dirty(folder: Path, newest: tuple[int, int]) -> None:
    if (folder / "dirty").exists():
        try:
            overwritten = commit_key(json.loads((folder / "dirty").read_bytes())["overwriting"])
        except (ValueError, TypeError):
            overwritten = None
        late = overwritten is not None and overwritten < newest
        require(late, f"the pages of {folder} are of mixed steps")


# -------------------------------------------------------------------------------- pages


def content_of(commits: list[dict[str, Any]], pages: list[list[Path]]) -> Content:
    first = commits[0]
    shared = "subgroups" in first
    require(all(("subgroups" in commit) == shared for commit in commits), "shared, or not")
    if shared:
        for field in ("groups", "page_bytes", "hyperparameters", "scalars"):
            require(all(commit[field] == first[field] for commit in commits), f"other {field}")
    with_groups = commits[:1] if shared else commits
    parameters = [p for commit in with_groups for group in commit["groups"] for p in group]
    data = {parameter["name"]: empty_states(parameter) for parameter in parameters}
    require(len(data) == len(parameters), "a parameter is there twice")
    times = {parameter["name"]: np.zeros(parameter["shape"], int) for parameter in parameters}
    for commit, files in zip(commits, pages, strict=True):
        layouts = list(layouts_of(commit))
        require(digest_of(layouts) == commit["layout"], "the layout is not the writer's")
        for number, (layout, file) in enumerate(zip(layouts, files, strict=True)):
            fill(data, times, layout, read_page(commit, number, layout, file))
    for name, counts in times.items():
        require(bool((counts == 1).all()), f"an element of {name} is not there once")
    scalars: dict[str, dict[str, float]] = {}
    for commit in commits:
        scalars |= decode(commit["scalars"])
    return Content(
        run_id=first["run_id"],
        step=first["step"],
        states={
            parameter["name"]: {
                state: finished(data[parameter["name"]][state], dtype, parameter["shape"])
                for state, dtype in states_of(parameter).items()
            }
            for parameter in parameters
        },
        scalars=scalars,
        hyperparameters=[decode(group) for group in first["hyperparameters"]],
        extra=decode(first["extra"]),
    )


def empty_states(parameter: dict[str, Any]) -> dict[str, np.ndarray]:
    """Return for every state the bytes of all its elements, in a dimension of their own."""
    return {
        state: np.zeros((*parameter["shape"], ITEM_BYTES[dtype]), np.uint8)
        for state, dtype in states_of(parameter).items()
    }


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
    entry = commit["pages"][number]
    checksums = re.findall("[0-9a-f]{16}", entry["checksums"])
    require(len(checksums) in (0, len(layout.blocks)), "wrong number of checksums")
    for (start, stop), checksum in zip(layout.blocks, checksums, strict=False):
        place = commit["run_id"].encode() + struct.pack("<QQQ", number, start, entry["step"])
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
    """What lies where in one page."""

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
    """Return what a manifest says in ``layout``."""
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


def states_of(parameter: dict[str, Any]) -> dict[str, str]:
    """Return state -> dtype, the master first."""
    master = "float64" if parameter["dtype"] == "float64" else "float32"
    return {"master": master, **parameter["states"]}


def layouts_of(commit: dict[str, Any]) -> Iterator[Layout]:
    if "subgroups" in commit:
        for number, shards in commit["subgroups"]:
            group = commit["groups"][number]
            yield layout_of([(group[i], list(map(chunk_of, chunks))) for i, chunks in shards])
        return
    for group in commit["groups"]:
        for ranges in shards_of(group, commit["page_bytes"]):
            yield layout_of([(p, list(chunks_of(p, start, stop))) for p, start, stop in ranges])


Shard = tuple[dict[str, Any], list[Chunk]]


def chunk_of(place: list[list[int]]) -> Chunk:
    offsets, sizes = place
    require(all(sizes), "a chunk without elements")
    return Chunk(tuple(offsets), tuple(sizes))


def shards_of(
    group: list[dict[str, Any]], page_bytes: int
) -> Iterator[list[tuple[dict[str, Any], int, int]]]:
    """Yield the ranges of parameters in one page after the other."""
    page: list[tuple[dict[str, Any], int, int]] = []
    room = page_bytes
    for parameter in group:
        numel = math.prod(parameter["shape"])
        unit = unit_of(parameter, page_bytes)
        start = 0
        while start < numel:
            stop = last_stop(parameter, start, unit, room)
            if stop == start:
                if page:
                    yield page
                    page, room = [], page_bytes
                    continue
                stop = start + unit
            page.append((parameter, start, stop))
            room -= shard_bytes(parameter, start, stop)
            start = stop
    if page:
        yield page


def unit_of(parameter: dict[str, Any], page_bytes: int) -> int:
    shape = parameter["shape"]
    if not parameter["elementwise"]:
        return math.prod(shape)
    for dimension in range(1, len(shape) + 1):
        numel = math.prod(shape[dimension:])
        if numel * element_bytes(parameter) <= page_bytes // 2:
            return numel
    return 1


def last_stop(parameter: dict[str, Any], start: int, unit: int, room: int) -> int:
    numel = math.prod(parameter["shape"])
    # Framing only adds to this, so nothing beyond it fits.
    data_max = start + room // element_bytes(parameter)
    for stop in range(min(numel, data_max - (data_max - start) % unit), start, -unit):
        if shard_bytes(parameter, start, stop) <= room:
            return stop
    return start


def element_bytes(parameter: dict[str, Any]) -> int:
    return sum(ITEM_BYTES[dtype] for dtype in states_of(parameter).values())


def shard_bytes(parameter: dict[str, Any], start: int, stop: int) -> int:
    return sum(
        record_bytes(chunk.numel * ITEM_BYTES[dtype])
        for chunk in chunks_of(parameter, start, stop)
        for dtype in states_of(parameter).values()
    )


def record_bytes(nbytes: int) -> int:
    return round_up(512 + nbytes + 244, 64)


def round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def chunks_of(parameter: dict[str, Any], start: int, stop: int) -> Iterator[Chunk]:
    """Yield the chunks of the elements [start, stop)."""
    shape = parameter["shape"]
    limit = RECORD_BYTES_MAX // max(ITEM_BYTES[dtype] for dtype in states_of(parameter).values())
    row = math.prod(shape[1:])
    if row < limit:
        limit -= limit % row
    steps = [math.prod(shape[dimension + 1 :]) for dimension in range(len(shape))]
    for first in range(start, stop, limit):
        last = min(first + limit, stop)
        while first < last:
            chunk = Chunk((), ())
            for dimension, step in enumerate(steps):
                if first % step == 0 and first + step <= last:
                    index = [first // steps[d] % shape[d] for d in range(len(shape))]
                    count = min(shape[dimension] - index[dimension], (last - first) // step)
                    sizes = (*[1] * dimension, count, *shape[dimension + 1 :])
                    chunk = Chunk(tuple(index), sizes)
                    break
            yield chunk
            first += chunk.numel


def layout_of(shards: list[Shard]) -> Layout:
    members: dict[tuple[str, bool], list[tuple[str, str, str, Chunk]]] = {}
    for parameter, chunks in shards:
        for state, dtype in states_of(parameter).items():
            own = state == "master" and parameter["dtype"] == dtype
            section = members.setdefault((state, own), [])
            for chunk in chunks:
                section.append((parameter["name"], state, dtype, chunk))
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
    if tag == "$int":
        return int(payload, 16)
    if tag == "$float":
        bits = re.fullmatch("[0-9a-f]{16}", payload)
        return struct.unpack(">d", bytes.fromhex(payload))[0] if bits else float(payload)
    if tag == "$bytes":
        return base64.b64decode(payload)
    if tag == "$dtype":
        return payload
    if tag == "$size":
        return tuple(payload)
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
