"""Ranks that save and load the state of an optimizer, and compare it with one process."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import muon
import tierstore
from tests.rank_programs.meshes import cpu_mesh
from tests.rank_programs.training import SHAPES, Case, Model, local, whole_gradients
from tests.support.attempts import attempt
from tests.support.references import assert_same, reference_of
from tests.support.training import make_groups
from tierstore.ranks.peers import Alone

# Several subgroups of every group, and less room than they take.
STREAMED: dict[str, Any] = {"page_bytes": 6000, "buffers": 5, "timeout": 30.0}

StateDict = dict[str, Any]


class Training:
    """The parameters of a case and their optimizer, on this rank alone or on all."""

    def __init__(
        self, case: Case, store: tierstore.TierStore | None, values: Mapping[str, Any] | None = None
    ) -> None:
        self.case, self.model = case, Model(case)
        if values is not None:
            for name, parameter in self.model.parameters.items():
                local(parameter).copy_(values[name])
        self.store = tierstore.TierStore(None, process_group=Alone()) if store is None else store
        groups = make_groups(self.model.parameters, case.shapes)
        self.optimizer = muon.Muon(groups, store=self.store, **case.options)

    def step(self, *steps: int) -> None:
        for step in steps:
            self.model.set_gradients(whole_gradients(self.case.shapes, step, self.case.uniform))
            self.optimizer.step()

    @property
    def values(self) -> dict[str, torch.Tensor]:
        """Copies of what this rank has of each parameter."""
        return {name: local(p).clone() for name, p in self.model.parameters.items()}

    @property
    def module(self) -> nn.Module:
        """Has the parameters under their names."""
        module = nn.Module()
        for name, parameter in self.model.parameters.items():
            module.register_parameter(name, parameter)
        return module

    def part(self, name: str, whole: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of a tensor of the shape of a parameter, or of its rows."""
        positions = self.model.positions[name]
        columns = self.model.parameters[name].shape[-1:]
        if whole.shape[-1:] != columns:
            positions = positions[..., :1] // columns[0]
        return whole.flatten()[positions]

    def assert_values(self, expected: Training) -> None:
        for name, value in self.values.items():
            assert torch.equal(value, self.part(name, expected.values[name])), name

    def assert_state(self, actual: StateDict, expected: StateDict, *, whole: bool = False) -> None:
        """Each rank has its part, bit for bit, as a DTensor where the parameter is one."""
        assert actual["state"].keys() == expected["state"].keys()
        for (name, parameter), key in zip(
            self.model.parameters.items(), actual["state"], strict=True
        ):
            states = actual["state"][key]
            assert list(states) == list(expected["state"][key]), name
            for state, tensor in states.items():
                found = expected["state"][key][state]
                assert tensor.shape == found.shape, (name, state)
                assert tensor.dtype == found.dtype, (name, state)
                if state == "step" or whole:
                    assert not isinstance(tensor, DTensor)
                    assert torch.equal(tensor, found), (name, state)
                    continue
                assert isinstance(tensor, DTensor) == isinstance(parameter, DTensor), name
                is_of_rows = found.shape != parameter.shape
                if isinstance(tensor, DTensor):
                    last = Shard(parameter.ndim - 1)
                    expected_placements = [
                        Replicate() if is_of_rows and placement == last else placement
                        for placement in parameter.placements
                    ]
                    assert list(tensor.placements) == expected_placements, (name, state)
                    assert tensor.device_mesh == parameter.device_mesh
                    assert tensor.stride() == found.stride()
                part = local(tensor)
                assert is_of_rows or part.shape == local(parameter).shape
                expected_part = self.part(name, found)  # Of other shape where it is empty.
                assert torch.equal(part.flatten(), expected_part.flatten()), (name, state)


def whole_case(case: Case) -> Case:
    return Case(layout="plain", shapes=case.shapes, uniform=case.uniform)


def round_trip(case: Case, directory: Path) -> None:
    """Save, load elsewhere what was saved or what one process saved, and go on."""
    reference = Training(whole_case(case), None)
    with (
        tierstore.TierStore(directory / "saved", **STREAMED) as store,
        tierstore.TierStore(directory / "loaded", **STREAMED) as other_store,
        tierstore.TierStore(None, timeout=30.0) as store_in_memory,
    ):
        ours = Training(case, store)
        ours.assert_state(ours.optimizer.state_dict(), reference.optimizer.state_dict())
        ours.step(1, 2, 3)
        reference.step(1, 2, 3)
        values = ours.values
        saved, expected = ours.optimizer.state_dict(), reference.optimizer.state_dict()
        ours.assert_state(saved, expected)
        loaded = Training(case, other_store, values)
        loaded.optimizer.load_state_dict(saved)
        loaded.assert_state(loaded.optimizer.state_dict(), expected)
        in_memory = Training(case, store_in_memory, values)
        in_memory.step(9)  # Replaced in full by what is loaded.
        for name, parameter in in_memory.model.parameters.items():
            local(parameter).copy_(values[name])
        in_memory.optimizer.load_state_dict(expected)
        in_memory.assert_state(in_memory.optimizer.state_dict(), expected)
        before = ours.values
        for training in (reference, ours, loaded, in_memory):
            training.step(4, 5, 6)
        expected = reference.optimizer.state_dict()
        for training in (ours, loaded, in_memory):
            training.assert_values(reference)
            training.assert_state(training.optimizer.state_dict(), expected)
        assert any(not torch.equal(before[name], value) for name, value in ours.values.items())
        # Steps since do not show in what was saved, though it maps the page files.
        again = Training(whole_case(case), None)
        again.step(1, 2, 3)
        ours.assert_state(saved, again.optimizer.state_dict())
        reread = store.pages.read_states(["embedding", "bias", "nothing"])
        assert list(reread) == ["embedding", "bias", "nothing"]


def save_by_stock(case: Case, directory: Path) -> dict[str, torch.Tensor]:
    """Save the states of three steps by dcp.save(); return the whole ones by name."""
    reference = Training(whole_case(case), None)
    reference.step(1, 2, 3)
    with tierstore.TierStore(None, timeout=30.0) as store:
        ours = Training(case, store)
        ours.step(1, 2, 3)
        saved = ours.optimizer.state_dict()
        dcp.save(_flat(saved), checkpoint_id=directory)
        # torch.save() writes this rank's part, and the same part can be loaded.
        path = directory / f"rank-{dist.get_rank()}.pt"
        torch.save(saved, path)
        ours.optimizer.load_state_dict(torch.load(path, weights_only=False))
        ours.assert_state(ours.optimizer.state_dict(), reference.optimizer.state_dict())
    return _flat(reference.optimizer.state_dict())


def load_states_of_other_rows() -> tuple[str, torch.Tensor]:
    """Return what loading raises on this rank of two, and the momentum then."""
    mesh = cpu_mesh(2)
    parameter = nn.Parameter(distribute_tensor(torch.ones(8, 3), mesh, [Shard(0)]))
    with tierstore.TierStore(None, timeout=30.0) as store:
        optimizer = muon.Muon([("matrix", parameter)], store=store)
        saved = optimizer.state_dict()
        [states] = saved["state"].values()
        rows = torch.ones(5 - 2 * dist.get_rank(), 3)
        states["momentum_buffer"] = DTensor.from_local(
            rows, mesh, [Shard(0)], run_check=False, shape=(8, 3), stride=(3, 1)
        )
        text = attempt(lambda: optimizer.load_state_dict(saved))
        [states] = optimizer.state_dict()["state"].values()
        return text, local(states["momentum_buffer"])


def _flat(state_dict: StateDict) -> dict[str, torch.Tensor]:
    return {
        f"{key}.{state}": tensor
        for key, states in state_dict["state"].items()
        for state, tensor in states.items()
    }


def helpers(case: Case, directory: Path) -> None:
    """torch's own functions for state dicts, with every combination of their options."""
    reference = Training(whole_case(case), None)
    reference.step(1, 2)
    with tierstore.TierStore(directory, **STREAMED) as store:
        ours = Training(case, store)
        ours.step(1, 2)
        for full, flatten, offload in itertools.product([False, True], repeat=3):
            options = StateDictOptions(
                full_state_dict=full,
                flatten_optimizer_state_dict=flatten,
                cpu_offload=offload,
            )
            saved = get_optimizer_state_dict(ours.module, ours.optimizer, options=options)
            expected = get_optimizer_state_dict(
                reference.module,
                reference.optimizer,
                options=StateDictOptions(flatten_optimizer_state_dict=flatten),
            )
            on_rank_0 = full and offload
            if on_rank_0 and dist.get_rank():
                assert not saved
            elif flatten:
                assert saved.keys() == expected.keys()
            else:
                ours.assert_state(saved, expected, whole=full)
            if full and flatten:  # Which torch cannot load, of its own optimizers either.
                continue
            options.broadcast_from_rank0 = on_rank_0
            with tierstore.TierStore(None, timeout=30.0) as other_store:
                other = Training(case, other_store, ours.values)
                set_optimizer_state_dict(other.module, other.optimizer, saved, options=options)
                assert (ours.store.step, other.store.step) == (2, 0)
                other.assert_state(other.optimizer.state_dict(), reference.optimizer.state_dict())


def stock_adamw(case: Case) -> None:
    """From torch.optim.AdamW over the same parameters, and back, from step to step."""
    shapes = {name: found for name, found in SHAPES.items() if found[1] == 1}
    case = Case(layout=case.layout, shapes=shapes, uniform=True, options=case.options)
    theirs = Model(case)
    (group,) = make_groups(theirs.parameters, shapes)
    stock = reference_of(group)
    with tierstore.TierStore(None, timeout=30.0) as store:
        ours = Training(case, store)

        def step(number: int) -> None:
            gradients = whole_gradients(shapes, number, uniform=True)
            theirs.set_gradients(gradients)
            stock.step()
            ours.step(number)
            for name, value in ours.values.items():
                assert torch.equal(value, local(theirs.parameters[name])), name

        step(3)
        stock.load_state_dict(ours.optimizer.state_dict())
        step(6)
        ours.optimizer.load_state_dict(stock.state_dict())
        step(9)
        mine = ours.optimizer.state_dict()["state"]
        for key, states in stock.state_dict()["state"].items():
            for state, tensor in states.items():
                assert type(mine[key][state]) is type(tensor)
                assert torch.equal(local(mine[key][state]), local(tensor)), state


def stock_muon(case: Case) -> None:
    """From torch.optim.Muon over the same parameters, and back.

    What it makes of a matrix that is cut is rounded otherwise, but not its momentum.
    """
    # What torch's can step when it is cut: no rank may be without rows, say.
    shapes = {name: SHAPES[name] for name in ("wide", "square", "again")}
    case = Case(layout=case.layout, shapes=shapes, uniform=True, options=case.options)
    theirs = Model(case)
    (group,) = make_groups(theirs.parameters, shapes)
    stock = reference_of(group)
    with tierstore.TierStore(None, timeout=30.0) as store:
        ours = Training(case, store)
        cut = any(isinstance(p, DTensor) for p in theirs.parameters.values())

        def step(number: int) -> None:
            theirs.set_gradients(whole_gradients(shapes, number, uniform=True))
            stock.step()
            ours.step(number)
            states = ours.optimizer.state_dict()["state"]
            for key, states_of in stock.state_dict()["state"].items():
                mine = states[key]["momentum_buffer"]
                assert type(mine) is type(states_of["momentum_buffer"])
                assert torch.equal(local(mine), local(states_of["momentum_buffer"]))
            for name, value in ours.values.items():
                expected = local(theirs.parameters[name])
                if cut:
                    torch.testing.assert_close(value, expected, atol=2e-3, rtol=0)
                else:
                    assert torch.equal(value, expected), name

        step(3)
        stock.load_state_dict(ours.optimizer.state_dict())
        step(6)
        ours.optimizer.load_state_dict(stock.state_dict())
        step(9)


def refused(case: Case) -> dict[str, str]:
    """Return the errors of calls that differ on one rank; all ranks continue."""
    rank = dist.get_rank()
    messages = {}
    with tierstore.TierStore(None, timeout=30.0) as store:
        ours = Training(case, store)
        ours.step(1)
        saved = ours.optimizer.state_dict()
        (name, parameter), (other, _), *_ = ours.model.parameters.items()
        listed = {key: list(states) for key, states in ours.optimizer.state.items()}
        assert next(iter(listed.values())) == ["momentum_buffer"]
        messages["alone"] = attempt(lambda: ours.optimizer.state[parameter]["momentum_buffer"])
        messages["names"] = attempt(lambda: store.pages.read_states([name if rank else other]))
        messages["calls"] = attempt(
            lambda: ours.step(2) if rank else ours.optimizer.load_state_dict(saved)
        )

        def spoiled(change: Callable[[StateDict], None]) -> StateDict:
            state = {key: dict(states) for key, states in saved["state"].items()}
            if rank == 1:
                change(state)
            return {**saved, "state": state}

        def wrong_shape(state: StateDict) -> None:
            state[0]["momentum_buffer"] = torch.zeros(3, 3)

        def missing(state: StateDict) -> None:
            del state[0]

        for change in (wrong_shape, missing):
            state_dict = spoiled(change)
            messages[change.__name__] = attempt(
                lambda state_dict=state_dict: ours.optimizer.load_state_dict(state_dict)
            )
        if isinstance(parameter, DTensor):
            momentum = saved["state"][0]["momentum_buffer"]
            elsewhere = momentum.redistribute(placements=[_other(momentum.placements[0])])
            state = {**saved["state"], 0: {"momentum_buffer": elsewhere}}
            messages["placement"] = attempt(
                lambda: ours.optimizer.load_state_dict({**saved, "state": state})
            )
        assert_same(
            [local(s["momentum_buffer"]) for s in _muon_states(ours.optimizer.state_dict())],
            [local(s["momentum_buffer"]) for s in _muon_states(saved)],
        )
        ours.step(2)
    return messages


def _muon_states(state_dict: StateDict) -> list[StateDict]:
    return [states for states in state_dict["state"].values() if "momentum_buffer" in states]


def _other(placement: Any) -> Any:
    from torch.distributed.tensor import Replicate, Shard

    return Shard(0) if placement.is_replicate() else Replicate()
