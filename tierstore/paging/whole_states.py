"""Whole states of parameters, read from pages and written to pages outside of a step."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Mapping, Sequence

import torch

from tierstore.errors import RunMismatchError
from tierstore.layout.chunks import Chunk
from tierstore.layout.dtensors import is_dtensor, local_tensor, placed_as
from tierstore.layout.encodings import MASTER, SplitMaster, assign, values_of
from tierstore.layout.parameters import PagedParameter, ParameterSpec, check_states
from tierstore.paging.given_states import States
from tierstore.paging.page import Content, Needed, Page
from tierstore.paging.page_table import PageTable
from tierstore.paging.tier_plan import Tier
from tierstore.paging.views import PageView
from tierstore.ranks.peers import agree


def agree_to_read(table: PageTable, names: Collection[str]) -> None:
    """Check that all ranks read the states of the same parameters.

    Raises:
        RunMismatchError: the names differ.
        PeerFailed: another rank makes another call.
    """
    _require_same(agree(table.ranks, "read states", lambda: sorted(names)))


def agree_to_write(
    table: PageTable, values: States, names: Collection[str], *, are_current: bool
) -> bool:
    """Check that states fit the parameters, and that all ranks write the same states.

    Args:
        table: all groups.
        values: the states to write.
        names: the parameters whose states are replaced.
        are_current: whether the pages of this rank have these values already.

    Returns:
        Whether the pages of all ranks have these values already.

    Raises:
        ValueError: a state does not fit, or belongs to a parameter that is not in ``names``.
        RunMismatchError: the ranks passed different states.
        PeerFailed: a state does not fit on another rank.
    """
    parameters = {member.name: member for member in table.parameters}

    def check() -> tuple[list[str], bool]:
        for name in [*values, *names]:
            if name not in parameters:
                raise ValueError(f"there is no parameter {name!r} in this store")
        for name, states in values.items():
            if name not in names:
                raise ValueError(f"parameter {name!r} has values but is not among the names")
            check_states(parameters[name], states)
        written = [f"{state} of {name}" for name in values for state in values[name]]
        return sorted([*names, *written]), are_current

    lists, current = zip(*agree(table.ranks, "write states", check), strict=True)
    _require_same(lists)
    return all(current)


def _require_same(lists: Sequence[Sequence[str]]) -> None:
    for rank, names in enumerate(lists):
        if names != lists[0]:
            found = sorted(set(names) ^ set(lists[0]))
            raise RunMismatchError(
                f"all ranks must name the same parameters and states: ranks 0 and {rank} "
                f"differ in {found[:3]}"
            )


def read_states(table: PageTable, names: Collection[str]) -> dict[str, dict[str, torch.Tensor]]:
    """Return the states of some parameters; see Pages.read_states().

    Args:
        table: all subgroups, in order.
        names: the parameters, the same on all ranks.
    """
    pager = table.pager
    members = [member for member in table.parameters if member.name in names]
    held = {member.name: _local(member) for member in members}
    found: dict[str, dict[str, torch.Tensor]] = {name: {} for name in held}
    wanted = [page for page in table.all_pages if not page.parameters.keys().isdisjoint(held)]
    for page in wanted:
        page.look_for_writes()
    with contextlib.closing(pager.stream(wanted, Needed.STEP)) as stream:
        for page in stream:
            _collect(table, page, held, found)
            pager.release(page)
            _complete(table, page, held, found)
    table.replication.finish()
    rank = table.ranks.rank
    parts = {
        shard.spec.name: shard.parameter.holding.uneven_part(shard.spec.shape, rank)
        for page in wanted
        for shard in page.shared.shards
    }
    for member in members:
        spec, states = member.spec, found[member.name]
        for state, dtype in readable_states(spec):
            if state not in states:  # The parameter has no elements.
                shape = spec.state_chunk(state, held[member.name]).sizes
                states[state] = torch.zeros(shape, dtype=dtype, device="cpu")
            value = states.pop(state)
            shape, part = spec.state_shape(state), parts.get(member.name)
            states[state] = placed_as(member.tensor, value, shape, part)
    return found


def _local(parameter: PagedParameter) -> Chunk:
    """Return this rank's whole tensor as a chunk."""
    sizes = tuple(local_tensor(parameter.tensor).shape)
    return Chunk((0,) * len(sizes), sizes)


def show_in_memory(table: PageTable, name: str) -> dict[str, torch.Tensor] | None:
    """Return the states of a parameter as views of the memory that its page keeps.

    Args:
        table: all subgroups, of a store without a directory on one rank.
        name: the parameter.

    Returns:
        State name -> tensor of the state's shape; None if no record holds a whole state: the
        parameter has no elements, has more than a record may hold, or is encoded.
    """
    for page in table.pages:
        if name not in page.parameters:
            continue
        parameter = page.parameters[name]
        shape = tuple(parameter.tensor.shape)
        records = page.layout.records.get((name, Chunk((0,) * len(shape), shape)))
        if records is None or parameter.encodings or max(map(len, records.values())) > 1:
            return None
        if page.content is Content.FRESH:
            with contextlib.closing(table.pager.stream([page], Needed.STEP)) as stream:
                for fresh in stream:
                    table.pager.swap_out(fresh)
        if page.copy is not None:
            page.copy.wait()
        tensors = {}
        for state, _ in readable_states(parameter.spec):
            if page.buffer is not None:  # A separate storage: torch.save() writes whole storages.
                tensor = records[state][0].over(page.buffer.memory)
            else:
                tensor = records[state][0].view(page.memory)
            tensors[state] = placed_as(parameter.tensor, tensor, parameter.spec.state_shape(state))
        return tensors
    return None


def readable_states(spec: ParameterSpec) -> Sequence[tuple[str, torch.dtype]]:
    """Return the states that a user reads. A parameter that is its own master has no master."""
    return spec.states if spec.owns_master else spec.all_states


def _collect(
    table: PageTable,
    page: Page,
    held: Mapping[str, Chunk],
    found: Mapping[str, dict[str, torch.Tensor]],
) -> None:
    """Add the states in a page to ``found``.

    Args:
        table: all subgroups.
        page: the page, held, with the sections of a step.
        held: name of a parameter -> this rank's whole tensor, as a chunk.
        found: name of a parameter -> state name -> tensor of this rank; completed page by page.
    """
    content = table.pager.files.map(page)
    view_of_page = page.view()
    with view_of_page.adopting(page.written):
        for shard in view_of_page.shards:
            name = shard.spec.name
            for state, dtype in readable_states(shard.spec) if name in held else ():
                sizes = shard.spec.state_chunk(state, held[name]).sizes
                is_mapped = content is not None and shard.spec.encoding(state) is None
                for view in shard.chunks:
                    records = page.layout.records[name, view.chunk].get(state, ())
                    if is_mapped and view.local.sizes == held[name].sizes and len(records) == 1:
                        assert content is not None
                        found[name][state] = records[0].over(content)
                        continue
                    # The state is in several pages, or was never written: no file can be mapped.
                    if state not in found[name]:
                        found[name][state] = _provide(table, sizes, dtype)
                    place = shard.spec.state_chunk(state, view.local)
                    place.select(found[name][state]).copy_(values_of(view.state(state)))


def _complete(
    table: PageTable,
    page: Page,
    held: Mapping[str, Chunk],
    found: Mapping[str, dict[str, torch.Tensor]],
) -> None:
    """Send the states of a subgroup from their owners to the ranks that hold replicas."""
    state_tensors: dict[str, dict[str, torch.Tensor]] = {}
    for name in (name for name in page.parameters if name in held):
        spec = page.parameters[name].spec
        for state, dtype in readable_states(spec):
            if state not in found[name]:
                sizes = spec.state_chunk(state, held[name]).sizes
                found[name][state] = _provide(table, sizes, dtype)
            state_tensors.setdefault(state, {})[name] = found[name][state]
    for state, tensors in state_tensors.items():
        table.replication.begin(page, page.source, tensors, tensors, state)


def _provide(table: PageTable, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Return zeros in an unnamed file; without a directory, on the device of the pages."""
    page = next((page for page in table.all_pages if not page.is_empty), None)
    if table.usability.has_directory or page is None or page.tier is not Tier.DEVICE:
        return table.pager.files.scratch(shape, dtype)
    return torch.zeros(shape, dtype=dtype, device=page.memory.device)


def write_pages(
    table: PageTable,
    fill: Callable[[PageView], None],
    scalars: Mapping[str, Mapping[str, float]],
    names: Collection[str] | None = None,
    *,
    keeps_parameters: bool = False,
) -> None:
    """Rewrite pages outside of a step. An error leaves a mix of old and new pages.

    Args:
        table: the pages.
        fill: fills the states of a page; with ``names``, only the states of these parameters.
        scalars: updates the scalars of the committer.
        names: the parameters whose pages are read, filled and written; None: all pages are
            written without reading them.
        keeps_parameters: whether fill() leaves parameters with encoded masters unchanged.
    """
    pages, needed = table.pages, Needed.NOTHING
    if names is not None:
        needed = Needed.STEP
        # A commit needs all pages, also those that no step has written.
        pages = [
            page
            for page in pages
            if page.content is Content.FRESH or not page.parameters.keys().isdisjoint(names)
        ]
    for page in pages:
        page.look_for_writes()
    with contextlib.closing(table.pager.stream(pages, needed)) as stream:
        for page in stream:
            view = page.view()
            if needed is Needed.STEP:  # The program may have changed other parameters of the page.
                view.drop_remainders(page.written)
            # Until the next use of the page, keep a master that does not fit the parameter: the
            # program may load the parameters later.
            encoded = [p for p in page.parameters.values() if MASTER in p.encodings]
            keeps = keeps_parameters and bool(encoded)
            lacks = keeps_parameters and not keeps and table.pager.may_leave_out_parameters(page)
            stores = not lacks and (keeps or not table.pager.leaves_out_parameters(page))
            with view.keeping_parameters() if keeps else contextlib.nullcontext():
                fill(view)
                if stores:
                    view.read_parameters()
            table.pager.swap_out(page, lacks_parameters=not stores)
    for name, values in scalars.items():
        table.committer.scalars[name] = dict(values)
    table.committer.note_written(len(table.groups))
    table.replicate()
    for page in pages:
        page.note_parameters()
        if keeps_parameters:  # Treat the parameters as written to.
            page.versions = dict.fromkeys(page.versions, -1)
            page.takes_parameters = True


def fill_states(view: PageView, values: States, names: Collection[str]) -> None:
    """Replace the states of some parameters in a page; see Pages.write_states()."""
    for shard in view.shards:
        name = shard.spec.name
        for state, _ in readable_states(shard.spec) if name in names else ():
            value = values.get(name, {}).get(state)
            for chunk in shard.chunks:
                target = chunk.state(state)
                if value is not None:
                    position = chunk.local if is_dtensor(value) else chunk.chunk
                    place = shard.spec.state_chunk(state, position)
                    assign(target, place.select(local_tensor(value)))
                elif state == MASTER and not isinstance(target, SplitMaster):
                    assign(target, chunk.values)
                else:
                    chunk.reset(state)


def restore_parameters(table: PageTable) -> None:
    """Copy the masters in all stored pages to the parameters, on owners and replicas."""
    stored = [page for page in table.pages if page.content is not Content.FRESH]
    with contextlib.closing(table.pager.stream(stored, Needed.MASTERS)) as stream:
        for page in stream:
            page.view().restore_parameters()
            table.pager.release(page)
    table.replicate()
    for page in stored:
        page.note_parameters()
