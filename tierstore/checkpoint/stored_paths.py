"""Paths of the model and the optimizer in a DCP checkpoint, found by content under any key."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

from tierstore.checkpoint.dcp_reader import EntryPath
from tierstore.errors import CheckpointError

Paths = Mapping[str, EntryPath]
"""Key -> path of the value."""

TRAINER = ("lr_scheduler", "dataloader", "train_state")
"""Keys of values of a trainer that do not belong to the model or its optimizer."""
MODELS = ("model", "model_state_dict", "state_dict", "net", "module")
"""Usual keys of the state dict of a model."""
MOMENTS = frozenset(
    {"exp_avg", "exp_avg_sq", "max_exp_avg_sq", "exp_inf", "momentum_buffer", "moment1", "moment2"}
    | {"square_avg", "acc_delta", "grad_avg", "sum", "prev", "step_size", "ax"}
)
"""Names of states with the shape of their parameter. They identify an optimizer."""


def path_text(path: EntryPath) -> str:
    """Return a path as the text of a key."""
    return ".".join(map(str, path))


def at_top(paths: Paths, tensors: Collection[str], where: Path) -> Paths:
    """Return paths with the model under "model" and the optimizer under "optimizer".

    Programs may use other names, and inner paths, such as ``app`` of an AppState. A model is found
    by its usual names. A state dict is an optimizer if it has param groups, or moments of
    parameters under "state". Its name does not matter.

    Example: the keys ``app.net.w``, ``app.opt.state.w.exp_avg`` and ``app.opt.param_groups.0.lr``
    get the paths of ``model.w``, ``optimizer.state.w.exp_avg`` and ``optimizer.param_groups.0.lr``.

    Args:
        paths: key -> path, for all values.
        tensors: the keys of tensors.
        where: the directory, for messages.

    Raises:
        CheckpointError: the checkpoint has several models or optimizers, or moments outside of a
            state dict of an optimizer.
    """
    optimizers = _optimizers(paths)
    is_bare = any(
        len(paths[key]) == 1 and "." in key and not _of_any(key, {"model", *optimizers})
        for key in tensors
    )
    models = set() if is_bare else _models(paths, optimizers)
    renamed: dict[str, str] = {}
    for found, name in ((models, "model"), (optimizers, "optimizer")):
        if name not in found and len(found) > 1:
            raise CheckpointError(f"{where} has several {name}s, {sorted(found)}: save one {name}")
        if name not in found:
            renamed |= dict.fromkeys(found, name)
    _refuse_stray_moments(paths, tensors, optimizers, where)
    return {key: _moved(path, renamed) for key, path in paths.items()}


def _optimizers(paths: Paths) -> set[str]:
    """Return the keys of the state dicts of optimizers."""
    found = set()
    for path in paths.values():
        head, *rest = path_text(path).split(".")
        parts = [head, *rest]
        for index, part in enumerate(rest, start=1):
            if parts[index - 1] in MODELS:
                continue
            if part == "param_groups" or (part == "state" and parts[-1] in MOMENTS):
                found.add(".".join(parts[:index]))
                break
    return found


def _models(paths: Paths, optimizers: Collection[str]) -> set[str]:
    """Return the keys of the state dicts of models."""
    found = set()
    for path in paths.values():
        for depth, part in enumerate(path[:-1], start=1):
            if part in MODELS:
                found.add(path_text(path[:depth]))
                break
    return {
        head
        for head in found
        if head.split(".")[0] not in TRAINER and not _of_any(head, optimizers)
    }


def _of_any(key: str, heads: Iterable[str]) -> bool:
    return any(key == head or key.startswith(f"{head}.") for head in heads)


def _refuse_stray_moments(
    paths: Paths, tensors: Collection[str], optimizers: Collection[str], where: Path
) -> None:
    """Refuse tensors that have the name of a moment of a weight and are in no optimizer.

    Without this check, such an optimizer would be overlooked.
    """
    texts = {path_text(paths[key]) for key in tensors}
    weights = {text for text in texts if text.rpartition(".")[2] not in MOMENTS}
    names = {text.removeprefix(f"{head}.") for text in weights for head in ("", *MODELS)}
    for text in sorted(texts - weights):
        *parts, _ = text.split(".")
        if _of_any(text, optimizers):
            continue
        if any(".".join(parts[start:]) in names for start in range(1, len(parts))):
            raise CheckpointError(
                f"{where} has {text!r}, a moment of a weight outside of a state dict of an "
                "optimizer: save the optimizer with get_state_dict() of "
                "torch.distributed.checkpoint.state_dict, which puts it under 'state'"
            )


def _moved(path: EntryPath, renamed: Mapping[str, str]) -> EntryPath:
    """Return a path with another head.

    Args:
        path: the path. Without a planner of DCP, its first part is the whole key.
        renamed: key of a head -> its new name.
    """
    for head, name in renamed.items():
        for depth in range(1, len(path) + 1):
            begin = path_text(path[:depth])
            if begin == head:
                return (name, *path[depth:])
            if begin.startswith(f"{head}."):
                return (name + begin.removeprefix(head), *path[depth:])
    return path
