"""Values of parameters that no step reads: written for commits only."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import muon
import tierstore
from tests.support.encoded_training import (
    ADAMW,
    SHAPES,
    gradient,
    groups_of,
    parameters_of,
    train,
)
from tests.support.independent_reader import read_run

# Little memory: pages are read and written at every step.
SMALL: dict[str, Any] = {"host_memory": "1MiB", "page_bytes": 4096}


@pytest.mark.parametrize(
    ("dtype", "master", "each_step", "at_commits"),
    [
        (torch.bfloat16, "remainder", 2 + 2, 2),
        (torch.bfloat16, "24bit", 1 + 2, 2),
        (torch.bfloat16, None, 4 + 2, 0),
        (torch.float32, None, 4, 4),
    ],
    ids=str,
)
def test_steps_write_the_ideal_bytes(
    tmp_path: Path, dtype: torch.dtype, master: str | None, each_step: int, at_commits: int
) -> None:
    parameter = torch.nn.Parameter(torch.zeros(1024, 1024, dtype=dtype))
    with tierstore.TierStore(tmp_path, host_memory="32MiB", buffers=2, commit_every=4) as store:
        optimizer = muon.Muon([("w", parameter)], store=store, master=master, ns_steps=0)
        parameter.grad = torch.ones_like(parameter)
        written = []
        for _ in range(8):
            before = store.stats().bytes_written
            optimizer.step()
            store.commit()
            written.append(store.stats().bytes_written - before)
    numel = parameter.numel()
    expected = [each_step + (at_commits if step % 4 == 0 else 0) for step in range(1, 9)]
    assert [found / numel for found in written] == pytest.approx(expected, rel=0.005)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("commit_every", [3, None])
def test_every_commit_has_the_parameters(
    tmp_path: Path, dtype: torch.dtype, commit_every: int | None
) -> None:
    """Those that are not due, too, and parameters without a gradient in the last steps."""
    options = {} if dtype == torch.float32 else {"master": "remainder"}
    expected = parameters_of(dtype)
    reference = muon.Muon(groups_of(expected), **options)

    def do(step: int, parameters: dict[str, Any], optimizer: muon.Muon) -> None:
        has_all = step % 3 == 0
        for name, parameter in parameters.items():
            value = gradient(name, step, parameter).to(parameter.dtype)
            parameter.grad = value if has_all or name not in ADAMW else None
        optimizer.step()

    for begin, end in ((0, 1), (1, 3), (3, 7), (7, 8)):
        parameters = parameters_of(dtype)
        with tierstore.TierStore(
            tmp_path, commit_every=commit_every, resume=True, **SMALL
        ) as store:
            optimizer = muon.Muon(groups_of(parameters), store=store, **options)
            assert optimizer.restore() == begin
            for step in range(begin, end):
                do(step, parameters, optimizer)
                do(step, expected, reference)
            store.synchronize()
            content = read_run(tmp_path)
        wanted = reference.store.read_states()
        for name, parameter in parameters.items():
            assert torch.equal(parameter, expected[name]), name
            if dtype == torch.float32:
                wanted[name]["master"] = parameter
            for state, tensor in wanted[name].items():
                value = tensor.detach().float().numpy()
                assert np.array_equal(content.states[name][state], value), (name, state)


def test_a_change_between_commits_is_one_in_every_tier(tmp_path: Path) -> None:
    """All remainders of the parameter are cleared: no page need have its former values."""
    found = []
    for place in ("memory", "nvme", "host", "moved"):
        parameters = parameters_of()
        path = None if place == "memory" else tmp_path / place
        with tierstore.TierStore(path, commit_every=4, page_bytes=4096) as store:
            optimizer = muon.Muon(groups_of(parameters), store=store, master="remainder")
            train(parameters, optimizer, range(1))
            if place != "memory":
                store.move("host" if place == "host" else "nvme")
            train(parameters, optimizer, range(1, 2))
            with torch.no_grad():
                parameters["wide"][3, 5] += 1
            if place == "moved":
                store.move("host")
            read = store.read_states()
            assert torch.equal(read["wide"]["master"], parameters["wide"].detach().float())
            for group in optimizer.param_groups:
                group.update(lr=0.0)
            for parameter in parameters.values():
                parameter.grad = torch.zeros_like(parameter)
            if place == "moved":  # The warning came as the pages moved.
                optimizer.step()
            else:
                with pytest.warns(UserWarning, match=r"parameter 'wide' was changed outside"):
                    optimizer.step()
            found.append(store.read_states())
    for states in found[1:]:
        for name in SHAPES:
            for state, tensor in found[0][name].items():
                assert torch.equal(states[name][state], tensor), (name, state)


def test_steps_alone_clear_no_remainder(tmp_path: Path) -> None:
    expected, parameters = parameters_of(), parameters_of()
    with tierstore.TierStore(tmp_path, commit_every=4, **SMALL) as store, warnings.catch_warnings():
        warnings.simplefilter("error")
        train(expected, muon.Muon(groups_of(expected), master="remainder"), range(9))
        optimizer = muon.Muon(groups_of(parameters), store=store, master="remainder")
        train(parameters, optimizer, range(9))
    for name, parameter in parameters.items():
        assert torch.equal(parameter, expected[name])
