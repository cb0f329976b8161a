"""A decoder of Llama's kind, and its loss: for benchmarks that train a model.

Layers may be computed again in backward, and logits may exist for a part of the tokens at once.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812 - the usual name.
from torch import nn
from torch.utils.checkpoint import checkpoint

HEAD = 64
"""Width of a head of the attention."""


class Layer(nn.Module):
    """Attention and SwiGLU, each after a norm."""

    def __init__(self, width: int) -> None:
        super().__init__()
        hidden = (8 * width // 3 + 63) // 64 * 64
        self.norm, self.post_norm = nn.RMSNorm(width), nn.RMSNorm(width)
        self.query, self.key, self.value, self.output = (
            nn.Linear(width, width, bias=False) for _ in range(4)
        )
        self.gate, self.up = (nn.Linear(width, hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, values: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
        """Return values of the same shape: (sequences, tokens, width)."""
        normed = self.norm(values)
        query, key, value = (
            matrix(normed).unflatten(-1, (-1, HEAD)).transpose(1, 2)
            for matrix in (self.query, self.key, self.value)
        )  # (sequences, heads, tokens, HEAD)
        attended = F.scaled_dot_product_attention(
            rotated(query, angles), rotated(key, angles), value, is_causal=True
        )
        values = values + self.output(attended.transpose(1, 2).flatten(2))
        normed = self.post_norm(values)
        result: torch.Tensor = values + self.down(F.silu(self.gate(normed)) * self.up(normed))
        return result


def rotated(values: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """Rotate pairs of elements by angles of shape (tokens, HEAD / 2)."""
    cos, sin = angles.cos().to(values.dtype), angles.sin().to(values.dtype)
    first, second = values.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, first * sin + second * cos), dim=-1)


class Decoder(nn.Module):
    """A model of Llama's kind."""

    def __init__(self, vocabulary: int, width: int, layers: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(Layer(width) for _ in range(layers))
        self.norm = nn.RMSNorm(width)
        self.lm_head = nn.Linear(width, vocabulary, bias=False)
        self.checkpoints_layers = False

    def gradient_checkpointing_enable(self) -> None:
        """Compute each layer again in backward."""
        self.checkpoints_layers = True

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return what the head takes, for token numbers of shape (sequences, tokens)."""
        frequencies = 10_000 ** (-torch.arange(0, HEAD, 2) / HEAD)
        angles = torch.outer(torch.arange(tokens.shape[1]), frequencies)
        values = self.embed(tokens)
        for layer in self.layers:
            if self.checkpoints_layers:
                values = checkpoint(layer, values, angles, use_reentrant=False)
            else:
                values = layer(values, angles)
        normed: torch.Tensor = self.norm(values)
        return normed


def loss_of(model: Decoder, part: torch.Tensor, logits_at_once: int | None = None) -> torch.Tensor:
    """Return the mean loss of sequences of shape (sequences, 1 + tokens).

    Args:
        model: the model.
        part: token numbers.
        logits_at_once: most tokens whose logits exist at once; None: all.
    """
    hidden, targets = model(part[:, :-1]).flatten(0, 1), part[:, 1:].flatten()
    if logits_at_once is None:
        return sum_of_losses(model.lm_head, hidden, targets) / len(targets)
    losses = []
    for start in range(0, len(targets), logits_at_once):
        chunk = slice(start, start + logits_at_once)
        given = model.lm_head, hidden[chunk], targets[chunk]
        losses.append(checkpoint(sum_of_losses, *given, use_reentrant=False))
    return torch.stack(losses).sum() / len(targets)


def sum_of_losses(head: nn.Module, hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the summed loss of some tokens."""
    return F.cross_entropy(head(hidden).float(), targets, reduction="sum")
