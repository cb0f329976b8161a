"""The Python examples of pages about loops of other libraries."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import muon
import tierstore
from tests.test_doc_examples import DEEPSPEED, Names, blocks_of, run
from tests.test_docs import ROOT


class Loss(nn.Module):
    """Returns its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 1))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.layers(batch).square().mean()
        return loss


def of_accelerate() -> Names:
    loader = DataLoader(torch.randn(8, 16), batch_size=2)  # type: ignore[arg-type]
    return {
        "model": Loss(),
        "loader": loader,
        "epochs": 2,
        "warmup_then_cosine": lambda step: 1.0,
    }


def of_transformers() -> Names:
    from transformers import GPT2Config, GPT2LMHeadModel, Seq2SeqTrainingArguments

    sizes = {"vocab_size": 32, "n_positions": 8, "n_embd": 16, "n_layer": 1, "n_head": 2}
    rows = torch.randint(32, (16, 8))
    return {
        "model": GPT2LMHeadModel(GPT2Config(**sizes)),
        "dataset": [{"input_ids": row, "labels": row} for row in rows],
        "arguments": Seq2SeqTrainingArguments(output_dir="out", max_steps=2, use_cpu=True),
        "store": tierstore.TierStore("around"),
    }


def of_lightning() -> Names:
    loader = DataLoader(torch.randn(8, 16), batch_size=2)  # type: ignore[arg-type]
    return {"model": Loss(), "loader": loader}


def of_deepspeed() -> Names:
    import deepspeed

    from tierstore.tools.convert.convert import convert

    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "GLOO_SOCKET_IFNAME": "lo"}
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # Its build takes minutes.
    deepspeed.init_distributed("gloo")
    model = Loss().bfloat16()
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(2, 16).bfloat16()).backward()
    optimizer.step()
    saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(saved, "source.pt")
    convert("source.pt", "universal", to="universal", assume_model_order=True)
    config = {
        "train_batch_size": 1,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 2},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
    }
    return {"deepspeed": deepspeed, "model": Loss(), "config": config, "DST": "universal"}


SETUPS: dict[tuple[str, int], Callable[[], Names]] = {
    ("docs/guide/accelerate.md", 0): of_accelerate,
    ("docs/guide/huggingface.md", 0): of_transformers,
    ("docs/guide/huggingface.md", 1): of_transformers,
    ("docs/guide/lightning.md", 0): of_lightning,
    DEEPSPEED: of_deepspeed,
}


@pytest.mark.parametrize(("page", "number"), SETUPS)
def test_an_example_runs(
    page: str, number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os, "environ", os.environ.copy())
    packages: dict[str, Any] = {"torch": torch, "muon": muon, "tierstore": tierstore}
    names = {**packages, **SETUPS[page, number]()}
    run(page, blocks_of(ROOT / page)[number], names, tmp_path)


TINY = """
import sys
from dataclasses import replace

sys.path.insert(0, {examples!r})
from torchtitan_trainer import CONTEXT, Windows

from torchtitan.components.dataloader import ParallelAwareDataloader
from torchtitan.config import ConfigManager
from torchtitan.models import llama3


def build_dataloader(dp_world_size, dp_rank, **others):
    ranks = {{"dp_rank": dp_rank, "dp_world_size": dp_world_size}}
    return ParallelAwareDataloader(Windows(dp_rank, dp_world_size), batch_size=2, **ranks)


tiny = llama3.TransformerModelArgs(dim=64, n_layers=1, n_heads=2, vocab_size=256)
spec = replace(
    llama3.get_train_spec(),
    model_args={{"tiny": tiny}},
    build_tokenizer_fn=None,
    build_dataloader_fn=build_dataloader,
)
llama3.get_train_spec = lambda: spec
arguments = ["--model.name=llama3-muon", "--model.flavor=tiny", "--training.steps=2"]
arguments += ["--training.local_batch_size=2", f"--training.seq_len={{CONTEXT}}"]
config = ConfigManager().parse_args(arguments)
"""


def test_the_example_of_torchtitan_runs(tmp_path: Path) -> None:
    (block,) = blocks_of(ROOT / "docs/guide/torchtitan.md")
    program = tmp_path / "program.py"
    block = block.replace('"/nvme', f'"{tmp_path}/nvme')
    program.write_text(TINY.format(examples=str(ROOT / "examples")) + block)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    on_cpu = ROOT / "tests/peers/programs/torchtitan_on_cpu.py"
    done = subprocess.run(
        [*launcher, str(on_cpu), str(program)], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert (tmp_path / "nvme/checkpoints/step-2/.metadata").exists()
