"""Parts of the state of a parameter: tensors and numbers in dicts and lists, by one name each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from copy import deepcopy
from typing import Any

from tierstore.checkpoint.saved_values import nested as nest
from tierstore.layout.parameters import EMPTY, state_path


def parts_of(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parts of a state by name.

    Example: {"GG": [a, []], "step": 1.0} has the parts "GG.0", "GG.1" and "step".
    """
    return {name: part for key, value in state.items() for name, part in _parts(str(key), value)}


def _parts(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict | list) and value:
        pairs = value.items() if isinstance(value, dict) else enumerate(value)
        for key, inner in pairs:
            yield from _parts(f"{name}.{key}", inner)
    else:
        yield name, value


def nested(parts: Mapping[str, Any], empty: Mapping[str, str]) -> dict[str, Any]:
    """Return the state that has these parts.

    Args:
        parts: name -> tensor or number.
        empty: name -> kind, of EMPTY, of parts that have nothing.
    """
    everything = {**parts, **{name: deepcopy(EMPTY[kind]) for name, kind in empty.items()}}
    if not any("." in name for name in everything):
        return everything
    found: dict[str, Any] = nest([(state_path(name), part) for name, part in everything.items()])
    return found


def given_parts(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parts of a state of a caller that have something."""
    return {name: part for name, part in parts_of(state).items() if empty_kind(part) is None}


def empty_kind(part: Any) -> str | None:
    """Return the kind of a part that has nothing; None for any other part."""
    pairs = EMPTY.items()
    return next((kind for kind, value in pairs if type(part) is type(value) and not part), None)
