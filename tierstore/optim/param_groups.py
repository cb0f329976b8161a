"""The dicts of ``param_groups``: duplicate parameters, and counts in words."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from tierstore.user_warnings import warn_user


def drop_duplicates(group: dict[str, Any]) -> None:
    """Leave every parameter of a new group there once, under its first name, and warn.

    ``torch.optim`` would warn that this becomes an error. What it refuses stays for it to refuse.
    """
    params = group["params"]
    if isinstance(params, torch.Tensor | set):
        return
    group["params"] = params = list(params)
    are_named = {_is_named(given) for given in params}
    if len(are_named) > 1:
        return
    is_named = True in are_named
    tensors = [given[1] for given in params] if is_named else params
    positions = {id(tensor): index for index, tensor in reversed([*enumerate(tensors)])}
    if len(positions) == len(params):
        return
    kept = sorted(positions.values())
    again = min({*range(len(params))}.difference(kept))
    name = f" ({params[again][0]!r})" if is_named else ""
    warn_user(
        f"a parameter group with duplicate parameters: the parameter at position {again}{name} is "
        "also at an earlier position. It is stepped once. Pass each parameter once, as "
        "model.named_parameters() does"
    )
    for key in ("params", "param_names"):
        if len(group.get(key, ())) == len(params):
            group[key] = [group[key][index] for index in kept]


def in_words(groups: Sequence[Mapping[str, Any]], rules: Iterable[str | None]) -> str:
    """Return the number of parameters, in all and by rule, and of groups.

    Args:
        groups: the groups.
        rules: the rule of each group, if it has one.
    """
    counts: Counter[str] = Counter()
    for group, rule in zip(groups, rules, strict=True):
        counts[rule or ""] += len(group.get("params", ()))
    by_rule = [f"{count} {rule}" for rule, count in counts.items() if rule]
    text = f"{_number(counts.total(), 'parameter')} in {_number(len(groups), 'group')}"
    return f"{text}: {', '.join(by_rule)}" if by_rule else text


def _is_named(given: Any) -> bool:
    return isinstance(given, tuple) and len(given) > 1


def _number(count: int, what: str) -> str:
    return f"{count} {what}" + "s" * (count != 1)
