"""FSDP2 and DDP around the optimizer: real forwards and backwards on several ranks."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.rank_programs.fsdp import LAYERS, MATRIX
from tests.support.rank_pool import RankPool
from tests.support.torch_version import torch_before


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankPool]:
    with RankPool(tmp_path_factory.mktemp("worlds")) as ranks:
        yield ranks


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    ("settings", "store"),
    [
        ("fp32", {"step_on": "cpu", "free_gradients": True}),
        ("bf16", {}),
        ("offloaded", {"free_gradients": True}),
        ("kept", {}),
    ],
)
def test_fsdp_gets_what_one_process_gets_of_its_gradients(
    settings: str, store: dict[str, Any], pool: RankPool, tmp_path: Path
) -> None:
    """Some ranks have no rows of a parameter; clipped and accumulated gradients."""
    pool.run(3, "tests.rank_programs.fsdp:train", settings, tmp_path, store)


@pytest.mark.long
def test_parameters_that_fsdp_has_on_the_host_are_stepped_on_a_gpu(
    pool: RankPool, tmp_path: Path
) -> None:
    pool.run(3, "tests.rank_programs.fsdp:train", "offloaded", tmp_path, {"step_on": "cuda"})


@pytest.mark.quick(1)
@pytest.mark.parametrize("backwards", [1, 3])
@pytest.mark.parametrize("max_norm", [None, 0.5])
@pytest.mark.parametrize("settings", ["fp32", "bf16"])
@pytest.mark.parametrize("shape", [(1,), (2,), (3,), (2, 1)], ids=str)
def test_gradients_that_leave_during_backward(
    shape: tuple[int, ...],
    settings: str,
    max_norm: float | None,
    backwards: int,
    pool: RankPool,
    tmp_path: Path,
) -> None:
    """FSDP2, and HSDP, whose two replicas own half of the states."""
    program = "tests.rank_programs.fsdp:leaving"
    found = pool.run(math.prod(shape), program, shape, settings, backwards, max_norm, tmp_path)
    assert found == [[]] * math.prod(shape)


@pytest.mark.quick(1)
@pytest.mark.parametrize("settings", ["fp32", "bf16"])
def test_gradients_that_are_reduced_in_the_last_backward(
    settings: str, pool: RankPool, tmp_path: Path
) -> None:
    """They leave then, and until then whole ones are on the GPU: a warning in each store."""
    program = partial(pool.run, 2, "tests.rank_programs.fsdp:leaving", (2,), settings)
    assert [len(found) for found in program(3, 0.5, tmp_path, False)] == [2, 2]


def test_nested_groups_cause_no_warning(pool: RankPool, tmp_path: Path) -> None:
    assert pool.run(2, "tests.rank_programs.fsdp:nested", tmp_path) == [[], []]


@pytest.mark.long
def test_gradients_that_leave_are_not_on_the_device_together(
    pool: RankPool, tmp_path: Path
) -> None:
    """Gradients of two layers and buffers of two reductions are: 4.2 matrices were counted.

    On one rank: with several, threads of gloo free buffers at any time.
    """
    ((stays, leaves),) = pool.run(1, "tests.rank_programs.fsdp:peaks", tmp_path)
    assert leaves <= 5 * MATRIX
    assert stays > LAYERS * MATRIX


def test_gradients_that_leave_are_summed_up_in_their_dtype(pool: RankPool, tmp_path: Path) -> None:
    pool.run(2, "tests.rank_programs.fsdp:summed", tmp_path)


def test_one_copy_of_a_gradient_is_waited_for(pool: RankPool, tmp_path: Path) -> None:
    """The copy of the smallest parameter, which has the hook. torch 2.9 waits for none."""
    for waited_for, refusal in pool.run(2, "tests.rank_programs.fsdp:offloaded_copies", tmp_path):
        assert len(waited_for) >= 11  # Gradients, and parameters that are gathered.
        assert sum(waited_for) == (0 if torch_before(2, 13) else 1)
        assert "2 ranks hold whole" in refusal
        assert "shard the model with FSDP2's fully_shard()" in refusal


@pytest.mark.quick(1)
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_averages_of_the_weights(kind: str, pool: RankPool, tmp_path: Path) -> None:
    pool.run(3, "tests.rank_programs.fsdp:averages", kind, tmp_path)


def test_averages_placed_otherwise_are_refused(pool: RankPool) -> None:
    for message in pool.run(2, "tests.rank_programs.fsdp:averaged_otherwise"):
        assert "'scale' is torch.float32 [1], (Shard(dim=0),)" in message
        assert "and torch.float32 [1], a plain tensor in the averaged model" in message


@pytest.mark.parametrize("kept", [None, False])
def test_a_forward_without_a_backward(kept: bool | None, pool: RankPool, tmp_path: Path) -> None:
    """An evaluation, then step() or restore(), then a forward: that sees what was written."""
    options = {} if kept is None else {"reshard_after_forward": kept}
    for message in pool.run(2, "tests.rank_programs.fsdp:gathered", tmp_path, options):
        assert message.startswith("ValueError: FSDP2 uses a gathered copy of parameter ")


@pytest.mark.parametrize("partition", ["auto", "flat", "by_parameter"])
def test_gradients_that_are_missing(partition: str, pool: RankPool) -> None:
    pool.run(3, "tests.rank_programs.fsdp:missing_gradients", partition)


@pytest.mark.quick(1)
@pytest.mark.parametrize("kind", ["ddp", "compiled"])
def test_wrapped_models(kind: str, pool: RankPool, tmp_path: Path) -> None:
    pool.run(2, "tests.rank_programs.fsdp:wrapped", kind, tmp_path)


def test_gradients_placed_otherwise_are_refused(pool: RankPool) -> None:
    first, second = pool.run(2, "tests.rank_programs.fsdp:placed_otherwise")
    for messages in (first, second):
        assert "gradient of 'cut' is (Partial(sum),)" in messages["partial"]
        assert "redistribute" in messages["partial"]
        assert "(Shard(dim=0),)" in messages["sharded"]
    assert first["partial on one"].startswith("ValueError: the gradient of 'cut'")
    assert second["partial on one"].startswith("PeerFailed: rank 0")


def test_all_ranks_compute_in_the_dtype_that_one_has_measured(pool: RankPool) -> None:
    pool.run(3, "tests.rank_programs.fsdp:measured_dtype")
