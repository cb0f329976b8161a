"""Adapters beside frozen parameters, recomputed activations, two optimizers in one process."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import muon
import tierstore

WIDTH = 64
STREAMED = {"host_memory": "80KiB", "page_bytes": 16384, "buffers": 2}


class Adapted(nn.Module):
    """A frozen layer with a low-rank adapter."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.down = nn.Linear(WIDTH, 4, bias=False)
        self.up = nn.Linear(4, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        adapted: torch.Tensor = self.frozen(x) + self.up(self.down(x))
        return adapted.tanh()


class Net(nn.Module):
    def __init__(self, *, recomputes: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Adapted() for _ in range(3))
        self.recomputes = recomputes

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.recomputes else layer(x)
        return x


def batches(count: int, seed: int = 1) -> Iterator[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(count):
        yield torch.randn(8, WIDTH, generator=generator)


def optimizer_of(
    model: nn.Module, store: tierstore.TierStore | None = None, **options: bool
) -> muon.Muon:
    groups = muon.param_groups(model, lr=0.02)
    return muon.Muon(groups, store=store, ns_dtype=torch.float32, **options)


def train(model: nn.Module, optimizer: muon.Muon, inputs: Iterator[torch.Tensor]) -> None:
    for x in inputs:
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def values(model: nn.Module) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


def test_adapters_alone_are_trained_and_resumed(tmp_path: Path) -> None:
    whole = Net()
    begun = values(whole)
    train(whole, optimizer_of(whole), batches(6))
    inputs = batches(6)
    for steps in (2, 4):
        model = Net()
        with tierstore.TierStore(tmp_path, resume=True, **STREAMED) as store:
            optimizer = optimizer_of(model, store)
            assert [group["algorithm"] for group in optimizer.param_groups] == ["muon"]
            optimizer.restore()
            train(model, optimizer, (next(inputs) for _ in range(steps)))
            assert store.step in (2, 6)
    for found, expected, first, param in zip(
        values(model), values(whole), begun, model.parameters(), strict=True
    ):
        assert torch.equal(found, expected)
        assert torch.equal(found, first) != param.requires_grad


@pytest.mark.parametrize("free_gradients", [False, True])
def test_recomputed_activations_and_reads_in_backward(free_gradients: bool, tmp_path: Path) -> None:
    plain, model = (Net(recomputes=recomputes).requires_grad_() for recomputes in (False, True))
    train(plain, optimizer_of(plain), batches(4))
    with tierstore.TierStore(tmp_path, free_gradients=free_gradients, **STREAMED) as store:
        train(model, optimizer_of(model, store), batches(4))
        assert all(map(torch.equal, values(model), values(plain)))
        assert store.stats().bytes_read > 0


def test_two_optimizers_of_one_process(tmp_path: Path) -> None:
    """As of a GAN: each has a store, and both resume."""
    whole = [Net(), Net()]
    for seed, model in enumerate(whole):
        train(model, optimizer_of(model), batches(4, seed))
    for steps in (1, 3):
        models = [Net(), Net()]
        with (
            tierstore.TierStore(tmp_path / "a", resume=True, **STREAMED) as first,
            tierstore.TierStore(tmp_path / "b", resume=True, **STREAMED) as second,
        ):
            optimizers = [optimizer_of(m, s) for m, s in zip(models, (first, second), strict=True)]
            done = [optimizer.restore() for optimizer in optimizers]
            assert done == ([0, 0] if steps == 1 else [1, 1])
            parts = [islice(batches(4, seed), done[seed], None) for seed in range(2)]
            for _ in range(steps):  # In turns.
                for model, optimizer, inputs in zip(models, optimizers, parts, strict=True):
                    train(model, optimizer, islice(inputs, 1))
    for model, other in zip(models, whole, strict=True):
        assert all(map(torch.equal, values(model), values(other)))
    assert not torch.equal(values(whole[0])[-1], values(whole[1])[-1])


def test_an_optimizer_that_is_gone_leaves_no_hook(tmp_path: Path) -> None:
    model = Net()
    with tierstore.TierStore(tmp_path, **STREAMED) as store:
        optimizer = optimizer_of(model, store)
        optimizer.restore()
        [hooked] = [p for p in model.parameters() if p._post_accumulate_grad_hooks]
        assert hooked.numel() == min(p.numel() for p in model.parameters() if p.requires_grad)
        del optimizer
        gc.collect()
        assert not any(p._post_accumulate_grad_hooks for p in model.parameters())
