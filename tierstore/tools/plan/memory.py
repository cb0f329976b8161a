"""Needs of a job for GPU memory, host memory and drives, part by part, and their limits."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from tierstore.paging.host_gradients import LEAVING_BYTES_MAX
from tierstore.paging.tier_plan import Tier
from tierstore.tools.plan.activations import Activations, activations_of
from tierstore.tools.plan.job import Job
from tierstore.tools.plan.models import Model, layer_of
from tierstore.tools.plan.step import Ranks

_CONTEXT_BYTES = 1 << 29
"""Memory of a GPU that CUDA takes for each process, about, with the kernels that were loaded."""

_PROGRAM_BYTES, _PROGRAM_OF_GPU_BYTES = 3 << 27, 3 << 30
"""Host memory of Python with torch, about, without and with CUDA."""


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


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreBytes:
    """Bytes that stores and optimizers take, of the fullest rank and of a node."""

    buffers: int
    resting: int
    """Of pages in host memory."""
    copies: int
    """Of gradients and parameters in host memory."""
    device: int
    matrices: int
    """Beside pages, where they are stepped."""
    in_flight: int
    """Of parameters on their way to replicas."""
    state: int
    """Of the pages of all ranks of a node."""


def store_bytes(ranks: Ranks) -> StoreBytes:
    """Return the bytes of stores and optimizers of laid out ranks."""
    fullest = max((one.footprint for one in ranks.classes), key=lambda one: one.host_bytes)
    sizes = [layout.nbytes for layout, _ in fullest.pages]
    placement = fullest.placement
    buffers = placement.buffers * placement.buffer_bytes
    resting = placement.in_tier(Tier.HOST, sizes)
    return StoreBytes(
        buffers=buffers,
        resting=resting,
        copies=fullest.host_bytes - buffers - resting,
        device=ranks.most("device_bytes"),
        matrices=ranks.matrix_bytes,
        in_flight=max(one.in_flight_bytes for one in ranks.classes),
        state=math.ceil(ranks.total("state_bytes") / ranks.job.nodes),
    )


def needs_of(
    job: Job,
    own: ModelBytes,
    activations: Activations | None,
    store: StoreBytes,
    *,
    nvme_limit: int | None,
) -> list[Need]:
    """Return the needs of the fullest GPU and of a node.

    Parts are counted in the moment that takes most: the loss, the backward of a layer, or the step.

    Args:
        job: the job.
        own: bytes of the model on a rank.
        activations: of a rank; None: not known.
        store: bytes of the stores.
        nvme_limit: bytes of the drives of a node.
    """
    with_matrices = job.steps_on_gpu or not job.on_gpu
    gradients = _gradients(job, own)
    moments: list[dict[str, int]] = [
        {
            "gradients": gradients,
            "tensors of the optimizer": store.matrices * with_matrices,
            "parameters in flight": store.in_flight,
        }
    ]
    if activations is not None:
        kept, in_layer = activations.kept, activations.in_layer
        # A single backward makes gradients while it frees what layers keep.
        is_single = job.tokens is not None and job.micro_batches == 1 and not job.offloads
        before = 0 if is_single else gradients
        moments += [
            {"gradients": before, "activations": kept, "logits": activations.logits},
            {"gradients": before, "activations": kept + in_layer},
            {"gradients": gradients, "activations": in_layer},
        ]
    of_rank = _model_parts(job, own) | {"pages on the device": store.device}
    sums = [sum(moment.values()) for moment in moments]
    of_rank |= moments[sums.index(max(sums))]
    in_host = {
        "buffers of pages": store.buffers,
        "pages that rest there": store.resting,
        "copies of gradients and parameters": store.copies,
    }
    if not job.on_gpu:
        in_host |= of_rank | {"the program": _PROGRAM_BYTES}
    else:
        in_host["the program"] = _PROGRAM_OF_GPU_BYTES
        if not with_matrices:
            in_host["tensors of the optimizer"] = store.matrices
        if not job.parameters_on_gpu:
            in_host |= {"parameters": own.held, "gradients": own.held}
    sets = {
        "pages of the run": 1,
        "their second slots": job.store.slots - 1,
        "published checkpoints": job.checkpoints,
        "while one is published": extra_sets(job.checkpoints),
    }
    needs = [
        _need("host", in_host, job.host_memory, times=job.node_size),
        _need("NVMe", sets, nvme_limit, times=store.state),
    ]
    if job.on_gpu:
        in_gpu = of_rank | {"context of CUDA": _CONTEXT_BYTES}
        needs.insert(0, _need("GPU", in_gpu, job.gpu_memory))
    return needs


def _need(place: str, parts: Mapping[str, int], limit: int | None, *, times: int = 1) -> Need:
    found = {part: times * nbytes for part, nbytes in parts.items() if nbytes}
    return Need(place=place, parts=found, limit=limit)


def extra_sets(checkpoints: int) -> int:
    """Return the number of additional sets of pages while a checkpoint is published.

    The new page files, for the slots that the checkpoint links, are one set: the oldest checkpoint
    is removed only after that. If a single checkpoint is kept, there are two: the last one that is
    known to be whole stays until the newest was read.
    """
    return 0 if checkpoints == 0 else 2 if checkpoints == 1 else 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelBytes:
    """Bytes of the parameters of a model, of one rank."""

    held: int
    """Of the parameters that it holds between two steps; gradients take as much."""
    largest: int
    """Of the largest parameter that it holds."""
    outside: int
    """Of the parameters outside of layers, if FSDP gathers them."""
    layer: int
    """Of the largest layer that FSDP gathers."""


def model_bytes(job: Job, model: Model) -> ModelBytes:
    """Return the bytes of a model on a rank."""
    held, layers, outside = [], {"": 0}, 0
    is_brought = job.on_gpu and not job.parameters_on_gpu
    for parameter in model.parameters:
        holding, nbytes = job.holding(parameter.shape), parameter.dtype.itemsize * parameter.numel
        local = holding.local_shape(parameter.shape, holding.ranks[0])
        held.append(parameter.dtype.itemsize * math.prod(local))
        if is_brought or not holding.is_whole:
            layer = layer_of(parameter.name)
            if layer is None:
                outside += nbytes
            else:  # Of stacked experts, each rank gathers its own ones.
                own = nbytes // (job.expert_parallel if len(parameter.shape) == 3 else 1)
                layers[layer] = layers.get(layer, 0) + own
    return ModelBytes(
        held=sum(held), largest=max(held), outside=outside, layer=max(layers.values())
    )


def _model_parts(job: Job, own: ModelBytes) -> dict[str, int]:
    """Return the memory of a rank that the model always takes.

    FSDP gathers a layer ahead, and keeps parameters outside of layers from forward to backward. It
    reduces the gradients of a layer while the next layer makes its gradients.
    """
    return {
        "parameters": own.held * (job.parameters_on_gpu or not job.on_gpu),
        "gathered parameters": own.outside + 2 * own.layer,
        # Of two layers, or at the end of the parameters outside of layers: each gradient as
        # backward makes it, and once more as the input of the reduction.
        "gradients to be reduced": own.outside + max(2 * own.layer, own.outside),
    }


def _gradients(job: Job, own: ModelBytes) -> int:
    """Return the gradients that a rank has at the end of backward where it computes."""
    if job.on_gpu and not job.parameters_on_gpu:
        return 0
    if not job.offloads:
        return own.held
    # With micro-batches, the sum of earlier gradients comes back to be added to.
    leaving = max(LEAVING_BYTES_MAX, own.largest) * (2 if job.micro_batches > 1 else 1)
    return min(own.held, leaving)


def job_activations(job: Job, model: Model) -> Activations | None:
    """Return the activations of a rank; None if the job has neither their size nor tokens."""
    if job.activation_bytes is not None:
        return Activations(kept=job.activation_bytes, in_layer=0, logits=0)
    if job.tokens_at_once is None:
        return None
    return activations_of(
        model,
        job.tokens_at_once,
        checkpointing=job.checkpointing,
        loss_tokens=job.loss_tokens,
    )
