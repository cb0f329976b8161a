"""Kernels for states in fewer bytes on a GPU, run as Python: the bits of the operations.

States are decoded and encoded by operations of torch, and stepped as torch steps on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from muon.kernels import rounding, rules
from tests.muon.test_kernels import FEWER_BYTES, train
from tests.support import fake_triton, gpu_rules
from tierstore.layout import encoding_kernels
from tierstore.pages import Chunk, RootState, RoundedMaster, SplitMaster

NAME = "muon.kernels.gpu_encoded"
FINITE = [0.0, -0.0, 1e-40, -1e-42, 3.4e38, -3.4e38, 1e-8]
MASTERS = ["float32", "rounded bfloat16", "rounded float16", "split 16", "split 8"]
MOMENTS = ["float32", "bfloat16", "int8"]
SHAPES = [(5, 300), (3, 256), (9, 513), (1, 1), (700,), (2, 3, 130), (1030, 3)]


@pytest.fixture(scope="module")
def kernels() -> ModuleType:
    return fake_triton.load(NAME)


@pytest.fixture(autouse=True)
def _operations(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(encoding_kernels, "fit", lambda *tensors: False)
    monkeypatch.setattr(rounding, "kernels_for", lambda device: None)
    with np.errstate(all="ignore"):
        yield


def numbers(shape: Sequence[int], seed: int, special: Sequence[float] = FINITE) -> torch.Tensor:
    """Return normal numbers of many sizes, special ones, a row of zeros and one of tiny numbers."""
    generator = torch.Generator().manual_seed(seed)
    made = torch.randn(tuple(shape), generator=generator)
    made *= 10.0 ** torch.randint(-4, 3, made.shape, generator=generator)
    rows = made.view(-1, made.shape[-1])
    if len(rows) > 3:
        rows[-1] = 0
        rows[-2] *= 1e-36  # Its scale would be below the normal numbers.
    flat = made.view(-1)
    places = torch.linspace(0, len(flat) // 2, 2 * len(special)).long()[seed % 2 :: 2]
    flat[places] = torch.tensor(special)
    return made


def gradients(shape: Sequence[int], seed: int) -> torch.Tensor:
    """Return numbers, with an infinity in the first row, and a NaN of a GPU in the last."""
    made = numbers(shape, seed)
    rows = made.view(-1, made.shape[-1])
    rows[0, 0], rows.view(torch.int32)[-1, -1] = float("inf"), 0x7FFFFFFF
    return made


def roots(dtype: torch.dtype, shape: Sequence[int]) -> RootState:
    blocks = (*shape[:-1], -(-shape[-1] // 256))
    return RootState("m", torch.zeros(tuple(shape), dtype=dtype), torch.zeros(blocks))


def split(bits: int, shape: Sequence[int]) -> SplitMaster:
    remainder = torch.zeros(tuple(shape), dtype=torch.int8 if bits == 8 else torch.int16)
    return SplitMaster(torch.zeros(tuple(shape), dtype=torch.bfloat16), remainder)


class Case:
    """A master and its moments, made anew for each who steps them."""

    def __init__(
        self, master: str, moments: str, shape: Sequence[int], chunk: Chunk | None
    ) -> None:
        self.noted: list[torch.Tensor] = []
        chunk = chunk or Chunk((0,) * len(shape), tuple(shape))
        sizes = chunk.sizes
        values = numbers(sizes, 1)
        values.view(-1)[-1:] = float("nan")
        self.parameter: torch.Tensor | None = None
        if master.startswith("split"):
            self.master: Any = split(int(master.split()[1]), sizes)
            self.master.write(values)
            # A parameter that a program changed, so that the sum with the remainder is a NaN.
            parameter, remainder = self.master.stored.values()
            parameter.view(-1)[0], remainder.view(-1)[0] = 0.0, -1
        else:
            self.master = values
        if master.startswith("rounded"):
            self.parameter = values.to(getattr(torch, master.split()[1]))
            self.parameter.view(-1)[::7] += 1
        self.moments: list[Any] = []
        names = ("exp_avg", "exp_avg_sq")
        for name, dtype, value in zip(
            names,
            (torch.int8, torch.uint8),
            (numbers(sizes, 2), numbers(sizes, 3).abs()),
            strict=True,
        ):
            state: Any = value
            if moments == "int8":
                state = roots(dtype, sizes)
                rows = value.view(-1, sizes[-1])
                rows[len(rows) // 2, 0] = float("inf")  # Its block is NaN.
                state.write(value)
            elif moments == "bfloat16":
                state = value.bfloat16()
            self.moments.append(rounding.rounded(state, f"w {name} 3.0", shape, chunk))

    def stored(self) -> list[torch.Tensor]:
        """Return all tensors that a step changes."""
        found = [] if self.parameter is None else [self.parameter]
        for state in (self.master, *self.moments):
            if isinstance(state, rounding.Rounded):
                state = state.state
            found += [state] if isinstance(state, torch.Tensor) else state.stored.values()
        return found


def assert_same_bits(found: torch.Tensor, expected: torch.Tensor) -> None:
    """NaNs are one number."""
    if found.is_floating_point():
        found, expected = (torch.where(x.isnan(), torch.nan, x) for x in (found, expected))
    assert found.dtype == expected.dtype
    assert np.array_equal(*(x.reshape(-1).view(torch.uint8).numpy() for x in (found, expected)))


def check_adamw(
    kernels: ModuleType,
    *,
    master: str = "split 8",
    moments: str = "int8",
    shape: Sequence[int] = (5, 300),
    chunk: Chunk | None = None,
    of_grad: torch.dtype = torch.bfloat16,
    beta1: float = 0.9,
    maximize: bool = False,
    decay: float = 1 - 1e-4,
    beta2: float = 0.95,
    epsilon: float = 1e-8,
) -> None:
    options: dict[str, Any] = {"decay": decay, "betas": (beta1, beta2), "maximize": maximize}
    options |= {"sizes": [1e-3], "epsilons": [epsilon]}
    ours, theirs = (Case(master, moments, shape, chunk) for _ in range(2))
    grad = gradients(ours.stored()[0].shape, 4).to(of_grad)
    before = grad.clone()
    states = [ours.master, *ours.moments]
    assert kernels.fit([grad], states, ours.parameter, has_master=True)
    launches = kernels._adamw.launches
    [changed] = kernels.adamw_(
        *([ours.master], [ours.parameter], [grad], *([state] for state in ours.moments)), **options
    )
    assert kernels._adamw.launches == launches + 1
    assert kernels._adamw.options == {"enable_fp_fusion": False}
    with rules.opened([theirs.master, *theirs.moments]) as [own, *values]:
        [expected_changed] = gpu_rules.adamw_(
            *([own], [theirs.parameter], [grad], *([value] for value in values)), **options
        )
    assert_same_bits(grad, before)
    for found, expected in zip(ours.stored(), theirs.stored(), strict=True):
        assert_same_bits(found, expected)
    assert (changed is None) == (ours.parameter is None)
    assert bool(changed) == bool(expected_changed)


def check_momentum(
    kernels: ModuleType,
    *,
    shape: Sequence[int] = (5, 300),
    of_grad: torch.dtype = torch.bfloat16,
    momentum: float = 0.95,
    nesterov: bool = True,
    maximize: bool = False,
) -> None:
    options = {"momentum": momentum, "nesterov": nesterov, "maximize": maximize}
    grad, out = gradients(shape, 1).to(of_grad), torch.zeros(tuple(shape), dtype=of_grad)
    ours, theirs = roots(torch.int8, shape), roots(torch.int8, shape)
    for state in (ours, theirs):
        state.write(numbers(shape, 2))
    assert kernels.fit([grad, out], [ours], None, has_master=False)
    kernels.momentum_(grad, ours, out, **options)
    assert kernels._momentum.options == {"enable_fp_fusion": False}
    expected_out = torch.zeros_like(out)
    with rules.opened([theirs]) as [values]:
        gpu_rules.momentum_(grad, values, expected_out, **options)
    for found, expected in zip(ours.stored.values(), theirs.stored.values(), strict=True):
        assert_same_bits(found, expected)
    assert_same_bits(out, expected_out)


def check_weights(
    kernels: ModuleType,
    *,
    shape: Sequence[int] = (5, 300),
    bits: int = 8,
    of_update: torch.dtype = torch.bfloat16,
) -> None:
    update = gradients(shape, 1).to(of_update)
    ours, theirs = split(bits, shape), split(bits, shape)
    for state in (ours, theirs):
        state.write(numbers(shape, 2))
        parameter, remainder = state.stored.values()
        parameter.view(-1)[1:2], remainder.view(-1)[1:2] = float("inf"), 1
    assert kernels.fit([update], [ours], None, has_master=True)
    assert kernels.muon_(ours, None, update, decay=0.998, alpha=-0.03) is None
    assert kernels._muon.options == {"enable_fp_fusion": False}
    with rules.opened([theirs]) as [values]:
        gpu_rules.muon_(values, None, update, decay=0.998, alpha=-0.03)
    for found, expected in zip(ours.stored.values(), theirs.stored.values(), strict=True):
        assert_same_bits(found, expected)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("moments", MOMENTS)
@pytest.mark.parametrize("master", MASTERS)
def test_adamw(kernels: ModuleType, master: str, moments: str, shape: tuple[int, ...]) -> None:
    for of_grad, beta1 in ((torch.float32, 0.9), (torch.bfloat16, 0.3), (torch.float16, 0.9)):
        check_adamw(
            kernels, master=master, moments=moments, shape=shape, of_grad=of_grad, beta1=beta1
        )


def test_hyperparameters_that_are_whole_numbers(kernels: ModuleType) -> None:
    for momentum in (0, 1):
        check_momentum(kernels, momentum=momentum)
    check_adamw(kernels, decay=1, epsilon=0, beta1=0, beta2=0)


def check_parts(kernels: ModuleType) -> None:
    """Of a part of a parameter, random bits are of its own elements."""
    for shape, offsets, sizes in (
        ((40, 700), (7, 256), (9, 444)),
        ((3, 5, 300), (1, 0, 0), (2, 5, 300)),
        ((3, 5, 300), (2, 1, 0), (1, 3, 300)),
    ):
        for moments in ("bfloat16", "int8"):
            check_adamw(kernels, moments=moments, shape=shape, chunk=Chunk(offsets, sizes))


def test_adamw_on_a_part_of_a_parameter(kernels: ModuleType) -> None:
    check_parts(kernels)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("of_grad", [torch.float32, torch.bfloat16, torch.float16])
def test_momentum(kernels: ModuleType, shape: tuple[int, ...], of_grad: torch.dtype) -> None:
    for momentum, nesterov, maximize in (
        (0.95, True, False),
        (0.3, True, True),
        (0.5, False, False),
    ):
        check_momentum(
            kernels,
            shape=shape,
            of_grad=of_grad,
            momentum=momentum,
            nesterov=nesterov,
            maximize=maximize,
        )


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("bits", [8, 16])
def test_weights_of_muon(kernels: ModuleType, shape: tuple[int, ...], bits: int) -> None:
    for of_update in (torch.float32, torch.bfloat16, torch.float16):
        check_weights(kernels, shape=shape, bits=bits, of_update=of_update)


def check_halves(kernels: ModuleType) -> None:
    """Numbers in the middle of two neighbours are rounded towards zero."""
    powers = torch.arange(7.0) ** 4
    grad = torch.cat([(powers[1:] + powers[:-1]) / 2, torch.tensor([127.0**4])])[None]
    state, out = roots(torch.int8, grad.shape), torch.zeros_like(grad)
    kernels.momentum_(grad, state, out, momentum=0.0, nesterov=False, maximize=False)
    found, scales = state.stored.values()
    assert found.tolist() == [[0, 1, 2, 3, 4, 5, 127]]
    assert scales.item() == 1


def test_halves(kernels: ModuleType) -> None:
    check_halves(kernels)


@pytest.fixture
def check_large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[ModuleType], None]:
    def check(kernels: ModuleType) -> None:
        """The first and the last program of 2^31 + 2^16 elements, in files with holes."""
        rows, columns = 2**15 + 1, 2**16

        def tensor(name: str, dtype: torch.dtype, *shape: int) -> torch.Tensor:
            size = torch.Size(shape or (rows, columns)).numel()
            made = torch.from_file(str(tmp_path / name), shared=True, size=size, dtype=dtype)
            return made.view(shape or (rows, columns))

        grad, parameter = (tensor(name, torch.bfloat16) for name in ("grad", "parameter"))
        grad[-1, -1] = 3.0
        master = SplitMaster(parameter, tensor("remainder", torch.int8))
        whole = Chunk((0, 0), (rows, columns))
        states, moments = [], []
        for name, dtype in (("mean", torch.int8), ("mean_sq", torch.uint8)):
            scales = tensor(f"{name}_scale", torch.float32, rows, columns // 256)
            states.append(RootState(name, tensor(name, dtype), scales))
            moments.append(rounding.rounded(states[-1], name, whole.sizes, whole))
        of_tiles = [0, -(-rows // 4) * (columns // 256) - 1]
        for kernel in (kernels._adamw, kernels._momentum):
            monkeypatch.setattr(kernel, "programs", of_tiles)
        monkeypatch.setattr(kernels._muon, "programs", [0, grad.numel() // 1024 - 1])
        kernels.adamw_(
            *([master], [None], [grad], *([moment] for moment in moments)),
            sizes=[1.0],
            epsilons=[0.0],
            decay=1.0,
            betas=(0.0, 0.0),
            maximize=False,
        )
        assert [parameter[-1, -1].item(), *(s[-1:].read()[0, -1] for s in states)] == [-1, 3, 9]
        kernels.muon_(master, None, grad, decay=1.0, alpha=-1.0)
        assert parameter[-1, -1] == -4
        kernels.momentum_(grad, states[0], parameter, momentum=0.5, nesterov=False, maximize=False)
        assert parameter[-1, -1] == 3

    return check


def test_more_elements_than_32_bits_number(
    kernels: ModuleType, check_large: Callable[[ModuleType], None]
) -> None:
    check_large(kernels)


def chances_of(shape: tuple[int, ...], sizes: tuple[int, ...]) -> rounding.Chances:
    return rounding.Chances("key", shape, Chunk((0,) * len(shape), sizes))


def test_states_that_kernels_take(kernels: ModuleType) -> None:
    shape, of_grad = (2, 3, 130), torch.zeros(2, 3, 130)
    own, root = split(8, shape), roots(torch.int8, shape)
    random = rounding.Rounded(root, chances_of(shape, shape))

    def fits(*states: Any, grad: torch.Tensor = of_grad, has_master: bool = True) -> bool:
        found: bool = kernels.fit([grad], states, None, has_master=has_master)
        return found

    assert fits(own, random, of_grad)
    assert fits(root, has_master=False)
    assert not fits(root)  # A master in 8 bits.
    assert not fits(own, root, root)  # Moments that are rounded to the nearest number.
    assert not fits(random, has_master=False)
    assert not fits(own, has_master=False)
    assert not fits(own, of_grad.double())
    assert not fits(own, object())
    assert not fits(own, random, grad=of_grad[:, :2])
    assert not fits(own[:, :2], grad=of_grad[:, :2].contiguous())  # Not contiguous.
    # Rows that are not consecutive in the parameter.
    assert not fits(own, rounding.Rounded(root, chances_of((2, 4, 130), shape)), of_grad)
    rounded = [torch.zeros(shape, dtype=dtype) for dtype in (torch.float16, torch.float32)]
    found = [kernels.fit([of_grad], [of_grad, random], p, has_master=True) for p in rounded]
    assert found == [True, False]
    assert not kernels.fit([torch.zeros(())], [torch.zeros(())], None, has_master=True)


@pytest.mark.parametrize("moments", ["bfloat16", "int8"])
@pytest.mark.parametrize("is_consecutive", [True, False])
def test_rules_choose_the_kernels(
    kernels: ModuleType, is_consecutive: bool, moments: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One launch for a chunk; operations where the rows are not consecutive in the parameter."""
    monkeypatch.setattr(rules, "kernels_for", lambda device: fake_triton.load("muon.kernels.gpu"))
    monkeypatch.setattr(rules, "encoded_kernels_for", lambda device: kernels)
    shape = (2, 3 if is_consecutive else 4, 300)
    chunk = Chunk((0, 0, 0), (2, 3, 300))
    case = Case("rounded bfloat16", moments, shape, chunk)
    master: Any = RoundedMaster(case.master, case.parameter, case.noted.append)
    options: dict[str, Any] = {"lr": 1e-3, "weight_decay": 0.1}
    of_adamw: dict[str, Any] = {**options, "betas": (0.9, 0.95), "eps": 1e-8, "steps": [3.0]}
    counts = [getattr(kernels, name).launches for name in ("_adamw", "_momentum", "_muon")]
    grad = numbers((2, 3, 300), 4)
    rules.adamw_([master], [grad], *([moment] for moment in case.moments), **of_adamw)
    assert kernels._adamw.launches == counts[0] + is_consecutive
    assert [bool(changed) for changed in case.noted] == [True]
    momentum, out = roots(torch.int8, (2, 3, 300)), torch.empty(2, 3, 300)
    rules.momentum_(grad, momentum, momentum=0.9, nesterov=True, out=out)
    tall = numbers((2, 300, 3), 5).transpose(1, 2)
    rules.muon_(split(8, (2, 3, 300)), tall, adjusted_lr=0.1, **options)
    assert [kernels._momentum.launches, kernels._muon.launches] == [n + 1 for n in counts[1:]]


@pytest.mark.long
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", FEWER_BYTES)
def test_a_training_has_the_bits_of_operations(
    kernels: ModuleType, name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "_BLOCK", 1 << 17)  # Few programs; each takes time.
    of_tensors = fake_triton.load("muon.kernels.gpu")
    monkeypatch.setattr(of_tensors, "_BLOCK", 1 << 17)
    monkeypatch.setattr(rules, "kernels_for", lambda device: of_tensors)
    monkeypatch.setattr(rules, "encoded_kernels_for", lambda device: kernels)
    launches = kernels._adamw.launches
    found = train("cpu", dtype, FEWER_BYTES[name])
    assert kernels._adamw.launches == launches + 8  # Four steps of two parameters.
    monkeypatch.setattr(rules, "kernels_for", lambda device: None)
    monkeypatch.setattr(rules, "plain", gpu_rules)
    expected = train("cpu", dtype, FEWER_BYTES[name])
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


def test_the_comparison_with_operations_sees_other_bits(
    kernels: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    mutated = fake_triton.load(NAME, "low = low << 8", "low = low << 7")
    for each in (kernels, mutated):
        monkeypatch.setattr(each, "plain", gpu_rules)
        assert each.agree(torch.device("cpu")) == (each is kernels)


def test_small_chunks_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A chunk whose master is rounded into a parameter has a kernel; others are batched."""
    stepped = []

    def adamw_(masters: list[torch.Tensor], parameters: Any, *_: Any, **of: Any) -> list[None]:
        stepped.append(parameters)
        return [None]

    kernels = SimpleNamespace(fit=lambda *states: True, adamw_=adamw_)
    monkeypatch.setattr(rules, "kernels_for", lambda device: kernels)
    own, parameter = torch.empty(5, device="meta"), torch.empty(5, device="meta").bfloat16()
    rounded = RoundedMaster(own, parameter, lambda changed: None)
    options: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.1}
    rules.adamw_([own, rounded], *([own] * 2 for _ in range(3)), steps=[1.0, 1.0], **options)
    assert stepped == [[parameter]]


LARGE = "large"
# A check, and a mutation that it must see: text of the module, and its replacement.
Mutant = tuple[Callable[[ModuleType], None] | str, str, str]
MUTANTS: dict[str, Mutant] = {
    "past the last row": (check_adamw, "has_row = row < rows", "has_row = row <= rows"),
    "past the last column": (check_adamw, "(column < columns)", "(column <= columns)"),
    "rows of 32 bits": (LARGE, "// blocks).to(tl.int64) * height", "// blocks) * height"),
    "elements of 32 bits": (
        LARGE,
        ".to(tl.int64) * block + tl.arange",
        " * block + tl.arange",
    ),
    "other bits of rows": (check_adamw, "x >> 29", "x >> 28"),
    "other bits of columns": (
        check_adamw,
        "column.to(tl.int32) * _GOLDEN_32",
        "column.to(tl.int32)",
    ),
    "a first shift with a sign": (
        check_adamw,
        "(x >> 16) & 0xFFFF)) * _MIX_32",
        "(x >> 16))) * _MIX_32",
    ),
    "a second shift with a sign": (check_adamw, "((x >> 15) & 0x1FFFF)", "(x >> 15)"),
    "rows of the chunk": (check_parts, "row + first_row", "row"),
    "columns of the chunk": (check_parts, "column + first_column", "column"),
    "one key": (check_adamw, "column, mean_sq_digest)", "column, mean_digest)"),
    "a sum that is a NaN": (check_weights, "tl.where(is_number, low, 0)", "low"),
    "a remainder of 8 bits": (check_weights, "low = low << 8", "low = low << 7"),
    "a NaN that is a zero": (
        lambda kernels: check_weights(kernels, of_update=torch.float32),
        "(bits & -0x80000000) | 0x7FC00000, bits)",
        "bits, bits)",
    ),
    "half a remainder": (check_weights, "bits + 0x80\n", "bits + 0x7F\n"),
    "half a parameter": (check_weights, "((bits + 0x8000) >> 16)", "(bits >> 16)"),
    "weights in two roundings": (
        lambda kernels: check_weights(kernels, bits=16),
        "tl.fma(alpha, update, master * decay)\n    store_split",
        "alpha * update + master * decay\n    store_split",
    ),
    "no sign": (check_momentum, "tl.where(number < 0, -power, power)", "power"),
    "no sign of numbers": (check_momentum, "tl.where(ratio < 0, -number, number)", "number"),
    "a scale beyond the row": (
        check_momentum,
        "tl.where(inside, _magnitude(value), 0)",
        "_magnitude(value)",
    ),
    "an infinite scale": (check_momentum, "largest < 0x7F800000", "largest <= 0x7F800000"),
    "a divisor that is a NaN": (check_momentum, "tl.where(scale > 0, scale, 1.0)", "scale"),
    "a subnormal scale": (check_momentum, "divided(_float(largest)", "tl.div_rn(_float(largest)"),
    "a subnormal divisor": (check_momentum, "divided(value,", "tl.div_rn(value,"),
    "an infinite ratio": (
        lambda kernels: check_momentum(kernels, of_grad=torch.float32),
        "_magnitude(ratio) < 0x7F800000",
        "_magnitude(ratio) <= 0x7F800000",
    ),
    "a number past the last": (check_momentum, "1.0 * last - 1.0", "1.0 * last"),
    "halves upwards": (check_halves, "part > chance", "part >= chance"),
    "momentum at random": (
        check_momentum,
        "(average, 0.5,",
        "(average, 0.25,",
    ),
    "a second moment of zero": (check_adamw, "tl.maximum(number, 1)", "number"),
    "a moment that is a zero": (
        lambda kernels: check_adamw(kernels, moments="bfloat16", of_grad=torch.float32),
        "0x7FC0, rounded)",
        "rounded, rounded)",
    ),
    "a moment to the nearest": (
        lambda kernels: check_adamw(kernels, moments="bfloat16"),
        "bitcast=True) + bits) >> 16",
        "bitcast=True) + 0x8000) >> 16",
    ),
    "scales of absent rows": (check_momentum, "scale, mask=has_row)", "scale)"),
    "products and sums of momentum": (
        check_momentum,
        "is_small(momentum),\n            enable_fp_fusion=False,",
        "is_small(momentum),",
    ),
    "products and sums of weights": (
        check_weights,
        "block=_BLOCK,\n            enable_fp_fusion=False,",
        "block=_BLOCK,",
    ),
    "products and sums of AdamW": (
        check_adamw,
        "maximize=maximize,\n            enable_fp_fusion=False,",
        "maximize=maximize,",
    ),
    "a parameter of before": (
        lambda kernels: check_adamw(kernels, master="rounded float16"),
        'of_master == "rounded":\n        tl.store',
        'of_master == "split":\n        tl.store',
    ),
    "a change that is lost": (
        lambda kernels: check_adamw(kernels, master="rounded float16"),
        "master = adopted(master, beside_at",
        "adopted(master, beside_at",
    ),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_mutant_is_seen(
    kernels: ModuleType, mutant: str, check_large: Callable[[ModuleType], None]
) -> None:
    check, old, new = MUTANTS[mutant]
    if isinstance(check, str):
        check = check_large
    check(kernels)
    mutated = fake_triton.load(NAME, old, new)
    with pytest.raises(AssertionError):
        check(mutated)
