"""One opening of a simulated run: the real store on every rank, over recorded storages."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

from tests.simulation.disk import Disk, is_mark
from tests.simulation.log import Log, Weakening, Write
from tests.simulation.plan import (
    KINDS,
    MOVING_KINDS,
    PAGE_BYTES,
    PUBLISHING_KINDS,
    REWINDING_KINDS,
    SINGLE_COPY_KINDS,
    Action,
    Model,
    Plan,
    Version,
)
from tests.simulation.published_reader import check_published
from tests.simulation.storage import RecordedStorage, RecordedStripedStorage
from tests.support.inline_pool import compute_inline
from tests.support.kept import commit_with, unwanted, wanted
from tests.support.thread_ranks import ThreadJob
from tierstore.errors import BudgetError, PeerFailed, RunLockedError
from tierstore.ranks.peers import Ranks
from tierstore.storage.base import Storage
from tierstore.store import TierStore

T = TypeVar("T")

FOLDER = "/checkpoints"
"""Folder of published checkpoints."""

AGAIN = "again"
"""Name of a checkpoint of the step that a restart has found."""

# Of the files of a small page, which pages of PAGE_BYTES // 2 take as well: eight of them then.
_FILE_BYTES = 8192


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Memory limits of a store; see TierStore."""

    host_memory: int
    device_memory: int = 0
    buffers: int | None = None


STREAMED = (Memory(host_memory=2**20, buffers=2), Memory(host_memory=2**20, buffers=3))
"""No page rests in memory, until it is moved there."""

RESTING = (
    Memory(host_memory=8 * _FILE_BYTES),  # All on the host.
    Memory(host_memory=6 * _FILE_BYTES),  # Two of them; four buffers for the others.
    Memory(host_memory=5 * _FILE_BYTES, device_memory=2 * _FILE_BYTES),  # Some in each tier.
    Memory(host_memory=8 * _FILE_BYTES, device_memory=8 * _FILE_BYTES),  # All on the device.
    STREAMED[0],
)
"""Limits to draw from for a run whose model has eight pages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Protocol:
    """The layer between store and simulation; a mutant has one wrong part."""

    weakening: Weakening = field(default_factory=Weakening)
    storage: Callable[[RecordedStorage], Storage] = lambda storage: storage


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The ranks, memory and actions of one simulation."""

    world_size: int
    commit_every: int | None
    keep_last: int | None
    actions: int
    """About how many in the first run."""
    kinds: tuple[str, ...] = KINDS
    """Kinds of actions besides steps and commits, drawn as often as they occur here."""
    directories: int = 1
    """Number of directories of each rank, each on its own disk."""
    page_bytes: int = PAGE_BYTES
    """Approximate bytes of each page."""
    memories: tuple[Memory, ...] = STREAMED
    """Memory limits of the ranks, in turn; each restart begins with the next."""

    @classmethod
    def drawn(cls, generator: random.Random) -> Settings:
        """Draw settings: mostly one rank, sometimes three; mostly a bit of everything.

        Pages of a third of the runs rest in memory, are moved, and are read ahead of steps.
        """
        theme = generator.choice(("mixed", "mixed", "mixed", "one copy", "publishing"))
        world_size = generator.choice((1, 1, 3))
        commit_every: int | None = generator.choice((1, 1, 1, 2))
        keep_last = generator.choice((None, 1, 1, 2))
        kinds = KINDS
        if theme == "one copy":
            commit_every, kinds = None, SINGLE_COPY_KINDS
        elif theme == "publishing":
            keep_last, kinds = 1, PUBLISHING_KINDS
        drawn = cls(
            world_size=world_size,
            commit_every=commit_every,
            keep_last=keep_last,
            actions=generator.randrange(3, 9 if world_size > 1 else 16),
            kinds=kinds,
        )
        # Last: what came before this is drawn as it was without it.
        return drawn.resting(generator) if generator.random() < 1 / 3 else drawn

    def resting(self, generator: random.Random) -> Settings:
        """Return these settings for a run whose pages rest in memory, some of them or all."""
        # Where each step is committed, no page in memory is newer than its file.
        every = self.commit_every and generator.choice((1, 2, 2, 3))
        return replace(
            self,
            commit_every=every,
            kinds=(*self.kinds, *MOVING_KINDS),
            page_bytes=PAGE_BYTES // 2,
            memories=tuple(generator.sample(RESTING, 3)),
        )

    def rewinding(self) -> Settings:
        """Return these settings for a run that also goes back to its checkpoints."""
        return replace(
            self,
            commit_every=self.commit_every or 1,
            actions=self.actions + 6,
            kinds=(*self.kinds, *REWINDING_KINDS),
        )


class _Impatient(RecordedStorage):
    """The storage of a process that does not wait for another one to end."""

    def lock(self, timeout_s: float) -> None:
        """See Storage.lock."""
        super().lock(0)


class Session:
    """One opening of a simulated run on all ranks, from what a disk holds to its end.

    Args:
        disk: what is there for the processes.
        settings: of the simulation.
        log: where to note what is done.
        protocol: what is between store and simulation.
        durable: what is on the disks for sure, where the log goes on from another; None for
            all of ``disk``.
    """

    def __init__(
        self,
        disk: Disk,
        settings: Settings,
        log: Log,
        protocol: Protocol,
        durable: Disk | None = None,
    ) -> None:
        self.durable = disk if durable is None else durable
        self.log = log
        self.published = disk.published()
        """Checkpoints of this session and earlier ones: name -> file -> content."""
        self.publishing = set(self.published)
        """Names of what was begun to be published before this session."""
        self.acknowledged = set(self.published)
        """Names of what was known to be published for good before this session."""
        self.expected: dict[str, Version] = {}
        """Name of each checkpoint that this session began -> its version."""
        self._settings = settings
        self._protocol = protocol
        self._files = disk.open(self.log, settings.directories)
        self.job = ThreadJob(settings.world_size, on_gathered=self.log.gathered)
        self.models: list[Model] = [Model(settings.world_size) for _ in range(settings.world_size)]
        self.stores: list[TierStore | None] = [None] * settings.world_size
        self.progress = [0] * settings.world_size
        """Index of the action of its plan that each rank was or is at."""
        self._intruders: dict[int, ThreadJob] = {}  # Action -> the ranks of a second job.
        self.check_published: Callable[[Mapping[str, bytes], Version], None] = check_published
        """Looks at each checkpoint when it is there."""
        self.before_action: Callable[[int, Action], None] = lambda rank, action: None
        """Called on each rank before an action, when the threads of its store are idle."""

    def open(self) -> list[BaseException | None]:
        """Open the run on all ranks and restore it; return what each rank raised."""
        return self._run(self._open)

    def perform(self, plan: Plan, start: int = 0) -> list[BaseException | None]:
        """Do what was planned from some action on, on all ranks; return what each raised."""

        def perform(ranks: Ranks) -> None:
            for index in range(start, len(plan.actions)):
                self.progress[ranks.rank] = index
                self._act(ranks, plan.actions[index], plan)

        return self._run(perform)

    def restore(self) -> list[BaseException | None]:
        """Go back to the last commit on all ranks; return what each raised."""

        def restore(ranks: Ranks) -> None:
            self._store(ranks.rank).restore()

        return self._run(restore)

    def differences(self, version: Version) -> list[str | BaseException]:
        """Return where each store is not at a version, or what it raised; "" where it is."""
        return self._run(
            lambda ranks: self.models[ranks.rank].difference(self._store(ranks.rank), version)
        )

    def end(self) -> list[BaseException | None]:
        """Release all stores, committing nothing; return what each rank raised."""

        def close(ranks: Ranks) -> None:
            store = self.stores[ranks.rank]
            if store is not None:
                store.__exit__(RuntimeError)

        return self._run(close)

    def close(self) -> list[BaseException | None]:
        """Close all stores; return what each rank raised."""
        return self._run(lambda ranks: self._store(ranks.rank).close())

    def contents(self) -> dict[str, dict[str, bytes]]:
        """Return what is published now, in memory, without marks of verification."""
        with self.log.mutex:  # Other ranks may mark a checkpoint meanwhile.
            return {
                child: {name: bytes(data) for name, data in files.items() if not is_mark(name)}
                for child, files in self._folder()
            }

    def marked(self) -> set[str]:
        """Return the checkpoints that all ranks have marked as whole."""
        with self.log.mutex:
            return {
                child
                for child, files in self._folder()
                if sum(map(is_mark, files)) == self._settings.world_size
            }

    def publish_again(self) -> list[BaseException | None]:
        """Publish the committed step as AGAIN and close, on all ranks; return what each raised."""

        def publish(ranks: Ranks) -> None:
            store = self._store(ranks.rank)
            store.checkpoint(f"{FOLDER}/{AGAIN}", keep_last=1)
            store.close()

        return self._run(publish)

    def rot_in_a_page(self, rank: int, generator: random.Random) -> set[str]:
        """Change a bit of a page file of a rank; return the checkpoints that have this file."""
        pages = [
            (name, content)
            for files in self._files[rank]
            for name, content in sorted(files.contents.items())
            if name.endswith((".a", ".b"))
        ]
        if not pages:
            return set()
        name, content = generator.choice(pages)
        position = generator.randrange(len(content))
        with self.log.mutex:
            content[position] ^= 1 << generator.randrange(8)
            changed = Write(self.log.node_of(content, rank), position, bytes([content[position]]))
            self.log.add(rank, "rot", f"{name} at {position}", changed)
            return {
                child
                for child, files in self._folder()
                if any(file is content for file in files.values())
            }

    def _folder(self) -> list[tuple[str, dict[str, bytearray]]]:
        """Return the children with a final name, and their files."""
        children = self._files[0][0].folders.get(FOLDER, {})
        return [(child, files) for child, files in children.items() if not child.startswith(".")]

    def files(self) -> list[list[dict[str, bytes]]]:
        """Return what is in the directories now, in memory: rank -> directory -> file."""
        return [
            [
                {name: bytes(content) for name, content in files.contents.items()}
                for files in directories
            ]
            for directories in self._files
        ]

    def _run(self, act: Callable[[Ranks], T]) -> list[Any]:
        """Call ``act`` on all ranks at once; return what it returned or raised on each rank."""

        def run(ranks: Ranks) -> T:
            try:
                return act(ranks)
            except BaseException as error:
                ranks.fail(error)
                store = self.stores[ranks.rank]
                if store is not None:
                    with suppress(RuntimeError):  # It is closed.
                        settle(store)
                raise

        return self.job.run(run)

    def has_failed(self, rank: int) -> bool:
        """Return whether the store of a rank only goes back."""
        return self._store(rank)._session.usability.failure is not None

    def _store(self, rank: int) -> TierStore:
        store = self.stores[rank]
        assert store is not None
        return store

    def _open(self, ranks: Ranks, *, overwrite: bool = False) -> None:
        rank = ranks.rank
        parts = [
            self._protocol.storage(RecordedStorage(self.log, rank, files, directory))
            for directory, files in enumerate(self._files[rank])
        ]
        memories = self._settings.memories
        memory = memories[(rank + self.log.generation) % len(memories)]
        store = TierStore(
            parts[0] if len(parts) == 1 else RecordedStripedStorage(parts, overwrite=overwrite),
            page_bytes=self._settings.page_bytes,
            host_memory=memory.host_memory,
            device_memory=memory.device_memory,
            buffers=memory.buffers,
            commit_every=self._settings.commit_every,
            resume=not overwrite,
            overwrite=overwrite,
            process_group=ranks,
        )
        compute_inline(store._session.pager.files)
        self.stores[rank] = store
        self.models[rank] = Model(self._settings.world_size)
        store.pages.attach(self.models[rank].groups)
        unwanted(store).restore()

    def _act(self, ranks: Ranks, action: Action, plan: Plan) -> None:
        rank, log = ranks.rank, self.log
        store, model = self._store(rank), self.models[rank]
        # What the program says and what its last commit does would else come in any order,
        # and no schedule could be repeated.
        settle(store)
        self.before_action(rank, action)
        log.mark(rank, "doing", action.kind)
        if action.kind in ("commit", "rates", "rewind"):
            log.mark(rank, "begun", action.version)
        if action.kind == "step":
            log.mark(rank, "overwriting", action.version)
            model.step(store, action.value)
            log.mark(rank, "begun", action.version)
        elif action.kind == "replace":
            log.mark(rank, "overwriting", action.version)
            model.replace(store, action.value)
        elif action.kind == "rates":
            model.set_rates(action.value)
        elif action.kind == "commit":
            commit_with(store, action.value)
        elif action.kind == "rewind":
            self._rewind(store, action.value)
            log.mark(rank, "committed", action.version)
            version = plan.versions[action.version]
            self._require_version(rank, version, "rewound", restored=True)
        elif action.kind == "move":
            with suppress(BudgetError, PeerFailed):  # Nothing was changed.
                store.move(action.value[rank])
        elif action.kind == "prefetch":
            store.pages.prefetch()
        elif action.kind == "intrude":
            self._intrude(rank, self.progress[rank], action.value)
        elif action.kind == "synchronize":
            store.synchronize()
            log.mark(rank, "committed", action.version)
            version = plan.versions[action.version]
            self._require_version(rank, version, "synchronized", restored=False)
        elif action.kind == "checkpoint":
            log.mark(rank, "publishing", action.value)
            self.expected[action.value] = plan.versions[action.version]
            path = f"{FOLDER}/{action.value}"
            store.checkpoint(path, keep_last=self._settings.keep_last)
            settle(store)
            if rank == 0:
                files = self.contents()[action.value]
                self.check_published(files, plan.versions[action.version])
                self.published[action.value] = files
            log.mark(rank, "committed", action.version)
            log.mark(rank, "published", action.value)
        else:
            overwrite = action.kind == "overwrite"
            store.close()
            if overwrite:
                log.mark(rank, "overwriting", action.version)
                log.mark(rank, "begun", action.version)
            self._open(ranks, overwrite=overwrite)
            log.mark(rank, "committed", action.version)
            version = plan.versions[action.version]
            self._require_version(rank, version, "opened again", restored=True)

    def _rewind(self, store: TierStore, child: str) -> None:
        """Rewind to a checkpoint, which is read from a directory of the machine.

        The directory is empty if a fault has kept the checkpoint from being published.
        """
        with TemporaryDirectory() as directory:
            for name, content in self.contents().get(child, {}).items():
                (Path(directory) / name).write_bytes(content)
            with wanted(store):
                store.restore(directory, rewind=True)

    def _intrude(self, rank: int, number: int, mode: str) -> None:
        """Open the run as another process would; it is refused, and changes nothing."""
        intruders = self._intruders.setdefault(number, ThreadJob(self._settings.world_size))
        log = Log(self._settings.world_size)
        parts = [_Impatient(log, rank, files, i) for i, files in enumerate(self._files[rank])]
        options: dict[str, Any] = {mode: True}
        try:
            TierStore(
                parts[0]
                if len(parts) == 1
                else RecordedStripedStorage(parts, overwrite=mode == "overwrite"),
                page_bytes=self._settings.page_bytes,
                host_memory=STREAMED[0].host_memory,
                process_group=intruders.ranks[rank],
                **options,
            )
        except (RunLockedError, PeerFailed):
            pass
        else:
            raise AssertionError(f"rank {rank} let a second process {mode} the run")
        changes = [str(operation) for operation in log.operations[rank] if operation.effects]
        if changes:
            raise AssertionError(f"a second process changed rank {rank}: {changes}")

    def _require_version(self, rank: int, version: Version, when: str, *, restored: bool) -> None:
        """Check that a rank is at a version; all ranks call this, since they read together."""
        difference = self.models[rank].difference(self._store(rank), version, restored=restored)
        if difference:
            raise AssertionError(f"rank {rank} was {when} at {difference}")


def settle(store: TierStore) -> None:
    """Wait until the threads of a store are idle, whatever they have found."""
    store._session.committer.settle()
    if store._checkpoints._verifier._verification is not None:
        store._checkpoints._verifier._verification.wait()
