"""Disks that fail or lie under a simulated run: it goes on right, or it says so.

After a fault that is reported (an error, a short transfer) the last commit is intact, and
whatever was acknowledged is found, even if power is lost next. One that is not reported (a
lost, misdirected or flipped write, a flipped read, a bit that changes at rest) is found
out, or did no harm: no wrong tensor is ever handed out.
"""

from __future__ import annotations

import errno
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from tests.simulation.disk import Crash, Disk, rank_node
from tests.simulation.log import Log
from tests.simulation.oracle import bounds, published_at
from tests.simulation.plan import Action, Plan, beginning
from tests.simulation.published_reader import check_published
from tests.simulation.session import FOLDER, Protocol, Session, Settings
from tests.simulation.simulator import HARMLESS, TYPED, Simulation, Violation
from tests.simulation.storage import RecordedStorage
from tests.simulation.write_back import OPERATIONS, FailedWriteBack
from tests.support.faults import Fault, FaultKind, FaultyStorage
from tests.support.transfers import aligned_buffer
from tierstore.errors import RunDirectoryError, TierstoreError
from tierstore.storage.base import Storage, Transfer
from tierstore.units import SECTOR_BYTES, Extent

# How many faults are tried on one plan, and how many crashes after each.
FAULT_WIDTHS = (24, 2)

WRITE_BACK_WIDTHS = (8, 4, 3)

_REPORTED = ("error", "error", "short")
_UNREPORTED = ("flipped_bit", "lost", "misdirected", "flipped_write", "rot")

ROT_IN_A_PAGE = "rot in a page"
"""A bit of a page file that changes at rest, before a checkpoint is published."""


_CLASSES = {
    "lock, open": ("lock", "folder"),
    "list, size, link count": (
        "list",
        "size",
        "is_shared",
        "require_in_place",
        "children",
        "files",
    ),
    "read": ("read", "get", "map"),
    "write": ("write", "put", "append", "scratch"),
    "flush, sync": ("flush", "sync_directory", "sync", "sync_children"),
    "create, rename, link, unlink": ("create", "make", "rename", "link", "unlink", "remove"),
}
"""Classes of calls in a table -> operations, without the prefix of operations of a folder."""


Calls = tuple[int, int, str, int]
"""Rank and directory of a storage, an operation, and how often a run calls it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trouble:
    """One fault of one run."""

    kind: str
    """A FaultKind, "flipped_write", "failed_write_back", ROT_IN_A_PAGE, or "rot": a bit or sector
    that changes at rest, after the run."""
    rank: int
    directory: int = 0
    """Index of the rank's directory that fails."""
    operation: str = "write"
    call: int = 1
    errno: int = errno.EIO
    seed: int = 0

    def __str__(self) -> str:
        place = f"rank {self.rank}" + (f", directory {self.directory}" if self.directory else "")
        return f"{self.kind} of {self.operation} number {self.call} of {place}"

    def describe(self) -> str:
        """Return the fault without its place, for a table."""
        kind = self.kind.replace("_", " ")
        if self.kind != "error":
            return kind
        operation = self.operation.removeprefix("folder_")
        return f"error of {next((c for c, of in _CLASSES.items() if operation in of), operation)}"

    def wrap(self, storage: RecordedStorage) -> Storage:
        """Return the storage of one rank as the store shall see it."""
        place = (storage.rank, storage.directory)
        if place != (self.rank, self.directory) or self.kind in ("rot", ROT_IN_A_PAGE):
            return storage
        if self.kind == "flipped_write":
            return _FlippedWrite(storage, self)
        if self.kind == "failed_write_back":
            return FailedWriteBack(storage, self.operation, self.call, self.seed)
        faulty = FaultyStorage(storage, seed=self.seed)
        kind: FaultKind = self.kind  # type: ignore[assignment]
        faulty.arm(Fault(kind, self.operation, call=self.call, errno=self.errno))
        return faulty


class _FlippedWrite(RecordedStorage):
    """A RecordedStorage that flips a bit of one write, on its way to the disk."""

    def __init__(self, storage: RecordedStorage, trouble: Trouble) -> None:
        super().__init__(storage.log, storage.rank, storage.files, storage.directory)
        self._calls_left = trouble.call
        self._generator = random.Random(trouble.seed)

    def write(self, name: str, extent: Extent, buffer: memoryview) -> Transfer:
        """See Storage.write."""
        self._calls_left -= 1
        if self._calls_left == 0:
            buffer = aligned_buffer(_flipped(bytes(buffer), self._generator))
        return super().write(name, extent, buffer)


class FaultSimulation(Simulation):
    """One plan, carried out again and again with one fault each; see Simulation.

    The first number of a schedule's name is the seed, the second the fault.
    """

    def __init__(
        self,
        seed: int,
        *,
        settings: Settings | None = None,
        widths: Sequence[int] = FAULT_WIDTHS,
    ) -> None:
        settings = settings or Settings.drawn(random.Random(f"{seed} settings"))
        # The fault is one of the first opening of the storage.
        kinds = tuple(kind for kind in settings.kinds if kind not in ("reopen", "overwrite"))
        settings = replace(settings, actions=min(settings.actions, 6), kinds=kinds)
        super().__init__(seed, settings=settings, widths=widths)

    def schedules(self) -> Iterator[str]:
        """Go through all schedules, yielding the name of each that went well.

        Raises:
            Violation: one did not.
        """
        calls = self._calls()
        for number in range(self._widths[0]):
            yield from self._faulty(f"{self.seed}/{number}", calls, None)

    def replay(self, name: str) -> None:
        """Go through one schedule again; see Simulation.replay."""
        seed, number, *branches = (int(part) for part in name.split("/"))
        if seed != self.seed:
            raise ValueError(f"schedule {name} is of seed {seed}, this is seed {self.seed}")
        for _ in self._faulty(f"{seed}/{number}", self._calls(), branches or None):
            pass

    def _trouble(self, calls: Sequence[Calls], generator: random.Random) -> Trouble:
        return _drawn(calls, generator)

    def _wrapped(self, trouble: Trouble) -> Callable[[RecordedStorage], Storage]:
        """Return what puts a fault between the storages and the store."""
        return trouble.wrap

    def _begun(self, session: Session) -> None:
        """Take note of a session that a fault will strike."""

    def _afterwards(self, session: Session) -> list[BaseException | None]:
        """End a session that a fault has struck; return what each rank raised."""
        return session.end()

    def _fault(self, killed: bool) -> str:
        return self._struck.describe()

    def _kind(self, depth: int, killed: bool) -> str:
        return f"after a fault, {'processes killed' if killed else 'power lost'}"

    def _calls(self) -> list[Calls]:
        """Count the calls of each rank's storages, in a run without a fault."""
        counts: dict[tuple[int, int, str], int] = {}

        def counted(storage: RecordedStorage) -> Storage:
            def count(operation: str, name: str, when: str) -> None:
                if when == "before":
                    key = (storage.rank, storage.directory, operation)
                    counts[key] = counts.get(key, 0) + 1

            return FaultyStorage(storage, on_operation=count)

        session, plan = self._session(Protocol(storage=counted))
        name = str(self.seed)
        self._require_well(name, session, session.open())
        self._perform(name, session, plan)
        return [(*key, count) for key, count in sorted(counts.items())]

    def _session(self, protocol: Protocol) -> tuple[Session, Plan]:
        log = Log(self.settings.world_size)
        session = Session(Disk(folders=(FOLDER,)), self.settings, log, protocol)
        generator = random.Random(f"{self.seed} plan")
        before = [beginning(self.settings.world_size)]
        settings = self.settings
        plan = Plan(
            before,
            generator,
            str(self.seed),
            settings.actions,
            settings.kinds,
            settings.keep_last,
        )
        return session, plan

    def _faulty(
        self, name: str, calls: Sequence[Calls], only: Sequence[int] | None
    ) -> Iterator[str]:
        generator = random.Random(f"{name} fault")
        trouble = self._trouble(calls, generator)
        reported = trouble.kind not in (*_UNREPORTED, ROT_IN_A_PAGE)
        self._struck = trouble
        session, plan = self._session(Protocol(storage=self._wrapped(trouble)))
        whole = None
        if not reported:
            whole = _WholeCheckpoints(session, trouble, plan)
            # These pages have no checksum at hand: verification checks the published files.
            session.check_published = lambda files, version: None
        self._begun(session)
        outcomes = session.open()
        untold: str | None = None
        if not any(outcomes):
            outcomes = self._carried_out(name, session, plan)
            if whole is not None and not any(outcomes):
                outcomes = session.close()
                if not any(outcomes) and not self._failed_calls:
                    untold = whole.untold()
            if (
                self.settings.world_size == 1
                and outcomes[0] is not None
                and generator.random() < 0.5
            ):
                plan = self._gone_back(name, session, plan, generator, reported)
        outcomes += self._afterwards(session)
        self._require_told(name, session, outcomes, trouble)
        self.counts[f"{trouble.kind} of {trouble.operation}"] += 1
        try:
            if whole is None:
                yield from self._branches(name, session, plan, only)
            else:
                found = untold or whole.fault(session)
                if found:
                    raise Violation(name, found, str(session.log))
                self._check_unreported(name, session, plan, trouble, whole)
                yield name
        except Violation as violation:
            found = f"after {trouble}: {violation.found}"
            raise Violation(violation.schedule, found, violation.log) from None

    def _carried_out(self, name: str, session: Session, plan: Plan) -> list[BaseException | None]:
        """Do what was planned. One rank goes on after a checkpoint or a prefetch that fails.

        Not if the store has failed, for example in the commit before a checkpoint: to reopen the
        run would go back.
        """
        outcomes = session.perform(plan)
        self._failed_calls = 0
        while (
            self.settings.world_size == 1
            and isinstance(outcomes[0], TierstoreError)
            and plan.actions[session.progress[0]].kind in ("checkpoint", "prefetch")
            and not session.has_failed(0)
        ):
            self._note_published(name, session)
            self._failed_calls += 1
            outcomes = session.perform(plan, start=session.progress[0] + 1)
        self._note_published(name, session)
        return outcomes

    def _note_published(self, name: str, session: Session) -> None:
        """Check what a failed call has published all the same: it is whole, or not there."""
        for child, files in session.contents().items():
            if child not in session.published:
                try:
                    session.check_published(files, session.expected[child])
                except AssertionError as error:
                    raise Violation(name, str(error), str(session.log)) from error
                session.published[child] = files

    def _gone_back(
        self, name: str, session: Session, plan: Plan, generator: random.Random, reported: bool
    ) -> Plan:
        """Go back to the last commit without a restart, and on from there; return that plan."""
        committed, begun = bounds(session.log, session.log.lengths(), plan)
        (error,) = session.restore()
        if error is not None:
            # Nothing to go back to, or the one copy of each page was being overwritten.
            none = committed == 0 or self.settings.commit_every is None
            if isinstance(error, TierstoreError) and (
                not reported or (none and isinstance(error, RunDirectoryError))
            ):
                return plan
            text = f"restore() failed: {error!r}"
            raise Violation(name, text, str(session.log)) from error
        if not reported:
            if self._found(session, plan, 0, begun) is None:
                raise Violation(name, "restore() found no version", str(session.log))
            return plan
        found = self._found(session, plan, committed, begun)
        if found is None:
            raise Violation(name, "restore() found no version", str(session.log))
        session.publishing, session.acknowledged = published_at(session, session.log.lengths())
        session.log.starts = session.log.lengths()
        settings, versions = self.settings, plan.versions[committed : found + 1]
        again = Plan(versions, generator, name, 3, settings.kinds, settings.keep_last)
        session.log.mark(0, "committed", again.found)
        self._require_well(name, session, session.perform(again))
        return again

    def _found(self, session: Session, plan: Plan, first: int, last: int) -> int | None:
        for index in range(last, first - 1, -1):
            differences = session.differences(plan.versions[index])
            if any(isinstance(difference, TierstoreError) for difference in differences):
                return index  # It was told of the damage.
            if not any(differences):
                return index
        return None

    def _require_told(
        self,
        name: str,
        session: Session,
        outcomes: Sequence[BaseException | None],
        trouble: Trouble,
    ) -> None:
        for outcome in outcomes:
            if outcome is not None and not isinstance(outcome, TierstoreError):
                text = f"after {trouble}: {outcome!r} is not an error that tells of it"
                raise Violation(name, text, str(session.log)) from outcome
            self.checked[trouble.describe(), TYPED] += outcome is not None

    def _check_unreported(
        self, name: str, session: Session, plan: Plan, trouble: Trouble, whole: _WholeCheckpoints
    ) -> None:
        """Open the run again: it is at some version, or the damage is found."""
        cuts = session.log.lengths()
        crash = Crash(session.log, cuts, session.durable)
        disk = crash.image(crash.units)
        rotten = ""
        if trouble.kind == "rot":
            rotten = _rot(disk, trouble)
        log = Log(self.settings.world_size, 1)
        restarted = Session(disk, self.settings, log, Protocol())
        outcomes = restarted.open()
        self._require_told(name, restarted, outcomes, trouble)
        if not any(outcomes):
            _, begun = bounds(session.log, cuts, plan)
            if self._found(restarted, plan, 0, begun) is None:
                differences = restarted.differences(plan.versions[begun])
                text = f"{rotten} was not found out: {differences}"
                raise Violation(name, text, crash.describe(crash.units))
        self.checked[trouble.describe(), HARMLESS] += 1
        with suppress(TierstoreError):
            restarted.end()
        if session.contents() and trouble.kind != "rot":  # That may be in any checkpoint.
            self._publish_again(name, disk, whole)

    def _publish_again(self, name: str, disk: Disk, whole: _WholeCheckpoints) -> None:
        """Open the run and publish its step. Only masters of that step were read."""
        session = Session(disk, self.settings, Log(self.settings.world_size, 1), Protocol())
        if not any(session.open()):
            session.publish_again()
            found = whole.fault(session)
            if found is not None:
                raise Violation(name, f"after a restart {found}", str(session.log))
        session.end()


class _WholeCheckpoints:
    """The checkpoints that a faulty session publishes, and which of them hold what they should.

    Args:
        session: before it is opened; a page file of it rots if the fault says so.
        trouble: the fault.
        plan: of the session.
    """

    def __init__(self, session: Session, trouble: Trouble, plan: Plan) -> None:
        self._session = session
        self._trouble = trouble
        self._plan = plan
        self._generator = random.Random(trouble.seed)
        checkpoints = [action for action in plan.actions if action.kind == "checkpoint"]
        self._victim = self._generator.choice(checkpoints) if checkpoints else None
        """The action that a page file rots before."""
        self._excused: set[str] = set()
        """Checkpoints with a file that rotted after it was read for them."""
        self._seen: set[str] = set()
        """Checkpoints that were whole before a later one was published."""
        session.before_action = self._before_action

    def fault(self, session: Session) -> str | None:
        """Return what is wrong with the checkpoints of this session or the next one, or None."""
        whole = self._whole(session)
        false = session.marked() & session.contents().keys() - whole - self._excused
        if false:
            return f"{sorted(false)} are marked as whole and are not"
        if self._seen and not whole and not self._excused:
            return f"{sorted(self._seen)} were whole, and there are {sorted(session.contents())}"
        return None

    def untold(self) -> str | None:
        """Return the damaged checkpoints that somebody must have been told of, in words."""
        session = self._session
        damaged = session.contents().keys() - self._whole(session) - self._excused
        return f"nobody was told that {sorted(damaged)} are not whole" if damaged else None

    def _before_action(self, rank: int, action: Action) -> None:
        if rank == 0 and action.kind == "checkpoint":
            self._seen |= self._whole(self._session)
        is_rot = self._trouble.kind == ROT_IN_A_PAGE and rank == self._trouble.rank
        if is_rot and action is self._victim:
            self._excused |= self._session.rot_in_a_page(rank, self._generator)

    def _whole(self, session: Session) -> set[str]:
        return {child for child, files in session.contents().items() if self._holds(child, files)}

    def _holds(self, child: str, files: Mapping[str, bytes]) -> bool:
        expected = self._session.expected.get(child)
        for version in self._plan.versions if expected is None else [expected]:
            with suppress(AssertionError):
                check_published(files, version)
                return True
        return False


class WriteBackSimulation(FaultSimulation):
    """Failed write-back in each run; half of the crashes after it are kills, so that runs go on."""

    def __init__(
        self,
        seed: int,
        *,
        settings: Settings | None = None,
        widths: Sequence[int] = WRITE_BACK_WIDTHS,
    ) -> None:
        super().__init__(seed, settings=settings, widths=widths)
        self._share_killed = 0.5

    def _trouble(self, calls: Sequence[Calls], generator: random.Random) -> Trouble:
        by_operation = {
            operation: [call for call in calls if call[2] == operation] for operation in OPERATIONS
        }
        operation = generator.choice([each for each, found in by_operation.items() if found])
        rank, directory, _, count = generator.choice(by_operation[operation])
        return Trouble(
            kind="failed_write_back",
            rank=rank,
            directory=directory,
            operation=operation,
            call=generator.randint(1, count),
            seed=generator.randrange(2**32),
        )


def _drawn(calls: Sequence[Calls], generator: random.Random) -> Trouble:
    """Draw a fault that strikes one of the calls that the run makes."""
    kind = generator.choice(_REPORTED + _REPORTED + _UNREPORTED)
    operations: tuple[str, ...] | None = {
        "error": None,
        "short": ("read", "write"),
        "flipped_bit": ("read",),
    }.get(kind, ("write",))
    possible = [call for call in calls if operations is None or call[2] in operations]
    rank, directory, operation, count = generator.choice(possible or [(0, 0, "write", 1)])
    if kind == "flipped_bit" and not possible:
        kind = "lost"
    drawn = Trouble(
        kind=kind,
        rank=rank,
        directory=directory,
        operation=operation,
        call=generator.randint(1, count),
        errno=generator.choice((errno.EIO, errno.ENOSPC)),
        seed=generator.randrange(2**32),
    )
    if kind == "rot" and generator.random() < 0.5:
        return replace(drawn, kind=ROT_IN_A_PAGE)
    return drawn


def _rot(disk: Disk, trouble: Trouble) -> str:
    """Change a bit, or lose a sector, of one file of a rank; return which."""
    generator = random.Random(trouble.seed)
    files = disk.directories.get(rank_node(trouble.rank, trouble.directory), {})
    name = generator.choice(sorted(name for name in files if disk.contents.get(files[name])))
    content = disk.contents[files[name]]
    if generator.random() < 0.7:
        disk.contents[files[name]] = _flipped(content, generator)
    else:
        start = generator.randrange(len(content)) // SECTOR_BYTES * SECTOR_BYTES
        lost = content[start : start + SECTOR_BYTES]
        rest = content[start + SECTOR_BYTES :]
        disk.contents[files[name]] = content[:start] + bytes(len(lost)) + rest
    return f"rot in {name}"


def _flipped(content: bytes, generator: random.Random) -> bytes:
    data = bytearray(content)
    data[generator.randrange(len(data))] ^= 1 << generator.randrange(8)
    return bytes(data)
