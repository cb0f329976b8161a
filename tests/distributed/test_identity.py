"""Several ranks compute the same bits as one process, in every layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.rank_programs.checks import assert_as_one_process, assert_states
from tests.rank_programs.collective_order import assert_one_order
from tests.rank_programs.training import (
    FEW,
    SHAPES,
    STEPS,
    Case,
    States,
    Tensors,
    one_process,
    whole_gradients,
    whole_parameters,
)
from tests.support.adamw import AdamW
from tests.support.rank_pool import RankPool
from tests.support.training import make_groups

# Several subgroups of every group, and less room than they take.
STREAMED: dict[str, Any] = {"page_bytes": 6000, "buffers": 5}
LAYOUTS = [
    (1, "rows"),
    (2, "columns"),
    *((3, layout) for layout in ("rows", "columns", "copies", "fsdp")),
    *((4, layout) for layout in ("hsdp", "fsdp and tp", "experts", "uneven")),
    *((world_size, "uneven") for world_size in (2, 3)),
]
MORE_LAYOUTS = [
    *((1, layout) for layout in ("columns", "copies", "fsdp")),
    *((2, layout) for layout in ("rows", "copies", "fsdp")),
    *((4, layout) for layout in ("rows", "columns", "copies", "fsdp")),
]


@pytest.fixture(scope="module")
def expected() -> tuple[Tensors, States]:
    return one_process(SHAPES, {})


def test_one_process_has_the_bits_of_the_references(expected: tuple[Tensors, States]) -> None:
    wholes = whole_parameters(SHAPES).items()
    parameters = {
        name: torch.nn.Parameter(whole)
        for name, whole in wholes
        if whole.dtype is torch.float32 and whole.numel()
    }
    optimizers: list[torch.optim.Optimizer] = []
    for group in make_groups(parameters, {name: SHAPES[name] for name in parameters}):
        is_muon = group.pop("algorithm") == "muon"
        optimizers.append((torch.optim.Muon if is_muon else AdamW)([group]))
    for step in range(1, STEPS + 1):
        gradients = whole_gradients(SHAPES, step)
        for name, parameter in parameters.items():
            parameter.grad = gradients.get(name)
        for optimizer in optimizers:
            optimizer.step()
    values, states = expected
    assert len(optimizers) == 4
    for name, parameter in parameters.items():
        assert torch.equal(parameter, values[name])
        (of_parameter,) = [each.state[parameter] for each in optimizers if parameter in each.state]
        for state, tensor in of_parameter.items():
            if state != "step":
                assert torch.equal(tensor, states[name, state])


@pytest.mark.quick(1)
@pytest.mark.parametrize("partition", ["by_parameter", "flat", "auto"])
@pytest.mark.parametrize(
    "world_size", [*(pytest.param(n, marks=pytest.mark.long) for n in (1, 2, 4)), 3]
)
def test_replicated(
    pool: RankPool,
    tmp_path: Path,
    expected: tuple[Tensors, States],
    world_size: int,
    partition: str,
) -> None:
    case = Case(
        layout="plain",
        directory=tmp_path / "run",
        store=STREAMED,
        options={"partition": partition},
    )
    of_ranks = pool.run(world_size, "tests.rank_programs.training:train", case)
    assert_as_one_process(of_ranks, SHAPES, expected)


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    ("world_size", "layout"),
    [*LAYOUTS, *(pytest.param(*case, marks=pytest.mark.long) for case in MORE_LAYOUTS)],
)
def test_dtensors(
    pool: RankPool,
    tmp_path: Path,
    expected: tuple[Tensors, States],
    world_size: int,
    layout: str,
) -> None:
    case = Case(layout=layout, directory=tmp_path / "run", store=STREAMED)
    of_ranks = pool.run(world_size, "tests.rank_programs.training:train", case)
    assert_as_one_process(of_ranks, SHAPES, expected)


@pytest.mark.quick(1)
@pytest.mark.parametrize("layout", ["plain", "fsdp", "fsdp and tp"])
def test_without_a_directory(pool: RankPool, expected: tuple[Tensors, States], layout: str) -> None:
    of_ranks = pool.run(4, "tests.rank_programs.training:train", Case(layout=layout))
    assert_as_one_process(of_ranks, SHAPES, expected)


def test_gradients_and_parameters_that_are_copied_to_the_host(
    pool: RankPool, tmp_path: Path, expected: tuple[Tensors, States]
) -> None:
    store = {**STREAMED, "step_on": "cpu", "free_gradients": True}
    case = Case(layout="hsdp", directory=tmp_path / "run", store=store)
    of_ranks = pool.run(4, "tests.rank_programs.training:train", case)
    assert_as_one_process(of_ranks, SHAPES, expected)


def test_stages_are_jobs_of_their_own(
    pool: RankPool, tmp_path: Path, expected: tuple[Tensors, States]
) -> None:
    case = Case(layout="stages", directory=tmp_path / "run", store=STREAMED)
    of_ranks = pool.run(4, "tests.rank_programs.training:train", case)
    for stage in (of_ranks[0::2], of_ranks[1::2]):
        assert_as_one_process(stage, SHAPES, expected, order=False)
    assert_one_order([trained.issued for trained in of_ranks])


@pytest.mark.quick(2)
@pytest.mark.parametrize("step_on", [None, "cpu"])
@pytest.mark.parametrize("layout", ["plain", "rows", "columns", "copies"])
def test_ranks_with_nothing(
    pool: RankPool, tmp_path: Path, layout: str, step_on: str | None
) -> None:
    store = {"step_on": step_on}
    case = Case(layout=layout, shapes=FEW, directory=tmp_path / "run", store=store)
    of_ranks = pool.run(4, "tests.rank_programs.training:train", case)
    assert_as_one_process(of_ranks, FEW, one_process(FEW, {}))
    assert min(trained.pages for trained in of_ranks) == (0 if layout != "columns" else 1)


@pytest.mark.quick(1)
@pytest.mark.parametrize("layout", ["rows", "columns"])
def test_a_gradient_that_some_ranks_lack_is_zero_there(pool: RankPool, layout: str) -> None:
    absent = (1, 3)
    of_ranks = pool.run(
        4, "tests.rank_programs.training:train", Case(layout=layout, absent_on=absent)
    )
    zeroed = {
        name: torch.cat([of_ranks[rank].positions[name].flatten() for rank in absent])
        for name in SHAPES
    }
    assert_as_one_process(of_ranks, SHAPES, one_process(SHAPES, {}, zeroed=zeroed))


@pytest.mark.quick(1)
@pytest.mark.parametrize("layout", ["rows", "plain"])
def test_matrices_in_batches_differ_by_rounding_alone(
    pool: RankPool, expected: tuple[Tensors, States], layout: str
) -> None:
    """From matrices one by one. Batches of one process give the same bits."""
    case = Case(layout=layout, options={"ns_batched": True})
    of_ranks = pool.run(4, "tests.rank_programs.training:train", case)
    assert_as_one_process(of_ranks, SHAPES, one_process(SHAPES, {"ns_batched": True}))
    parameters, states = expected
    assert_states(of_ranks, states)
    for name, (shape, group) in SHAPES.items():
        # Of one update, whose singular values are at most 1.2, bfloat16 keeps 2**-8 in each of
        # a few products that each step makes of it; what is large in it is 0.4 at most.
        ratio = max(1.0, shape[0] / shape[1]) ** 0.5 if group != 2 and len(shape) == 2 else 1.5
        size = 0.02 * ratio * STEPS * 10 * 2**-8 * 0.4 if group != 1 else 0.0
        for trained in of_ranks:
            whole = parameters[name].flatten()[trained.positions[name]]
            rounded = 2**-7 if whole.dtype is torch.bfloat16 else 0.0
            torch.testing.assert_close(trained.values[name], whole, rtol=rounded, atol=size)


@pytest.mark.quick(1)
@pytest.mark.parametrize("layout", ["rows", "fsdp and tp"])
@pytest.mark.parametrize(
    "options",
    [
        {"cautious_wd": True},
        {"ns_coefficients": "deepseekv4", "ns_steps": 10, "ns_norm": "scaled"},
        {"ns_coefficients": "cubic5", "adjust_lr_fn": "spectral", "ns_method": "gram"},
        {"master": "remainder"},
        {"master": "24bit", "partition": "flat"},
    ],
    ids=str,
)
def test_variants(pool: RankPool, layout: str, options: dict[str, Any]) -> None:
    of_ranks = pool.run(
        4, "tests.rank_programs.training:train", Case(layout=layout, options=options)
    )
    assert_as_one_process(of_ranks, SHAPES, one_process(SHAPES, options))
