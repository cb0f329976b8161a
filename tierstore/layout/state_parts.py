"""Parts of the state of a parameter: named tensors and numbers in dicts and lists."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from typing import Any

Path = tuple[str | int, ...]

EMPTY: Mapping[str, Any] = {"none": None, "list": [], "dict": {}}
"""Kinds of empty parts of a state."""


def state_path(state: str) -> Path:
    """Return the place of a state in the nested dicts and lists of an optimizer.

    Example: "GG.0" is the first of the list "GG".
    """
    return tuple(int(part) if part.isdigit() else part for part in state.split("."))


def parts_of(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parts of a state by name.

    Example: {"GG": [a, []], "step": 1.0} has the parts "GG.0", "GG.1" and "step".
    """
    return {name: part for key, value in state.items() for name, part in _parts(str(key), value)}


def is_key(key: Any) -> bool:
    """Return whether a key of a dict can be recovered from names of parts."""
    return isinstance(key, str) and "." not in key and not key.isdigit()


def _parts(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    is_dict = isinstance(value, dict) and all(map(is_key, value))
    if (is_dict or isinstance(value, list)) and value:
        pairs = value.items() if is_dict else enumerate(value)
        for key, inner in pairs:
            yield from _parts(f"{name}.{key}", inner)
    else:
        yield name, value


def state_of(parts: Mapping[str, Any], empty: Mapping[str, str]) -> dict[str, Any]:
    """Return the state with these parts.

    Args:
        parts: name -> tensor or number.
        empty: name -> kind, from EMPTY, of empty parts.
    """
    everything = {**parts, **{name: deepcopy(EMPTY[kind]) for name, kind in empty.items()}}
    if not any("." in name for name in everything):
        return everything
    found: dict[str, Any] = nested([(state_path(name), part) for name, part in everything.items()])
    return found


def given_parts(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parts of a caller's state that are not empty."""
    return {name: part for name, part in parts_of(state).items() if empty_kind(part) is None}


def empty_kind(part: Any) -> str | None:
    """Return the kind of an empty part; None for any other part."""
    pairs = EMPTY.items()
    return next((kind for kind, value in pairs if type(part) is type(value) and not part), None)


def nested(leaves: Sequence[tuple[Path, Any]]) -> Any:
    """Return nested dicts and lists with these values at these paths.

    Raises:
        ValueError: the paths contradict each other, or a list lacks an item.
    """
    inner: dict[str | int, list[tuple[Path, Any]]] = {}
    for path, value in leaves:
        if not path:
            if len(leaves) > 1:
                raise ValueError("a value is in another value that is not a dict or list")
            return value
        inner.setdefault(path[0], []).append((path[1:], value))
    values = {part: nested(rest) for part, rest in inner.items()}
    if all(isinstance(part, str) for part in values):
        return values
    if values.keys() != set(range(len(values))):
        raise ValueError("a list lacks an item, or a dict has a number for a key")
    return [values[index] for index in range(len(values))]
