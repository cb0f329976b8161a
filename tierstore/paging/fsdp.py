"""Parameters that FSDP2 has gathered: what is written to them, their modules do not see."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, cast

from tierstore.layout.parameters import PagedParameter

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule


def reshard(parameters: Iterable[PagedParameter]) -> None:
    """Have FSDP2 forget the copies that it has gathered of parameters that will be written.

    It has some after a forward that no backward followed, and would use them in the next.

    Raises:
        ValueError: it does not, because it is in the middle of a forward; the message names
            the parameter.
    """
    if "torch.distributed.fsdp" not in sys.modules:  # Who has used it has imported it.
        return
    # A parameter does not know its modules, and nothing public lists them all.
    from torch.distributed._composable_state import _module_state_mapping

    names: dict[int, str] = {}
    for module, state in list(_module_state_mapping.items()):
        for group in _parameter_groups(state()):
            if group.is_sharded:
                continue
            names = names or {id(each.tensor): each.name for each in parameters}
            found = [names.get(id(each.sharded_param)) for each in group.fsdp_params]
            name = next(filter(None, found), None)
            if name is None:
                continue
            cast("FSDPModule", module).reshard()
            if not group.is_sharded:
                raise ValueError(
                    f"FSDP2 uses a gathered copy of parameter {name!r} and would not see what is "
                    "written to it: step and restore between forwards, not within one"
                )


def _parameter_groups(state: Any) -> Iterable[Any]:
    """Return what one call of fully_shard() put together; a state may be of another wrapper."""
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:  # Earlier releases of torch have one at most.
        groups = [getattr(state, "_fsdp_param_group", None)]
    return [group for group in groups if group is not None]
