"""Checkpoints as Megatron writes them, built after its published source.

Megatron itself needs CUDA. What it calls of torch.distributed.checkpoint is called here, with the
keys, shapes and values that its source has (docs/internals/foreign-formats.md).
"""

from __future__ import annotations

import argparse
import io
import json
import pickle
import re
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from typing_extensions import override

ITERATION = 12
LAYERS, EXPERTS, HIDDEN, FFN, VOCABULARY = 3, 4, 8, 6, 20
Place = Callable[[torch.Tensor], torch.Tensor]


def shapes(*, experts: bool) -> dict[str, tuple[int, ...]]:
    """Name -> shape of the parameters, as named_parameters() of the model has them."""
    found: dict[str, tuple[int, ...]] = {
        "embedding.word_embeddings.weight": (VOCABULARY, HIDDEN),
        "decoder.final_layernorm.weight": (HIDDEN,),
        "output_layer.weight": (VOCABULARY, HIDDEN),
    }
    for layer in range(LAYERS):
        prefix = f"decoder.layers.{layer}"
        found[f"{prefix}.self_attention.linear_qkv.weight"] = (3 * HIDDEN, HIDDEN)
        found[f"{prefix}.self_attention.linear_qkv.bias"] = (3 * HIDDEN,)
        found[f"{prefix}.self_attention.linear_qkv.layer_norm_weight"] = (HIDDEN,)
        if experts:
            found[f"{prefix}.mlp.router.weight"] = (EXPERTS, HIDDEN)
        for end in range(EXPERTS) if experts else [""]:
            part = "mlp.experts" if experts else "mlp"
            found[f"{prefix}.{part}.linear_fc1.weight{end}"] = (2 * FFN, HIDDEN)
            found[f"{prefix}.{part}.linear_fc2.weight{end}"] = (HIDDEN, FFN)
    return found


def is_decayed(name: str) -> bool:
    return not name.endswith((".bias", "norm_weight", "layernorm.weight"))


@dataclass
class Truth:
    """A model after some steps: what every conversion must find.

    Args:
        muon: whether matrices but the embeddings have Muon's momentum instead of AdamW's states.
        experts: whether layers have experts.
    """

    muon: bool = False
    experts: bool = False
    masters: dict[str, torch.Tensor] = field(default_factory=dict)
    states: dict[str, dict[str, torch.Tensor]] = field(default_factory=dict)
    buffers: dict[str, torch.Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(7)
        for name, shape in shapes(experts=self.experts).items():
            self.masters[name] = torch.randn(shape, generator=generator)
            names = ["momentum_buffer"] if self.is_muon(name) else ["exp_avg", "exp_avg_sq"]
            self.states[name] = {state: torch.rand(shape, generator=generator) for state in names}
        if self.experts:
            for layer in range(LAYERS):
                key = f"decoder.layers.{layer}.mlp.router.expert_bias"
                self.buffers[key] = torch.randn(EXPERTS, generator=generator)

    def is_muon(self, name: str) -> bool:
        is_embedding = "embedding" in name or "output_layer" in name
        return self.muon and is_decayed(name) and not is_embedding

    def group(self, name: str) -> dict[str, Any]:
        """The param group of a parameter, without its parameters."""
        decay = 0.1 if is_decayed(name) else 0.0
        common = {
            "lr": 3e-4,
            "weight_decay": decay,
            "wd_mult": 1.0 if decay else 0.0,
            "lr_mult": 1.0,
            "is_expert_parallel": ".mlp.experts." in name,
            "is_decoupled_lr": False,
            "max_lr": 1e-3,
            "min_lr": 1e-5,
        }
        if self.is_muon(name):
            return {**common, "momentum": 0.95}
        return {
            **common,
            "betas": (0.9, 0.95),
            "eps": 1e-8,
            "bias_correction": True,
            "step": ITERATION,
        }

    def groups(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        for name in self.masters:
            if self.group(name) not in found:
                found.append(self.group(name))
        return found

    def expected(self) -> dict[str, torch.Tensor]:
        """Key -> tensor of a DCP directory that holds all of it, with masters as weights."""
        found = {f"model.{name}": t for name, t in [*self.masters.items(), *self.buffers.items()]}
        for name, states in self.states.items():
            found |= {f"optimizer.state.{name}.{key}": t for key, t in states.items()}
            if "exp_avg" in states:
                found[f"optimizer.state.{name}.step"] = torch.tensor(float(ITERATION))
        return found


def stacked(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Stack experts, then layers, as keys of torch_dist have them."""
    for pattern, key in (
        (r"(.+\.mlp\.experts)\.(linear_fc[12]\.weight)(\d+)", r"{0}.experts.{1}"),
        (r"(.*decoder\.layers)\.(\d+)\.(.+)", r"{0}.{2}"),
    ):
        found: dict[str, list[torch.Tensor]] = defaultdict(list)
        for name, tensor in tensors.items():
            match = re.fullmatch(pattern, name)
            found[key.format(*match.groups()) if match else f"={name}"].append(tensor)
        tensors = {
            name.removeprefix("="): items[0] if name.startswith("=") else torch.stack(items)
            for name, items in found.items()
        }
    return tensors


class _Planner(DefaultSavePlanner):
    """Writes objects that are bytes already as they are."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False)

    @override
    def transform_object(self, write_item: Any, object: Any) -> Any:
        return object


def packed(value: Any) -> io.BytesIO:
    stream = io.BytesIO()
    torch.save([value], stream)
    stream.seek(0)
    return stream


def write_torch_dist(
    root: Path,
    truth: Truth,
    *,
    stack: bool = True,
    common_file: bool = False,
    chained: bool = False,
    sharding: str | None = "fully_reshardable",
    master: str = "param",
    halves: bool = False,
    place: Place = lambda tensor: tensor,
    more: dict[str, Any] | None = None,
) -> Path:
    """Write an iteration with --ckpt-format torch_dist; return its directory.

    Args:
        root: the directory that was given to --save.
        truth: the model.
        stack: whether layers are stacked, as where all of them are equal.
        common_file: whether values that are not tensors are in common.pt, as before 2026.
        chained: whether keys have the number of the optimizer in a chain.
        sharding: the type of the distributed optimizer; None without one.
        master: the name of masters.
        halves: whether the halves of SwiGLU are apart; not with ``stack``.
        place: makes a DTensor of a tensor.
        more: further keys.
    """
    folder = root / f"iter_{ITERATION:07d}"
    folder.mkdir(parents=True, exist_ok=True)
    names = stacked if stack else lambda tensors: tensors
    weights = {name: tensor.bfloat16() for name, tensor in truth.masters.items()}
    tensors = names({**weights, **truth.buffers})
    kinds = sorted({truth.is_muon(name) for name in truth.masters}, reverse=True)
    optimizers: list[dict[str, Any]] = []
    for number, is_muon in enumerate(kinds):
        members = [name for name in truth.masters if truth.is_muon(name) == is_muon]
        states: dict[str, dict[str, torch.Tensor]] = defaultdict(dict)
        for name in members:
            states[master][name] = truth.masters[name]
            for key, tensor in truth.states[name].items():
                states[key][name] = tensor
        prefix = f"chained_{number}." if chained else ""
        for key, found in states.items():
            tensors |= {f"{prefix}optimizer.state.{key}.{n}": t for n, t in names(found).items()}
        groups = [group for group in truth.groups() if ("momentum" in group) == is_muon]
        optimizer: dict[str, Any] = {"optimizer": {"param_groups": groups}}
        if sharding is not None:
            optimizer["param_state_sharding_type"] = sharding
        else:
            # Other optimizers have the step of all parameters beside the groups.
            groups = [{k: v for k, v in g.items() if k != "step"} for g in groups]
            state = {} if is_muon else {"common_step": torch.tensor(float(ITERATION))}
            optimizer = {"optimizer": {"param_groups": groups, "state": state}}
        optimizers.append(optimizer)
    if halves:
        for key in [key for key in tensors if key.endswith("linear_fc1.weight")]:
            tensors[f"{key}_w"], tensors[f"{key}_v"] = tensors.pop(key).chunk(2)
    common = {
        "args": argparse.Namespace(hidden_size=HIDDEN, iteration=ITERATION),
        "checkpoint_version": 3.0,
        "iteration": ITERATION,
        "optimizer": dict(enumerate(optimizers)) if len(optimizers) > 1 else optimizers[0],
        "opt_param_scheduler": {"num_steps": 64},
        "content_metadata": {"distrib_optim_sharding_type": sharding},
    }
    state: dict[str, Any] = {key: place(tensor.clone()) for key, tensor in tensors.items()}
    state["decoder.layers.self_attention.linear_qkv._extra_state/shard_0_3"] = packed(b"")
    state["rng_state/shard_0.0_1.1"] = packed({"random_rng_state": (3, (1, 2))})
    if common_file:
        torch.save(common, folder / "common.pt")
    else:
        state["common_state/shard_0_1"] = packed(common)
    dcp.save({**state, **(more or {})}, checkpoint_id=folder, planner=_Planner())
    if common_file:  # Versions of that time wrote the shapes of flattened tensors here.
        metadata = pickle.loads((folder / ".metadata").read_bytes())
        metadata.mcore_data = {key: {} for key in tensors}
        (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    config = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
    (folder / "metadata.json").write_text(
        json.dumps({**config, "common_backend": "torch", "common_backend_version": 1})
    )
    (root / "latest_checkpointed_iteration.txt").write_text(f"{ITERATION}")
    return folder


def write_fsdp_dtensor(
    root: Path,
    truth: Truth,
    *,
    swiglu: bool = True,
    place: Place = lambda tensor: tensor,
    more: dict[str, Any] | None = None,
) -> Path:
    """Write an iteration with --ckpt-format fsdp_dtensor; return its directory.

    Args:
        root: the directory that was given to --save.
        truth: the model, with masters as weights.
        swiglu: whether the halves of SwiGLU are apart.
        place: makes a DTensor of a tensor.
        more: further keys of the optimizer.
    """
    folder = root / f"iter_{ITERATION:07d}"
    wrapped = "module.module.module"
    model: dict[str, Any] = {}
    states: dict[str, Any] = {}
    meta: dict[str, Any] = {}
    for name, tensor in {**truth.masters, **truth.buffers}.items():
        whole = {"": tensor}
        moments = {"": truth.states.get(name, {})}
        if swiglu and ".linear_fc1.weight" in name:
            whole = dict(zip(("_w", "_v"), tensor.chunk(2), strict=True))
            moments = {
                end: {key: t.chunk(2)[number] for key, t in truth.states[name].items()}
                for number, end in enumerate(("_w", "_v"))
            }
        for end, part in whole.items():
            model[f"module.{name}{end}"] = place(part.clone())
            if name in truth.states:
                states[f"{wrapped}.{name}{end}"] = {
                    key: place(t.clone()) for key, t in moments[end].items()
                }
                meta[f"{wrapped}.{name}{end}"] = truth.group(name)
    state = {
        "model": model,
        "optimizer": {"state": states, "param_to_group_meta": meta, **(more or {})},
        "iteration": ITERATION,
        "checkpoint_version": 3.0,
        "args": argparse.Namespace(hidden_size=HIDDEN),
        "opt_param_scheduler": {"num_steps": 64},
    }
    dcp.save(state, checkpoint_id=folder)
    (root / "latest_checkpointed_iteration.txt").write_text(f"{ITERATION}")
    return folder
