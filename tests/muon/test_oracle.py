"""Muon and AdamW against references on the same gradients, bit for bit where it is exact."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import muon
import tierstore
from tests.support import training
from tests.support.adamw import AdamW

STEPS = 12
SHAPES = [(16, 16), (33, 70), (70, 33), (1, 19), (19, 1), (128, 257)]


def matrices(dtype: torch.dtype = torch.float32) -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [
        torch.nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in SHAPES
    ]


def set_same_gradients(
    step: int, *runs: list[torch.nn.Parameter], dtype: torch.dtype = torch.float32
) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    grads = [torch.randn(p.shape, generator=generator).to(dtype) for p in runs[0]]
    for run in runs:
        for parameter, grad in zip(run, grads, strict=True):
            parameter.grad = grad.to(parameter.dtype)
    return grads


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("adjust_lr_fn", [None, "original", "match_rms_adamw"])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_muon_fp32_equals_torch(
    nesterov: bool, adjust_lr_fn: str | None, weight_decay: float
) -> None:
    options: dict[str, Any] = {
        "lr": 0.02,
        "nesterov": nesterov,
        "adjust_lr_fn": adjust_lr_fn,
        "weight_decay": weight_decay,
    }
    ours, theirs = matrices(), matrices()
    optimizer, reference = muon.Muon(ours, **options), torch.optim.Muon(theirs, **options)
    for step in range(1, STEPS + 1):
        grads = set_same_gradients(step, ours, theirs)
        optimizer.step()
        reference.step()
        assert all(torch.equal(p.grad, g) for p, g in zip(ours, grads, strict=True))
    for mine, other in zip(ours, theirs, strict=True):
        assert torch.equal(mine, other)
        expected = reference.state[other]["momentum_buffer"]
        assert torch.equal(optimizer.state[mine]["momentum_buffer"], expected)


@pytest.mark.parametrize("weight_decay", [0.0, 0.03])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_adamw_equals_the_reference(weight_decay: float, dtype: torch.dtype) -> None:
    options: dict[str, Any] = {
        "lr": 1e-3,
        "betas": (0.85, 0.97),
        "eps": 1e-7,
        "weight_decay": weight_decay,
    }
    ours, theirs = training.make_parameters(dtype), training.make_parameters(dtype)
    optimizer = muon.Muon([{"params": list(ours.items()), "algorithm": "adamw", **options}])
    reference = AdamW(theirs.values(), **options)
    for step in range(1, STEPS + 1):
        training.set_gradients(ours, step)
        training.set_gradients(theirs, step)
        optimizer.step()
        reference.step()
    for name, mine in ours.items():
        assert torch.equal(mine, theirs[name]), name
        for state, expected in reference.state[theirs[name]].items():
            if mine.numel():
                assert torch.equal(optimizer.state[mine][state], expected), (name, state)


def test_groups_and_schedulers_equal_the_references() -> None:
    ours, theirs = training.make_parameters(), training.make_parameters()
    groups = training.make_groups(theirs)
    references: list[torch.optim.Optimizer] = []
    for group in groups:
        options = {k: v for k, v in group.items() if k != "algorithm"}
        kind = torch.optim.Muon if group["algorithm"] == "muon" else AdamW
        references.append(kind([options]))
    optimizer = muon.Muon(training.make_groups(ours))
    schedulers = [training.make_scheduler(each) for each in [optimizer, *references]]
    for step in range(1, STEPS + 1):
        training.set_gradients(ours, step)
        training.set_gradients(theirs, step)
        for stepped in [optimizer, *references]:
            stepped.step()
        for scheduler in schedulers:
            scheduler.step()
    for name, mine in ours.items():
        assert torch.equal(mine, theirs[name]), name


@pytest.mark.parametrize("nesterov", [True, False])
def test_bf16_with_fp32_momentum_equals_torch_over_fp32_copies(nesterov: bool) -> None:
    ours = matrices(torch.bfloat16)
    copies = [torch.nn.Parameter(p.detach().float()) for p in ours]
    optimizer = muon.Muon(ours, lr=0.02, nesterov=nesterov, momentum_dtype=torch.float32)
    reference = torch.optim.Muon(copies, lr=0.02, nesterov=nesterov)
    for step in range(1, STEPS + 1):
        set_same_gradients(step, ours, copies, dtype=torch.bfloat16)
        optimizer.step()
        reference.step()
    for mine, copy in zip(ours, copies, strict=True):
        assert torch.equal(mine, copy.bfloat16())
        assert torch.equal(optimizer.state[mine]["master"], copy)


def test_bf16_adamw_equals_the_reference_over_fp32_copies() -> None:
    ours = training.make_parameters(torch.bfloat16)
    copies = {name: torch.nn.Parameter(p.detach().float()) for name, p in ours.items()}
    optimizer = muon.Muon([{"params": list(ours.items()), "algorithm": "adamw"}])
    reference = AdamW(copies.values())
    for step in range(1, STEPS + 1):
        training.set_gradients(ours, step)
        for name, copy in copies.items():
            grad = ours[name].grad
            copy.grad = None if grad is None else grad.float()
        optimizer.step()
        reference.step()
    for name, mine in ours.items():
        assert torch.equal(mine, copies[name].bfloat16()), name


@pytest.mark.parametrize("nesterov", [True, False])
def test_bf16_momentum_is_the_rounded_average(nesterov: bool) -> None:
    """The oracle is the formula in float64: the buffer stays within one rounding per step.

    torch.optim.Muon 2.13 over bf16 parameters cannot be the oracle: with ``nesterov=False`` it
    normalizes the momentum buffer in place.
    """
    mine = torch.nn.Parameter(torch.zeros(24, 40, dtype=torch.bfloat16))
    optimizer = muon.Muon([mine], lr=0.02, nesterov=nesterov, momentum=0.9, weight_decay=0.0)
    average = torch.zeros(24, 40, dtype=torch.float64)
    for step in range(1, STEPS + 1):
        (grad,) = set_same_gradients(step, [mine], dtype=torch.bfloat16)
        optimizer.step()
        average = 0.9 * average + 0.1 * grad.double()
    buffer = optimizer.state[mine]["momentum_buffer"]
    assert buffer.dtype == torch.bfloat16
    # Each step rounds to 8 bits (half an ulp, 2^-9 relative), and later steps decay the error:
    # errors add up to at most 2^-9 / (1 - 0.9) of the largest average, about 1.
    assert (buffer.double() - average).abs().max() < 2**-9 / (1 - 0.9)


def test_tiny_gradients_do_not_explode() -> None:
    parameter = torch.nn.Parameter(torch.zeros(8, 12))
    parameter.grad = torch.full((8, 12), 1e-12)
    muon.Muon([parameter], lr=1.0, weight_decay=0.0).step()
    assert parameter.isfinite().all()
    # 1e-12 is far below eps: the quotient by eps, multiplied five times by at most the first
    # coefficient, stays far below one.
    assert parameter.abs().max() < 1e-12 / 1e-7 * 3.5**5


SPECTRA = {
    "of a random matrix": torch.linspace(0.4, 1.6, 512),
    "equal": torch.ones(512),
    "one large": torch.cat([torch.tensor([100.0]), torch.ones(511)]),
    "two levels": torch.cat([torch.ones(256), torch.full((256,), 1e-2)]),
    "decaying": torch.logspace(0, -6, 512),
    "of low rank": torch.cat([torch.ones(8), torch.zeros(504)]),
}


def usual_newton_schulz(matrix: torch.Tensor, steps: int) -> torch.Tensor:
    """Return the result of the iteration with the whole matrix in each step."""
    wide = matrix.T if matrix.size(0) > matrix.size(1) else matrix
    wide = wide / wide.norm()
    for _ in range(steps):
        gram = wide @ wide.T
        wide = 3.4445 * wide + (-4.7750 * gram + 2.0315 * gram @ gram) @ wide
    return wide.T if matrix.size(0) > matrix.size(1) else wide


@pytest.mark.quick(3)
@pytest.mark.parametrize(
    "shape",
    [
        (512, 1024),
        (1600, 512),
        *(pytest.param(shape, marks=pytest.mark.long) for shape in [(512, 512), (600, 512)]),
    ],
)
@pytest.mark.parametrize("spectrum", SPECTRA.values(), ids=SPECTRA)
def test_newton_schulz_of_large_matrices(spectrum: torch.Tensor, shape: tuple[int, int]) -> None:
    """Other operations than in torch.optim.Muon give about the same error."""
    generator = torch.Generator().manual_seed(1)
    u = torch.linalg.qr(torch.randn(512, 512, generator=generator, dtype=torch.float64))[0]
    v = torch.linalg.qr(torch.randn(max(shape), 512, generator=generator, dtype=torch.float64))[0]
    s = spectrum.double() / spectrum.double().norm()
    matrix = u @ torch.diag(s) @ v.T
    for _ in range(5):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    expected = u @ torch.diag(s) @ v.T
    if shape[0] > shape[1]:
        matrix, expected = matrix.T.contiguous(), expected.T

    def error(update: torch.Tensor) -> float:
        return float((update.double() - expected).norm() / expected.norm())

    parameter = torch.nn.Parameter(torch.zeros(matrix.shape))
    parameter.grad = matrix.float()
    torch.optim.Muon(
        [parameter], lr=1.0, weight_decay=0.0, momentum=0.0, nesterov=False
    ).step()  # torch.optim.Muon computes in bfloat16.
    stock = -parameter.detach() / max(1, matrix.size(0) / matrix.size(1)) ** 0.5
    ours = muon.orthogonalize_(matrix.bfloat16())
    assert error(ours) < 1.75 * error(stock)
    assert torch.linalg.matrix_norm(ours.double(), 2) < 1.25
    usual = usual_newton_schulz(matrix.float(), 5)
    assert error(muon.orthogonalize_(matrix.float())) < 2 * error(usual)


@pytest.mark.quick(3)
@pytest.mark.parametrize("steps", [1, 3, 4, 12])
@pytest.mark.parametrize("spectrum", [SPECTRA["of a random matrix"], SPECTRA["decaying"]])
def test_newton_schulz_of_large_matrices_with_any_number_of_steps(
    spectrum: torch.Tensor, steps: int
) -> None:
    generator = torch.Generator().manual_seed(1)
    u, v = (torch.linalg.qr(torch.randn(size, 512, generator=generator))[0] for size in (512, 1536))
    matrix = u @ torch.diag(spectrum) @ v.T
    exact = usual_newton_schulz(matrix.double(), steps)
    usual = usual_newton_schulz(matrix, steps)
    ours = muon.orthogonalize_(matrix.clone(), steps=steps)
    assert (ours - exact).norm() < 2 * (usual - exact).norm()


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_newton_schulz_of_large_matrices_propagates_nan(value: float) -> None:
    matrix = torch.randn(512, 1024, generator=torch.Generator().manual_seed(1))
    matrix[3, 4] = value
    assert muon.orthogonalize_(matrix).isnan().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("coefficients", [(1.2, 15.0, 3.0), (1.5, 0.5, 0.5)])
def test_newton_schulz_of_large_matrices_may_diverge(
    coefficients: tuple[float, float, float], dtype: torch.dtype
) -> None:
    matrix = torch.randn(512, 1024, generator=torch.Generator().manual_seed(1)).to(dtype)
    update = muon.orthogonalize_(matrix, coefficients=coefficients, steps=12)
    assert not update.isfinite().all() or update.norm() > 1e6


class Factors(TorchDispatchMode):
    """Notes the factors of products, and computes them in float32, which takes less time."""

    def __init__(self) -> None:
        super().__init__()
        self.products = 0
        self.factors = set[tuple[float, float]]()

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if function.overloadpacket is not torch.ops.aten.addmm:
            return function(*args, **kwargs)
        assert {tensor.dtype for tensor in args} == {torch.bfloat16}
        factors = {"beta": kwargs.get("beta", 1), "alpha": kwargs.get("alpha", 1)}
        self.products += 1
        self.factors.add((factors["beta"], factors["alpha"]))
        product = torch.addmm(*(tensor.float() for tensor in args), **factors)
        return kwargs["out"].copy_(product) if "out" in kwargs else product.bfloat16()


def test_newton_schulz_of_large_matrices_has_few_factors() -> None:
    """torch compiles a bfloat16 kernel for each factor of an addend, and keeps it for good."""
    generator = torch.Generator().manual_seed(1)
    with Factors() as found:
        for number in range(0, 40, 4):
            matrix = torch.randn(512, 1024, generator=generator)
            matrix[:, 0] += number  # Changes the spectrum.
            muon.orthogonalize_(matrix.bfloat16())
    assert found.products > 100
    assert len(found.factors) < 20  # Some for each matrix if they were not rounded.


@pytest.mark.parametrize("coefficients", [(1.5, -0.5, 0.0), (1.2, 0.0, -0.2), (1.0, 0.0, 0.0)])
def test_newton_schulz_of_large_matrices_with_other_coefficients(
    coefficients: tuple[float, float, float],
) -> None:
    matrix = torch.randn(512, 1024, generator=torch.Generator().manual_seed(1)).double()
    s = torch.linalg.svdvals(matrix)
    s = s / s.norm()
    ours = muon.orthogonalize_(matrix, coefficients=coefficients, steps=7)
    a, b, c = coefficients
    for _ in range(7):
        s = a * s + b * s**3 + c * s**5
    found = torch.linalg.svdvals(ours)
    assert torch.allclose(found, s.sort(descending=True).values, rtol=1e-10)


def test_newton_schulz_below_512_rows_equals_torch() -> None:
    grad = torch.randn(511, 1600, generator=torch.Generator().manual_seed(1)).bfloat16()
    parameter = torch.nn.Parameter(torch.zeros(511, 1600))
    parameter.grad = grad.float()
    torch.optim.Muon([parameter], lr=1.0, weight_decay=0.0, momentum=0.0, nesterov=False).step()
    assert torch.equal(parameter, -muon.orthogonalize_(grad.clone()).float())


@pytest.mark.parametrize("shape", [(20, 20), (20, 50), (50, 20), (1, 7)])
def test_newton_schulz_against_svd(shape: tuple[int, int]) -> None:
    """The polynomial iterated on the singular values, in float64."""
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    u, s, vh = torch.linalg.svd(matrix, full_matrices=False)
    s = s / s.norm()
    for _ in range(5):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    assert torch.allclose(muon.orthogonalize_(matrix.clone()), u @ torch.diag(s) @ vh, atol=1e-12)


def test_a_step_written_with_the_public_store() -> None:
    """A Muon step written with the public interface of the store and a float64 formula."""
    parameter = torch.nn.Parameter(torch.ones(5, dtype=torch.bfloat16))
    parameter.grad = torch.full((5,), 0.5, dtype=torch.bfloat16)
    store = tierstore.TierStore(None)
    paged = tierstore.pages.PagedParameter(
        name="p", tensor=parameter, states={"sum": torch.float32}, elementwise=True
    )
    store.pages.attach([tierstore.pages.PagedGroup(parameters=[paged], hyperparameters={})])
    for _ in range(3):
        with store.pages.sweep() as pages:
            for page in pages:
                for shard in page.shards:
                    for chunk in shard.chunks:
                        assert chunk.grad is not None
                        chunk.states["sum"] += chunk.grad
                        chunk.master -= 0.001 * chunk.states["sum"]
    states = store.pages.read_states()["p"]
    assert torch.equal(states["sum"], torch.full((5,), 1.5))
    assert torch.allclose(states["master"], torch.full((5,), 1 - 0.0005 - 0.001 - 0.0015))
    assert torch.equal(parameter, states["master"].bfloat16())
