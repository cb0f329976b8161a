"""Muon in the Trainer of torchtitan."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

import muon
import tierstore
from tierstore.integrations.torchtitan import Container, only_part


class MuonContainer(Container):
    """A container of a Muon for all trainable parameters of a model.

    Args:
        model_parts: one module.
        store: the store; opened with ``resume=True`` it resumes.
        lr: learning rate of matrices.
        adamw_lr: learning rate of the other parameters.
        options: further arguments of ``muon.Muon``.

    Raises:
        ValueError: several model parts, which are pipeline stages of one rank.
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
        groups = muon.param_groups(only_part(model_parts), lr=lr, adamw_lr=adamw_lr)
        super().__init__(model_parts, muon.Muon(groups, store=store, **options))
