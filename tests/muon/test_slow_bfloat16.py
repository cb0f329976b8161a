"""The warning on a CPU without instructions for bfloat16."""

from __future__ import annotations

import contextlib
import os
import platform
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import muon
import tierstore
from muon import newton_schulz
from tests.support.twins import parameter

LARGE = (400, 500)


@pytest.fixture(autouse=True)
def slow(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(newton_schulz, "bfloat16_slowness", lambda: 40.0)
    with warnings.catch_warnings(action="error"):
        yield


def step(optimizer: muon.Muon) -> None:
    for group in optimizer.param_groups:
        for each in group["params"]:
            each.grad = torch.ones_like(each)
    optimizer.step()


def test_the_first_step_warns_once_and_says_what_to_pass() -> None:
    optimizer = muon.Muon([parameter(shape=LARGE)])
    with pytest.warns(UserWarning, match=r'40 times slower .* ns_dtype="auto" or ns_dtype=torch'):
        step(optimizer)
    step(optimizer)


@pytest.mark.parametrize(
    "group",
    [
        {"ns_dtype": torch.float32},
        {"algorithm": "adamw"},
        {"params": [nn.Parameter(torch.zeros(20, 30))]},
    ],
)
def test_a_step_without_much_newton_schulz_in_bfloat16_says_nothing(group: dict[str, Any]) -> None:
    step(muon.Muon([{"params": [parameter(shape=LARGE)], **group}]))


def test_a_fast_cpu_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(newton_schulz, "bfloat16_slowness", lambda: 1.0)
    step(muon.Muon([parameter(shape=LARGE)]))


def test_a_resumed_run_in_float32_says_nothing(tmp_path: Path) -> None:
    """restore() brings the dtype of the run."""
    for resume in (False, True):
        with tierstore.TierStore(tmp_path, resume=resume) as store:
            dtype = torch.bfloat16 if resume else torch.float32
            optimizer = muon.Muon([parameter(shape=LARGE)], store=store, ns_dtype=dtype)
            text = "ns_dtype of group 0 is torch.float32, given torch.bfloat16"
            with pytest.warns(UserWarning, match=text) if resume else contextlib.nullcontext():
                optimizer.restore()
            step(optimizer)


PROGRAM = """
import time
from muon import newton_schulz
began = time.process_time()
slowness = newton_schulz.bfloat16_slowness()
print(slowness, time.process_time() - began)
"""


@pytest.mark.long
@pytest.mark.skipif(platform.machine() != "x86_64", reason="the setting is for x86-64")
def test_a_cpu_without_the_instructions_is_found_slow() -> None:
    """oneDNN, which multiplies for torch, can be told to use the instructions of an older CPU."""
    output = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env={**os.environ, "ONEDNN_MAX_CPU_ISA": "AVX2"},
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    slowness, seconds = map(float, output.split())
    assert slowness > 4
    assert seconds < 1  # Of all threads; other processes do not count. 0.1 s was measured.
