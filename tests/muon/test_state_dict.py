"""state_dict() and load_state_dict() in the format of torch.optim, in both directions."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

import muon
import tierstore
from tests.support import training
from tests.support.adamw import AdamW
from tests.support.references import Pair, assert_same, stored

StateDict = dict[str, Any]


def bf16_optimizer(
    store: tierstore.TierStore | None = None, *, momentum_dtype: torch.dtype | None = None
) -> tuple[muon.Muon, dict[str, nn.Parameter]]:
    parameters = training.make_parameters(torch.bfloat16)
    groups = training.make_groups(parameters)
    return muon.Muon(groups, store=store, momentum_dtype=momentum_dtype), parameters


@pytest.mark.parametrize("group", range(4))
def test_equals_the_state_dict_of_torch(group: int) -> None:
    pair = Pair([group])
    pair.step(*range(1, 6))
    actual, expected = pair.optimizer.state_dict(), pair.references[0].state_dict()
    assert list(actual) == list(expected)
    assert_same(actual["state"], expected["state"])
    for index, state in actual["state"].items():
        assert list(state) == list(expected["state"][index])
    (mine,), (other,) = actual["param_groups"], expected["param_groups"]
    # Implementation options of torch.optim.AdamW that muon.Muon ignores.
    choices = {"amsgrad", "foreach", "maximize", "capturable", "differentiable", "fused"}
    for key in other.keys() - choices - {"decoupled_weight_decay"}:
        assert mine[key] == other[key]


@pytest.mark.parametrize("group", range(4))
def test_before_the_first_step_has_the_initial_state(group: int) -> None:
    """torch.optim has no state then, and continues from our zeros as from no state."""
    pair = Pair([group])
    saved = pair.optimizer.state_dict()
    assert len(saved["state"]) == len(pair.ours)
    assert not any(tensor.any() for state in saved["state"].values() for tensor in state.values())
    pair.references[0].load_state_dict(saved)
    pair.step(1, 2)
    pair.assert_identical()


@pytest.mark.parametrize("group", range(4))
def test_torch_continues_from_our_state_dict(group: int) -> None:
    pair = Pair([group])
    pair.step(1, 2)
    pair.references = Pair([group]).references
    fresh = pair.references[0].param_groups[0]["params"]
    for parameter, mine in zip(fresh, pair.ours.values(), strict=True):
        parameter.data.copy_(mine)
    pair.theirs = dict(zip(pair.ours, fresh, strict=True))
    pair.references[0].load_state_dict(pair.optimizer.state_dict())
    pair.step(3, 4)
    pair.assert_identical()


def test_torch_continues_a_parameter_that_never_had_a_gradient() -> None:
    """The saved step count is zero; torch.optim.AdamW requires one."""
    mine, others = ([nn.Parameter(torch.ones(3)) for _ in range(2)] for _ in range(2))
    optimizer = muon.Muon([{"params": mine, "algorithm": "adamw"}])
    reference = AdamW(others)
    mine[0].grad, others[0].grad = torch.ones(3), torch.ones(3)
    optimizer.step()
    reference.step()
    reference.load_state_dict(optimizer.state_dict())
    for mine_or_other in (*mine, *others):
        mine_or_other.grad = torch.full((3,), 0.5)
    optimizer.step()
    reference.step()
    for parameter, other in zip(mine, others, strict=True):
        assert torch.equal(parameter, other)


@pytest.mark.parametrize("begun", [False, True])
@pytest.mark.parametrize("group", range(4))
def test_we_continue_from_the_state_dict_of_torch(group: int, begun: bool) -> None:
    pair = Pair([group])
    pair.step(1, 2)
    pair.references[0].param_groups[0]["lr"] = 0.123
    saved = deepcopy(pair.references[0].state_dict())
    optimizer = Pair([group])
    if begun:
        optimizer.step(5, 6, 7)
    optimizer.optimizer.load_state_dict(saved)
    assert_same(saved, pair.references[0].state_dict())  # Loading did not change the state dict.
    assert optimizer.optimizer.param_groups[0]["lr"] == 0.123
    for name, mine in optimizer.ours.items():
        mine.data.copy_(pair.theirs[name])
    pair.ours, pair.optimizer = optimizer.ours, optimizer.optimizer
    pair.step(3, 4)
    pair.assert_identical()


@pytest.mark.parametrize("momentum_dtype", [None, torch.float32])
def test_round_trip_of_bf16_keeps_every_dtype(momentum_dtype: torch.dtype | None) -> None:
    optimizer, parameters = bf16_optimizer(momentum_dtype=momentum_dtype)
    training.train(optimizer, parameters, range(1, 6))
    saved = optimizer.state_dict()
    dtypes = {key: value.dtype for state in saved["state"].values() for key, value in state.items()}
    assert dtypes == {
        "master": torch.float32,
        "momentum_buffer": momentum_dtype or torch.bfloat16,
        "exp_avg": torch.float32,
        "exp_avg_sq": torch.float32,
        "step": torch.float32,
    }
    other, others = bf16_optimizer(momentum_dtype=momentum_dtype)
    for name, parameter in others.items():
        parameter.data.copy_(parameters[name])
    other.load_state_dict(saved)
    assert_same(other.state_dict(), saved)
    # Further steps are equal only if the masters were loaded: the parameters are rounded.
    training.train(optimizer, parameters, range(6, 9))
    training.train(other, others, range(6, 9))
    training.assert_identical(
        training.snapshot(other, others), training.snapshot(optimizer, parameters)
    )


def test_loading_keeps_current_dtypes() -> None:
    source, source_parameters = bf16_optimizer(momentum_dtype=torch.float32)
    training.train(source, source_parameters, range(1, 3))
    optimizer, parameters = bf16_optimizer()
    for name, parameter in parameters.items():
        parameter.data.copy_(source_parameters[name])
    optimizer.load_state_dict(source.state_dict())
    momentum = optimizer.state[parameters["wide"]]["momentum_buffer"]
    expected = source.state[source_parameters["wide"]]["momentum_buffer"]
    assert torch.equal(momentum, expected.bfloat16())
    assert momentum.dtype == torch.bfloat16
    assert optimizer.param_groups[0]["momentum_dtype"] is None
    training.train(optimizer, parameters, range(3, 4))


@pytest.mark.parametrize("steps_before", [0, 3])
def test_loaded_into_a_store_on_disk_and_restarted(steps_before: int, tmp_path: Path) -> None:
    source, source_parameters = bf16_optimizer()
    training.train(source, source_parameters, range(1, 6))
    saved = source.state_dict()
    with tierstore.TierStore(tmp_path, page_bytes=10000, buffers=2) as store:
        optimizer, parameters = bf16_optimizer(store)
        training.train(optimizer, parameters, range(11, 11 + steps_before))
        for name, parameter in parameters.items():
            parameter.data.copy_(source_parameters[name])
        optimizer.load_state_dict(saved)
        assert store.step == steps_before
        assert_same(optimizer.state_dict(), saved)
        expected = training.snapshot(optimizer, parameters)
    with tierstore.TierStore(tmp_path, page_bytes=10000, buffers=2, resume=True) as store:
        optimizer, parameters = bf16_optimizer(store)
        for parameter in parameters.values():
            parameter.data.zero_()
        assert optimizer.restore() == steps_before
        training.assert_identical(training.snapshot(optimizer, parameters), expected)
        training.train(optimizer, parameters, range(6, 9))
        training.train(source, source_parameters, range(6, 9))
        training.assert_identical(
            training.snapshot(optimizer, parameters), training.snapshot(source, source_parameters)
        )


def test_torch_save_and_load(tmp_path: Path) -> None:
    optimizer, parameters = bf16_optimizer(momentum_dtype=torch.float32)
    training.train(optimizer, parameters, range(1, 4), scheduler=training.make_scheduler(optimizer))
    saved = optimizer.state_dict()
    torch.save(saved, tmp_path / "optimizer.pt")
    assert_same(torch.load(tmp_path / "optimizer.pt", weights_only=True), saved)


def test_is_a_copy() -> None:
    pair = Pair([0, 1])
    pair.step(1)
    saved = pair.optimizer.state_dict()
    before = deepcopy(saved["state"])
    pair.step(2)
    assert_same(saved["state"], before)


def test_tensor_lr_is_not_shared_with_the_loaded_state_dict() -> None:
    pair = Pair([0], lr=torch.tensor(0.5))
    saved = pair.optimizer.state_dict()
    other = Pair([0], lr=torch.tensor(0.25))
    other.optimizer.load_state_dict(saved)
    assert other.optimizer.param_groups[0]["lr"] == 0.5
    other.optimizer.param_groups[0]["lr"].fill_(0.125)
    assert saved["param_groups"][0]["lr"] == 0.5


def test_hooks() -> None:
    """Each hook is called once, in torch's order; hooks may replace the state dict."""
    pair = Pair([0])
    pair.step(1)
    optimizer = pair.optimizer
    calls: list[str] = []
    optimizer.register_state_dict_pre_hook(lambda *_: calls.append("before saving"))

    def after_saving(_: Any, state_dict: StateDict) -> StateDict:
        calls.append("after saving")
        return {**state_dict, "note": "kept"}

    def before_loading(_: Any, state_dict: StateDict) -> StateDict:
        calls.append("before loading")
        groups = [{**group, "lr": 0.75} for group in state_dict["param_groups"]]
        return {**state_dict, "param_groups": groups}

    optimizer.register_state_dict_post_hook(after_saving)
    optimizer.register_load_state_dict_pre_hook(before_loading)
    optimizer.register_load_state_dict_post_hook(lambda *_: calls.append("after loading"))
    saved = optimizer.state_dict()
    assert saved["note"] == "kept"
    optimizer.load_state_dict(saved)
    assert calls == ["before saving", "after saving", "before loading", "after loading"]
    assert optimizer.param_groups[0]["lr"] == 0.75


@pytest.mark.parametrize("flatten", [False, True])
def test_helpers_of_dcp_do_not_step(flatten: bool) -> None:
    """get_/set_optimizer_state_dict() would step an optimizer whose state is empty."""
    options = StateDictOptions(flatten_optimizer_state_dict=flatten)
    models = [nn.Linear(5, 4), nn.Linear(5, 4)]
    optimizers = [muon.Muon(muon.param_groups(model, lr=0.02)) for model in models]
    fresh = set_and_get(models[1], optimizers[1], None, options)
    if flatten:  # In the nested format torch requires a state for every parameter.
        set_and_get(models[1], optimizers[1], fresh, options)
    assert optimizers[1].store.step == 0
    for parameter in models[0].parameters():
        parameter.grad = parameter.detach().clone()
    optimizers[0].step()
    saved = set_and_get(models[0], optimizers[0], None, options)
    key = "state.weight.momentum_buffer"
    momentum = saved[key] if flatten else saved["state"]["weight"]["momentum_buffer"]
    assert torch.equal(momentum, optimizers[0].state[models[0].weight]["momentum_buffer"])
    set_and_get(models[1], optimizers[1], saved, options)
    assert (optimizers[0].store.step, optimizers[1].store.step) == (1, 0)
    assert_same(optimizers[1].state_dict(), optimizers[0].state_dict())


@pytest.mark.parametrize("flatten", [False, True])
def test_starts_from_a_checkpoint_of_dcp(flatten: bool, tmp_path: Path) -> None:
    options = StateDictOptions(flatten_optimizer_state_dict=flatten, cpu_offload=True)
    models = [nn.Linear(5, 4), nn.Linear(5, 4)]
    groups = [muon.param_groups(model, lr=0.02) for model in models]
    optimizer = muon.Muon(groups[0], ns_dtype=torch.float32, momentum_dtype=torch.float32)
    models[0](torch.ones(5)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    saved = get_optimizer_state_dict(models[0], optimizer, options=options)
    dcp.save({"model": models[0].state_dict(), "optimizer": saved}, checkpoint_id=tmp_path / "dcp")
    with tierstore.TierStore(tmp_path / "run", buffers=2) as store:
        other = muon.Muon(groups[1], store=store, momentum_dtype=torch.float32)
        other.restore(tmp_path / "dcp")
        assert_same(other.state_dict(), optimizer.state_dict())
        assert other.param_groups[0]["ns_dtype"] == torch.float32
        for model, stepped in zip(models, (optimizer, other), strict=True):
            model(torch.ones(5)).sum().backward()
            stepped.step()
    assert_same(models[1].state_dict(), models[0].state_dict())


def set_and_get(
    model: nn.Module, optimizer: muon.Muon, state_dict: StateDict | None, options: StateDictOptions
) -> StateDict:
    if state_dict is not None:
        set_optimizer_state_dict(model, optimizer, state_dict, options=options)
    return get_optimizer_state_dict(model, optimizer, options=options)


def test_state_is_truthy_and_listed_before_the_first_step() -> None:
    pair = Pair()
    optimizer = pair.optimizer
    assert optimizer.state
    assert len(optimizer.state) == len(pair.ours)
    for listed, mine in zip(optimizer.state, pair.ours.values(), strict=True):
        assert listed is mine
    assert pair.ours["wide"] in optimizer.state
    assert pair.theirs["wide"] not in optimizer.state
    with pytest.raises(KeyError):
        optimizer.state[pair.theirs["wide"]]


def test_states_before_the_first_step_are_initial() -> None:
    optimizer, parameters = bf16_optimizer()
    states = optimizer.state[parameters["embedding"]]
    assert list(states) == ["step", "master", "exp_avg", "exp_avg_sq"]
    assert list(optimizer.state[parameters["wide"]]) == ["master", "momentum_buffer"]
    assert torch.equal(states["master"], parameters["embedding"].float())
    assert states["step"] == 0
    assert not states["exp_avg"].any()
    with pytest.raises(KeyError):
        states["velocity"]


def test_listing_states_reads_no_page(tmp_path: Path) -> None:
    with tierstore.TierStore(tmp_path, buffers=2) as store:
        pair = Pair(store=store)
        pair.step(1)
        read = store.stats().bytes_read
        for parameter, states in pair.optimizer.state.items():
            assert parameter in pair.optimizer.state
            assert "velocity" not in states
            assert len(list(states)) == len(states) > 0
        assert store.stats().bytes_read == read


# ------------------------------------------------------------------------- what is refused


def group_dropped(saved: StateDict) -> None:
    del saved["param_groups"][-1]


def parameter_dropped(saved: StateDict) -> None:
    saved["param_groups"][1]["params"].pop()


def state_renamed(saved: StateDict) -> None:
    saved["state"][0]["velocity"] = saved["state"][0].pop("momentum_buffer")


def state_added(saved: StateDict) -> None:
    saved["state"][5]["max_exp_avg_sq"] = saved["state"][5]["exp_avg_sq"].clone()


def state_missing(saved: StateDict) -> None:
    del saved["state"][5]["exp_avg_sq"]


def step_missing(saved: StateDict) -> None:
    del saved["state"][5]["step"]


def shape_wrong(saved: StateDict) -> None:
    saved["state"][0]["momentum_buffer"] = saved["state"][0]["momentum_buffer"].T


def no_tensor(saved: StateDict) -> None:
    saved["state"][0]["momentum_buffer"] = 3.0


def master_of_fp32(saved: StateDict) -> None:
    saved["state"][0]["master"] = saved["state"][0]["momentum_buffer"].clone()


def state_of_nobody(saved: StateDict) -> None:
    saved["state"][99] = saved["state"][0]


def algorithm_swapped(saved: StateDict) -> None:
    saved["param_groups"][0]["algorithm"] = "adamw"


def lr_negative(saved: StateDict) -> None:
    saved["param_groups"][3]["lr"] = -1.0


def amsgrad(saved: StateDict) -> None:
    saved["param_groups"][1]["amsgrad"] = True


def no_groups(saved: StateDict) -> None:
    del saved["param_groups"]


@pytest.mark.quick(8)
@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (group_dropped, "lacks 3, such as 'cube', 'rarely', 'empty'"),
        (parameter_dropped, "param group 1 has parameters of several groups"),
        (state_renamed, "velocity.*'wide'"),
        (state_added, "max_exp_avg_sq.*'embedding'"),
        (state_missing, "'embedding'.*exp_avg_sq"),
        (step_missing, "'embedding'.*step"),
        (shape_wrong, "momentum_buffer.*'wide'"),
        (no_tensor, "momentum_buffer.*'wide'.*float"),
        (master_of_fp32, "master.*'wide'"),
        (state_of_nobody, "99"),
        (algorithm_swapped, "group 0.*'adamw'.*'muon'"),
        (lr_negative, "lr must not be negative"),
        (amsgrad, "amsgrad is not supported"),
        (no_groups, "got \\['state'\\]"),
    ],
)
def test_wrong_state_dict_changes_nothing(
    spoil: Callable[[StateDict], None], message: str, tmp_path: Path
) -> None:
    source = Pair()
    source.step(1, 2, 3)
    saved = deepcopy(source.optimizer.state_dict())
    spoil(saved)
    with tierstore.TierStore(tmp_path, buffers=2) as store:
        pair = Pair(store=store)
        pair.step(4, 5)
        before = stored(pair.optimizer)
        with pytest.raises(ValueError, match=message):
            pair.optimizer.load_state_dict(saved)
        assert_same(stored(pair.optimizer), before)
        pair.step(6)
        pair.assert_identical()


def named_layers(order: str) -> nn.ModuleDict:
    torch.manual_seed(0)
    return nn.ModuleDict({name: nn.Linear(8, 8, bias=False) for name in order})


def named_groups(model: nn.Module, algorithm: str, *counts: int) -> list[dict[str, Any]]:
    named, groups = list(model.named_parameters()), []
    for count in counts:
        groups.append({"params": named[:count], "algorithm": algorithm})
        named = named[count:]
    return groups


def stepped(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    for number, group in enumerate(optimizer.param_groups):
        for index, parameter in enumerate(group["params"]):
            parameter.grad = torch.full_like(parameter, 1.0 + number + 10 * index)
    optimizer.step()
    return optimizer


@pytest.mark.parametrize("algorithm", ["muon", "adamw"])
@pytest.mark.parametrize("wrapped", [False, True])
def test_names_are_matched_and_not_positions(algorithm: str, wrapped: bool) -> None:
    one, other = named_layers("abc"), named_layers("cab")
    saved = stepped(muon.Muon(named_groups(one, algorithm, 2, 1))).state_dict()
    if wrapped:
        for group in saved["param_groups"]:
            group["param_names"] = [f"module._orig_mod.{name}" for name in group["param_names"]]
    optimizer = muon.Muon(named_groups(other, algorithm, 1, 2), lr=0.5)
    saved["param_groups"][1]["lr"] = 0.25
    optimizer.load_state_dict(saved)
    key = "momentum_buffer" if algorithm == "muon" else "exp_avg"
    for name, index in (("a", 0), ("b", 1), ("c", 2)):
        found = optimizer.state[other[name].weight][key]
        assert torch.equal(found, saved["state"][index][key]), name
    assert [group["lr"] for group in optimizer.param_groups] == [0.25, 1e-3]


@pytest.mark.parametrize(
    ("order", "counts", "match"),
    [
        ("abd", (2, 1), "lacks 1, such as 'd.weight' and has further 1, such as 'c.weight'"),
        ("abc", (1, 2), "param group 0 has parameters of several groups of the state dict"),
    ],
)
def test_other_names_are_refused(order: str, counts: tuple[int, ...], match: str) -> None:
    saved = stepped(muon.Muon(named_groups(named_layers("abc"), "adamw", 2, 1))).state_dict()
    optimizer = muon.Muon(named_groups(named_layers(order), "adamw", *counts))
    with pytest.raises(ValueError, match=match):
        optimizer.load_state_dict(saved)


@pytest.mark.parametrize("step", [7, torch.tensor(7.0)])
def test_a_step_count_of_the_group(step: Any) -> None:
    """As Apex's and TransformerEngine's FusedAdam have it."""
    saved = stepped(muon.Muon(named_groups(named_layers("ab"), "adamw", 2))).state_dict()
    for state in saved["state"].values():
        del state["step"]
    saved["param_groups"][0]["step"] = step
    optimizer = muon.Muon(named_groups(named_layers("ab"), "adamw", 2))
    optimizer.load_state_dict(saved)
    assert [float(state["step"]) for state in optimizer.state_dict()["state"].values()] == [7, 7]
    assert "step" not in optimizer.param_groups[0]


def test_codes_are_not_moments() -> None:
    saved = stepped(muon.Muon(named_groups(named_layers("ab"), "adamw", 2))).state_dict()
    saved["state"][1]["exp_avg"] = saved["state"][1]["exp_avg"].to(torch.int8)
    optimizer = muon.Muon(named_groups(named_layers("ab"), "adamw", 2))
    with pytest.raises(ValueError, match=r"'exp_avg' of 'b.weight' is int8.*codes"):
        optimizer.load_state_dict(saved)
