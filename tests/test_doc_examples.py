"""Every Python example of README and docs runs, with what it takes from the program around it.

Examples of the loops of other libraries run in tests/peers/test_doc_examples.py.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
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

Names = dict[str, Any]

TOKENS = torch.arange(16)
# Their blocks belong to a loop of another library.
OF_PEERS = {
    "docs/guide/accelerate.md": 1,
    "docs/guide/huggingface.md": 2,
    "docs/guide/lightning.md": 1,
    "docs/guide/torchtitan.md": 1,
}
DEEPSPEED = ("docs/guide/deepspeed.md", 1)  # The block that starts DeepSpeed.
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


def of_resume() -> Names:
    names = usual()
    return {
        **names,
        "loader": {"batch": 0},
        "batches_from": lambda step: [TOKENS] * (2 - step),
        "loss_of": lambda batch: loss_of(names["model"]),
    }


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

    names = committed(usual())
    convert("nvme/run1", "weights", to="dcp", only="model")
    return names


def of_deepspeed() -> Names:
    """A checkpoint that DeepSpeed wrote, converted; what a program has to train on with it."""
    from tests.peers.programs.deepspeed_writer import Model, gradients_of
    from tierstore.tools.convert.convert import convert

    checkpoint = ROOT / "tests/tools/convert/fixtures/deepspeed/zero1-adamw/checkpoint"
    convert(checkpoint, "start", to="dcp")
    convert("start", "universal", to="universal")
    model = Model(big=False)
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters() if p.requires_grad}
    return {
        **usual(),
        "Path": Path,
        "model": model,
        "make_model": lambda: Model(big=False),
        "batches_from": lambda step: [gradients_of(number, shapes) for number in (step, step + 1)],
        "loss_of": lambda model, batch: model(batch),
    }


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
    "docs/guide/checkpoints.md": of_checkpoints,
    "docs/reference/commands.md": lambda: committed(usual()),
    "docs/guide/convert.md": of_convert,
    "docs/guide/deepspeed.md": of_deepspeed,
    "docs/guide/everyday.md-1": lambda: with_optimizer(of_everyday()),
    "docs/guide/everyday.md-3": lambda: committed(usual()),
    "docs/guide/everyday.md-4": of_everyday,
    "docs/guide/fewer-bytes.md": of_fewer_bytes,
    "docs/guide/muon.md": of_muon,
    "docs/guide/optimizers.md-1": of_optimizers,
    "docs/guide/optimizers.md-2": of_encoded_states,
    "docs/guide/ranks.md": of_ranks,
    "docs/guide/ranks.md-2": of_sharding,
    "docs/guide/resume.md": of_resume,
    "docs/guide/routing.md": of_routing,
    "docs/guide/start-from.md": of_checkpoints,
    "docs/guide/tiers.md": of_tiers,
}
# Their blocks are one program.
PROGRAMS = ("docs/guide/training.md",)
# Whole programs whose output is on the page: tests of their own compare it.
PRINTED = ("README.md", "docs/guide/quickstart.md")


def blocks_of(page: Path) -> list[str]:
    found = FENCE.findall(page.read_text(encoding="utf-8"))
    return [textwrap.dedent(block) for _, language, block in found if language == "python"]


def examples() -> Iterator[Any]:
    """Yield name and code of each example, or of each program."""
    for page in PAGES:
        name, blocks = str(page.relative_to(ROOT)), blocks_of(page)
        if name in OF_PEERS:
            assert len(blocks) == OF_PEERS[name]
        elif name in PRINTED:
            assert len(blocks) == 1
        elif name in PROGRAMS:
            yield pytest.param(name, "\n".join(blocks), id=name)
        else:
            for number, block in enumerate(blocks):
                if (name, number) not in (DEEPSPEED, *LORA):
                    yield pytest.param(f"{name}-{number}", block, id=f"{name}-{number}")


def outputs_of(page: str) -> list[str]:
    """Return the blocks of a page that show what its program prints."""
    text = (ROOT / page).read_text(encoding="utf-8")
    blocks = [block for _, language, block in FENCE.findall(text) if not language]
    return [block for block in blocks if "loss" in block]


def rounded(text: str) -> str:
    """Return the text with two decimals: the others depend on the processor."""
    return re.sub(r"(\.\d\d)\d+", r"\1", text)


def run(name: str, code: str, names: Names, directory: Path) -> None:
    """Run an example.

    Args:
        name: of the example.
        code: of the example.
        names: what it takes from around it.
        directory: the working directory; absolute paths are also below it.
    """
    # Examples have the steps of a long run; these runs have two.
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


def test_the_program_of_the_readme_prints_what_it_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (program,) = blocks_of(ROOT / "README.md")
    for shown in outputs_of("README.md"):
        exec(compile(program, "README.md", "exec"), {})
        assert rounded(capsys.readouterr().out) == rounded(shown)


class Kill(BaseException):
    """Takes the place of a signal that would end the tests."""


def test_the_quick_start_resumes_with_the_losses_that_it_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def kill(*_: object) -> None:
        raise Kill

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("os.kill", kill)
    (program,) = blocks_of(ROOT / "docs/guide/quickstart.md")
    printed = []
    for shown in outputs_of("docs/guide/quickstart.md"):
        command, *lines = shown.splitlines()
        monkeypatch.setattr("sys.argv", command.removeprefix("$ python ").split())
        is_killed = lines[-1] == "Killed"
        with pytest.raises(Kill) if is_killed else contextlib.nullcontext():
            exec(compile(program, "train.py", "exec"), {})
        printed.append(capsys.readouterr().out.splitlines())
        # After a real kill the page's run begins a step earlier: its commit was in flight.
        losses = [line for line in printed[-1] if "loss" in line]
        assert {rounded(line) for line in losses} <= {rounded(line) for line in lines}
    whole, killed, resumed = printed
    assert [whole[0], killed[0], resumed[0]] == ["begins with step 1"] * 2 + ["begins with step 4"]
    assert killed[1:] == whole[1:4]
    assert resumed[1:] == whole[4:]


@pytest.mark.long
def test_the_quick_start_is_killed(tmp_path: Path) -> None:
    (program,) = blocks_of(ROOT / "docs/guide/quickstart.md")
    (tmp_path / "train.py").write_text(program, encoding="utf-8")

    def train(*arguments: str) -> tuple[int, list[str]]:
        command = [sys.executable, "train.py", *arguments]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
        return done.returncode, done.stdout.splitlines()

    _, whole = train("whole")
    killed = train("killed", "4")
    code, (begins, *losses) = train("killed")
    assert killed == (-signal.SIGKILL, whole[:4])
    assert code == 0
    assert begins in ("begins with step 3", "begins with step 4")
    assert losses == whole[-len(losses) :]
