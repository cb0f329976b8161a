"""Configs of published models, and of the same models with few layers and other switches."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

PLAN = Path(__file__).resolve().parents[1] / "tools/plan"
CONFIGS = {path.stem: path for path in sorted((PLAN / "configs").glob("*.json"))}
LISTINGS = PLAN / "listings"

_SHALLOW = {
    "num_hidden_layers": 2,
    "n_layer": 2,
    # One layer without experts, and one with them.
    "first_k_dense_replace": 1,
}

# In place of a value: the config does not have the key.
_ABSENT = object()

# Name -> the config of a model, and what is changed in it.
_VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-biases": ("llama-2-7b", {"attention_bias": True, "mlp_bias": True}),
    "llama-first": ("llama-2-7b", {"num_key_value_heads": _ABSENT, "torch_dtype": _ABSENT}),
    "llama-head-dim": ("llama-3.1-8b", {"head_dim": 64, "tie_word_embeddings": True}),
    "mistral-head-dim": ("mistral-7b", {"head_dim": 160}),
    "qwen3-biases": ("qwen3-32b", {"attention_bias": True}),
    "qwen2-moe-no-bias": ("qwen2-57b-a14b", {"qkv_bias": False, "dtype": "float32"}),
    "qwen2-moe-some-dense": (
        "qwen2-57b-a14b",
        {"num_hidden_layers": 7, "decoder_sparse_step": 2, "mlp_only_layers": [1, 4]},
    ),
    "qwen3-moe-some-dense": (
        "qwen3-30b-a3b",
        {
            **{"num_hidden_layers": 7, "decoder_sparse_step": 3, "mlp_only_layers": [5]},
            "head_dim": _ABSENT,
        },
    ),
    "deepseek-plain-queries": ("deepseek-v3", {"q_lora_rank": None, "attention_bias": True}),
    "deepseek-shared": ("deepseek-v3", {"n_shared_experts": 2, "first_k_dense_replace": 0}),
    "gpt2-untied": ("gpt2-124m", {"n_inner": 1000, "tie_word_embeddings": False}),
    "gemma-untied": ("gemma-2b", {"tie_word_embeddings": False, "attention_bias": True}),
    "gpt-oss-no-bias": ("gpt-oss-20b", {"attention_bias": False}),
}


def config_of(name: str) -> dict[str, Any]:
    """Return the config of a published model."""
    config: dict[str, Any] = json.loads(CONFIGS[name].read_text())
    return config


def small_configs() -> dict[str, dict[str, Any]]:
    """Name -> config of few layers: of every published model, and of every variant."""
    changed = {**{name: (name, {}) for name in CONFIGS}, **_VARIANTS}
    configs = {}
    for name, (original, changes) in changed.items():
        config = config_of(original)
        config |= {key: layers for key, layers in _SHALLOW.items() if key in config} | changes
        configs[name] = {key: value for key, value in config.items() if value is not _ABSENT}
    return configs
