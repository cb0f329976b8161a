"""Views of a page: tensors over its buffer, with the parameters and their gradients."""

from __future__ import annotations

import contextlib
import gc
import itertools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from typing_extensions import override

from tierstore.layout.chunks import Chunk
from tierstore.layout.dtensors import local_tensor
from tierstore.layout.encodings import (
    MASTER,
    REMAINDER,
    AnyState,
    EncodedState,
    SplitMaster,
    assign,
)
from tierstore.layout.page_layout import PageLayout, RecordViews
from tierstore.layout.parameters import PagedParameter, ParameterSpec
from tierstore.paging.host_gradients import HostGradient

_PIECE_ELEMENTS = 1 << 20


@contextlib.contextmanager
def without_collections() -> Iterator[None]:
    """Suspend Python's cycle collector while many objects without a cycle are made.

    With thousands of parameters in a page, the collector took half of the time of a step.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


class Source:
    """The parameters and gradients that a view reads and writes. Here: the tensors themselves.

    Args:
        local_chunks: parameter name and chunk -> the chunk within this rank's tensor, if the two
            chunks differ.
    """

    def __init__(self, local_chunks: Mapping[tuple[str, Chunk], Chunk]) -> None:
        self.local_chunks = local_chunks

    def values(self, parameter: PagedParameter, chunk: Chunk) -> torch.Tensor:
        """Return a chunk of a parameter, to read and write."""
        local = self.local_chunk(parameter.name, chunk)
        return local.select(local_tensor(parameter.tensor))

    def gradient(self, parameter: PagedParameter, chunk: Chunk) -> torch.Tensor | None:
        """Return a chunk of a parameter's gradient; None without a gradient."""
        grad = parameter.grad
        if grad is None:
            return None
        own = local_tensor(grad)
        if isinstance(own, HostGradient):
            own = own.left.host
        return self.local_chunk(parameter.name, chunk).select(own)

    def local_chunk(self, name: str, chunk: Chunk) -> Chunk:
        """Return the offsets and sizes of a chunk within this rank's tensor of the parameter."""
        return self.local_chunks.get((name, chunk), chunk) if self.local_chunks else chunk

    def send_back(self) -> None:
        """Start to copy the parameters back to their device, if the source holds copies."""


class LeftSource(Source):
    """The parameters as a step left them, although a program may have converted them since.

    Args:
        local_chunks: as in Source.
        left: parameter name -> this rank's tensor.

    Raises:
        ValueError: raised by values() if the memory of a parameter was freed.
    """

    def __init__(
        self, local_chunks: Mapping[tuple[str, Chunk], Chunk], left: Mapping[str, torch.Tensor]
    ) -> None:
        super().__init__(local_chunks)
        self._left = left

    @override
    def values(self, parameter: PagedParameter, chunk: Chunk) -> torch.Tensor:
        tensor = self._left[parameter.name]
        if tensor.numel() and not tensor.untyped_storage().nbytes():
            raise ValueError(
                f"the memory of parameter {parameter.name!r} was freed before its last step was "
                "committed, so the step cannot be committed: call synchronize() before you free "
                "parameters. You can restore the commit before it"
            )
        return self.local_chunk(parameter.name, chunk).select(tensor)


class RoundedMaster(EncodedState):
    """A master in a page, and its parameter. The parameter is the rounded master.

    Both are read and written together. Changes of the parameter outside of the optimizer are
    therefore found without a separate pass.

    Args:
        master: float32 or wider, of any shape.
        parameter: of the same shape.
        note: called with a bool of shape (), True if elements were changed. Not called if it is
            known to be False.
    """

    __slots__ = ("master", "note_changed", "parameter")

    def __init__(
        self,
        master: torch.Tensor,
        parameter: torch.Tensor,
        note: Callable[[torch.Tensor], None],
    ) -> None:
        self.master = master
        self.parameter = parameter
        self.note_changed = note

    @property
    @override
    def stored(self) -> Mapping[str, torch.Tensor]:
        return {MASTER: self.master}

    @override
    def read(self) -> torch.Tensor:
        master, values = self.master, self.parameter
        # On a device, waiting for the result takes longer.
        if values.device.type == "cpu" and _rounds_to(master, values):
            return master
        rounded = master.to(values.dtype)
        differs = (values != rounded) & ~(values.isnan() & rounded.isnan())
        master.copy_(torch.where(differs, values.to(master.dtype), master))
        self.note_changed(differs.any())
        return master

    @override
    def write(self, values: torch.Tensor, chances: torch.Tensor | None = None) -> None:
        assert chances is None
        if values is not self.master:
            self.master.copy_(values)
        self.parameter.copy_(self.master)

    @override
    def __getitem__(self, index: Any) -> RoundedMaster:
        return RoundedMaster(self.master[index], self.parameter[index], self.note_changed)

    @override
    def zero_(self) -> None:
        self.master.copy_(self.parameter)


@dataclass(slots=True, eq=False)
class ChunkView:
    """One chunk of a parameter shard. Update ``master`` and ``states`` in place."""

    chunk: Chunk
    """Offsets and sizes within the parameter."""
    states: Mapping[str, Any]
    """State name -> tensor of the state's dtype, of shape ``chunk.sizes`` unless the state has a
    shape of its own; or an EncodedState or JoinedState."""
    _master: Any
    _note: Callable[[torch.Tensor], None]
    _spec: ParameterSpec
    _parameter: PagedParameter
    _source: Source
    _has_gradient: bool
    _is_read: bool = False
    """True if ``master`` was asked for."""

    @property
    def master(self) -> Any:
        """The values that a step changes. A tensor of shape ``chunk.sizes``, float32 or wider.

        A parameter of that dtype is its own master; then this is a view of the parameter. An
        encoded master is an EncodedState.
        """
        if not self._is_read:
            self._is_read = True
            if isinstance(parts := self.master_parts, RoundedMaster):
                parts.read()
        return self._master

    @master.setter
    def master(self, value: Any) -> None:
        assert value is self._master  # ``chunk.master -= update`` also assigns.

    @property
    def master_parts(self) -> Any:
        """The master as an EncodedState; a tensor if the parameter is its own master.

        Reading a part compares it with the parameter. Writing a part rounds it into the parameter.
        An optimizer that reads and writes a few rows at a time finds them in the cache. With
        ``master`` it needs two more passes over memory.
        """
        if self._spec.stores_parameter:
            return self._master
        return RoundedMaster(self._master, self.values, self._note)

    @property
    def grad(self) -> torch.Tensor | None:
        """The same chunk of the parameter's gradient; not to be modified.

        None if no rank has a gradient; zeros if only other ranks have one.
        """
        gradient = self._source.gradient(self._parameter, self.chunk)
        if gradient is None and self._has_gradient:
            return torch.zeros_like(self.values)
        return gradient

    @property
    def local(self) -> Chunk:
        """Offsets and sizes within this rank's tensor of the parameter."""
        return self._source.local_chunk(self._parameter.name, self.chunk)

    def state(self, name: str) -> AnyState:
        """Return a state by name as it is in the page. "master" is also a name."""
        found: AnyState = self._master if name == MASTER else self.states[name]
        return found

    def reset(self, name: str) -> None:
        """Set a state or an encoded master to its value before the first step."""
        state = self.state(name)
        initial = self._parameter.initial.get(name)
        if initial and isinstance(state, torch.Tensor):
            state.fill_(initial)
        else:
            state.zero_()

    @property
    def values(self) -> torch.Tensor:
        """The same chunk of the parameter itself."""
        return self._source.values(self._parameter, self.chunk)


@dataclass(frozen=True, slots=True, eq=False)
class ShardView:
    """One parameter shard of a page: the chunks of one parameter, in flat order."""

    parameter: PagedParameter
    spec: ParameterSpec
    chunks: list[ChunkView]
    """The chunks that this rank owns; may be empty."""
    has_gradient: bool
    """True if any rank has a gradient. The shard is then stepped."""


class PageView:
    """A page as an optimizer sees it: the part of one subgroup that this rank owns.

    Valid until the caller has asked for a window of further pages; see Pages.sweep().
    """

    __slots__ = ("_records", "changed", "group", "shards")

    def __init__(
        self,
        layout: PageLayout,
        parameters: Mapping[str, PagedParameter],
        records: Sequence[RecordViews],
        source: Source,
        present: Collection[str] = (),
    ) -> None:
        self._records = records  # The records of all chunks of the shards, in order.
        self.changed: dict[str, torch.Tensor] = {}
        """Parameter name -> bool of shape (), True if the parameter was changed outside of the
        optimizer. Parameters that are known to be unchanged may be absent."""
        self.group = layout.subgroup.group
        """Index of the group of all shards, in the order of attach()."""
        self.shards = []
        """All shards of the subgroup, in the same order on every rank."""
        remaining = iter(records)
        for shard in layout.subgroup.shards:
            spec = shard.parameter
            views = list(itertools.islice(remaining, len(shard.chunks)))
            parameter = parameters[spec.name]
            has_gradient = spec.name in present
            # Keep no reference to this view: a cycle would keep the memory of the page.
            note = partial(_note, self.changed, spec.name)
            chunks = [
                ChunkView(
                    chunk,
                    **_states(spec, record, source.values(parameter, chunk)),
                    _note=note,
                    _spec=spec,
                    _parameter=parameter,
                    _source=source,
                    _has_gradient=has_gradient,
                )
                for chunk, record in zip(shard.chunks, views, strict=True)
            ]
            self.shards.append(ShardView(parameter, spec, chunks, has_gradient))

    def initialize(self) -> None:
        """Fill a page that was never written with the values before the first step."""
        for chunk in (chunk for shard in self.shards for chunk in shard.chunks):
            for state in chunk.states:
                chunk.reset(state)
            master = chunk.state(MASTER)
            if isinstance(master, EncodedState):  # The parameter is a part of it: do not write it.
                master.zero_()
            else:
                assign(master, chunk.values)

    def adopt_parameters(self, written: Collection[str]) -> None:
        """Copy parameters to the masters that steps do not compare with them; see ``changed``.

        A parameter of low precision is the rounded master. Elements that differ from the rounded
        master were changed, for example by ``model.load_state_dict()``. A step finds such elements
        in the masters that it reads. Does not wait for a device.

        Args:
            written: names of parameters with encoded masters that were written to since the page
                had their values. The page must have been read with these values.
        """
        for shard in self.shards:
            if shard.has_gradient:
                continue
            for chunk in shard.chunks:
                if isinstance(parts := chunk.master_parts, RoundedMaster):
                    parts.read()
        if written:
            self.drop_remainders(written)

    def drop_remainders(self, written: Collection[str]) -> None:
        """Set encoded masters to changed elements of their parameters; see adopt_parameters()."""
        for spec, record, chunk in self._chunks():
            master = chunk.state(MASTER)
            if spec.name in written and isinstance(master, SplitMaster):
                _note(self.changed, spec.name, master.drop_remainders(record.master))

    @contextlib.contextmanager
    def adopting(self, written: Collection[str]) -> Iterator[None]:
        """Adopt parameters for a block that only reads. The page is restored afterwards."""
        masters = [c.state(MASTER) for spec, _, c in self._chunks() if spec.name in written]
        remainders = [m.stored[REMAINDER] for m in masters if isinstance(m, SplitMaster)]
        before = [remainder.clone() for remainder in remainders]
        self.drop_remainders(written)
        try:
            yield
        finally:
            _copy(remainders, before)

    @contextlib.contextmanager
    def keeping_parameters(self) -> Iterator[None]:
        """Restore parameters with encoded masters to their values after the block."""
        pairs = [(c.values, c.values.clone()) for spec, _, c in self._chunks() if spec.encodings]
        try:
            yield
        finally:
            _copy([values for values, _ in pairs], [before for _, before in pairs])

    def write_parameters(self) -> None:
        """Round masters to parameters, except if the parameter is its master or a part of it."""
        self._round([chunk for shard in self.shards for chunk in shard.chunks])

    def write_read_masters(self) -> None:
        """Round the masters that a step has read, except masters that it read in parts."""
        chunks = (chunk for shard in self.shards for chunk in shard.chunks)
        self._round([chunk for chunk in chunks if chunk._is_read])

    def _round(self, chunks: Sequence[ChunkView]) -> None:
        rounded = [chunk for chunk in chunks if not chunk._spec.stores_parameter]
        _copy([chunk.values for chunk in rounded], [chunk._master for chunk in rounded])

    def read_parameters(self) -> None:
        """Copy the parameters to the records that hold them."""
        pairs = [
            (record.master, own if isinstance(own := chunk._master, torch.Tensor) else chunk.values)
            for spec, record, chunk in self._chunks()
            if spec.stores_parameter
        ]
        _copy([target for target, _ in pairs], [values for _, values in pairs])

    def restore_parameters(self) -> None:
        """Copy the masters in the page, or its stored parameters, to the parameters."""
        pairs = [(record, chunk) for _, record, chunk in self._chunks()]
        _copy([chunk.values for _, chunk in pairs], [record.master for record, _ in pairs])

    def _chunks(self) -> Iterator[tuple[ParameterSpec, RecordViews, ChunkView]]:
        """Yield every chunk with its records."""
        chunks = ((shard.spec, chunk) for shard in self.shards for chunk in shard.chunks)
        for (spec, chunk), record in zip(chunks, self._records, strict=True):
            yield spec, record, chunk


def _note(changed: dict[str, torch.Tensor], name: str, found: torch.Tensor) -> None:
    changed[name] = changed[name] | found if name in changed else found


def _states(spec: ParameterSpec, record: RecordViews, values: torch.Tensor) -> dict[str, Any]:
    """Return the master and the states of a chunk, given its part of the parameter."""
    master = values if spec.stores_parameter else record.master
    if not spec.encodings:
        return {"_master": master, "states": record.states}
    tensors: dict[str, Any] = {**record.states, MASTER: master}
    views = {
        state: tensors[state] if encoding is None else encoding.over(state, tensors)
        for state, encoding in ((state, spec.encoding(state)) for state, _ in spec.all_states)
    }
    return {"_master": views.pop(MASTER), "states": views}


def _copy(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    if targets:
        torch._foreach_copy_(targets, sources)


def _rounds_to(master: torch.Tensor, values: torch.Tensor) -> bool:
    """Return whether a master on the CPU rounds to 16-bit ``values``, bit for bit."""
    if not values.ndim:
        values, master = values[None], master[None]
    # In pieces, so that the rounded values stay in the cache. With numpy, because torch.equal()
    # compares one element at a time.
    rows = max(1, _PIECE_ELEMENTS * len(values) // max(1, values.numel()))
    for start in range(0, len(values), rows):
        bits = values[start : start + rows].view(torch.int16)
        rounded = master[start : start + rows].to(values.dtype)
        if not np.array_equal(bits.numpy(), rounded.view(torch.int16).numpy()):
            return False
    return True
