"""Every class of ``torch.optim`` on pages: the bits of the class, or refused by name."""

from __future__ import annotations

import itertools
import signal
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import tierstore
from tests.rank_programs import classes
from tests.support.class_training import (
    CASES,
    DEPEND_ON_THE_FIRST_STEP,
    PAGES,
    STEPS,
    WHOLE,
    Reference,
    case_of,
    gradient,
    parameters,
    scheduled,
    shapes_of,
    train,
    train_and_die,
)
from tests.support.killed_processes import _processes
from tests.support.rank_pool import RankPool

DTYPES = (torch.float32, torch.bfloat16)
ALL = [*CASES, *WHOLE]


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankPool]:
    with RankPool(tmp_path_factory.mktemp("worlds")) as ranks:
        yield ranks


@pytest.mark.quick(16)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("on_disk", [False, True])
@pytest.mark.parametrize("case", ALL)
def test_has_the_bits_of_the_class(
    case: str, on_disk: bool, dtype: torch.dtype, tmp_path: Path
) -> None:
    """With a scheduler; gradients are missing at times, and parameters cut over pages."""
    own, reference = parameters(dtype, shapes_of(case)), Reference(case, dtype)
    with tierstore.TierStore(tmp_path, **PAGES) as store:
        optimizer = train(case, own, store if on_disk else None)
        reference.require_equal(own, optimizer.state_dict()["state"])


@pytest.mark.quick(2)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", ALL)
def test_killed_and_resumed(case: str, dtype: torch.dtype, tmp_path: Path) -> None:
    for last in (3, 9):
        process = _processes.Process(target=train_and_die, args=(case, dtype, tmp_path, last))
        process.start()
        process.join()
        assert process.exitcode == -signal.SIGKILL
    own = parameters(dtype, shapes_of(case))
    with tierstore.TierStore(tmp_path, resume=True, **PAGES) as store:
        optimizer = train(case, own, store)
        Reference(case, dtype).require_equal(own, optimizer.state_dict()["state"])


@pytest.mark.quick(2)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("case", "kind"),
    [
        *itertools.product(CASES, ["flat", "by_parameter", "fsdp"]),
        *itertools.product(WHOLE, ["by_parameter", "replicated"]),
    ],
)
def test_two_ranks(
    case: str, dtype: torch.dtype, kind: str, pool: RankPool, tmp_path: Path
) -> None:
    """Tensors that both ranks hold, as of DDP or of HSDP, and shards as of FSDP2."""
    pool.run(2, "tests.rank_programs.classes:resumed", case, kind, dtype, tmp_path)


@pytest.mark.parametrize("case", ["SOAP", "Shampoo"])
def test_a_square_parameter_costs_as_much_as_one_nearly_square(case: str) -> None:
    """Its factors have its shape, and count with their cubes."""
    cls, options = case_of(case)
    params = [nn.Parameter(torch.ones(shape)) for shape in ((40, 40), (40, 41))]
    [group] = tierstore.Paged(params, cls, **options).paged_groups()
    square, other = (parameter.cost or 0 for parameter in group.parameters)
    assert other > 2 * 40**3
    assert 0.9 * other < square < other


@pytest.mark.quick(1)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", WHOLE)
def test_two_ranks_killed_and_resumed(
    case: str, dtype: torch.dtype, pool: RankPool, tmp_path: Path
) -> None:
    for last in (3, 9):
        ranks = [
            _processes.Process(
                target=classes.train_and_die,
                args=(rank, 2, tmp_path / f"world-{last}", case, dtype, tmp_path / "run", last),
            )
            for rank in range(2)
        ]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
            assert process.exitcode == -signal.SIGKILL
    resumed = "tests.rank_programs.classes:resumed"
    pool.run(2, resumed, case, "by_parameter", dtype, tmp_path / "run", [STEPS])


@pytest.mark.quick(1)
@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize("case", WHOLE)
def test_goes_on_on_other_ranks(case: str, world_size: int, pool: RankPool, tmp_path: Path) -> None:
    resumed = "tests.rank_programs.classes:resumed"
    pool.run(2, resumed, case, "by_parameter", torch.bfloat16, tmp_path, [10])
    pool.run(world_size, resumed, case, "by_parameter", torch.bfloat16, tmp_path, [STEPS])


@pytest.mark.quick(6)
# Its factors are not row-major in memory, and the tensors of a state dict are: products of a matrix
# and a vector then differ in the last bits.
@pytest.mark.parametrize("case", [case for case in ALL if case != "SOAP-limited"])
def test_state_dicts_equal_the_class(case: str) -> None:
    """Both ways: the class goes on from ours, and we go on from a state dict of the class."""
    cls, options = case_of(case)
    own = parameters(torch.float32, shapes_of(case))
    ours = train(case, own, last=10)
    stock = Reference(case, torch.float32, last=0)
    for name, parameter in own.items():
        stock.masters[name].data.copy_(parameter.detach())
    stock.optimizer.load_state_dict(ours.state_dict())
    stock.go_on(10, STEPS)
    reference = Reference(case, torch.float32)
    reference.require_equal(stock.masters, stock.optimizer.state_dict()["state"])

    half = Reference(case, torch.float32, last=10)
    again = parameters(torch.float32, shapes_of(case))
    for name, parameter in again.items():
        parameter.data.copy_(half.masters[name].detach())
    optimizer = tierstore.Paged(again.items(), cls, **options)
    optimizer.load_state_dict(half.optimizer.state_dict())
    scheduler = scheduled(optimizer)
    scheduler.load_state_dict(half.scheduler.state_dict())
    optimizer.param_groups[0]["lr"] = deepcopy(half.optimizer.param_groups[0]["lr"])
    _go_on(optimizer, again, scheduler, 10)
    reference.require_equal(again, optimizer.state_dict()["state"])


def _go_on(
    optimizer: torch.optim.Optimizer, own: dict[str, Any], scheduler: Any, first: int
) -> None:
    for step in range(first + 1, STEPS + 1):
        for index, parameter in enumerate(own.values()):
            parameter.grad = gradient(step, index, parameter)
        optimizer.step()
        scheduler.step()


class Model(torch.nn.Module):
    def __init__(self, case: str) -> None:
        super().__init__()
        self.parameters_ = torch.nn.ParameterDict(parameters(torch.float32, shapes_of(case)))


@pytest.mark.quick(12)
@pytest.mark.parametrize(
    ("case", "steps"),
    [
        *((case, 10) for case in ALL),
        *((c, 5) for c in CASES if c not in DEPEND_ON_THE_FIRST_STEP),
    ],
)
def test_stock_dcp_loads_a_checkpoint_into_the_class(case: str, steps: int, tmp_path: Path) -> None:
    """Also of parameters that were never stepped: the class goes on with the bits of our run."""
    cls, options = case_of(case)
    model = Model(case)
    own = dict(model.named_parameters())
    with tierstore.TierStore(tmp_path / "run", **PAGES) as store:
        optimizer = train(case, own, store, last=steps)
        store.checkpoint(tmp_path / "checkpoint")
        lr = float(optimizer.param_groups[0]["lr"])
    stock_model = Model(case)
    stock = cls(stock_model.parameters(), **options)
    contents = dict(zip(("model", "optimizer"), get_state_dict(stock_model, stock), strict=True))
    dcp.load(contents, checkpoint_id=tmp_path / "checkpoint")
    set_state_dict(
        stock_model,
        stock,
        model_state_dict=contents["model"],
        optim_state_dict=contents["optimizer"],
    )
    assert float(stock.param_groups[0]["lr"]) == lr
    reference = Reference(case, torch.float32, last=steps)
    _go_on(stock, dict(stock_model.named_parameters()), scheduled_like(stock, reference), steps)
    reference.go_on(steps, STEPS)
    found = {n.removeprefix("parameters_."): p for n, p in stock_model.named_parameters()}
    reference.require_equal(found, stock.state_dict()["state"])


def scheduled_like(optimizer: torch.optim.Optimizer, reference: Reference) -> Any:
    """Return a scheduler of another optimizer that goes on as the one of the reference."""
    scheduler = scheduled(optimizer)
    scheduler.load_state_dict(reference.scheduler.state_dict())
    optimizer.param_groups[0]["lr"] = deepcopy(reference.optimizer.param_groups[0]["lr"])
    return scheduler


@pytest.mark.quick(6)
@pytest.mark.parametrize(
    ("case", "steps"), [*((c, 10) for c in ALL), ("SOAP", 5), ("NAdam", 5), ("ASGD", 5)]
)
def test_begins_from_a_checkpoint_of_the_class(case: str, steps: int, tmp_path: Path) -> None:
    """A checkpoint of stock DCP, also with a parameter without steps."""
    cls, options = case_of(case)
    half = Reference(case, torch.float32, last=steps)
    model = Model(case)
    for name, parameter in model.named_parameters():
        parameter.data.copy_(half.masters[name.removeprefix("parameters_.")].detach())
    stock = cls(model.parameters(), **options)
    stock.load_state_dict(half.optimizer.state_dict())
    contents = dict(zip(("model", "optimizer"), get_state_dict(model, stock), strict=True))
    dcp.save(contents, checkpoint_id=tmp_path / "stock")
    ours = Model(case)
    own = dict(ours.named_parameters())
    with tierstore.TierStore(tmp_path / "run", **PAGES) as store:
        optimizer = tierstore.Paged(own.items(), cls, store=store, **options)
        scheduler = scheduled(optimizer)
        optimizer.restore(checkpoint=tmp_path / "stock")
        assert (2 in optimizer.state_dict()["state"]) == (steps == 10)
        scheduler.load_state_dict(half.scheduler.state_dict())
        _go_on(optimizer, own, scheduler, steps)
        half.go_on(steps, STEPS)
        found = {name.removeprefix("parameters_."): p for name, p in own.items()}
        half.require_equal(found, optimizer.state_dict()["state"])
