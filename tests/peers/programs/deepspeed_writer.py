"""DeepSpeed trains a toy model, saves a checkpoint, and says what it holds.

A process of each rank runs all cases of its number of ranks:

    python deepspeed_writer.py CASES RANK RANKS PORT

``CASES`` is a JSON file, a list of dicts with the fields of ``Case``. Each case writes below its
``directory``: ``checkpoint/`` (by DeepSpeed), ``truth.npz`` (all states, whole, as the
live engine gathers them, ``<parameter>|<state>``), ``gradients.npz`` (the gradients of one
further step), ``next.npz`` (the masters after that step), and ``facts.json``. A case that loads a
universal checkpoint writes ``truth.npz``, ``next.npz`` and ``facts.json``.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import nn

STEPS = 3


@dataclass(kw_only=True)
class Case:
    """One checkpoint to write."""

    directory: str
    stage: int
    optimizer: str
    """"muon" or "adamw", of DeepSpeed's configuration, or "torch": torch.optim.AdamW."""
    offload: str = "none"
    """Of the optimizer: "none", "cpu" or "nvme"."""
    dtype: str = "bf16"
    zero: dict[str, Any] = field(default_factory=dict)
    """Further settings of ``zero_optimization``."""
    config: dict[str, Any] = field(default_factory=dict)
    """Further settings of the configuration."""
    big: bool = False
    """True if the model has matrices that DeepSpeed pages: about 1 MiB on each rank."""
    one_group: bool = False
    """True if AdamW has one param group instead of two."""
    own_adam: bool = False
    """True if "adamw" is DeepSpeed's own, whose extension takes minutes to build."""
    lr: float = 0.003
    """Learning rate of AdamW."""
    universal: str = ""
    """A universal checkpoint to load, instead of training and saving."""


class Layer(nn.Module):
    """Parameters whose gradients are the tensors that the loss is called with."""

    def __init__(self, **shapes: tuple[int, ...]) -> None:
        super().__init__()
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.randn(shape)))

    def forward(self, gradients: dict[str, torch.Tensor]) -> torch.Tensor:
        """Return a loss whose gradient by each parameter is the tensor of its name."""
        own = dict(self.named_parameters(recurse=False))
        trained = [name for name in gradients if name in own]
        return sum((own[name].float() * gradients[name]).sum() for name in trained)


class Model(nn.Module):
    """Names and shapes of a small transformer; sizes are odd, so that padding is needed."""

    def __init__(self, big: bool) -> None:
        super().__init__()
        self.embedding = Layer(weight=(11, 6))
        self.blocks = nn.ModuleList(
            nn.ModuleDict(
                {
                    "attention": Layer(weight=(6, 15), bias=(15,)),
                    "mlp": Layer(weight=(13, 6)),
                    "norm": Layer(weight=(7,), bias=(7,)),
                }
            )
            for _ in range(2)
        )
        if big:
            self.wide = Layer(weight=(24, 24064))
            self.tall = Layer(weight=(24064, 24))
        self.lm_head = Layer(weight=(11, 6))
        self.frozen = Layer(weight=(5, 3))
        self.frozen.weight.requires_grad_(False)
        self.register_buffer("positions", torch.arange(9, dtype=torch.float32))

    def forward(self, gradients: dict[str, torch.Tensor]) -> torch.Tensor:
        """Return a loss with these gradients."""
        loss = torch.zeros(())
        for prefix, layer in self.named_modules():
            if isinstance(layer, Layer) and prefix != "frozen":
                start = len(prefix) + 1
                own = {key[start:]: g for key, g in gradients.items() if key.startswith(prefix)}
                loss = loss + layer(own)
        return loss


def gradients_of(step: int, shapes: dict[str, tuple[int, ...]]) -> dict[str, torch.Tensor]:
    """Return gradients that are exact in bf16, the same on every rank."""
    generator = torch.Generator().manual_seed(1000 + step)
    return {
        name: torch.randn(shape, generator=generator).bfloat16().float()
        for name, shape in shapes.items()
    }


def is_muon(name: str, parameter: torch.Tensor) -> bool:
    """Return whether DeepSpeed gives a parameter to Muon: by its name and dimensions."""
    return parameter.ndim == 2 and not name.startswith(("embedding", "lm_head"))


def configuration(case: Case, ranks: int) -> dict[str, Any]:
    """Return DeepSpeed's configuration."""
    zero: dict[str, Any] = {"stage": case.stage, "reduce_scatter": case.optimizer != "muon"}
    if case.offload != "none":
        zero["offload_optimizer"] = {"device": case.offload, "pin_memory": False}
    if case.offload == "nvme":
        zero["offload_optimizer"] |= {"nvme_path": f"{case.directory}/nvme", "buffer_count": 8}
    config: dict[str, Any] = {
        "train_batch_size": ranks,
        "train_micro_batch_size_per_gpu": 1,
        "steps_per_print": 10**9,
        "gradient_clipping": 0.0,
        "zero_optimization": zero | case.zero,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    if case.dtype != "fp32":
        config[case.dtype] = {"enabled": True}
    if case.optimizer == "muon":
        parameters: dict[str, Any] = {"muon_lr": 0.02, "adam_lr": case.lr, "momentum": 0.9}
        parameters |= {"weight_decay": 0.1, "betas": (0.8, 0.95), "eps": 1e-8}
        config["optimizer"] = {"type": "Muon", "params": parameters}
    elif case.optimizer == "adamw":
        parameters = {"lr": case.lr, "betas": (0.8, 0.95), "eps": 1e-8}
        config["optimizer"] = {"type": "AdamW", "params": parameters}
    if case.optimizer != "torch":
        config["optimizer"]["params"]["torch_adam"] = not case.own_adam
    if case.universal:
        config["checkpoint"] = {"load_universal": True}
    return config | case.config


def groups_of(model: nn.Module, one_group: bool) -> list[dict[str, Any]]:
    """Return two param groups, with and without weight decay, or one with it."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if one_group:
        return [{"params": trained, "weight_decay": 0.1}]
    return [
        {"params": [p for p in trained if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in trained if p.ndim == 1], "weight_decay": 0.0},
    ]


def states_of(parameter: Any, names: tuple[str, ...]) -> dict[str, torch.Tensor]:
    """Return the whole states of a parameter, gathered by DeepSpeed's functions."""
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    states = {"master": safe_get_full_fp32_param(parameter)}
    states |= {name: safe_get_full_optimizer_state(parameter, name) for name in names}
    return {name: value.detach().float().cpu().clone() for name, value in states.items()}


def plain(value: Any) -> Any:
    """Return a value that JSON can hold."""
    if isinstance(value, torch.Tensor):
        return value.item()
    return list(value) if isinstance(value, tuple) else value


def flat_states(engine: Any, case: Case, names: dict[Any, str]) -> dict[str, torch.Tensor]:
    """Return the whole states of ZeRO-1 and -2, ``<parameter>|<state>``.

    DeepSpeed's own functions reach only some of them, and mistake parameters for each other with
    ``round_robin_gradients``.
    """
    optimizer, found = engine.optimizer, {}
    is_plain = not hasattr(optimizer, "round_robin_bit16_groups")  # BF16_Optimizer, of ZeRO-1.
    groups = optimizer.bf16_groups if is_plain else optimizer.round_robin_bit16_groups
    masters = optimizer.fp32_groups_flat_partition if is_plain else None
    masters = masters or optimizer.single_partition_of_fp32_groups
    for index, group in enumerate(optimizer.optimizer.param_groups):
        own = {"master": masters[index].detach(), **optimizer.optimizer.state[group["params"][0]]}
        flat = {key: value for key, value in own.items() if torch.is_tensor(value) and value.ndim}
        if group.get("use_muon") and case.offload == "none":
            # Each rank has the whole momentum of parameters that it has a part of.
            members, start = optimizer.params_in_partition[index], 0
            momentum = flat.pop("momentum_buffer")
            for parameter in members:
                piece = momentum[start : start + parameter.numel()].view(parameter.shape)
                found[f"{names[parameter]}|momentum_buffer"] = piece.float().clone()
                start += parameter.numel()
        parts: list[Any] = [None] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(parts, flat)
        for key in flat:
            whole = torch.cat([part[key].flatten() for part in parts]).float()
            starts = accumulate((parameter.numel() for parameter in groups[index]), initial=0)
            if not is_plain:
                starts = optimizer.round_robin_bit16_offsets[index]
            for parameter, start in zip(groups[index], starts, strict=False):
                piece = whole[start : start + parameter.numel()]
                found[f"{names[parameter]}|{key}"] = piece.view(parameter.shape).clone()
    ranks: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(ranks, found)
    return {key: value for rank in ranks for key, value in rank.items()}


def truth_of(engine: Any, case: Case, trained: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Return all states of all trained parameters, ``<parameter>|<state>``."""
    if case.stage < 3:
        return flat_states(engine, case, {parameter: name for name, parameter in trained.items()})
    truth = {}
    for name, parameter in trained.items():
        muon = case.optimizer == "muon" and is_muon(name, parameter_like(parameter))
        keys = ("momentum_buffer",) if muon else ("exp_avg", "exp_avg_sq")
        shape = tuple(parameter_like(parameter).shape)
        states = states_of(parameter, keys)
        truth |= {f"{name}|{state}": value.view(shape) for state, value in states.items()}
    return truth


def parameter_like(parameter: Any) -> torch.Tensor:
    """Return a tensor of the whole shape of a parameter."""
    return torch.empty(getattr(parameter, "ds_shape", parameter.shape), device="meta")


def masters_of(engine: Any, case: Case, trained: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Return the whole masters by name."""
    truth = truth_of(engine, case, trained)
    ends = "|master"
    return {key.removesuffix(ends): value for key, value in truth.items() if key.endswith(ends)}


def steps_of(engine: Any) -> list[dict[str, Any]]:
    """Return, for each flat group of this rank, its hyperparameters and its count of steps."""
    inner = engine.optimizer.optimizer
    return [
        {
            "hyperparameters": {k: plain(v) for k, v in group.items() if k != "params"},
            "steps": sorted({plain(s["step"]) for s in inner.state.values() if "step" in s}),
        }
        for group in inner.param_groups
    ]


def run(case: Case, rank: int, ranks: int) -> None:
    """Write one case, or load it as a universal checkpoint."""
    import deepspeed

    torch.manual_seed(1 if case.universal else 0)
    folder = Path(case.directory)
    folder.mkdir(parents=True, exist_ok=True)
    model = Model(case.big)
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters() if p.requires_grad}
    groups = groups_of(model, case.one_group)
    arguments: dict[str, Any] = {"model_parameters": groups}
    if case.optimizer == "muon":
        arguments = {"model_parameters": list(model.parameters())}
    if case.optimizer == "torch":
        options = {"lr": case.lr, "betas": (0.8, 0.95), "eps": 1e-8}
        arguments = {"optimizer": torch.optim.AdamW(groups, **options)}
    engine = deepspeed.initialize(model=model, config=configuration(case, ranks), **arguments)[0]
    trained = {n: p for n, p in engine.module.named_parameters() if n in shapes}

    def train(step: int) -> None:
        engine.backward(engine(gradients_of(step, shapes)))
        engine.step()

    def save(name: str, tensors: dict[str, torch.Tensor]) -> None:
        if rank == 0:
            numpy.savez_compressed(folder / name, **{k: v.numpy() for k, v in tensors.items()})

    if case.universal:
        path, client_state = engine.load_checkpoint(case.universal)
        if path is None:
            raise RuntimeError("DeepSpeed loaded nothing")
        save("truth.npz", truth_of(engine, case, trained))
        train(STEPS)
        save("next.npz", masters_of(engine, case, trained))
        facts = {"seen": client_state.get("seen"), "step": engine.global_steps}
        facts["frozen"] = engine.module.frozen.weight.tolist()
        if rank == 0:
            (folder / "facts.json").write_text(json.dumps(facts))
        engine.destroy()
        return
    for step in range(STEPS):
        train(step)
    engine.save_checkpoint(str(folder / "checkpoint"), tag=f"step{STEPS}", client_state={"seen": 7})
    save("truth.npz", truth_of(engine, case, trained))
    facts = {"groups": steps_of(engine), "step": STEPS, "versions": deepspeed.__version__}
    if rank == 0:
        (folder / "facts.json").write_text(json.dumps(facts, indent=1, default=str))
    save("gradients.npz", gradients_of(STEPS, shapes))
    train(STEPS)
    save("next.npz", masters_of(engine, case, trained))
    engine.destroy()


def main() -> None:
    """Run all cases on one rank."""
    path, rank, ranks, port = sys.argv[1:]
    # DeepSpeed's builds need ninja, which pip installs beside the interpreter.
    os.environ["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    torch.set_num_threads(1)
    import deepspeed

    # Its build takes minutes; gloo does the same.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed("gloo")
    for fields in json.loads(Path(path).read_text()):
        case = Case(**fields)
        print(f"case {case.directory}", flush=True)
        run(case, int(rank), int(ranks))


if __name__ == "__main__":
    main()
