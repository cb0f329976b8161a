"""Muon with schedulers, hooks, gradient scalers and models, as used with torch.optim."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

import muon
import tierstore
from tests.support import training
from tests.support.adamw import AdamW
from tests.support.kept import commit_with, wanted
from tests.support.references import Pair, assert_same, stored
from tests.support.twins import PLACES, Twins, open_store

STEPS = range(1, 11)


def matrix(*, seed: int = 0, dtype: torch.dtype = torch.float32) -> nn.Parameter:
    return nn.Parameter(torch.randn(6, 9, generator=torch.Generator().manual_seed(seed)).to(dtype))


def test_is_an_optimizer_of_torch() -> None:
    weight = matrix()
    optimizer = muon.Muon([weight], lr=0.5)
    assert isinstance(optimizer, torch.optim.Optimizer)
    assert optimizer.defaults["lr"] == 0.5
    reference = torch.optim.Muon([matrix()])
    defaults = muon.Muon([weight]).defaults
    assert {key: defaults[key] for key in reference.defaults} == reference.defaults


# ------------------------------------------------------------------- schedulers and groups


def sequence(optimizer: torch.optim.Optimizer) -> lr_scheduler.LRScheduler:
    first = lr_scheduler.LinearLR(optimizer, start_factor=0.2, total_iters=3)
    then = lr_scheduler.CosineAnnealingLR(optimizer, T_max=7)
    return lr_scheduler.SequentialLR(optimizer, [first, then], milestones=[3])


SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], lr_scheduler.LRScheduler]] = {
    "StepLR": lambda optimizer: lr_scheduler.StepLR(optimizer, step_size=3, gamma=0.3),
    "CosineAnnealingLR": lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, T_max=9),
    "LambdaLR": training.make_scheduler,
    "SequentialLR": sequence,
}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_schedulers(name: str) -> None:
    pair = Pair()
    schedulers = [SCHEDULERS[name](optimizer) for optimizer in pair.optimizers]
    rates = set()
    for step in STEPS:
        pair.step(step)
        for scheduler in schedulers:
            scheduler.step()
        assert all(mine["lr"] == other["lr"] for mine, other in pair.groups)
        rates.add(pair.groups[0][0]["lr"])
    assert len(rates) > 2
    pair.assert_identical()


def test_edits_of_param_groups_take_effect() -> None:
    pair = Pair()
    edits: list[dict[str, Any]] = [
        {"lr": 0.1},
        {"weight_decay": 0.3},
        {"momentum": 0.5, "betas": (0.5, 0.7)},
        {"nesterov": False, "eps": 1e-3},
        {"ns_steps": 3, "ns_coefficients": (3.0, -4.0, 1.5)},
        {"adjust_lr_fn": "match_rms_adamw"},
    ]
    for step, edit in enumerate(edits, start=1):
        for mine, other in pair.groups:
            known = {key: value for key, value in edit.items() if key in other}
            mine.update(known)
            other.update(known)
        pair.step(step)
        pair.assert_identical()


@pytest.mark.parametrize("groups", [(0, 2), (1, 3), (3, 0, 1), (1, 2), (2,)])
def test_any_groups_in_any_order(groups: tuple[int, ...]) -> None:
    pair = Pair(groups)
    pair.step(*STEPS)
    pair.assert_identical()


@pytest.mark.parametrize("group", [0, 1])
def test_lr_may_be_a_tensor(group: int) -> None:
    pair = Pair([group], lr=torch.tensor(7.7))
    schedulers = [training.make_scheduler(optimizer) for optimizer in pair.optimizers]
    for step in STEPS:
        pair.step(step)
        for scheduler in schedulers:
            scheduler.step()
    pair.assert_identical()
    assert isinstance(pair.optimizer.param_groups[0]["lr"], torch.Tensor)


def add_group(pair: Pair, number: int) -> None:
    """Add a group whose only parameter is much larger than every page before."""
    name, lr = ("big", 0.04) if number else ("wider", 0.01)
    for parameters in (pair.ours, pair.theirs):
        generator = torch.Generator().manual_seed(number)
        parameters[name] = nn.Parameter(torch.randn(120, 170 + number, generator=generator))
    pair.optimizer.add_param_group({"params": [(name, pair.ours[name])], "lr": lr})
    pair.references.append(torch.optim.Muon([(name, pair.theirs[name])], lr=lr))


def test_add_param_group_after_steps() -> None:
    pair = Pair()
    pair.step(1, 2)
    add_group(pair, 0)
    pair.step(3, 4)
    add_group(pair, 1)
    pair.step(5, 6)
    pair.assert_identical()


def test_added_group_is_paged_committed_and_restored(tmp_path: Path) -> None:
    with tierstore.TierStore(tmp_path, page_bytes=16384, buffers=2) as store:
        pair = Pair(store=store)
        pair.step(1, 2)
        pages, buffer_bytes = store.stats().pages, store.stats().host_bytes_peak
        add_group(pair, 0)
        store.commit()
        pair.step(3, 4)
        assert store.stats().pages == pages + 1
        assert store.stats().host_bytes_peak > buffer_bytes
        pair.assert_identical()
    with tierstore.TierStore(tmp_path, buffers=2, resume=True) as store:
        again = Pair(store=store)
        add_group(again, 0)
        assert again.optimizer.restore() == 4
        again.theirs, again.references = pair.theirs, pair.references
        again.assert_identical()
        again.step(5, 6)
        again.assert_identical()


# ------------------------------------------------------------------- the calls of a step


def test_step_hooks() -> None:
    weight = matrix()
    optimizer = muon.Muon([weight])
    calls: list[tuple[str, bool]] = []
    start = weight.detach().clone()

    def note(when: str) -> Callable[..., None]:
        return lambda *arguments: calls.append((when, torch.equal(weight, start)))

    optimizer.register_step_pre_hook(note("before"))
    optimizer.register_step_post_hook(note("after"))
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    assert calls == [("before", True), ("after", False)]


def test_zero_grad_to_none_steps_nothing() -> None:
    pair = Pair()
    pair.step(1)
    for optimizer in pair.optimizers:
        optimizer.zero_grad()
    assert all(p.grad is None for p in pair.ours.values())
    pair.step_with_own_gradients()
    pair.assert_identical()


def test_zero_grad_to_zero_steps_with_zeros() -> None:
    pair = Pair()
    pair.step(1)
    for optimizer in pair.optimizers:
        optimizer.zero_grad(set_to_none=False)
    assert not any(p.grad.any() for p in pair.ours.values() if p.grad is not None)
    before = pair.ours["wide"].detach().clone()
    pair.step_with_own_gradients()
    pair.assert_identical()
    assert not torch.equal(pair.ours["wide"], before)


def test_closure() -> None:
    """step() calls the closure once, with gradients enabled, and returns its loss."""
    mine, other = matrix(), matrix()
    optimizer, reference = muon.Muon([mine]), torch.optim.Muon([other])
    losses = []

    def make_closure(optimizer: torch.optim.Optimizer, weight: nn.Parameter) -> Callable[[], Any]:
        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = weight.square().sum()
            loss.backward()  # type: ignore[no-untyped-call]
            losses.append(loss.item())
            return loss

        return closure

    for _ in range(3):
        loss = optimizer.step(make_closure(optimizer, mine))
        assert loss.item() == losses[-1]
        reference.step(make_closure(reference, other))  # type: ignore[no-untyped-call]
    assert len(losses) == 6
    assert torch.equal(mine, other)


def test_gradient_accumulation() -> None:
    pair = Pair([0, 1])
    for step in range(1, 4):
        for parameters in (pair.ours, pair.theirs):
            for factor in (step, 0.5):
                loss = sum(p.sin().mul(factor).sum() for p in parameters.values())
                loss.backward()  # type: ignore[union-attr]
        pair.step_with_own_gradients()  # Gradients accumulate.
    pair.assert_identical()


# ------------------------------------------------------------------------ gradient scalers


def scaled_step(
    scaler: torch.amp.GradScaler, optimizer: muon.Muon, weight: nn.Parameter, factor: float
) -> None:
    optimizer.zero_grad()
    scaler.scale((weight * factor).sum()).backward()  # type: ignore[no-untyped-call]
    scaler.step(optimizer)
    scaler.update()


def test_skipped_step_does_not_count(tmp_path: Path) -> None:
    weight = matrix()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
    with tierstore.TierStore(tmp_path) as store:
        optimizer = muon.Muon([("weight", weight)], store=store)
        position = {"batch": 1}
        store.register(position=position, scaler=scaler)
        scaled_step(scaler, optimizer, weight, 1.0)
        store.commit()
        before = stored(optimizer)
        scaled_step(scaler, optimizer, weight, float("inf"))
        assert scaler.get_scale() == 2.0**15
        assert_same(stored(optimizer), before)
        position["batch"] = 2
        store.commit()
    with tierstore.TierStore(tmp_path, resume=True) as store:
        optimizer = muon.Muon([("weight", matrix(seed=1))], store=store)
        position, scaler = {}, torch.amp.GradScaler("cpu")
        store.register(position=position, scaler=scaler)
        assert optimizer.restore() == 1
        assert_same(stored(optimizer), before)
        assert position == {"batch": 2}
        assert scaler.get_scale() == 2.0**15


def test_first_step_may_be_skipped(tmp_path: Path) -> None:
    weight, reference_weight = matrix(), matrix()
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    with tierstore.TierStore(tmp_path) as store:
        optimizer = muon.Muon([("weight", weight)], store=store)
        scaled_step(scaler, optimizer, weight, float("inf"))
        commit_with(store, 1)
        assert (store.step, store.committed.step) == (0, 0)
        assert torch.equal(weight, reference_weight)
        scaled_step(scaler, optimizer, weight, 3.0)
        commit_with(store, 2)
    reference_weight.grad = torch.full_like(weight, 3.0)
    torch.optim.Muon([reference_weight]).step()  # type: ignore[no-untyped-call]
    with tierstore.TierStore(tmp_path, resume=True) as store:
        restored = matrix(seed=1)
        with wanted(store) as kept:
            assert muon.Muon([("weight", restored)], store=store).restore() == 1
        assert kept == {"state": 2}
        assert torch.equal(restored, reference_weight)


def test_run_with_only_skipped_steps_starts_again(tmp_path: Path) -> None:
    """Without a step there is nothing to restore."""
    weight = matrix()
    scaler = torch.amp.GradScaler("cpu")
    with tierstore.TierStore(tmp_path) as store:
        optimizer = muon.Muon([("weight", weight)], store=store)
        scaled_step(scaler, optimizer, weight, float("inf"))
        commit_with(store, 1)
        store.synchronize()
    with tierstore.TierStore(tmp_path, resume=True) as store:
        again = matrix(seed=1)
        assert muon.Muon([("weight", again)], store=store).restore() == 0
        assert torch.equal(again, matrix(seed=1))


# ---------------------------------------------------------------------------------- models


class Model(nn.Module):
    """A small language model with tied weights."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(23, 16)
        self.norm = nn.LayerNorm(16)
        self.up = nn.Linear(16, 40)
        self.down = nn.Linear(40, 16, bias=False)
        self.head = nn.Linear(16, 23, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        logits: torch.Tensor = self.head(x + self.down(self.up(self.norm(x)).relu()))
        return logits


def train_model(model: nn.Module, optimizers: list[torch.optim.Optimizer]) -> list[float]:
    """Return the losses of ten steps of next-token prediction."""
    generator = torch.Generator().manual_seed(7)
    losses = []
    for _ in STEPS:
        tokens = torch.randint(23, (4, 9), generator=generator)
        logits = model(tokens[:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        losses.append(loss.item())
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        for optimizer in optimizers:
            optimizer.step()
    return losses


def test_model_with_tied_weights_on_disk(tmp_path: Path) -> None:
    torch.manual_seed(0)
    mine, other = Model(), Model()
    other.load_state_dict(mine.state_dict())
    hidden = [other.up.weight, other.down.weight]
    rest = [other.embedding.weight, other.norm.weight, other.norm.bias, other.up.bias]
    references = [
        torch.optim.Muon(hidden, lr=0.02),
        AdamW(rest, lr=1e-3),
    ]
    expected = train_model(other, references)
    with tierstore.TierStore(tmp_path, page_bytes=8192, buffers=2) as store:
        optimizer = muon.Muon(muon.param_groups(mine, lr=0.02, adamw_lr=1e-3), store=store)
        assert train_model(mine, [optimizer]) == expected
        assert store.step == len(STEPS)
    assert_same(dict(mine.state_dict()), dict(other.state_dict()))
    assert mine.head.weight is mine.embedding.weight


@pytest.mark.parametrize("algorithm", ["muon", "adamw"])
def test_transposed_parameters_and_gradients(algorithm: str) -> None:
    """Strides do not change results: torch.optim over contiguous copies is the oracle."""
    start = torch.randn(24, 10, generator=torch.Generator().manual_seed(0))
    mine, other = nn.Parameter(start.clone().T), nn.Parameter(start.T.contiguous())
    assert not mine.is_contiguous()
    optimizer = muon.Muon([{"params": [mine], "algorithm": algorithm}])
    reference: torch.optim.Optimizer = torch.optim.Muon([other])
    if algorithm == "adamw":
        reference = AdamW([other])
    for step in STEPS:
        grad = torch.randn(10, 24, generator=torch.Generator().manual_seed(step))
        mine.grad, other.grad = grad, grad
        if step % 2:  # Every second gradient is also transposed.
            mine.grad = grad.T.contiguous().T
        optimizer.step()
        reference.step()
    assert torch.equal(mine, other)


def test_frozen_parameters_stay() -> None:
    pair = Pair()
    for parameters in (pair.ours, pair.theirs):
        parameters["wide"].requires_grad_(False)
        parameters["embedding"].requires_grad_(False)
    for _ in range(3):
        for parameters in (pair.ours, pair.theirs):
            loss = sum(p.sin().sum() for p in parameters.values())
            loss.backward()  # type: ignore[union-attr]
        pair.step_with_own_gradients()
    pair.assert_identical()
    start = training.make_parameters()
    assert torch.equal(pair.ours["wide"], start["wide"])
    assert not torch.equal(pair.ours["tall"], start["tall"])


def test_model_may_be_converted_before_the_first_step() -> None:
    """Pages are laid out at the first step, with the dtypes that parameters have then."""
    weight, reference_weight = matrix(), matrix(dtype=torch.bfloat16)
    optimizers = [muon.Muon([weight]), muon.Muon([reference_weight])]
    weight.data = weight.data.bfloat16()
    for parameter, optimizer in zip((weight, reference_weight), optimizers, strict=True):
        parameter.grad = torch.ones_like(parameter)
        optimizer.step()
    states = [optimizer.state_dict()["state"][0] for optimizer in optimizers]
    assert_same(*states)
    assert states[0]["momentum_buffer"].dtype == torch.bfloat16
    assert states[0]["master"].dtype == torch.float32


def test_unnamed_parameters_are_restored_by_position(tmp_path: Path) -> None:
    def begin(store: tierstore.TierStore, seed: int) -> muon.Muon:
        first, second, third = (matrix(seed=seed + number) for number in range(3))
        groups: list[dict[str, Any]] = [
            {"params": [first, second]},
            {"params": [third], "algorithm": "adamw"},
        ]
        return muon.Muon(groups, store=store)

    with tierstore.TierStore(tmp_path) as store:
        optimizer = begin(store, seed=0)
        for group in optimizer.param_groups:
            for weight in group["params"]:
                weight.grad = weight.detach().clone()
        optimizer.step()
        expected = stored(optimizer)
    with tierstore.TierStore(tmp_path, resume=True) as store:
        optimizer = begin(store, seed=9)
        assert optimizer.restore() == 1
        assert_same(stored(optimizer), expected)


def test_loaded_model_is_adopted_in_fp32() -> None:
    pair = Pair()
    pair.step(1, 2)
    for name, value in training.make_parameters(seed=5).items():
        for parameters in (pair.ours, pair.theirs):
            parameters[name].data.copy_(value)
    with warnings.catch_warnings(action="error"):
        pair.step(3, 4)
    pair.assert_identical()


def test_loaded_model_is_adopted_in_bf16_with_one_warning(tmp_path: Path) -> None:
    """Masters adopt the new values: torch.optim over fp32 copies is the oracle."""
    model = nn.Linear(12, 7).bfloat16()
    copies = [nn.Parameter(p.detach().float()) for p in model.parameters()]
    references = [
        torch.optim.Muon(copies[:1]),
        AdamW(copies[1:], lr=0.01),
    ]

    def step(number: int) -> None:
        generator = torch.Generator().manual_seed(number)
        for parameter, other in zip(model.parameters(), copies, strict=True):
            parameter.grad = torch.randn(parameter.shape, generator=generator).bfloat16()
            other.grad = parameter.grad.float()
        for stepped in (optimizer, *references):
            stepped.step()
        for parameter, other in zip(model.parameters(), copies, strict=True):
            assert torch.equal(parameter, other.bfloat16())

    def load(offset: float) -> None:
        state_dict = {name: p + offset for name, p in model.state_dict().items()}
        assert all((state_dict[name] != p).all() for name, p in model.state_dict().items())
        model.load_state_dict(state_dict)
        for parameter, other in zip(model.parameters(), copies, strict=True):
            other.data.copy_(parameter)

    with tierstore.TierStore(tmp_path) as store:
        weight, bias = model.named_parameters()
        optimizer = muon.Muon(
            [
                {"params": [weight], "momentum_dtype": torch.float32},
                {"params": [bias], "algorithm": "adamw", "lr": 0.01},
            ],
            store=store,
        )
        step(1)
        load(1.0)
        with pytest.warns(UserWarning, match=r"'weight' was changed outside of the optimizer"):
            step(2)
        load(-3.0)
        with warnings.catch_warnings(action="error"):
            step(3)
            step(4)


@pytest.mark.parametrize("element", [0, 1_500_000, -1])
def test_one_changed_element_of_a_large_parameter_is_adopted(element: int) -> None:
    parameter = torch.nn.Parameter(torch.zeros(1300, 2000, dtype=torch.bfloat16))
    optimizer = muon.Muon([{"params": [parameter], "algorithm": "adamw", "weight_decay": 0.0}])
    parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    parameter.data.view(-1)[element] = 3.0
    with pytest.warns(UserWarning, match="was changed outside of the optimizer"):
        optimizer.step()
    expected = torch.zeros(1300, 2000)
    expected.view(-1)[element] = 3.0
    assert torch.equal(optimizer.state_dict()["state"][0]["master"], expected)


@pytest.mark.parametrize("algorithm", ["muon", "adamw"])
@PLACES
def test_a_first_step_in_inference_mode(place: str, algorithm: str, tmp_path: Path) -> None:
    with open_store(place, tmp_path) as store:
        twins = Twins(store=store, algorithm=algorithm)
        twins.set_gradients()
        twins.stock.step()  # Its states would be inference tensors, which no later step changes.
        with torch.inference_mode():
            twins.optimizer.step()
        twins.step()
        twins.assert_identical()
