"""Fine-tuning of a model of transformers: whole, killed and resumed, with gradients that leave."""

from __future__ import annotations

import re
import signal
import string
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import tierstore
from tests.support.fake_cuda import fake_cuda

EXAMPLE = Path(__file__).resolve().parents[2] / "examples/finetune.py"
STEPS = 6
KILL_AFTER_STEP = 2
CONTEXT, BATCH = 64, 96  # Two micro-batches of at most 4,096 tokens, with logits in six pieces.


@pytest.fixture(scope="module")
def finetune() -> Any:
    """Return the example as a module."""
    sys.path.insert(0, str(EXAMPLE.parent))
    import finetune

    return finetune


def llama(*, is_tied: bool) -> Any:
    """Return a tiny Llama in bfloat16, with dropout, so that random generators matter."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(string.printable),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        attention_dropout=0.1,
        initializer_range=0.2,  # Norms of gradients are above 1, so that they are clipped.
        tie_word_embeddings=is_tied,
    )
    return LlamaForCausalLM(config).bfloat16()


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a model, its tokenizer of characters, and a text."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("finetune")
    words = {character: index for index, character in enumerate(string.printable)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token=" "))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token=" ")
    fast.save_pretrained(folder / "model")
    llama(is_tied=False).save_pretrained(folder / "model")
    (folder / "text.txt").write_text(EXAMPLE.read_text(encoding="utf-8"), encoding="utf-8")
    return folder


def command(files: Path, run: Path) -> list[str]:
    sizes = ["--context", str(CONTEXT), "--batch", str(BATCH), "--steps", str(STEPS)]
    options = ["--gpu", "24", "--host-memory", "64MiB", "--lr", "0.01", *sizes]
    paths = [str(EXAMPLE), str(files / "model"), str(files / "text.txt"), str(run)]
    return [sys.executable, *paths, *options]


def losses(lines: str) -> dict[int, str]:
    """Return the losses that a run has printed, by step."""
    return {int(step): loss for step, loss in re.findall(r"^step (\d+)  loss (\S+)", lines, re.M)}


def finish(files: Path, run: Path) -> tuple[int, dict[int, str]]:
    """Run the example to its end: the step that it began after, and its losses."""
    done = subprocess.run(command(files, run), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    began = re.search(r"^starts after step (\d+) of", done.stdout, re.M)
    assert began is not None, done.stdout
    return int(began[1]), losses(done.stdout)


def test_killed_and_resumed(
    files: Path, finetune: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import typer
    from transformers import AutoModelForCausalLM, AutoTokenizer

    began, expected = finish(files, tmp_path / "whole")
    assert (began, list(expected)) == (0, list(range(1, STEPS + 1)))
    assert float(expected[STEPS]) < float(expected[1]) - 0.5

    killed = ""
    with subprocess.Popen(
        command(files, tmp_path / "killed"), stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            killed += line
            if line.startswith(f"step {KILL_AFTER_STEP} "):
                process.kill()
                break
    assert process.returncode == -signal.SIGKILL, "the run ended before it was killed"
    began, resumed = finish(files, tmp_path / "killed")
    # A kill finds the step that was printed, the one before it, or one that went on meanwhile.
    assert KILL_AFTER_STEP - 1 <= began < STEPS
    assert losses(killed) | resumed == expected

    whole, other = tmp_path / "whole/model", tmp_path / "killed/model"
    weights = [(folder / "model.safetensors").read_bytes() for folder in (whole, other)]
    assert weights[0] == weights[1]
    model = AutoModelForCausalLM.from_pretrained(whole)
    tokens = AutoTokenizer.from_pretrained(whole)("import torch", return_tensors="pt")["input_ids"]
    assert tokens.shape == (1, len("import torch"))
    # A saved model knows the text: its loss is the one of the last step, not of random weights.
    assert model(input_ids=tokens, labels=tokens).loss < float(expected[1])
    # A run that is done has nothing left to do, and saves the same model.
    paths = (str(files / "model"), files / "text.txt", tmp_path / "whole")
    same = {"gpu": 24, "host_memory": "64MiB", "context": CONTEXT, "batch": BATCH, "steps": STEPS}
    finetune.main(*paths, **same, lr=0.01)
    assert losses(capsys.readouterr().out) == {}
    assert (whole / "model.safetensors").read_bytes() == weights[0]
    with pytest.raises(typer.Exit):
        finetune.main(*paths, **same, lr=0.02)
    assert "the run began with --lr 0.01, and this call has 0.02" in capsys.readouterr().err


@pytest.mark.parametrize("use_muon", [False, True])
def test_gradients_that_leave_give_the_same_bits(
    use_muon: bool, finetune: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of tied weights, in several micro-batches, clipped."""
    clip, norms, kinds = torch.nn.utils.clip_grad_norm_, [], set()

    def observed(parameters: Iterator[nn.Parameter], max_norm: float) -> None:
        clipped = list(parameters)
        kinds.update(type(parameter.grad) for parameter in clipped)
        norms.append(clip(clipped, max_norm).item())

    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", observed)
    tokens = torch.randint(100, (1000,), generator=torch.Generator().manual_seed(0))
    options = finetune.Options(
        use_muon=use_muon, lr=0.01, context=16, batch=6, micro_batch=2, steps=2, seed=0
    )
    found = []
    for name, offload in (("stay", None), ("leave", "backward")):
        model = llama(is_tied=True).train()
        model.gradient_checkpointing_enable({"use_reentrant": False})
        before = model.lm_head.weight.detach().clone()
        with (
            fake_cuda(),
            tierstore.TierStore(
                tmp_path / name, host_memory="64MiB", offload_gradients=offload, free_gradients=True
            ) as store,
        ):
            finetune.train(store, model, tokens, options)
            assert store.committed.step == 2
        assert model.lm_head.weight is model.model.embed_tokens.weight
        assert not torch.equal(model.lm_head.weight, before)
        assert all(parameter.grad is None for parameter in model.parameters())
        found.append([parameter.detach().clone() for parameter in model.parameters()])
    assert all(map(torch.equal, *found))
    assert norms[:2] == norms[2:]
    assert min(norms) > 1
    assert len(kinds) == 2  # Tensors that stay, and what stands for those that left.


@pytest.mark.parametrize("tokens", [1, 10, 37, 100])
def test_chunked_loss(tokens: int, finetune: Any) -> None:
    torch.manual_seed(0)
    head = nn.Linear(16, 50, bias=False, dtype=torch.float64)
    targets = torch.randint(50, (37,))
    found = []
    hidden = torch.randn(37, 16, dtype=torch.float64, requires_grad=True)
    for loss in (
        finetune.chunked_loss(head, hidden, targets, tokens),
        functional.cross_entropy(head(hidden), targets, reduction="sum"),
    ):
        gradients = torch.autograd.grad(loss, (hidden, head.weight))
        found.append((loss, *gradients))
    torch.testing.assert_close(*found, rtol=1e-12, atol=1e-12)


def test_capped_logits_are_seen(finetune: Any) -> None:
    from transformers import Gemma2Config, Gemma2ForCausalLM, GPT2Config, GPT2LMHeadModel

    tokens = torch.arange(16)[None]
    small: dict[str, Any] = {"vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 1}
    assert finetune.has_plain_head(llama(is_tied=False).eval(), tokens)
    gpt2 = GPT2Config(vocab_size=32, n_positions=16, n_embd=16, n_layer=1, n_head=2)
    assert finetune.has_plain_head(GPT2LMHeadModel(gpt2).eval(), tokens)
    small |= {"intermediate_size": 16, "num_attention_heads": 2, "num_key_value_heads": 1}
    capped = Gemma2Config(**small, head_dim=8, final_logit_softcapping=0.1)
    assert not finetune.has_plain_head(Gemma2ForCausalLM(capped).eval(), tokens)


def test_wrong_calls_are_refused(files: Path, finetune: Any, tmp_path: Path) -> None:
    import typer

    model, text = str(files / "model"), files / "text.txt"
    with pytest.raises(typer.BadParameter, match=r"must be one of \[24, 48, 80\], got 16"):
        finetune.main(model, text, tmp_path / "run", gpu=16)
    short = tmp_path / "short.txt"
    short.write_text("abc", encoding="utf-8")
    with pytest.raises(typer.BadParameter, match="has less than 4 tokens"):
        finetune.main(model, short, tmp_path / "run", gpu=24, context=3)
