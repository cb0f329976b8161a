"""Activations by hand; ``tests/peers/test_activations.py`` counts them for real models."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tierstore.tools.plan.activations import activations_of
from tierstore.tools.plan.job import Job
from tierstore.tools.plan.memory import job_activations
from tierstore.tools.plan.model_files import model_from_listing, read_model
from tierstore.tools.plan.models import Model

TOKENS = 4096
MODEL = model_from_listing(
    {
        "embed.weight": {"shape": [1000, 64], "dtype": "bfloat16"},
        **{
            f"layers.{n}.{name}": {"shape": shape, "dtype": "bfloat16"}
            for n in range(3)
            for name, shape in {"up": [256, 64], "down": [64, 256], "norm": [64]}.items()
        },
        "head.weight": {"shape": [1000, 64], "dtype": "bfloat16"},
    }
)


def test_checkpointing_keeps_the_inputs_of_layers() -> None:
    found = activations_of(MODEL, TOKENS, checkpointing=True, loss_tokens=None)
    assert found.kept == TOKENS * 3 * 64 * 2
    kept = activations_of(MODEL, TOKENS, checkpointing=False, loss_tokens=None)
    # Inputs and outputs of the matrices of three layers, and what lies between them.
    assert kept.kept == pytest.approx(TOKENS * 2 * 3 * 2 * (64 + 256) * 1.33, rel=1e-6)
    assert found.in_layer > kept.in_layer > 0


def test_logits_of_some_tokens_at_once() -> None:
    """Bfloat16, and float32 for the value, its logarithm and the gradient."""
    for loss_tokens, tokens in ((None, TOKENS), (1024, 1024), (10**6, TOKENS)):
        found = activations_of(MODEL, TOKENS, checkpointing=True, loss_tokens=loss_tokens)
        assert found.logits == tokens * 1000 * (2 + 12)
    wide = Model("wide", tuple(replace(p, dtype=torch.float32) for p in MODEL.parameters))
    found = activations_of(wide, TOKENS, checkpointing=True, loss_tokens=None)
    assert found.logits == TOKENS * 1000 * 12


def test_a_token_visits_some_experts() -> None:
    model = read_model("deepseek-v3")
    kept = activations_of(model, 1, checkpointing=False, loss_tokens=None)
    # 58 layers with 8 of 256 experts, whose gate and up are one matrix, and a shared one.
    experts = 58 * 8 * ((2 * 2048 + 7168) + (7168 + 2048))
    everything = 58 * 256 * ((2 * 2048 + 7168) + (7168 + 2048))
    assert 2 * 1.33 * experts < kept.kept < 0.2 * 2 * 1.33 * everything


def test_names_without_numbers_are_one_layer() -> None:
    model = model_from_listing({"up": [256, 64], "down": [64, 256]})
    found = activations_of(model, TOKENS, checkpointing=False, loss_tokens=None)
    assert found.logits == 0
    assert found.kept > 0


def test_a_job_has_micro_batches() -> None:
    job = Job(cpu_ranks=2, tokens=20_000)
    assert (job.tokens_at_once, job.micro_batches) == (4096, 3)
    small = Job(cpu_ranks=2, tokens=2000)
    assert (small.tokens_at_once, small.micro_batches) == (1000, 1)
    assert job_activations(Job(), MODEL) is None
    given = job_activations(Job(activation_bytes=7, tokens=2000), MODEL)
    assert given is not None
    assert (given.kept, given.in_layer, given.logits) == (7, 0, 0)
