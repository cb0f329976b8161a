"""A loop with the calls of the Trainer of torchtitan."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import tierstore
from muon.integrations.torchtitan import MuonContainer
from tierstore.integrations.torchtitan import Checkpointer, Container


class Batches:
    """A data loader with the position as its state, which draws a seed as torch's does."""

    def __init__(self, rank: int = 0) -> None:
        self.position, self._rank = 0, rank

    def __iter__(self) -> Batches:
        torch.empty((), dtype=torch.int64).random_()
        return self

    def __next__(self) -> torch.Tensor:
        self.position += 1
        return torch.randn(4, 8, generator=torch.Generator().manual_seed(self.position))

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position, "rank": self._rank}

    def load_state_dict(self, state: dict[str, int]) -> None:
        assert state["rank"] == self._rank
        self.position = state["position"]


class Loop:
    """A loop with what a checkpointer takes from a Trainer, in the order of its calls."""

    def __init__(
        self,
        store: tierstore.TierStore,
        rank: int = 0,
        max_norm: float | None = None,
        cls: Any = None,
    ) -> None:
        self._max_norm = max_norm
        self.norms: list[torch.Tensor] = []
        torch.manual_seed(0)
        layers = nn.Linear(8, 16), nn.Dropout(0.5), nn.Linear(16, 8)
        self.model_parts: list[nn.Module] = [nn.Sequential(*layers)]
        self.optimizers: Any
        if cls is None:
            self.optimizers = MuonContainer(self.model_parts, store=store, ns_dtype=torch.float32)
        else:
            named = self.model_parts[0].named_parameters()
            self.optimizers = Container(self.model_parts, tierstore.Paged(named, cls, store=store))
        self.lr_schedulers = torch.optim.lr_scheduler.LambdaLR(
            next(iter(self.optimizers)), lambda step: 1 / (1 + step)
        )
        self.dataloader = Batches(rank)
        self.step = self.seen = 0
        self.checkpointer = Checkpointer(self)

    def state_dict(self) -> dict[str, int]:
        return {"step": self.step, "seen": self.seen}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.step, self.seen = state["step"], state["seen"]

    def train(self, steps: int, fails_at: int = 0) -> None:
        self.checkpointer.load(step=-1)
        batches = iter(self.dataloader)
        while self.step < steps:
            self.step += 1
            self.optimizers.zero_grad()
            batch = next(batches)
            self.seen += len(batch)
            self.model_parts[0](batch).square().mean().backward()
            if self._max_norm is not None:
                parameters = list(self.model_parts[0].parameters())
                grads = [p.grad for p in parameters if p.grad is not None]
                norm = torch.nn.utils.get_total_norm(grads, 2.0, False, True)
                torch.nn.utils.clip_grads_with_norm_(parameters, self._max_norm, norm, True)
                self.norms.append(norm)
            self.checkpointer.maybe_wait_for_staging()
            self.optimizers.step()
            if self.step == fails_at:
                raise RuntimeError(f"at step {self.step}")
            self.lr_schedulers.step()
            self.checkpointer.save(self.step, last_step=self.step == steps)

    @property
    def values(self) -> list[torch.Tensor]:
        return [parameter.detach().clone() for parameter in self.model_parts[0].parameters()]
