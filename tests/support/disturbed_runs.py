"""Runs whose processes are disturbed at system calls, one process after the other."""

from __future__ import annotations

import shutil
import signal
from dataclasses import replace
from pathlib import Path

from tests.support.interrupted_run import (
    RESHARD,
    TRAIN,
    Promises,
    Settings,
    make_run_of_two_ranks,
    run_program,
)
from tests.support.system_calls import Outcome, Rule, run_watched

ENGINES = ("io_uring", "libaio", "aiofiles")
PROGRAMS = {"train": TRAIN, "copy": TRAIN, "striped": TRAIN, "reshard": RESHARD}


class Case:
    """A run whose processes are watched.

    Args:
        scratch: all files of the case are in it, and the rules are about them.
        name: of the program.
        engine: of the store.
        run: the run directory, if not "run" in ``scratch``.
        folder: the folder of checkpoints, if not "checkpoints" in ``scratch``.
    """

    def __init__(
        self,
        scratch: Path,
        name: str,
        engine: str,
        *,
        run: str = "run",
        folder: str = "checkpoints",
    ) -> None:
        self.promises = Promises()
        self._actions = PROGRAMS[name]
        self._scratch = scratch
        self._log = scratch.with_suffix(".log")
        self._settings = Settings(
            directory=scratch / run,
            directories=2 if name == "striped" else 1,
            folder=scratch / folder,
            engine=engine,
        )
        scratch.mkdir(exist_ok=True)
        if name == "reshard":
            original = scratch.parent / "two ranks"
            if not original.exists():
                make_run_of_two_ranks(original, 2)
            shutil.copytree(original, self._settings.directory)
            self.promises.durable = [0, 0]

    def run(self, rule: Rule, *, after_error: str = "end", only_changes: bool = False) -> Outcome:
        """Run the program in a process, and check what it tells.

        Args:
            rule: see run_watched().
            after_error: see Settings.
            only_changes: see run_watched().
        """
        self._settings = replace(self._settings, attempt=self._settings.attempt + 1)
        outcome = run_watched(
            run_program,
            self._actions,
            replace(self._settings, after_error=after_error),
            self._log,
            tree=self._scratch,
            rule=rule,
            only_changes=only_changes,
        )
        assert not outcome.hung, self._log.read_text()
        self.promises.note(outcome.told)
        assert outcome.exitcode in (0, -signal.SIGKILL), self._log.read_text()
        return outcome

    def check(self) -> None:
        """Check what is there, and go on to a clean end."""
        self.promises.check(replace(self._settings, attempt=self._settings.attempt + 1))
