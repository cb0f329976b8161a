"""Models of each family, built from their configs: routed, trained, resumed, published, loaded."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

import muon
import tierstore
from muon.matrices import Declaration

STEPS = 10
VOCABULARY, HIDDEN, LAYERS, HEADS = 64, 32, 2, 4


def of_transformers(model_type: str, **values: Any) -> nn.Module:
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(model_type, vocab_size=VOCABULARY, **values)
    model: nn.Module = AutoModelForCausalLM.from_config(config)
    return model


def llama() -> nn.Module:
    return of_transformers(
        "llama",
        hidden_size=HIDDEN,
        intermediate_size=48,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=2,
    )


def qwen_moe() -> nn.Module:
    return of_transformers(
        "qwen3_moe",
        hidden_size=HIDDEN,
        intermediate_size=48,
        moe_intermediate_size=24,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=2,
        head_dim=8,
        num_experts=4,
        num_experts_per_tok=2,
    )


def deepseek_v3() -> nn.Module:
    return of_transformers(
        "deepseek_v3",
        hidden_size=HIDDEN,
        intermediate_size=48,
        moe_intermediate_size=24,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        n_routed_experts=4,
        n_shared_experts=1,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        first_k_dense_replace=1,
        q_lora_rank=16,
        kv_lora_rank=12,
        qk_nope_head_dim=8,
        qk_rope_head_dim=4,
        v_head_dim=8,
    )


def gpt2() -> nn.Module:
    return of_transformers("gpt2", n_embd=HIDDEN, n_layer=LAYERS, n_head=HEADS, n_positions=32)


def unet() -> nn.Module:
    from diffusers import UNet2DConditionModel

    model: nn.Module = UNet2DConditionModel(
        sample_size=8,
        in_channels=3,
        out_channels=3,
        layers_per_block=1,
        block_out_channels=(16, 32),
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        cross_attention_dim=HIDDEN,
        attention_head_dim=2,
        norm_num_groups=8,
    )
    return model


EXPERTS: dict[Any, Declaration] = {
    "*.experts.gate_up_proj": (("stack",), ("split", 1, (24, 24))),
    "*.experts.down_proj": (("stack",),),
}
THIRDS: Declaration = (("split", 1, (HIDDEN, HIDDEN, HIDDEN)), ("transposed",))
FAMILIES: dict[str, tuple[Callable[[], nn.Module], dict[Any, Declaration]]] = {
    "llama": (llama, {"*.q_proj.weight": (("blocks", 0, 8),)}),
    "qwen_moe": (qwen_moe, EXPERTS),
    "deepseek_v3": (deepseek_v3, {**EXPERTS, "*.kv_b_proj.weight": (("blocks", 0, 16),)}),
    "gpt2": (
        gpt2,
        {
            "*.c_attn.weight": THIRDS,
            "*.c_proj.weight": (("transposed",),),
            "*.c_fc.weight": (("transposed",),),
        },
    ),
    "unet": (unet, {nn.Conv2d: (("flatten",),)}),
}
# For some parameters of each family the algorithm, and the column of shapes.
ROUTES: dict[str, dict[str, tuple[str, str]]] = {
    "llama": {
        "model.embed_tokens.weight": ("adamw", "64 x 32"),
        "model.layers.1.self_attn.q_proj.weight": ("muon", "32 x 32: 4 of 8 x 32"),
        "model.layers.0.self_attn.k_proj.weight": ("muon", "16 x 32"),
        "model.layers.0.mlp.down_proj.weight": ("muon", "32 x 48"),
        "model.layers.0.input_layernorm.weight": ("adamw", "32"),
        "lm_head.weight": ("adamw", "64 x 32"),
    },
    "qwen_moe": {
        "model.layers.0.mlp.gate.weight": ("adamw", "4 x 32"),
        "model.layers.0.mlp.experts.gate_up_proj": ("muon", "4 x 48 x 32: 8 of 24 x 32"),
        "model.layers.1.mlp.experts.down_proj": ("muon", "4 x 32 x 24: 4 of 32 x 24"),
        "model.layers.0.self_attn.q_norm.weight": ("adamw", "8"),
    },
    "deepseek_v3": {
        "model.layers.0.self_attn.q_a_proj.weight": ("muon", "16 x 32"),
        "model.layers.0.self_attn.kv_b_proj.weight": ("muon", "64 x 12: 4 of 16 x 12"),
        "model.layers.0.mlp.gate_proj.weight": ("muon", "48 x 32"),
        "model.layers.1.mlp.experts.gate_up_proj": ("muon", "4 x 48 x 32: 8 of 24 x 32"),
        "model.layers.1.mlp.shared_experts.up_proj.weight": ("muon", "24 x 32"),
        "model.layers.1.mlp.gate.weight": ("adamw", "4 x 32"),
    },
    "gpt2": {
        "transformer.wte.weight": ("adamw", "64 x 32"),
        "transformer.wpe.weight": ("adamw", "32 x 32"),
        "transformer.h.0.attn.c_attn.weight": ("muon", "32 x 96: 3 of 32 x 32"),
        "transformer.h.1.mlp.c_proj.weight": ("muon", "128 x 32: 1 of 128 x 32"),
        "transformer.h.0.attn.c_attn.bias": ("adamw", "96"),
    },
    "unet": {
        "conv_in.weight": ("adamw", "16 x 3 x 3 x 3"),
        "conv_out.weight": ("adamw", "3 x 16 x 3 x 3"),
        "down_blocks.0.resnets.0.conv1.weight": ("muon", "16 x 16 x 3 x 3: 1 of 16 x 144"),
        "down_blocks.0.resnets.0.conv1.bias": ("adamw", "16"),
        "down_blocks.0.resnets.0.norm1.weight": ("adamw", "16"),
        "mid_block.attentions.0.transformer_blocks.0.attn1.to_q.weight": ("muon", "32 x 32"),
    },
}
# The first and the last layer of the UNet, which the rule for its convolutions would take.
ADAMW_NAMES = ("conv_in.weight", "conv_out.weight")
families = pytest.mark.parametrize("family", FAMILIES)


def made(family: str, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return FAMILIES[family][0]().train()


def groups_of(family: str, model: nn.Module) -> muon.ParamGroups:
    return muon.param_groups(
        model,
        lr=0.02,
        adamw_lr=1e-3,
        matrices=FAMILIES[family][1],
        adamw_names=ADAMW_NAMES if family == "unet" else (),
    )


def loss_of(model: nn.Module, family: str, step: int) -> torch.Tensor:
    """Return the loss of a batch that the step decides."""
    generator = torch.Generator().manual_seed(step)
    if family == "unet":
        images = torch.randn(2, 3, 8, 8, generator=generator)
        text = torch.randn(2, 5, HIDDEN, generator=generator)
        noise: torch.Tensor = model(images, step, encoder_hidden_states=text).sample
        return (noise - images).square().mean()
    tokens = torch.randint(VOCABULARY, (2, 12), generator=generator)
    torch.manual_seed(step)  # GPT-2 has dropout.
    loss: torch.Tensor = model(input_ids=tokens, labels=tokens).loss
    return loss


def train(model: nn.Module, optimizer: muon.Muon, family: str, steps: range) -> list[float]:
    losses = []
    for step in steps:
        loss = loss_of(model, family, step)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


@families
def test_the_routing_table_is_right(family: str, capsys: pytest.CaptureFixture[str]) -> None:
    model = made(family, seed=0)
    groups = groups_of(family, model)
    text = str(groups)
    with capsys.disabled():
        print(f"\n{family}\n{text}")
    algorithms = {name: group["algorithm"] for group in groups for name, _ in group["params"]}
    assert algorithms.keys() == {name for name, _ in model.named_parameters()}
    for name, (algorithm, shape) in ROUTES[family].items():
        assert algorithms[name] == algorithm, name
        (line,) = [line for line in text.splitlines() if f" {name} " in line]
        assert f" {shape} " in line, line


@families
def test_trains_resumes_and_is_published(family: str, tmp_path: Path) -> None:
    expected = made(family, seed=0)
    losses = train(expected, muon.Muon(groups_of(family, expected)), family, range(STEPS))
    assert all(torch.isfinite(torch.tensor(losses)))

    run, published = tmp_path / "run", tmp_path / "published"
    for first in (0, STEPS // 2):
        model = made(family, seed=first)  # A resumed run gets all of its weights from the run.
        with tierstore.TierStore(run, page_bytes="64KiB", resume=True) as store:
            optimizer = muon.Muon(groups_of(family, model), store=store)
            assert optimizer.restore() == first
            train(model, optimizer, family, range(first, first + STEPS // 2))
            if first:
                store.checkpoint(published, model)
    for name, parameter in expected.named_parameters():
        assert torch.equal(model.get_parameter(name), parameter), name

    loaded = made(family, seed=9)
    state_dict = {"model": loaded.state_dict()}
    dcp.load(state_dict, checkpoint_id=published)
    loaded.load_state_dict(state_dict["model"])
    for name, value in expected.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value), name
    with torch.no_grad():
        assert torch.equal(loss_of(loaded, family, STEPS), loss_of(expected, family, STEPS))


@pytest.mark.parametrize(("family", "layers"), [("llama", 2), ("deepseek_v3", 2), ("gpt2", 2)])
def test_attention_layers_are_found(family: str, layers: int) -> None:
    clip = muon.QKClip.of(made(family, seed=0))
    assert len(clip.layers) == layers
    for rows in clip.layers.values():
        assert {one.head for one in rows} == set(range(HEADS))


def test_a_model_with_qk_norm_is_refused() -> None:
    with pytest.raises(ValueError, match="QK-norm 'k_norm', which bounds its logits"):
        muon.QKClip.of(made("qwen_moe", seed=0))
