"""Byte-level GPT with its validation loss and learning rate schedule."""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from text import windows
from torch import Tensor, nn
from torch.nn import functional

BYTE_VALUES = 256
HEAD_DIM = 64
MUON_LR = 0.02
ADAMW_LR = 3e-3
VALIDATION_WINDOWS = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Options of a run. A resumed run needs the same values to end with the same bits."""

    steps: int
    layers: int
    width: int
    batch: int
    context: int
    seed: int
    dropout: float


def training_device() -> torch.device:
    """Return the GPU of this rank, set to give equal bits in every run, or the CPU without one."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # Else cuBLAS refuses.
    torch.use_deterministic_algorithms(True)
    return device


def rotary_angles(context: int) -> Tensor:
    """Return cos and sin of the rotary angles, fp32 (2, context, HEAD_DIM / 2)."""
    frequencies = 10_000.0 ** (-torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    angles = torch.outer(torch.arange(context).float(), frequencies)
    return torch.stack((angles.cos(), angles.sin()))


def rotate(x: Tensor, rotary: Tensor) -> Tensor:
    """Rotate pairs of features of (batch, heads, context, HEAD_DIM) by the angles of positions."""
    cos, sin = rotary.to(x.dtype)
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


class Block(nn.Module):
    """Causal attention and an MLP, each with a norm before it and a residual connection."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width, bias=False)
        self.query = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(width, width, bias=False)
        self.value = nn.Linear(width, width, bias=False)
        self.attention_out = nn.Linear(width, width, bias=False)
        self.mlp_norm = nn.LayerNorm(width, bias=False)
        self.mlp_in = nn.Linear(width, 4 * width, bias=False)
        self.mlp_out = nn.Linear(4 * width, width, bias=False)
        self.dropout = nn.Dropout(dropout)
        # Zero output projections: each block starts as the identity.
        nn.init.zeros_(self.attention_out.weight)
        nn.init.zeros_(self.mlp_out.weight)

    def forward(self, x: Tensor, rotary: Tensor) -> Tensor:
        """Return the residual stream after this block, (batch, context, width)."""
        normed = self.attention_norm(x)
        query, key, value = (
            projection(normed).unflatten(-1, (-1, HEAD_DIM)).transpose(1, 2)
            for projection in (self.query, self.key, self.value)
        )  # (batch, heads, context, HEAD_DIM) each
        mixed = functional.scaled_dot_product_attention(
            rotate(query, rotary), rotate(key, rotary), value, is_causal=True
        )
        x = x + self.dropout(self.attention_out(mixed.transpose(1, 2).flatten(2)))
        x = x + self.dropout(self.mlp_out(functional.gelu(self.mlp_in(self.mlp_norm(x)))))
        return x


class GPT(nn.Module):
    """A decoder-only transformer over bytes."""

    rotary: Tensor

    def __init__(self, options: Options) -> None:
        super().__init__()
        self.embedding = nn.Embedding(BYTE_VALUES, options.width)
        blocks = (Block(options.width, options.dropout) for _ in range(options.layers))
        self.blocks = nn.ModuleList(blocks)
        self.norm = nn.LayerNorm(options.width, bias=False)
        self.lm_head = nn.Linear(options.width, BYTE_VALUES, bias=False)
        self.register_buffer("rotary", rotary_angles(options.context), persistent=False)
        # A property of the machine and not a measurement, so a resumed run decides alike.
        features = Path("/proc/cpuinfo").read_text(encoding="utf-8")
        on_cpu = "avx512_bf16" in features or "amx_bf16" in features
        is_fast = on_cpu or torch.cuda.is_available()
        self.dtype = torch.bfloat16 if is_fast else torch.float32

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Return the mean loss in nats per byte, fp32 (); arguments are (batch, context)."""
        is_mixed = self.dtype == torch.bfloat16
        with torch.autocast(inputs.device.type, dtype=torch.bfloat16, enabled=is_mixed):
            x = self.embedding(inputs)
            for block in self.blocks:
                x = block(x, self.rotary)
            logits = self.lm_head(self.norm(x))  # (batch, context, BYTE_VALUES)
            return functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


@torch.no_grad()
def validation_loss(
    model: nn.Module, text: Tensor, options: Options, rank: int = 0, world_size: int = 1
) -> float:
    """Return the mean loss in nats per byte over windows spread evenly over the text.

    On several ranks it is the mean over this rank's windows; all ranks have equally many.
    """
    count = (len(text) - 1) // options.context
    chosen = list(range(0, count, max(1, count // VALIDATION_WINDOWS)))[:VALIDATION_WINDOWS]
    chosen = chosen[: len(chosen) // world_size * world_size][rank::world_size]
    batch = options.batch // world_size
    model.eval()
    total = 0.0
    for start in range(0, len(chosen), batch):
        indices = chosen[start : start + batch]
        total += model(*windows(text, indices, options.context)).item() * len(indices)
    model.train()
    return total / len(chosen)


def learning_rate_factor(step: int, steps: int) -> float:
    """Return the factor of the learning rates: linear warm-up, then a cosine to 0."""
    warmup_steps = max(1, steps // 20)
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    return 0.5 * (1 + math.cos(math.pi * (step - warmup_steps) / max(1, steps - warmup_steps)))


def parameter_digest(named_tensors: Iterable[tuple[str, Tensor]]) -> str:
    """Return the SHA-256 of all parameters, to compare two runs."""
    digest = hashlib.sha256()
    for name, tensor in named_tensors:
        digest.update(name.encode() + tensor.detach().view(torch.uint8).cpu().numpy().tobytes())
    return digest.hexdigest()
