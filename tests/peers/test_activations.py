"""Activations that are estimated from shapes, against torch's own count for models of
transformers.

The models are of tensors without values, so that their size costs nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker

from tierstore.tools.plan.activations import activations_of
from tierstore.tools.plan.doubts import LEAST, MOST
from tierstore.tools.plan.models import model_from_module

CONTEXT = 2048
SHAPES = {
    "llama-3.1-8b": (4096, 14336, 32, 8),
    "llama-3.1-70b": (8192, 28672, 64, 8),
    "llama-2-7b": (4096, 11008, 32, 32),
}
"""Width, width within the MLP, heads, heads of keys and values."""


def model_of(name: str, layers: int, vocabulary: int) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    width, inner, heads, pairs = SHAPES[name]
    config = LlamaConfig(
        hidden_size=width,
        intermediate_size=inner,
        num_attention_heads=heads,
        num_key_value_heads=pairs,
        num_hidden_layers=layers,
        vocab_size=vocabulary,
    )
    return LlamaForCausalLM(config)


def qwen3_of(name: str, layers: int, vocabulary: int) -> Any:
    from transformers import Qwen3Config
    from transformers.models.qwen3 import Qwen3ForCausalLM

    config = Qwen3Config(
        hidden_size=2560,
        intermediate_size=9728,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        num_hidden_layers=layers,
        vocab_size=vocabulary,
    )
    return Qwen3ForCausalLM(config)


def peak_of_token(name: str, *, layers: int, vocabulary: int, checkpointing: bool) -> float:
    """Return the bytes of one more token in the peak of a forward and backward."""
    make = qwen3_of if name == "qwen3-4b" else model_of
    peaks = []
    for windows in (64, 128):
        with FakeTensorMode(allow_non_fake_inputs=True):
            torch.set_default_dtype(torch.bfloat16)
            try:
                model = make(name, layers, vocabulary)
            finally:
                torch.set_default_dtype(torch.float32)
            if checkpointing:
                model.gradient_checkpointing_enable({"use_reentrant": False})
            tokens = torch.zeros(windows, CONTEXT, dtype=torch.long)
            tracker = MemTracker()
            tracker.track_external(model)
            with tracker:
                model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
        peaks.append(tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"])
    return (peaks[1] - peaks[0]) / (64 * CONTEXT)


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("name", [*SHAPES, "qwen3-4b"])
def test_activations_of_layers(name: str, checkpointing: bool) -> None:
    layers, vocabulary = 4, 64
    with torch.device("meta"):
        make = qwen3_of if name == "qwen3-4b" else model_of
        model = model_from_module(make(name, layers, vocabulary).to(torch.bfloat16))
    found = activations_of(model, 2**20, checkpointing=checkpointing, loss_tokens=1)
    counted = peak_of_token(name, layers=layers, vocabulary=vocabulary, checkpointing=checkpointing)
    estimate = (found.kept + found.in_layer) / 2**20
    assert LEAST * estimate < counted < MOST * estimate
    if name in SHAPES:
        assert estimate == pytest.approx(counted, rel=0.12)


def test_logits() -> None:
    counted = peak_of_token("llama-3.1-8b", layers=1, vocabulary=128_256, checkpointing=True)
    with torch.device("meta"):
        model = model_from_module(model_of("llama-3.1-8b", 1, 128_256).to(torch.bfloat16))
    found = activations_of(model, 2**20, checkpointing=True, loss_tokens=None)
    estimate = (found.kept + found.logits) / 2**20
    assert LEAST * estimate < counted < 1.02 * estimate
