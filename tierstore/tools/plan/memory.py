"""Needs of a job for GPU memory, host memory and drives, part by part, and their limits."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from tierstore.layout.sharding import Holding
from tierstore.paging.host_gradients import LEAVING_BYTES_MAX
from tierstore.paging.tier_plan import Tier
from tierstore.tools.plan.job import Job
from tierstore.tools.plan.models import Model, ModelParameter
from tierstore.tools.plan.step import Ranks

_CONTEXT_BYTES = 1 << 29
"""Memory of a GPU that CUDA takes for each process, about, with the kernels that were loaded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """Contents of one kind of memory."""

    place: str
    """"GPU" (of one rank), "host" or "NVMe" (of one node)."""
    parts: Mapping[str, int]
    """Purpose -> bytes; parts of no bytes are left out."""
    limit: int | None
    """Bytes that there are; None if the job does not say."""

    @property
    def nbytes(self) -> int:
        """All parts together."""
        return sum(self.parts.values())

    @property
    def fits(self) -> bool:
        """False if there is a limit, and the parts exceed it."""
        return self.limit is None or self.nbytes <= self.limit


def needs_of(ranks: Ranks, model: Model, *, nvme_limit: int | None) -> list[Need]:
    """Return the needs of the fullest GPU and of a node.

    Args:
        ranks: all ranks.
        model: the model.
        nvme_limit: bytes of the drives of a node.
    """
    job = ranks.job
    with_parameters = {
        **model_parts(job, model),
        "context of CUDA": _CONTEXT_BYTES if job.on_gpu else 0,
        "pages on the device": ranks.most("device_bytes"),
        "parameters in flight": max(one.in_flight_bytes for one in ranks.classes),
    }
    matrices = {"tensors of the optimizer": ranks.matrix_bytes}
    if not job.on_gpu:
        in_gpu, of_each = {}, with_parameters | matrices
    elif not job.steps_on_gpu:
        in_gpu, of_each = with_parameters, matrices
    else:
        in_gpu, of_each = with_parameters | matrices, {}
    in_host = _host_parts(ranks)
    in_host |= {part: job.node_size * nbytes for part, nbytes in of_each.items()}
    files = math.ceil(ranks.total("file_bytes") / job.nodes)
    state = math.ceil(ranks.total("state_bytes") / job.nodes)
    in_nvme = {
        "pages of the run": state,
        "their second slots": files - state,
        "published checkpoints": job.checkpoints * state,
        "while one is published": extra_sets(job.checkpoints) * state,
    }
    needs = [Need(place="NVMe", parts=_without_zeros(in_nvme), limit=nvme_limit)]
    needs.insert(0, Need(place="host", parts=_without_zeros(in_host), limit=job.host_memory))
    if job.on_gpu:
        needs.insert(0, Need(place="GPU", parts=_without_zeros(in_gpu), limit=job.gpu_memory))
    return needs


def extra_sets(checkpoints: int) -> int:
    """Return how many sets of pages there are more while a checkpoint is published.

    One is of the new page files for the slots that the checkpoint links. The oldest checkpoint goes
    after that, and is one more than are kept, but for a single one two: the last one that is known
    to be whole stays until the newest was read.
    """
    return 0 if checkpoints == 0 else 2 if checkpoints == 1 else 1


def _host_parts(ranks: Ranks) -> dict[str, int]:
    """Return what the stores of a node keep in host memory."""
    size = ranks.job.node_size
    fullest = max((one.footprint for one in ranks.classes), key=lambda one: one.host_bytes)
    sizes = [layout.nbytes for layout, _ in fullest.pages]
    placement = fullest.placement
    buffers = placement.buffers * placement.buffer_bytes
    resting = placement.in_tier(Tier.HOST, sizes)
    return {
        "buffers of pages": size * buffers,
        "pages that rest there": size * resting,
        "copies of gradients and parameters": size * (fullest.host_bytes - buffers - resting),
    }


def model_parts(job: Job, model: Model) -> dict[str, int]:
    """Return what the model itself takes of one rank: parameters, gradients, activations.

    FSDP gathers a layer ahead, and keeps what is outside of layers from forward to backward. It
    reduces the gradients of a layer while the next layer makes its gradients.
    """
    held, gathered, outside = 0, {"": 0}, 0
    for parameter in model.parameters:
        itemsize = parameter.dtype.itemsize
        holding = job.holding(parameter.shape)
        held += itemsize * _local_numel(parameter, holding)
        if not holding.is_whole:
            layer = layer_of(parameter.name)
            if layer is None:
                outside += itemsize * parameter.numel
            else:
                nbytes = itemsize * parameter.numel
                if len(parameter.shape) == 3:  # Each rank gathers its own experts.
                    nbytes //= job.expert_parallel
                gathered[layer] = gathered.get(layer, 0) + nbytes
    gradients = held
    if job.offloads:
        largest = max(
            parameter.dtype.itemsize * _local_numel(parameter, job.holding(parameter.shape))
            for parameter in model.parameters
        )
        gradients = min(held, max(LEAVING_BYTES_MAX, largest))
    return {
        "parameters": held,
        "gradients": gradients,
        "gathered parameters": outside + 2 * max(gathered.values()),
        # Of two layers, or in the end of what is outside: each as backward makes it, and once more
        # as the input of the reduction.
        "gradients to be reduced": max(outside + 2 * max(gathered.values()), 2 * outside),
        "activations": job.activation_bytes or 0,
    }


def layer_of(name: str) -> str | None:
    """Return the name of a parameter up to the first number, or None if it has none.

    Example: "model.layers.7.mlp.up_proj.weight" is of "model.layers.7".
    """
    parts = name.split(".")
    for position, part in enumerate(parts):
        if part.isdecimal():
            return ".".join(parts[: position + 1])
    return None


def _local_numel(parameter: ModelParameter, holding: Holding) -> int:
    return math.prod(holding.local_shape(parameter.shape, holding.ranks[0]))


def _without_zeros(parts: Mapping[str, int]) -> dict[str, int]:
    return {part: nbytes for part, nbytes in parts.items() if nbytes}
