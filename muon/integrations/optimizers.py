"""The optimizer of a model from the single set of options that a trainer passes."""

from __future__ import annotations

import inspect
from typing import Any

import torch

import muon
import tierstore

_OF_MUON = inspect.signature(muon.Muon).parameters.keys()
_OF_GROUPS = inspect.signature(muon.param_groups).parameters.keys() - _OF_MUON


def muon_of(
    model: torch.nn.Module,
    *,
    store: tierstore.TierStore,
    lr: float = 0.02,
    adamw_lr: float = 3e-4,
    **options: Any,
) -> muon.Muon:
    """Return a Muon for all trainable parameters of a model.

    Args:
        model: the model.
        store: the store.
        lr: learning rate of matrices.
        adamw_lr: learning rate of the other parameters.
        options: further arguments of ``muon.Muon``, and the arguments of ``muon.param_groups`` that
            Muon does not have, such as ``no_decay`` and ``betas``.
    """
    of_groups = {name: options.pop(name) for name in _OF_GROUPS & options.keys()}
    groups = muon.param_groups(model, adamw_lr=adamw_lr, **of_groups)
    return muon.Muon(groups, lr=lr, store=store, **options)
