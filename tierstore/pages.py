"""The pages of a store from the view of an optimizer, and the names for authors of optimizers.

An optimizer attaches its parameters, steps over the pages in a sweep, and reads and writes states.
See docs/guide/optimizers.md.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

import torch

from tierstore.compiling import not_compiled
from tierstore.errors import SweepError
from tierstore.layout.chunks import Chunk
from tierstore.layout.encodings import EncodedState, RootState, SplitMaster
from tierstore.layout.other_rules import refuse_other_rule
from tierstore.layout.ownership import SharedShard, SharedSubgroup
from tierstore.layout.parameters import PagedGroup, PagedParameter, unwrapped_names
from tierstore.paging.gradients import agree_on_gradients
from tierstore.paging.profiler_lanes import profiled
from tierstore.paging.session import Session
from tierstore.paging.states import States
from tierstore.paging.sweep import Changes, SteppedPages, Sweep
from tierstore.paging.views import ChunkView, PageView, RoundedMaster, ShardView
from tierstore.ranks.peers import Peers, Ranks
from tierstore.units import format_bytes, parse_bytes
from tierstore.user_warnings import warn_user

__all__ = [
    "Chunk",
    "ChunkView",
    "EncodedState",
    "PageView",
    "PagedGroup",
    "PagedParameter",
    "Pages",
    "Peers",
    "Ranks",
    "RootState",
    "RoundedMaster",
    "ShardView",
    "SharedShard",
    "SharedSubgroup",
    "SplitMaster",
    "SteppedPages",
    "format_bytes",
    "not_compiled",
    "parse_bytes",
    "profiled",
    "refuse_other_rule",
    "unwrapped_names",
    "warn_user",
]

# The gradients of replicas are compared at the first step and then after this number of steps.
_COMPARE_EVERY = 100


class Pages:
    """The pages of one store: ``store.pages``.

    Calls that all ranks make together follow the rules of TierStore.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._states = States(session)
        self._changes = Changes()
        self._warned_of_no_gradient = False

    @contextlib.contextmanager
    def calling(self, call: str) -> Iterator[None]:
        """Name the current call of the program for calls of the store in the block.

        The first call that needs other ranks waits until all ranks make the call of this name.
        Later calls in the block need not wait. For nested blocks the outer name counts.

        Args:
            call: the name, as it appears in errors, such as "state_dict()".
        """
        with self._session.calls.named(call):
            yield

    @not_compiled
    def attach(self, groups: Sequence[PagedGroup]) -> None:
        """Lay out pages for param groups, after the pages of earlier groups.

        Writes no page. Call it at the first step or just before restore(), when frameworks have
        moved and sharded the parameters. All ranks call it together.

        Args:
            groups: the groups.

        Raises:
            BudgetError: ``host_memory`` cannot hold the smallest pool that works; the message
                names the smallest budget that works.
            ValueError, TypeError: two parameters have one name; a commit cannot hold a
                hyperparameter; ``free_gradients`` or ``offload_gradients`` is set, and a gradient
                is not ``.grad``; ``offload_gradients`` is set, and several ranks hold a plain
                tensor; or ``step_on`` and the parameters are two different GPUs.
            RunMismatchError: the ranks have different parameters; the message names the first.
            PeerFailed: any of these on another rank.
        """
        session = self._session
        session.usability.require_usable()
        for parameter in (p for group in groups for p in group.parameters):
            if session.free_gradients and parameter.gradient is not None:
                raise ValueError(
                    f"free_gradients=True frees `.grad`, but {parameter.name!r} has its "
                    "gradient elsewhere: leave it out, and free the gradients after the step"
                )
        with session.calls.together("attach()"):
            session.table.attach(groups)

    @contextlib.contextmanager
    def sweep(
        self, window: int = 1, *, nonfinite: str = "allow", missing: str = "zeros"
    ) -> Iterator[SteppedPages]:
        """Step once over all pages: ``with store.pages.sweep() as pages: ...``.

        Yields one page for each subgroup in which any rank has a gradient, in the same order on all
        ranks: group after group, but pages of elementwise rules are spread among the other pages.
        A page is empty on a rank that owns nothing of the subgroup. The loop body updates
        ``master`` and ``states`` of the chunks in place. The store then writes the parameters and
        the page, and sends the parameters to their replicas. If a commit is due, it begins first.

        Args:
            window: number of pages that are stepped at once. A page stays valid until the caller
                has asked for this number of further pages. At most ``window_max``, and the same on
                all ranks.
            nonfinite: action if a gradient on any rank has a NaN or infinite element. "raise":
                raise NonFiniteGradientError. "skip": warn, and yield no page; nothing is changed,
                and the step does not count. "allow": do not check. With "raise" and a commit to go
                back to, the sweep does not wait for gradients on a GPU: the error then comes at
                the end of the sweep, and the store fails.
            missing: action if a rank has no gradient of a parameter and another rank has one.
                "zeros": its gradient counts as zeros. "raise": raise ValueError.

        If the loop raises or stops early after the first page was handed out, the parameters are
        from two steps and the store fails. (A store without a directory has no step to go back to.
        It stays usable, like a PyTorch optimizer.)

        Raises:
            StorageError, CorruptionError: a page could not be read or written. Before the
                first page was handed out, nothing was changed and the step may be retried.
            SweepError: the loop ended before its last page; or objects are registered, and the
                step before was not committed: nothing was changed.
            NonFiniteGradientError: see ``nonfinite``.
            ValueError: a parameter or gradient does not fit what was attached; a tensor of
                show_states() was changed in place but not its state; replicas have different
                gradients; or see ``missing``. Nothing was changed. A sample of gradients is
                compared at the first step after the store was opened, and at every hundredth step
                after it. A rank without a gradient is not compared.
            PeerFailed: any of these on another rank.

        Warns:
            UserWarning: a step was skipped; or no parameter has a gradient (once).
            UserWarning: a parameter was changed outside of the optimizer. For parameters on a
                GPU the next sweep warns.
        """
        session = self._session
        session.usability.require_restored()
        session.raise_damage()
        if not 1 <= window <= self.window_max:
            raise ValueError(f"window must be from 1 to {self.window_max}, got {window}")
        if nonfinite not in ("raise", "skip", "allow"):
            raise ValueError(f"nonfinite must be 'raise', 'skip' or 'allow', got {nonfinite!r}")
        if missing not in ("zeros", "raise"):
            raise ValueError(f"missing must be 'zeros' or 'raise', got {missing!r}")
        if session.registered and session.committer.step and not session.committer.has_states:
            raise SweepError(
                f"step {session.committer.step} was not committed, and the next step would commit "
                "it with the data and random numbers of another batch. Nothing was changed: call "
                "store.commit() after each step, when all registered objects have their new state"
            )
        self._states.follow_scalars()
        session.given.require_unchanged()
        table = session.table
        table.ensure_placed()
        table.offload_gradients()
        with session.calls.together("step()"):
            table.require_same_values()
            gradients = agree_on_gradients(
                session.ranks,
                table.groups,
                table.specs,
                table.partition,
                table.places,
                nonfinite=nonfinite,
                missing=missing,
                waits=nonfinite == "skip"
                or table.places.parameters.is_host
                or not session.committer.keeps_commit,
                compares=session.steps_begun % _COMPARE_EVERY == 0,
            )
            session.steps_begun += 1
            self._changes.warn(wait=True)
            if gradients.nonfinite:
                warn_user(
                    f"{gradients.nonfinite}. This step is skipped. nonfinite='raise' stops at "
                    "such a step, and torch.autograd.detect_anomaly() finds its cause"
                )
            elif not gradients.present and not self._warned_of_no_gradient:
                self._warned_of_no_gradient = True
                warn_user(
                    "no parameter has a gradient, so this step changes none: call backward() "
                    "before step(), and zero_grad() after it. Later steps like this do not warn"
                )
            if session.committer.is_due and not gradients.nonfinite:
                session.begin_commit()
        if gradients.nonfinite:
            if session.free_gradients:
                for parameter in table.parameters:
                    parameter.tensor.grad = None
            yield SteppedPages(iter(()), frozenset(), [])
            return
        session.given.forget()
        sweep = Sweep(
            table,
            free_gradients=session.free_gradients,
            present=gradients.present,
            window=window,
            unread=gradients.unread,
        )
        yield from sweep.run()
        self._changes.note(sweep.changed, table.places.step)
        self._changes.warn(wait=False)  # Do not wait now: otherwise the next sweep warns.
        session.wear.look(table.all_pages, session.pager.files.bytes_written, session.seconds)

    @not_compiled
    def prefetch(self) -> None:
        """Start to read pages for the next sweep while buffers are free; return at once.

        The sweep raises errors of these reads, and of writes of the last step.

        Raises:
            StoreClosedError, StoreFailedError, RunDirectoryError: the store cannot be used.
        """
        session = self._session
        session.usability.require_restored()
        with self._states.only_reading():
            session.pager.prefetch(page for page in session.table.swept if not page.is_empty)

    def memory(self) -> dict[str, dict[str, int]]:
        """Return the use of memory on this rank: "GPU", "host" or "NVMe" -> what -> bytes.

        Counts parameters and gradients, pages with their buffers and files, and copies of
        gradients and parameters. Entries of 0 bytes are left out. Gradients that a function
        returns are not counted.

        Raises:
            StoreClosedError: the store is closed.
        """
        self._session.usability.require_open()
        return self._session.table.memory()

    @property
    def ranks(self) -> Ranks | None:
        """All ranks of the job; None for a job of one rank."""
        session = self._session
        return session.ranks if session.ranks.world_size > 1 else None

    @property
    def window_max(self) -> int:
        """Largest window of sweep(), the same on all ranks."""
        return self._session.table.window_max

    @property
    def step_on(self) -> torch.device | None:
        """The device that steps pages; None: the device of the parameters."""
        return self._session.step_on

    @property
    def group_count(self) -> int:
        """Number of param groups attached. They belong to one optimizer."""
        return len(self._session.table.groups)

    @property
    def groups_written(self) -> int:
        """Number of param groups with pages: 0 at first, the restored groups after restore()."""
        return self._session.committer.groups_written

    @property
    def scalars(self) -> dict[str, dict[str, float]]:
        """Parameter name -> scalar name -> value: small states such as a step count.

        Kept in memory, and part of every commit. Change them within sweep(), after its last
        page, so that an error in between fails the store.
        """
        self._states.follow_scalars()
        return self._session.committer.scalars

    @not_compiled
    def read_states(self, names: Iterable[str] | None = None) -> dict[str, dict[str, torch.Tensor]]:
        """Return the current states of some parameters, or of all.

        All ranks call it together, unless needs_other_ranks() is False for these parameters.

        The tensors are private mappings of the page files: they cost no memory, and later steps
        do not change them. (A state in several pages, or partly from other ranks, is assembled in
        an unnamed file. Without a directory all tensors are copies, on the device of the pages.)

        Args:
            names: the parameters, the same on all ranks; None: all parameters.

        Returns:
            Parameter name -> state name -> tensor of the state's shape. It is on the host if the
            store has a directory. It is a DTensor if the parameter is a DTensor. Parameters that
            are their own master have no state "master". Before the first step masters equal the
            parameters, and other states are zero.

        Raises:
            StorageError, CorruptionError: a page could not be read.
        """
        self._session.usability.require_restored()
        return self._states.read(None if names is None else set(names))

    @not_compiled
    @torch.no_grad()
    def show_states(self, name: str) -> dict[str, torch.Tensor]:
        """Return the states and scalars of one parameter as tensors of the current values.

        On one rank without a directory, the tensors are views of the page until move(), so an
        in-place change of a tensor changes the state. Otherwise they are tensors as from
        read_states(). If one was changed in place, the next sweep(), commit(), synchronize() or
        close() raises ValueError, unless write_states() has replaced the states of the parameter.
        Writes through ``.data`` or numpy are not detected. A state that is too large for one
        record, and a scalar with a directory, are also not views.

        Args:
            name: the parameter.

        Returns:
            Scalar or state name -> tensor: float32 of shape () on the CPU for a scalar, else as in
            read_states(). Until the states change, each call returns the same tensors.

        Raises:
            RuntimeError: needs_other_ranks() is True for the parameter: one rank alone cannot read
                its states.
            ValueError: the groups of the optimizer differ from the groups of the store.
            StorageError, CorruptionError: a page could not be read.
        """
        self._session.usability.require_restored()
        return self._states.show(name)

    def needs_other_ranks(self, names: Collection[str]) -> bool:
        """Return whether all ranks must call read_states() for these parameters together.

        False in a job of one rank, or if no two ranks hold the same elements of the parameters, as
        with FSDP2. The answer is the same on all ranks. Parameters that are not attached yet need
        other ranks.
        """
        return self._states.need_other_ranks(names)

    @not_compiled
    @torch.no_grad()
    def write_states(
        self,
        values: Mapping[str, Mapping[str, torch.Tensor]],
        scalars: Mapping[str, Mapping[str, float]] | None = None,
        *,
        names: Iterable[str] | None = None,
    ) -> None:
        """Replace the states of all parameters, or of some, outside of a step.

        Writes nothing if the values are the same tensors that read_states() or show_states()
        returned, with unchanged content. All ranks call it together.

        Args:
            values: states as read_states() returns them, or whole tensors; converted to each
                state's dtype. A master that is absent becomes the parameter, another state zero.
            scalars: updates ``scalars``, together with the pages.
            names: the parameters whose states are replaced, the same on all ranks; None: all.
                Pages of other parameters are neither read nor written.

        Raises:
            ValueError: an unknown name, or a wrong shape or placement. Nothing was changed.
            StorageError: a page could not be written; the store has failed.
        """
        self._session.usability.require_restored()
        self._states.write(values, scalars or {}, None if names is None else set(names))
