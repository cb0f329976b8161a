"""Modes of the caller change no bit of a step, of its commit, or of a restart."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
import torch

import muon
import tierstore


@contextlib.contextmanager
def flushed() -> Iterator[None]:
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(False)


@contextlib.contextmanager
def default_dtype() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


@contextlib.contextmanager
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


MODES: dict[str, Callable[[], AbstractContextManager[object]]] = {
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "flushed": flushed,
    "default dtype": default_dtype,
    "default device": lambda: torch.device("meta"),
    "deterministic": deterministic,
    "with gradients": torch.enable_grad,
    "inference": torch.inference_mode,
}


def trained(run: Path, mode: Callable[[], AbstractContextManager[object]]) -> list[torch.Tensor]:
    """Train in a mode, commit, and read the states and weights back."""
    generator = torch.Generator().manual_seed(0)
    matrices = [torch.nn.Parameter(torch.randn(24, 16, generator=generator)) for _ in range(2)]
    vector = torch.nn.Parameter(torch.randn(700, generator=generator))
    groups = [
        {"params": [(f"m{i}", p) for i, p in enumerate(matrices)], "ns_dtype": torch.float32},
        {"params": [("v", vector)], "algorithm": "adamw", "moments_dtype": torch.bfloat16},
    ]
    parameters = [*matrices, vector]
    with tierstore.TierStore(run, page_bytes=4096, host_memory="64KiB") as store:
        optimizer = muon.Muon(groups, store=store)
        for _ in range(3):
            for parameter in parameters:
                parameter.grad = torch.randn(parameter.shape, generator=generator)
                parameter.grad[0] *= 1e-41  # Whose averages are subnormal.
            with mode():
                optimizer.clip_grad_norm_(10.0)
                optimizer.step()
                store.commit()
        states = store.pages.read_states()
    flat = [tensor for name in states for tensor in states[name].values()]
    return [*map(torch.clone, flat), *(p.detach() for p in parameters)]


@pytest.mark.parametrize("mode", MODES)
def test_no_bit_changes(mode: str, tmp_path: Path) -> None:
    expected = trained(tmp_path / "expected", contextlib.nullcontext)
    found = trained(tmp_path / "found", MODES[mode])
    assert any((state.abs() > 0).logical_and(state.abs() < 1e-38).any() for state in expected)
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)


def test_newton_schulz_in_float16_as_in_the_other_dtypes() -> None:
    """A norm above 65504, the largest number of float16, is not infinite."""
    matrix = torch.randn(64, 48, generator=torch.Generator().manual_seed(0)) * 2000
    assert matrix.norm() > 65504
    update = muon.orthogonalize_(matrix.half())
    assert (update.float() - muon.orthogonalize_(matrix.clone())).abs().max() < 0.01
    small = matrix / 2**11
    assert torch.equal(muon.orthogonalize_(small.half()), update)
