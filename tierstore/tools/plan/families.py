"""Models by name: families of published models, with the sizes in their ``config.json``.

Does not import torch, so that a wrong name is refused at once.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from tierstore.errors import PlanError

MODEL_EXPECTED = (
    "name a config.json, a directory with one, a listing of parameters, or a model such as "
    "llama-3.1-8b"
)

_GROUPED = (
    *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "vocab_size", "tie_word_embeddings"),
)

_DENSE: Mapping[str, tuple[Mapping[str, Any], Mapping[str, tuple[Any, ...]]]] = {
    "llama-2": (
        {"model_type": "llama"},
        {
            "7b": (4096, 11008, 32, 32, 32, 32000, False),
            "13b": (5120, 13824, 40, 40, 40, 32000, False),
            "70b": (8192, 28672, 80, 64, 8, 32000, False),
        },
    ),
    "llama-3.1": (
        {"model_type": "llama"},
        {
            "8b": (4096, 14336, 32, 32, 8, 128256, False),
            "70b": (8192, 28672, 80, 64, 8, 128256, False),
            "405b": (16384, 53248, 126, 128, 8, 128256, False),
        },
    ),
    "llama-3.2": (
        {"model_type": "llama"},
        {
            "1b": (2048, 8192, 16, 32, 8, 128256, True),
            "3b": (3072, 8192, 28, 24, 8, 128256, True),
        },
    ),
    "mistral": (
        {"model_type": "mistral"},
        {"7b": (4096, 14336, 32, 32, 8, 32768, False)},
    ),
    "qwen2.5": (
        {"model_type": "qwen2"},
        {
            "0.5b": (896, 4864, 24, 14, 2, 151936, True),
            "1.5b": (1536, 8960, 28, 12, 2, 151936, True),
            "3b": (2048, 11008, 36, 16, 2, 151936, True),
            "7b": (3584, 18944, 28, 28, 4, 152064, False),
            "14b": (5120, 13824, 48, 40, 8, 152064, False),
            "32b": (5120, 27648, 64, 40, 8, 152064, False),
            "72b": (8192, 29568, 80, 64, 8, 152064, False),
        },
    ),
    "qwen3": (
        {"model_type": "qwen3", "head_dim": 128},
        {
            "0.6b": (1024, 3072, 28, 16, 8, 151936, True),
            "1.7b": (2048, 6144, 28, 16, 8, 151936, True),
            "4b": (2560, 9728, 36, 32, 8, 151936, True),
            "8b": (4096, 12288, 36, 32, 8, 151936, False),
            "14b": (5120, 17408, 40, 40, 8, 151936, False),
            "32b": (5120, 25600, 64, 64, 8, 151936, False),
        },
    ),
}
"""Family -> values that all sizes share, and the values of ``_GROUPED`` of each size."""

_OTHERS: Mapping[str, Mapping[str, Mapping[str, Any]]] = {
    "deepseek": {
        "v3": {
            "model_type": "deepseek_v3",
            "hidden_size": 7168,
            "intermediate_size": 18432,
            "num_hidden_layers": 61,
            "num_attention_heads": 128,
            "num_key_value_heads": 128,
            "vocab_size": 129280,
            "n_routed_experts": 256,
            "num_experts_per_tok": 8,
            "first_k_dense_replace": 3,
            "moe_intermediate_size": 2048,
            "n_shared_experts": 1,
            "q_lora_rank": 1536,
            "kv_lora_rank": 512,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "v_head_dim": 128,
        },
    },
}


def families() -> list[str]:
    """Return the names of the families."""
    return sorted({*_DENSE, *_OTHERS})


def sizes_of(family: str) -> list[str]:
    """Return the sizes of a family, the smallest first.

    Raises:
        PlanError: the family is not known.
    """
    known = family.lower()
    if known in _DENSE:
        return list(_DENSE[known][1])
    if known in _OTHERS:
        return list(_OTHERS[known])
    raise PlanError(
        f"{family!r} is not a known family of models, expected one of "
        f"{', '.join(families())}: give a config.json or a listing of parameters"
    )


def config_of(model: str | os.PathLike[str]) -> dict[str, Any] | None:
    """Return the config of a known model, with parameters of bfloat16; None for a path.

    Args:
        model: a path; or, if there is none, family and size, such as "llama-3.1-8b".

    Raises:
        PlanError: neither a path that can be read nor a known name.
    """
    try:
        os.stat(os.path.abspath(model))
    except (OSError, ValueError) as error:
        absent = error
    else:
        return None
    name = os.fspath(model).lower()
    family, _, size = name.rpartition("-")
    common, sizes = _DENSE.get(family, ({}, {}))
    if size in sizes:
        return {**common, **dict(zip(_GROUPED, sizes[size], strict=True)), "dtype": "bfloat16"}
    if size in _OTHERS.get(family, {}):
        return {**_OTHERS[family][size], "dtype": "bfloat16"}
    if name in families():
        known = ", ".join(f"{model}-{size}" for size in sizes_of(name))
        raise PlanError(f"{model} is a family of models: name one of {known}")
    raise PlanError(f"{model} cannot be read ({absent}): {MODEL_EXPECTED}") from absent
