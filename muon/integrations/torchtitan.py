"""Muon in the Trainer of torchtitan."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

import tierstore
from muon.integrations.optimizers import muon_of
from tierstore.integrations.torchtitan import Container, only_part


class MuonContainer(Container):
    """A container of a Muon for all trainable parameters of a model.

    Args:
        model_parts: one module.
        store: the store. Opened with ``resume=True`` it resumes.
        lr: learning rate of matrices.
        adamw_lr: learning rate of the other parameters.
        options: further arguments of ``muon.Muon`` and ``muon.param_groups``; see ``muon_of``.

    Raises:
        ValueError: several model parts, that is, several pipeline stages on one rank.
    """

    def __init__(
        self,
        model_parts: Sequence[nn.Module],
        *,
        store: tierstore.TierStore,
        lr: float = 0.02,
        adamw_lr: float = 3e-4,
        **options: Any,
    ) -> None:
        model = only_part(model_parts)
        optimizer = muon_of(model, store=store, lr=lr, adamw_lr=adamw_lr, **options)
        super().__init__(model_parts, optimizer)
