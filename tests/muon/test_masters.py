"""Masters that are kept as remainders beside the parameters."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

import muon
import tierstore
from tests.support.adamw import AdamW
from tests.support.encoded_training import (
    ADAMW,
    SHAPES,
    bytes_of_second_step,
    gradient,
    groups_of,
    parameters_of,
    step_in_place,
    train,
)
from tierstore.tools.convert.convert import convert

STEPS = 200


def rounded(master: torch.Tensor) -> torch.Tensor:
    """Round float32 to bfloat16, halves away from zero, by the distance to the numbers around."""
    down = torch.where(master >= 0, 1, -1) * (
        (master.abs().view(torch.int32) >> 16 << 16).view(torch.float32)
    )
    up = torch.where(master >= 0, 1, -1) * (
        ((master.abs().view(torch.int32) >> 16) + 1 << 16).view(torch.float32)
    )
    nearer_up = (up.double() - master).abs() <= (down.double() - master).abs()
    return torch.where(nearer_up, up, down).bfloat16()


@pytest.mark.long
def test_the_master_equals_the_references_bit_for_bit(tmp_path: Path) -> None:
    """200 steps beside torch.optim on float32 masters, rounded in the same way."""
    masters = parameters_of(torch.float32)
    optimizers = [
        torch.optim.Muon([masters[name] for name in SHAPES if name not in ADAMW], lr=0.02),
        AdamW([masters[name] for name in ADAMW], lr=1e-3),
    ]
    parameters = parameters_of()
    with tierstore.TierStore(tmp_path / "run") as store:
        optimizer = muon.Muon(
            groups_of(parameters), store=store, momentum_dtype=torch.float32, master="remainder"
        )
        for step in range(STEPS):
            for name, master in masters.items():
                master.grad = gradient(name, step, rounded(master.detach())).float()
            for other in optimizers:
                other.step()
            train(parameters, optimizer, range(step, step + 1))
            for name, master in masters.items():
                assert torch.equal(parameters[name], rounded(master.detach())), (name, step)
        states = store.pages.read_states()
    for name, master in masters.items():
        assert torch.equal(states[name]["master"], master.detach())


@pytest.mark.parametrize("master", ["remainder", "24bit"])
def test_a_step_moves_the_ideal_bytes(tmp_path: Path, master: str) -> None:
    """Read: remainder and momentum, 2 bytes each; written: the parameter as well."""
    parameter = torch.nn.Parameter(torch.zeros(2048, 2048, dtype=torch.bfloat16))
    with tierstore.TierStore(tmp_path / "run", host_memory="64MiB", buffers=2) as store:
        optimizer = muon.Muon([("w", parameter)], store=store, master=master, ns_steps=0)
        read, written = bytes_of_second_step(optimizer, parameter)
    remainder = 2 if master == "remainder" else 1
    numel = parameter.numel()
    assert read == pytest.approx((remainder + 2) * numel, rel=0.001)
    assert written == pytest.approx((remainder + 4) * numel, rel=0.001)


def test_a_parameter_that_was_written_to_is_the_master(tmp_path: Path) -> None:
    parameters = parameters_of()
    with tierstore.TierStore(tmp_path / "run") as store:
        optimizer = muon.Muon(groups_of(parameters), store=store, master="remainder")
        train(parameters, optimizer, range(3))
        before = store.pages.read_states()
        with torch.no_grad():
            parameters["wide"].mul_(2)
        changed = parameters["wide"].detach().clone()
        for parameter in parameters.values():
            parameter.grad = torch.zeros_like(parameter)
        for group in optimizer.param_groups:
            group.update(lr=0.0)
        with pytest.warns(UserWarning, match=r"parameter 'wide' was changed outside"):
            optimizer.step()
        after = store.pages.read_states()
    assert torch.equal(after["wide"]["master"], changed.float())
    assert torch.equal(parameters["wide"], changed)
    assert torch.equal(after["tall"]["master"], before["tall"]["master"])


def test_an_unnoticed_change_errs_by_half_a_unit(tmp_path: Path) -> None:
    """Through .data, which torch does not count: the remainder stays, half a unit at most."""
    parameters = parameters_of()
    with tierstore.TierStore(tmp_path / "run") as store:
        optimizer = muon.Muon(groups_of(parameters), store=store, master="remainder")
        train(parameters, optimizer, range(3))
        parameters["wide"].data.mul_(2)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            master = store.pages.read_states()["wide"]["master"]
    value = parameters["wide"].detach().float()
    unit = 2.0 ** (value.abs().log2().floor() - 7)
    assert ((master - value).abs() <= unit / 2).all()


def test_dcp_loads_parameters_and_convert_gives_masters(tmp_path: Path) -> None:
    parameters = parameters_of()
    with tierstore.TierStore(tmp_path / "run") as store:
        optimizer = muon.Muon(groups_of(parameters), store=store, master="remainder")
        train(parameters, optimizer, range(3))
        store.checkpoint(tmp_path / "checkpoint")
        states = store.pages.read_states()
    for name, parameter in parameters.items():
        loaded = {f"model.{name}": torch.zeros(SHAPES[name], dtype=torch.bfloat16)}
        dcp.load(loaded, checkpoint_id=tmp_path / "checkpoint")
        assert torch.equal(loaded[f"model.{name}"], parameter.detach())
    convert([tmp_path / "checkpoint"], tmp_path / "full", to="dcp")
    for name in parameters:
        whole = {f"model.{name}": torch.zeros(SHAPES[name])}
        dcp.load(whole, checkpoint_id=tmp_path / "full")
        assert torch.equal(whole[f"model.{name}"], states[name]["master"])


@pytest.mark.parametrize("before", [None, "remainder", "24bit"])
@pytest.mark.parametrize("after", [None, "remainder", "24bit"])
def test_a_checkpoint_begins_a_run_with_other_masters(
    tmp_path: Path, before: str | None, after: str | None
) -> None:
    parameters = parameters_of()
    with tierstore.TierStore(tmp_path / "run") as store:
        optimizer = muon.Muon(groups_of(parameters), store=store, master=before)
        train(parameters, optimizer, range(3))
        store.checkpoint(tmp_path / "checkpoint")
        expected = store.pages.read_states()
    loaded = parameters_of()
    with tierstore.TierStore(tmp_path / "other") as store:
        optimizer = muon.Muon(groups_of(loaded), store=store, master=after)
        assert optimizer.restore(checkpoint=tmp_path / "checkpoint") == 3
        states = store.pages.read_states()
    for name, parameter in loaded.items():
        master = expected[name]["master"]
        if after == "24bit":
            torch.testing.assert_close(states[name]["master"], master, rtol=2**-16, atol=0)
        else:
            assert torch.equal(states[name]["master"], master)
        if after == before:
            assert torch.equal(parameter, parameters[name])
        assert torch.equal(states[name].popitem()[1], expected[name].popitem()[1])


def test_a_state_dict_carries_the_masters(tmp_path: Path) -> None:
    parameters = parameters_of()
    optimizer = muon.Muon(groups_of(parameters), master="remainder")
    train(parameters, optimizer, range(3))
    saved = optimizer.state_dict()
    others = {name: torch.nn.Parameter(p.detach().clone()) for name, p in parameters.items()}
    loaded = muon.Muon(groups_of(others), master="remainder")
    loaded.load_state_dict(saved)
    train(parameters, optimizer, range(3, 5))
    train(others, loaded, range(3, 5))
    for name, parameter in parameters.items():
        assert torch.equal(others[name], parameter)


def test_hooks_see_float32() -> None:
    class Halve(muon.UpdateHook):
        def after(self, update: muon.WeightUpdate) -> None:
            for weights in update.weights:
                assert weights.dtype == torch.float32
                weights.mul_(0.5)

    results = []
    for options in ({"master": "remainder"}, {}):
        parameters = parameters_of(torch.bfloat16)
        optimizer = muon.Muon(groups_of(parameters), hooks=[Halve()], **options)
        train(parameters, optimizer, range(1))
        states = optimizer.store.pages.read_states()
        results.append({name: of_one["master"] for name, of_one in states.items()})
    split, plain = results
    assert all(torch.equal(split[name], plain[name]) for name in SHAPES)


def test_float32_parameters_are_their_own_masters() -> None:
    parameters = parameters_of(torch.float32)
    optimizer = muon.Muon(groups_of(parameters), master="remainder")
    train(parameters, optimizer, range(2))
    assert "master" not in optimizer.store.pages.read_states()["tall"]


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match=r"master must be one of .* got 'float32'"):
        muon.Muon(groups_of(parameters_of()), master="float32")
    half = {"w": torch.nn.Parameter(torch.zeros(4, 4, dtype=torch.float16))}
    with pytest.raises(ValueError, match=r"'w' has dtype float16: a 'remainder' master needs"):
        muon.Muon(list(half.items()), master="remainder")
    parameters = parameters_of()
    optimizer = muon.Muon(groups_of(parameters), master="remainder")
    train(parameters, optimizer, range(1))
    optimizer.param_groups[0]["master"] = None
    with pytest.raises(
        ValueError, match=r"has master=None, but had another value when the group was added"
    ):
        optimizer.step()


def test_a_run_keeps_its_masters(tmp_path: Path) -> None:
    parameters = parameters_of()
    with tierstore.TierStore(tmp_path / "run") as store:
        optimizer = muon.Muon(groups_of(parameters), store=store, master="remainder")
        train(parameters, optimizer, range(1))
    with (
        tierstore.TierStore(tmp_path / "run", resume=True) as store,
        pytest.raises(tierstore.RunMismatchError, match=r"encoded as 'remainder'"),
    ):
        muon.Muon(groups_of(parameters_of()), store=store).restore()


@pytest.mark.parametrize("master", ["remainder", "24bit"])
def test_parameters_that_are_set_to_zero_unnoticed_are_zero(master: str) -> None:
    """As padding or pruning do through .data: no remainder makes a number of a zero."""
    parameters = parameters_of()
    optimizer = muon.Muon(groups_of(parameters), master=master)
    train(parameters, optimizer, range(3))
    parameters["embedding"].data[::2] = 0
    parameters["wide"].data[0, 0] = float("inf")
    states = optimizer.store.pages.read_states()
    half_a_unit = 2.0**-134  # Of the smallest number above 0 in bfloat16.
    assert (states["embedding"]["master"][::2].abs() <= half_a_unit).all()
    assert states["wide"]["master"].isnan().sum() == 0


@pytest.mark.long
def test_a_write_of_the_same_values_keeps_the_remainders(tmp_path: Path) -> None:
    parameters = parameters_of()
    with tierstore.TierStore(tmp_path / "run", page_bytes=4096, host_memory="1MiB") as store:
        optimizer = muon.Muon(groups_of(parameters), store=store, master="remainder")
        train(parameters, optimizer, range(3))
        before = store.pages.read_states()
        with torch.no_grad():
            for parameter in parameters.values():
                parameter.copy_(parameter.clone())
            parameters["wide"][3, 5] += 1
        with pytest.warns(UserWarning, match=r"parameter 'wide' was changed outside"):
            step_in_place(parameters, optimizer)
        after = store.pages.read_states()
    expected = {name: states["master"].clone() for name, states in before.items()}
    expected["wide"][3, 5] = parameters["wide"].detach()[3, 5].float()
    for name, master in expected.items():
        assert torch.equal(after[name]["master"], master), name


@pytest.mark.parametrize("tier", ["nvme", "host"])
def test_states_that_are_read_or_written_know_a_change(tmp_path: Path, tier: str) -> None:
    parameters = parameters_of()
    with tierstore.TierStore(tmp_path / "run") as store:
        optimizer = muon.Muon(groups_of(parameters), store=store, master="remainder")
        train(parameters, optimizer, range(3))
        store.move(tier)
        with torch.no_grad():
            parameters["wide"].mul_(2)
        changed = parameters["wide"].detach().clone()
        assert torch.equal(store.pages.read_states()["wide"]["master"], changed.float())
        # Of another parameter in the same page.
        states = {
            name: tensor.clone() for name, tensor in optimizer.state[parameters["tall"]].items()
        }
        states["momentum_buffer"].zero_()
        optimizer.state[parameters["tall"]] = states
        found = store.pages.read_states()
    assert torch.equal(found["wide"]["master"], changed.float())
    assert torch.equal(found["tall"]["master"], states["master"])


def test_reading_states_does_not_change_what_is_committed(tmp_path: Path) -> None:
    """Of pages in memory, whose parameters a program has changed since the step."""
    found = []
    for reads in (False, True):
        parameters = parameters_of()
        with tierstore.TierStore(tmp_path / str(reads), commit_every=10) as store:
            optimizer = muon.Muon(groups_of(parameters), store=store, master="remainder")
            train(parameters, optimizer, range(3))
            with torch.no_grad():
                parameters["wide"].mul_(2)
            if reads:
                store.pages.read_states()
            store.synchronize()
            store.restore()
            found.append({n: states["master"] for n, states in store.pages.read_states().items()})
    for name, master in found[0].items():
        assert torch.equal(found[1][name], master), name


@pytest.mark.parametrize("directory", [True, False])
def test_states_are_read_before_the_first_step_within_a_backward(
    tmp_path: Path, directory: bool
) -> None:
    parameter = torch.nn.Parameter(torch.ones(4, 6, dtype=torch.bfloat16))
    with tierstore.TierStore(tmp_path / "run" if directory else None) as store:
        optimizer = muon.Muon([("w", parameter)], store=store, master="remainder")
        loss = (torch.ones(3, 4, dtype=torch.bfloat16) @ parameter).square().sum()
        assert torch.equal(optimizer.state[parameter]["master"], parameter.detach().float())
        loss.backward()
        optimizer.step()


@pytest.mark.parametrize("tier", ["nvme", "host"])
def test_reading_states_leaves_float32_masters_as_they_are(tmp_path: Path, tier: str) -> None:
    """A change of the parameter is adopted by the next step alone, with its warning."""
    parameters = parameters_of()
    with tierstore.TierStore(tmp_path / "run") as store:
        optimizer = muon.Muon(groups_of(parameters), store=store)
        train(parameters, optimizer, range(3))
        store.move(tier)
        before = {
            name: states["master"].clone() for name, states in store.pages.read_states().items()
        }
        with torch.no_grad():
            parameters["wide"].mul_(2)
        found = store.pages.read_states()
        assert all(torch.equal(found[name]["master"], before[name]) for name in SHAPES)
        with pytest.warns(UserWarning, match=r"parameter 'wide' was changed outside"):
            train(parameters, optimizer, range(3, 5))


@pytest.mark.parametrize("every", [1, 4])
@pytest.mark.parametrize("first", ["optimizer", "model"])
@pytest.mark.parametrize("master", ["remainder", "24bit"])
def test_the_optimizer_may_be_loaded_before_the_model(
    master: str, first: str, every: int, tmp_path: Path
) -> None:
    """Masters equal the state dict, and the next step is the same."""

    def made(seed: int, store: tierstore.TierStore | None) -> tuple[torch.nn.Module, muon.Muon]:
        torch.manual_seed(seed)
        model = torch.nn.Sequential(torch.nn.Linear(24, 40), torch.nn.Linear(40, 8)).bfloat16()
        groups = muon.param_groups(model, head="1")
        return model, muon.Muon(groups, store=store, master=master, ns_dtype=torch.float32)

    def train_on(model: torch.nn.Module, optimizer: muon.Muon, steps: range) -> None:
        for step in steps:
            generator = torch.Generator().manual_seed(step)
            for parameter in model.parameters():
                parameter.grad = torch.randn(parameter.shape, generator=generator).bfloat16()
            optimizer.step()

    model, optimizer = made(0, None)
    train_on(model, optimizer, range(3))
    saved = optimizer.state_dict()
    with tierstore.TierStore(tmp_path, page_bytes=4096, commit_every=every) as store:
        other, restored = made(1, store)
        train_on(other, restored, range(3, 4))
        loads = [
            lambda: restored.load_state_dict(saved),
            lambda: other.load_state_dict(model.state_dict()),
        ]
        for load in loads if first == "optimizer" else reversed(loads):
            load()
        found = restored.state_dict()["state"]
        for number, states in saved["state"].items():
            assert torch.equal(found[number]["master"], states["master"])
        train_on(model, optimizer, range(4, 6))
        train_on(other, restored, range(4, 6))
    for one, wanted in zip(other.parameters(), model.parameters(), strict=True):
        assert torch.equal(one, wanted)
