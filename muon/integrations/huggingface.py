"""Muon in the Trainer of transformers."""

from __future__ import annotations

from typing import Any

import torch
from transformers import Trainer

import muon
import tierstore
from tierstore.integrations.huggingface import StoreTrainer


class MuonFactory:
    """Builds a Muon for the model of a Trainer.

    For ``optimizer_cls_and_kwargs=(MuonFactory, {"store": store, "lr": 0.02})``; other keys are
    ``adamw_lr`` and arguments of ``muon.Muon``.
    """

    def __call__(
        self,
        model: torch.nn.Module,
        *,
        store: tierstore.TierStore,
        lr: float = 0.02,
        adamw_lr: float = 3e-4,
        **options: Any,
    ) -> muon.Muon:
        """Return the optimizer of all trainable parameters of a model."""
        return muon.Muon(muon.param_groups(model, lr=lr, adamw_lr=adamw_lr), store=store, **options)


class MuonTrainer(StoreTrainer, Trainer):
    """A Trainer with Muon on a store: commits each step, and resumes from the last commit.

    Args:
        args: as of ``transformers.Trainer``.
        store: the store; opened with ``resume=True`` it resumes.
        lr: learning rate of matrices.
        adamw_lr: learning rate of the other parameters.
        muon_options: further arguments of ``muon.Muon``.
        kwargs: as of ``transformers.Trainer``.
    """

    def __init__(
        self,
        *args: Any,
        store: tierstore.TierStore,
        lr: float = 0.02,
        adamw_lr: float = 3e-4,
        muon_options: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        options = {"store": store, "lr": lr, "adamw_lr": adamw_lr, **(muon_options or {})}
        super().__init__(
            *args, store=store, optimizer_cls_and_kwargs=(MuonFactory, options), **kwargs
        )
