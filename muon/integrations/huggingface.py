"""Muon in the Trainer of transformers."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from transformers import Trainer

import muon
import tierstore
from muon.integrations.optimizers import muon_of
from tierstore.integrations.huggingface import StoreTrainer


class MuonFactory:
    """Builds a Muon for the model of a Trainer.

    For ``optimizer_cls_and_kwargs=(MuonFactory, {"store": store, "lr": 0.02})``; ``muon_of``
    has the other keys.
    """

    def __call__(self, model: torch.nn.Module, **options: Any) -> muon.Muon:
        """Return the optimizer of all trainable parameters of a model."""
        return muon_of(model, **options)


class MuonTrainer(StoreTrainer, Trainer):
    """A Trainer with Muon on a store: commits each step, and resumes from the last commit.

    From the AdamW settings in ``TrainingArguments``, ``weight_decay`` applies to all parameters,
    and ``adam_beta1`` and ``adam_beta2`` apply to parameters that AdamW trains. ``muon_options``
    overrides them. A setting with its default value counts as not set.

    Args:
        args: as in ``transformers.Trainer``.
        store: the store. Opened with ``resume=True`` it resumes.
        lr: learning rate of matrices.
        adamw_lr: learning rate of the other parameters.
        muon_options: further arguments of ``muon.Muon`` and ``muon.param_groups``, such as
            ``{"no_decay": "*.bias"}``; see ``muon_of``.
        kwargs: as in ``transformers.Trainer``.

    Raises:
        ValueError: a setting of ``TrainingArguments`` has no effect here.
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
        options = {"store": store, "lr": lr, "adamw_lr": adamw_lr}
        super().__init__(
            *args, store=store, optimizer_cls_and_kwargs=(MuonFactory, options), **kwargs
        )
        options |= {**_written(self.args), **(muon_options or {})}


def _written(arguments: Any) -> dict[str, Any]:
    """Return the options of ``muon_of`` that ``TrainingArguments`` sets.

    Raises:
        ValueError: a setting has no effect.
    """
    defaults = {field.name: field.default for field in dataclasses.fields(arguments)}

    def is_written(name: str) -> bool:
        return bool(getattr(arguments, name) != defaults[name])

    for name, advice in (
        ("learning_rate", "pass lr and adamw_lr to the Trainer"),
        ("adam_epsilon", "leave it out"),
    ):
        if is_written(name):
            raise ValueError(f"TrainingArguments({name}=) does not reach Muon: {advice}")
    options: dict[str, Any] = {}
    if is_written("weight_decay"):
        options |= dict.fromkeys(("weight_decay", "adamw_weight_decay"), arguments.weight_decay)
    if is_written("adam_beta1") or is_written("adam_beta2"):
        options["betas"] = (arguments.adam_beta1, arguments.adam_beta2)
    return options
