"""Parameters of a model from its ``config.json``, without its weights and without transformers.

Names, shapes and order are as in ``named_parameters()`` of the ``...ForCausalLM`` that
transformers 5 makes. It has all experts of a layer in one parameter, whose first dimension is the
expert; transformers 4 and checkpoints on the hub have parameters for each expert. Plan for those
from the module or from a listing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from tierstore.errors import PlanError
from tierstore.tools.plan.config_values import Config, shown
from tierstore.tools.plan.models import Model, ModelParameter

_LAYERS_MAX = 4096

_Named = tuple[str, tuple[int, ...]]
"""A parameter's name and shape."""


def parameters_of(config: Mapping[str, Any]) -> Model:
    """Return the parameters of the model that a config describes.

    A config without a dtype gives float32, as in torch and transformers. Quantization is ignored:
    quantized weights are not trained.

    Args:
        config: the content of a ``config.json``. A missing size is refused: transformers would
            take the size of one particular model. Keys that change no shape are not read.

    Raises:
        PlanError: the type of the model is not known, or a value is missing or wrong.
    """
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or model_type not in _BUILDERS:
        raise PlanError(
            f"'model_type' of the config is {shown(model_type)}, expected one of "
            f"{', '.join(sorted(_BUILDERS))}: give a listing of the parameters of another model"
        )
    values = Config(config)
    dtype = values.dtype()
    named = _BUILDERS[model_type](values)
    return Model(
        model_type,
        tuple(
            ModelParameter(name, shape, dtype, share=_share(name, shape, values))
            for name, shape in named
        ),
    )


def _share(name: str, shape: tuple[int, ...], config: Config) -> float:
    """Return the share of a parameter that a token passes through."""
    keys = "num_experts_per_tok", "experts_per_token"
    if ".experts." not in name or not any(map(config.has, keys)):
        return 1.0
    return min(1.0, config.count(config.first(*keys)) / shape[0])


# ----------------------------------------------------------------------------- parts of layers


def _linear(name: str, outputs: int, inputs: int, bias: bool = False) -> list[_Named]:
    weight: list[_Named] = [(f"{name}.weight", (outputs, inputs))]
    return [*weight, (f"{name}.bias", (outputs,))] if bias else weight


def _attention(
    config: Config,
    head_dim: int,
    *,
    qkv_bias: bool = False,
    o_bias: bool = False,
    head_norms: bool = False,
) -> list[_Named]:
    """Return attention in which groups of heads share keys and values."""
    hidden, heads = config.hidden, config.heads
    pairs = config.count("num_key_value_heads")
    if heads % pairs:
        raise config.wrong("num_key_value_heads", f"a divisor of the {heads} heads")
    named = [
        *_linear("self_attn.q_proj", heads * head_dim, hidden, qkv_bias),
        *_linear("self_attn.k_proj", pairs * head_dim, hidden, qkv_bias),
        *_linear("self_attn.v_proj", pairs * head_dim, hidden, qkv_bias),
        *_linear("self_attn.o_proj", hidden, heads * head_dim, o_bias),
    ]
    if head_norms:
        named += [(f"self_attn.{part}_norm.weight", (head_dim,)) for part in "qk"]
    return named


def _mlp(name: str, hidden: int, inner: int, bias: bool = False) -> list[_Named]:
    return [
        *_linear(f"{name}.gate_proj", inner, hidden, bias),
        *_linear(f"{name}.up_proj", inner, hidden, bias),
        *_linear(f"{name}.down_proj", hidden, inner, bias),
    ]


def _dense(config: Config, bias: bool = False) -> list[_Named]:
    return _mlp("mlp", config.hidden, config.count("intermediate_size"), bias)


def _experts(hidden: int, inner: int, experts: int) -> list[_Named]:
    return [
        ("mlp.experts.gate_up_proj", (experts, 2 * inner, hidden)),
        ("mlp.experts.down_proj", (experts, hidden, inner)),
    ]


_NORMS = ("input_layernorm", "post_attention_layernorm")
_GEMMA_NORMS = (*_NORMS, "pre_feedforward_layernorm", "post_feedforward_layernorm")


def _decoder(
    config: Config,
    attention: list[_Named],
    mlp: Callable[[int], list[_Named]],
    *,
    norms: Sequence[str] = _NORMS,
    tied: bool = False,
) -> Iterator[_Named]:
    """Yield a whole model.

    Args:
        config: has the number of layers and the sizes of parameters outside of layers.
        attention: the parameters of the attention of every layer.
        mlp: number of a layer -> the parameters behind its attention.
        norms: names of the norms of a layer, which are registered last.
        tied: whether the output layer is the embedding, if the config does not say.
    """
    hidden, vocabulary = config.hidden, config.count("vocab_size")
    norm_weights: list[_Named] = [(f"{norm}.weight", (hidden,)) for norm in norms]
    yield "model.embed_tokens.weight", (vocabulary, hidden)
    for layer in range(config.count("num_hidden_layers", most=_LAYERS_MAX)):
        for name, shape in (*attention, *mlp(layer), *norm_weights):
            yield f"model.layers.{layer}.{name}", shape
    yield "model.norm.weight", (hidden,)
    if not config.flag("tie_word_embeddings", default=tied):
        yield "lm_head.weight", (vocabulary, hidden)


# ------------------------------------------------------------------------------- model types


def _llama(config: Config) -> Iterator[_Named]:
    # The first Llama had no groups of heads, and its configs do not have this key.
    if not config.has("num_key_value_heads"):
        config = Config({**config.values, "num_key_value_heads": config.heads})
    bias = config.flag("attention_bias")
    attention = _attention(config, config.head_dim(), qkv_bias=bias, o_bias=bias)
    mlp = _dense(config, config.flag("mlp_bias"))
    return _decoder(config, attention, lambda _: mlp)


def _mistral(config: Config) -> Iterator[_Named]:
    mlp = _dense(config)
    return _decoder(config, _attention(config, config.head_dim()), lambda _: mlp)


def _qwen2(config: Config) -> Iterator[_Named]:
    mlp = _dense(config)
    return _decoder(config, _attention(config, config.head_dim(), qkv_bias=True), lambda _: mlp)


def _qwen3_attention(config: Config, head_dim: int) -> list[_Named]:
    bias = config.flag("attention_bias")
    return _attention(config, head_dim, qkv_bias=bias, o_bias=bias, head_norms=True)


def _qwen3(config: Config) -> Iterator[_Named]:
    mlp = _dense(config)
    return _decoder(config, _qwen3_attention(config, config.count("head_dim")), lambda _: mlp)


def _qwen_layers(config: Config, sparse: list[_Named]) -> Callable[[int], list[_Named]]:
    """Return which layers have experts: every n-th one, except the layers of a list."""
    dense, key = _dense(config), "mlp_only_layers"
    step = config.count("decoder_sparse_step")
    only = config.values[key] if config.has(key) else []
    if not isinstance(only, list) or any(type(layer) is not int for layer in only):
        raise config.wrong(key, "a list of numbers of layers")
    dense_layers = frozenset(only)
    return lambda layer: dense if layer in dense_layers or (layer + 1) % step else sparse


def _qwen2_moe(config: Config) -> Iterator[_Named]:
    hidden, experts = config.hidden, config.count("num_experts")
    sparse = [
        *_linear("mlp.gate", experts, hidden),
        *_experts(hidden, config.count("moe_intermediate_size"), experts),
        *_mlp("mlp.shared_expert", hidden, config.count("shared_expert_intermediate_size")),
        *_linear("mlp.shared_expert_gate", 1, hidden),
    ]
    qkv_bias = config.flag("qkv_bias", default=True)
    attention = _attention(config, config.head_dim(), qkv_bias=qkv_bias)
    return _decoder(config, attention, _qwen_layers(config, sparse))


def _qwen3_moe(config: Config) -> Iterator[_Named]:
    hidden = config.hidden
    experts = config.count("num_experts", "num_local_experts")
    sparse = [
        *_experts(hidden, config.count("moe_intermediate_size"), experts),
        *_linear("mlp.gate", experts, hidden),
    ]
    attention = _qwen3_attention(config, config.head_dim())
    return _decoder(config, attention, _qwen_layers(config, sparse))


def _mixtral(config: Config) -> Iterator[_Named]:
    hidden, experts = config.hidden, config.count("num_local_experts", "num_experts")
    mlp = [
        *_linear("mlp.gate", experts, hidden),
        *_experts(hidden, config.count("intermediate_size"), experts),
    ]
    return _decoder(config, _attention(config, config.head_dim()), lambda _: mlp)


def _deepseek_v3(config: Config) -> Iterator[_Named]:
    """Yield a model whose keys and values, and mostly its queries, go through a narrow latent."""
    hidden, heads, bias = config.hidden, config.heads, config.flag("attention_bias")
    rope, latent = config.count("qk_rope_head_dim"), config.count("kv_lora_rank")
    nope, value = config.count("qk_nope_head_dim"), config.count("v_head_dim")
    queries = heads * (nope + rope)
    if "q_lora_rank" not in config.values:
        raise config.wrong("q_lora_rank", "null or a number")
    if config.has("q_lora_rank"):
        rank = config.count("q_lora_rank")
        query = [
            *_linear("self_attn.q_a_proj", rank, hidden, bias),
            ("self_attn.q_a_layernorm.weight", (rank,)),
            *_linear("self_attn.q_b_proj", queries, rank),
        ]
    else:
        query = _linear("self_attn.q_proj", queries, hidden)
    attention = [
        *query,
        *_linear("self_attn.kv_a_proj_with_mqa", latent + rope, hidden, bias),
        ("self_attn.kv_a_layernorm.weight", (latent,)),
        *_linear("self_attn.kv_b_proj", heads * (nope + value), latent),
        *_linear("self_attn.o_proj", hidden, heads * value, bias),
    ]
    experts = config.count("n_routed_experts", "num_local_experts")
    inner = config.count("moe_intermediate_size")
    dense, dense_layers = _dense(config), config.count("first_k_dense_replace", least=0)
    sparse = [
        *_experts(hidden, inner, experts),
        *_linear("mlp.gate", experts, hidden),
        *_mlp("mlp.shared_experts", hidden, inner * config.count("n_shared_experts")),
    ]
    return _decoder(config, attention, lambda layer: dense if layer < dense_layers else sparse)


def _gpt_oss(config: Config) -> Iterator[_Named]:
    hidden, bias = config.hidden, config.flag("attention_bias", default=True)
    attention = [
        # A module's own parameters come before the parameters of its parts.
        ("self_attn.sinks", (config.heads,)),
        *_attention(config, config.count("head_dim"), qkv_bias=bias, o_bias=bias),
    ]
    experts = config.count("num_local_experts", "num_experts")
    inner = config.count("intermediate_size")
    mlp = [
        *_linear("mlp.router", experts, hidden, bias=True),
        # Unlike the experts of other models: (inputs, outputs), as for x @ weight.
        ("mlp.experts.gate_up_proj", (experts, hidden, 2 * inner)),
        ("mlp.experts.gate_up_proj_bias", (experts, 2 * inner)),
        ("mlp.experts.down_proj", (experts, inner, hidden)),
        ("mlp.experts.down_proj_bias", (experts, hidden)),
    ]
    return _decoder(config, attention, lambda _: mlp)


def _gemma(
    config: Config, norms: Sequence[str] = _NORMS, *, head_norms: bool = False
) -> Iterator[_Named]:
    bias, head_dim = config.flag("attention_bias"), config.count("head_dim")
    mlp = _dense(config)
    attention = _attention(config, head_dim, qkv_bias=bias, o_bias=bias, head_norms=head_norms)
    return _decoder(config, attention, lambda _: mlp, norms=norms, tied=True)


def _gpt2(config: Config) -> Iterator[_Named]:
    """Yield a model whose matrices are (inputs, outputs), as in ``Conv1D`` of transformers."""
    hidden, heads = (
        config.count("n_embd", "hidden_size"),
        config.count("n_head", "num_attention_heads"),
    )
    layers = config.count("n_layer", "num_hidden_layers", most=_LAYERS_MAX)
    positions = config.count("n_positions", "max_position_embeddings")
    vocabulary = config.count("vocab_size")
    inner = config.count("n_inner") if config.has("n_inner") else 4 * hidden
    if hidden % heads:
        raise config.wrong(
            config.first("n_head", "num_attention_heads"),
            f"a divisor of the {hidden} elements of a token",
        )
    if config.flag("add_cross_attention"):
        raise config.wrong("add_cross_attention", "false, as only decoders are known")
    yield "transformer.wte.weight", (vocabulary, hidden)
    yield "transformer.wpe.weight", (positions, hidden)
    parts = {
        "ln_1": (hidden,),
        "attn.c_attn": (hidden, 3 * hidden),
        "attn.c_proj": (hidden, hidden),
        "ln_2": (hidden,),
        "mlp.c_fc": (hidden, inner),
        "mlp.c_proj": (inner, hidden),
    }
    for layer in range(layers):
        for name, shape in parts.items():
            yield f"transformer.h.{layer}.{name}.weight", shape
            yield f"transformer.h.{layer}.{name}.bias", shape[-1:]
    yield "transformer.ln_f.weight", (hidden,)
    yield "transformer.ln_f.bias", (hidden,)
    if not config.flag("tie_word_embeddings", default=True):
        yield "lm_head.weight", (vocabulary, hidden)


_BUILDERS: dict[str, Callable[[Config], Iterator[_Named]]] = {
    "deepseek_v3": _deepseek_v3,
    "gemma": _gemma,
    "gemma2": lambda config: _gemma(config, _GEMMA_NORMS),
    "gemma3_text": lambda config: _gemma(config, _GEMMA_NORMS, head_norms=True),
    "gpt2": _gpt2,
    "gpt_oss": _gpt_oss,
    "kimi_k2": _deepseek_v3,  # A name of its own for the same model in other sizes.
    "llama": _llama,
    "mistral": _mistral,
    "mixtral": _mixtral,
    "qwen2": _qwen2,
    "qwen2_moe": _qwen2_moe,
    "qwen3": _qwen3,
    "qwen3_moe": _qwen3_moe,
}
