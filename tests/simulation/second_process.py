"""A second process that tries to open a run while the first one uses it."""

from __future__ import annotations

import random
from dataclasses import replace

from tests.simulation.plan import Plan
from tests.simulation.session import Session, Settings
from tests.simulation.simulator import TYPED, Simulation


class SecondProcessSimulation(Simulation):
    """Runs in which a second process often tries to resume or to overwrite the run."""

    def __init__(self, seed: int, *, settings: Settings | None = None) -> None:
        settings = settings or Settings.drawn(random.Random(f"{seed} settings"))
        kinds = (*settings.kinds, *["intrude"] * 8)
        settings = replace(settings, kinds=kinds, actions=max(settings.actions, 12))
        super().__init__(seed, settings=settings, widths=(8, 2))

    def _perform(self, name: str, session: Session, plan: Plan) -> None:
        super()._perform(name, session, plan)
        tried = sum(action.kind == "intrude" for action in plan.actions)
        self.checked["second process", TYPED] += tried * self.settings.world_size

    def _fault(self, killed: bool) -> str:
        return "second process"
