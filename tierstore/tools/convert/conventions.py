"""Conventions of Muon's momentum: which one a source has, and the change to the running average."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from tierstore.errors import CheckpointError
from tierstore.layout.chunks import Chunk
from tierstore.layout.encodings import MASTER
from tierstore.layout.other_rules import (
    AVERAGE,
    HEAVY_BALL,
    LR_RATIO,
    MOMENTUM,
    convention_of,
    may_be_adam,
    other_momentum,
    refuse_other_rule,
)
from tierstore.optim.classes import is_of_torch
from tierstore.tools.convert.contents import Contents, Group
from tierstore.tools.convert.entries import Entry

_OF_ADAM = {"exp_avg", "exp_avg_sq"}
RENAMED = {"moment1": "exp_avg", "moment2": "exp_avg_sq"}
"""Name of a state of Moonlight or Motif -> its name in torch.optim."""
_ERROR_BITS = "error_bits"


_OTHER_NAMES = {"wd": "weight_decay", "adamw_betas": "betas", "adamw_eps": "eps"}
_CONSTANTS: dict[str, Any] = {  # In their code; torch.optim.Muon has them in its groups.
    "nesterov": True,
    "ns_coefficients": (3.4445, -4.7750, 2.0315),
    "ns_steps": 5,
    "eps": 1e-7,
}
_OF_MUON = ("momentum", "nesterov", "ns_steps", "adamw_betas", "adamw_eps")


def standard_hyperparameters(
    group: Mapping[str, Any], *, is_muon: bool | None, convention: str | None
) -> dict[str, Any]:
    """Return the hyperparameters of a group under the names of torch.optim.

    Args:
        group: the hyperparameters as the optimizer has them.
        is_muon: whether its parameters are Muon's, in an optimizer that also has others.
        convention: of its momentum. The rule for the learning rate follows from it.
    """
    group = dict(group)
    ratio = group.pop(LR_RATIO, None)
    decay = group.pop("adamw_wd", None)
    left_out = ["params", "param_names", "names", "use_muon", "none_grad"]
    if is_muon is not None:
        left_out += _OF_MUON[3:] if is_muon else _OF_MUON[:3]
    found = {_OTHER_NAMES.get(k, k): v for k, v in group.items() if k not in left_out}
    if is_muon is False and ratio is not None:
        found |= {"lr": found["lr"] * ratio, "weight_decay": decay}
    if is_muon is not None:
        found["algorithm"] = "muon" if is_muon else "adamw"
    if is_muon:
        is_original = convention != HEAVY_BALL or ratio is not None
        found["adjust_lr_fn"] = "original" if is_original else "match_rms_adamw"
        if ratio is not None:
            found.setdefault("weight_decay", 0.0)
        if convention is not None or ratio is not None:
            found = _CONSTANTS | found
    return found


def standard_groups(
    group: Mapping[str, Any],
    parameters: Sequence[str],
    states: Mapping[str, Collection[str]],
    flags: Mapping[str, bool],
) -> Iterator[Group]:
    """Yield a group under the names of torch.optim, in two if it has parameters of Muon and AdamW.

    Args:
        group: hyperparameters as the optimizer has them.
        parameters: names.
        states: parameter -> the names of its states.
        flags: parameter -> whether it is Muon's, if its state says so, as in Moonlight.
    """
    for flag in dict.fromkeys(flags.get(name) for name in parameters) or [None]:
        members = [name for name in parameters if flags.get(name) == flag]
        is_muon = group.get("use_muon") if flag is None else flag
        convention = convention_of(group, set().union(*(states.get(name, ()) for name in members)))
        values = standard_hyperparameters(
            group, is_muon=is_muon if isinstance(is_muon, bool) else None, convention=convention
        )
        yield Group(hyperparameters=values, parameters=members, momentum_convention=convention)


def with_whole_values(contents: Contents) -> Contents:
    """Leave out the error bits of flashoptim, which whole weights contain.

    Raises:
        CheckpointError: flashoptim has split a weight, or quantized a state.
    """
    weights = contents.weights
    for entry in contents.entries:
        if "::" in entry.state:
            raise CheckpointError(
                f"{entry.state!r} of {entry.parameter!r} is a part of a state that flashoptim has "
                "quantized: make the optimizer with compress_state_dict=False and save again"
            )
        weight = weights.get(entry.parameter)
        if entry.state == _ERROR_BITS and weight is not None and weight.dtype.itemsize < 4:
            raise CheckpointError(
                f"the weight of {entry.parameter!r} lacks the bits that flashoptim keeps in "
                f"{_ERROR_BITS!r}: save the model with optimizer.get_fp32_model_state_dict(model)"
            )
    entries = [entry for entry in contents.entries if entry.state != _ERROR_BITS]
    return replace(contents, entries=entries)


def as_average(contents: Contents, given: str | None) -> Contents:
    """Return contents with momentum as a running average.

    Args:
        contents: the contents.
        given: the convention of the source, if no file tells.

    Raises:
        CheckpointError: the convention is not known, or the files contradict the given one.
    """
    with_momentum = {entry.parameter for entry in contents.entries if entry.state == MOMENTUM}
    groups = contents.grouped
    known = {
        groups[name].momentum_convention
        for name in with_momentum & groups.keys()
        if other_momentum(groups[name].hyperparameters) is None
    }
    if given is not None and not known:
        raise CheckpointError(
            f"--momentum-convention {given} does not apply: the sources have no {MOMENTUM} of Muon"
        )
    if given is not None and known - {None, given}:
        other = next(iter(known - {None, given}))
        raise CheckpointError(
            f"the files tell that {MOMENTUM} is of the convention {other}, not {given}: leave out "
            "--momentum-convention"
        )
    entries: list[Entry] = []
    changed = 0
    for entry in contents.entries:
        group = groups.get(entry.parameter)
        if entry.state != MOMENTUM or group is None or other_momentum(group.hyperparameters):
            entries.append(entry)
            continue
        convention = group.momentum_convention or given
        if convention is None:
            raise CheckpointError(
                f"the source does not tell whether {MOMENTUM} of {entry.parameter!r} is a running "
                "average (torch.optim, KellerJordan since 2024-12, DeepSpeed) or a heavy ball "
                "(Moonlight, Motif): pass --momentum-convention average or heavy-ball"
            )
        elif convention == HEAVY_BALL:
            entries.append(_scaled(entry, 1.0 - _momentum(group)))
            changed += 1
        else:
            entries.append(entry)
    notes = list(contents.notes)
    if changed:
        notes.append(
            f"{MOMENTUM} of {changed} parameters was a heavy ball and is now a running average: it "
            "was multiplied by 1 - momentum"
        )
    return replace(
        contents,
        entries=entries,
        groups=[_telling(group, with_momentum) for group in contents.groups],
        notes=notes,
    )


def require_own_rules(contents: Contents) -> list[str]:
    """Check that groups with states of AdamW or Muon belong to AdamW or Muon, or name a class.

    restore() refuses groups that name another class than the optimizer of the program.

    Returns:
        Notes about facts that the files do not tell.

    Raises:
        CheckpointError: a group is of another optimizer; the message names the key that shows it.
    """
    states: dict[str, set[str]] = defaultdict(set)
    for entry in contents.entries:
        states[entry.parameter].add(entry.state)
    for name, parts in contents.scalars.items():  # Parts of lists, which may be empty.
        states[name] |= {part for part in parts if "." in part}
    unsure = []
    for group in contents.groups:
        found = set().union(*(states[name] for name in group.parameters)) - {MASTER}
        is_adamw = found >= _OF_ADAM and found <= {*_OF_ADAM, "max_exp_avg_sq"}
        is_muon = MOMENTUM in found and other_momentum(group.hyperparameters) is None
        if not (is_adamw or is_muon):  # Pages of AdamW and Muon have other states.
            continue
        where = f"the param group of {group.parameters[0]!r}"
        try:
            algorithm = "adamw" if is_adamw else "muon"
            refuse_other_rule(group.hyperparameters, algorithm, where)
        except ValueError as error:
            if not is_of_torch(group.hyperparameters):
                raise CheckpointError(str(error)) from error
        if is_adamw and may_be_adam(group.hyperparameters):
            unsure.append(where)
    if not unsure:
        return []
    return [
        f"{unsure[0]} ({len(unsure)} such groups) is read as AdamW, but may be Adam: Adam's weight "
        "decay is not decoupled. If it was Adam, convert with --only model"
    ]


def _telling(group: Group, with_momentum: Collection[str]) -> Group:
    """Return a group whose keys tell that its momentum is an average, so that it stays one."""
    values = group.hyperparameters
    if other_momentum(values) or not any(name in with_momentum for name in group.parameters):
        return replace(group, momentum_convention=AVERAGE)
    if convention_of(values, [MOMENTUM]) != AVERAGE:
        values = {**values, "algorithm": "muon"}
    return replace(group, hyperparameters=values, momentum_convention=AVERAGE)


def _momentum(group: Group) -> float:
    momentum = group.hyperparameters.get("momentum")
    if not isinstance(momentum, int | float) or not 0 <= momentum < 1:
        raise CheckpointError(
            f"the group of {group.parameters[0]!r} has momentum {momentum!r}: a heavy ball becomes "
            "a running average only with a momentum in [0, 1)"
        )
    return float(momentum)


def _scaled(entry: Entry, factor: float) -> Entry:
    def read(chunk: Chunk, target: torch.Tensor) -> None:
        entry.read(chunk, target)
        target.mul_(factor)

    return replace(entry, read=read)
