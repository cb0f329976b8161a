"""Reader of published checkpoints with stock PyTorch alone, in a separate process.

Run as ``python -m tests.support.stock_reader JOBS RESULTS``: JOBS is a JSON list of the arguments
of load(), RESULTS is written with torch.save(). Nothing here imports tierstore or muon, so that
what is read could be read on a machine that has neither.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.stateful import Stateful

from tests.support.adamw import AdamW

VOCABULARY = 50
MUON_OPTIONS: dict[str, Any] = {"lr": 0.03, "momentum": 0.9, "weight_decay": 0.05}
ADAMW_OPTIONS: dict[str, Any] = {"lr": 4e-3, "betas": (0.8, 0.95), "weight_decay": 0.1}

State = dict[str, Any]


class Layers(nn.Module):
    """A language model as FSDP2 takes it: sizes that two ranks share unevenly."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 17)
        self.hidden = nn.Linear(17, 23)
        self.second = nn.Linear(23, 17)
        self.norm = nn.LayerNorm(17)
        self.register_buffer("mean", torch.randn(3))
        self.head = nn.Linear(17, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """(batch,) -> (batch, VOCABULARY)"""
        hidden = self.second(torch.relu(self.hidden(self.embedding(tokens)) + self.mean[0]))
        logits: torch.Tensor = self.head(self.norm(hidden))
        return logits


class Everything(nn.Module):
    """All kinds of entries that a state dict can have, and a submodule called as DDP's is."""

    def __init__(self, extra_state: Any = None) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 17)
        self.module = nn.Sequential(nn.Linear(17, 23), nn.BatchNorm1d(23))
        self.frozen = nn.Linear(23, 17)
        self.frozen.requires_grad_(False)
        self.head = nn.Linear(17, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight
        self.scale = nn.Parameter(torch.rand(()))
        self.nothing = nn.Parameter(torch.empty(0, 4))
        self.register_buffer("mean", torch.randn(3).to(torch.bfloat16))
        self.register_buffer("twin", self.mean)
        self.register_buffer("counts", torch.arange(4)[::2])
        self.register_buffer("cache", torch.randn(5), persistent=False)
        self.extra_state = extra_state

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """(batch,) -> (batch, VOCABULARY)"""
        hidden = self.frozen(torch.relu(self.module(self.embedding(tokens))))
        logits: torch.Tensor = self.head(hidden * self.scale) + self.nothing.sum()
        return logits

    def get_extra_state(self) -> Any:
        return self.extra_state

    def set_extra_state(self, state: Any) -> None:
        self.extra_state = state


MODELS = {"layers": Layers, "everything": Everything}


def make_model(kind: str, seed: int, dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(seed)
    model = MODELS[kind]().to(dtype)
    if isinstance(model, Everything):
        model.extra_state = torch.full((2,), float(seed))
    return model


def split_parameters(
    model: nn.Module,
) -> tuple[list[tuple[str, nn.Parameter]], list[tuple[str, nn.Parameter]]]:
    """Return the named parameters for Muon and those for AdamW."""
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    matrices = [
        (name, p)
        for name, p in trained
        if p.ndim == 2 and p.numel() and "embedding" not in name and "head" not in name
    ]
    names = {name for name, _ in matrices}
    return matrices, [(name, p) for name, p in trained if name not in names]


def only_tensors(named: Iterable[tuple[str, nn.Parameter]], named_too: bool) -> list[Any]:
    return list(named) if named_too else [parameter for _, parameter in named]


def make_optimizers(model: nn.Module, *, named: bool = False) -> list[torch.optim.Optimizer]:
    """Return stock Muon, and stock AdamW but for its step, over the parameters of a model."""
    matrices, others = split_parameters(model)
    return [
        torch.optim.Muon(only_tensors(matrices, named), **MUON_OPTIONS),
        AdamW(only_tensors(others, named), **ADAMW_OPTIONS),
    ]


def train_step(model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], step: int) -> None:
    """One step with a batch that depends on the number of the step alone."""
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(VOCABULARY, (32,), generator=generator)
    targets = torch.randint(VOCABULARY, (32,), generator=generator)
    loss = nn.functional.cross_entropy(model(tokens).float(), targets)
    loss.backward()
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()


def whole(value: Any) -> Any:
    """Copies of tensors, put together from all ranks."""
    if isinstance(value, dict):
        return {key: whole(item) for key, item in value.items()}
    if isinstance(value, torch.Tensor):
        value = value.full_tensor() if hasattr(value, "full_tensor") else value
        return value.detach().clone()
    return value


class Container(Stateful):
    """The optimizers as torchtitan hands them to DCP."""

    def __init__(
        self, model: nn.Module, optimizers: list[torch.optim.Optimizer], options: StateDictOptions
    ) -> None:
        self.model = model
        self.optimizers = optimizers
        self.options = options

    def state_dict(self) -> State:
        return get_optimizer_state_dict(self.model, self.optimizers, options=self.options)

    def load_state_dict(self, state_dict: State) -> None:
        set_optimizer_state_dict(self.model, self.optimizers, state_dict, options=self.options)


def shard(module: nn.Module) -> None:
    """Shard a model over all ranks with FSDP2."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    fully_shard(module, mesh=init_device_mesh("cpu", (torch.distributed.get_world_size(),)))


def save(path: str, model: str, *, steps: Sequence[int]) -> State:
    """Train a sharded model with stock optimizers, and save it as a stock program does."""
    module = make_model(model, seed=0)
    shard(module)
    optimizers = make_optimizers(module)
    for step in steps:
        train_step(module, optimizers, step)
    state = {
        "model": get_model_state_dict(module),
        "optimizer": get_optimizer_state_dict(module, optimizers),
    }
    dcp.save(state, checkpoint_id=path)
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    return {
        "model": whole(state["model"]),
        "optimizer": whole(get_optimizer_state_dict(module, optimizers, options=options)),
    }


def load(
    path: str,
    model: str,
    *,
    dtype: str = "float32",
    flat: bool = True,
    named: bool = False,
    prefix: bool = True,
    steps: Sequence[int] = (),
    sharded: bool = False,
) -> State:
    """Load a checkpoint into a model and stock optimizers that were made otherwise, go on.

    Args:
        path: the checkpoint.
        model: which of MODELS.
        dtype: of the model.
        flat: the form of the optimizer's state dict.
        named: whether the stock optimizers get named parameters.
        prefix: False for the layout of torchtitan, whose model keys stand at the top.
        steps: what to train after loading.
        sharded: whether FSDP2 shards the model over all ranks.
    """
    module = make_model(model, seed=99, dtype=getattr(torch, dtype))
    if sharded:
        shard(module)
    optimizers = make_optimizers(module, named=named)
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    container = Container(module, optimizers, options)
    model_state = get_model_state_dict(module)
    if prefix:
        state: State = {"model": model_state, "optimizer": container.state_dict()}
        dcp.load(state, checkpoint_id=path)
        set_model_state_dict(module, state["model"])
        container.load_state_dict(state["optimizer"])
    else:
        state = {**model_state, "optimizer": container}
        dcp.load(state, checkpoint_id=path)
        state.pop("optimizer")
        set_model_state_dict(module, state, options=StateDictOptions(strict=False))
    result = {
        "model": whole(module.state_dict()),
        "optimizer": whole(container.state_dict()),
        "after": {},
    }
    for step in steps:
        train_step(module, optimizers, step)
        result["after"][step] = whole(module.state_dict())
    return result


def convert(path: str, out: str) -> State:
    """Make one file of a checkpoint and return what torch.load() finds in it."""
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    dcp_to_torch_save(path, out)
    # The dtypes and shapes of plain tensors, and plain values.
    loaded: State = torch.load(out, weights_only=True)
    return loaded


JOBS = {"load": load, "save": save, "convert": convert}


def main(jobs_path: str, results_path: str) -> None:
    torch.set_num_threads(1)
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    if "RANK" in os.environ:
        torch.distributed.init_process_group(
            "gloo",
            init_method=f"file://{results_path}.rendezvous",
            rank=int(os.environ["RANK"]),
            world_size=world_size,
        )
    results = {}
    for name, job, options in json.loads(Path(jobs_path).read_text()):
        try:
            results[name] = JOBS[job](**options)
        except Exception as error:
            if "RANK" in os.environ:
                raise
            results[name] = error
    imported = {name.partition(".")[0] for name in sys.modules}
    results["strangers"] = sorted(imported & {"tierstore", "muon"})
    if os.environ.get("RANK", "0") == "0":
        torch.save(results, results_path)
    if "RANK" in os.environ:
        torch.distributed.destroy_process_group()
        # Threads of gloo go on, and one that lets go of a tensor while the interpreter ends
        # aborts the process: pytorch/pytorch#179291.
        os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
