"""Trainer and accelerate train a small model, save a checkpoint, and say what it holds.

A process of each rank runs all cases of its number of ranks:

    python huggingface_writer.py CASES RANK RANKS PORT

``CASES`` is a JSON file, a list of dicts with the fields of ``Case``. Each case writes below its
``directory``: ``checkpoint/`` (by Trainer or accelerate), ``names.pt`` (the parameters in the order
of the model, on the device "meta"), ``truth.npz`` (masters and states, ``<parameter>|<state>``),
``gradients.npz`` (the gradients of one further step), and ``next.npz`` (the masters after it).
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import nn

STEPS = 3
OPTIONS = {"lr": 0.01, "betas": (0.8, 0.95)}


@dataclass(kw_only=True)
class Case:
    """One checkpoint to write."""

    directory: str
    kind: str
    """"trainer", "accelerate" or "fsdp"."""
    model: str = ""
    """Of Trainer: "llama" or "gpt2"."""
    shard_size: str = ""
    """Of Trainer: write the weights again, in several files with an index."""
    layers: int = 2
    safe: bool = True
    """Of accelerate: ``safe_serialization``."""
    models: int = 1
    """Of accelerate: the number of models, each with its optimizer; the second has Muon."""
    state_dict_type: str = "FULL_STATE_DICT"
    use_dcp: bool = True


class Net(nn.Module):
    """A model with two matrices of one shape, whose names sort unlike the order in the model."""

    def __init__(self, prefix: str = "", width: int = 7) -> None:
        super().__init__()
        self.prefix = prefix
        for name in ("up", "down", "again"):
            sizes = (width, 6) if name == "down" else (6, width)
            self.add_module(f"{prefix}{name}", nn.Linear(*sizes, bias=name == "down"))
        self.add_module(f"{prefix}norm", nn.LayerNorm(width))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the mean square of the output for rows of 6."""
        modules = dict(self.named_children())
        for name in ("up", "down", "again", "norm"):
            rows = modules[f"{self.prefix}{name}"](rows)
        return ((rows - 1) ** 3).abs().mean()


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy of a tensor, gathered from all ranks."""
    full = getattr(tensor, "full_tensor", None)
    return (tensor if full is None else full()).detach().clone()


def save(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Write tensors to a file of numpy, on the first rank."""
    if int(os.environ.get("RANK", "0")) == 0:
        path.parent.mkdir(parents=True, exist_ok=True)
        numpy.savez_compressed(path, **{key: value.numpy() for key, value in tensors.items()})


class Recorder:
    """Writes what a case says beside its checkpoint."""

    def __init__(self, directory: str, models: Sequence[nn.Module]) -> None:
        self.folder = Path(directory)
        self.named = {name: p for model in models for name, p in model.named_parameters()}

    def names(self) -> None:
        """Write the order of the parameters, as the documentation tells users to."""
        shapes = {name: p.to("meta") for name, p in self.named.items() if p.requires_grad}
        torch.save(shapes, self.folder / "names.pt")

    def states(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Write masters and states."""
        states = {p: state for one in optimizers for p, state in one.state.items()}
        found = {}
        for name, parameter in self.named.items():
            found[f"{name}|master"] = whole(parameter)
            for key, value in states[parameter].items():
                if value.ndim:
                    found[f"{name}|{key}"] = whole(value)
        save(self.folder / "truth.npz", found)

    def gradients(self) -> None:
        """Write the gradients of all parameters."""
        found = {name: whole(p.grad) for name, p in self.named.items() if p.grad is not None}
        save(self.folder / "gradients.npz", found)

    def masters(self) -> None:
        """Write the masters after a further step."""
        save(self.folder / "next.npz", {name: whole(p) for name, p in self.named.items()})


def run_trainer(case: Case) -> None:
    """Have Trainer train and save."""
    import transformers as hf

    sizes = {"vocab_size": 16, "bos_token_id": 0, "eos_token_id": 1}
    if case.model == "llama":
        config: Any = hf.LlamaConfig(
            hidden_size=8,
            intermediate_size=12,
            num_hidden_layers=case.layers,
            num_attention_heads=2,
            num_key_value_heads=1,
            **sizes,
        )
        model: Any = hf.LlamaForCausalLM(config)
    else:
        config = hf.GPT2Config(n_embd=4, n_layer=case.layers, n_head=2, n_positions=8, **sizes)
        model = hf.GPT2LMHeadModel(config)
    recorder = Recorder(case.directory, [model])

    class Record(hf.TrainerCallback):  # type: ignore[misc]
        def on_save(self, args: Any, state: Any, control: Any, **now: Any) -> None:
            if state.global_step == STEPS:
                recorder.states([now["optimizer"]])

        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **now: Any) -> None:
            if state.global_step == STEPS:
                recorder.gradients()

        def on_optimizer_step(self, args: Any, state: Any, control: Any, **now: Any) -> None:
            if state.global_step == STEPS:
                recorder.masters()

    arguments = hf.TrainingArguments(
        str(recorder.folder / "out"),
        max_steps=STEPS + 1,
        save_steps=STEPS,
        per_device_train_batch_size=2,
        weight_decay=0.1,
        learning_rate=0.01,
        lr_scheduler_type="constant",
        adam_beta1=0.8,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    data = [{"input_ids": row, "labels": row} for row in torch.randint(0, 16, (16, 8))]
    trainer = hf.Trainer(model, arguments, train_dataset=data, callbacks=[Record()])
    trainer.train()
    recorder.names()
    saved = recorder.folder / "out" / f"checkpoint-{STEPS}"
    if case.shard_size:
        again = hf.AutoModelForCausalLM.from_pretrained(saved)
        (saved / "model.safetensors").unlink()
        again.save_pretrained(saved, max_shard_size=case.shard_size)
    saved.rename(recorder.folder / "checkpoint")
    shutil.rmtree(recorder.folder / "out")


def optimizers_of(models: Sequence[nn.Module]) -> list[torch.optim.Optimizer]:
    """Return an optimizer of each model: AdamW with two groups, then Muon."""
    decayed = [p for p in models[0].parameters() if p.ndim > 1]
    others = [p for p in models[0].parameters() if p.ndim < 2]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    found: list[torch.optim.Optimizer] = [torch.optim.AdamW(groups, **OPTIONS)]
    if len(models) > 1:
        matrices = [p for p in models[1].parameters() if p.ndim > 1]
        found.append(torch.optim.Muon(matrices, lr=0.01, weight_decay=0.1))
    return found


def train(models: Sequence[nn.Module], optimizers: Sequence[Any], *, step: bool = True) -> None:
    """Compute gradients, and step."""
    for optimizer in optimizers:
        optimizer.zero_grad()
    for model in models:
        model(torch.randn(4, 6)).backward()
    for optimizer in optimizers if step else ():
        optimizer.step()


def run_accelerate(case: Case) -> None:
    """Have accelerate save the state."""
    from accelerate import Accelerator

    class Counter:
        seen = 7

        def state_dict(self) -> dict[str, int]:
            return {"seen": self.seen}

        def load_state_dict(self, state: dict[str, int]) -> None:
            self.seen = state["seen"]

    models: list[Any] = [Net(), Net("other_", 5)][: case.models]
    for parameter in list(models[-1].parameters()) if case.models > 1 else ():
        parameter.requires_grad_(parameter.ndim > 1)
    optimizers = optimizers_of(models)
    accelerator = Accelerator(cpu=True)
    recorder = Recorder(case.directory, models)
    recorder.named = {name: p for name, p in recorder.named.items() if p.requires_grad}
    prepared = accelerator.prepare(*models, *optimizers)
    models, optimizers = prepared[: case.models], prepared[case.models :]
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizers[0], factor=1.0)
    accelerator.register_for_checkpointing(Counter(), accelerator.prepare(scheduler))
    for _ in range(STEPS):
        train(models, optimizers)
    accelerator.save_state(str(recorder.folder / "checkpoint"), safe_serialization=case.safe)
    recorder.names()
    recorder.states(optimizers)
    train(models, optimizers, step=False)
    recorder.gradients()
    for optimizer in optimizers:
        optimizer.step()
    recorder.masters()


def run_fsdp(case: Case) -> None:
    """Have accelerate's functions for FSDP2 save a model and its optimizer."""
    from accelerate import Accelerator, FullyShardedDataParallelPlugin
    from accelerate.utils import save_fsdp_model, save_fsdp_optimizer
    from torch.distributed.fsdp import fully_shard

    # On a CPU, Accelerator.prepare() does not use FSDP; the functions that save do.
    accelerator = Accelerator(cpu=True)
    model = fully_shard(Net())
    optimizers = optimizers_of([model])
    recorder = Recorder(case.directory, [model])
    for _ in range(STEPS):
        train([model], optimizers)
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, state_dict_type=case.state_dict_type)
    where = (str(recorder.folder / "checkpoint"),)
    save_fsdp_model(plugin, accelerator, model, *where, use_dcp=case.use_dcp)
    save_fsdp_optimizer(plugin, accelerator, optimizers[0], model, *where, use_dcp=case.use_dcp)
    recorder.states(optimizers)
    train([model], optimizers, step=False)
    recorder.gradients()
    optimizers[0].step()
    recorder.masters()


def main() -> None:
    """Run all cases on one rank."""
    path, rank, ranks, port = sys.argv[1:]
    torch.set_num_threads(1)
    if int(ranks) > 1:
        os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    for fields in json.loads(Path(path).read_text()):
        case = Case(**fields)
        print(f"case {case.directory}", flush=True)
        torch.manual_seed(0)
        {"trainer": run_trainer, "accelerate": run_accelerate, "fsdp": run_fsdp}[case.kind](case)


if __name__ == "__main__":
    main()
