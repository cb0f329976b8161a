"""Parameters from configs equal the models that transformers makes on the meta device."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.peers.transformers_models import model_of, named_parameters
from tests.support.model_configs import CONFIGS, LISTINGS, config_of, small_configs
from tierstore.errors import PlanError
from tierstore.tools.plan.model_configs import parameters_of
from tierstore.tools.plan.model_files import read_model
from tierstore.tools.plan.models import model_from_module

SMALL = small_configs()
# "whole" or "small", and a name: of a published model, or also of a variant with few layers.
CASES = [
    *(("whole", name) for name in CONFIGS),
    *(("small", name) for name in SMALL),
]


def config(kind: str, name: str) -> Mapping[str, Any]:
    return config_of(name) if kind == "whole" else SMALL[name]


@pytest.mark.parametrize(("kind", "name"), CASES)
def test_names_shapes_dtypes_and_order_are_equal(kind: str, name: str) -> None:
    module = model_of(config(kind, name))
    assert parameters_of(config(kind, name)).parameters == model_from_module(module).parameters


@pytest.mark.parametrize("name", SMALL)
def test_listings_equal_this_version(name: str) -> None:
    listing = json.loads((LISTINGS / f"{name}.json").read_text())
    assert list(listing.items()) == list(named_parameters(SMALL[name]).items())


@pytest.mark.parametrize("name", sorted(set(CONFIGS) - {"kimi-k2"}))
def test_a_config_that_transformers_saved_gives_the_same_model(name: str, tmp_path: Path) -> None:
    """It names some values otherwise than configs on the hub, and has defaults written out."""
    module = model_of(SMALL[name])
    module.config.save_pretrained(tmp_path)
    assert read_model(tmp_path).parameters == parameters_of(SMALL[name]).parameters


HEADS = ("num_attention_heads", "num_key_value_heads", "n_head")
SIZES = ("intermediate_size", "moe_intermediate_size", "vocab_size", "n_inner", "n_positions")
SIZES += ("head_dim", "v_head_dim", "kv_lora_rank", "qk_rope_head_dim", "n_shared_experts")
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
FLAGS = ("attention_bias", "mlp_bias", "qkv_bias", "tie_word_embeddings", "add_cross_attention")
CHANGES: dict[str, tuple[Any, ...]] = {
    # Multiples of all numbers of heads, as some models of transformers demand.
    **dict.fromkeys(("hidden_size", "n_embd"), (256, 512)),
    **dict.fromkeys(HEADS, (1, 2, 4, 16)),
    **dict.fromkeys(SIZES, (1, 2, 6, 100)),
    **dict.fromkeys(EXPERTS, (1, 3)),
    **dict.fromkeys(FLAGS, (True, False)),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "decoder_sparse_step"), (1, 2, 3)),
    **dict.fromkeys(("dtype", "torch_dtype"), ("float32", "bfloat16", "float16")),
    "first_k_dense_replace": (0, 1, 2, 3),
    "mlp_only_layers": ([], [0], [1, 2], [2, 9]),
    "q_lora_rank": (None, 8),
}


@settings(max_examples=1000)
@given(st.sampled_from(sorted(SMALL)), st.data())
def test_changed_values_change_both_models(name: str, data: st.DataObject) -> None:
    values = dict(SMALL[name])
    for key in data.draw(st.lists(st.sampled_from(sorted(CHANGES)), min_size=1, max_size=4)):
        values[key] = data.draw(st.sampled_from(CHANGES[key]))
    try:
        found = parameters_of(values).parameters
    except PlanError:
        return  # Transformers takes more: heads that do not divide, and keys that contradict.
    assert found == model_from_module(model_of(values)).parameters
