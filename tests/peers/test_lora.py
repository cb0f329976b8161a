"""Adapters of PEFT on a store: a killed run is resumed and ends in the same bits."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

from tests.test_doc_examples import LORA, blocks_of
from tests.test_docs import ROOT

AROUND = """
import os
import signal
import sys

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import muon
import tierstore

torch.manual_seed(0)
sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
model = LlamaForCausalLM(LlamaConfig(vocab_size=64, num_attention_heads=2, **sizes))
batches = torch.randint(64, (6, 2, 8), generator=torch.Generator().manual_seed(1))


def kill_at(module, step):
    forwards = []

    def kill(*_):
        forwards.append(1)
        if len(forwards) == step:
            os.kill(os.getpid(), signal.SIGKILL)

    module.register_forward_pre_hook(kill)


if sys.argv[1:]:
    kill_at(model.get_input_embeddings(), int(sys.argv[1]))
"""


def test_the_adapters_of_the_page_are_killed_and_resumed(tmp_path: Path) -> None:
    page, number = LORA
    block = blocks_of(ROOT / page)[number].replace('"/nvme/', '"nvme/')

    def train(name: str, *arguments: str) -> tuple[int, list[str], Path]:
        directory = tmp_path / name
        directory.mkdir(exist_ok=True)
        (directory / "program.py").write_text(AROUND + block, encoding="utf-8")
        command = [sys.executable, "-u", "program.py", *arguments]
        around = os.environ | {"HF_HUB_OFFLINE": "1"}
        done = subprocess.run(command, cwd=directory, env=around, capture_output=True, text=True)
        assert done.returncode in (0, -signal.SIGKILL), done.stderr[-4000:]
        losses = re.findall(r"^step .*$", done.stdout, re.MULTILINE)
        return done.returncode, losses, directory / "adapter/adapter_model.safetensors"

    code, whole, adapter = train("whole")
    assert (code, len(whole)) == (0, 6)
    code, before, _ = train("killed", "4")
    assert (code, before) == (-signal.SIGKILL, whole[:3])
    code, after, resumed = train("killed")
    assert code == 0
    assert 3 <= len(after) <= 4  # The commit of step 3 may have been in flight.
    assert after == whole[-len(after) :]
    assert resumed.read_bytes() == adapter.read_bytes()
