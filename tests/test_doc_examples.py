"""Every Python example of README and docs runs, with what it takes from the program around it.

Examples of the loops of other libraries run in tests/peers/test_doc_examples.py.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import textwrap
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import muon
import tierstore
from tests.test_docs import FENCE, PAGES, ROOT
from tierstore.tools.probe.probe import probe

Names = dict[str, Any]

TOKENS = torch.arange(16)
# Their blocks belong to a loop of another library.
OF_PEERS = {
    "docs/guide/accelerate.md": 1,
    "docs/guide/huggingface.md": 2,
    "docs/guide/lightning.md": 1,
    "docs/guide/torchtitan.md": 1,
}
DEEPSPEED = ("docs/guide/convert.md", 3)  # The block that starts DeepSpeed.
LORA = tuple(("docs/guide/everyday.md", number) for number in (5, 6))  # tests/peers/test_lora.py


def model_of() -> nn.Module:
    torch.manual_seed(0)
    layers = {"embed": nn.Embedding(256, 64), "hidden": nn.Linear(64, 64)}
    return nn.Sequential(OrderedDict(**layers, head=nn.Linear(64, 256)))


def loss_of(model: nn.Module) -> torch.Tensor:
    return nn.functional.cross_entropy(model(TOKENS), TOKENS)


def usual() -> Names:
    """The model, its groups, and the packages that any program imports."""
    model = model_of()
    groups = muon.param_groups(model, lr=0.02)
    packages = {"torch": torch, "muon": muon, "tierstore": tierstore}
    return {**packages, "model": model, "groups": groups, "warmup_then_cosine": lambda step: 1.0}


def with_optimizer(names: Names, **options: Any) -> Names:
    """The same, with an optimizer before its first step."""
    store = tierstore.TierStore("around")
    optimizer = muon.Muon(names["groups"], store=store, ns_dtype=torch.float32, **options)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    return {**names, "store": store, "optimizer": optimizer, "scheduler": scheduler}


def committed(names: Names) -> Names:
    """The same, and a run of two steps with what came of it."""
    with tierstore.TierStore("nvme/run1") as store:
        optimizer = muon.Muon(names["groups"], store=store, ns_dtype=torch.float32)
        for _ in range(2):
            loss_of(names["model"]).backward()
            optimizer.step()
        store.checkpoint("nvme/checkpoints/step-2", model=names["model"])
        torch.save(optimizer.state_dict(), "state.pt")
    return {**names, "file": "state.pt"}


def of_readme() -> Names:
    model = model_of()
    plain = model.forward
    model.forward = lambda batch: nn.functional.cross_entropy(plain(batch), batch)  # type: ignore[method-assign]
    return {
        "model": model,
        "warmup_then_cosine": lambda step: 1.0,
        "batches_from": lambda step: [TOKENS] * (2 - step),
    }


def of_getting_started() -> Names:
    names = with_optimizer(usual())
    return {**names, "loss": loss_of(names["model"]), "loader": {"batch": 0}}


def of_freezing() -> Names:
    names, model = usual(), nn.Sequential(OrderedDict(encoder=model_of(), head=nn.Linear(256, 8)))
    return {**names, "model": model, "store": tierstore.TierStore("around")}


class Layers(nn.Module):
    """Of each kind that docs/guide/muon.md names."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = nn.Module()
        self.mlp.experts = nn.Module()
        self.mlp.experts.gate_up_proj = nn.Parameter(torch.zeros(2, 3072, 64))
        self.mlp.experts.down_proj = nn.Parameter(torch.zeros(2, 64, 1536))
        self.attention = nn.Module()
        self.attention.qkv_proj = nn.Linear(64, 6144, bias=False)
        self.stem, self.conv = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3)
        layer = nn.Module()
        layer.self_attn = nn.Module()
        layer.self_attn.q_proj, layer.self_attn.k_proj = nn.Linear(64, 64), nn.Linear(64, 32)
        layer.self_attn.head_dim = 16
        self.model = nn.Module()
        self.model.layers = nn.ModuleList([layer])


def of_muon() -> Names:
    model = Layers()
    for parameter in model.parameters():
        nn.init.normal_(parameter)
        parameter.grad = torch.randn_like(parameter)
    groups = muon.param_groups(model, lr=0.02, is_muon=lambda name, p: p.ndim == 2)
    largest = torch.tensor([200.0, 5.0, 5.0, 5.0])
    store = tierstore.TierStore("around")
    names = {**usual(), "model": model, "groups": groups, "largest": largest, "store": store}
    clip = muon.QKClip.of(model)
    # Blocks replace it where they are about another one.
    return {**names, "optimizer": muon.Muon(groups, qk_clip=clip, ns_dtype=torch.float32)}


def of_fewer_bytes() -> Names:
    names = usual()
    names["model"].bfloat16()
    return {**names, "store": tierstore.TierStore("around")}


def of_routing() -> Names:
    return {**usual(), "store": tierstore.TierStore("around")}


def of_tiers() -> Names:
    names = with_optimizer(usual())
    loss_of(names["model"]).backward()
    names["optimizer"].step()
    return names


def of_checkpoints() -> Names:
    names = committed(usual())
    for key, algorithm in {"matrices": "muon", "others": "adamw"}.items():
        (group,) = [group for group in names["groups"] if group["algorithm"] == algorithm]
        names[key] = list(group["params"])
    names |= {"dcp": dcp, "fully_shard": lambda model: model}
    names = with_optimizer(names)
    loss_of(names["model"]).backward()
    names["optimizer"].step()
    names["optimizer"].zero_grad()  # Stock loading leaves out states beside gradients.
    return names


def of_convert() -> Names:
    from tierstore.tools.convert.convert import convert

    names = usual()  # DeepSpeed loads no momentum of Muon.
    names["groups"] = muon.param_groups(names["model"], is_muon=lambda name, parameter: False)
    committed(names)
    convert("nvme/run1", "nvme/run2", to="tierstore")
    convert("nvme/run1", "universal", to="universal")
    convert("nvme/run1", "weights", to="dcp", only="model")
    return {**names, "Path": Path, "DST": "universal"}


def of_everyday() -> Names:
    """The model of a notebook and its data."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 8))
    groups = muon.param_groups(model, lr=0.02)
    return {**usual(), "model": model, "groups": groups, "data": torch.randn(64, 32)}


def of_ranks() -> Names:
    model = model_of()
    model.blocks = nn.ModuleList([model.hidden])
    fsdp = {"MixedPrecisionPolicy": MixedPrecisionPolicy, "fully_shard": fully_shard}
    stages = {"stage": 0, "stage_group": None}
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    os.environ |= {**address, "RANK": "0", "WORLD_SIZE": "1"}
    return {**usual(), "model": model, **fsdp, **stages, "dist": dist}


def of_planning() -> Names:
    Path("machine.json").write_text(probe([Path()], page_bytes=65536).to_json())
    return usual()


def of_sharding() -> Names:
    names = of_ranks()
    dist.init_process_group("gloo")
    return {**names, "store": tierstore.TierStore("around")}


def of_optimizers() -> Names:
    parameter = nn.Parameter(torch.randn(300, 256).bfloat16())
    parameter.grad = torch.randn_like(parameter)
    store = tierstore.TierStore(None)
    packages = {"torch": torch, "tierstore": tierstore}
    return {**packages, "parameter": parameter, "store": store, "lr": 0.1}


def of_encoded_states() -> Names:
    names = of_optimizers()
    paged = tierstore.pages.PagedParameter(
        name="weight", tensor=names["parameter"], encodings={"master": "remainder"}
    )
    names["store"].pages.attach(
        [tierstore.pages.PagedGroup(parameters=[paged], hyperparameters={})]
    )
    names["sweep"] = names["store"].pages.sweep()  # It is never ended.
    page = next(iter(names["sweep"].__enter__()))
    return {**names, "chunk": page.shards[0].chunks[0]}


# Page, or page and block -> what it takes from around it.
SETUPS: dict[str, Callable[[], Names]] = {
    "README.md": of_readme,
    "docs/guide/checkpoints.md": of_checkpoints,
    "docs/guide/commands.md": lambda: committed(usual()),
    "docs/guide/convert.md": of_convert,
    "docs/guide/everyday.md-1": lambda: with_optimizer(of_everyday()),
    "docs/guide/everyday.md-3": lambda: committed(usual()),
    "docs/guide/everyday.md-4": of_everyday,
    "docs/guide/fewer-bytes.md": of_fewer_bytes,
    "docs/guide/getting-started.md": of_getting_started,
    "docs/guide/getting-started.md-1": of_freezing,
    "docs/guide/muon.md": of_muon,
    "docs/guide/optimizers.md-1": of_optimizers,
    "docs/guide/optimizers.md-2": of_encoded_states,
    "docs/guide/planning.md": of_planning,
    "docs/guide/ranks.md": of_ranks,
    "docs/guide/ranks.md-2": of_sharding,
    "docs/guide/routing.md": of_routing,
    "docs/guide/tiers.md": of_tiers,
}
# Their blocks are one program.
PROGRAMS = ("README.md", "docs/guide/training.md")


def blocks_of(page: Path) -> list[str]:
    found = FENCE.findall(page.read_text(encoding="utf-8"))
    return [textwrap.dedent(block) for _, language, block in found if language == "python"]


def examples() -> Iterator[Any]:
    """Yield name and code of each example, or of each program."""
    for page in PAGES:
        name, blocks = str(page.relative_to(ROOT)), blocks_of(page)
        if name in OF_PEERS:
            assert len(blocks) == OF_PEERS[name]
        elif name in PROGRAMS:
            yield pytest.param(name, "\n".join(blocks), id=name)
        else:
            for number, block in enumerate(blocks):
                if (name, number) not in (DEEPSPEED, *LORA):
                    yield pytest.param(f"{name}-{number}", block, id=f"{name}-{number}")


def run(name: str, code: str, names: Names, directory: Path) -> None:
    """Run an example.

    Args:
        name: of the example.
        code: of the example.
        names: what it takes from around it.
        directory: the working directory, where absolute paths lie, too.
    """
    # Steps of the examples are those of a long run; these runs have two.
    code = re.sub(r"\b1[02]00\b", "2", code)
    code = re.sub(r'"/(?=nvme|mnt|archive)', f'"{directory}/', code)
    with contextlib.ExitStack() as stack:
        stack.callback(lambda: dist.is_initialized() and dist.destroy_process_group())
        exec(compile(code, name, "exec"), names)
        for value in names.values():
            if isinstance(value, tierstore.TierStore):
                value.close()


@pytest.mark.quick(1)
@pytest.mark.parametrize(("name", "code"), list(examples()))
def test_an_example_runs(
    name: str, code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os, "environ", os.environ.copy())
    setup = SETUPS.get(name) or SETUPS.get(re.sub(r"-\d+$", "", name), usual)
    run(name, code, setup(), tmp_path)
