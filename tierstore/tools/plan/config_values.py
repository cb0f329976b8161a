"""Checked access to the values of a ``config.json``, which may be any JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from tierstore.errors import PlanError
from tierstore.tools.plan.models import DTYPES

SIZE_MAX = 2**24
"""Largest size in a config: the largest vocabularies are 2**18."""


def shown(value: object) -> str:
    """Return a value of JSON for a message, shortened."""
    if isinstance(value, str):
        return repr(value[:60])
    if isinstance(value, int) and abs(value) >= 2**63:
        return "an integer of more than 63 bits"
    if value is None or isinstance(value, int | float):
        return repr(value)
    return f"a {type(value).__name__}"


@dataclass(frozen=True, slots=True)
class Config:
    """Checked access to the values of a config; null is the same as missing."""

    values: Mapping[str, Any]

    def wrong(self, key: str, expected: str) -> PlanError:
        """Return the error for a value that is wrong or missing."""
        value = self.values.get(key)
        is_value = (
            "is missing in the config" if value is None else f"of the config is {shown(value)}"
        )
        return PlanError(
            f"{key!r} {is_value}, expected {expected}: "
            "take the config.json that belongs to the model"
        )

    def count(self, *keys: str, least: int = 1, most: int = SIZE_MAX) -> int:
        """Return an integer from ``least`` to ``most``, which may have one of several keys."""
        found = [key for key in keys if self.has(key)] or [keys[0]]
        value = self.values.get(found[0])
        if type(value) is not int or not least <= value <= most:
            raise self.wrong(found[0], f"an integer from {least} to {most}")
        for other in found[1:]:
            if shown(self.values[other]) != shown(value):
                raise self.wrong(other, f"{value}, as {found[0]!r} is")
        return value

    def has(self, key: str) -> bool:
        """Return whether there is a value."""
        return self.values.get(key) is not None

    def first(self, *keys: str) -> str:
        """Return the first of several names of one value that is there, or the last name."""
        return next(filter(self.has, keys), keys[-1])

    def flag(self, key: str, *, default: bool = False) -> bool:
        """Return true or false."""
        value = self.values.get(key) if self.has(key) else default
        if type(value) is not bool:
            raise self.wrong(key, "true or false")
        return value

    def dtype(self) -> torch.dtype:
        """Return the dtype of the parameters."""
        key = self.first("dtype", "torch_dtype")
        value = self.values[key] if self.has(key) else "float32"
        if not isinstance(value, str) or value not in DTYPES:
            raise self.wrong(key, f"one of {', '.join(DTYPES)}")
        return DTYPES[value]

    @property
    def hidden(self) -> int:
        """Number of elements that represent a token."""
        return self.count("hidden_size")

    @property
    def heads(self) -> int:
        """Number of heads of queries."""
        return self.count("num_attention_heads")

    def head_dim(self) -> int:
        """Return the number of elements of a head, by default its part of ``hidden``."""
        if self.has("head_dim"):
            return self.count("head_dim")
        if self.hidden % self.heads:
            raise self.wrong("hidden_size", f"a multiple of the {self.heads} heads")
        return self.hidden // self.heads
