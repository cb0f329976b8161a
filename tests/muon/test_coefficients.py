"""Coefficients of Newton-Schulz, by name and for each step."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import muon
import tierstore
from muon import newton_schulz
from muon.coefficients import TABLES, of_steps, steps_min
from tests.support.kernel import peak_of

STEPS = {name: max(5, len(table)) for name, table in TABLES.items()}


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(1)


def random(rows: int, columns: int) -> torch.Tensor:
    return torch.randn(rows, columns, generator=generator(), dtype=torch.float64)


def ill_conditioned(rows: int, columns: int) -> torch.Tensor:
    """Singular values from 1 to 1e-6, evenly in their logarithms."""
    left, values, right = torch.linalg.svd(random(rows, columns), full_matrices=False)
    return left * torch.logspace(0, -6, len(values), dtype=torch.float64) @ right


def of_rank_one(rows: int, columns: int) -> torch.Tensor:
    return random(rows, 1) @ random(1, columns)


MATRICES: dict[str, Callable[[], torch.Tensor]] = {
    "random": lambda: random(48, 48),
    "wide": lambda: random(16, 200),
    "tall": lambda: random(200, 16),
    "ill-conditioned": lambda: ill_conditioned(40, 60),
    "rank 1": lambda: of_rank_one(30, 50),
    "tiny": lambda: random(24, 32) * 1e-5,
    "huge": lambda: random(24, 32) * 1e15,
    "zero": lambda: torch.zeros(8, 12, dtype=torch.float64),
    "one row": lambda: random(1, 40),
}


def reference(matrix: torch.Tensor, table: Sequence[tuple[float, float, float]]) -> torch.Tensor:
    """Apply the polynomials to the singular values themselves, in float64."""
    left, values, right = torch.linalg.svd(matrix.double(), full_matrices=False)
    values = values / max(float(values.norm()), 1e-7)
    for a, b, c in table:
        values = a * values + b * values**3 + c * values**5
    return left * values @ right


# Singular values that are not small, which no step amplifies much.
WELL_CONDITIONED = ("random", "wide", "tall", "tiny", "huge", "zero", "one row")


@pytest.mark.quick(80)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", MATRICES)
@pytest.mark.parametrize("name", TABLES)
def test_equals_the_polynomials_of_singular_values(
    name: str, kind: str, dtype: torch.dtype
) -> None:
    matrix = MATRICES[kind]().to(dtype)
    table = of_steps(name, STEPS[name])
    update = muon.orthogonalize_(matrix.clone(), coefficients=name, steps=STEPS[name])
    expected = reference(matrix, table)
    assert (update.shape, update.dtype) == (matrix.shape, dtype)
    error = float((update.double() - expected).norm())
    eps = torch.finfo(dtype).eps
    if kind in WELL_CONDITIONED:
        # Each of 10 to 30 products rounds its result, and near one the steeper tables amplify what
        # went before; in float32 and float64 their sums also round.
        roundings = 30 if dtype == torch.bfloat16 else 100
        assert error <= roundings * eps * float(expected.norm())
    elif dtype != torch.bfloat16:
        # The matrix of norm 1 is rounded by about eps, and the steps amplify that by the product of
        # their slopes at zero. In bfloat16 this is more than the update itself.
        assert error <= 4 * eps * math.prod(a for a, _, _ in table)


@pytest.mark.parametrize(
    # The band that the coefficients promise for singular values from ``least`` on, of a matrix of
    # Frobenius norm 1.
    ("name", "steps", "least", "band"),
    [
        ("keller_jordan", 5, 1e-2, (0.68, 1.14)),
        ("you", 5, 1e-2, (0.97, 1.04)),
        ("polar_express_1.01", 5, 1e-2, (0.84, 1.13)),
        ("polar_express_1.05", 5, 1e-2, (0.84, 1.13)),
        ("polar_express_1.01", 8, 1e-3, (0.999, 1.001)),
        ("polar_express_1.05", 8, 1e-3, (0.999, 1.001)),
        ("cans_1.01", 5, 1e-2, (0.86, 1.12)),
        ("deepseekv4", 10, 1e-3, (0.999, 1.002)),
        ("cubic5", 5, 5e-2, (0.77, 1.31)),
    ],
)
def test_singular_values_lie_in_the_promised_band(
    name: str, steps: int, least: float, band: tuple[float, float]
) -> None:
    left, values, right = torch.linalg.svd(random(32, 64), full_matrices=False)
    # One large value, which takes nearly all of the norm, and small ones down to ``least``.
    values = torch.logspace(math.log10(least), -0.5, len(values), dtype=torch.float64)
    values[-1] = (1 - values[:-1].square().sum()).clamp(min=0).sqrt()
    update = muon.orthogonalize_(left * values @ right, coefficients=name, steps=steps)
    found = torch.linalg.svdvals(update)
    assert band[0] < found.min()
    assert found.max() < band[1]


@pytest.mark.parametrize("name", TABLES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_sign_of_rank_one_is_preserved(name: str, dtype: torch.dtype) -> None:
    signs = [random(size, 1).sign() for size in (40, 24)]
    matrix = (signs[0] @ signs[1].T).to(dtype)  # Of rank one also when it is rounded.
    update = muon.orthogonalize_(matrix.clone(), coefficients=name, steps=STEPS[name])
    # All elements are the singular value of the update, divided by the root of their number.
    values = (update * matrix).double() * (40 * 24) ** 0.5
    assert values.min() > 0.6
    assert values.max() < 1.3


@pytest.mark.quick(4)
@pytest.mark.parametrize("name", TABLES)
@pytest.mark.parametrize("shape", [(512, 1024), (512, 600)])
def test_large_matrices_on_a_cpu(name: str, shape: tuple[int, int]) -> None:
    """Fewer operations: no farther from float64 than the plain iteration, within a factor."""
    matrix = torch.randn(shape, generator=generator())
    steps = STEPS[name]
    exact = reference(matrix, of_steps(name, steps))
    update = muon.orthogonalize_(matrix.clone(), coefficients=name, steps=steps)
    plain = muon.orthogonalize_(matrix[None].clone(), coefficients=name, steps=steps)[0]
    error, of_plain = ((found.double() - exact).norm() for found in (update, plain))
    assert error <= 2 * of_plain


@pytest.mark.quick(2)
@pytest.mark.parametrize("name", TABLES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_long_matrices_on_their_gram(name: str, dtype: torch.dtype) -> None:
    """Fewer operations: about as far from float64 as the plain iteration."""
    steps = STEPS[name]
    matrix = torch.randn(512, 1792, generator=generator()).to(dtype)
    exact = reference(matrix, of_steps(name, steps))
    errors = {}
    for method in (None, "gram"):
        # A batch of one has the plain iteration.
        given = matrix.clone() if method else matrix[None].clone()
        found = muon.orthogonalize_(given, coefficients=name, steps=steps, method=method)
        errors[method] = float((found.reshape(matrix.shape).double() - exact).norm())
    assert errors["gram"] <= 2.5 * errors[None]


@pytest.mark.parametrize(
    ("shape", "share"), [((512, 1024), 22 / 25), ((4096, 14336), 0.7), ((2048, 512), 0.66)]
)
def test_the_gram_takes_fewer_operations_and_no_reading(
    shape: tuple[int, int], share: float
) -> None:
    """Tensors on the meta device have shapes only, and cannot be read."""
    counts = {}
    for method in (None, "gram"):
        with FlopCounterMode(display=False) as counter:
            update = muon.orthogonalize_(torch.empty(shape, device="meta"), method=method)
        assert update.shape == shape
        counts[method] = counter.get_total_flops()
    assert counts[None] == newton_schulz.flops(shape)
    assert counts["gram"] == pytest.approx(share * counts[None], rel=0.02)


@pytest.mark.parametrize("shape", [(511, 2048), (1024, 2040)])
def test_other_matrices_have_one_method(shape: tuple[int, int]) -> None:
    matrix = torch.randn(shape, generator=generator())
    both = [muon.orthogonalize_(matrix.clone(), method=method) for method in (None, "gram")]
    assert torch.equal(*both)


def test_the_memory_of_the_gram() -> None:
    shape = 512, 2048

    def orthogonalize() -> None:
        muon.orthogonalize_(torch.full(shape, 0.5), method="gram")

    orthogonalize()
    needed = 4 * newton_schulz.numel_needed(shape, 1, on_gpu=True, method="gram")
    assert peak_of(orthogonalize) == pytest.approx(needed, rel=0.02)


def test_a_table_of_own() -> None:
    matrix = random(20, 30)
    table = ((3.0, -3.0, 1.0), (2.0, -1.5, 0.5))
    given = muon.orthogonalize_(matrix.clone(), coefficients=table, steps=4)
    repeated = matrix.clone()
    repeated.div_(repeated.norm())
    for triple in (table[0], *[table[1]] * 3):
        # Each step alone, without the division by the norm that begins each call.
        norm = repeated.norm()
        a, b, c = triple
        scaled = (a * norm, b * norm**3, c * norm**5)
        repeated = muon.orthogonalize_(repeated, coefficients=tuple(map(float, scaled)), steps=1)
    torch.testing.assert_close(given, repeated)


@pytest.mark.parametrize(
    ("value", "steps", "message"),
    [
        ("mine", 5, "ns_coefficients must be three numbers, .*keller_jordan, .*got 'mine'"),
        ("", 5, "ns_coefficients must be three numbers"),
        ((), 5, "ns_coefficients must be three numbers"),
        (((3.0, -3.0, 1.0), (2.0, -1.5)), 5, "ns_coefficients must be three numbers"),
        ("deepseekv4", 5, "ns_steps must be 10 or more with 'deepseekv4', got 5"),
        (((3.0, -3.0, 1.0), (2.0, -1.5, 0.5)), 1, "ns_steps must be 2 or more with"),
    ],
)
def test_what_cannot_be_used_is_refused(value: Any, steps: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        muon.Muon([torch.nn.Parameter(torch.ones(2, 2))], ns_coefficients=value, ns_steps=steps)


def test_a_name_that_no_table_has() -> None:
    with pytest.raises(ValueError, match=r"coefficients must be one of .*got 'mine'"):
        muon.orthogonalize_(torch.ones(2, 2), coefficients="mine")


def test_fewer_steps() -> None:
    assert {name: steps_min(name) for name in TABLES} == {
        **{"keller_jordan": 0, "you": 5, "polar_express_1.01": 0, "polar_express_1.05": 0},
        **{"cans_1.01": 5, "deepseekv4": 10, "cubic5": 5},
    }
    assert steps_min((3.0, -3.0, 1.0)) == 0


SCALES: dict[str | None, Callable[[int, int], float]] = {
    None: lambda rows, columns: max(1, rows / columns) ** 0.5,
    "original": lambda rows, columns: max(1, rows / columns) ** 0.5,
    "match_rms_adamw": lambda rows, columns: 0.2 * max(rows, columns) ** 0.5,
    "spectral": lambda rows, columns: (rows / columns) ** 0.5,
    "unit": lambda rows, columns: 1.0,
}


@pytest.mark.parametrize(
    ("name", "shape"), list(itertools.product(SCALES, [(6, 10), (10, 6), (8, 8)]))
)
def test_scales(name: str | None, shape: tuple[int, int]) -> None:
    parameter = torch.nn.Parameter(torch.zeros(shape, dtype=torch.float64))
    parameter.grad = torch.randn(shape, generator=generator(), dtype=torch.float64)
    options: dict[str, Any] = {"momentum": 0.0, "weight_decay": 0.0, "ns_dtype": torch.float64}
    muon.Muon([parameter], lr=0.5, adjust_lr_fn=name, **options).step()
    table = of_steps("keller_jordan", 5)
    expected = -0.5 * SCALES[name](*shape) * reference(parameter.grad, table)
    torch.testing.assert_close(parameter.detach(), expected)


@pytest.mark.parametrize(
    "coefficients",
    ["deepseekv4", "polar_express_1.05", "cubic5", ((3.0, -3.0, 1.0), (2.0, -1.5, 0.5))],
)
def test_a_run_resumes_with_its_table(coefficients: Any, tmp_path: Path) -> None:
    options = {"ns_coefficients": coefficients, "ns_steps": 10}

    def parameter() -> torch.nn.Parameter:
        found = torch.nn.Parameter(torch.randn(12, 20, generator=generator()))
        found.grad = torch.randn(12, 20, generator=generator())
        return found

    expected = parameter()
    optimizer = muon.Muon([("w", expected)], **options)
    for _ in range(4):
        optimizer.step()
    for resume in (False, True):
        stepped = parameter()
        with tierstore.TierStore(tmp_path, resume=resume) as store:
            given = {} if resume else options
            optimizer = muon.Muon([("w", stepped)], store=store, **given)
            if resume:
                optimizer.restore()
            for _ in range(2):
                optimizer.step()
            assert optimizer.param_groups[0]["ns_coefficients"] == coefficients
    assert torch.equal(stepped, expected)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(12, 20), (20, 12), (3, 9, 6), (512, 520)])
def test_scaled_norms_give_the_same_bits_for_any_power_of_two(
    shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    matrix = torch.randn(shape, generator=generator(), dtype=torch.float64).to(dtype)
    expected = muon.orthogonalize_(matrix.clone(), norm="scaled")
    plain = muon.orthogonalize_(matrix.clone())
    tolerance = 10 * torch.finfo(dtype).eps  # The norm and the quotient round differently.
    assert (expected - plain).double().norm() <= tolerance * plain.double().norm()
    for power in (-100, -3, 1, 60, 120):
        scaled = torch.ldexp(matrix.double(), torch.tensor(power)).to(dtype)
        assert torch.equal(muon.orthogonalize_(scaled, norm="scaled"), expected)


@pytest.mark.parametrize("magnitude", [1e-30, 1e-12, 1e30])
def test_gradients_of_any_magnitude(magnitude: float) -> None:
    """The plain norm overflows, or is below eps."""
    gradient = random(12, 20).float() * magnitude
    updates = {}
    for norm in (None, "scaled"):
        parameter = torch.nn.Parameter(torch.zeros(12, 20))
        parameter.grad = gradient.clone()
        options = {"lr": 1.0, "momentum": 0.0, "weight_decay": 0.0, "ns_dtype": torch.float32}
        muon.Muon([parameter], ns_norm=norm, nonfinite="allow", **options).step()
        updates[norm] = -parameter.detach()
    left, _, right = torch.linalg.svd(gradient.double(), full_matrices=False)
    distance = (updates["scaled"].double() - left @ right).norm() / left.norm()
    assert distance < 0.3  # Singular values of 0.68 to 1.14 instead of 1.
    assert (updates[None].double() - left @ right).norm() / left.norm() > 0.9


def test_scaled_zeros_stay_zeros() -> None:
    assert not muon.orthogonalize_(torch.zeros(4, 6), norm="scaled").any()
    batch = torch.stack([torch.zeros(4, 6), torch.full((4, 6), 1e-40), torch.full((4, 6), 3e38)])
    updates = muon.orthogonalize_(batch, norm="scaled")
    assert not updates[0].any()
    assert torch.equal(updates[1] > 0, updates[2] > 0)
    assert updates[1].norm() == pytest.approx(float(updates[2].norm()), rel=1e-3)


def test_a_norm_that_is_unknown() -> None:
    with pytest.raises(ValueError, match="ns_norm must be one of None, 'scaled', got 'spectral'"):
        muon.Muon([torch.nn.Parameter(torch.ones(2, 2))], ns_norm="spectral")
