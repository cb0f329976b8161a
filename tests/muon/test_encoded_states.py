"""Encoded states: one result in every tier, after a resume and to any reader."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import muon
import tierstore
from tests.support.encoded_training import groups_of, parameters_of, train
from tests.support.independent_reader import read_run
from tierstore.tools.convert.convert import convert

ROOT = Path(__file__).resolve().parents[2]
OPTIONS: list[dict[str, Any]] = [
    {"master": "remainder"},
    {"master": "24bit"},
    {"momentum_dtype": torch.int8},
    {"momentum_dtype": torch.int8, "master": "24bit"},
    {"moments_dtype": torch.bfloat16},
    {"moments_dtype": torch.int8, "momentum_dtype": torch.int8, "master": "remainder"},
]


@pytest.mark.quick(1)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_the_result_is_one_in_every_tier_and_after_a_resume(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    expected = parameters_of()
    in_memory = muon.Muon(groups_of(expected), **options)
    train(expected, in_memory, range(6))
    wanted = in_memory.store.pages.read_states()
    run = tmp_path / "run"
    for begin, end in ((0, 2), (2, 4), (4, 6)):
        parameters = parameters_of()
        # Little memory: pages are read and written at every step.
        with tierstore.TierStore(run, host_memory="1MiB", page_bytes=4096, resume=True) as store:
            optimizer = muon.Muon(groups_of(parameters), store=store, **options)
            assert optimizer.restore() == begin
            train(parameters, optimizer, range(begin, end))
            store.synchronize()
            states = store.pages.read_states()
    content = read_run(run)
    for name, parameter in parameters.items():
        assert torch.equal(parameter, expected[name])
        for state, tensor in states[name].items():
            assert torch.equal(tensor, wanted[name][state]), (name, state)
            assert np.array_equal(content.states[name][state], tensor.float().numpy())


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_convert_gives_the_values(tmp_path: Path, options: dict[str, Any]) -> None:
    parameters = parameters_of()
    with tierstore.TierStore(tmp_path / "run") as store:
        optimizer = muon.Muon(groups_of(parameters), store=store, **options)
        train(parameters, optimizer, range(3))
        states = store.pages.read_states()
    convert([tmp_path / "run"], tmp_path / "whole.pt", to="torch")
    saved = torch.load(tmp_path / "whole.pt", weights_only=True)
    for name, tensors in states.items():
        assert torch.equal(saved["model"][name].float(), tensors["master"])


TRAIN = """
import sys, torch, muon, tierstore
from tests.support.encoded_training import groups_of, parameters_of, train

parameters = parameters_of()
with tierstore.TierStore(sys.argv[1], page_bytes=4096, host_memory="1MiB", resume=True) as store:
    optimizer = muon.Muon(groups_of(parameters), store=store, **eval(sys.argv[2]))
    first = optimizer.restore()
    for step in range(first, 40):
        train(parameters, optimizer, range(step, step + 1))
        print(step, flush=True)
"""


@pytest.mark.long
@pytest.mark.parametrize(
    "options",
    [*(pytest.param(options, marks=pytest.mark.long) for options in OPTIONS[:-1]), OPTIONS[-1]],
    ids=str,
)
def test_killed_and_resumed(tmp_path: Path, options: dict[str, Any]) -> None:
    """Kill -9 while a step is written, three times; the end equals an uninterrupted run."""
    expected = parameters_of()
    in_memory = muon.Muon(groups_of(expected), **options)
    train(expected, in_memory, range(40))
    wanted = in_memory.store.pages.read_states()
    run = tmp_path / "run"
    arguments = [sys.executable, "-c", TRAIN, str(run), repr(options)]
    numbers = random.Random(str(options))
    for _ in range(3):
        with subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
            assert process.stdout is not None
            for _ in range(numbers.randrange(1, 9)):
                assert process.stdout.readline()
            process.kill()
    parameters = parameters_of()
    with tierstore.TierStore(run, page_bytes=4096, resume=True) as store:
        optimizer = muon.Muon(groups_of(parameters), store=store, **options)
        begin = optimizer.restore()
        assert begin >= 2
        train(parameters, optimizer, range(begin, 40))
        states = store.pages.read_states()
    for name, parameter in parameters.items():
        assert torch.equal(parameter, expected[name])
        for state, tensor in states[name].items():
            assert torch.equal(tensor, wanted[name][state]), (name, state)


@pytest.mark.parametrize("prefix", ["_orig_mod.", "module.", "module._orig_mod."])
def test_random_bits_do_not_depend_on_wrappers(prefix: str, tmp_path: Path) -> None:
    """A run that goes on with torch.compile, or without, has the same moments."""
    found = []
    for number, added in enumerate(("", prefix)):
        generator = torch.Generator().manual_seed(0)
        weight = torch.nn.Parameter(torch.zeros(4, 300))
        groups = [{"params": [(f"{added}layer.w", weight)], "algorithm": "adamw"}]
        with tierstore.TierStore(tmp_path / str(number)) as store:
            optimizer = muon.Muon(groups, store=store, moments_dtype=torch.bfloat16)
            for _ in range(3):
                weight.grad = torch.randn(weight.shape, generator=generator)
                optimizer.step()
            (states,) = store.pages.read_states().values()
            found.append([*(tensor.clone() for tensor in states.values()), weight.detach()])
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)
