"""Encodings of states: what is read is what was written, as far as the encoding says."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.profiler import ProfilerActivity, profile

from tests.support.devices import needs_avx2
from tierstore.layout import encoding_kernels
from tierstore.layout.encodings import EncodedState, RootState, SplitMaster

# The largest numbers, zeros, infinities, NaNs of few bits, ties, and numbers below the normal ones.
AWKWARD = [
    *(0x7F7FFFFF, 0xFF7FFFFF, 0x7F7F8000, 0x7F7F7FFF, 0x7F800000, 0xFF800000, 0, 0x80000000),
    *(0x7F800001, 0x7F808000, 0x7FFFFFFF, 0xFFFFFFFF, 0x7FC00000, 0x3F808000, 0x3F7F8000),
    *(1, 0x7FFF, 0x8000, 0xFFFF, 0x80008000, 0x8000FFFF, 0x00800000),
]
BITS = st.lists(st.one_of(st.sampled_from(AWKWARD), st.integers(0, 2**32 - 1)), min_size=1)


def masters(bits: list[int]) -> torch.Tensor:
    return torch.from_numpy(np.array(bits, np.uint32).view(np.float32).copy())


def split(values: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    parameter = torch.empty(values.shape, dtype=torch.bfloat16)
    remainder = torch.empty(values.shape, dtype=dtype)
    SplitMaster(parameter, remainder).write(values)
    return parameter, remainder


def bits_of(values: torch.Tensor) -> np.ndarray:
    found: np.ndarray = values.numpy().view(np.uint32)
    return found


@given(BITS)
def test_a_remainder_of_16_bits_loses_nothing(bits: list[int]) -> None:
    values = masters(bits)
    read = SplitMaster(*split(values, torch.int16)).read()
    is_nan = values.isnan()
    assert np.array_equal(bits_of(read[~is_nan]), bits_of(values[~is_nan]))
    assert read[is_nan].isnan().all()
    assert torch.equal(read[is_nan].signbit(), values[is_nan].signbit())


@given(BITS)
def test_the_parameter_is_the_master_rounded_with_halves_away_from_zero(bits: list[int]) -> None:
    values = masters(bits)
    parameter, remainder = split(values, torch.int16)
    for value, rounded, rest in zip(
        values.tolist(), parameter.tolist(), remainder.tolist(), strict=True
    ):
        if value != value:
            assert rounded != rounded
            continue
        (magnitude,) = bits_of(torch.tensor([abs(value)])).tolist()
        # The two numbers of 16 bits around it, and the nearer, or the larger, of them.
        below = magnitude >> 16
        up = (magnitude & 0xFFFF) >= 0x8000
        (expected,) = masters([(below + up) << 16]).tolist()
        assert abs(rounded) == expected
        assert (rest < 0) == up  # The sign says whether it was rounded up.


@given(BITS)
def test_a_remainder_of_8_bits_rounds_to_16_significant_bits(bits: list[int]) -> None:
    values = masters(bits)
    values = values[values.isfinite() & (values.abs() < 3.3e38)]
    read = SplitMaster(*split(values, torch.int8)).read()
    error = (read.double() - values.double()).abs()
    smallest = 2.0**-126  # Below it, numbers have a fixed distance.
    assert (error <= 2.0**-16 * values.double().abs().clamp_min(smallest)).all()
    again = SplitMaster(*split(read, torch.int8)).read()
    assert torch.equal(again, read)


@pytest.mark.parametrize("dtype", [torch.int16, torch.int8])
def test_parts_are_read_and_written(dtype: torch.dtype) -> None:
    values = torch.randn(6, 10, generator=torch.Generator().manual_seed(0))
    state = SplitMaster(*split(values, dtype))
    whole = state.read()
    part = (slice(1, 5, 2), slice(3, 7))
    assert torch.equal(state[part].read(), whole[part])
    state[part].write(torch.ones(2, 4))
    expected = whole.clone()
    expected[part] = 1
    assert torch.equal(state.read(), expected)


@pytest.mark.parametrize("shape", [(), (0, 4), (3,)])
def test_any_shape(shape: tuple[int, ...]) -> None:
    values = torch.full(shape, 1 / 3)
    assert torch.equal(SplitMaster(*split(values, torch.int16)).read(), values)


def root_state(values: torch.Tensor, dtype: torch.dtype = torch.int8) -> RootState:
    blocks = (*values.shape[:-1], -(-values.shape[-1] // 256))
    state = RootState("m", torch.zeros(values.shape, dtype=dtype), torch.zeros(blocks))
    state.write(values)
    return state


@given(st.integers(0, 3), st.integers(1, 700), st.integers(0, 99), st.floats(-30, 37))
def test_roots_with_a_sign_are_the_formula(
    rows: int, columns: int, seed: int, exponent: float
) -> None:
    """Against numpy in float64, block by block: the nearest of 255 values."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(rows, columns, generator=generator) * 10**exponent
    read = root_state(values).read().numpy().astype(np.float64)
    powers_of_sign = np.sign(np.arange(-127, 128)) * np.arange(-127.0, 128.0) ** 4 / 127.0**4
    for start in range(0, columns, 256):
        block = values[:, start : start + 256].numpy().astype(np.float64)
        largest = np.abs(block).max(-1, keepdims=True, initial=0)
        distances = np.abs(block[..., None] - powers_of_sign * largest[..., None])
        error = np.abs(read[:, start : start + 256] - block)
        assert (error <= distances.min(-1) + np.abs(block) * 2**-20).all()


def test_roots_keep_what_they_can_hold() -> None:
    numbers = torch.arange(-127, 128, dtype=torch.float32)
    values = (numbers**2) ** 2 * numbers.sign() * 0.25
    state = root_state(values[None])
    assert torch.equal(state.read(), values[None])
    assert torch.equal(state.stored["m_int8_root"], numbers[None].to(torch.int8))
    assert state.stored["m_scale"].item() == 0.25


def dynamic_codes() -> np.ndarray:
    """Return the 256 values of bitsandbytes' dynamic codes, from Dettmers et al. 2022, section 2.

    A sign, an exponent of ten in unary, and a fraction of the bits that are left: the middles of
    equal parts of 0.1 to 1. Checked with create_dynamic_map() of bitsandbytes 0.49.
    """
    edges = [np.linspace(0.1, 1, 2**i + 1) for i in range(7)]
    sizes = [10.0 ** (i - 6) * (edge[:-1] + edge[1:]) / 2 for i, edge in enumerate(edges)]
    found: np.ndarray = np.sort(np.concatenate([*sizes, *(-size for size in sizes), [0, 1]]))
    return found


@pytest.mark.parametrize(("outlier", "most"), [(1.0, 0.012), (1000.0, 0.05)])
def test_an_element_does_not_spoil_its_neighbours(outlier: float, most: float) -> None:
    """One column of 256 is larger: the other columns err less than with other 8-bit codes.

    Whole numbers times a scale err by 0.7% without such a column, and by 83% with it.
    """
    values = torch.randn(512, 256, generator=torch.Generator().manual_seed(0)).double()
    values[:, 7] *= outlier
    block, codes = values.numpy(), dynamic_codes()
    largest = np.abs(block).max(-1, keepdims=True)
    middles = (codes[:-1] + codes[1:]) / 2
    theirs = codes[np.searchsorted(middles, block / largest)] * largest
    ours = root_state(values.float()).read().double().numpy()
    others = np.delete(np.arange(256), 7)
    error, beside = (
        np.abs(found - block)[:, others].sum() / np.abs(block[:, others]).sum()
        for found in (ours, theirs)
    )
    assert error < beside
    assert error < most


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_number_that_is_not_finite_makes_its_block_nan(value: float) -> None:
    values = torch.ones(2, 600)
    values[0, 300] = value
    state = root_state(values)
    expected = torch.zeros(2, 600, dtype=torch.bool)
    expected[0, 256:512] = True
    assert torch.equal(state.read().isnan(), expected)
    assert torch.equal(state.read()[~expected], values[~expected])
    state.write(torch.zeros(2, 600))
    assert torch.equal(state.read(), torch.zeros(2, 600))


def test_roots_are_read_and_written_by_blocks() -> None:
    values = torch.randn(6, 600, generator=torch.Generator().manual_seed(0))
    state = root_state(values)
    whole = state.read()
    for part in (
        (slice(1, 5, 2), slice(256, 600)),
        (slice(0, 6), slice(0, 512)),
        slice(2, 4),
    ):
        assert torch.equal(state[part].read(), whole[part])
        state[part].write(values[part])
    assert torch.equal(state.read(), whole)
    state[:, 256:512].write(torch.zeros(6, 256))
    assert not state.read()[:, 256:512].any()
    assert torch.equal(state.read()[:, 512:], whole[:, 512:])


def test_blocks_are_selected_as_from_a_tensor() -> None:
    values = torch.randn(3, 2, 700, generator=torch.Generator().manual_seed(0))
    state = root_state(values)
    for part in ((..., slice(256, 512)), (slice(0, 2), ...), slice(1, 3), ..., (slice(1, 2),)):
        assert torch.equal(state[part].read(), state.read()[part])
    line = root_state(values[0, 0])
    assert torch.equal(line[256:512].read(), line.read()[256:512])
    for cut in (line.__getitem__, lambda part: state[..., part]):
        with pytest.raises(ValueError, match=r"columns 100 to 512 in steps of 1 cut a block"):
            cut(slice(100, 512))


def test_remainders_of_elements_that_were_changed_are_dropped() -> None:
    parameter, remainder = split(torch.full((3,), 1 / 3), torch.int16)
    before = parameter.clone()
    parameter[1] = 2.0
    state = SplitMaster(parameter, remainder)
    assert bool(state.drop_remainders(before))
    assert torch.equal(state.read(), torch.tensor([1 / 3, 2.0, 1 / 3]))
    assert not bool(state.drop_remainders(parameter.clone()))


def powers(last: int) -> np.ndarray:
    """Return the sizes in a block of scale 1: whole numbers to the fourth."""
    squares = np.arange(last + 1, dtype=np.float32) ** 2
    found: np.ndarray = squares * squares
    return found


def root_numbers(sizes: np.ndarray, chances: np.ndarray | None, last: int) -> np.ndarray:
    """Return the numbers of sizes by the definition, without a root."""
    bounds = powers(last)
    below = np.clip(np.searchsorted(bounds, sizes, "right") - 1, 0, last - 1)
    parts = (sizes - bounds[below]) / (bounds[below + 1] - bounds[below])
    found: np.ndarray = below + (parts > (np.float32(0.5) if chances is None else chances))
    return found


@pytest.mark.parametrize("by_kernel", [pytest.param(True, marks=needs_avx2), False])
@pytest.mark.parametrize("chance", [None, 0.0, 0.5, 65535 / 65536])
@pytest.mark.parametrize(
    ("dtype", "last", "sign"), [(torch.uint8, 255, 1), (torch.int8, 127, 1), (torch.int8, 127, -1)]
)
def test_a_root_beside_a_whole_number_is_the_formula(
    dtype: torch.dtype,
    last: int,
    sign: int,
    chance: float | None,
    by_kernel: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Some roots of torch are a unit off, which must not change what they are cut off to."""
    if not by_kernel:
        monkeypatch.setattr(encoding_kernels, "fit", lambda *tensors: False)
    steps = np.arange(-8, 9, dtype=np.int32)[:, None]
    near = (powers(last)[1:].view(np.int32) + steps).view(np.float32)
    sizes = np.minimum(near, powers(last)[-1]).T.copy()  # (last, 17)
    sizes[:, -1] = powers(last)[-1]  # So the scale is 1.
    state = RootState("v", torch.zeros(sizes.shape, dtype=dtype), torch.zeros(last, 1))
    chances = None if chance is None else np.full(sizes.shape, chance, np.float32)
    values = torch.from_numpy(sign * sizes)
    state.write(values, None if chances is None else torch.from_numpy(chances))
    numbers, scales = state.stored.values()
    assert (scales == 1).all()
    expected = root_numbers(sizes, chances, last)
    if dtype == torch.uint8:
        expected = np.maximum(expected, 1)  # Adam divides by the root of it.
    assert np.array_equal(numbers.numpy(), sign * expected)


def encoded_state(kind: str, shape: tuple[int, ...]) -> EncodedState:
    """Return a state with zeros."""
    blocks = torch.zeros((*shape[:-1], -(-shape[-1] // 256)))
    if kind in ("int8", "uint8"):
        return RootState("m", torch.zeros(shape, dtype=getattr(torch, kind)), blocks)
    remainder = torch.zeros(shape, dtype=torch.int8 if kind == "split 8" else torch.int16)
    return SplitMaster(torch.zeros(shape, dtype=torch.bfloat16), remainder)


@pytest.mark.quick(2)
@needs_avx2
@pytest.mark.parametrize("kind", ["int8", "uint8", "split 8", "split 16"])
@settings(max_examples=200)
@given(
    rows=st.integers(0, 5),
    columns=st.integers(1, 700),
    seed=st.integers(0, 2**32 - 1),
    exponent=st.floats(-44, 37),
    awkward=st.lists(st.sampled_from(AWKWARD), max_size=5),
    is_random=st.booleans(),
)
def test_kernels_have_the_bits_of_operations(
    kind: str,
    rows: int,
    columns: int,
    seed: int,
    exponent: float,
    awkward: list[int],
    is_random: bool,
) -> None:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn((rows, columns), generator=generator) * 10**exponent
    if kind == "uint8":
        values.square_()
    flat = values.view(-1)
    count = min(len(awkward), values.numel())
    if count:
        flat[torch.randperm(len(flat), generator=generator)[:count]] = masters(awkward)[:count]
    chances = None
    if is_random and "split" not in kind:
        numbers = torch.randint(0, 1 << 16, values.shape, generator=generator)
        chances = numbers.to(torch.float32) / (1 << 16)
    found = []
    for fit in (encoding_kernels.fit, lambda *tensors: False):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(encoding_kernels, "fit", fit)
            state = encoded_state(kind, (rows, columns))
            state.write(values, chances)
            found.append([*(tensor.clone() for tensor in state.stored.values()), state.read()])
    for kernel, operations in zip(*found, strict=True):
        assert np.array_equal(
            kernel.contiguous().view(torch.uint8).numpy(),
            operations.contiguous().view(torch.uint8).numpy(),
        )


@needs_avx2
@pytest.mark.parametrize("kind", ["int8", "uint8", "split 8", "split 16"])
def test_kernels_run(kind: str) -> None:
    values, state = torch.ones(3, 300), encoded_state(kind, (3, 300))
    chances = None if "split" in kind else torch.zeros(3, 300)
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        state.write(values, chances)
        read = state.read()
    assert torch.equal(read, values)
    assert {event.key for event in profiled.key_averages()} == {"aten::empty"}


@needs_avx2
def test_tensors_that_kernels_do_not_take() -> None:
    """Transposed ones, chances of another shape, and other dtypes."""
    values = torch.randn(300, 256, generator=torch.Generator().manual_seed(0))
    state = encoded_state("int8", (300, 256))
    state.write(values.T.contiguous().T, torch.full((256,), 0.5))
    expected = encoded_state("int8", (300, 256))
    expected.write(values, torch.full((300, 256), 0.5))
    assert torch.equal(state.read(), expected.read())
    state.write(values, torch.zeros(300, 256).double())
    expected.write(values, torch.zeros(300, 256))
    assert torch.equal(state.read(), expected.read())
    state.write(values.double())
    expected.write(values)
    assert torch.equal(state.read(), expected.read())
    with pytest.raises(RuntimeError):
        state.write(values[:299])


@pytest.mark.parametrize("remainder", [torch.int16, torch.int8])
def test_a_master_whose_parameter_is_on_another_device(remainder: torch.dtype) -> None:
    """As outside of a step, where pages are elsewhere than parameters."""
    parameter = torch.ones(3, 4, dtype=torch.bfloat16)
    of_page = torch.zeros(3, 4, dtype=remainder, device="meta")
    master = SplitMaster(parameter, of_page)
    assert master.read().device.type == "meta"
    before = torch.ones(3, 4, dtype=torch.bfloat16, device="meta")
    assert master.drop_remainders(before).device.type == "meta"
