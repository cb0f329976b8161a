"""One model, trained step by step by tierstore or by DeepSpeed, each in its own process.

Both get the same parameters, tokens, rule and hyperparameters. Separate processes have separate
counters of memory and bytes, and wait idle for their turn.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import socket
import sys
import tempfile
import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from measuring import cpu_seconds, peak_anonymous_bytes
from torch import nn
from torch.nn import functional
from typing_extensions import override

import muon
import tierstore

LR = 1e-3
WEIGHT_DECAY = 0.01
WARMUP_STEPS = 2
"""Steps that create state and in which DeepSpeed compiles."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Parameters of one run of the benchmark."""

    width: int
    layers: int
    vocabulary: int
    tokens: int
    tuning_steps: int
    """Steps per trial of DeepSpeed's settings."""
    pairs: int
    page_bytes: str
    """Page size of tierstore, which has four buffers and no resident pages."""
    group_elements: int
    """Smallest size of a DeepSpeed subgroup that is tried."""
    block_bytes: int
    """Largest block size of DeepSpeed that is tried. DeepSpeed pages at least one block."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Settings of DeepSpeed. Other settings, such as page-locked memory, have their defaults."""

    group_elements: int
    """Minimum of parameters that are paged and stepped together (``sub_group_size``)."""
    buffer_count: int
    pipelined: bool
    """``pipeline_read`` and ``pipeline_write``."""
    block_bytes: int
    queue_depth: int
    ns_method: str = "gram"
    """Newton-Schulz of DeepSpeed: "gram", the default, or "standard"."""


class Model(nn.Module):
    """A GPT whose embedding and head have names that both libraries route to AdamW."""

    def __init__(self, plan: Plan) -> None:
        super().__init__()
        self.embed = nn.Embedding(plan.vocabulary, plan.width)
        self.blocks = nn.ModuleList(Block(plan.width) for _ in range(plan.layers))
        self.lm_head = nn.Linear(plan.width, plan.vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the loss of predicting each token, of shape (1, tokens), from those before."""
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        logits = self.lm_head(x).float()
        return functional.cross_entropy(logits[0, :-1], tokens[0, 1:])


class Block(nn.Module):
    """Attention and an MLP."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the output, of the shape (1, tokens, width) of ``x``."""
        heads = self.qkv(self.norms[0](x)).unflatten(-1, (3, -1, 64))  # (1, tokens, 3, heads, 64)
        q, k, v = heads.permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        result: torch.Tensor = x + self.down(functional.gelu(self.up(self.norms[1](x))))
        return result


class Contender(ABC):
    """One way to train the model, in its own process.

    Args:
        plan: shape of the model.
        rule: "muon", with AdamW for all but hidden matrices, or "adamw" for all parameters.
        directory: folder of its files.
    """

    def __init__(self, plan: Plan, rule: str, directory: Path) -> None:
        torch.manual_seed(0)
        self.model = Model(plan)
        self.tokens = torch.randint(plan.vocabulary, (1, plan.tokens))
        self.rule = rule
        self.directory = directory

    @abstractmethod
    def forward_backward(self) -> float:
        """Compute gradients and return the loss."""

    @abstractmethod
    def step(self) -> None:
        """Step the optimizer until the parameters are updated."""

    @abstractmethod
    def synchronize(self) -> None:
        """Wait until the step has ended completely."""

    @abstractmethod
    def facts(self) -> dict[str, Any]:
        """Return facts for the report."""


class Ours(Contender):
    """tierstore, with a commit of each step and checksums on reading.

    Args:
        plan: see Contender.
        rule: see Contender.
        directory: see Contender.
        options: more arguments of Muon; None for none.
    """

    def __init__(
        self, plan: Plan, rule: str, directory: Path, options: Mapping[str, Any] | None = None
    ) -> None:
        super().__init__(plan, rule, directory)
        self.model.to(torch.bfloat16)
        self.store = tierstore.TierStore(
            directory / "run", host_memory="1GiB", page_bytes=plan.page_bytes, buffers=4
        )
        groups: list[dict[str, Any]] = muon.param_groups(
            self.model,
            lr=LR,
            adamw_lr=LR,
            weight_decay=WEIGHT_DECAY,
            adamw_weight_decay=WEIGHT_DECAY,
        )
        if rule == "adamw":
            named = list(self.model.named_parameters())
            groups = [{"params": named, "algorithm": "adamw", "weight_decay": WEIGHT_DECAY}]
        self.optimizer = muon.Muon(
            groups,
            lr=LR,
            store=self.store,
            ns_dtype="auto",
            **(options or {}),
        )

    @override
    def forward_backward(self) -> float:
        loss = self.model(self.tokens)
        loss.backward()
        return float(loss.detach())

    @override
    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    @override
    def synchronize(self) -> None:
        # commit() would overlap the next step; here it is waited for.
        self.store.commit()
        self.store.synchronize()

    @override
    def facts(self) -> dict[str, Any]:
        return {
            "engine": self.store.stats().engine,
            "ns_dtype": str(self.optimizer.param_groups[0].get("ns_dtype")),
        }


class DeepSpeed(Contender):
    """DeepSpeed's engine as the only process, which keeps all shards."""

    def __init__(self, plan: Plan, rule: str, directory: Path, settings: Settings) -> None:
        super().__init__(plan, rule, directory)
        # DeepSpeed's builds need ninja, which pip installs beside the interpreter.
        os.environ["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        import deepspeed

        deepspeed.init_distributed("gloo")
        self.engine = deepspeed.initialize(
            model=self.model,
            config=self._config(settings),
            model_parameters=list(self.model.parameters()),
        )[0]

    def _config(self, settings: Settings) -> dict[str, Any]:
        # DeepSpeed's Muon and AdamW have different defaults.
        optimizer: dict[str, Any] = {"betas": (0.9, 0.999), "eps": 1e-8}
        optimizer |= {"lr": LR, "weight_decay": WEIGHT_DECAY}
        if self.rule == "muon":
            optimizer |= {"momentum": 0.95, "ns_method": settings.ns_method}
        return {
            "train_batch_size": 1,
            "train_micro_batch_size_per_gpu": 1,
            "steps_per_print": 10**9,
            "bf16": {"enabled": True},
            # DeepSpeed's default of 1 would clip the update of Muon, not the gradient.
            "gradient_clipping": 0.0,
            "optimizer": {
                "type": "Muon" if self.rule == "muon" else "AdamW",
                "params": optimizer,
            },
            "zero_optimization": {
                "stage": 3,
                # DeepSpeed refuses to scatter gradients that Muon needs whole.
                "reduce_scatter": self.rule != "muon",
                "sub_group_size": settings.group_elements,
                "offload_optimizer": {
                    "device": "nvme",
                    "nvme_path": str(self.directory),
                    "buffer_count": settings.buffer_count,
                    "pipeline_read": settings.pipelined,
                    "pipeline_write": settings.pipelined,
                },
            },
            "aio": {
                "block_size": settings.block_bytes,
                "queue_depth": settings.queue_depth,
                "intra_op_parallelism": 1,
                "single_submit": False,
                "overlap_events": True,
            },
        }

    @override
    def forward_backward(self) -> float:
        # Large gradients are written to disk during the backward.
        loss = self.engine(self.tokens)
        self.engine.backward(loss)
        return float(loss.detach())

    @override
    def step(self) -> None:
        # It returns when the state is written but not durable.
        self.engine.step()

    @override
    def synchronize(self) -> None:
        pass  # step() has written everything.

    @override
    def facts(self) -> dict[str, Any]:
        return {"deepspeed": version("deepspeed")}


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """Cost of one training step."""

    loss: float
    forward_backward_s: float
    step_s: float
    synchronize_s: float
    cpu_s: float
    read_bytes: int
    written_bytes: int

    @property
    def optimizer_s(self) -> float:
        """Seconds of the optimizer until all its writes have ended."""
        return self.step_s + self.synchronize_s

    @property
    def whole_s(self) -> float:
        """Seconds of the whole training step."""
        return self.forward_backward_s + self.optimizer_s


def io_bytes() -> tuple[int, int]:
    """Return the bytes that this process read from and wrote to disks."""
    lines = Path("/proc/self/io").read_text().splitlines()
    counters = dict(line.split(": ") for line in lines)
    return int(counters["read_bytes"]), int(counters["write_bytes"])


def one_step(contender: Contender) -> Step:
    """Do one training step of a contender."""
    began_bytes, began_cpu_s, began_s = io_bytes(), cpu_seconds(), time.perf_counter()
    loss = contender.forward_backward()
    computed_s = time.perf_counter()
    contender.step()
    stepped_s = time.perf_counter()
    contender.synchronize()
    ended_s = time.perf_counter()
    read_bytes, written_bytes = io_bytes()
    return Step(
        loss=loss,
        forward_backward_s=computed_s - began_s,
        step_s=stepped_s - computed_s,
        synchronize_s=ended_s - stepped_s,
        cpu_s=cpu_seconds() - began_cpu_s,
        read_bytes=read_bytes - began_bytes[0],
        written_bytes=written_bytes - began_bytes[1],
    )


def work(connection: Connection, log: Path, kind: type[Contender], arguments: Any) -> None:
    """Serve a contender: a step for the message "step", its facts for "facts"."""
    with log.open("w") as file:  # DeepSpeed prints.
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    try:
        contender = kind(*arguments)
        for _ in range(WARMUP_STEPS):
            one_step(contender)
        start_bytes = peak_anonymous_bytes()
        Path("/proc/self/clear_refs").write_text("5")  # Resets the peak.
        connection.send("ready")
        while (message := connection.recv()) != "stop":
            if message == "step":
                connection.send(one_step(contender))
            else:
                facts = {"peak_bytes": peak_anonymous_bytes(), "start_peak_bytes": start_bytes}
                connection.send(facts | contender.facts())
    except Exception:
        connection.send(RuntimeError(traceback.format_exc()))


class Worker:
    """Context manager of a contender's process.

    Raises:
        RuntimeError: the contender raised or died; the message is its traceback.
    """

    def __init__(self, directory: Path, kind: type[Contender], *arguments: Any) -> None:
        folder = Path(tempfile.mkdtemp(dir=directory))
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(
            target=work,
            args=(theirs, folder / "log", kind, (*arguments[:2], folder, *arguments[2:])),
        )
        self._process.start()
        theirs.close()

    def receive(self) -> Any:
        """Return the next answer."""
        try:
            answer = self._connection.recv()
        except EOFError:
            self._process.join()
            answer = RuntimeError(f"the process ended with {self._process.exitcode}")
        if isinstance(answer, RuntimeError):
            raise answer
        return answer

    def ask(self, message: str) -> Any:
        """Return the answer to a message."""
        self._connection.send(message)
        return self.receive()

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *error: object) -> None:
        with contextlib.suppress(OSError):  # The process may have died.
            self._connection.send("stop")
        self._process.join(timeout=60)
        self._process.kill()  # Remaining threads do not keep it alive.
        self._process.join()
