"""Format "tierstore", written: a run of one rank with one commit."""

from __future__ import annotations

import functools
import json
import os
import secrets
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch

from tierstore.errors import CheckpointError
from tierstore.layout.chunks import Chunk
from tierstore.layout.encodings import MASTER
from tierstore.layout.other_rules import MOMENTUM, other_momentum
from tierstore.layout.ownership import SharedParameter, partition_ranks
from tierstore.layout.page_layout import BLOCK_BYTES, PageLayout, Record, lay_out
from tierstore.layout.parameters import STEPPED, ParameterSpec, dtype_name, master_dtype
from tierstore.layout.records import (
    RECORD_DIMENSIONS_MAX,
    RECORD_DTYPES,
    record_prefix,
    record_trailer,
)
from tierstore.layout.sharding import whole_on
from tierstore.optim.classes import initial_value
from tierstore.run import tagged_json
from tierstore.run.checksums import block_checksum
from tierstore.run.file_names import (
    CLEAN_NAME,
    IDENTITY_NAME,
    layout_name,
    manifest_name,
    page_file,
    rank_folder,
)
from tierstore.run.layout_file import RankLayout
from tierstore.run.manifest import Manifest, PageEntry, RunIdentity, pack_scalars
from tierstore.run.sealed import checksum_of
from tierstore.storage.paths import begin_write_back
from tierstore.tools.convert.contents import STEP, Contents
from tierstore.tools.convert.entries import BUFFER, Entry, Read, flat_start
from tierstore.tools.convert.options import Options
from tierstore.tools.convert.pipeline import Piece, bytes_of

_PAGE_BYTES = 64 * 2**20
_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


class Writer:
    """Writes a run that ``TierStore(resume=True)`` opens on any number of ranks.

    Args:
        contents: what is written.
        options: ``dtype`` is that of the parameters; masters are float32 or wider.

    Raises:
        CheckpointError: a run does not hold such parameters or states.
    """

    def __init__(self, contents: Contents, options: Options) -> None:
        if not contents.groups:
            raise CheckpointError(
                "the source has no optimizer, and a run has the param groups of one: convert it "
                "with --to dcp, and restore(checkpoint=DST) begins a run with these weights"
            )
        by_parameter: dict[str, list[Entry]] = defaultdict(list)
        for entry in contents.entries:
            if entry.state != BUFFER:
                by_parameter[entry.parameter].append(entry)
        self._contents = _with_initial_states(contents, by_parameter)
        self.entries: Sequence[Entry] = []
        self._groups: list[list[ParameterSpec]] = []
        for group in contents.groups:
            specs = []
            dtypes = {n: options.dtype or contents.dtypes.get(n) for n in group.parameters}
            momentum_dtype = _common_momentum_dtype(by_parameter, dtypes)
            for name, dtype in dtypes.items():
                is_muon = other_momentum(group.hyperparameters) is None
                spec, entries = _paged(
                    name, by_parameter[name], dtype, momentum_dtype, is_muon=is_muon
                )
                specs.append(spec)
                self.entries += entries
            _require_same_states(specs)
            self._groups.append(specs)
        self._layouts = _lay_out(self._groups)
        self.nbytes = sum(layout.nbytes for layout in self._layouts) + 2**20
        self.lost: Sequence[str] = [
            f"{len(names)} {what} of the model are not carried, such as {names[0]!r}: a run holds "
            "what an optimizer pages"
            for what, names in (
                (
                    "buffers or frozen tensors",
                    [e.parameter for e in contents.entries if e.state == BUFFER],
                ),
                ("other values", list(contents.values)),
            )
            if names
        ]

    @contextmanager
    def writing(self, directory: Path) -> Iterator[Callable[[Piece], None]]:
        """Write pages as pieces come, then layout and manifest."""
        folder = directory / rank_folder(0)
        folder.mkdir()
        pages = _Pages(folder, self._layouts)
        yield pages.put
        run_id = secrets.token_hex(16)
        step = self._step()
        identity = RunIdentity(run_id=run_id, rank=0, world_size=1, page_bytes=_PAGE_BYTES)
        layout = RankLayout.from_pages(self._groups, self._layouts).to_bytes()
        names = [[spec.name for spec in specs] for specs in self._groups]
        scalars = {name: values for name, values in self._contents.scalars.items() if values}
        manifest = Manifest(
            run_id=run_id,
            attempt=secrets.token_hex(8),
            rank=0,
            world_size=1,
            step=step,
            number=1,
            first=True,
            page_bytes=_PAGE_BYTES,
            hyperparameters=[
                tagged_json.encode(dict(group.hyperparameters), name=f"param_groups[{number}]")
                for number, group in enumerate(self._contents.groups)
            ],
            extra=tagged_json.encode(self._contents.extra or {}),
            scalars=pack_scalars(scalars, names),
            layout=checksum_of(layout),
            pages=[
                PageEntry(slot="a", step=step, checksums=pages.checksums(number, run_id, step))
                for number in range(len(self._layouts))
            ],
        )
        mark = {"committed": manifest_name(manifest.revision)}
        (folder / IDENTITY_NAME).write_bytes(identity.to_bytes())
        (folder / layout_name(manifest.layout)).write_bytes(layout)
        (folder / manifest_name(manifest.revision)).write_bytes(manifest.to_bytes())
        (folder / CLEAN_NAME).write_bytes(json.dumps(mark).encode())

    def _step(self) -> int:
        """Return the step of the source, else the largest step count of a parameter."""
        if self._contents.step is not None:
            return self._contents.step
        counts = (values.get("step", 0.0) for values in self._contents.scalars.values())
        return int(max(counts, default=0.0))


def _with_initial_states(contents: Contents, by_parameter: Mapping[str, list[Entry]]) -> Contents:
    """Add initial states of parameters that never had a gradient, and so have none.

    Args:
        contents: what is written.
        by_parameter: the entries of each parameter, to which these are added.

    Returns:
        The contents, with a step count of 0 where the others of the group have one, and STEPPED
        for parameters of SGD.
    """
    scalars = dict(contents.scalars)
    for group in contents.groups:
        states = {n: [e for e in by_parameter[n] if e.state != MASTER] for n in group.parameters}
        stepped = next((name for name, found in states.items() if found), "")
        initial = functools.partial(initial_value, group=group.hyperparameters)
        is_sgd = other_momentum(group.hyperparameters) is not None
        for name, found in states.items():
            if stepped and not found:
                shape = next((e.shape for e in by_parameter[name]), None)
                by_parameter[name] += [
                    replace(entry, parameter=name, shape=shape, read=_reader(initial(entry.state)))
                    for entry in states[stepped]
                    if shape is not None
                ]
                scalars[name] = {key: initial(key) for key in scalars.get(stepped, {})}
            numbers = scalars.get(name, {})
            if STEP not in numbers and is_sgd:
                scalars[name] = {STEPPED: float(bool(found)), **numbers}
    return replace(contents, scalars=scalars)


def _reader(value: float) -> Read:
    """Return the function that reads a tensor of one value."""

    def read(chunk: Chunk, target: torch.Tensor) -> None:
        target.fill_(value)

    return read


def _common_momentum_dtype(
    by_parameter: Mapping[str, Sequence[Entry]], dtypes: Mapping[str, torch.dtype | None]
) -> torch.dtype | None:
    """Return the dtype for the momentum of all parameters of a group; None: it stays as it is.

    muon.Muon has one dtype for a group, or that of each parameter. DeepSpeed has several if only
    some parameters are on NVMe.

    Args:
        by_parameter: the entries of each parameter.
        dtypes: parameter of the group -> its dtype; None: that of its master.
    """
    found = set()
    is_own = True
    for name, dtype in dtypes.items():
        entries = {entry.state: entry for entry in by_parameter[name]}
        if MOMENTUM in entries and MASTER in entries:
            found.add(entries[MOMENTUM].dtype)
            is_own &= entries[MOMENTUM].dtype == (dtype or entries[MASTER].dtype)
    return None if is_own or len(found) < 2 else functools.reduce(torch.promote_types, found)


def _paged(
    name: str,
    entries: Sequence[Entry],
    dtype: torch.dtype | None,
    momentum_dtype: torch.dtype | None,
    *,
    is_muon: bool,
) -> tuple[ParameterSpec, list[Entry]]:
    """Return the spec of a parameter, and its entries with the dtypes of a page.

    Args:
        name: of the parameter.
        entries: its master and states.
        dtype: of the parameter; None: that of its master.
        momentum_dtype: see _common_momentum_dtype().
        is_muon: whether momentum, if there is any, is Muon's, and keeps its dtype.
    """
    found = {entry.state: entry for entry in entries}
    master = found.pop(MASTER, None)
    if master is None:
        raise CheckpointError(f"the source has no weight of parameter {name!r}: name it as well")
    dtype = dtype or master.dtype
    is_muon = is_muon and MOMENTUM in found
    if dtype not in _DTYPES or len(master.shape) > RECORD_DIMENSIONS_MAX:
        raise CheckpointError(
            f"parameter {name!r} is {dtype_name(dtype)} {list(master.shape)}, which cannot be paged"
        )
    # Other states of Muon may have an element for each row.
    rows = (*master.shape[:-1], min(1, *master.shape[-1:])) if is_muon else None
    shapes = []
    paged = [master.cast(master_dtype(dtype))]
    for state, entry in found.items():
        wide = torch.promote_types(entry.dtype, torch.float32)
        narrow = entry.dtype.is_floating_point and entry.dtype != wide
        if is_muon and momentum_dtype is not None and state == MOMENTUM:
            entry = entry.cast(momentum_dtype)
        elif narrow and not is_muon:
            entry = entry.cast(wide)
        paged.append(entry)
        if state != MOMENTUM and entry.shape == rows != master.shape:
            shapes.append((state, entry.shape))
        elif (
            entry.shape != master.shape
            or not state.isidentifier()
            or entry.dtype not in RECORD_DTYPES
        ):
            raise CheckpointError(
                f"{state} of {name!r} is {dtype_name(entry.dtype)} {list(entry.shape)}: a run "
                f"holds states of the shape of their parameter, {list(master.shape)}"
            )
    spec = ParameterSpec(
        name=name,
        shape=master.shape,
        dtype=dtype,
        states=tuple((entry.state, entry.dtype) for entry in paged[1:]),
        elementwise=not is_muon,
        shapes=tuple(shapes),
    )
    return spec, paged


def _require_same_states(specs: Sequence[ParameterSpec]) -> None:
    for spec in specs:
        if {name for name, _ in spec.states} != {name for name, _ in specs[0].states}:
            raise CheckpointError(
                f"parameters {specs[0].name!r} and {spec.name!r} of one group have other states: "
                "save them in two groups, or leave one out with --exclude"
            )


def _lay_out(groups: Sequence[Sequence[ParameterSpec]]) -> list[PageLayout]:
    """Return the pages that a store of one rank makes of these groups."""
    layouts = []
    for number, specs in enumerate(groups):
        parameters = [
            SharedParameter(spec=spec, holding=whole_on([0]), flat=spec.elementwise, cost=1)
            for spec in specs
        ]
        subgroups = partition_ranks(number, parameters, _PAGE_BYTES, 1)
        layouts += [lay_out(subgroup.of(0)) for subgroup in subgroups]
    return layouts


class _Pages:
    """Page files, which are filled in the order of entries.

    Args:
        folder: of the rank.
        layouts: of all pages.
    """

    def __init__(self, folder: Path, layouts: Sequence[PageLayout]) -> None:
        self._folder = folder
        self._layouts = layouts
        # Parameter and state -> first element in flat order, file and record, in that order.
        self._places: dict[tuple[str, str], list[tuple[int, Path, Record]]] = defaultdict(list)
        for number, layout in enumerate(layouts):
            path = self._path(number)
            with open(path, "wb") as file:
                file.truncate(layout.nbytes)
                for record in (r for section in layout.sections for r in section.records):
                    sizes, dtype = record.chunk.sizes, record.dtype
                    file.seek(record.offset)
                    file.write(record_prefix(sizes, dtype))
                    file.seek(record.data_offset + record.data_nbytes)
                    file.write(record_trailer(sizes, dtype))
                    assert not record.is_copy  # No row of a matrix is cut on one rank.
                    shape = record.parameter.state_shape(record.state)
                    start = flat_start(shape, record.chunk)
                    key = record.parameter.name, record.state
                    self._places[key].append((start, path, record))
        for places in self._places.values():
            places.sort(key=lambda place: place[0])

    def _path(self, number: int) -> Path:
        return self._folder / page_file(number, "a")

    def put(self, piece: Piece) -> None:
        """Write a piece, which may be in several records."""
        entry = piece.entry
        itemsize = entry.dtype.itemsize
        position = flat_start(entry.shape, piece.chunk)
        data = bytes_of(piece.tensor)
        places = self._places[entry.key]
        index = bisect_right(places, position, key=lambda place: place[0]) - 1
        while data:
            start, path, record = places[index]
            inside = (position - start) * itemsize
            taken = data[: record.data_nbytes - inside]
            fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
            try:
                _write_at(fd, taken, record.data_offset + inside)
                begin_write_back(fd, record.data_offset + inside, len(taken))
            finally:
                os.close(fd)
            data = data[len(taken) :]
            position += len(taken) // itemsize
            index += 1

    def checksums(self, number: int, run_id: str, step: int) -> tuple[int, ...]:
        """Return the checksums of all blocks of a page."""
        found = []
        buffer = memoryview(bytearray(BLOCK_BYTES))
        with open(self._path(number), "rb", buffering=0) as file:
            for block in self._layouts[number].blocks:
                file.seek(block.offset)
                data = buffer[: block.nbytes]
                done = 0
                while done < block.nbytes:
                    done += file.readinto(data[done:]) or 0
                found.append(
                    block_checksum(data, run_id=run_id, page=number, offset=block.offset, step=step)
                )
        return tuple(found)


def _write_at(fd: int, data: memoryview, offset: int) -> None:
    done = 0
    while done < len(data):
        done += os.pwrite(fd, data[done:], offset + done)
