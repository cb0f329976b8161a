"""Disks that fail or lie under a simulated run: it goes on right, or it says so.

After a fault that is reported (an error, a short transfer) the last commit is intact, and
whatever was acknowledged is found, even if power is lost next. One that is not reported (a
lost, misdirected or flipped write, a flipped read, a bit that changes at rest) is found
out, or did no harm: no wrong tensor is ever handed out.
"""

from __future__ import annotations

import errno
import random
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from tests.simulation.disk import Crash, Disk, rank_node
from tests.simulation.log import Log
from tests.simulation.oracle import bounds, published_at
from tests.simulation.plan import Plan, beginning
from tests.simulation.session import FOLDER, Protocol, Session, Settings
from tests.simulation.simulator import Simulation, Violation
from tests.simulation.storage import RecordedStorage
from tierstore.errors import RunDirectoryError, RunMismatchError, TierstoreError
from tierstore.storage.base import Storage, Transfer
from tierstore.testing.faults import Fault, FaultKind, FaultyStorage
from tierstore.testing.transfers import aligned_buffer
from tierstore.units import SECTOR_BYTES, Extent

# How many faults are tried on one plan, and how many crashes after each.
FAULT_WIDTHS = (24, 2)

_REPORTED = ("error", "error", "short")
_UNREPORTED = ("flipped_bit", "lost", "misdirected", "flipped_write", "rot")


Calls = tuple[int, int, str, int]
"""Rank and directory of a storage, an operation, and how often a run calls it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trouble:
    """One fault of one run."""

    kind: str
    """A FaultKind, or "flipped_write", or "rot": a bit or sector that changes at rest."""
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

    def wrap(self, storage: RecordedStorage) -> Storage:
        """Return the storage of one rank as the store shall see it."""
        place = (storage.rank, storage.directory)
        if place != (self.rank, self.directory) or self.kind == "rot":
            return storage
        if self.kind == "flipped_write":
            return _FlippedWrite(storage, self)
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
        plan = Plan(before, generator, str(self.seed), self.settings.actions, self.settings.kinds)
        return session, plan

    def _faulty(
        self, name: str, calls: Sequence[Calls], only: Sequence[int] | None
    ) -> Iterator[str]:
        generator = random.Random(f"{name} fault")
        trouble = _drawn(calls, generator)
        reported = trouble.kind in _REPORTED
        session, plan = self._session(Protocol(storage=trouble.wrap))
        if not reported:
            # Pages of which no checksum is at hand: what is published is for verify().
            session.check_published = lambda files, version: None
        outcomes = session.open()
        if not any(outcomes):
            outcomes = self._carried_out(name, session, plan)
            if (
                self.settings.world_size == 1
                and outcomes[0] is not None
                and generator.random() < 0.5
            ):
                plan = self._gone_back(name, session, plan, generator, reported)
        self._require_told(name, session, [*outcomes, *session.end()], trouble)
        self.counts[f"{trouble.kind} of {trouble.operation}"] += 1
        try:
            if reported:
                yield from self._branches(name, session, plan, only)
            else:
                self._check_unreported(name, session, plan, trouble)
                yield name
        except Violation as violation:
            found = f"after {trouble}: {violation.found}"
            raise Violation(violation.schedule, found, violation.log) from None

    def _carried_out(self, name: str, session: Session, plan: Plan) -> list[BaseException | None]:
        """Do what was planned. One rank goes on after a checkpoint or a prefetch that fails."""
        outcomes = session.perform(plan)
        while (
            self.settings.world_size == 1
            and isinstance(outcomes[0], TierstoreError)
            and plan.actions[session.progress[0]].kind in ("checkpoint", "prefetch")
        ):
            self._note_published(name, session)
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
            if isinstance(error, RunMismatchError) and "which was removed" in str(error):
                return plan  # The last commit is one before a removal.
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
        again = Plan(plan.versions[committed : found + 1], generator, name, 3, self.settings.kinds)
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
                text = f"after {trouble}: {outcome!r} is no error that tells of it"
                raise Violation(name, text, str(session.log)) from outcome

    def _check_unreported(self, name: str, session: Session, plan: Plan, trouble: Trouble) -> None:
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
        with suppress(TierstoreError):
            restarted.end()


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
    return Trouble(
        kind=kind,
        rank=rank,
        directory=directory,
        operation=operation,
        call=generator.randint(1, count),
        errno=generator.choice((errno.EIO, errno.ENOSPC)),
        seed=generator.randrange(2**32),
    )


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
