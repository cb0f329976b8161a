"""Contents of a model in a checkpoint: the values that are stored besides pages, and all names."""

from __future__ import annotations

import io
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint._traverse import traverse_state_dict
from torch.utils._pytree import tree_leaves, tree_map

from tierstore.errors import CheckpointError
from tierstore.layout.dtensors import is_dtensor, is_uneven
from tierstore.layout.parameters import PagedGroup, unwrapped_name

_PARALLEL = (torch.nn.DataParallel, torch.nn.parallel.DistributedDataParallel)


Names = Mapping[str, tuple[str, ...]]
"""Name of a paged parameter -> names in the model; a tied parameter has several."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelContents:
    """Names of the paged parameters of a model, and all other values of the model."""

    names: Names

    unpaged: Mapping[str, Any]
    """Name -> tensor or other value: buffers, frozen parameters, extra state. Tied values are
    the same object."""

    @property
    def cut(self) -> list[str]:
        """Names of the values that this rank holds only in part."""
        return [
            name for name, value in self.unpaged.items() if any(map(_is_cut, tree_leaves(value)))
        ]

    def values(self) -> Iterator[tuple[str, Any, Hashable]]:
        """Yield the name, the whole value and the identity of each unpaged value.

        Tied values have one identity. A value that is cut is gathered from the ranks at its
        turn. All ranks must therefore iterate together, to the end.
        """
        cut = set(self.cut)
        for name, value in self.unpaged.items():
            whole = tree_map(_whole, value) if name in cut else value
            yield name, whole, id(value)


def contents_of(model: torch.nn.Module | None, groups: Sequence[PagedGroup]) -> ModelContents:
    """Return the contents of a checkpoint of a model with these paged parameters.

    Args:
        model: the model, wrapped or not; None: only the paged parameters, under the optimizer's
            names without the names of wrappers.
        groups: the paged parameters.

    Raises:
        CheckpointError: a paged parameter is not in the model; two names are equal without the
            names of wrappers; a checkpoint cannot hold a value of the model.
    """
    parameters = [parameter for group in groups for parameter in group.parameters]
    if model is None:
        return paged_contents(parameter.name for parameter in parameters)
    paged = {id(parameter.tensor): parameter.name for parameter in parameters}
    found: dict[str, list[str]] = {parameter.name: [] for parameter in parameters}
    unpaged: dict[str, Any] = {}
    # keep_vars returns the parameters themselves, so that tied names can be recognized.
    state = _unwrapped(model).state_dict(keep_vars=True)
    for key, plain in _all_stripped(state).items():
        value = state[key]
        name = paged.get(id(value))
        if name is None:
            traverse_state_dict({plain: value}, _check)
            unpaged[plain] = value
        else:
            found[name].append(plain)
    absent = next((name for name, keys in found.items() if not keys), None)
    if absent is not None:
        raise CheckpointError(
            f"parameter {absent!r} of the optimizer is not in the given model: pass the model "
            "whose parameters the optimizer has"
        )
    return ModelContents(names={name: tuple(keys) for name, keys in found.items()}, unpaged=unpaged)


def paged_contents(names: Iterable[str]) -> ModelContents:
    """Return the contents of a checkpoint of these paged parameters alone; see contents_of()."""
    return ModelContents(
        names={name: (plain,) for name, plain in plain_names(names).items()}, unpaged={}
    )


def plain_names(names: Iterable[str], *, unwrap_parallel: bool = True) -> dict[str, str]:
    """Return parameter name -> name without the names of wrappers.

    Args:
        names: the names of the parameters.
        unwrap_parallel: whether to remove "module." if all names begin with it.

    Raises:
        CheckpointError: two names become equal.
    """
    plain = _all_stripped(names)
    # DistributedDataParallel wraps the whole model, so "module." is in every name.
    if unwrap_parallel and all(name.startswith("module.") for name in plain.values()):
        plain = {name: stripped.removeprefix("module.") for name, stripped in plain.items()}
    return plain


def _unwrapped(model: torch.nn.Module) -> torch.nn.Module:
    while True:
        inner = model.module if isinstance(model, _PARALLEL) else getattr(model, "_orig_mod", None)
        if not isinstance(inner, torch.nn.Module):
            return model
        model = inner


def _all_stripped(names: Iterable[str]) -> dict[str, str]:
    """Return name -> name without the parts that wrappers added.

    Raises:
        CheckpointError: two names become equal.
    """
    name_of: dict[str, str] = {}
    for name in names:
        plain = unwrapped_name(name, without_module=False)
        if plain in name_of:
            raise CheckpointError(
                f"{name_of[plain]!r} and {name!r} have the same name {plain!r} without the names "
                "of wrappers: rename one of the modules"
            )
        name_of[plain] = name
    return {name: plain for plain, name in name_of.items()}


def _is_cut(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and is_dtensor(value)


def _whole(value: Any) -> Any:
    with torch.no_grad():
        return value.full_tensor() if _is_cut(value) else value


def _check(path: tuple[object, ...], value: Any) -> None:
    """Refuse a value that DCP cannot store. Called before anything is written."""
    key = ".".join(map(str, path))
    if isinstance(value, torch.Tensor):
        if value.layout != torch.strided or value.is_meta:
            raise CheckpointError(
                f"{key!r} of the model is a tensor of layout {value.layout} on device "
                f"{value.device}: a checkpoint holds dense tensors with values only"
            )
        if is_uneven(value):
            raise CheckpointError(
                f"{key!r} of the model is not trained, and ranks hold uneven parts of it, which "
                "PyTorch cannot gather: keep it whole on each rank"
            )
        return
    try:
        torch.save(value, io.BytesIO())
    except Exception as error:  # Pickling an object of the user may raise any error.
        raise CheckpointError(
            f"{key!r} of the model cannot be pickled, so no checkpoint can hold it: {error}"
        ) from error
