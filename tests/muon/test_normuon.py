"""NorMuon: rows of updates are normalized, against the formula in float64."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import muon
import tierstore
from muon.coefficients import of_steps
from tests.muon.test_coefficients import MATRICES, reference
from tierstore.tools.convert.convert import convert

STATE = "second_momentum_buffer"
LR, WD, MOMENTUM, BETA, STEPS = 0.05, 0.1, 0.9, 0.8, 5


def gradient(shape: tuple[int, ...], step: int, kind: str = "random") -> torch.Tensor:
    """A matrix of this kind at step 0, and random ones of its size after it."""
    if step == 0 and kind != "random":
        return MATRICES[kind]()
    generator = torch.Generator().manual_seed(step)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def expected_after(
    shape: tuple[int, int], steps: int = STEPS, kind: str = "random"
) -> tuple[torch.Tensor, torch.Tensor]:
    """The weights and the averages of rows, as the authors' code has them."""
    weights, momentum = torch.ones(shape, dtype=torch.float64), torch.zeros(shape)
    averages = torch.zeros(shape[0], 1, dtype=torch.float64)
    for step in range(steps):
        grad = gradient(shape, step, kind)
        momentum = MOMENTUM * momentum + (1 - MOMENTUM) * grad
        lookahead = (1 - MOMENTUM) * grad + MOMENTUM * momentum
        update = reference(lookahead, of_steps("keller_jordan", 5))
        averages = BETA * averages + (1 - BETA) * update.square().mean(1, keepdim=True)
        normalized = update / (averages.sqrt() + 1e-10)
        normalized *= update.norm() / (normalized.norm() + 1e-10)
        weights = (1 - LR * WD) * weights - LR * math.sqrt(max(1, shape[0] / shape[1])) * normalized
    return weights, averages


def train(
    shape: tuple[int, ...],
    store: tierstore.TierStore | None = None,
    last: int = STEPS,
    kind: str = "random",
    dtype: torch.dtype = torch.float64,
    **group: Any,
) -> tuple[torch.Tensor, Mapping[str, torch.Tensor]]:
    """Begin or go on; return the weights, and the states."""
    parameter = torch.nn.Parameter(torch.ones(shape, dtype=dtype))
    options = {"lr": LR, "weight_decay": WD, "momentum": MOMENTUM, "normuon_beta": BETA}
    groups = [{"params": [("w", parameter)], **options, **group}]
    optimizer = muon.Muon(groups, store=store, ns_dtype=dtype)
    first = 0 if store is None else optimizer.restore()
    for step in range(first, last):
        parameter.grad = gradient(shape, step, kind).to(dtype)
        optimizer.step()
    return parameter.detach(), optimizer.store.pages.read_states()["w"]


# Of gradients, whose rows Newton-Schulz leaves of unequal size. "one row" has no other row.
@pytest.mark.parametrize("kind", [kind for kind in MATRICES if kind != "zero"])
def test_equals_the_formula(kind: str) -> None:
    """Averages are float32, so that their roots differ by its epsilon, and weights as much.

    Directions in which a matrix has nearly no size are amplified by Newton-Schulz, 3.4445 times in
    each step: rounding of float64 stays far below.
    """
    shape = tuple(MATRICES[kind]().shape)
    weights, states = train(shape, kind=kind)
    expected, averages = expected_after(shape, kind=kind)
    torch.testing.assert_close(weights, expected, rtol=1e-6, atol=1e-6)
    assert states[STATE].shape == (shape[0], 1)
    assert states[STATE].dtype == torch.float32
    torch.testing.assert_close(states[STATE].double(), averages, rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_narrow_dtypes_are_near_the_formula(dtype: torch.dtype) -> None:
    """An update is rounded about 30 times on its way, as without NorMuon, and then scaled."""
    shape = (48, 48)
    parameter = torch.nn.Parameter(torch.ones(shape))
    group = {"params": [parameter], "normuon_beta": BETA, "momentum": MOMENTUM}
    optimizer = muon.Muon([group], lr=LR, weight_decay=WD, ns_dtype=dtype)
    for step in range(STEPS):
        parameter.grad = gradient(shape, step).float()
        optimizer.step()
    expected, _ = expected_after(shape)
    change = (expected - 1).norm()
    error = (parameter.detach().double() - expected).norm() / change
    assert error < 30 * torch.finfo(dtype).eps


def test_a_gradient_of_zeros_changes_nothing() -> None:
    weights, states = train((8, 12), kind="zero", last=1, weight_decay=0.0)
    assert torch.equal(weights, torch.ones(8, 12, dtype=torch.float64))
    assert torch.equal(states[STATE], torch.zeros(8, 1))


def test_a_row_of_zeros_stays_and_the_others_are_normalized() -> None:
    parameter = torch.nn.Parameter(torch.zeros(4, 6))
    parameter.grad = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
    parameter.grad[2] = 0
    group = {"params": [parameter], "normuon_beta": 0.0}
    muon.Muon([group], lr=1.0, weight_decay=0.0, ns_dtype=torch.float32).step()
    norms = parameter.detach().norm(dim=1)
    assert norms[2] == 0
    # With no weight of the past, all other rows have one norm.
    torch.testing.assert_close(norms[[0, 1, 3]], norms[0].expand(3))


@pytest.mark.parametrize("ns_batched", [False, True])
def test_experts_are_as_parameters_of_their_own(ns_batched: bool) -> None:
    stack, experts = torch.nn.Parameter(torch.ones(3, 8, 10)), []
    for _ in range(3):
        experts.append(torch.nn.Parameter(torch.ones(8, 10)))
    groups = (
        [{"params": [stack], "matrices": (("stack",),), "normuon_beta": BETA}],
        [{"params": experts, "normuon_beta": BETA}],
    )
    ours, others = (muon.Muon(group, lr=LR, ns_batched=ns_batched) for group in groups)
    for step in range(STEPS):
        stack.grad = gradient((3, 8, 10), step).float()
        for number, expert in enumerate(experts):
            expert.grad = stack.grad[number].clone()
        ours.step()
        others.step()
    for number, expert in enumerate(experts):
        assert torch.equal(stack[number], expert)
        assert torch.equal(ours.state[stack][STATE][number], others.state[expert][STATE])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_resumed_from_disk_as_in_memory(dtype: torch.dtype, tmp_path: Path) -> None:
    expected, states = train((40, 30), dtype=dtype)
    for last in (2, 3, STEPS):
        with tierstore.TierStore(tmp_path / "run", resume=last > 2, commit_every=1) as store:
            found, found_states = train((40, 30), store, last, dtype=dtype)
            assert torch.equal(found_states[STATE], states[STATE]) == (last == STEPS)
    assert torch.equal(found, expected)


def test_a_checkpoint_is_loaded_by_stock_dcp_and_by_a_new_run(tmp_path: Path) -> None:
    expected, states = train((40, 30))
    with tierstore.TierStore(tmp_path / "run") as store:
        train((40, 30), store, 3)
        store.checkpoint(tmp_path / "checkpoint").wait()
        averages = store.pages.read_states()["w"][STATE].clone()
    loaded = {f"optimizer.state.w.{STATE}": torch.zeros(40, 1)}
    dcp.load(loaded, checkpoint_id=tmp_path / "checkpoint")
    assert torch.equal(loaded[f"optimizer.state.w.{STATE}"], averages)
    parameter = torch.nn.Parameter(torch.zeros(40, 30, dtype=torch.float64))
    group = {"params": [("w", parameter)], "normuon_beta": 0.5}
    with tierstore.TierStore(tmp_path / "new") as store:
        optimizer = muon.Muon([group], store=store, ns_dtype=torch.float64)
        assert optimizer.restore(tmp_path / "checkpoint") == 3
        for step in range(3, STEPS):
            parameter.grad = gradient((40, 30), step)
            optimizer.step()
        assert torch.equal(parameter, expected)
        assert torch.equal(store.pages.read_states()["w"][STATE], states[STATE])


@pytest.mark.parametrize("shape", [(40, 30), (6, 1), (3, 0)])
@pytest.mark.parametrize("between", [None, "dcp", "torch"])
def test_converted_and_resumed(between: str | None, shape: tuple[int, int], tmp_path: Path) -> None:
    expected, states = train(shape, dtype=torch.bfloat16)
    with tierstore.TierStore(tmp_path / "run") as store:
        train(shape, store, 3, dtype=torch.bfloat16)
    source = tmp_path / "run"
    if between is not None:
        convert(source, tmp_path / f"{between}.pt", to=between)
        source = tmp_path / f"{between}.pt"
    convert(source, tmp_path / "again", to="tierstore")
    with tierstore.TierStore(tmp_path / "again", resume=True) as store:
        found, found_states = train(shape, store, dtype=torch.bfloat16)
        assert torch.equal(found, expected)
        assert torch.equal(found_states[STATE], states[STATE])


def test_a_state_dict_has_the_averages() -> None:
    first, second = torch.nn.Parameter(torch.ones(6, 5)), torch.nn.Parameter(torch.ones(6, 5))
    ours, other = (
        muon.Muon([{"params": [p], "normuon_beta": BETA}], lr=LR) for p in (first, second)
    )
    for step in range(STEPS):
        first.grad = gradient((6, 5), step).float()
        ours.step()
        if step == 2:
            second.data.copy_(first)
            other.load_state_dict(ours.state_dict())
        if step > 2:
            second.grad = first.grad.clone()
            other.step()
    assert torch.equal(first, second)
    assert torch.equal(ours.state[first][STATE], other.state[second][STATE])
    with pytest.raises(ValueError, match=r"of shape \[6, 5\] does not fit .* of shape \[6, 1\]"):
        other.state[second][STATE] = torch.ones(6, 5)


@pytest.mark.parametrize(
    ("shape", "group", "message"),
    [
        ((6, 5), {"normuon_beta": 1.0}, r"normuon_beta must be a number in \[0, 1\), got 1.0"),
        ((6, 5), {"normuon_beta": "0.9"}, "normuon_beta must be a number"),
        ((6, 5), {"normuon_beta": False}, "normuon_beta must be a number"),
        (
            (6, 4),
            {"block_grid": (2, 2), "block_period": 2, "block_lr_ratio": 1.0},
            "normuon_beta and block_grid cannot be combined",
        ),
        ((6, 5, 3, 3), {"matrices": (("flatten",),)}, "'w' has shape .* whole rows of the param"),
        ((6, 4), {"matrices": (("split", 1, (2, 2)),)}, "whole rows of the parameter"),
        ((6, 5), {"matrices": (("transposed",),)}, "whole rows of the parameter"),
    ],
)
def test_refused(shape: tuple[int, ...], group: dict[str, Any], message: str) -> None:
    parameter = torch.nn.Parameter(torch.ones(shape))
    with pytest.raises(ValueError, match=message):
        muon.Muon([{"params": [("w", parameter)], "normuon_beta": BETA, **group}])


def test_it_cannot_be_added_or_removed_later(tmp_path: Path) -> None:
    for begin, later in ((BETA, None), (None, BETA)):
        parameter = torch.nn.Parameter(torch.ones(6, 5))
        optimizer = muon.Muon([{"params": [("w", parameter)], "normuon_beta": begin}])
        parameter.grad = torch.ones(6, 5)
        optimizer.step()
        before = parameter.detach().clone()
        optimizer.param_groups[0]["normuon_beta"] = later
        with pytest.raises(
            ValueError, match=r"has normuon_beta=.* another value when the group was added"
        ):
            optimizer.step()
        assert torch.equal(parameter, before)
        optimizer.param_groups[0]["normuon_beta"] = begin
        optimizer.step()


def test_a_checkpoint_with_it_does_not_begin_a_run_without_it(tmp_path: Path) -> None:
    with tierstore.TierStore(tmp_path / "run") as store:
        train((6, 5), store, 3)
        store.checkpoint(tmp_path / "checkpoint").wait()
    parameter = torch.nn.Parameter(torch.zeros(6, 5, dtype=torch.float64))
    with tierstore.TierStore(tmp_path / "new") as store:
        optimizer = muon.Muon([("w", parameter)], store=store)
        with pytest.raises(ValueError, match=r"normuon_beta to load is 0\.8, but Non"):
            optimizer.restore(tmp_path / "checkpoint")
        assert not parameter.any()
        assert optimizer.param_groups[0].get("normuon_beta") is None
        parameter.grad = torch.ones_like(parameter)
        optimizer.step()
