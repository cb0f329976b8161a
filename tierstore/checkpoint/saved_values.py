"""What a checkpoint says besides masters and states: step, scalars, hyperparameters, extra.

One that tierstore published says it in its manifests, as it was committed. Of any other one
it is in the entries that ``torch.distributed.checkpoint.state_dict`` makes. Parameters have
the names here that they have in ``.metadata``.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

from tierstore.checkpoint.dcp_reader import EntryPath, StoredEntries
from tierstore.errors import CheckpointError, CorruptionError
from tierstore.run import tagged_json
from tierstore.run.commit import Commit

_GROUPS = ("optimizer", "param_groups")


class CommittedValues:
    """Those of a published checkpoint.

    Args:
        entries: of the checkpoint.
        commit: the commit of rank 0. The other ranks have the same values.

    Raises:
        CorruptionError: ``.metadata`` and the manifests are not of one another.
    """

    def __init__(self, entries: StoredEntries, commit: Commit) -> None:
        self._entries = entries
        self._manifest = commit.manifest
        self._groups: dict[str, int] = {}  # Name of a parameter -> number of its group.
        self._members: dict[str, str] = {}  # -> its name in the manifests.
        self._scalars = commit.scalars
        for number, group in enumerate(commit.groups):
            names = entries.value(".".join((*_GROUPS, str(number), "params")))
            members = [spec.name for spec in group]
            self._require(isinstance(names, list) and len(names) == len(members))
            self._require(all(isinstance(name, str) for name in names))
            self._groups |= dict.fromkeys(names, number)
            self._members |= zip(names, members, strict=True)

    @cached_property
    def model_prefixes(self) -> Sequence[str]:
        """What stands before the names of parameters, as checkpoint(model_prefix=) said."""
        name = next(iter(self._groups), None)
        for key in self._entries.keys if name is not None else ():
            *outer, last = self._entries.place(key)
            if last == name and len(outer) < 2:
                return ["".join(f"{part}." for part in outer)]
        return ["model."]

    def step(self, counts: Sequence[float]) -> int:
        """Return the step that was committed, whatever parameters count."""
        return self._manifest.step

    @property
    def extra(self) -> Any:
        """What was committed with it."""
        return tagged_json.decode(self._manifest.extra)

    def scalar(self, name: str, scalar: str) -> float:
        """Return a number that belongs to a parameter.

        Raises:
            CheckpointError: there is none.
        """
        try:
            return float(self._scalars[self._members[name]][scalar])
        except (LookupError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"{self._entries.path} has no number {scalar!r} of parameter {name!r}"
            ) from error

    def hyperparameters(self, name: str) -> dict[str, Any]:
        """Return those of the group that a parameter was in; empty if it was in none."""
        number = self._groups.get(name)
        if number is None:
            return {}
        found: dict[str, Any] = tagged_json.decode(self._manifest.hyperparameters[number])
        return found

    def _require(self, condition: bool) -> None:
        if not condition:
            raise CorruptionError(
                f"{self._entries.path}: .metadata is of another commit than the manifests"
            )


class StockValues:
    """Those of a checkpoint that DCP wrote of a model and its optimizer, which has no extra."""

    model_prefixes: Sequence[str] = ("model.", "")
    extra = None

    def __init__(self, entries: StoredEntries) -> None:
        self._entries = entries

    def step(self, counts: Sequence[float]) -> int:
        """Return the largest step count of any parameter; 0 if none has one.

        Raises:
            CheckpointError: it is none.
        """
        step = max(counts, default=0.0)
        if not 0 <= step < 2**63:
            raise CheckpointError(f"{self._entries.path} has the step {step}")
        return int(step)

    def scalar(self, name: str, scalar: str) -> float:
        """See CommittedValues.scalar."""
        key = f"optimizer.state.{name}.{scalar}"
        stored = self._entries.tensor(key)
        if stored is None or stored.size.numel() != 1 or stored.properties.dtype.is_complex:
            raise CheckpointError(f"{self._entries.path} has no number {key!r}")
        return float(self._entries.value(key))

    def hyperparameters(self, name: str) -> dict[str, Any]:
        """Return those that are stored by the parameter's name, or else those of its group.

        Raises:
            CheckpointError: they cannot be read.
        """
        found = self._of_parameter(name) or self._of_group(name)
        parts = [(place, self._entries.value(key)) for place, key in found.items()]
        try:
            return dict(_put_together(parts))
        except (ValueError, TypeError) as error:
            raise CheckpointError(
                f"{self._entries.path}: what is stored of the hyperparameters of {name!r} makes "
                "no dicts and lists"
            ) from error

    @cached_property
    def _places(self) -> dict[EntryPath, str]:
        """Place -> key, of all hyperparameters."""
        keys = (key for key in self._entries.keys if key.startswith(".".join((*_GROUPS, ""))))
        return {self._entries.place(key): key for key in keys}

    @cached_property
    def _params(self) -> dict[int, Any]:
        """Number of a group -> names of its parameters."""
        return {
            place[2]: self._entries.value(key)
            for place, key in self._places.items()
            if place[:2] == _GROUPS and place[3:] == ("params",) and isinstance(place[2], int)
        }

    def _of_parameter(self, name: str) -> dict[EntryPath, str]:
        """Find ``optimizer.param_groups.<name>.<key>``, which is one key of the optimizer's."""
        prefix = ".".join((*_GROUPS, name, ""))
        heads = {place: ".".join(map(str, place[:2])) for place in self._places}
        return {
            (head.removeprefix(prefix), *place[2:]): self._places[place]
            for place, head in heads.items()
            if head.startswith(prefix)
        }

    def _of_group(self, name: str) -> dict[EntryPath, str]:
        """Find ``optimizer.param_groups.<number>.<key>`` of the group that has the parameter."""
        for number, names in self._params.items():
            if isinstance(names, list) and name in names:
                start = (*_GROUPS, number)
                return {
                    place[3:]: key
                    for place, key in self._places.items()
                    if place[:3] == start and len(place) > 3
                }
        return {}


def _put_together(parts: list[tuple[EntryPath, Any]]) -> Any:
    """Return the dicts and lists that have these values at these places.

    Raises:
        ValueError: there are none, as where a list lacks an item.
    """
    inner: dict[str | int, list[tuple[EntryPath, Any]]] = {}
    for place, value in parts:
        if not place:
            if len(parts) > 1:
                raise ValueError("one value lies in another that is no dict or list")
            return value
        inner.setdefault(place[0], []).append((place[1:], value))
    values = {part: _put_together(rest) for part, rest in inner.items()}
    if all(isinstance(part, str) for part in values):
        return values
    if values.keys() != set(range(len(values))):
        raise ValueError("a list lacks an item, or a dict has a number for a key")
    return [values[index] for index in range(len(values))]
