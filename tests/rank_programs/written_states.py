"""Ranks that change states, and load the state dict that they have."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import muon
import tierstore
from tests.support.attempts import attempt


def change_alone() -> dict[str, str]:
    """Change states as on one rank: what each way raises."""
    parameter = nn.Parameter(torch.ones(6, 4))
    with tierstore.TierStore(None, timeout=30.0) as store:
        optimizer: Any = muon.Muon([("first", parameter)], store=store)
        parameter.grad = torch.ones(6, 4)
        optimizer.step()
        state = torch.zeros(6, 4)
        ways = {
            "assign": lambda: optimizer.state[parameter].update({"momentum_buffer": state}),
            "assign one": lambda: optimizer.state[parameter].__setitem__("momentum_buffer", state),
            "pop": lambda: optimizer.state.pop(parameter),
            "delete": lambda: optimizer.state.__delitem__(parameter),
            "clear": optimizer.state.clear,
            "replace": lambda: setattr(optimizer, "state", {}),
        }
        raised = {name: attempt(way) for name, way in ways.items()}
        # As frameworks do that move states to a device.
        for each, states in optimizer.state.items():
            optimizer.state[each] = states
        optimizer.step()
    return raised


def load_own(directory: Path) -> tuple[list[int], bool]:
    """Load the state dict: bytes written of tensors given out, and of a copy on rank 1; reset."""
    parameters = {name: nn.Parameter(torch.ones(6, 4)) for name in ("first", "second")}
    groups = [{"params": [*parameters.items()], "algorithm": "adamw"}]
    with tierstore.TierStore(directory, timeout=30.0) as store:
        optimizer = muon.Muon(groups, store=store)
        for parameter in parameters.values():
            parameter.grad = torch.ones(6, 4)
        optimizer.step()
        store.synchronize()
        written = [store.stats().bytes_written]
        for copied in (False, True):
            saved = optimizer.state_dict()
            if copied and dist.get_rank():
                saved["state"][1]["exp_avg"] = saved["state"][1]["exp_avg"].clone()
            optimizer.load_state_dict(saved)
            store.synchronize()
            written.append(store.stats().bytes_written)
        optimizer.reset_state([parameters["first"]])
        states = optimizer.state_dict()["state"]
        was_reset = (
            not states[0]["exp_avg"].any()
            and not states[0]["step"]
            and bool(states[1]["exp_avg"].all())
            and states[1]["step"].item() == 1
        )
    return [after - before for before, after in itertools.pairwise(written)], was_reset
