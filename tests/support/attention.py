"""Small attention layers in the shapes of known families, and their largest logits."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

WIDTH, SIZE = 24, 6


class Grouped(nn.Module):
    """Queries in groups that share a key, with names as of Llama and Qwen2; without values."""

    def __init__(self, heads: int, shared: int, *, bias: bool = False) -> None:
        super().__init__()
        self.head_dim = SIZE
        self.q_proj = nn.Linear(WIDTH, heads * SIZE, bias=bias)
        self.k_proj = nn.Linear(WIDTH, shared * SIZE, bias=bias)

    def logits(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return the logits of shape (heads, tokens, tokens)."""
        queries = self.q_proj(inputs).unflatten(-1, (-1, SIZE)).transpose(0, 1)
        keys = self.k_proj(inputs).unflatten(-1, (-1, SIZE)).transpose(0, 1)
        keys = keys.repeat_interleave(len(queries) // len(keys), dim=0)
        return queries @ keys.mT / SIZE**0.5


class Latent(nn.Module):
    """Latent attention: a part of each query meets a key that all heads share; as DeepSeek-V3."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.qk_nope_head_dim, self.qk_rope_head_dim, self.v_head_dim = 5, 3, 4
        self.q_a_proj = nn.Linear(WIDTH, 10, bias=False)
        self.q_a_layernorm = nn.RMSNorm(10)
        self.q_b_proj = nn.Linear(10, heads * 8, bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(WIDTH, 7 + 3, bias=False)
        self.kv_a_layernorm = nn.RMSNorm(7)
        self.kv_b_proj = nn.Linear(7, heads * 9, bias=False)

    def logits(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return the logits of shape (heads, tokens, tokens)."""
        queries = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(inputs)))
        plain, rotary = queries.unflatten(-1, (-1, 8)).transpose(0, 1).split((5, 3), -1)
        latent, shared = self.kv_a_proj_with_mqa(inputs).split((7, 3), -1)
        keys = self.kv_b_proj(self.kv_a_layernorm(latent)).unflatten(-1, (-1, 9)).transpose(0, 1)
        return (plain @ keys[..., :5].mT + rotary @ shared.T) / 8**0.5


class Conv1D(nn.Module):
    """A projection whose columns are its outputs."""

    def __init__(self, outputs: int, inputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(inputs, outputs) * 0.2)
        self.bias = nn.Parameter(torch.randn(outputs) * 0.2)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs @ self.weight + self.bias


class Fused(nn.Module):
    """Queries, keys and values in the columns of one weight, as of GPT-2."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.num_heads, self.head_dim = heads, SIZE
        self.c_attn = Conv1D(3 * heads * SIZE, WIDTH)

    def logits(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return the logits of shape (heads, tokens, tokens)."""
        parts = self.c_attn(inputs).chunk(3, -1)
        queries, keys, _ = (one.unflatten(-1, (-1, SIZE)).transpose(0, 1) for one in parts)
        return queries @ keys.mT / SIZE**0.5


class Model(nn.Module):
    """One attention layer of each kind, and a layer without attention."""

    def __init__(self) -> None:
        super().__init__()
        self.own = Grouped(4, 4, bias=True)
        self.groups = Grouped(4, 2)
        self.one = Grouped(4, 1, bias=True)
        self.latent = Latent(3)
        self.fused = Fused(4)
        self.mixer = nn.Linear(WIDTH, WIDTH)


def largest_logits(model: nn.Module, inputs: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the largest logit of each head of each attention layer."""
    found: dict[str, torch.Tensor] = {}
    with torch.no_grad():
        for name, module in model.named_modules():
            layer: Any = module
            if hasattr(layer, "logits"):
                found[name] = layer.logits(inputs).amax((1, 2))
    return found
