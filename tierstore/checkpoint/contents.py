"""What of a model belongs into a checkpoint besides the pages, and under which names."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tierstore.errors import CheckpointError
from tierstore.groups import PagedGroup

# What wrappers put into the names of the parameters that they wrap.
_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.", "_fsdp_wrapped_module.")
_PARALLEL = (torch.nn.DataParallel, torch.nn.parallel.DistributedDataParallel)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelContents:
    """Names for what is paged, and everything of a model that is not."""

    names: Mapping[str, tuple[str, ...]]
    """Name of a paged parameter -> its names in the model, several where it is tied."""

    unpaged: Mapping[str, Any]
    """Name -> tensor or other value: buffers, frozen parameters, extra state. Tied ones are
    the same object."""


def contents_of(model: torch.nn.Module | None, groups: Sequence[PagedGroup]) -> ModelContents:
    """Say what a checkpoint of a model with these paged parameters holds.

    Args:
        model: the model, wrapped or not; None: nothing but what is paged, under the names
            that the optimizer has, less those of wrappers.
        groups: what is paged.

    Raises:
        CheckpointError: a paged parameter is not in the model.
    """
    parameters = [parameter for group in groups for parameter in group.parameters]
    if model is None:
        names = plain_names(parameter.name for parameter in parameters)
        return ModelContents(names=names, unpaged={})
    paged = {id(parameter.tensor): parameter.name for parameter in parameters}
    found: dict[str, list[str]] = {parameter.name: [] for parameter in parameters}
    unpaged: dict[str, Any] = {}
    # keep_vars gives the parameters themselves, so that tied ones can be told.
    for key, value in _unwrapped(model).state_dict(keep_vars=True).items():
        name = paged.get(id(value))
        if name is None:
            unpaged[_stripped(key)] = value
        else:
            found[name].append(_stripped(key))
    absent = next((name for name, keys in found.items() if not keys), None)
    if absent is not None:
        raise CheckpointError(
            f"parameter {absent!r} of the optimizer is not in the model that was given: pass "
            "the model whose parameters the optimizer has"
        )
    return ModelContents(names={name: tuple(keys) for name, keys in found.items()}, unpaged=unpaged)


def plain_names(
    names: Iterable[str], *, unwrap_parallel: bool = True
) -> dict[str, tuple[str, ...]]:
    """Return for each paged parameter its one name, less those of wrappers.

    Args:
        names: those of the parameters.
        unwrap_parallel: whether "module." is that of a wrapper, where all begin with it.

    Raises:
        CheckpointError: two are the same then.
    """
    plain = {name: _stripped(name) for name in names}
    # DistributedDataParallel wraps everything: a module of that name is in every name.
    if unwrap_parallel and all(name.startswith("module.") for name in plain.values()):
        plain = {name: stripped.removeprefix("module.") for name, stripped in plain.items()}
    if len(set(plain.values())) < len(plain):
        raise CheckpointError("two parameters have the same name without that of a wrapper")
    return {name: (stripped,) for name, stripped in plain.items()}


def _unwrapped(model: torch.nn.Module) -> torch.nn.Module:
    while True:
        inner = model.module if isinstance(model, _PARALLEL) else getattr(model, "_orig_mod", None)
        if not isinstance(inner, torch.nn.Module):
            return model
        model = inner


def _stripped(name: str) -> str:
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name
