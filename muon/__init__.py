"""Muon for the hidden matrices and AdamW for the rest, over paged optimizer state."""

from muon.newton_schulz import orthogonalize_
from muon.optimizer import Muon
from muon.routing import ParamGroups, param_groups

__all__ = ["Muon", "ParamGroups", "orthogonalize_", "param_groups"]
