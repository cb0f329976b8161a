"""Momentum in 8 bits, against torch.optim with the momentum rounded by numpy after each step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import muon
import tierstore
from tests.support.encoded_training import (
    SHAPES,
    bytes_of_second_step,
    groups_of,
    parameters_of,
    train,
)


def rounded(values: torch.Tensor) -> torch.Tensor:
    """The nearest of 255 fourth powers in each block of 256 columns, in numpy's float32."""
    found = values.numpy().copy()
    powers = (np.arange(128, dtype=np.float32) ** 2) ** 2
    for start in range(0, found.shape[1], 256):
        block = found[:, start : start + 256]
        scale = np.abs(block).max(1, keepdims=True) / powers[-1]
        sizes = np.abs(block / np.where(scale > 0, scale, np.float32(1)))
        below = np.clip(np.searchsorted(powers, sizes, "right") - 1, 0, 126)
        parts = (sizes - powers[below]) / (powers[below + 1] - powers[below])
        block[:] = np.copysign(powers[below + (parts > 0.5)], block) * scale
    return torch.from_numpy(found)


def test_a_step_computes_with_the_new_momentum_and_rounds_it_afterwards() -> None:
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(40, 700, generator=generator)
    expected = torch.nn.Parameter(values.clone())
    stock = torch.optim.Muon([expected], lr=0.02)
    parameter = torch.nn.Parameter(values.clone())
    optimizer = muon.Muon([("w", parameter)], lr=0.02, momentum_dtype=torch.int8)
    for _ in range(20):
        expected.grad = torch.randn(40, 700, generator=generator)
        parameter.grad = expected.grad.clone()
        stock.step()
        optimizer.step()
        assert torch.equal(parameter, expected)
        buffer = stock.state[expected]["momentum_buffer"]
        buffer.copy_(rounded(buffer))
        assert torch.equal(optimizer.state[parameter]["momentum_buffer"], buffer)


def test_a_large_column_leaves_the_others_their_direction() -> None:
    factors = torch.ones(256)
    factors[7] = 1000
    momenta = []
    for dtype in (torch.float32, torch.int8):
        parameter = torch.nn.Parameter(torch.zeros(64, 256))
        optimizer = muon.Muon([("w", parameter)], momentum_dtype=dtype, ns_steps=0)
        generator = torch.Generator().manual_seed(0)
        for _ in range(20):
            parameter.grad = torch.randn(64, 256, generator=generator) * factors
            optimizer.step()
        momenta.append(optimizer.state[parameter]["momentum_buffer"][:, factors == 1].flatten())
    assert torch.cosine_similarity(*momenta, dim=0) > 0.98


def test_short_rows_stay_bfloat16() -> None:
    parameters = parameters_of()
    optimizer = muon.Muon(groups_of(parameters), momentum_dtype=torch.int8)
    train(parameters, optimizer, range(1))
    states = optimizer.store.pages.read_states()
    assert states["tall"]["momentum_buffer"].dtype == torch.bfloat16
    assert states["wide"]["momentum_buffer"].dtype == torch.float32


def test_a_step_moves_the_ideal_bytes(tmp_path: Path) -> None:
    """Read: 8 bits of the master, 8 of the momentum; written: the parameter as well."""
    parameter = torch.nn.Parameter(torch.zeros(2048, 2048, dtype=torch.bfloat16))
    options: dict[str, Any] = {"master": "24bit", "momentum_dtype": torch.int8, "ns_steps": 0}
    with tierstore.TierStore(tmp_path / "run", host_memory="64MiB", buffers=2) as store:
        optimizer = muon.Muon([("w", parameter)], store=store, **options)
        read, written = bytes_of_second_step(optimizer, parameter)
        stats = store.stats()
    assert stats.steps == 2
    assert stats.bytes_written_per_step == stats.bytes_written / 2
    assert stats.bytes_written_per_day == stats.bytes_written / stats.seconds * 86_400
    assert read == pytest.approx(2 * parameter.numel(), rel=0.02)
    assert written == pytest.approx(4 * parameter.numel(), rel=0.02)


@pytest.mark.quick(1)
@pytest.mark.parametrize("before", [None, torch.float32, torch.int8])
@pytest.mark.parametrize("after", [None, torch.float32, torch.int8])
def test_a_checkpoint_begins_a_run_with_another_momentum(
    tmp_path: Path, before: torch.dtype | None, after: torch.dtype | None
) -> None:
    parameters = parameters_of()
    with tierstore.TierStore(tmp_path / "run") as store:
        optimizer = muon.Muon(groups_of(parameters), store=store, momentum_dtype=before)
        train(parameters, optimizer, range(3))
        store.checkpoint(tmp_path / "checkpoint")
        saved = store.pages.read_states()["wide"]["momentum_buffer"]
    loaded = parameters_of()
    with tierstore.TierStore(tmp_path / "other", page_bytes=4096) as store:
        optimizer = muon.Muon(groups_of(loaded), store=store, momentum_dtype=after)
        assert optimizer.restore(checkpoint=tmp_path / "checkpoint") == 3
        found = store.pages.read_states()["wide"]["momentum_buffer"]
    expected = saved.to(torch.bfloat16) if after is None else saved
    if after == torch.int8 and before != torch.int8:
        expected = rounded(saved.float())
    assert torch.equal(found, expected)
    assert all(torch.equal(loaded[name], parameters[name]) for name in SHAPES)


def test_a_state_dict_carries_the_values() -> None:
    parameters = parameters_of()
    optimizer = muon.Muon(groups_of(parameters), momentum_dtype=torch.int8)
    train(parameters, optimizer, range(3))
    others = {name: torch.nn.Parameter(p.detach().clone()) for name, p in parameters.items()}
    loaded = muon.Muon(groups_of(others), momentum_dtype=torch.int8)
    loaded.load_state_dict(optimizer.state_dict())
    before, after = optimizer.store.pages.read_states(), loaded.store.pages.read_states()
    for name, states in before.items():
        for state, tensor in states.items():
            torch.testing.assert_close(after[name][state], tensor, rtol=2**-22, atol=0)


def test_matrices_that_cut_a_block_are_refused() -> None:
    parameter = torch.nn.Parameter(torch.zeros(64, 512))
    group = {"params": [("heads", parameter)], "matrices": (("blocks", 1, 64),)}
    with pytest.raises(ValueError, match=r"'heads' has shape \(64, 512\): a matrix has its colum"):
        muon.Muon([group], momentum_dtype=torch.int8)
    fits = {"params": [("heads", parameter)], "matrices": (("blocks", 1, 256),)}
    optimizer = muon.Muon([fits], momentum_dtype=torch.int8)
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()


def test_gradients_of_zeros_leave_a_momentum_of_zeros() -> None:
    parameter = torch.nn.Parameter(torch.ones(4, 300))
    optimizer = muon.Muon([("w", parameter)], momentum_dtype=torch.int8)
    parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    assert not optimizer.state[parameter]["momentum_buffer"].any()


def test_what_is_not_a_state_of_float32_is_refused() -> None:
    parameter = torch.nn.Parameter(torch.zeros(4, 300))
    for states, encodings, message in (
        (
            {"m": torch.bfloat16},
            {"m": "int8_root"},
            r"'int8_root' for 'm', which must be a float32 state",
        ),
        ({}, {"m": "int8_root"}, r"'int8_root' for 'm', which must be a float32 state"),
        ({"m": torch.float32}, {"m": "int4"}, r"'int4' for the encoding of 'm'; it can have: 'i"),
        (
            {"m": torch.float32, "m_int8_root": torch.float32},
            {"m": "int8_root"},
            r"a state 'm_int8_root', which is the name of a tensor of an encoded state",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            tierstore.pages.PagedParameter(
                name="w", tensor=parameter, states=states, encodings=encodings
            )
