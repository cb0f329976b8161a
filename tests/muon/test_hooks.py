"""Hooks around the weight update, and Hyperball against its formula in float64."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

import muon
import tierstore
from muon.coefficients import of_steps
from tests.muon.test_coefficients import MATRICES, of_rank_one, random, reference

LR, STEPS = 0.05, 6
HYPERBALL: dict[str, Any] = {"weight_decay": 0.0, "adjust_lr_fn": "unit", "lr": LR}


def gradient(whole: torch.Tensor, step: int) -> torch.Tensor:
    """Return a gradient with the condition of the matrix, another one at each step."""
    return whole * (step % 3 - 0.5) + 1e-3 * whole.roll(step, 0)


def trained(
    whole: torch.Tensor,
    hooks: list[muon.UpdateHook],
    store: tierstore.TierStore | None = None,
    steps: int = STEPS,
    begin: float = 1.0,
    **options: Any,
) -> torch.Tensor:
    parameter = torch.nn.Parameter(torch.full_like(whole, begin))
    optimizer = muon.Muon([("w", parameter)], store=store, hooks=hooks, **options)
    for step in range(1, steps + 1):
        parameter.grad = gradient(whole, step).to(parameter.dtype)
        optimizer.step()
    return parameter.detach()


class Recorder(muon.UpdateHook):
    """Keeps what it was called with."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, str, tuple[int, ...], tuple[int, int], float]] = []
        self.weights: list[torch.Tensor] = []

    def note(self, when: str, update: muon.WeightUpdate) -> None:
        norm = float(update.norm(update.weights))
        self.calls.append((when, update.name, update.starts, update.shape, norm))
        self.weights.append(torch.cat([part.flatten() for part in update.weights]).clone())

    def before(self, update: muon.WeightUpdate) -> None:
        self.note("before", update)

    def after(self, update: muon.WeightUpdate) -> None:
        self.note("after", update)


def test_hooks_are_called_around_the_update_of_each_matrix() -> None:
    parameters = [torch.nn.Parameter(torch.randn(8, 6)), torch.nn.Parameter(torch.randn(4, 4))]
    begin = parameters[0].detach().clone()
    groups: list[dict[str, Any]] = [
        {"params": [("q", parameters[0])], "matrices": (("blocks", 0, 4),)},
        {"params": [("b", parameters[1])], "algorithm": "adamw"},
    ]
    recorder = Recorder()
    optimizer = muon.Muon(groups, hooks=[recorder])
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    assert [call[:4] for call in recorder.calls] == [
        ("before", "q", (0, 0), (4, 6)),
        ("after", "q", (0, 0), (4, 6)),
        ("before", "q", (4, 0), (4, 6)),
        ("after", "q", (4, 0), (4, 6)),
    ]
    values = [begin[:4], parameters[0][:4], begin[4:], parameters[0][4:]]
    for (*_, norm), seen, expected in zip(recorder.calls, recorder.weights, values, strict=True):
        assert torch.equal(seen, expected.flatten())
        assert norm == pytest.approx(float(expected.detach().double().norm()), rel=1e-14)


class Halve(muon.UpdateHook):
    """Halves the updates of groups that ask for it with a key of their own."""

    def before(self, update: muon.WeightUpdate) -> None:
        if update.group.get("halves"):
            for part in update.updates:
                part.mul_(0.5)


@pytest.mark.parametrize("ns_dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("halves", [False, True])
def test_a_hook_changes_the_updates_of_a_group(halves: bool, ns_dtype: torch.dtype) -> None:
    whole = random(12, 20).float()
    options: dict[str, Any] = {"weight_decay": 0.0, "ns_dtype": ns_dtype}
    expected = trained(whole, [], lr=LR / 2 if halves else LR, **options)
    parameter = torch.nn.Parameter(torch.ones_like(whole))
    group = {"params": [("w", parameter)], "halves": halves}
    optimizer = muon.Muon([group], hooks=[Halve()], lr=LR, **options)
    for step in range(1, STEPS + 1):
        parameter.grad = gradient(whole, step)
        optimizer.step()
    assert torch.equal(parameter, expected)  # Halves are exact.


def hyperball_reference(whole: torch.Tensor) -> torch.Tensor:
    values, momentum = torch.ones_like(whole), torch.zeros_like(whole)
    for step in range(1, STEPS + 1):
        momentum = 0.95 * momentum + 0.05 * gradient(whole, step)
        update = reference(momentum, of_steps("keller_jordan", 5))
        radius = values.norm()
        moved = values - LR * radius * update / max(update.norm(), 1e-300)
        values = radius * moved / moved.norm()
    return values


@pytest.mark.parametrize("on_disk", [False, True])
@pytest.mark.parametrize("name", MATRICES)
def test_hyperball_equals_the_formula(name: str, on_disk: bool, tmp_path: Path) -> None:
    whole = MATRICES[name]()
    with tierstore.TierStore(tmp_path if on_disk else None) as store:
        found = trained(
            whole,
            [muon.Hyperball()],
            store,
            nesterov=False,
            ns_dtype=torch.float64,
            **HYPERBALL,
        )
    # The products of Newton-Schulz in float64; more where singular values of 1e-6 are divided by.
    torch.testing.assert_close(found, hyperball_reference(whole), rtol=1e-9, atol=1e-10)


def test_norms_stay_in_low_precision() -> None:
    """Only the master keeps its norm; the parameter is the master, rounded."""
    parameter = torch.nn.Parameter(random(30, 50).bfloat16())
    norm = parameter.detach().double().norm()
    optimizer = muon.Muon([("w", parameter)], hooks=[muon.Hyperball()], **HYPERBALL)
    for step in range(50):
        parameter.grad = random(30, 50).roll(step, 1).bfloat16()
        optimizer.step()
    master = optimizer.store.pages.read_states()["w"]["master"].double()
    # Each step rounds every element once by 2^-24 of its value at most, and most of that averages.
    assert float(master.norm() / norm) == pytest.approx(1, abs=50 * 2**-24)
    assert not torch.equal(parameter, random(30, 50).bfloat16())


def test_a_matrix_of_zeros_is_refused(tmp_path: Path) -> None:
    whole = of_rank_one(6, 8)
    with (
        tierstore.TierStore(tmp_path) as store,
        pytest.raises(ValueError, match="'w' has the norm 0, which Hyperball would keep: init"),
    ):
        trained(whole, [muon.Hyperball()], store, begin=0.0, **HYPERBALL)


class FailsAt(muon.UpdateHook):
    """Raises at one of its calls."""

    def __init__(self, number: int) -> None:
        self._calls = itertools.count(1)
        self._number = number

    def after(self, update: muon.WeightUpdate) -> None:
        if next(self._calls) == self._number:
            raise ZeroDivisionError("a mistake in a hook")


def test_a_hook_that_fails_fails_the_store_and_loses_nothing(tmp_path: Path) -> None:
    whole = random(12, 20).float()
    expected = trained(whole, [], lr=LR)
    parameter = torch.nn.Parameter(torch.ones_like(whole))
    with tierstore.TierStore(tmp_path) as store:
        optimizer = muon.Muon([("w", parameter)], store=store, hooks=[FailsAt(4)], lr=LR)
        failures, step = 0, 1
        while step <= STEPS:
            parameter.grad = gradient(whole, step)
            try:
                optimizer.step()
            except ZeroDivisionError:
                failures += 1
                with pytest.raises(tierstore.StoreFailedError):
                    optimizer.step()
                assert optimizer.restore() == step - 1
            else:
                step += 1
    assert failures == 1
    assert torch.equal(parameter, expected)


def test_hyperball_refuses_zeros_as_often_as_it_is_tried() -> None:
    parameter = torch.nn.Parameter(torch.zeros(4, 5))
    optimizer = muon.Muon([parameter], hooks=[muon.Hyperball()], **HYPERBALL)
    parameter.grad = torch.ones(4, 5)
    for _ in range(2):
        with pytest.raises(ValueError, match="has the norm 0, which Hyperball would keep"):
            optimizer.step()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"hooks": muon.Hyperball()}, "hooks must be a sequence of muon.UpdateHook"),
        ({"hooks": [muon.Hyperball]}, "hooks must be a sequence of muon.UpdateHook"),
        ({"qk_clip": 100.0}, "qk_clip must be a muon.QKClip, got 100.0"),
    ],
)
def test_options_of_other_types_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        muon.Muon([torch.nn.Parameter(torch.ones(4, 5))], **options)
