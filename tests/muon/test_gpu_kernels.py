"""Kernels for a GPU, run as Python: each element, and only it, is what torch computes on a GPU."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from tests.support import adamw, fake_triton, gpu_rules

NAME = "muon.kernels.gpu"
SIZES = [1, 63, 2047, 2048, 2049, 5001]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SPECIAL = [0.0, -0.0, float("inf"), -float("inf"), float("nan"), 1e-40, -1e-42, 3.4e38, 65504, 1e-8]
GUARD = 3  # Elements before and behind each tensor, which nobody may write.


@pytest.fixture(scope="module")
def kernels() -> ModuleType:
    return fake_triton.load(NAME)


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    with np.errstate(all="ignore"):
        yield


class Memory:
    """A tensor within memory that is watched."""

    def __init__(self, seed: int, numel: int, dtype: torch.dtype, scale: float = 1.0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.all = (torch.randn(numel + 2 * GUARD, generator=generator) * scale).to(dtype)
        self.own = self.all[GUARD : GUARD + numel]
        chosen = torch.randperm(numel, generator=generator)[: len(SPECIAL)]
        self.own[chosen] = torch.tensor(SPECIAL[: len(chosen)]).to(dtype)
        self.before = self.all.clone()

    def set(self, values: torch.Tensor) -> None:
        self.own.copy_(values)
        self.before = self.all.clone()

    def assert_is(self, expected: np.ndarray) -> None:
        wanted = self.before.clone()
        wanted[GUARD : GUARD + len(self.own)] = torch.from_numpy(expected).to(wanted.dtype)
        torch.testing.assert_close(self.all, wanted, rtol=0, atol=0, equal_nan=True)

    def numbers(self) -> np.ndarray:
        """Return what the tensor was."""
        found: np.ndarray = self.before[GUARD : GUARD + len(self.own)].float().numpy()
        return found


def adopted(master: Memory, parameter: Memory | None) -> tuple[np.ndarray, bool | None]:
    """Return the masters, with the changed elements of the parameter, and whether there are any."""
    if parameter is None:
        return master.numbers(), None
    rounded = torch.from_numpy(master.numbers()).to(parameter.all.dtype).float().numpy()
    given = parameter.numbers()
    differs = (given != rounded) & ~(np.isnan(given) & np.isnan(rounded))
    return np.where(differs, given, master.numbers()), bool(differs.any())


def parameter_of(master: Memory, dtype: torch.dtype | None, changed: int) -> Memory | None:
    """Return the master rounded, but for some elements; None without a dtype."""
    if dtype is None:
        return None
    parameter = Memory(99, len(master.own), dtype)
    parameter.set(torch.cat([parameter.own[:changed], master.own[changed:].to(dtype)]))
    return parameter


def own(memory: Memory | None) -> torch.Tensor | None:
    return None if memory is None else memory.own


def check_momentum(
    kernels: ModuleType,
    *,
    numel: int = 2049,
    momentum: float = 0.95,
    nesterov: bool = True,
    maximize: bool = False,
) -> None:
    for seed, dtypes in enumerate(itertools.product(DTYPES, repeat=3)):
        grad, buffer, out = (Memory(seed * 3 + i, numel, dtype) for i, dtype in enumerate(dtypes))
        options = {"momentum": momentum, "nesterov": nesterov, "maximize": maximize}
        kernels.momentum_(grad.own, buffer.own, out.own, **options)
        average, given = gpu_rules.momentum(grad.numbers(), buffer.numbers(), **options)
        grad.assert_is(grad.numbers())
        buffer.assert_is(average)
        out.assert_is(given)


def check_weights(
    kernels: ModuleType,
    *,
    numel: int = 2049,
    dtype: torch.dtype | None = torch.bfloat16,
    changed: int = 7,
) -> None:
    for seed, (of_update, alpha) in enumerate(itertools.product(DTYPES, [-0.03, -2.5])):
        master, update = Memory(seed, numel, torch.float32), Memory(seed + 50, numel, of_update)
        parameter = parameter_of(master, dtype, changed)
        found = kernels.muon_(master.own, own(parameter), update.own, decay=0.998, alpha=alpha)
        values, is_changed = adopted(master, parameter)
        expected = gpu_rules.weights(values, update.numbers(), decay=0.998, alpha=alpha)
        master.assert_is(expected)
        if parameter is not None:
            parameter.assert_is(expected)
        assert (None if found is None else bool(found)) == is_changed


def check_adamw(
    kernels: ModuleType,
    *,
    numel: int = 2049,
    dtype: torch.dtype | None = torch.bfloat16,
    maximize: bool = False,
    changed: int = 7,
    decay: float = 1 - 1e-4,
    beta2: float = 0.95,
    epsilon: float = 1e-8,
) -> None:
    options: dict[str, Any] = {"decay": decay, "maximize": maximize}
    for seed, (of_grad, beta1) in enumerate(itertools.product(DTYPES, [0.9, 0.3, 0])):
        master, mean, mean_sq = (Memory(seed + i, numel, torch.float32) for i in range(3))
        grad = Memory(seed + 3, numel, of_grad, 3.0)
        mean_sq.set(mean_sq.own.abs())
        options["betas"] = (beta1, beta2)
        parameter = parameter_of(master, dtype, changed)
        [found] = kernels.adamw_(
            *([master.own], [own(parameter)], [grad.own], [mean.own], [mean_sq.own]),
            sizes=[1e-3],
            epsilons=[epsilon],
            **options,
        )
        values, is_changed = adopted(master, parameter)
        before = (values, grad.numbers(), mean.numbers(), mean_sq.numbers())
        expected, m, v = (
            tensor.numpy()
            for tensor in adamw.stepped(
                *map(torch.from_numpy, before), size=1e-3, epsilon=epsilon, **options
            )
        )
        for memory, wanted in ((master, expected), (mean, m), (mean_sq, v)):
            memory.assert_is(wanted)
        if parameter is not None:
            parameter.assert_is(expected)
        assert (None if found is None else bool(found)) == is_changed


def check_subnormal_moments(kernels: ModuleType) -> None:
    master, grad, mean = torch.zeros(2), torch.zeros(2), torch.full((2,), 1e-40)
    mean_sq = torch.tensor([1e-40, 1.0])
    options: dict[str, Any] = {"decay": 1.0, "betas": (0.9, 0.95), "maximize": False}
    expected = adamw.stepped(master, grad, mean, mean_sq, size=0.1, epsilon=0.0, **options)
    kernels.adamw_(
        *([master], [None], [grad], [mean], [mean_sq]), sizes=[0.1], epsilons=[0.0], **options
    )
    for found, wanted in zip((master, mean, mean_sq), expected, strict=True):
        assert torch.equal(found, wanted)
    assert (master < 0).all()


@pytest.mark.parametrize("numel", SIZES)
@pytest.mark.parametrize(
    ("momentum", "nesterov", "maximize"),
    [(0.95, True, False), (0.3, True, True), (0.5, False, False), (0.0, True, False)],
)
def test_momentum(
    kernels: ModuleType, numel: int, momentum: float, nesterov: bool, maximize: bool
) -> None:
    check_momentum(kernels, numel=numel, momentum=momentum, nesterov=nesterov, maximize=maximize)


@pytest.mark.parametrize("numel", SIZES)
@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("changed", [0, 1, 10**9])
def test_weights_of_muon(
    kernels: ModuleType, numel: int, dtype: torch.dtype | None, changed: int
) -> None:
    check_weights(kernels, numel=numel, dtype=dtype, changed=changed)


@pytest.mark.parametrize("numel", SIZES)
@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("maximize", [False, True])
def test_adamw(kernels: ModuleType, numel: int, dtype: torch.dtype | None, maximize: bool) -> None:
    check_adamw(kernels, numel=numel, dtype=dtype, maximize=maximize)


def test_hyperparameters_that_are_whole_numbers(kernels: ModuleType) -> None:
    for momentum in (0, 1):
        check_momentum(kernels, momentum=momentum)
    check_adamw(kernels, decay=1, epsilon=0, beta2=0)


def test_more_elements_than_32_bits_number(kernels: ModuleType, tmp_path: Path) -> None:
    """The first and the last program of tensors of 2^31 + 5 elements, in files with holes."""
    numel = 2**31 + 5

    def tensor(name: str, dtype: torch.dtype, last: float) -> torch.Tensor:
        made = torch.from_file(str(tmp_path / name), shared=True, size=numel, dtype=dtype)
        made[-1] = last
        return made

    for kernel in (kernels._momentum, kernels._muon, kernels._adamw):
        kernel.programs = [0, (numel - 1) // kernels._BLOCK]
    try:
        grad, out = (tensor(name, torch.bfloat16, 3.0) for name in ("grad", "out"))
        master, mean, mean_sq = (tensor(name, torch.float32, 1.0) for name in "abc")
        kernels.momentum_(grad, mean, out, momentum=0.5, nesterov=False, maximize=False)
        assert [mean[-1].item(), out[-1].item(), out[-2].item()] == [2.0, 2.0, 0.0]
        kernels.muon_(master, None, grad, decay=1.0, alpha=-1.0)
        assert [master[-1].item(), master[-2].item()] == [-2.0, 0.0]
        options: dict[str, Any] = {"betas": (0.5, 0.0), "maximize": False}
        kernels.adamw_(
            *([master], [None], [grad], [mean], [mean_sq]),
            sizes=[1.4],
            epsilons=[0.5],
            decay=1.0,
            **options,
        )
        assert [mean[-1].item(), mean_sq[-1].item(), mean_sq[-2].item()] == [2.5, 9.0, 0.0]
        assert master[-1].item() == -3.0
    finally:
        for kernel in (kernels._momentum, kernels._muon, kernels._adamw):
            kernel.programs = None


def test_tensors_that_kernels_take(kernels: ModuleType) -> None:
    assert kernels.fit(torch.zeros(3), torch.zeros(3, 1, dtype=torch.float16))
    refused = [
        torch.zeros(0),
        torch.zeros(4, 4).T[:, :2],
        torch.zeros(3, dtype=torch.float64),
        object(),
    ]
    for state in refused:
        assert not kernels.fit(torch.zeros(3), state)


# A check, and a mutation that it must see: text of the module, and its replacement.
Mutant = tuple[Callable[[ModuleType], None], str, str]
MUTANTS: dict[str, Mutant] = {
    "past the end": (check_momentum, "places < numel", "places <= numel"),
    "32 bits": (check_momentum, ".to(tl.int64) * block", " * block"),
    "no mask": (
        check_momentum,
        "out.to(out_at.dtype.element_ty), mask=inside)",
        "out.to(out_at.dtype.element_ty))",
    ),
    "other end": (check_momentum, "if small:", "if not small:"),
    "from the start, in two roundings": (
        check_momentum,
        "tl.fma(weight, end - start, start)",
        "weight * (end - start) + start",
    ),
    "from the end, in two roundings": (
        check_momentum,
        "tl.fma(start - end, 1.0 - weight, end)",
        "(start - end) * (1.0 - weight) + end",
    ),
    "from a rounded average": (
        check_momentum,
        "out = lerp(grad, average,",
        "out = lerp(grad, average.to(tl.bfloat16).to(tl.float32),",
    ),
    "momentum upwards": (
        lambda kernels: check_momentum(kernels, maximize=True),
        "grad = grad * -1.0  # Also the sign of a zero.\n    average",
        "grad = grad * 1.0\n    average",
    ),
    "weights in two roundings": (
        check_weights,
        "tl.fma(alpha, update, master * decay)",
        "alpha * update + master * decay",
    ),
    "decay and update in one": (
        check_weights,
        "tl.fma(alpha, update, master * decay)",
        "tl.fma(master, decay, alpha * update)",
    ),
    "changes not taken": (check_weights, "tl.where(differs, value, master)", "master"),
    "NaNs that changed": (
        lambda kernels: check_weights(kernels, changed=0),
        "& ~both_nan & inside",
        "& inside",
    ),
    "changes not told": (check_weights, "axis=None) > 0", "axis=None) > 1"),
    "parameter not written": (
        check_weights,
        "tl.fma(alpha, update, master * decay)\n"
        "    tl.store(master_at + places, master, mask=inside)\n    if is_rounded:",
        "tl.fma(alpha, update, master * decay)\n"
        "    tl.store(master_at + places, master, mask=inside)\n    if not is_rounded:",
    ),
    "product in another order": (
        check_adamw,
        "square_weight * (grad * grad)",
        "square_weight * grad * grad",
    ),
    "quotient in another order": (
        check_adamw,
        "divided(size * mean, square_root(mean_sq) + epsilon)",
        "size * divided(mean, square_root(mean_sq) + epsilon)",
    ),
    "products and sums in one rounding": (
        check_adamw,
        "is_rounded=parameter is not None,\n            enable_fp_fusion=False,",
        "is_rounded=parameter is not None,",
    ),
    "subnormal roots": (
        check_subnormal_moments,
        "square_root(mean_sq) +",
        "tl.sqrt_rn(mean_sq) +",
    ),
    "subnormal means": (
        check_subnormal_moments,
        "divided(size * mean,",
        "tl.div_rn(size * mean,",
    ),
    "AdamW upwards": (
        lambda kernels: check_adamw(kernels, maximize=True),
        "grad = grad * -1.0  # Also the sign of a zero.\n    mean =",
        "grad = grad * 1.0\n    mean =",
    ),
    "moment not written": (check_adamw, "    tl.store(mean_at + places, mean, mask=inside)\n", ""),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_mutant_is_seen(kernels: ModuleType, mutant: str) -> None:
    check, old, new = MUTANTS[mutant]
    check(kernels)
    mutated = fake_triton.load(NAME, old, new)
    with pytest.raises(AssertionError):
        check(mutated)
