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
from typing import Any

import torch

from tierstore.checkpoint.saved_values import as_number
from tierstore.checkpoint.stored_paths import MOMENTS
from tierstore.errors import CheckpointError
from tierstore.layout.chunks import Chunk
from tierstore.layout.encodings import MASTER
from tierstore.layout.other_rules import MOMENTUM, other_momentum
from tierstore.layout.ownership import SharedParameter, partition_ranks
from tierstore.layout.page_layout import BLOCK_BYTES, PageLayout, Record, lay_out
from tierstore.layout.parameters import STEPPED, PagedParameter, ParameterSpec, master_dtype
from tierstore.layout.records import record_prefix, record_trailer
from tierstore.layout.sharding import whole_on
from tierstore.layout.state_parts import empty_kind
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
from tierstore.tools.convert.contents import STEP, Contents, Group
from tierstore.tools.convert.entries import BUFFER, Entry, Read, flat_start
from tierstore.tools.convert.options import Options
from tierstore.tools.convert.pipeline import Piece, bytes_of

_PAGE_BYTES = 64 * 2**20
_OF_ADAFACTOR = "beta2_decay"  # A key of groups of torch.optim.Adafactor.
_ADVICE = "Convert with --to dcp: restore(checkpoint=DST) begins a run with it"


class Writer:
    """Writes a run that ``TierStore(resume=True)`` opens on any number of ranks.

    Args:
        contents: what is written.
        options: ``dtype`` is the dtype of the parameters; masters are float32 or wider.

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
        cuts: dict[str, Mapping[str, Any]] = {}
        for group in contents.groups:
            cuts |= _cuts(contents, group, by_parameter)
        self._contents = _with_initial_states(contents, by_parameter, cuts)
        self.entries: Sequence[Entry] = []
        self._groups: list[list[ParameterSpec]] = []
        for group in contents.groups:
            specs = []
            dtypes = {n: options.dtype or contents.dtypes.get(n) for n in group.parameters}
            is_muon = _is_muon(group, by_parameter)
            momentum_dtype = _common_momentum_dtype(by_parameter, dtypes) if is_muon else None
            for name, dtype in dtypes.items():
                keeps = is_muon or name in contents.cuts
                entries = _of_pages(name, by_parameter[name], dtype, momentum_dtype, keeps=keeps)
                parts = self._contents.scalars.get(name, {})
                empty = {state: kind for state, part in parts.items() if (kind := empty_kind(part))}
                specs.append(_spec(entries, dtype, empty, cuts[name]))
                self.entries += entries
            if is_muon or all(spec.elementwise for spec in specs):
                _require_same_states(specs)
            self._groups.append(specs)
        self._layouts = _lay_out(self._groups)
        self.nbytes = sum(layout.nbytes for layout in self._layouts) + 2**20
        self.lost: Sequence[str] = [
            f"{len(names)} {what} of the model, such as {names[0]!r}: a run holds the parameters "
            "and states of its optimizer"
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
        scalars = {
            name: numbers
            for name, parts in self._contents.scalars.items()
            if (numbers := {n: float(v) for n, v in parts.items() if empty_kind(v) is None})
        }
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
        """Return the step of the source, else the largest step count."""
        contents = self._contents
        if contents.step is not None:
            return contents.step
        groups = (group.hyperparameters for group in contents.groups)
        counts = (as_number(of.get(STEP)) for of in (*contents.scalars.values(), *groups))
        return int(max((count for count in counts if count is not None), default=0.0))


def _states(
    names: Sequence[str], by_parameter: Mapping[str, list[Entry]]
) -> dict[str, list[Entry]]:
    """Return parameter -> its states, without the master."""
    return {name: [e for e in by_parameter[name] if e.state != MASTER] for name in names}


def _is_muon(group: Group, by_parameter: Mapping[str, list[Entry]]) -> bool:
    """Return whether a group has Muon's momentum."""
    entries = (entry for name in group.parameters for entry in by_parameter[name])
    is_there = any(entry.state == MOMENTUM for entry in entries)
    return is_there and other_momentum(group.hyperparameters) is None


def _cuts(
    contents: Contents, group: Group, by_parameter: Mapping[str, list[Entry]]
) -> Mapping[str, Mapping[str, Any]]:
    """Return parameter of a group -> how pages cut it, as Contents.cuts has it.

    Raises:
        CheckpointError: the states do not tell.
    """
    if contents.cuts.keys() >= {*group.parameters}:
        return contents.cuts
    states, names = _states(group.parameters, by_parameter), set[str]()
    is_whole = _is_muon(group, by_parameter) or _OF_ADAFACTOR in group.hyperparameters
    for name, found in states.items():
        shape = next((entry.shape for entry in by_parameter[name] if entry.state == MASTER), None)
        parts = contents.scalars.get(name, {}).items()
        empty = {part for part, value in parts if empty_kind(value) is not None}
        names |= {entry.state for entry in found} | empty
        is_whole |= any(entry.shape != shape for entry in found)
        for entry in found:
            if entry.shape == () and shape:
                raise CheckpointError(
                    f"{entry.state} of {name!r} is a tensor of shape [], which may be a state or a "
                    f"number of a commit. {_ADVICE}"
                )
    is_whole |= any("." in state for state in names)
    # No class of torch.optim has exp_avg alone.
    if not is_whole and (names == {"exp_avg"} or not names <= MOMENTS):
        raise CheckpointError(
            f"the states {sorted(names)} of {group.parameters[0]!r} do not tell whether their rule "
            f"steps each element by itself, which pages depend on. {_ADVICE}"
        )
    return {name: {"elementwise": not is_whole} for name in group.parameters}


def _with_initial_states(
    contents: Contents,
    by_parameter: Mapping[str, list[Entry]],
    cuts: Mapping[str, Mapping[str, Any]],
) -> Contents:
    """Add initial states of parameters that never had a gradient, and so have none.

    Args:
        contents: what is written.
        by_parameter: the entries of each parameter, to which these are added.
        cuts: parameter -> how pages cut it.

    Returns:
        The contents, with a step count of 0 where the others of the group have one, and STEPPED
        for parameters of SGD.

    Raises:
        CheckpointError: the states of other parameters do not tell the shapes.
    """
    scalars = dict(contents.scalars)
    for group in contents.groups:
        states = _states(group.parameters, by_parameter)
        stepped = next((n for n, found in states.items() if found), "")
        stepped = stepped or next((n for n in states if scalars.get(n)), "")
        initial = functools.partial(initial_value, group=group.hyperparameters)
        is_sgd = other_momentum(group.hyperparameters) is not None
        is_muon = _is_muon(group, by_parameter)
        for name, found in states.items():
            if stepped and not found and (states[stepped] or not scalars.get(name)):
                if not cuts[name]["elementwise"] and not is_muon:
                    raise CheckpointError(
                        f"parameter {name!r} was never stepped, and the states of others do not "
                        f"tell the shapes of its states. {_ADVICE}"
                    )
                shape = next((e.shape for e in by_parameter[name]), None)
                by_parameter[name] += [
                    replace(entry, parameter=name, shape=shape, read=_reader(initial(entry.state)))
                    for entry in states[stepped]
                    if shape is not None
                ]
                scalars[name] = {
                    key: initial(key) if empty_kind(part) is None else part
                    for key, part in scalars.get(stepped, {}).items()
                }
            numbers = scalars.get(name, {})
            if STEP not in numbers and is_sgd:
                was_stepped = bool(found or contents.scalars.get(name))
                scalars[name] = {STEPPED: float(was_stepped), **numbers}
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

    muon.Muon has one dtype for a group, or the dtype of each parameter. DeepSpeed has several if
    only some parameters are on NVMe.

    Args:
        by_parameter: the entries of each parameter.
        dtypes: parameter of the group -> its dtype; None: the dtype of its master.
    """
    found = set()
    is_own = True
    for name, dtype in dtypes.items():
        entries = {entry.state: entry for entry in by_parameter[name]}
        if MOMENTUM in entries and MASTER in entries:
            found.add(entries[MOMENTUM].dtype)
            is_own &= entries[MOMENTUM].dtype == (dtype or entries[MASTER].dtype)
    return None if is_own or len(found) < 2 else functools.reduce(torch.promote_types, found)


def _of_pages(
    name: str,
    entries: Sequence[Entry],
    dtype: torch.dtype | None,
    momentum_dtype: torch.dtype | None,
    *,
    keeps: bool,
) -> list[Entry]:
    """Return the master and states of a parameter with the dtypes of a page.

    Args:
        name: of the parameter.
        entries: its master and states.
        dtype: of the parameter; None: the dtype of its master.
        momentum_dtype: see _common_momentum_dtype().
        keeps: whether states keep their dtypes, as Muon's do, except momentum_dtype.
    """
    found = {entry.state: entry for entry in entries}
    master = found.pop(MASTER, None)
    if master is None:
        raise CheckpointError(f"the source has no weight of parameter {name!r}: name it as well")
    paged = [master.cast(master_dtype(dtype or master.dtype))]
    for state, entry in found.items():
        wide = torch.promote_types(entry.dtype, torch.float32)
        narrow = entry.dtype.is_floating_point and entry.dtype != wide
        if momentum_dtype is not None and state == MOMENTUM:
            entry = entry.cast(momentum_dtype)
        elif narrow and not keeps:
            entry = entry.cast(wide)
        paged.append(entry)
    return paged


def _spec(
    entries: Sequence[Entry],
    dtype: torch.dtype | None,
    empty: Mapping[str, str],
    cut: Mapping[str, Any],
) -> ParameterSpec:
    """Return a parameter as pages have it.

    Args:
        entries: its master, then its states.
        dtype: of the parameter; None: the dtype of its master.
        empty: name -> kind of the parts of the state that have nothing.
        cut: how pages cut it.

    Raises:
        CheckpointError: pages do not hold such a parameter or state.
    """
    master, *states = entries
    try:
        return PagedParameter(
            name=master.parameter,
            tensor=torch.empty((), dtype=dtype or master.dtype, device="cpu").expand(master.shape),
            states={entry.state: entry.dtype for entry in states},
            shapes={entry.state: entry.shape for entry in states},
            empty=empty,
            **cut,
        ).spec
    except ValueError as error:
        raise CheckpointError(str(error)) from error


def _require_same_states(specs: Sequence[ParameterSpec]) -> None:
    for spec in specs:
        if {name for name, _ in spec.states} != {name for name, _ in specs[0].states}:
            raise CheckpointError(
                f"parameters {specs[0].name!r} and {spec.name!r} of one group differ in states: "
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
    records = (r for layout in layouts for section in layout.sections for r in section.records)
    for record in records:
        if record.is_copy:
            raise CheckpointError(
                f"pages cut {record.parameter.name!r}, and have copies of its {record.state!r}, "
                f"which are not written here. {_ADVICE}"
            )
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
