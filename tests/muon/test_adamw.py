"""The rule of AdamW: the bits of one reference in each implementation, and near to torch.optim."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import muon
import tierstore
from muon.kernels import cpu, rules
from tests.support import adamw, fake_triton
from tests.support.devices import needs_avx2

SPECIAL = [0.0, -0.0, 1e-45, -1e-40, 1.1e-38, 1e-20, 1e19, -2e19, 3.4e38, float("inf")]
NARROW = [torch.float32, torch.bfloat16]


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bits of float32 numbers, with one NaN."""
    return torch.where(tensor.isnan(), torch.nan, tensor).view(torch.int32)


@needs_avx2
@settings(max_examples=150)
@given(
    numel=st.integers(1, 60),
    seed=st.integers(0, 2**32 - 1),
    cuts=st.lists(st.integers(0, 60), max_size=3),
    special=st.lists(st.sampled_from(SPECIAL), max_size=12),
    dtypes=st.tuples(*[st.sampled_from(NARROW)] * 2),
    step=st.sampled_from([1, 2, 3, 1000, 12345, 10**6]),
    betas=st.sampled_from([(0.9, 0.999), (0.9, 0.95), (0.3, 0.5), (0.0, 0.0)]),
    eps=st.sampled_from([1e-8, 0.0, 1e-3]),
    weight_decay=st.sampled_from([0.1, 0.0]),
    maximize=st.booleans(),
)
def test_all_implementations_have_the_bits_of_the_reference(
    numel: int,
    seed: int,
    cuts: list[int],
    special: list[float],
    dtypes: Sequence[torch.dtype],
    step: int,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    maximize: bool,
) -> None:
    """Also in pieces, and of numbers that are subnormal, or whose squares are not finite."""
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.randn((4, numel), generator=generator)
    numbers *= 10.0 ** torch.randint(-30, 10, numbers.shape, generator=generator)
    flat = numbers.view(-1)
    places = torch.randperm(len(flat), generator=generator)[: len(special)]
    flat[places] = torch.tensor(special)[: len(places)]
    begin, grad, mean, mean_sq = numbers
    begin, mean_sq, grad = begin.to(dtypes[0]).float(), mean_sq.abs(), grad.to(dtypes[1])
    size, epsilon = adamw.corrected(step, lr=1e-3, betas=betas, eps=eps)
    expected = adamw.stepped(
        *(begin, grad, mean, mean_sq),
        size=size,
        epsilon=epsilon,
        decay=1 - 1e-3 * weight_decay,
        betas=betas,
        maximize=maximize,
    )
    bounds = sorted({0, numel, *(min(cut, numel) for cut in cuts)})
    for kernels in (cpu, fake_triton.load("muon.kernels.gpu"), None):
        values, *moments = (tensor.clone() for tensor in (begin, mean, mean_sq))
        narrow = values.to(dtypes[0])
        master: Any = values
        if dtypes[0] != torch.float32:
            master = tierstore.pages.RoundedMaster(values, narrow, lambda changed: None)
        with pytest.MonkeyPatch.context() as patch, np.errstate(all="ignore"):
            patch.setattr(rules, "kernels_for", lambda device, found=kernels: found)
            patch.setattr(cpu, "_PART_NUMEL", 16)
            for part in itertools.starmap(slice, itertools.pairwise(bounds)):
                rules.adamw_(
                    *([each[part]] for each in (master, grad, *moments)),
                    steps=[float(step)],
                    lr=1e-3,
                    betas=betas,
                    eps=eps,
                    weight_decay=weight_decay,
                    maximize=maximize,
                )
        for found, wanted in zip((values, *moments), expected, strict=True):
            assert torch.equal(bits(found), bits(wanted))
        if dtypes[0] != torch.float32:
            assert torch.equal(bits(narrow.float()), bits(expected[0].to(dtypes[0]).float()))


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.float64, 1e-14)])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("maximize", [False, True])
def test_a_training_is_near_to_torch_optim(
    dtype: torch.dtype, tolerance: float, weight_decay: float, maximize: bool
) -> None:
    generator = torch.Generator().manual_seed(0)
    begin = torch.randn((40, 50), generator=generator).to(dtype)
    ours, theirs = (torch.nn.Parameter(begin.clone()) for _ in range(2))
    options: dict[str, Any] = {"lr": 1e-3, "weight_decay": weight_decay, "maximize": maximize}
    optimizer = muon.Muon([{"params": [ours], "algorithm": "adamw", **options}])
    stock = torch.optim.AdamW([theirs], **options)
    for _ in range(100):
        ours.grad = theirs.grad = torch.randn(begin.shape, generator=generator).to(dtype)
        optimizer.step()
        stock.step()
    # Relative to the size of the weights, which is 1.
    torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)
    for state in ("exp_avg", "exp_avg_sq"):
        found, expected = optimizer.state[ours][state], stock.state[theirs][state]
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


def test_a_root_is_the_nearest_number() -> None:
    """For every mantissa of some exponents: subnormal numbers, even and odd ones."""
    mantissas = torch.arange(2**23, dtype=torch.int32)
    for exponent in (0, 1, 63, 64, 127, 128, 254):
        values = (mantissas + (exponent << 23)).view(torch.float32)
        assert np.array_equal(values.double().sqrt().float().numpy(), np.sqrt(values.numpy()))


def test_numbers_of_a_step_may_be_tensors() -> None:
    found = []
    for kind in (float, torch.tensor, lambda value: torch.tensor([value], dtype=torch.float64)):
        weight = torch.ones(5)
        rules.adamw_(
            *([weight], [torch.full((5,), 0.3)], [torch.zeros(5)], [torch.zeros(5)]),
            steps=[1.0],
            lr=kind(0.25),
            betas=(kind(0.875), kind(0.9375)),
            eps=kind(0.5),
            weight_decay=kind(0.125),
        )
        found.append(weight)
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


def test_a_power_is_near_to_the_c_library() -> None:
    for base, step in itertools.product((0.0, 0.5, 0.9, 0.95, 0.999), (1, 2, 3, 1000, 10**6 + 1)):
        power = rules._power(base, float(step))
        assert power == adamw.power(base, step)
        assert power == pytest.approx(base**step, rel=1e-11, abs=1e-300)
