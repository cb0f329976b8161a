"""The job that a plan is about: nodes, memory, the model's own time, and the length of the run."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from tierstore.errors import PlanError
from tierstore.layout.sharding import Holding
from tierstore.tools.plan.drives import Drives
from tierstore.tools.plan.footprint import StoreOptions
from tierstore.tools.plan.partitions import holding_of
from tierstore.units import format_bytes

RANKS_MAX = 2**16
_MOST = 2.0**63
_MAY_BE_ZERO = ("gpus", "wear", "model_s", "checkpoints", "activation_bytes")
_MICRO_TOKENS = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A training job. Sizes are in bytes, rates in bytes per second.

    Raises:
        PlanError: a value is negative, zero or infinite where that makes no sense.
    """

    nodes: int = 1
    gpus: int = 0
    """GPUs of each node, one rank on each; 0 for ranks that compute on the CPU."""
    cpu_ranks: int = 1
    """Ranks of each node without GPUs."""
    gpu_memory: int | None = None
    """Memory of one GPU; None: not checked."""
    host_memory: int | None = None
    """Memory of one node; None: not checked."""
    drives: Drives | None = None
    """Drives of each node; None: neither their space nor their life is checked."""
    partition: str = "fsdp"
    """As for ``holding_of``; without effect on one rank."""
    expert_parallel: int = 1
    """Ranks that the experts of a layer are dealt to; as for ``holding_of``."""
    parameters_on: str = "gpu"
    """"host": FSDP2's CPUOffloadPolicy() keeps parameters and gradients in page-locked memory, and
    brings each layer to the GPU for forward and backward. Without effect without GPUs."""
    tokens: int | None = None
    """Tokens of one step of all ranks together."""
    micro_tokens: int | None = None
    """Tokens of one forward and backward of a rank; None: 4096, or all tokens of the step."""
    checkpointing: bool = False
    """True if each layer is computed again in backward."""
    loss_tokens: int | None = None
    """Most tokens whose logits exist at once; None: all of a forward."""
    flops: float | None = None
    """Floating-point operations per second that a rank achieves in forward and backward."""
    model_s: float | None = None
    """Seconds of forward and backward of one step; None: from ``tokens`` and ``flops``."""
    active_parameters: int | None = None
    """Parameters that a token passes through; None: all."""
    activation_bytes: int | None = None
    """Memory of activations and logits on each rank; None: estimated if ``tokens`` are known."""
    checkpoints: int = 1
    """Published checkpoints that are kept."""
    steps: int | None = None
    """Steps of the run; None: as many as the drives last."""
    endurance: float = 1.0
    """Share of the rated life of the drives that the run may use."""
    wear: float = 0.0
    """Share of the rated life that is already used."""
    store: StoreOptions = field(default_factory=StoreOptions)
    """Arguments of the store of each rank."""
    optimizer: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of the optimizer."""

    def __post_init__(self) -> None:
        for one in fields(self):
            value = getattr(self, one.name)
            if isinstance(value, int | float) and not isinstance(value, bool):
                may_be_zero = one.name in _MAY_BE_ZERO
                good = (0 <= value < _MOST) if may_be_zero else (0 < value < _MOST)
                if not good:
                    wanted = "0 or more" if may_be_zero else "above 0"
                    raise PlanError(
                        f"{one.name} must be a number {wanted} and below 2^63, "
                        f"got {str(value)[:20]}"
                    )
        if self.gpus and self.cpu_ranks > 1:
            raise PlanError(
                f"a node with {self.gpus} GPUs has a rank on each of them, so cpu_ranks must be "
                f"left out, got {self.cpu_ranks}"
            )
        if self.parameters_on not in ("gpu", "host"):
            raise PlanError(f"parameters_on is 'gpu' or 'host', got {self.parameters_on!r}")
        if self.on_gpu and not self.parameters_on_gpu:
            if self.partition == "ddp" and self.world_size > 1:
                raise PlanError(
                    "FSDP2's CPUOffloadPolicy() keeps parameters on the host: plan with "
                    "fsdp or hsdp"
                )
            if self.store.offload_gradients is not None:
                raise PlanError(
                    "FSDP2's CPUOffloadPolicy() brings gradients to the host itself: leave "
                    "offload_gradients out"
                )
        if self.offloads and self.partition == "ddp" and self.world_size > 1:
            raise PlanError(
                "offload_gradients takes gradients that are reduced in backward, and DDP reduces "
                "them later: plan with fsdp or hsdp, or leave offload_gradients out"
            )
        if self.world_size > RANKS_MAX:
            raise PlanError(f"{self.world_size} ranks are more than {RANKS_MAX}: plan fewer nodes")
        if self.model_s is None and self.tokens is None and self.flops is not None:
            raise PlanError(
                "the time of forward and backward needs the tokens of a step beside the operations "
                "per second that a rank achieves, or the seconds themselves"
            )

    @property
    def node_size(self) -> int:
        """Ranks of each node."""
        return self.gpus or self.cpu_ranks

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.nodes * self.node_size

    @property
    def on_gpu(self) -> bool:
        """True if forward and backward are computed on GPUs."""
        return self.gpus > 0

    @property
    def parameters_on_gpu(self) -> bool:
        """True if parameters are on GPUs."""
        return self.on_gpu and self.parameters_on == "gpu"

    @property
    def steps_on_gpu(self) -> bool:
        """True if pages are stepped on GPUs."""
        step_on = self.store.step_on
        return self.parameters_on_gpu if step_on is None else self.on_gpu and step_on != "cpu"

    @property
    def offloads(self) -> bool:
        """True if gradients leave GPUs during backward."""
        return self.parameters_on_gpu and self.store.offload_gradients is not None

    @property
    def tokens_at_once(self) -> int | None:
        """Tokens of one forward and backward of a rank; None if ``tokens`` are not known."""
        if self.tokens is None:
            return None
        of_rank = math.ceil(self.tokens / self.world_size)
        return min(of_rank, self.micro_tokens or _MICRO_TOKENS)

    @property
    def micro_batches(self) -> int:
        """Forwards and backwards of a step."""
        if self.tokens is None or self.tokens_at_once is None:
            return 1
        return math.ceil(self.tokens / self.world_size / self.tokens_at_once)

    def holding(self, shape: tuple[int, ...]) -> Holding:
        """Return the ranks that hold a parameter.

        Raises:
            PlanError: as ``holding_of``.
        """
        return holding_of(
            shape, self.partition, self.world_size, self.node_size, self.expert_parallel
        )

    def compute_s(self, active_count: int) -> float | None:
        """Return the seconds of forward and backward; None if the job does not say.

        These are 6 operations per parameter and token, and 2 more for a forward that is repeated.

        Args:
            active_count: parameters that a token passes through, if the job does not say.
        """
        if self.model_s is not None:
            return self.model_s
        if self.tokens is None or self.flops is None:
            return None
        return self.tokens * self._token_s(active_count, self.flops)

    def tokens_in(self, seconds: float, active_count: int) -> float | None:
        """Return the tokens of a step whose forward and backward take some seconds."""
        known = self.compute_s(active_count)
        if self.tokens is not None and known:
            return self.tokens * seconds / known
        return None if self.flops is None else seconds / self._token_s(active_count, self.flops)

    def _token_s(self, active_count: int, flops: float) -> float:
        operations = (8.0 if self.checkpointing else 6.0) * (self.active_parameters or active_count)
        return operations / (flops * self.world_size)

    def describe(self) -> str:
        """Return the machines as text: ``"64 nodes, 8 GPUs of 80.0 GiB on each"``."""
        each = "" if self.nodes == 1 else " on each"
        kind = "GPU" if self.gpus else "CPU rank"
        ranks = f"{self.node_size} {kind}{'' if self.node_size == 1 else 's'}"
        if self.gpu_memory is not None and self.gpus:
            ranks += f" of {format_bytes(self.gpu_memory)}"
        parts = ["1 node" if self.nodes == 1 else f"{self.nodes} nodes", f"{ranks}{each}"]
        if self.host_memory is not None:
            parts.append(f"{format_bytes(self.host_memory)} of host memory{each}")
        return ", ".join(parts)
