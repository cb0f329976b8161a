"""Tensors that FSDP2 keeps beside parameters: gathered copies, and unreduced gradients."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, cast

import torch

from tierstore.layout.parameters import PagedParameter

if TYPE_CHECKING:
    from torch import nn
    from torch.distributed.fsdp import FSDPModule


def reshard(parameters: Iterable[PagedParameter]) -> None:
    """Have FSDP2 drop the gathered copies of parameters that it keeps after a forward pass.

    Parameters are about to be written, and the next forward would use stale values.

    Raises:
        ValueError: a forward pass is in progress, so FSDP2 keeps the copies; the message names
            the parameter.
    """
    names: dict[int, str] = {}
    for module, group in _parameter_groups():
        if group.is_sharded:
            continue
        names = names or {id(member.tensor): member.name for member in parameters}
        found = [names.get(id(member.sharded_param)) for member in group.fsdp_params]
        name = next(filter(None, found), None)
        if name is None:
            continue
        module.reshard()
        if not group.is_sharded:
            raise ValueError(
                f"FSDP2 uses a gathered copy of parameter {name!r} and would not see what is "
                "written to it: step and restore between forwards, not within one"
            )


def unreduced_bytes(reduced: torch.Tensor) -> int:
    """Return the bytes of gradients that FSDP2 keeps unreduced because gradient sync is off.

    To be called when the first gradient of the last backward was reduced: then most of the other
    groups have gradients of the backwards before. Modules around the first one are left out. In any
    backward they are reduced after it, and have gradients already.

    Args:
        reduced: the parameter of this gradient, as the sharded model has it.
    """
    groups = [(cast("nn.Module", module), group) for module, group in _parameter_groups()]
    first = {
        module
        for module, group in groups
        if any(member.sharded_param is reduced for member in group.fsdp_params)
    }
    others = [group for module, group in groups if first.isdisjoint(module.modules())]
    nbytes = holding = 0
    for group in others:
        own = 0
        for member in group.fsdp_params:
            # There, or in the dtype that is reduced, if that is another one.
            gathered = getattr(member, "_unsharded_param", None)  # Not before the first forward.
            kept = [member.unsharded_accumulated_grad, getattr(gathered, "grad", None)]
            own += sum(gradient.nbytes for gradient in kept if gradient is not None)
        nbytes += own
        holding += own > 0
    return nbytes if 2 * holding > len(others) else 0


def _parameter_groups() -> Iterator[tuple[FSDPModule, Any]]:
    """Yield the parameter groups of each fully_shard() with its module."""
    if "torch.distributed.fsdp" not in sys.modules:  # Never imported, so never used.
        return
    # A parameter does not know its modules, and no public function lists all FSDP modules.
    from torch.distributed._composable_state import _module_state_mapping

    for module, reference in list(_module_state_mapping.items()):
        state = reference()  # Another wrapper may have made it.
        groups = getattr(state, "_fsdp_param_groups", None)
        if groups is None:  # Earlier releases of torch have at most one group.
            groups = [getattr(state, "_fsdp_param_group", None)]
        for group in groups:
            if group is not None:
                yield cast("FSDPModule", module), group
