"""Stochastic rounding: right in the mean, and a function of parameter, state, step and element."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import muon
import tierstore
from muon.kernels.rounding import Chances, rounded
from tests.support.encoded_training import bytes_of_second_step, groups_of, parameters_of, train
from tierstore.layout.encodings import RootState


def whole(shape: tuple[int, ...]) -> tierstore.pages.Chunk:
    return tierstore.pages.Chunk((0,) * len(shape), shape)


def bits(
    key: str, shape: tuple[int, ...], chunk: tierstore.pages.Chunk | None = None
) -> torch.Tensor:
    return Chances(key, shape, chunk or whole(shape)).bits(torch.device("cpu"))


def test_bits_are_uniform_and_independent() -> None:
    found = bits("w exp_avg 1.0", (400, 500)).double() / 2**16
    count = found.numel()
    # The standard deviation of a mean of uniform numbers is (12 n)^-0.5.
    assert abs(found.mean() - 0.5) < 5 * (12 * count) ** -0.5
    counts = torch.histc(found, bins=64, min=0, max=1)
    assert ((counts - count / 64).square() / (count / 64)).sum() < 64 + 5 * (2 * 64) ** 0.5
    for other in (
        bits("w exp_avg 2.0", (400, 500)),
        bits("w exp_avg_sq 1.0", (400, 500)),
        bits("v exp_avg 1.0", (400, 500)),
        found.roll(1, 0) * 2**16,
        found.roll(1, 1) * 2**16,
    ):
        pairs = torch.stack([found.flatten(), other.double().flatten()])
        assert abs(torch.corrcoef(pairs)[0, 1]) < 5 * count**-0.5


@pytest.mark.parametrize("shape", [(), (700,), (40, 300), (4, 5, 30), (0, 3)])
def test_a_chunk_has_the_bits_of_its_elements(shape: tuple[int, ...]) -> None:
    expected = bits("key", shape)
    assert expected.shape == shape
    if not expected.numel() or not shape:
        return
    offsets = tuple(size // 3 for size in shape)
    sizes = tuple(size - offset - 1 for size, offset in zip(shape, offsets, strict=True))
    chunk = tierstore.pages.Chunk(offsets, sizes)
    assert torch.equal(bits("key", shape, chunk), chunk.select(expected))
    rows = Chances("key", shape, chunk)[1:2].bits(torch.device("cpu"))
    assert torch.equal(rows, chunk.select(expected)[1:2])


@pytest.mark.parametrize(
    ("shape", "offsets", "sizes", "first"),
    [
        ((700,), (256,), (300,), (0, 256)),
        ((40, 300), (7, 0), (9, 300), (7, 0)),
        ((3, 5, 300), (1, 0, 256), (2, 5, 44), (5, 256)),
        ((3, 5, 300), (2, 1, 0), (1, 3, 300), (11, 0)),
        ((3, 5, 300), (1, 0, 0), (2, 3, 300), None),
        ((3, 1, 5, 300), (1, 0, 0, 0), (2, 1, 5, 300), (5, 0)),
        ((), (), (), None),
    ],
)
def test_the_first_of_consecutive_rows(
    shape: tuple[int, ...],
    offsets: tuple[int, ...],
    sizes: tuple[int, ...],
    first: tuple[int, int] | None,
) -> None:
    assert Chances("key", shape, tierstore.pages.Chunk(offsets, sizes)).first == first


def test_bfloat16_is_right_in_the_mean_and_next_to_the_value() -> None:
    value = 1 + 0.3 * 2**-7
    values = torch.full((1000, 400), value)
    state = torch.zeros(1000, 400, dtype=torch.bfloat16)
    rounded(state, "key", state.shape, whole((1000, 400))).write(values)
    assert set(state.unique().tolist()) == {1.0, 1 + 2**-7}
    assert abs((state.double().mean() - 1) * 2**7 - 0.3) < 5 * (0.3 * 0.7 / 400_000) ** 0.5
    exact = torch.tensor([[1.0, -2.5, 0.0, float("inf"), float("nan")]])
    rounded(state[:1, :5], "key", (1, 5), whole((1, 5))).write(exact)
    assert torch.equal(state[:1, :4], exact[:, :4].bfloat16())
    assert state[0, 4].isnan()


@pytest.mark.parametrize("ratio", [0.9, 0.01, 1e-4, 1e-9, 1e-11])
def test_roots_are_right_in_the_mean(ratio: float) -> None:
    """One large value in each block, so that the others are a part of the scale."""
    values = torch.full((1000, 256), ratio)
    values[:, 0] = 1.0
    state = RootState("v", torch.zeros(1000, 256, dtype=torch.uint8), torch.zeros(1000, 1))
    rounded(state, "key", values.shape, whole((1000, 256))).write(values)
    read = state.read()
    assert (read > 0).all()
    torch.testing.assert_close(read[:, 0], values[:, 0], rtol=1e-6, atol=0)
    low, high = read[:, 1:].min().double(), read[:, 1:].max().double()
    if ratio > 255**-4:
        deviation = (high - low) / 2
        assert low <= ratio * (1 + 1e-6)
        assert high >= ratio * (1 - 1e-6)
        assert (
            abs(read[:, 1:].double().mean() - ratio) < 5 * deviation / 255_000**0.5 + 1e-6 * ratio
        )
    else:
        assert low == high  # The smallest number above 0.
        assert high == pytest.approx(255**-4, rel=1e-6)


def test_zeros_stay_zeros() -> None:
    state = RootState("v", torch.ones(3, 300, dtype=torch.uint8), torch.ones(3, 2))
    values = torch.zeros(3, 300)
    values[1, 7] = 4.0
    state.write(values)
    torch.testing.assert_close(state.read(), values, rtol=1e-6, atol=0)


@pytest.mark.long
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8])
def test_second_moments_do_not_stall(dtype: torch.dtype) -> None:
    """With beta2 = 0.999, gradients that became ten times smaller are followed in the mean.

    A step changes a second moment by a thousandth of it: bfloat16 rounds that away, to the nearest.
    """
    parameter = torch.nn.Parameter(torch.zeros(64, 512, dtype=torch.bfloat16))
    group = {"params": [("w", parameter)], "algorithm": "adamw", "betas": (0.9, 0.999)}
    optimizer = muon.Muon([group], lr=0.0, moments_dtype=dtype)
    generator = torch.Generator().manual_seed(0)
    expected = torch.zeros(64, 512)
    for step in range(1200):
        scale = torch.linspace(0.1, 1.0, 512) if step < 200 else torch.linspace(1.0, 0.1, 512)
        parameter.grad = (scale * torch.randn(64, 512, generator=generator)).bfloat16()
        optimizer.step()
        expected.mul_(0.999).addcmul_(parameter.grad.float(), parameter.grad.float(), value=0.001)
    found = optimizer.state[parameter]["exp_avg_sq"].float()
    # Each of the 8 columns together is a mean of 512 elements, each wrong by a fifth at most.
    means = found.view(64, 64, 8).mean((0, 2)) / expected.view(64, 64, 8).mean((0, 2))
    assert (means - 1).abs().max() < 5 * 0.2 / 512**0.5
    spread = (found / expected - 1).square().mean().sqrt()
    assert spread < 0.25


def test_states_and_dtypes() -> None:
    parameters = parameters_of()
    optimizer = muon.Muon(groups_of(parameters), moments_dtype=torch.int8)
    train(parameters, optimizer, range(1))
    stored = {
        paged.name: {tensor.name for tensor in paged.spec.stored}
        for group in optimizer.paged_groups()
        for paged in group.parameters
    }
    assert {"exp_avg_int8_root", "exp_avg_scale", "exp_avg_sq_uint8_root"} < stored["embedding"]
    assert {"exp_avg", "exp_avg_sq"} < stored["bias"]
    states = optimizer.store.pages.read_states()
    assert {states["embedding"][name].dtype for name in ("exp_avg", "exp_avg_sq")} == {
        torch.float32
    }
    narrow = muon.Muon(groups_of(parameters_of()), moments_dtype=torch.bfloat16)
    assert {
        dict(paged.states).get("exp_avg_sq")
        for group in narrow.paged_groups()
        for paged in group.parameters
    } == {None, torch.bfloat16}


def test_other_dtypes_are_refused() -> None:
    with pytest.raises(ValueError, match=r"moments_dtype must be one of .*, got torch.float16"):
        muon.Muon(groups_of(parameters_of()), moments_dtype=torch.float16)


def test_a_step_of_adamw_moves_the_ideal_bytes(tmp_path: Path) -> None:
    """Read: the remainder, 2 bytes, and a byte of each moment; written: the parameter as well."""
    parameter = torch.nn.Parameter(torch.zeros(2048, 2048, dtype=torch.bfloat16))
    group = {"params": [("w", parameter)], "algorithm": "adamw"}
    with tierstore.TierStore(tmp_path / "run", host_memory="64MiB", buffers=2) as store:
        optimizer = muon.Muon([group], store=store, master="remainder", moments_dtype=torch.int8)
        read, written = bytes_of_second_step(optimizer, parameter)
    assert read == pytest.approx(4 * parameter.numel(), rel=0.02)
    assert written == pytest.approx(6 * parameter.numel(), rel=0.02)
