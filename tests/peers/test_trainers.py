"""Loops of other libraries: killed at random moments and resumed, they end in the same bits."""

from __future__ import annotations

import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader

import muon
import tierstore
from tests.support.fake_cuda import fake_cuda
from tests.support.process_tree import kill_tree

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
# Name of an example -> its number of steps. torchtitan's steps are short beside what follows them.
STEPS = {
    "huggingface_trainer.py": 12,
    "accelerate_loop.py": 12,
    "lightning_trainer.py": 12,
    "torchtitan_trainer.py": 60,
}
# Example -> the program that runs it on a CPU, with `torchrun` also on one rank.
NEEDING_GPUS = {
    "torchtitan_trainer.py": str(Path(__file__).parent / "programs/torchtitan_on_cpu.py"),
}
SIZES = ("--width", "64", "--batch", "2")


def command(example: str, directory: Path, ranks: int) -> list[str]:
    launcher = [sys.executable]
    if ranks > 1 or example in NEEDING_GPUS:
        launcher += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    if example in NEEDING_GPUS:
        launcher.append(NEEDING_GPUS[example])
    steps = ("--steps", str(STEPS[example]))
    return [*launcher, str(EXAMPLES / example), str(directory), *steps, *SIZES]


def finish(example: str, directory: Path, ranks: int) -> tuple[int, str]:
    """Run an example to its end: the step that it began after, and the digest of its parameters."""
    done = subprocess.run(command(example, directory, ranks), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    began = re.search(r"^starts after step (\d+)$", done.stdout, re.MULTILINE)
    digest = re.search(r"^parameters sha256 ([0-9a-f]{64})$", done.stdout, re.MULTILINE)
    assert began is not None
    assert digest is not None, done.stdout
    return int(began[1]), digest[1]


def begin_and_kill(example: str, directory: Path, ranks: int, draw: random.Random) -> None:
    """Run an example, and kill all of its processes at some moment of its steps."""
    options: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(command(example, directory, ranks), text=True, **options) as process:
        assert process.stdout is not None
        logged: list[float] = []
        try:
            for line in process.stdout:
                if "loss" in line:
                    logged.append(time.monotonic())
                if len(logged) == 3:  # Anywhere within a step and its commit.
                    time.sleep((logged[-1] - logged[-2]) * draw.random())
                    break
        finally:  # Also when this test runs out of time.
            kill_tree(process.pid)
    assert process.returncode == -signal.SIGKILL, "the run ended before it was killed"


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("example", STEPS)
def test_killed_and_resumed(example: str, ranks: int, tmp_path: Path) -> None:
    draw = random.Random(ranks)
    began, expected = finish(example, tmp_path / "whole", ranks)
    assert began == 0
    # A run that is done has nothing left to do, and ends in the same bits.
    assert finish(example, tmp_path / "whole", ranks) == (STEPS[example], expected)
    begin_and_kill(example, tmp_path / "killed", ranks, draw)
    begin_and_kill(example, tmp_path / "killed", ranks, draw)
    began, found = finish(example, tmp_path / "killed", ranks)
    assert 0 < began < STEPS[example]
    assert found == expected


@pytest.mark.parametrize("example", STEPS)
def test_another_number_of_ranks(example: str, tmp_path: Path) -> None:
    """A Trainer of transformers goes on. Other loops refuse, and lose nothing."""
    begin_and_kill(example, tmp_path / "run", 2, random.Random(0))
    if example == "huggingface_trainer.py":
        began, _ = finish(example, tmp_path / "run", 1)
        assert 0 < began < STEPS[example]
        return
    alone = command(example, tmp_path / "run", 1)
    refused = subprocess.run(alone, capture_output=True, text=True, check=False)
    assert refused.returncode != 0
    assert "of another number of processes" in " ".join(refused.stderr.split())
    began, found = finish(example, tmp_path / "run", 2)
    assert 0 < began < STEPS[example]
    assert found == finish(example, tmp_path / "whole", 2)[1]


def trainer_of(
    directory: Path,
    store: tierstore.TierStore,
    *,
    settings: dict[str, Any] | None = None,
    muon_options: dict[str, Any] | None = None,
    **options: Any,
) -> Any:
    """Return a MuonTrainer of a tiny model, for three steps, with settings of TrainingArguments."""
    from transformers import GPT2Config, GPT2LMHeadModel, TrainingArguments

    from muon.integrations.huggingface import MuonTrainer

    torch.manual_seed(0)
    model = GPT2LMHeadModel(
        GPT2Config(vocab_size=32, n_positions=8, n_embd=16, n_layer=1, n_head=2)
    )
    rows = torch.randint(32, (16, 8), generator=torch.Generator().manual_seed(1))
    arguments = {"max_steps": 3, "save_strategy": "no", "report_to": "none", "use_cpu": True}
    arguments |= settings or {}
    return MuonTrainer(
        model=model,
        args=TrainingArguments(output_dir=str(directory), **arguments),
        train_dataset=[{"input_ids": row, "labels": row} for row in rows],
        store=store,
        muon_options={"ns_dtype": torch.float32, **(muon_options or {})},
        **options,
    )


@pytest.mark.parametrize(
    ("settings", "options", "decays", "betas"),
    [
        ({}, {}, (0.1, 0.01), (0.9, 0.999)),
        ({"weight_decay": 0.25, "adam_beta2": 0.95}, {}, (0.25, 0.25), (0.9, 0.95)),
        (
            {"weight_decay": 0.25},
            {"weight_decay": 0.5, "betas": (0.8, 0.9)},
            (0.5, 0.25),
            (0.8, 0.9),
        ),
        ({}, {"no_decay": "*.bias", "adamw_weight_decay": 0.5}, (0.1, 0.5, 0.0), (0.9, 0.999)),
    ],
)
def test_settings_of_the_user_take_effect(
    settings: dict[str, Any],
    options: dict[str, Any],
    decays: tuple[float, ...],
    betas: tuple[float, float],
    tmp_path: Path,
) -> None:
    with tierstore.TierStore(tmp_path / "run") as store:
        trainer = trainer_of(tmp_path, store, settings=settings, muon_options=options)
        groups = trainer.create_optimizer().param_groups
        assert tuple(group["weight_decay"] for group in groups) == decays
        assert {group["betas"] for group in groups if group["algorithm"] == "adamw"} == {betas}


@pytest.mark.parametrize("setting", ["learning_rate", "adam_epsilon"])
def test_settings_without_an_effect_are_refused(setting: str, tmp_path: Path) -> None:
    text = rf"{setting}=\) does not reach Muon"
    with tierstore.TierStore(tmp_path) as store, pytest.raises(ValueError, match=text):
        trainer_of(tmp_path, store, settings={setting: 0.125})


@pytest.mark.parametrize("commit_every", [1, 4])
def test_a_trainer_begins_nowhere_else_than_the_store(commit_every: int, tmp_path: Path) -> None:
    with tierstore.TierStore(tmp_path / "run", commit_every=commit_every) as store:
        trainer = trainer_of(tmp_path, store)
        with pytest.raises(ValueError, match=r"'elsewhere' conflicts with the store, .* 0"):
            trainer.train(resume_from_checkpoint="elsewhere")
        trainer.train(resume_from_checkpoint=True)
        assert trainer.state.global_step == store.step == 3
        trainer.args.max_steps = 5  # The same trainer goes on.
        trainer.train()
        assert trainer.state.global_step == store.step == 5


def test_a_checkpoint_of_a_step_that_is_done_again(tmp_path: Path) -> None:
    for steps in (3, 4):  # The second run was resumed before step 2.
        with tierstore.TierStore(tmp_path / f"run-{steps}") as store:
            trainer = trainer_of(tmp_path, store)
            trainer.args.max_steps = steps
            trainer.args.save_strategy, trainer.args.save_steps = "steps", 2
            trainer.train()
            published = tmp_path / "checkpoint-2/store"
            assert stock_reader_finds(published) == set(trainer.model.state_dict())


@pytest.mark.parametrize("max_norm", [0.05, 0.0])
def test_gradients_that_left_are_clipped_logged_and_summed(max_norm: float, tmp_path: Path) -> None:
    """By the Trainer itself, with the norms and weights of gradients that stay."""
    import transformers.trainer  # noqa: F401

    settings = {
        "gradient_accumulation_steps": 2,
        "max_grad_norm": max_norm,
        "logging_steps": 1,
        "per_device_train_batch_size": 2,
    }
    found = []
    for name, options in {"stays": {}, "leaves": {"offload_gradients": "backward"}}.items():
        with fake_cuda(), tierstore.TierStore(tmp_path / name / "run", **options) as store:
            trainer = trainer_of(tmp_path / name, store, settings=settings)
            trainer.train()
            norms = [log["grad_norm"] for log in trainer.state.log_history if "grad_norm" in log]
            weights = [p.detach().clone() for p in trainer.model.parameters()]
            found.append((norms, weights))
    (norms, weights), (expected_norms, expected) = found
    assert norms == expected_norms
    assert len(norms) == 3
    assert min(norms) > 0.05
    assert all(map(torch.equal, weights, expected))


def stock_reader_finds(checkpoint: Path) -> set[str]:
    """Return the names of the tensors of the model that a checkpoint has."""
    metadata = FileSystemReader(checkpoint).read_metadata()
    names = metadata.state_dict_metadata
    return {name.removeprefix("model.") for name in names if name.startswith("model.")}


def test_a_run_of_another_program_is_refused(tmp_path: Path) -> None:
    with tierstore.TierStore(tmp_path / "run") as store:
        model = trainer_of(tmp_path, store).model
        optimizer = muon.Muon(muon.param_groups(model, lr=0.02), store=store)
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        store.register(own={"at": 1})
        store.commit()
    with tierstore.TierStore(tmp_path / "run", resume=True) as store:
        with pytest.raises(ValueError, match="step 1 of the store was not committed by a Trainer"):
            trainer_of(tmp_path, store).train()
        assert store.committed.step == 1


def test_another_trainer_and_another_optimizer(tmp_path: Path) -> None:
    """A class of Python that knows nothing of pages."""
    from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments

    from tierstore.integrations.huggingface import StoreTrainer

    class OwnTrainer(StoreTrainer, Seq2SeqTrainer):
        pass

    sys.path.insert(0, str(EXAMPLES))
    from lion import Lion

    def make(directory: Path, store: tierstore.TierStore, steps: int) -> Any:
        made = trainer_of(directory, store)
        arguments = {"max_steps": steps, "save_strategy": "no", "report_to": "none"}
        return OwnTrainer(
            model=made.model,
            args=Seq2SeqTrainingArguments(
                output_dir=str(directory),
                use_cpu=True,
                lr_scheduler_type="constant",
                **arguments,
            ),
            train_dataset=made.train_dataset,
            store=store,
            optimizers=(tierstore.Paged(made.model.named_parameters(), Lion, store=store), None),
        )

    assert_resumes(make, tmp_path)


def assert_resumes(make: Callable[[Path, tierstore.TierStore, int], Any], folder: Path) -> None:
    """Train with a trainer that is made for a number of steps, at once and in two parts."""

    def train(directory: Path, steps: int) -> dict[str, torch.Tensor]:
        with tierstore.TierStore(directory / "run", resume=True) as store:
            trainer = make(directory, store, steps)
            trainer.train()
            assert store.step == steps
            return {name: value.clone() for name, value in trainer.model.state_dict().items()}

    expected = train(folder / "whole", 5)
    train(folder / "resumed", 3)
    found = train(folder / "resumed", 5)
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


def sft_trainer_of(directory: Path, store: tierstore.TierStore, steps: int) -> Any:
    """Return a trainer of trl on the store, with a tokenizer that has a word for each character."""
    from datasets import Dataset
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, set_seed
    from trl import SFTConfig, SFTTrainer

    from muon.integrations.huggingface import MuonFactory
    from tierstore.integrations.huggingface import StoreTrainer

    class OwnTrainer(StoreTrainer, SFTTrainer):
        pass

    texts = [f"The square of {number} is {number * number}." for number in range(64)]
    words = ["<pad>", "<eos>", *sorted(set("".join(texts)))]
    numbers = {word: number for number, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordLevel(numbers, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    set_seed(0)
    config = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
    arguments = {"max_steps": steps, "save_steps": 3, "report_to": "none", "use_cpu": True}
    return OwnTrainer(
        model=LlamaForCausalLM(
            LlamaConfig(
                vocab_size=len(words), num_attention_heads=2, attention_dropout=0.1, **config
            )
        ),
        args=SFTConfig(
            output_dir=str(directory),
            bf16=False,
            max_length=32,
            per_device_train_batch_size=4,
            lr_scheduler_type="constant",
            **arguments,
        ),
        train_dataset=Dataset.from_dict({"text": texts}),
        processing_class=PreTrainedTokenizerFast(
            tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>"
        ),
        store=store,
        optimizer_cls_and_kwargs=(
            MuonFactory,
            {"store": store, "lr": 0.02, "ns_dtype": torch.float32},
        ),
    )


def test_a_trainer_of_trl(tmp_path: Path) -> None:
    assert_resumes(sft_trainer_of, tmp_path)


def test_a_trainer_with_one_object_more_or_less_and_rewound(tmp_path: Path) -> None:
    def train(name: str, steps: int, **registered: Any) -> dict[str, torch.Tensor]:
        with tierstore.TierStore(tmp_path / name, resume=True) as store:
            store.register(**registered)
            trainer = trainer_of(tmp_path / f"{name}-checkpoints", store)
            trainer.args.max_steps, trainer.args.lr_scheduler_type = steps, "constant"
            trainer.args.save_strategy, trainer.args.save_steps = "steps", 2
            trainer.train()
            assert store.step == steps
            return {key: value.clone() for key, value in trainer.model.state_dict().items()}

    expected = train("whole", 5)
    train("run", 3, more={"a": 1})
    with pytest.raises(ValueError, match=r"step 3 was committed with 'more'.*\(more=None\)"):
        train("run", 5)
    for name, value in train("run", 5, more=None).items():
        assert torch.equal(value, expected[name]), name
    with tierstore.TierStore(tmp_path / "run", resume=True) as store:
        model = trainer_of(tmp_path, store).model
        optimizer = muon.Muon(muon.param_groups(model), store=store)
        store.register(**{name: {} for name in store.committed.states})
        published = tmp_path / "run-checkpoints/checkpoint-4/store"
        assert optimizer.restore(published, rewind=True) == 4
    with pytest.warns(UserWarning, match="step 4 was committed without 'more'"):
        found = train("run", 5, more={"a": 1})
    for name, value in found.items():
        assert torch.equal(value, expected[name]), name
