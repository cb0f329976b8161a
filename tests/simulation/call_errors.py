"""Errors at every call of a storage, and ranks that are killed at a call while others live."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from tests.simulation.fault_simulation import Calls, FaultSimulation, Trouble
from tests.simulation.log import Log
from tests.simulation.plan import Plan
from tests.simulation.session import Session, Settings
from tests.simulation.simulator import Violation, draw_cuts
from tests.simulation.storage import RecordedStorage
from tests.support.faults import FaultyStorage
from tests.support.thread_ranks import ThreadJob
from tierstore.errors import RunLockedError
from tierstore.storage.base import Storage
from tierstore.storage.paths import storage_error


class ErrorSimulation(FaultSimulation):
    """An error at one call of each run, every kind of call as often as any other.

    A read or write fails as its file is opened. close() fails when everything is released. Calls
    are counted over all openings of a run, and after an error one rank opens the run again in the
    same process.
    """

    def __init__(self, seed: int, *, settings: Settings | None = None) -> None:
        super().__init__(seed, settings=settings)
        kinds = (*self.settings.kinds, "reopen", "reopen")
        self.settings = replace(self.settings, kinds=kinds)

    def _trouble(self, calls: Sequence[Calls], generator: random.Random) -> Trouble:
        operation = generator.choice(sorted({call[2] for call in calls}))
        chosen = generator.choice([call for call in calls if call[2] == operation])
        return _at(chosen, "error", generator)

    def _wrapped(self, trouble: Trouble) -> Callable[[RecordedStorage], Storage]:
        moment = "after" if trouble.operation == "close" else "before"
        calls_left = trouble.call

        def wrap(storage: RecordedStorage) -> Storage:
            def strike(operation: str, name: str, when: str) -> None:
                nonlocal calls_left
                if (operation, when) == (trouble.operation, moment):
                    calls_left -= 1
                    if calls_left == 0:
                        path = Path(storage.location, name)
                        raise storage_error(operation, path, trouble.errno)

            if (storage.rank, storage.directory) != (trouble.rank, trouble.directory):
                return storage
            return FaultyStorage(storage, on_operation=strike)

        return wrap

    def _gone_back(
        self, name: str, session: Session, plan: Plan, generator: random.Random, reported: bool
    ) -> Plan:
        if plan.actions[session.progress[0]].kind == "reopen":
            return plan  # No store is open.
        return super()._gone_back(name, session, plan, generator, reported)

    def _afterwards(self, session: Session) -> list[BaseException | None]:
        outcomes = session.end()
        if self.settings.world_size == 1:
            (error,) = session.open()
            if isinstance(error, RunLockedError):
                raise Violation(str(self.seed), f"the lock was kept: {error}", str(session.log))
            outcomes += [error, *session.end()]
        return outcomes


class Killed(BaseException):
    """Ends a rank at once: nothing that it calls afterwards does anything."""


class RankKilledSimulation(FaultSimulation):
    """One rank of three is killed at one call; the others get PeerFailed and end by themselves."""

    def __init__(self, seed: int, *, settings: Settings | None = None) -> None:
        settings = settings or Settings.drawn(random.Random(f"{seed} settings"))
        super().__init__(seed, settings=replace(settings, world_size=3), widths=(12, 3, 2))
        self._share_killed = 0.5
        self._job: ThreadJob | None = None

    def _trouble(self, calls: Sequence[Calls], generator: random.Random) -> Trouble:
        return _at(generator.choice(calls), "killed rank", generator)

    def _wrapped(self, trouble: Trouble) -> Callable[[RecordedStorage], Storage]:
        self._job = None
        calls_left = trouble.call

        def wrap(storage: RecordedStorage) -> Storage:
            def strike(operation: str, name: str, when: str) -> None:
                nonlocal calls_left
                if when == "before":
                    calls_left -= calls_left > 0 and operation == trouble.operation
                    if calls_left == 0:
                        self._die(trouble.rank)

            is_struck = storage.rank == trouble.rank
            return FaultyStorage(storage, on_operation=strike) if is_struck else storage

        return wrap

    def _die(self, rank: int) -> None:
        assert self._job is not None
        for channel in ("training", "commits"):
            self._job.end(rank, channel, "was killed")
        raise Killed

    def _begun(self, session: Session) -> None:
        self._job = session.job

    def _afterwards(self, session: Session) -> list[BaseException | None]:
        opened = all(store is not None for store in session.stores)
        return [*(session.restore() if opened else ()), *session.end()]

    def _require_told(
        self,
        name: str,
        session: Session,
        outcomes: Sequence[BaseException | None],
        trouble: Trouble,
    ) -> None:
        living = [None if isinstance(outcome, Killed) else outcome for outcome in outcomes]
        super()._require_told(name, session, living, trouble)

    def _cuts(self, log: Log, generator: random.Random) -> Sequence[int]:
        return log.lengths() if generator.random() < 0.7 else draw_cuts(log, generator)


def _at(call: Calls, kind: str, generator: random.Random) -> Trouble:
    rank, directory, operation, count = call
    return Trouble(
        kind=kind,
        rank=rank,
        directory=directory,
        operation=operation,
        call=generator.randint(1, count),
        seed=generator.randrange(2**32),
    )
