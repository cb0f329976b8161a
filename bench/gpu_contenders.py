"""Trainings of one model on a GPU, by tierstore and by others, each in a process of its own.

The model has the shape of Llama in bfloat16, and sees the same random tokens in every training.
Layers are recomputed in backward. Forward and backward use deterministic algorithms, so the losses
of two trainings can be compared bit for bit. Peers are trained as their documentation says.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from measuring import GIB, machine, peak_anonymous_bytes, profile_threads
from step import now_s
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.nn import functional
from torch.profiler import ProfilerActivity, record_function
from torch.utils.checkpoint import checkpoint

import muon
import tierstore

SEQUENCE = 4096
"""Tokens of a sequence, or fewer if a micro-batch has fewer."""
LOGIT_TOKENS = 2048
"""Tokens whose logits are in memory at a time."""
MUON_LR, ADAMW_LR = 0.02, 3e-4
NVME_MEMORY = 8 * GIB
"""Host memory for the pages of a store with a directory."""
NVME_BUFFERS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """Shape of a model."""

    layers: int
    hidden: int
    kv: int
    """Rows of the projections of keys and of values."""
    mlp: int
    vocabulary: int
    heads: int
    page_bytes: int | None = None
    """Of the store; None: its default."""


SIZES = {
    "tiny": Size(
        layers=2, hidden=64, kv=32, mlp=224, vocabulary=512, heads=4, page_bytes=64 * 1024
    ),
    "1b": Size(layers=16, hidden=2048, kv=512, mlp=8192, vocabulary=128256, heads=32),
    "3b": Size(layers=28, hidden=3072, kv=1024, mlp=8192, vocabulary=128256, heads=24),
    "8b": Size(layers=32, hidden=4096, kv=1024, mlp=14336, vocabulary=128256, heads=32),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One training."""

    contender: str
    size: str
    tokens: int
    """Of a micro-batch."""
    micro_batches: int
    """Backwards before each step."""
    steps: int
    """Measured steps, after one that is not."""
    device: str
    directory: Path
    """An empty folder on the disk to use."""
    trace: Path | None = None
    """File for a profiler trace of one more step."""

    @property
    def batch(self) -> tuple[int, int]:
        """Sequences of a micro-batch, and tokens of each."""
        return max(1, self.tokens // SEQUENCE), min(self.tokens, SEQUENCE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Result of one training. Seconds are medians over the measured steps."""

    device: str
    """Name of the GPU, or of the processor."""
    parameters: int
    model_s: float
    """Forward and backward of all micro-batches."""
    step_s: float
    """Until the GPU has done the step. Writes to a disk may be in flight."""
    issued_s: float
    """Until step() has returned."""
    first_step_s: float
    """The step that is not measured: it makes the state and compiles."""
    tokens_per_s: float
    gpu_gib: float | None
    """Most memory that torch has allocated in the measured steps; None on a CPU."""
    host_gib: float
    """Most memory of the process, without mapped files."""
    taken_gib: float
    """Decrease of the machine's available memory, with page-locked memory of the driver. Includes
    what other programs have taken meanwhile."""
    losses: list[float]
    """Of each step, also of the first."""
    pages_in: dict[str, int] = field(default_factory=dict)
    """Tier -> number of pages of a store that rest there."""


class Block(nn.Module):
    """A layer of the model."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        linear = partial(nn.Linear, bias=False)
        self.q, self.o = linear(size.hidden, size.hidden), linear(size.hidden, size.hidden)
        self.k, self.v = linear(size.hidden, size.kv), linear(size.hidden, size.kv)
        self.gate, self.up = linear(size.hidden, size.mlp), linear(size.hidden, size.mlp)
        self.down = linear(size.mlp, size.hidden)
        self.norm1, self.norm2 = nn.RMSNorm(size.hidden), nn.RMSNorm(size.hidden)
        self._head_dim = size.hidden // size.heads

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return hidden states of the same shape, (sequences, tokens, width)."""
        normed = self.norm1(hidden)
        queries, keys, values = (
            project(normed).unflatten(-1, (-1, self._head_dim)).transpose(1, 2)
            for project in (self.q, self.k, self.v)
        )
        attended = functional.scaled_dot_product_attention(
            queries, keys, values, is_causal=True, enable_gqa=True
        )
        hidden = hidden + self.o(attended.transpose(1, 2).flatten(2))
        normed = self.norm2(hidden)
        return hidden + self.down(functional.silu(self.gate(normed)) * self.up(normed))


class Llama(nn.Module):
    """A model that returns its loss."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(size.vocabulary, size.hidden)
        self.layers = nn.ModuleList(Block(size) for _ in range(size.layers))
        self.norm = nn.RMSNorm(size.hidden)
        self.lm_head = nn.Linear(size.hidden, size.vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the mean loss of the next token, for tokens of (sequences, tokens)."""
        hidden = self.embed_tokens(tokens)
        for layer in self.layers:
            hidden = checkpoint(layer, hidden, use_reentrant=False)
        hidden, wanted = self.norm(hidden)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()
        pieces = zip(hidden.split(LOGIT_TOKENS), wanted.split(LOGIT_TOKENS), strict=True)
        losses = [checkpoint(self._loss, *piece, use_reentrant=False) for piece in pieces]
        return torch.stack(losses).sum() / len(wanted)

    def _loss(self, hidden: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(self.lm_head(hidden).float(), wanted, reduction="sum")


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """A model with its optimizer."""

    forward: Callable[[torch.Tensor], torch.Tensor]
    """From tokens to the loss."""
    backward: Callable[[torch.Tensor], None]
    """Of the loss of one micro-batch."""
    step: Callable[[], object]
    zero_grad: Callable[[], object]
    store: tierstore.TierStore | None = None


def trained_by(
    job: Job, model: nn.Module, *optimizers: Any, store: tierstore.TierStore | None = None
) -> Training:
    """Return the training of a model whose parameters some optimizers share."""

    def step() -> None:
        for optimizer in optimizers:
            optimizer.step()

    return Training(
        forward=model,
        backward=lambda loss: (loss / job.micro_batches).backward(),
        step=step,
        zero_grad=lambda: [optimizer.zero_grad() for optimizer in optimizers],
        store=store,
    )


def ours(
    job: Job,
    model: Llama,
    stack: ExitStack,
    *,
    tier: str,
    adamw: bool = False,
    offload: bool = False,
    step_on: str | None = None,
    parameters_on_host: bool = False,
    of_torch: bool = False,
    **encodings: Any,
) -> Training:
    """Train with tierstore: Muon for matrices, AdamW for all parameters, or AdamW of torch."""
    if parameters_on_host:
        shard(job, model, stack)
        step_on = None if job.device == "cpu" else job.device
    options: dict[str, Any] = {"page_bytes": SIZES[job.size].page_bytes, "step_on": step_on}
    if offload:
        options |= {"offload_gradients": "backward", "free_gradients": True}
    directory = None
    if tier == "nvme":
        directory = job.directory / "run"
        gradients = sum(p.nbytes for p in model.parameters()) if offload else 0
        options |= {"host_memory": NVME_MEMORY + gradients, "buffers": NVME_BUFFERS}
    store = stack.enter_context(tierstore.TierStore(directory, **options))
    groups = muon.param_groups(
        model,
        lr=MUON_LR,
        adamw_lr=ADAMW_LR,
        is_muon=(lambda name, parameter: False) if adamw else None,
    )
    optimizer: tierstore.PagedOptimizer = muon.Muon(groups, store=store, **encodings)
    if of_torch:
        named, cls = model.named_parameters(), torch.optim.AdamW
        optimizer = tierstore.Paged(named, cls, store=store, lr=ADAMW_LR, fused=True)
    if tier == "host":
        store.move("host")
    if directory is not None:
        optimizer.restore()  # Gradients leave from here on; without files, from the first step on.
    return trained_by(job, model, optimizer, store=store)


def by_torch(job: Job, model: Llama, stack: ExitStack) -> Training:
    """Train with torch.optim: states of bfloat16 on the GPU, without masters."""
    matrices = [p for p in model.layers.parameters() if p.ndim == 2]
    chosen = {id(parameter) for parameter in matrices}
    others = [p for p in model.parameters() if id(p) not in chosen]
    return trained_by(
        job,
        model,
        torch.optim.Muon(matrices, lr=MUON_LR),
        torch.optim.AdamW(others, lr=ADAMW_LR, fused=True),
    )


def by_torchao(job: Job, model: Llama, stack: ExitStack) -> Training:
    """Train with AdamW of torchao: states of bfloat16 on the host, without masters."""
    from torchao.optim import CPUOffloadOptimizer

    optimizer = CPUOffloadOptimizer(
        model.parameters(),
        torch.optim.AdamW,
        offload_gradients=job.micro_batches == 1,  # It does not accumulate gradients there.
        fused=True,
        lr=ADAMW_LR,
    )
    return trained_by(job, model, optimizer)


def by_fsdp2(job: Job, model: Llama, stack: ExitStack) -> Training:
    """Train with FSDP2 and torch's AdamW: masters, states and gradients of float32 on the host."""
    shard(job, model.float(), stack, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    return trained_by(job, model, torch.optim.AdamW(model.parameters(), lr=ADAMW_LR, fused=True))


def by_deepspeed(job: Job, model: Llama, stack: ExitStack) -> Training:
    """Train with ZeRO-2 of DeepSpeed: masters, states and gradients of float32 on the host."""
    # DeepSpeed's builds need ninja, which pip installs beside the interpreter.
    os.environ["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    # It asks for these although there is a group, and uses no port then.
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    import deepspeed

    join_group(job, stack)
    config = {
        "train_micro_batch_size_per_gpu": job.batch[0],
        "gradient_accumulation_steps": job.micro_batches,
        "steps_per_print": 10**9,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": ADAMW_LR}},
        "zero_optimization": {
            "stage": 2,
            "offload_optimizer": {"device": "cpu", "pin_memory": True},
            "overlap_comm": True,
        },
    }
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=config
    )

    def backward(loss: torch.Tensor) -> None:
        engine.backward(loss)  # It divides by the number of micro-batches.
        if not engine.is_gradient_accumulation_boundary():
            engine.step()  # It only counts, and the last one updates.

    return Training(forward=engine, backward=backward, step=engine.step, zero_grad=lambda: None)


def join_group(job: Job, stack: ExitStack) -> None:
    """Make a process group of this process alone."""
    backend = "gloo" if job.device == "cpu" else "cpu:gloo,cuda:nccl"
    rendezvous = f"file://{job.directory.resolve()}/rendezvous"
    dist.init_process_group(backend, init_method=rendezvous, rank=0, world_size=1)
    stack.callback(dist.destroy_process_group)


def shard(job: Job, model: Llama, stack: ExitStack, **options: Any) -> None:
    """Put parameters into page-locked host memory, from where FSDP2 streams layers to the GPU."""
    join_group(job, stack)
    mesh = init_device_mesh(job.device, (1,))
    policy = CPUOffloadPolicy(pin_memory=job.device != "cpu")
    for module in (*model.layers, model):
        fully_shard(module, mesh=mesh, offload_policy=policy, **options)


@dataclass(frozen=True, slots=True, kw_only=True)
class Contender:
    """A way to train."""

    make: Callable[[Job, Llama, ExitStack], Training]
    rule: str | None = None
    """Contenders of one rule have the same losses; None: not compared."""


def _ours(rule: str, **options: Any) -> Contender:
    return Contender(make=partial(ours, adamw=rule != "muon", **options), rule=rule)


CONTENDERS: Mapping[str, Contender] = {
    "torch": Contender(make=by_torch),
    "device": _ours("muon", tier="device"),
    "host": _ours("muon", tier="host"),
    "host-offload": _ours("muon", tier="host", offload=True),
    "device-offload": _ours("muon", tier="device", offload=True),
    "parameters-host": _ours("muon", tier="host", parameters_on_host=True),
    "adamw-host": _ours("adamw", tier="host"),
    "adamw-of-torch-host": _ours("adamw of torch", tier="host", of_torch=True),
    "adamw-host-offload": _ours("adamw", tier="host", offload=True),
    "adamw-cpu": _ours("adamw", tier="host", offload=True, step_on="cpu"),
    "adamw-8bit-host": _ours(
        "adamw in 8 bits", tier="host", master="24bit", moments_dtype=torch.int8
    ),
    "nvme": _ours("muon", tier="nvme"),
    "nvme-offload": _ours("muon", tier="nvme", offload=True),
    "torchao": Contender(make=by_torchao),
    "fsdp2": Contender(make=by_fsdp2),
    "deepspeed": Contender(make=by_deepspeed),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One training step, in seconds."""

    model_s: float
    step_s: float
    issued_s: float
    loss: float


def turn(training: Training, batches: torch.Tensor) -> Turn:
    """Do one training step.

    Args:
        training: what to train.
        batches: tokens, of (micro-batches, sequences, tokens).
    """
    began_s = now_s()
    # The step has no such algorithms to choose from, and is measured as it is.
    torch.use_deterministic_algorithms(True, warn_only=True)
    losses = []
    for tokens in batches:
        with record_function("forward"):
            losses.append(training.forward(tokens))
        with record_function("backward"):
            training.backward(losses[-1])
        losses[-1] = losses[-1].detach()
    torch.use_deterministic_algorithms(False)
    backward_s = now_s()
    training.step()
    issued_s = time.perf_counter()
    stepped_s = now_s()
    training.zero_grad()
    return Turn(
        model_s=backward_s - began_s,
        step_s=stepped_s - backward_s,
        issued_s=issued_s - backward_s,
        loss=float(torch.stack(losses).mean()),
    )


def available_bytes() -> int:
    """Return the memory that the machine could give to programs."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))


def train(job: Job) -> Measured:
    """Do one training in this process.

    Raises:
        Exception: as the contender does, for example if its package is not installed.
    """
    size, on_gpu = SIZES[job.size], job.device != "cpu"
    # Else torch fills the page buffers that a store allocates.
    torch.utils.deterministic.fill_uninitialized_memory = False
    available = [available_bytes()]
    torch.manual_seed(0)
    with torch.device(job.device):
        model = Llama(size).to(torch.bfloat16)
        batches = torch.randint(size.vocabulary, (job.micro_batches, *job.batch))
    parameters = sum(parameter.numel() for parameter in model.parameters())
    with ExitStack() as stack:
        training = CONTENDERS[job.contender].make(job, model, stack)
        first = turn(training, batches)
        if on_gpu:
            torch.cuda.reset_peak_memory_stats()
        turns = []
        for _ in range(job.steps):
            turns.append(turn(training, batches))
            available.append(available_bytes())
        gpu_gib = torch.cuda.max_memory_allocated() / GIB if on_gpu else None
        if job.trace is not None:
            gpu = [ProfilerActivity.CUDA] if on_gpu else []
            with profile_threads(ProfilerActivity.CPU, *gpu) as profiled:
                turn(training, batches)
            profiled.export_chrome_trace(str(job.trace))
        pages_in = {} if training.store is None else training.store.stats().pages_in
    facts = machine()
    return Measured(
        device=facts["gpu"] if on_gpu else facts["cpu"],
        parameters=parameters,
        model_s=statistics.median(each.model_s for each in turns),
        step_s=statistics.median(each.step_s for each in turns),
        issued_s=statistics.median(each.issued_s for each in turns),
        first_step_s=first.step_s,
        tokens_per_s=batches.numel() / statistics.median(t.model_s + t.step_s for t in turns),
        gpu_gib=gpu_gib,
        host_gib=peak_anonymous_bytes() / GIB,
        taken_gib=(available[0] - min(available)) / GIB,
        losses=[each.loss for each in (first, *turns)],
        pages_in=dict(pages_in),
    )


def work(job: Job, result: Connection) -> None:
    """Do one training in a process of its own, and send what was measured, or an error's text."""
    os.setsid()  # What a peer compiles with ends with it.
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # Deterministic products need it.
    try:
        result.send(train(job))
    except Exception as error:
        traceback.print_exc()
        first, *_ = [*str(error).splitlines(), ""]
        result.send(f"{type(error).__name__}: {first}")
