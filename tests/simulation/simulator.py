"""Crash a training run anywhere, any number of times, and see what its restart finds.

A `Simulation` is everything that follows from one seed: a run of the real TierStore on
simulated disks, crashes in it, restarts from what each crash left, crashes in these, and
so on. A *schedule* is one path through that tree: it ends with a restart that is compared
with plain arithmetic. Its name, such as ``12/3/0``, is the seed and the branch taken at
each crash, and replays it::

    for schedule in Simulation(12).schedules():
        ...
    Simulation(12).replay("12/3/0")  # Raises the same Violation, which prints the log.
"""

from __future__ import annotations

import bisect
import random
from collections import Counter
from collections.abc import Iterator, Sequence

from tests.simulation.disk import Crash, Disk, Unit, choose, every_choice
from tests.simulation.log import Log
from tests.simulation.oracle import (
    check_files,
    check_published_after,
    check_refusal,
    check_version,
    in_the_middle_of,
    published_at,
)
from tests.simulation.plan import Plan, Version, beginning
from tests.simulation.session import FOLDER, Protocol, Session, Settings
from tierstore.errors import PeerFailed

FOUND = "acknowledged commits found"
WHOLE = "checkpoints whole"
TYPED = "errors typed"
HARMLESS = "damage told or harmless"
PROMISES = (FOUND, WHOLE, TYPED, HARMLESS)

# How many crashes of a first session are tried, of a restarted one, and of one after that.
WIDTHS = (24, 4, 2)


class Violation(AssertionError):  # noqa: N818 - it is what is asked for.
    """A promise was broken.

    Attributes:
        schedule: the name of the schedule that shows it.
        found: what was found instead.
        log: the operations before the last crash, and what became of each.
    """

    def __init__(self, schedule: str, found: str, log: str = "") -> None:
        self.schedule = schedule
        self.found = found
        self.log = log
        super().__init__(f"schedule {schedule}: {found}" + (f"\n{log}" if log else ""))

    def __reduce__(self) -> tuple[type[Violation], tuple[str, str, str]]:
        return Violation, (self.schedule, self.found, self.log)  # Also between processes.


class Simulation:
    """All schedules of one seed.

    Args:
        seed: decides everything.
        settings: None for what the seed draws.
        protocol: what is between store and simulation.
        widths: how many crashes of each session are tried, by how many went before it.
    """

    def __init__(
        self,
        seed: int,
        *,
        settings: Settings | None = None,
        protocol: Protocol | None = None,
        widths: Sequence[int] = WIDTHS,
    ) -> None:
        self.seed = seed
        self.settings = settings or Settings.drawn(random.Random(f"{seed} settings"))
        self.counts: Counter[str] = Counter()
        """Number of schedules of each kind."""
        self.checked: Counter[tuple[str, str]] = Counter()
        """(fault, promise) -> number of times that the promise was checked and kept."""
        self.sites: set[str] = set()
        """Places in the code that flush or sync; see Weakening."""
        self._protocol = protocol or Protocol()
        self._widths = widths
        self._share_killed = 0.25  # Of the crashes; in the others power is lost.

    def schedules(self) -> Iterator[str]:
        """Go through all schedules, yielding the name of each that went well.

        Raises:
            Violation: one did not.
        """
        session, plan = self._first()
        yield from self._branches(str(self.seed), session, plan, None)

    def replay(self, name: str) -> None:
        """Go through one schedule again.

        Raises:
            Violation: it did not go well.
        """
        seed, *branches = (int(part) for part in name.split("/"))
        if seed != self.seed:
            raise ValueError(f"schedule {name} is of seed {seed}, this is seed {self.seed}")
        session, plan = self._first()
        for _ in self._branches(str(seed), session, plan, branches):
            pass

    def every_crash(self) -> Iterator[str]:
        """Crash one rank's first session after each operation, in all of the plain ways.

        Raises:
            Violation: one of them did not go well.
        """
        session, plan = self._first()
        assert session.log.world_size == 1, "the cuts of several ranks are too many"
        for cut in range(len(session.log.operations[0]) + 1):
            crash = Crash(session.log, [cut], session.durable)
            for number, kept in enumerate(every_choice(crash.units)):
                name = f"{self.seed} after operation {cut}, choice {number}"
                restarted, _ = self._restart(name, session, plan, crash, kept)
                restarted.end()
                yield name

    def _first(self) -> tuple[Session, Plan]:
        name = str(self.seed)
        log = Log(self.settings.world_size, 0, self._protocol.weakening)
        session = Session(Disk(folders=(FOLDER,)), self.settings, log, self._protocol)
        self._require_well(name, session, session.open())
        before = [beginning(self.settings.world_size)]
        plan = Plan(
            before,
            random.Random(f"{name} plan"),
            name,
            self.settings.actions,
            self.settings.kinds,
            self.settings.keep_last,
        )
        self._perform(name, session, plan)
        return session, plan

    def _perform(self, name: str, session: Session, plan: Plan) -> None:
        self._require_well(name, session, session.perform(plan))
        self._require_well(name, session, session.end())
        for child, files in session.contents().items():
            if files != session.published[child]:
                raise Violation(name, f"checkpoint {child} was changed", str(session.log))

    def _branches(
        self, path: str, session: Session, plan: Plan, only: Sequence[int] | None
    ) -> Iterator[str]:
        """Crash a session in some ways; go on after some of the restarts, and crash again."""
        depth = path.count("/")
        for number in range(self._widths[depth]) if only is None else only[:1]:
            name = f"{path}/{number}"
            generator = random.Random(name)
            crash = Crash(session.log, self._cuts(session.log, generator), session.durable)
            killed = generator.random() < self._share_killed
            kept = crash.units if killed else choose(crash.units_of_power_loss, generator)
            restarted, found = self._restart(name, session, plan, crash, kept, killed=killed)
            self.counts[self._kind(depth, killed)] += 1
            yield name
            # Of a kill, the crash after it is what tells.
            deeper = depth + 1 < len(self._widths) and generator.random() < (0.5 if killed else 0.2)
            # What a schedule found may be in the session after its last restart.
            if not found or not (deeper or only is not None):
                restarted.end()
                continue
            length, settings = generator.randrange(1, 4), self.settings
            again = Plan(found, generator, name, length, settings.kinds, settings.keep_last)
            self._perform(name, restarted, again)
            yield from self._branches(name, restarted, again, None if only is None else only[1:])

    def _fault(self, killed: bool) -> str:
        """Return the name of what a restart recovers from."""
        return "processes killed" if killed else "power loss"

    def _cuts(self, log: Log, generator: random.Random) -> Sequence[int]:
        """Draw how far each rank is as the session crashes."""
        return draw_cuts(log, generator)

    def _kind(self, depth: int, killed: bool) -> str:
        ranks = "1 rank" if self.settings.world_size == 1 else f"{self.settings.world_size} ranks"
        before = ("", " after a restart", " after two restarts")[depth]
        return f"{ranks}, {'processes killed' if killed else 'power lost'}{before}"

    def _restart(
        self,
        name: str,
        session: Session,
        plan: Plan,
        crash: Crash,
        kept: Sequence[Unit],
        *,
        killed: bool = False,
    ) -> tuple[Session, list[Version]]:
        """Open what a crash left and check it.

        Returns:
            The session, and the version found. Before it, those that a power loss in this
            session may bring back until it is said to be committed again; nothing at all
            where the run was refused.
        """
        disk = crash.image(kept)
        if killed:
            log = session.log.continued(crash.cuts)
            restarted = Session(disk, self.settings, log, self._protocol, session.durable)
            _inherit(restarted, session, crash.cuts)
        else:
            log = Log(self.settings.world_size, session.log.generation + 1, session.log.weakening)
            restarted = Session(disk, self.settings, log, self._protocol)
        errors = [error for error in restarted.open() if error is not None]
        try:
            check_published_after(session, crash.cuts, disk, self.settings.keep_last)
            fault = self._fault(killed)
            self.checked[fault, WHOLE] += len(disk.published())
            if errors:
                check_refusal(session.log, crash.cuts, errors, self.settings)
                self.checked[fault, TYPED] += len(errors)
                self.counts["refused"] += 1
                return restarted, []
            check_files(restarted, disk, session.log, crash.cuts)
            committed, found = check_version(restarted, session.log, crash.cuts, plan)
            self.checked[fault, FOUND] += 1
            if restarted.contents() != disk.published():
                raise AssertionError("the restart changed what is published")
        except AssertionError as error:
            restarted.end()
            raise Violation(name, str(error), crash.describe(kept)) from error
        versions = plan.versions[committed if killed else found : found + 1]
        for rank in range(self.settings.world_size):
            restarted.log.mark(rank, "committed", len(versions) - 1)
        return restarted, versions

    def _require_well(
        self, name: str, session: Session, outcomes: Sequence[BaseException | None]
    ) -> None:
        self.sites |= session.log.sites
        errors = [error for error in outcomes if error is not None]
        if errors:
            first = next((e for e in errors if not isinstance(e, PeerFailed)), errors[0])
            text = f"a run without faults failed: {errors}"
            raise Violation(name, text, str(session.log)) from first


class RecoverySimulation(Simulation):
    """Kills of two ranks in a short run, and power losses while the run is opened again."""

    def __init__(self, seed: int, *, settings: Settings | None = None) -> None:
        settings = settings or Settings(
            world_size=2, commit_every=1, keep_last=None, actions=3, kinds=("synchronize",)
        )
        super().__init__(seed, settings=settings, widths=(24, 12))
        self._share_killed = 0.6

    def _cuts(self, log: Log, generator: random.Random) -> Sequence[int]:
        if log.generation == 0:
            return draw_cuts(log, generator)
        epochs = []  # Of each rank, until its first action.
        for rank, start in enumerate(log.starts):
            kinds = [operation.kind for operation in log.operations[rank][start:]]
            epochs.append(kinds[: kinds.index("doing")].count("gather") + 1)
        return draw_cuts(log, generator, min(epochs))


def draw_cuts(log: Log, generator: random.Random, epochs_max: int | None = None) -> list[int]:
    """Draw how far each rank is as all crash: none past a gather that another has not reached.

    Args:
        log: of the session that crashes.
        generator: decides.
        epochs_max: number of epochs, from the first, that the crash may come in; None: all.
    """
    bounds = [log.epochs(rank) for rank in range(log.world_size)]
    epochs = min(len(of_rank) for of_rank in bounds) - 1
    if epochs_max is not None:
        epochs = min(epochs, epochs_max)
    # As much in an epoch as happens in it, and often just after a name has changed.
    rank = generator.randrange(log.world_size)
    operations = range(bounds[rank][0], bounds[rank][epochs])
    # "folder.rename" as well as "rename".
    change = generator.choice(("rename", "unlink"))
    names = [i for i in operations if log.operations[rank][i].kind.endswith(change)]
    if names and generator.random() < 0.4:
        cut = generator.choice(names) + 1
    else:
        cut = generator.randint(bounds[rank][0], bounds[rank][epochs])
    epoch = min(max(bisect.bisect_left(bounds[rank], cut) - 1, 0), epochs - 1)
    cuts = []
    for other, of_rank in enumerate(bounds):
        first, last = of_rank[epoch], of_rank[epoch + 1]
        # Often as far apart as can be.
        drawn = generator.choice((first, last, generator.randint(first, last)))
        cuts.append(cut if other == rank else drawn)
    return cuts


def _inherit(restarted: Session, killed: Session, cuts: Sequence[int]) -> None:
    """Let a session know what was published before its processes were killed.

    Not all that can be seen is durable, and what was removed may come back.
    """
    restarted.published = dict(killed.published)
    restarted.expected = dict(killed.expected)
    restarted.publishing, restarted.acknowledged = published_at(killed, cuts)
    if in_the_middle_of(killed.log, cuts, "overwrite"):
        for rank in range(len(cuts)):
            restarted.log.mark(rank, "doing", "overwrite")
            restarted.log.mark(rank, "overwriting", 0)
    elif in_the_middle_of(killed.log, cuts, None):  # Until the restart has made it durable.
        for rank in range(len(cuts)):
            restarted.log.mark(rank, "overwriting", 0)
