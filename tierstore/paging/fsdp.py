"""Drop FSDP2's gathered copies of parameters before the parameters are written.

The next forward would otherwise use stale values.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, cast

from tierstore.layout.parameters import PagedParameter

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule


def reshard(parameters: Iterable[PagedParameter]) -> None:
    """Have FSDP2 drop gathered copies of parameters, which it keeps after a forward alone.

    Raises:
        ValueError: FSDP2 keeps them, because a forward is in progress; the message names the
            parameter.
    """
    if "torch.distributed.fsdp" not in sys.modules:  # Never imported, so never used.
        return
    # A parameter does not know its modules, and no public function lists all FSDP modules.
    from torch.distributed._composable_state import _module_state_mapping

    names: dict[int, str] = {}
    for module, state in list(_module_state_mapping.items()):
        for group in _parameter_groups(state()):
            if group.is_sharded:
                continue
            names = names or {id(member.tensor): member.name for member in parameters}
            found = [names.get(id(member.sharded_param)) for member in group.fsdp_params]
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
    """Return the parameter groups of one fully_shard(); none if another wrapper made the state."""
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:  # Earlier releases of torch have at most one group.
        groups = [getattr(state, "_fsdp_param_group", None)]
    return [group for group in groups if group is not None]
