"""Orthogonalization of matrices in batches."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

import muon
from muon.newton_schulz import numel_needed, orthogonalize_all
from tests.support.devices import needs_cuda

SHAPES = [(20, 30), (7, 7), (20, 30), (30, 20), (1, 5), (7, 7), (20, 30)]


def matrices(dtype: torch.dtype, device: str = "cpu") -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    found = [torch.randn(shape, generator=generator) for shape in SHAPES]
    found[1].zero_()
    return [matrix.to(dtype).to(device) for matrix in found]


def error(update: torch.Tensor, exact: torch.Tensor) -> float:
    return float((update.double() - exact).norm() / exact.norm().clamp(min=1))


@pytest.mark.parametrize("shape", [(20, 30), (30, 20), (7, 7), (1, 5)])
@pytest.mark.parametrize(
    # A few rounding errors of each dtype, amplified by five steps.
    ("dtype", "tolerance"),
    [(torch.float64, 1e-12), (torch.float32, 1e-4), (torch.bfloat16, 0.1)],
)
def test_a_batch_equals_single_matrices(
    shape: tuple[int, int], dtype: torch.dtype, tolerance: float
) -> None:
    batch = torch.randn(4, *shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    batch[1] = 0
    batch[2] *= 1000  # Matrices are divided by their own norms.
    exact = [muon.orthogonalize_(matrix.double()) for matrix in batch]
    updates = muon.orthogonalize_(batch.clone())
    assert (updates.shape, updates.dtype) == (batch.shape, dtype)
    for update, expected in zip(updates, exact, strict=True):
        assert error(update, expected) < tolerance


def test_a_nan_stays_with_its_matrix() -> None:
    batch = torch.randn(3, 6, 8, generator=torch.Generator().manual_seed(1))
    batch[1, 2, 3] = torch.nan
    updates = muon.orthogonalize_(batch)
    assert updates[1].isnan().all()
    assert updates[[0, 2]].isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_without_batches_updates_are_independent(dtype: torch.dtype) -> None:
    expected = [muon.orthogonalize_(matrix, steps=4) for matrix in matrices(dtype)]
    updates = orthogonalize_all(matrices(dtype), batched=False, steps=4)
    assert all(map(torch.equal, updates, expected))
    assert orthogonalize_all([], batched=False) == []


class Products(TorchDispatchMode):
    """Records the shape of the first factor of each batched product."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: set[tuple[int, ...]] = set()

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is torch.ops.aten.bmm.default:
            self.shapes.add(tuple(args[0].shape))
        return func(*args, **(kwargs or {}))


def test_equal_shapes_make_a_batch() -> None:
    """The meta device computes shapes only."""
    with Products() as products:
        updates = orthogonalize_all(matrices(torch.float32, "meta"), batched=True)
    assert [tuple(update.shape) for update in updates] == SHAPES
    # The two tall products are of transposed views. Zeros fill up all batches.
    assert products.shapes == {(8, 20, 30), (8, 7, 7), (8, 1, 5)}
    # A batch keeps the order of the arguments.
    assert [updates[index].storage_offset() for index in (0, 2, 6)] == [0, 600, 1200]
    large = [torch.empty(512, 1000, device="meta", dtype=torch.bfloat16) for _ in range(5)]
    with Products() as products:
        orthogonalize_all([*large, torch.empty(1000, 1000, device="meta")], batched=True)
    # Batches have two matrices of half a million elements; one of a million is alone.
    assert products.shapes == {(2, 512, 1000)}


@given(
    st.lists(st.sampled_from([(4, 6), (6, 4), (24, 40), (64, 64)]), min_size=1, max_size=12),
    st.sampled_from([torch.float32, torch.bfloat16]),
    st.randoms(use_true_random=False),
)
def test_an_update_does_not_depend_on_what_is_in_its_batch(
    shapes: list[tuple[int, int]], dtype: torch.dtype, random: Random
) -> None:
    generator = torch.Generator().manual_seed(random.randrange(2**32))
    given_ = [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]
    updates = orthogonalize_all([matrix.clone() for matrix in given_], batched=True)
    order = random.sample(range(len(given_)), random.randrange(1, len(given_) + 1))
    others = orthogonalize_all([given_[index].clone() for index in order], batched=True)
    for index, other in zip(order, others, strict=True):
        assert torch.equal(other, updates[index])


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=needs_cuda)])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-3), (torch.bfloat16, 0.1)])
def test_batched_updates_keep_their_order(
    dtype: torch.dtype, tolerance: float, device: str
) -> None:
    exact = [muon.orthogonalize_(matrix.double()) for matrix in matrices(dtype)]
    updates = orthogonalize_all(matrices(dtype, device), batched=True)
    for update, expected in zip(updates, exact, strict=True):
        assert error(update.cpu(), expected) < tolerance


ONE_BATCH = """
import torch
from muon.newton_schulz import orthogonalize_all
from tests.support.kernel import anonymous_peak, reset_peak

torch.set_num_threads(1)
orthogonalize_all([torch.ones(64, 64)], batched=False)
reset_peak()
before = anonymous_peak()
orthogonalize_all([torch.full({shape}, 0.5)], batched=False)
print(anonymous_peak() - before)
"""


@pytest.mark.long
@pytest.mark.parametrize("shape", [(256, 1024), (512, 2048), (1024, 1024), (2048, 768)])
def test_the_memory_needed_equals_the_memory_of_a_process(shape: tuple[int, int]) -> None:
    """The linear algebra of the CPU packs different amounts, by less than a factor of two."""
    found = subprocess.run(
        [sys.executable, "-c", ONE_BATCH.format(shape=shape)],
        check=True,
        capture_output=True,
        cwd=Path(__file__).parents[2],
    )
    needed = 4 * numel_needed(shape, 1, on_gpu=False)
    assert needed / 2 < int(found.stdout) < needed * 2


@needs_cuda
@pytest.mark.parametrize(
    ("shape", "count"), [((512, 2048), 1), ((512, 512), 4), ((64, 256), 8), ((500, 2045), 1)]
)
def test_the_memory_needed_on_a_gpu(shape: tuple[int, int], count: int) -> None:
    def given() -> list[torch.Tensor]:
        return [torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(count)]

    orthogonalize_all(given(), batched=True)  # Loads kernels and their workspace.
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_stats()["requested_bytes.all.current"]
    orthogonalize_all(given(), batched=True)
    needed = 2 * numel_needed(shape, count, on_gpu=True)
    # What was asked for: the allocator hands out blocks that may be larger.
    peak = torch.cuda.memory_stats()["requested_bytes.all.peak"]
    assert peak - before == pytest.approx(needed, rel=0.05)
