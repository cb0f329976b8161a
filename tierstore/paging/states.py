"""Reading, showing and replacing the states of parameters, outside of a step."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping

import torch

from tierstore.layout.dtensors import local_tensor
from tierstore.paging.session import Session
from tierstore.paging.sweep import may_retry
from tierstore.paging.whole_states import (
    agree_to_read,
    agree_to_write,
    fill_states,
    read_states,
    readable_states,
    show_in_memory,
    write_pages,
)
from tierstore.ranks.peers import agree


class States:
    """The states of all parameters as tensors; see Pages.read_states() and others there.

    Args:
        session: of the store.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._table = session.table
        self._given = session.given
        self._usability = session.usability

    def read(self, names: Collection[str] | None) -> dict[str, dict[str, torch.Tensor]]:
        """Return the current states of some parameters, or of all."""
        wanted = self._table.specs.keys() if names is None else names
        if self.need_other_ranks(wanted):
            with self._session.calls.together("read_states()"):
                agree_to_read(self._table, wanted)
                found = self._read(wanted)
        else:
            found = self._read(wanted)
        if self._usability.has_directory:
            self._given.give(found)
        return found

    def show(self, name: str) -> dict[str, torch.Tensor]:
        """Return the states and scalars of one parameter as tensors of the current values."""
        if self.need_other_ranks([name]):
            raise RuntimeError(
                f"a state of parameter {name!r} may be on other ranks: call state_dict(), or "
                "read_states(), on all ranks together"
            )
        if self._given.shown(name) is None:
            with torch.inference_mode(False):  # Inference tensors do not count changes.
                if not self._show_in_memory(name):
                    self._show_copies(name)
        return dict(self._given.shown(name) or {})

    def need_other_ranks(self, names: Collection[str]) -> bool:
        """Return whether all ranks must call together to read the states of these parameters."""
        if self._session.ranks.world_size == 1:
            return False
        is_attached = self._table.specs.keys() >= set(names)
        return not is_attached or self._table.are_replicated(names)

    def write(
        self,
        values: Mapping[str, Mapping[str, torch.Tensor]],
        scalars: Mapping[str, Mapping[str, float]],
        names: Collection[str] | None,
    ) -> None:
        """Replace the states of all or some parameters."""
        with self._session.calls.together("write_states()"):
            table = self._table
            replaced = table.specs.keys() if names is None else names
            were_given = agree_to_write(
                table,
                values,
                replaced,
                are_current=self._are_current(values, scalars, replaced),
            )
            table.ensure_placed()
            if were_given and self._pages_hold(values, replaced):
                self._given.forget_changed(replaced)
                return
            with self._usability.failing(interrupts=True):
                write_pages(
                    table,
                    lambda view: fill_states(view, values, replaced),
                    scalars,
                    names,
                    keeps_parameters=True,
                )
            self._given.forget(replaced)

    def follow_scalars(self) -> None:
        """Without a directory, adopt in-place changes to the scalars of show()."""
        if self._usability.has_directory:
            return
        for name, state, tensor in list(self._given.changed()):
            if state in self._session.committer.scalars.get(name, {}):
                self._session.committer.scalars[name][state] = tensor.item()
                self._given.show(name, {state: tensor}, views=False)

    @contextlib.contextmanager
    def only_reading(self) -> Iterator[None]:
        """Fail the store if the block raises and cannot be retried. The block only reads pages."""
        try:
            yield
        except BaseException as error:
            if may_retry(error, self._table):
                self._session.pager.drop_early()
            else:
                self._usability.fail(error)
            raise

    def _read(self, names: Collection[str]) -> dict[str, dict[str, torch.Tensor]]:
        self._table.ensure_placed()
        with self.only_reading(), torch.inference_mode(False):
            return read_states(self._table, names)

    def _show_in_memory(self, name: str) -> bool:
        """Show views of the page; return False if that is not possible."""
        if self._session.ranks.world_size > 1 or self._usability.has_directory:
            return False
        self._table.ensure_placed()
        with self.only_reading():
            views = show_in_memory(self._table, name)
        if views is None:
            return False
        self._given.show(name, views, views=True)
        self._show_scalars(name)
        return True

    def _show_copies(self, name: str) -> None:
        """Show copies or mappings. One reading of a page serves all of its parameters."""
        pages = [page for page in self._table.pages if name in page.parameters]
        names = {name, *(other for page in pages for other in page.parameters)}
        if self.need_other_ranks(names):
            names = {name}
        for other, states in self._read(names).items():
            if self._given.shown(other) is None:
                self._given.show(other, states, views=False)
                self._show_scalars(other)

    def _show_scalars(self, name: str) -> None:
        scalars = self._session.committer.scalars.get(name, {})
        tensors = {
            scalar: torch.tensor(value, dtype=torch.float32, device="cpu")  # ()
            for scalar, value in scalars.items()
        }
        self._given.show(name, tensors, views=False)

    def _pages_hold(
        self, values: Mapping[str, Mapping[str, torch.Tensor]], names: Collection[str]
    ) -> bool:
        """Return whether the pages of all ranks have these values. All ranks call this together.

        A store without a directory does not compare: writing is faster there.
        """
        if not self._usability.has_directory:
            return False
        with self.only_reading():
            current = read_states(self._table, names)
        is_equal = all(
            torch.equal(local_tensor(tensor), local_tensor(values[name][state]))
            for name, states in current.items()
            for state, tensor in states.items()
        )
        return all(agree(self._session.ranks, "compare states", lambda: is_equal))

    def _are_current(
        self,
        values: Mapping[str, Mapping[str, torch.Tensor]],
        scalars: Mapping[str, Mapping[str, float]],
        names: Collection[str],
    ) -> bool:
        """Return whether pages and scalars seem to have these values. Reads no page.

        Changes by collectives, numpy and ``.data`` are not seen; see _pages_hold().
        """
        specs = self._table.specs
        known = self._session.committer.scalars
        return all(known.get(name) == scalars[name] for name in scalars) and all(
            (tensor := values.get(name, {}).get(state)) is not None
            and self._given.is_current(name, state, tensor)
            for name in names
            if name in specs
            for state, _ in readable_states(specs[name])
        )
