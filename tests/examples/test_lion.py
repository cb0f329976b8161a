"""The Lion example: what it keeps on disk is what it would keep in memory."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

import tierstore
from examples.lion import Lion
from tests.support import training
from tests.support.forked_programs import run_program

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "lion.py"
STEPS = 20
LR = 1e-3
BETAS = (0.9, 0.98)
WEIGHT_DECAY = 0.1

Run = tuple[tierstore.Paged, dict[str, torch.nn.Parameter]]


def begin(store: tierstore.TierStore, dtype: torch.dtype) -> Run:
    parameters = training.make_parameters(dtype)
    options = {"lr": LR, "betas": BETAS, "weight_decay": WEIGHT_DECAY}
    named = parameters.items()
    return tierstore.Paged(named, Lion, store=store, elementwise=True, **options), parameters


def contents(run: Run) -> dict[str, torch.Tensor]:
    """Copies of every parameter and every state, by name."""
    optimizer, parameters = run
    result = {f"parameter {name}": p.detach().clone() for name, p in parameters.items()}
    for name, states in optimizer.store.pages.read_states().items():
        result |= {f"{state} of {name}": tensor for state, tensor in states.items()}
    return result


def resident(dtype: torch.dtype, steps: int = STEPS) -> dict[str, torch.Tensor]:
    run = begin(tierstore.TierStore(None), dtype)
    training.train(*run, range(1, steps + 1))
    return contents(run)


def plain_lion(steps: int) -> dict[str, torch.Tensor]:
    """Lion over whole float32 tensors that are simply kept, in the order of the paper."""
    parameters = training.make_parameters()
    averages = {name: torch.zeros_like(p) for name, p in parameters.items()}
    for step in range(1, steps + 1):
        training.set_gradients(parameters, step)
        for name, parameter in parameters.items():
            if parameter.grad is not None:
                update = torch.sign(torch.lerp(averages[name], parameter.grad, 1 - BETAS[0]))
                parameter.data = parameter.data * (1 - LR * WEIGHT_DECAY) - LR * update
                averages[name] = torch.lerp(averages[name], parameter.grad, 1 - BETAS[1])
    return {f"parameter {name}": p.data for name, p in parameters.items()} | {
        f"exp_avg of {name}": average for name, average in averages.items()
    }


@pytest.mark.quick(1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("engine", ["io_uring", "libaio", "aiofiles"])
def test_on_disk_equals_in_memory(engine: str, dtype: torch.dtype, tmp_path: Path) -> None:
    with tierstore.TierStore(tmp_path, engine=engine, page_bytes=4096, buffers=2) as store:
        run = begin(store, dtype)
        training.train(*run, range(1, STEPS + 1))
        # More pages than parameters: some lie in several, and two buffers hold them all.
        assert store.stats().pages > len(training.SHAPES)
        training.assert_identical(contents(run), resident(dtype))


def test_equals_plain_lion() -> None:
    training.assert_identical(resident(torch.float32), plain_lion(STEPS))


def test_low_precision_follows_its_master() -> None:
    """Steps of 1e-3 are lost on bf16 values near one; the masters have to add them up."""
    parameters = {"p": torch.nn.Parameter(torch.ones(4, dtype=torch.bfloat16))}
    optimizer = tierstore.Paged(parameters.items(), Lion, lr=1e-3)
    for _ in range(STEPS):
        parameters["p"].grad = torch.ones(4, dtype=torch.bfloat16)
        optimizer.step()
    # 20 float32 subtractions from about one: each rounds by at most 2^-25.
    master = optimizer.store.pages.read_states()["p"]["master"]
    assert (master.double() - (1 - 1e-3 * STEPS)).abs().max() < STEPS * 2**-24
    assert torch.equal(parameters["p"], master.bfloat16())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_restart_goes_on(dtype: torch.dtype, tmp_path: Path) -> None:
    with tierstore.TierStore(tmp_path, page_bytes=4096, buffers=2) as store:
        training.train(*begin(store, dtype), range(1, 8))
    with tierstore.TierStore(tmp_path, page_bytes=4096, buffers=2, resume=True) as store:
        run = begin(store, dtype)
        for parameter in run[1].values():
            parameter.data.zero_()
        assert run[0].restore() == 7
        training.train(*run, range(8, STEPS + 1))
        training.assert_identical(contents(run), resident(dtype))


@pytest.mark.long
def test_script_trains_and_goes_on(tmp_path: Path) -> None:
    done = [run_program(EXAMPLE, tmp_path / "run") for _ in range(2)]
    assert [each.returncode for each in done] == [0, 0], done
    outputs = [each.stdout for each in done]
    lines = [re.findall(r"^step (\d+) loss (\S+)$", output, re.MULTILINE) for output in outputs]
    assert [int(step) for step, _ in lines[0] + lines[1]] == list(range(50, 401, 50))
    first, last, resumed = float(lines[0][0][1]), float(lines[0][-1][1]), float(lines[1][0][1])
    assert last < first / 2
    # A restart that lost the parameters would be back at a loss like the first.
    assert resumed < first / 2


def test_example_is_short() -> None:
    assert len(EXAMPLE.read_text().splitlines()) < 70
