"""MuonBP: blocks of a grid between steps of whole matrices."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

import muon
import tierstore
from muon.coefficients import of_steps
from muon.matrices import matrices_of
from tests.muon.test_coefficients import random, reference
from tests.muon.test_matrices import pieces
from tests.support.killed_processes import _processes

SHAPE = (24, 20)
GRID = (3, 2)
STEPS = 8
OPTIONS: dict[str, Any] = {"lr": 0.05, "weight_decay": 0.1, "momentum": 0.9}


def blocks(whole: torch.Tensor) -> list[torch.Tensor]:
    rows, columns = whole.shape[0] // GRID[0], whole.shape[1] // GRID[1]
    return [piece for band in whole.split(rows, 0) for piece in band.split(columns, 1)]


def gradient(step: int) -> torch.Tensor:
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(step))


def keys(period: int, ratio: float = 1.0) -> dict[str, Any]:
    return {"block_grid": GRID, "block_period": period, "block_lr_ratio": ratio}


def train(
    group: dict[str, Any],
    store: tierstore.TierStore | None = None,
    last: int = STEPS,
    dtype: torch.dtype = torch.float32,
    **options: Any,
) -> torch.Tensor:
    """Begin or go on, up to a step."""
    parameter = torch.nn.Parameter(gradient(0).to(dtype))
    optimizer = muon.Muon([{"params": [("w", parameter)], **group}], store=store, **options)
    first = 0 if store is None else optimizer.restore()
    for step in range(first + 1, last + 1):
        parameter.grad = gradient(step).to(dtype)
        optimizer.step()
    return parameter.detach()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_with_period_one_it_is_muon(dtype: torch.dtype) -> None:
    found = train(keys(1, 0.3), dtype=dtype, **OPTIONS)
    assert torch.equal(found, train({}, dtype=dtype, **OPTIONS))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_before_its_first_whole_step_it_is_muon_of_blocks(dtype: torch.dtype) -> None:
    parameters = [torch.nn.Parameter(one.clone().to(dtype)) for one in blocks(gradient(0))]
    optimizer = muon.Muon(parameters, **{**OPTIONS, "lr": OPTIONS["lr"] * 0.5})
    for step in range(1, STEPS + 1):
        for parameter, grad in zip(parameters, blocks(gradient(step)), strict=True):
            parameter.grad = grad.clone().to(dtype)
        optimizer.step()
    found = train(keys(STEPS + 1, 0.5), dtype=dtype, **OPTIONS)
    for block, parameter in zip(blocks(found), parameters, strict=True):
        assert torch.equal(block, parameter)


@pytest.mark.parametrize("on_disk", [False, True])
def test_equals_the_formula(on_disk: bool, tmp_path: Path) -> None:
    values, momentum = gradient(0).double(), torch.zeros(SHAPE, dtype=torch.float64)
    lr, decay, ratio, period = OPTIONS["lr"], OPTIONS["weight_decay"], 0.7, 3
    for step in range(1, STEPS + 1):
        momentum = 0.9 * momentum + 0.1 * gradient(step).double()
        is_whole = step % period == 0
        rate = lr if is_whole else lr * ratio
        update = torch.empty(SHAPE, dtype=torch.float64)
        for place, part in zip(
            [update] if is_whole else blocks(update),
            [momentum] if is_whole else blocks(momentum),
            strict=True,
        ):
            scale = max(1, part.shape[0] / part.shape[1]) ** 0.5
            place.copy_(scale * reference(part, of_steps("keller_jordan", 5)))
        values = values - rate * decay * values - rate * update
    with tierstore.TierStore(tmp_path if on_disk else None) as store:
        found = train(
            keys(period, ratio),
            store if on_disk else None,
            dtype=torch.float64,
            nesterov=False,
            ns_dtype=torch.float64,
            **OPTIONS,
        )
    torch.testing.assert_close(found, values, rtol=1e-11, atol=1e-12)


def test_blocks_of_experts_are_blocks_of_each() -> None:
    shape, declaration = (4, 6, 10), (("stack",), ("grid", 3, 2))
    whole = random(24, 10).reshape(shape)
    matrices = matrices_of(shape, declaration)
    found = []
    for expert in pieces(whole, (("stack",),)):
        found += [one for band in expert.split(2, 0) for one in band.split(5, 1)]
    assert [matrix.shape for matrix in matrices] == [(2, 5)] * 24
    everything = tierstore.pages.Chunk((0,) * 3, shape)
    seen = []
    for matrix in matrices:
        part = matrix.part(everything)
        assert part is not None
        seen.append(whole[part.index].reshape(2, 5))
    assert {tuple(one.flatten().tolist()) for one in seen} == {
        tuple(one.flatten().tolist()) for one in found
    }


def _train_and_die(directory: str, last: int) -> None:
    store = tierstore.TierStore(directory, resume=True)
    train(keys(4, 0.5), store, last, **OPTIONS)
    store.synchronize()
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.quick(2)
@pytest.mark.parametrize("deaths", [(2,), (4,), (1, 6), (3, 5, 7)])
def test_killed_between_whole_steps(deaths: tuple[int, ...], tmp_path: Path) -> None:
    for last in deaths:
        process = _processes.Process(target=_train_and_die, args=(str(tmp_path), last))
        process.start()
        process.join()
        assert process.exitcode == -signal.SIGKILL
    with tierstore.TierStore(tmp_path, resume=True) as store:
        found = train(keys(4, 0.5), store, **OPTIONS)
    assert torch.equal(found, train(keys(4, 0.5), **OPTIONS))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"block_period": None}, "with block_grid also needs block_period: blocks have"),
        ({"block_grid": None}, "with block_lr_ratio also needs block_grid"),
        ({"block_grid": (2.0, 1)}, "block_grid must be two whole numbers above 0"),
        ({"block_grid": (0, 1)}, "block_grid must be two whole numbers above 0"),
        ({"block_period": 0}, "block_period must be a whole number above 0, got 0"),
        ({"block_lr_ratio": -1}, "block_lr_ratio must be a number from 0 on"),
        ({"block_grid": (5, 1)}, r"'w' .* a grid of 5 x 1 blocks does not fit a matrix of 24 x 20"),
        ({"block_grid": (1, 3)}, "3 do not divide 20"),
    ],
)
def test_what_cannot_be_is_refused(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        train({**keys(2), **changed}, **OPTIONS)


def test_a_grid_that_fits_no_more_is_refused_before_the_step() -> None:
    parameter = torch.nn.Parameter(gradient(0))
    optimizer = muon.Muon([{"params": [("w", parameter)], **keys(4)}], **OPTIONS)
    parameter.grad = gradient(1)
    optimizer.step()
    before = parameter.detach().clone()
    optimizer.param_groups[0]["block_grid"] = (7, 1)
    with pytest.raises(ValueError, match=r"'w' .* a grid of 7 x 1 blocks does not fit"):
        optimizer.step()
    assert torch.equal(parameter, before)
    optimizer.param_groups[0]["block_grid"] = (2, 1)
    optimizer.step()
    assert not torch.equal(parameter, before)


def test_a_parameter_without_elements_has_blocks() -> None:
    parameter = torch.nn.Parameter(torch.ones(0, 4))
    optimizer = muon.Muon([{"params": [parameter], **keys(2)}])
    parameter.grad = torch.ones(0, 4)
    optimizer.step()


def test_operations_are_counted_for_the_last_step() -> None:
    parameter = torch.nn.Parameter(gradient(0))
    optimizer = muon.Muon([parameter])
    parameter.grad = gradient(1)
    optimizer.step()
    before = optimizer.flops_by_rank()
    optimizer.param_groups[0]["ns_steps"] = 50
    assert optimizer.flops_by_rank() == before
