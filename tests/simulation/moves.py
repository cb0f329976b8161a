"""Directories of a simulated run that are moved, and another run that takes their place.

A storage stays in the directory that it opened: nothing of the other run is changed, no step that
was acknowledged is missing in the directory that was moved, and the store tells. A directory that
is renumbered, as overlayfs and NFS do it, is still in its place.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from tests.simulation.disk import Disk
from tests.simulation.fault_simulation import Calls, FaultSimulation, Trouble
from tests.simulation.log import Log
from tests.simulation.plan import Plan, beginning
from tests.simulation.session import FOLDER, Protocol, Session, Settings
from tests.simulation.simulator import Violation
from tests.simulation.storage import RecordedStorage
from tests.support.faults import FaultyStorage
from tierstore.errors import RunDirectoryError
from tierstore.storage.base import Storage
from tierstore.storage.memory import MemoryFiles

KINDS = ("another run", "another run", "another run, and back", "nothing", "renumbered")


Files = dict[str, bytes]


class Place:
    """The path of one directory: what it leads to.

    Args:
        other: what is there while the run's own directory is moved.
    """

    def __init__(self, other: Files) -> None:
        self.other = MemoryFiles()
        for name, content in other.items():
            self.other.contents[name] = bytearray(content)
        self.moved = self.renumbered = False
        self._before = other

    @property
    def changed(self) -> list[str]:
        """The names of the files of the other directory that were changed."""
        now = {name: bytes(content) for name, content in self.other.contents.items()}
        names = now.keys() | self._before.keys()
        return sorted(name for name in names if now.get(name) != self._before.get(name))

    def exchange(self, storage: RecordedStorage, *, moved: bool) -> None:
        """Let the path lead to the other directory, or to the run's own again."""
        with storage.log.mutex:
            if self.moved != moved:
                self.moved = moved
                storage.log.mark(storage.rank, "moved" if moved else "back", "")


class PlacedStorage(RecordedStorage):
    """A RecordedStorage of a directory that may be moved."""

    by_path = False
    """True in a mutant: every operation is one on what the path leads to."""

    def __init__(self, storage: RecordedStorage, place: Place) -> None:
        self._place = place
        super().__init__(storage.log, storage.rank, storage.files, storage.directory)

    @property
    def files(self) -> MemoryFiles:  # type: ignore[override]
        """The files of the directory."""
        return self._place.other if self.by_path and self._place.moved else self._held

    @files.setter
    def files(self, files: MemoryFiles) -> None:
        self._held = files

    def require_in_place(self, name: str) -> None:
        """See Storage.require_in_place."""
        place = self._place
        if place.moved or place.renumbered:
            found = place.other if place.moved else self._held
            content = found.contents.get(name)
            if content is None or content != self._held.contents.get(name):
                raise RunDirectoryError(f"{self.location} was moved")


@dataclass(frozen=True, slots=True, kw_only=True)
class Move(Trouble):
    """One directory of a run that is moved, before an operation of its rank.

    ``kind`` is one of KINDS: what takes its place.
    """

    back: tuple[str, int]
    """The operation, and the number of its call, before which the directory is back."""
    place: Place = field(compare=False)

    def __str__(self) -> str:
        return (
            f"{self.kind} in the place of directory {self.directory} of rank {self.rank}, before "
            f"{self.operation} number {self.call}"
        )

    def describe(self) -> str:
        """Return the move without its place, for a table."""
        return "renumbered directory" if self.kind == "renumbered" else "moved directory"

    def wrap(self, storage: RecordedStorage) -> Storage:
        """Return the storage of one directory as the store shall see it."""
        if (storage.rank, storage.directory) != (self.rank, self.directory):
            return storage
        counts: dict[str, int] = {}

        def count(operation: str, name: str, when: str) -> None:
            if when != "before":
                return
            counts[operation] = counts.get(operation, 0) + 1
            at = operation, counts[operation]
            if at == (self.operation, self.call) and self.kind == "renumbered":
                self.place.renumbered = True
            elif at == (self.operation, self.call):
                self.place.exchange(storage, moved=True)
            elif at == self.back and self.kind.endswith("back"):
                self.place.exchange(storage, moved=False)

        return FaultyStorage(PlacedStorage(storage, self.place), on_operation=count)


class MoveSimulation(FaultSimulation):
    """One plan, carried out again and again with one move each; see FaultSimulation."""

    def _trouble(self, calls: Sequence[Calls], generator: random.Random) -> Move:
        self._move = _drawn(calls, generator, self.settings)
        return self._move

    def _gone_back(
        self, name: str, session: Session, plan: Plan, generator: random.Random, reported: bool
    ) -> Plan:
        if self._move.place.moved:
            return plan  # No commit would be made.
        return super()._gone_back(name, session, plan, generator, reported)

    def _require_told(
        self,
        name: str,
        session: Session,
        outcomes: Sequence[BaseException | None],
        trouble: Trouble,
    ) -> None:
        super()._require_told(name, session, outcomes, trouble)
        place = self._move.place
        self.counts[trouble.kind] += 1
        self.counts["refused"] += any(isinstance(of, RunDirectoryError) for of in outcomes)
        if place.renumbered:
            self._require_well(name, session, outcomes)
        if place.changed:
            text = f"{trouble}: {place.changed} of the other run were changed"
            raise Violation(name, text, str(session.log))
        moved = untold = False
        for operation in session.log.operations[trouble.rank]:
            moved = operation.kind == "moved" or (moved and operation.kind != "back")
            # No commit is in flight where the program begins something.
            untold = moved and (untold or operation.kind == "doing")
            if untold and operation.kind == "rename" and "-> commit-" in operation.text:
                text = f"{trouble}: a step was committed without a word"
                raise Violation(name, text, str(session.log))


def _drawn(calls: Sequence[Calls], generator: random.Random, settings: Settings) -> Move:
    kind = generator.choice(KINDS)
    rank, directory, operation, count = generator.choice(calls)
    same = [(call[2], call[3]) for call in calls if call[:2] == (rank, directory)]
    back, count_back = generator.choice(same)
    other: Files = {}
    if kind != "nothing":
        ranks = _other_run(settings.world_size, settings.directories, settings.page_bytes)
        other = ranks[rank][directory]
    return Move(
        kind=kind,
        rank=rank,
        directory=directory,
        operation=operation,
        call=generator.randint(1, count),
        back=(back, generator.randint(1, count_back)),
        place=Place(other),
    )


@functools.cache
def _other_run(world_size: int, directories: int, page_bytes: int) -> list[list[Files]]:
    """Return the files of another committed run of the same model: rank -> directory -> files."""
    settings = Settings(
        world_size=world_size,
        commit_every=1,
        keep_last=None,
        actions=4,
        kinds=("synchronize",),
        directories=directories,
        page_bytes=page_bytes,
    )
    session = Session(Disk(folders=(FOLDER,)), settings, Log(world_size), Protocol())
    versions = [beginning(world_size)]
    plan = Plan(versions, random.Random(0), "other", settings.actions, settings.kinds)
    outcomes = [*session.open(), *session.perform(plan), *session.end()]
    assert not any(outcomes), outcomes
    return session.files()
