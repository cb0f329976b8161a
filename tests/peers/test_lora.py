"""Adapters of PEFT on a store: a killed run is resumed and ends in the same bits."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.test_doc_examples import LORA, blocks_of
from tests.test_docs import ROOT

MODEL = """
import os
import signal
import sys

import torch
from peft import LoraConfig
from transformers import LlamaConfig, LlamaForCausalLM

import muon
import tierstore

torch.manual_seed(0)
sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
model = LlamaForCausalLM(LlamaConfig(vocab_size=64, num_attention_heads=2, **sizes))
forwards = []


def kill(*_):
    forwards.append(1)
    if sys.argv[1:] == [str(len(forwards))]:
        os.kill(os.getpid(), signal.SIGKILL)


model.get_input_embeddings().register_forward_pre_hook(kill)
batches = torch.randint(64, (6, 2, 8), generator=torch.Generator().manual_seed(1))
"""
TRL = """
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from trl import SFTConfig

texts = [f"The square of {number} is {number * number}." for number in range(32)]
words = ["<pad>", "<eos>", *sorted(set("".join(texts)))]
numbers = {word: number for number, word in enumerate(words)}
splitting = Tokenizer(models.WordLevel(numbers, unk_token="<pad>"))
splitting.pre_tokenizer = pre_tokenizers.Split("", "isolated")
tokenizer = PreTrainedTokenizerFast(
    tokenizer_object=splitting, pad_token="<pad>", eos_token="<eos>"
)
dataset = Dataset.from_dict({"text": texts})
lora = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
steps = {"max_steps": 6, "save_steps": 2, "logging_steps": 1, "per_device_train_batch_size": 4}
arguments = SFTConfig(
    output_dir="out", report_to="none", use_cpu=True, bf16=False, max_length=32, **steps
)
"""
SAVE = 'trainer.model.save_pretrained("adapter")'


@pytest.mark.parametrize(
    ("example", "before", "after"), zip(LORA, ("", TRL), ("", SAVE), strict=True)
)
def test_the_adapters_of_the_page_are_killed_and_resumed(
    example: tuple[str, int], before: str, after: str, tmp_path: Path
) -> None:
    page, number = example
    block = blocks_of(ROOT / page)[number].replace('"/nvme/', '"nvme/')

    def train(name: str, *arguments: str) -> tuple[int, list[str], Path]:
        directory = tmp_path / name
        directory.mkdir(exist_ok=True)
        program = directory / "program.py"
        program.write_text(MODEL + before + block + after, encoding="utf-8")
        command = [sys.executable, "-u", program.name, *arguments]
        around = os.environ | {"HF_HUB_OFFLINE": "1"}
        done = subprocess.run(command, cwd=directory, env=around, capture_output=True, text=True)
        assert done.returncode in (0, -signal.SIGKILL), done.stderr[-4000:]
        losses = re.findall(r"(?:step .: loss|'loss':) '?([\d.]+)", done.stdout)
        return done.returncode, losses, directory / "adapter/adapter_model.safetensors"

    code, whole, adapter = train("whole")
    assert (code, len(whole)) == (0, 6)
    code, begun, _ = train("killed", "4")
    assert (code, begun) == (-signal.SIGKILL, whole[:3])
    code, resumed, same = train("killed")
    assert code == 0
    assert 3 <= len(resumed) <= 4  # The commit of step 3 may have been in flight.
    assert resumed == whole[-len(resumed) :]
    assert same.read_bytes() == adapter.read_bytes()
