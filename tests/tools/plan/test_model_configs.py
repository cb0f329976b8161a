"""Parameters from configs equal transformers and published totals; all else is refused."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.model_configs import CONFIGS, LISTINGS, config_of, small_configs
from tierstore.errors import PlanError
from tierstore.tools.plan.model_configs import parameters_of
from tierstore.tools.plan.model_files import model_from_listing
from tierstore.tools.plan.models import Model

SMALL = small_configs()

# Counted by transformers 5.23.0 in the model of this config; DeepSeek-V3 is without its module for
# the prediction of a second token, which transformers does not make.
TOTALS = {
    "deepseek-v3": 671_026_404_352,
    "gemma-2-2b": 2_614_341_888,
    "gemma-2b": 2_506_172_416,
    "gemma-3-1b": 999_885_952,
    "gpt-oss-20b": 20_914_757_184,
    "gpt2-1.5b": 1_557_611_200,
    "gpt2-124m": 124_439_808,
    "kimi-k2": 1_026_408_209_408,
    "llama-2-7b": 6_738_415_616,
    "llama-3.1-405b": 405_853_388_800,
    "llama-3.1-70b": 70_553_706_496,
    "llama-3.1-8b": 8_030_261_248,
    "mistral-7b": 7_241_732_096,
    "mixtral-8x7b": 46_702_792_704,
    "qwen2-57b-a14b": 57_408_658_944,
    "qwen2.5-7b": 7_615_616_512,
    "qwen3-0.6b": 596_049_920,
    "qwen3-235b-a22b": 235_093_634_560,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-32b": 32_762_123_264,
}


@pytest.mark.parametrize("name", CONFIGS)
def test_the_total_is_the_published_one(name: str) -> None:
    assert parameters_of(config_of(name)).parameter_count == TOTALS[name]


@pytest.mark.parametrize("name", SMALL)
def test_parameters_equal_transformers(name: str) -> None:
    """Names, shapes, dtypes and order; the listings were written by transformers."""
    expected = model_from_listing((LISTINGS / f"{name}.json").read_text())
    assert parameters_of(SMALL[name]).parameters == expected.parameters


def test_every_layer_is_numbered() -> None:
    names = [parameter.name for parameter in parameters_of(config_of("llama-3.1-405b")).parameters]
    assert names[-3] == "model.layers.125.post_attention_layernorm.weight"
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float64"])
def test_the_dtype_comes_from_the_config(key: str, dtype: str) -> None:
    config = {**config_of("gpt2-124m"), key: dtype}
    assert {str(p.dtype) for p in parameters_of(config).parameters} == {f"torch.{dtype}"}


def test_values_may_have_the_names_of_other_models() -> None:
    config = config_of("gpt2-124m")
    config["hidden_size"], config["num_hidden_layers"] = config.pop("n_embd"), config["n_layer"]
    assert parameters_of(config) == parameters_of(config_of("gpt2-124m"))


def changed(name: str, **changes: Any) -> dict[str, Any]:
    return {**config_of(name), **changes}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({}, "'model_type' of the config is None.* gpt2, .*llama, .*qwen3_moe: give a listing"),
        ({"model_type": "bert"}, "is 'bert', expected one of deepseek_v3, "),
        ({"model_type": ["llama"]}, "'model_type' of the config is a list"),
        ({"model_type": "llama"}, "is missing in the config, expected an integer"),
        (changed("llama-2-7b", hidden_size="4096"), "'hidden_size' of the config is '4096'"),
        (changed("llama-2-7b", hidden_size=4096.0), "'hidden_size' of the config is 4096.0"),
        (changed("llama-2-7b", vocab_size=-1), "'vocab_size' of the config is -1"),
        (changed("llama-2-7b", num_attention_heads=True), "'num_attention_heads' .* is True"),
        (changed("llama-2-7b", num_hidden_layers=10**9), "is 1000000000, .* from 1 to 4096"),
        (changed("llama-2-7b", intermediate_size=10**5000), "is an integer of more than 63 bits"),
        (
            changed("llama-2-7b", num_attention_heads=33),
            "'hidden_size' .* multiple of the 33 heads",
        ),
        (changed("llama-3.1-8b", num_key_value_heads=5), "is 5, .* a divisor of the 32 heads"),
        (changed("llama-2-7b", tie_word_embeddings="no"), "is 'no', expected true or false"),
        (changed("llama-2-7b", torch_dtype="int8"), "'torch_dtype' .* 'int8', .* bfloat16, "),
        (changed("qwen3-0.6b", head_dim=None), "'head_dim' is missing"),
        (changed("qwen3-30b-a3b", mlp_only_layers=[1, "2"]), "is a list, .* numbers of layers"),
        (changed("qwen3-30b-a3b", mlp_only_layers={"1": 2}), "is a dict, .* numbers of layers"),
        (changed("gpt2-124m", n_head=7), "'n_head' of the config is 7, .* divisor of the 768 elem"),
        (changed("gpt2-124m", hidden_size=1600), "'hidden_size' .* 1600, .* 768, as 'n_embd' is"),
        (changed("deepseek-v3", num_local_experts=8), "'num_local_experts' .* 8, .* 256, as "),
        (changed("gpt2-124m", add_cross_attention=True), "'add_cross_attention' .* is True"),
        (changed("mixtral-8x7b", num_local_experts=2**24, hidden_size=2**24), r"e\+\d+ elements"),
    ],
)
def test_a_wrong_value_is_refused_by_name(config: Mapping[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=message) as caught:
        parameters_of(config)
    assert len(str(caught.value)) < 400


def test_queries_of_deepseek_are_either_plain_or_not() -> None:
    """Transformers takes a missing size from one model, and null for plain queries."""
    config = config_of("deepseek-v3")
    del config["q_lora_rank"]
    with pytest.raises(PlanError, match="'q_lora_rank' is missing"):
        parameters_of(config)


SIZES = [0, 1, 2, 3, 8, 4096, 4097, 2**24, 2**24 + 1, 10**9, 2**63, 10**5000, -1]
VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.sampled_from(SIZES),
    st.integers(-5, 200),
    st.floats(),
    st.text(max_size=20),
    st.lists(st.integers(-1, 5) | st.text(max_size=2), max_size=3),
    st.dictionaries(st.text(max_size=3), st.integers(), max_size=2),
)
TYPES = sorted({config["model_type"] for config in SMALL.values()})


@st.composite
def mutated_configs(draw: st.DrawFn) -> dict[str, Any]:
    """Configs with some values replaced or removed, or of another type of model."""
    config = dict(SMALL[draw(st.sampled_from(sorted(SMALL)))])
    keys = st.sampled_from(sorted({*config, "head_dim", "dtype", "mlp_only_layers", "n_inner"}))
    for key in draw(st.lists(keys, min_size=1, max_size=4)):
        if draw(st.booleans()):
            config[key] = draw(VALUES)
        else:
            config.pop(key, None)
    if draw(st.integers(0, 3)) == 0:
        config["model_type"] = draw(st.sampled_from(TYPES))
    return config


@settings(max_examples=500)
@given(mutated_configs())
def test_a_mutated_config_gives_a_model_or_one_error(config: dict[str, Any]) -> None:
    start = time.process_time()
    try:
        found: Model | PlanError = parameters_of(config)
    except PlanError as error:
        found = error
    assert time.process_time() - start < 1
    if isinstance(found, PlanError):
        assert 20 < len(str(found)) < 500
    else:
        sizes = [math.prod(parameter.shape) for parameter in found.parameters]
        assert min(sizes) > 0
        assert found.parameter_count == sum(sizes)
