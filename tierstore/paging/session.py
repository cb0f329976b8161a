"""A session: the parts of an open store, shared by ``TierStore`` and ``store.pages``."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from tierstore.errors import RunDirectoryError
from tierstore.paging import rank_checks
from tierstore.paging.given_states import GivenStates
from tierstore.paging.page_table import PageTable
from tierstore.paging.pager import Pager
from tierstore.paging.wear import Wear
from tierstore.ranks.peers import Ranks, agree, together
from tierstore.ranks.roll_call import Calls
from tierstore.run.committer import Committer, Progress
from tierstore.run.registered import Registered
from tierstore.run.usability import Usability
from tierstore.storage.base import Storage
from tierstore.units import format_bytes


class Session:
    """The parts of an open store, and its commits.

    Args:
        ranks: all ranks.
        calls: the roll call of the calls that all ranks make together.
        usability: the condition of the store.
        committer: the commits of the run; without a directory, only the progress.
        pager: moves the pages.
        table: the pages.
        find_damage: raises the damage of the last checkpoint, if its verification has ended.
        step_on: where pages are stepped; None: where the parameters are.
        free_gradients: whether gradients are set to None after their use.
        wear: the wear of the drives.
        directory: the directories of the run, or the storage that was given, for repr().
        opened_at: time.monotonic() when the store was opened.
    """

    def __init__(
        self,
        ranks: Ranks,
        calls: Calls,
        usability: Usability,
        committer: Progress,
        pager: Pager,
        table: PageTable,
        find_damage: Callable[[], None],
        *,
        step_on: torch.device | None,
        free_gradients: bool,
        wear: Wear,
        directory: Sequence[Path] | Storage | None,
        opened_at: float,
    ) -> None:
        self.ranks = ranks
        self.calls = calls
        self.usability = usability
        self.committer = committer
        self.pager = pager
        self.table = table
        self._find_damage = find_damage
        self.step_on = step_on
        self.free_gradients = free_gradients
        self.wear = wear
        self._directory = _in_words(directory)
        self._opened_at = opened_at
        self.given = GivenStates()
        """The tensors of states that callers hold."""
        self.registered = Registered()
        self.steps_begun = 0
        """Steps since the store was opened, the same on all ranks."""

    def __repr__(self) -> str:
        """Return the arguments in the repr() of the store. Raises nothing and waits for nothing."""
        ranks, committer, usability = self.ranks, self.committer, self.usability
        parts = [self._directory]
        if ranks.world_size > 1:
            parts.append(f"rank {ranks.rank} of {ranks.world_size}")
        parts += usability.remarks
        parts.append(f"step {committer.step}")
        if isinstance(committer, Committer):
            if committer.committed is not None:
                parts.append(f"committed {committer.committed_step}")
            elif not usability.awaits_restore:  # Else other ranks have committed.
                parts.append("no commit")
        pages = self.table.pages
        if not self.table.groups:
            parts.append("no pages before the first step or restore()")
        else:
            nbytes = format_bytes(sum(page.layout.nbytes for page in pages))
            count = f"{nbytes} in {len(pages)} page" + "s" * (len(pages) != 1)
            tiers = Counter(page.tier.value for page in pages).most_common()
            where = ", ".join(f"{tier} {number}" for tier, number in tiers)
            parts.append(f"{count}: {where}" if pages and not usability.closed else count)
        return ", ".join(parts)

    @property
    def seconds(self) -> float:
        """Time since the store was opened."""
        return time.monotonic() - self._opened_at

    def require_committer(self, call: str) -> Committer:
        """Return the committer of the run; raise RunDirectoryError without a directory."""
        if not isinstance(self.committer, Committer):
            raise RunDirectoryError(f"{call} needs a store with a directory; this one has none")
        return self.committer

    def raise_damage(self) -> None:
        """Raise the damage that verification has found in the last checkpoint, if it has ended."""
        with self.usability.failing(interrupts=False):
            self._find_damage()

    def ask(self) -> None:
        """Ask registered objects for their states, unless they were asked after the last step."""
        if isinstance(self.committer, Committer) and not self.committer.has_states:
            self.committer.keep_states(self.registered.ask())

    def left_was_changed(self) -> bool:
        """Return whether a program changed parameters that the next commit must still write.

        All ranks call this.
        """
        pages = [page for page in self.table.pages if page.lacks_parameters]
        changed = any(page.left_was_changed is not None for page in pages)
        return any(agree(self.ranks, "look at the parameters", lambda: changed))

    def accept_parameters(self) -> None:
        """Let the next commit take the parameters as they are at that time."""
        for page in self.table.pages:
            page.takes_parameters = True

    def _require_left(self) -> None:
        for page in self.table.pages:
            if page.lacks_parameters and (changed := page.left_was_changed):
                raise ValueError(
                    f"parameters, such as {changed!r}, were changed since step "
                    f"{self.committer.step}, and a commit holds what its step left: nothing was "
                    "committed. Call synchronize() or checkpoint() right after step(), or at steps "
                    "that commit_every makes due, and change parameters after that"
                )

    def begin_commit(self) -> None:
        """Begin to commit the last step. All ranks call this.

        Raises:
            ValueError: parameters were changed since the step, and no page has their values of
                the step.
        """
        committer, table, pager = self.require_committer("a commit"), self.table, self.pager
        if committer.adds_parameters:
            together(self.ranks, "look at the parameters", self._require_left)
        self.ask()
        table.require_same_values()
        rank_checks.require_same_commit(
            self.ranks, table.groups, committer.scalars, self.registered.names
        )
        with self.usability.failing(interrupts=True):
            writes = pager.write_changed(table.pages)
        layout = committer.layout(table.layout_groups, table.layouts)
        entries = [page.entry for page in table.pages]
        manifest = committer.manifest(layout, table.groups, entries)
        with pager.stalled(), self.usability.failing(interrupts=False):
            committer.begin(manifest, writes)


def _in_words(directory: Sequence[Path] | Storage | None) -> str:
    """Return how a user names the directory of a store."""
    if directory is None:
        return "None"
    if not isinstance(directory, Sequence):
        return repr(directory.location)
    paths = [str(path) for path in directory]
    return repr(paths[0] if len(paths) == 1 else paths)
