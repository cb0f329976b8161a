"""Muon for the hidden matrices and AdamW for the rest, over paged optimizer state."""

from importlib.metadata import version

from muon.hooks import Hyperball, UpdateHook, WeightUpdate
from muon.newton_schulz import orthogonalize_
from muon.optimizer import Muon
from muon.qk_clip import HeadRows, QKClip
from muon.routing import ParamGroups, param_groups

__version__ = version("tierstore")
__all__ = [
    "HeadRows",
    "Hyperball",
    "Muon",
    "ParamGroups",
    "QKClip",
    "UpdateHook",
    "WeightUpdate",
    "orthogonalize_",
    "param_groups",
]
