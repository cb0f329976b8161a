"""Values of a checkpoint other than masters and states: step, scalars, hyperparameters.

A checkpoint that tierstore published has these values in the manifests. Another checkpoint has
them in the entries that ``torch.distributed.checkpoint.state_dict`` makes. Parameters have the
names of ``.metadata``.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import torch

from tierstore.checkpoint.dcp_reader import EntryPath, StoredEntries
from tierstore.errors import CheckpointError, CorruptionError
from tierstore.layout.parameters import STEPPED
from tierstore.layout.state_parts import nested
from tierstore.run import tagged_json
from tierstore.run.commit import Commit
from tierstore.run.manifest import are_states
from tierstore.run.sealed import body_errors, is_count, parse_json, require

STEP_KEY, EXTRA_KEY = "tierstore.step", "tierstore.extra"
"""Keys of the step and of registered states in a DCP checkpoint that `tierstore convert` wrote."""

_GROUPS = ("optimizer", "param_groups")


class CommittedValues:
    """Values of a checkpoint that tierstore published.

    Args:
        entries: the entries of the checkpoint.
        commit: the commit of rank 0. The other ranks have the same values.

    Raises:
        CorruptionError: ``.metadata`` and the manifests are of different commits.
    """

    taken: frozenset[str] = frozenset()
    """See StockValues."""

    def __init__(self, entries: StoredEntries, commit: Commit) -> None:
        self._entries = entries
        self._manifest = commit.manifest
        self._members: dict[str, tuple[int, str]] = {}
        """Name of a parameter -> number of its group, and its name in the manifests."""
        self._scalars = commit.scalars
        for number, group in enumerate(commit.groups):
            names = entries.value(".".join((*_GROUPS, str(number), "params")))
            if (
                not isinstance(names, list)
                or len(names) != len(group)
                or not all(isinstance(name, str) for name in names)
            ):
                raise CorruptionError(
                    f"{entries.path}: .metadata is of another commit than the manifests"
                )
            for name, spec in zip(names, group, strict=True):
                self._members[name] = number, spec.name

    @cached_property
    def model_prefixes(self) -> Sequence[str]:
        """The prefix of the names of parameters, as passed to checkpoint(model_prefix=)."""
        name = next(iter(self._members), None)
        for key in self._entries.keys if name is not None else ():
            *outer, last = self._entries.path_of(key)
            if last == name and len(outer) < 2:
                return ["".join(f"{part}." for part in outer)]
        return ["model."]

    def step(self, counts: Sequence[float]) -> int:
        """Return the committed step. Only other checkpoints use ``counts``."""
        return self._manifest.step

    def has_scalars(self, name: str) -> bool:
        """Return whether a parameter had scalars; False, for example, before its first gradient."""
        return name in self._members and self._members[name][1] in self._scalars

    def was_stepped(self, name: str) -> bool:
        """Return whether a parameter has states; False before its first gradient."""
        if name not in self._members:
            return True
        _, member = self._members[name]
        return self._scalars.get(member, {}).get(STEPPED, 1.0) > 0

    def scalar(self, name: str, scalar: str) -> float:
        """Return a scalar of a parameter.

        Raises:
            CheckpointError: the checkpoint does not have it.
        """
        try:
            _, member = self._members[name]
            saved = self._scalars[member]
            # A commit of a rule that counts steps does not have STEPPED.
            number = saved.get(STEPPED, 1.0) if scalar == STEPPED else saved[scalar]
            return number if type(number) is int else float(number)
        except (LookupError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"{self._entries.path} has no number {scalar!r} of parameter {name!r}"
            ) from error

    def hyperparameters(self, name: str) -> dict[str, Any]:
        """Return the hyperparameters of the group of a parameter; empty without a group."""
        if name not in self._members:
            return {}
        number, _ = self._members[name]
        return self._groups[number]

    @cached_property
    def _groups(self) -> Sequence[dict[str, Any]]:
        return [tagged_json.decode(group) for group in self._manifest.hyperparameters]


class StockValues:
    """Values of a checkpoint that DCP wrote of a model and its optimizer.

    Args:
        entries: the entries, with the optimizer under "optimizer".
    """

    model_prefixes: Sequence[str] = ("model.", "")

    def __init__(self, entries: StoredEntries) -> None:
        self._entries = entries
        self._of_number: dict[int, dict[str, Any]] = {}
        self.taken = set[str]()
        """Keys of groups under which scalar() has found scalars of parameters."""

    def step(self, counts: Sequence[float]) -> int:
        """Return the step that a conversion wrote, or the largest of the step counts.

        Args:
            counts: the step counts of parameters. If empty, the counts of groups are used, or 0.

        Raises:
            CheckpointError: the number cannot be a step.
            CorruptionError: a conversion does not write this.
        """
        written = converted_step(self._entries)
        if written is not None:
            return written
        if not counts:  # The class counts in its groups, as SOAP does.
            of_groups = (as_number(self.hyperparameters(n).get("step")) for n in self._stepped)
            counts = [count for count in of_groups if count is not None]
        step = max(counts, default=0.0)
        if not 0 <= step < 2**63:
            raise CheckpointError(f"{self._entries.path} has the step {step}")
        return int(step)

    def has_scalars(self, name: str) -> bool:
        """Return True: a PyTorch optimizer with states of a parameter also has its scalars."""
        return True

    def was_stepped(self, name: str) -> bool:
        """Return False if a parameter is in a param group and has no states.

        A parameter that never had a gradient has no states.
        """
        return name in self._stepped or not (name in self._of_parameter or name in self._number)

    def scalar(self, name: str, scalar: str) -> float:
        """Return a scalar of a parameter; see CommittedValues.

        The whole group may share one scalar, such as the step of FusedAdam.
        """
        if not self.was_stepped(name) or scalar == STEPPED:
            return float(self.was_stepped(name))
        key = f"optimizer.state.{name}.{scalar}"
        if key in self._entries.keys:
            number = as_number(self._entries.value(key))
        else:
            number = as_number(self.hyperparameters(name).get(scalar))
            self.taken.add(scalar)
        if number is None:
            raise CheckpointError(f"{self._entries.path} has no number {key!r}")
        return number

    def hyperparameters(self, name: str) -> dict[str, Any]:
        """Return the hyperparameters of a parameter's group, or the ones under its own name.

        Raises:
            CheckpointError: the hyperparameters cannot be read.
        """
        number = self._number.get(name)
        if number is None:
            return self._read(name, self._of_parameter.get(name, {}))
        if self._in_one_value:
            return self._in_one_value[number]
        if number not in self._of_number:
            head = (*_GROUPS, number)
            found = {path[3:]: key for path, key in self._paths.items() if path[:3] == head}
            self._of_number[number] = self._read(name, found)
        return self._of_number[number]

    def _read(self, name: str, found: Mapping[EntryPath, str]) -> dict[str, Any]:
        if not found:
            return {}
        leaves = [(path, self._entries.value(key)) for path, key in found.items()]
        try:
            return dict(nested(leaves))
        except (ValueError, TypeError) as error:
            raise CheckpointError(
                f"{self._entries.path}: the paths of the hyperparameters of {name!r} do not make "
                "nested dicts and lists"
            ) from error

    @cached_property
    def _stepped(self) -> set[str]:
        """The names of parameters with states."""
        prefix = "optimizer.state."
        keys = (key for key in self._entries.keys if key.startswith(prefix))
        return {parameter_of(key, self._entries.path_of(key)) for key in keys}

    @cached_property
    def _paths(self) -> dict[EntryPath, str]:
        """Path -> key for all hyperparameters."""
        keys = (key for key in self._entries.keys if key.startswith(".".join((*_GROUPS, ""))))
        return {self._entries.path_of(key): key for key in keys}

    @cached_property
    def _of_parameter(self) -> dict[str, dict[EntryPath, str]]:
        """Name -> rest of the path -> key, for ``optimizer.param_groups.<name>.<key>``."""
        found: dict[str, dict[EntryPath, str]] = defaultdict(dict)
        for path, key in self._paths.items():
            head = ".".join(map(str, path[:2])).removeprefix(".".join((*_GROUPS, "")))
            name, _, last = head.rpartition(".")
            if path[:2] != _GROUPS:
                found[name][last, *path[2:]] = key
        return dict(found)

    @cached_property
    def _in_one_value(self) -> Sequence[dict[str, Any]]:
        """All groups, if they are one value. torch saved them so until 2.3."""
        key = ".".join(_GROUPS)
        value = self._entries.value(key) if key in self._entries.keys else None
        groups = value if isinstance(value, list) else []
        return groups if all(isinstance(group, dict) for group in groups) else []

    @cached_property
    def _number(self) -> dict[str, int]:
        """Name -> number of its group."""
        found: dict[str, int] = {}
        for number, group in enumerate(self._in_one_value):
            names = group.get("params")
            found |= {n: number for n in (names if isinstance(names, list) else ()) if _is_text(n)}
        for path, key in self._paths.items():
            if path[:2] == _GROUPS and path[3:] == ("params",) and isinstance(path[2], int):
                value = self._entries.value(key)
                names = value if isinstance(value, list) else []
                found |= {name: path[2] for name in names if isinstance(name, str)}
        return found


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def parameter_of(key: str, path: EntryPath) -> str:
    """Return the name of the parameter of a state, which may be in a list or dict.

    Args:
        key: "optimizer.state." with the name and the state.
        path: path of the key.
    """
    if path[:2] == ("optimizer", "state") and len(path) > 3:
        return str(path[2])
    return key.removeprefix("optimizer.state.").rpartition(".")[0]


def converted_step(entries: StoredEntries) -> int | None:
    """Return the step that a conversion wrote; None without such an entry.

    Raises:
        CorruptionError: a conversion does not write this.
    """
    if STEP_KEY not in entries.keys:
        return None
    with body_errors(f"{entries.path}: {STEP_KEY}"):
        step: int = entries.value(STEP_KEY)
        require(is_count(step))
    return step


def converted_states(entries: StoredEntries) -> dict[str, Any] | None:
    """Return name -> registered state, in the form of a manifest; None without such an entry.

    Raises:
        CorruptionError: a conversion does not write this.
    """
    if EXTRA_KEY not in entries.keys:
        return None
    with body_errors(f"{entries.path}: {EXTRA_KEY}"):
        found: dict[str, Any] = parse_json(entries.value(EXTRA_KEY).encode())
        require(are_states(found))
        tagged_json.decode(found)
    return found


def as_number(value: Any) -> float | None:
    """Return a number, or a real tensor of one element, as a float; None for anything else."""
    if isinstance(value, torch.Tensor) and value.numel() == 1 and not value.is_complex():
        return float(value)
    return float(value) if isinstance(value, int | float) else None
