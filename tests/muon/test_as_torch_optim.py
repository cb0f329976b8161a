"""Steps as torch.optim promises them, beside the stock optimizer and with every store."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from tests.support.stock_case import (
    StockCase,
    in_each_place,
    parameter,
    random,
    set_gradients,
    tensors,
)

# The configurations with which PyTorch tests its own optimizers, and some more.
MUON = [
    {},
    {"lr": 0.01},
    {"lr": torch.tensor(0.001)},
    {"weight_decay": 0.2},
    {"momentum": 0.8},
    {"ns_steps": 6},
    {"ns_coefficients": (3.4, -4.7, 2.0)},
    {"nesterov": False},
    {"adjust_lr_fn": "match_rms_adamw"},
    {"eps": 1e-3},
]
ADAMW = [
    {},
    {"lr": 0.01},
    {"weight_decay": 0.1},
    {"weight_decay": 0.1, "maximize": True},
    {"lr": torch.tensor(0.001)},
    {"betas": (0.5, 0.9)},
    {"eps": 1e-3},
    {"weight_decay": 0.0},
]


def described(value: Any) -> str | None:
    if isinstance(value, torch.Tensor):
        return "tensor"
    return ",".join(value) or "default" if isinstance(value, dict) else None


def two_or_more(case: StockCase) -> list[nn.Parameter]:
    """Return parameters of all shapes that the algorithm supports."""
    matrices = [parameter(1, 3, 4), parameter(2, 5, 2), parameter(3, 1, 6), parameter(4, 2, 2)]
    if case.is_muon:
        return matrices
    return [*matrices, parameter(5, 7), parameter(6), parameter(7, 2, 3, 2)]


def regression(optimizer: torch.optim.Optimizer) -> Callable[[], torch.Tensor]:
    """Return a closure: a loss with its minimum where each parameter is its own target."""
    targets = [random(50 + index, *each.shape) for index, each in enumerate(tensors(optimizer))]

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        pairs = zip(tensors(optimizer), targets, strict=True)
        loss = sum((((each - target) ** 2).sum() for each, target in pairs), torch.zeros(()))
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    return closure


@pytest.mark.parametrize(
    ("options", "place"), in_each_place([(options,) for options in MUON]), ids=described
)
def test_every_configuration_of_muon(options: dict[str, Any], muon_case: StockCase) -> None:
    twins = muon_case.twins(partial(two_or_more, muon_case), **options)
    twins.step(4)
    twins.assert_equal()


@pytest.mark.parametrize(
    ("options", "place"), in_each_place([(options,) for options in ADAMW]), ids=described
)
def test_every_configuration_of_adamw(options: dict[str, Any], adamw: StockCase) -> None:
    twins = adamw.twins(partial(two_or_more, adamw), **options)
    twins.step(4)
    twins.assert_equal()


@pytest.mark.parametrize("foreach", [True, False])
def test_foreach_changes_nothing(foreach: bool, adamw: StockCase) -> None:
    twins = adamw.twins(partial(two_or_more, adamw), foreach=foreach)
    twins.step(3)
    twins.assert_equal()
    assert twins.ours.param_groups[0]["foreach"] is foreach


def test_a_step_reduces_the_loss(case: StockCase) -> None:
    twins = case.twins(lr=0.05)
    losses = []
    for optimizer in twins.both:
        closure = regression(optimizer)
        losses.append([optimizer.step(closure).item() for _ in range(8)])  # type: ignore[arg-type]
    assert losses[0] == losses[1]
    assert losses[0] == sorted(losses[0], reverse=True)
    assert losses[0][-1] < losses[0][0]
    twins.assert_equal()


# The schedulers, one alone and several together, with which PyTorch tests its own optimizers.
Schedulers = Callable[[torch.optim.Optimizer], Iterable[Any]]
SCHEDULERS: dict[str, Schedulers] = {
    "StepLR": lambda o: [lr_scheduler.StepLR(o, 2, gamma=0.9)],
    "MultiStepLR": lambda o: [lr_scheduler.MultiStepLR(o, [1, 3], gamma=0.5)],
    "LinearLR": lambda o: [lr_scheduler.LinearLR(o, start_factor=0.4, total_iters=3)],
    "ConstantLR": lambda o: [lr_scheduler.ConstantLR(o, factor=0.4, total_iters=3)],
    "ExponentialLR": lambda o: [lr_scheduler.ExponentialLR(o, gamma=0.99)],
    "LambdaLR": lambda o: [lr_scheduler.LambdaLR(o, lambda step: 0.9**step)],
    "MultiplicativeLR": lambda o: [lr_scheduler.MultiplicativeLR(o, lambda _: 0.9)],
    "PolynomialLR": lambda o: [lr_scheduler.PolynomialLR(o, total_iters=3, power=0.9)],
    "CosineAnnealingLR": lambda o: [lr_scheduler.CosineAnnealingLR(o, 4)],
    "CosineAnnealingWarmRestarts": lambda o: [lr_scheduler.CosineAnnealingWarmRestarts(o, 2)],
    "OneCycleLR": lambda o: [lr_scheduler.OneCycleLR(o, 0.01, total_steps=8)],
    "CyclicLR": lambda o: [lr_scheduler.CyclicLR(o, 0.001, 0.01, step_size_up=2)],
    "ReduceLROnPlateau": lambda o: [lr_scheduler.ReduceLROnPlateau(o, patience=0, threshold=10)],
    "StepLR, ReduceLROnPlateau": lambda o: [
        lr_scheduler.StepLR(o, 2, gamma=0.9),
        lr_scheduler.ReduceLROnPlateau(o, patience=0, threshold=10),
    ],
    "ExponentialLR, ReduceLROnPlateau": lambda o: [
        lr_scheduler.ExponentialLR(o, gamma=0.99),
        lr_scheduler.ReduceLROnPlateau(o),
    ],
    "ChainedScheduler": lambda o: [
        lr_scheduler.ChainedScheduler(
            [lr_scheduler.ConstantLR(o, total_iters=2), lr_scheduler.ExponentialLR(o, 0.9)]
        )
    ],
    "SequentialLR": lambda o: [
        lr_scheduler.SequentialLR(
            o,
            [lr_scheduler.LinearLR(o, total_iters=2), lr_scheduler.ExponentialLR(o, 0.9)],
            milestones=[2],
        )
    ],
}


@pytest.mark.parametrize(
    ("name", "lr", "place"),
    in_each_place([*itertools.product(SCHEDULERS, [0.02, torch.tensor(0.02)])]),
    ids=described,
)
def test_schedulers(name: str, lr: float | torch.Tensor, case: StockCase) -> None:
    twins = case.twins(lr=lr)
    rates, losses = [], []
    for optimizer in twins.both:
        schedulers = [*SCHEDULERS[name](optimizer)]
        closure = regression(optimizer)
        for _ in range(4):
            loss = optimizer.step(closure).item()  # type: ignore[arg-type]
            for scheduler in schedulers:
                is_plateau = isinstance(scheduler, lr_scheduler.ReduceLROnPlateau)
                scheduler.step(*([loss] if is_plateau else []))
            losses.append(loss)
            rates.append(float(optimizer.param_groups[0]["lr"]))
    assert rates[:4] == rates[4:]
    assert losses[:4] == losses[4:]
    twins.assert_equal()


def transposed() -> list[nn.Parameter]:
    return [nn.Parameter(random(1, 4, 3).t()), nn.Parameter(random(2, 2, 5).t())]


def strided() -> list[nn.Parameter]:
    return [nn.Parameter(random(1, 3, 4, 2)[..., 0]), nn.Parameter(random(2, 5, 4)[:, ::2])]


@pytest.mark.parametrize("make", [transposed, strided])
def test_parameters_need_not_be_contiguous(
    make: Callable[[], list[nn.Parameter]], case: StockCase
) -> None:
    twins = case.twins(make)
    strides = [each.stride() for each in tensors(twins.ours)]
    twins.step(3)
    twins.assert_close()
    assert [each.stride() for each in tensors(twins.ours)] == strides
    assert not any(each.is_contiguous() for each in tensors(twins.ours))


@pytest.mark.parametrize("key", ["lr", "weight_decay"])
def test_groups_have_values_of_their_own(key: str, case: StockCase) -> None:
    def groups() -> list[dict[str, Any]]:
        return [
            {"params": [parameter(1, 3, 4)], key: 0.02},
            {"params": [parameter(2, 5, 2)]},
            {"params": parameter(3, 2, 2), key: 0.0},  # One parameter, not a list.
        ]

    twins = case.twins(groups, **{key: 0.3})
    before = [each.detach().clone() for each in tensors(twins.ours)]
    assert [group[key] for group in twins.ours.param_groups] == [0.02, 0.3, 0.0]
    twins.step(3)
    twins.assert_equal()
    moved = [not torch.equal(a, b) for a, b in zip(before, tensors(twins.ours), strict=True)]
    assert moved == [True, True, key != "lr"]


@pytest.mark.parametrize(("shape", "place"), in_each_place([((),), ((1,),), ((1, 1),)]))
def test_lr_is_a_tensor_of_one_element(shape: tuple[int, ...], case: StockCase) -> None:
    lr = torch.full(shape, 0.01)
    twins = case.twins(lr=lr)
    twins.step(2)
    for optimizer in twins.both:
        optimizer.param_groups[0]["lr"].mul_(0.5)
    twins.step(2)
    twins.assert_equal()
    assert twins.ours.param_groups[0]["lr"].shape == shape


def test_a_float64_lr_decays_parameters_without_dimensions_in_float64(adamw: StockCase) -> None:
    twins = adamw.twins(
        lambda: [parameter(seed) for seed in range(40)],
        lr=torch.tensor(0.01, dtype=torch.float64),
        weight_decay=0.1,
    )
    twins.step(5)
    twins.assert_equal()


def test_dtypes_may_be_mixed(case: StockCase) -> None:
    """float32 and float64 have the precision of torch.optim."""
    twins = case.twins(lambda: [parameter(1, 3, 4), parameter(2, 3, 4, dtype=torch.float64)])
    twins.step(3)
    twins.assert_equal()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_is_the_rounded_step_of_a_float32_master(
    dtype: torch.dtype, adamw: StockCase
) -> None:
    mine = parameter(1, 3, 4, dtype=dtype)
    theirs = nn.Parameter(mine.detach().float())
    optimizer, stock = adamw.ours([mine], lr=0.01), adamw.stock([theirs], lr=0.01)
    for step in range(3):
        mine.grad = random(step, 3, 4, dtype=dtype)
        theirs.grad = mine.grad.float()
        optimizer.step()
        stock.step()
    assert torch.equal(mine, theirs.to(dtype))


def test_the_default_dtype_changes_no_step(case: StockCase) -> None:
    twins = case.twins()
    torch.set_default_dtype(torch.float64)
    try:
        twins.step(3)
    finally:
        torch.set_default_dtype(torch.float32)
    twins.assert_equal()


@pytest.mark.filterwarnings("ignore:no parameter has a gradient")
@pytest.mark.parametrize("steps_before", [0, 2])
def test_a_step_without_gradients_changes_nothing(steps_before: int, case: StockCase) -> None:
    twins = case.twins(weight_decay=0.1)
    twins.step(steps_before)
    before = [each.detach().clone() for each in tensors(twins.ours)]
    saved = twins.ours.state_dict()["state"]
    for optimizer in twins.both:
        optimizer.zero_grad()
        optimizer.step()
    assert all(map(torch.equal, tensors(twins.ours), before))
    for index, states in twins.ours.state_dict()["state"].items():
        assert all(torch.equal(value, saved[index][name]) for name, value in states.items())
    twins.step(2)
    twins.assert_equal()


def test_a_parameter_without_gradient_stays(case: StockCase) -> None:
    twins = case.twins(weight_decay=0.1)
    for step in range(3):
        for optimizer in twins.both:
            set_gradients(optimizer, step)
            tensors(optimizer)[step % 2].grad = None
            optimizer.step()
    twins.assert_equal()


def test_a_gradient_of_zeros_changes_nothing_without_weight_decay(case: StockCase) -> None:
    optimizer = case.ours([parameter(1, 3, 4)], weight_decay=0.0)
    (mine,) = tensors(optimizer)
    before = mine.detach().clone()
    for _ in range(2):
        mine.grad = torch.zeros_like(mine)
        optimizer.step()
    assert torch.equal(mine, before)


def test_a_gradient_of_zeros_decays(case: StockCase) -> None:
    twins = case.twins(weight_decay=0.1)
    for optimizer in twins.both:
        for each in tensors(optimizer):
            each.grad = torch.zeros_like(each)
        optimizer.step()
    twins.assert_equal()


def test_a_closure_is_evaluated_once_with_gradients_enabled(case: StockCase) -> None:
    optimizer = case.ours([parameter(1, 3, 4)])
    calls = []

    def closure() -> float:
        calls.append(torch.is_grad_enabled())
        set_gradients(optimizer, 1)
        return 0.25

    with torch.no_grad():
        assert optimizer.step(closure) == 0.25
    assert calls == [True]
    set_gradients(optimizer, 2)
    assert optimizer.step() is None


@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad(set_to_none: bool, case: StockCase) -> None:
    twins = case.twins()
    twins.step()
    for optimizer in twins.both:
        optimizer.zero_grad(set_to_none=set_to_none)
    for each in tensors(twins.ours):
        assert (each.grad is None) if set_to_none else not each.grad.any()
    twins.step()
    twins.assert_equal()


def test_a_parameter_that_requires_no_gradient_stays(case: StockCase) -> None:
    twins = case.twins(lambda: [parameter(1, 3, 4), parameter(2, 3, 4).requires_grad_(False)])
    for optimizer in twins.both:
        tensors(optimizer)[0].grad = random(3, 3, 4)
        optimizer.step()
    twins.assert_equal()
    twins.ours.load_state_dict(twins.ours.state_dict())


def test_a_tensor_without_elements(case: StockCase) -> None:
    twins = case.twins(lambda: [parameter(1, 0, 4), parameter(2, 3, 4)])
    twins.step(2)
    twins.assert_equal()
    twins.ours.load_state_dict(twins.stock.state_dict())
    twins.step(2)
    twins.assert_equal()


def test_a_tensor_larger_than_a_mebibyte(case: StockCase) -> None:
    """Large matrices of Muon round differently; see docs/reference/torch-optim.md."""
    twins = case.twins(lambda: [parameter(1, 400, 700)])
    twins.step()
    twins.assert_equal()


def test_a_group_without_parameters(case: StockCase) -> None:
    twins = case.twins(lambda: [{"params": []}, {"params": [parameter(1, 3, 4)]}])
    twins.step(2)
    twins.ours.load_state_dict(twins.stock.state_dict())
    twins.step()
    twins.assert_equal()


def test_a_group_may_be_added_after_a_step(case: StockCase) -> None:
    twins = case.twins()
    twins.step(2)
    twins.ours.add_param_group(case.group([parameter(3, 3, 3)], lr=0.1))
    twins.stock.add_param_group({"params": [parameter(3, 3, 3)], "lr": 0.1})
    twins.step(2)
    twins.assert_equal()


def test_edited_values_take_effect(case: StockCase) -> None:
    twins = case.twins()
    twins.step()
    for optimizer in twins.both:
        optimizer.param_groups[0]["lr"] = 0.07
        optimizer.param_groups[0]["weight_decay"] = 0.3
    twins.step()
    twins.assert_equal()


def test_defaults_of_a_later_group_may_be_changed(muon_case: StockCase) -> None:
    twins = muon_case.twins()
    for optimizer in twins.both:
        optimizer.defaults["lr"] = 0.5
        optimizer.add_param_group({"params": [parameter(3, 3, 3)]})
        assert optimizer.param_groups[1]["lr"] == 0.5
    twins.step(2)
    twins.assert_equal()


def test_tensors_need_not_be_parameters_of_a_module(case: StockCase) -> None:
    twins = case.twins(lambda: iter([random(1, 3, 4).requires_grad_()]))
    twins.step(2)
    twins.assert_equal()
    assert all(type(each) is torch.Tensor for each in tensors(twins.ours))


def test_an_optimizer_prints_as_one_line(case: StockCase) -> None:
    """An optimizer of torch prints each key of each group in a line."""
    optimizer = case.ours([{"params": [parameter(1, 3, 4)]}, {"params": [parameter(2, 3, 4)]}])
    rule = optimizer.param_groups[0]["algorithm"]
    text = f"Muon(2 parameters in 2 groups: 2 {rule}; TierStore("
    assert repr(optimizer).startswith(text)
    set_gradients(optimizer, 1)
    optimizer.step()
    assert repr(optimizer).startswith(text)
    assert "step 1" in repr(optimizer)
    assert "\n" not in repr(optimizer)
