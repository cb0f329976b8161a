"""Device meshes of the ranks of a pool, each made once: the threads of its groups stay."""

from __future__ import annotations

import functools

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh


@functools.cache
def cpu_mesh(*shape: int, names: tuple[str, ...] | None = None) -> DeviceMesh:
    """Return a mesh of all ranks; without a shape, of one dimension."""
    return init_device_mesh("cpu", shape or (dist.get_world_size(),), mesh_dim_names=names)
