"""Names of the parameters of an optimizer whose state dict has only numbers."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence

from tierstore.errors import CheckpointError

Shape = tuple[int, ...]

_POSITIONS_MAX = 4096

_ADVICE = (
    "Save the optimizer with names, as torch.optim.AdamW(model.named_parameters()) does; or "
    "convert --only model; or, if you know that each param group was filled in the order of "
    "model.named_parameters(), pass --assume-model-order"
)
ORDER_ADVICE = (
    "name a further source that tells the order, written by torch.save({name: p.to('meta') for "
    "name, p in model.named_parameters() if p.requires_grad}, 'names.pt')"
)


def match_names(
    groups: Sequence[Sequence[Shape | None]], tensors: Sequence[tuple[str, Shape]]
) -> list[list[str]]:
    """Return the names of the parameters of each group.

    The user says that groups were filled in the order of the model, so a group is a subsequence
    of the model in which all shapes fit. Only an assignment that is the only one is returned.

    Args:
        groups: the shapes of the parameters of each group, None where no state tells.
        tensors: name and shape of the tensors of the model, in order, tied ones once.

    Raises:
        CheckpointError: no assignment fits, or several do.
    """
    wanted = sum(map(len, groups))
    # Position in each group -> number of ways to get there, and the choices of one of them.
    ways: dict[tuple[int, ...], tuple[int, tuple[object, ...] | None]] = {
        (0,) * len(groups): (1, None)
    }
    for index, (name, shape) in enumerate(tensors):
        rest = len(tensors) - index - 1
        following: dict[tuple[int, ...], tuple[int, tuple[object, ...] | None]] = {}
        for positions, (count, choices) in ways.items():
            steps = [(positions, choices)]  # The tensor is a buffer, or frozen.
            for number, group in enumerate(groups):
                at = positions[number]
                if at < len(group) and group[at] in (None, shape):
                    after = (*positions[:number], at + 1, *positions[number + 1 :])
                    steps.append((after, (choices, number, name)))
            for after, chosen in steps:
                if wanted - sum(after) <= rest:
                    before, _ = following.get(after, (0, None))
                    following[after] = (before + count, chosen)
        ways = following
        if len(ways) > _POSITIONS_MAX:
            raise CheckpointError(
                f"the parameters of the optimizer have no names, and too many groups to find them. "
                f"{_ADVICE}"
            )
    count, choices = ways.get(tuple(map(len, groups)), (0, None))
    if count != 1:
        problem = "fit no tensors" if count == 0 else "fit tensors in several ways"
        raise CheckpointError(
            f"the {wanted} parameters of the optimizer have no names, and in the order of the "
            f"model they {problem} of the model by their shapes: {ORDER_ADVICE}; or save the "
            "optimizer with names"
        )
    found: list[list[str]] = [[] for _ in groups]
    link: object = choices
    while isinstance(link, tuple):
        link, number, name = link
        found[number].insert(0, name)
    return found


def match_distinct(
    groups: Sequence[Sequence[Shape | None]], tensors: Sequence[tuple[str, Shape]]
) -> list[list[str]]:
    """Return the names of the parameters of each group, whatever their order.

    Optimizers may sort their groups, so that an assignment is accepted only if it is the only one
    over all permutations: each shape occurs once.

    Args:
        groups: as in match_names().
        tensors: name and shape of the tensors of the model, in any order.

    Raises:
        CheckpointError: a parameter has no shape, or not exactly one tensor has its shape.
    """
    names: dict[Shape, list[str]] = defaultdict(list)
    for name, known in tensors:
        names[known].append(name)
    wanted = Counter(shape for group in groups for shape in group)
    for shape, count in wanted.items():
        found = [] if shape is None else names[shape]
        if count == 1 and len(found) == 1:
            continue
        where = f"the shape {list(shape or ())}, as {len(found)} tensors of the model have"
        what = "states that tell no shape" if shape is None else where
        raise CheckpointError(
            f"the {sum(map(len, groups))} parameters of the optimizer have no names, and shapes "
            f"leave a choice or none: {count} of them have {what}. {_ADVICE}"
        )
    return [[names[shape][0] for shape in group if shape is not None] for group in groups]
