"""Train a small Llama with the Trainer of transformers while its optimizer state stays on disk.

The text is the source of Python's standard library, and the model is made from a config: nothing
is downloaded. Stop the program at any moment, also with kill -9, and start it again: it continues
from the last committed step and ends with the same parameters, bit for bit::

    pip install transformers accelerate
    python examples/huggingface_trainer.py runs/trainer
    torchrun --nproc-per-node 2 examples/huggingface_trainer.py runs/trainer-2
"""

from __future__ import annotations

from typing import Annotated

import torch
import typer
from gpt import parameter_digest
from text import standard_library_text
from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments, set_seed

import tierstore
from muon.integrations.huggingface import MuonTrainer

CONTEXT = 128


def model_of(width: int) -> LlamaForCausalLM:
    """Make a Llama for bytes, with dropout, so that random generators matter."""
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=2,
        num_attention_heads=width // 16,
        attention_dropout=0.1,
        max_position_embeddings=CONTEXT,
    )
    return LlamaForCausalLM(config)


def windows(text: torch.Tensor, count: int) -> list[dict[str, torch.Tensor]]:
    """Return the first windows of a text as a data set of the Trainer."""
    pieces = text[: count * CONTEXT].long().view(count, CONTEXT)
    return [{"input_ids": piece, "labels": piece} for piece in pieces]


def main(
    directory: Annotated[str, typer.Argument(help="Where pages and checkpoints live.")],
    steps: Annotated[int, typer.Option(min=1)] = 100,
    width: Annotated[int, typer.Option(min=16, help="A multiple of 16.")] = 128,
    batch: Annotated[int, typer.Option(min=1, help="Windows of a rank in a step.")] = 8,
) -> None:
    """Train, or continue from the last commit."""
    arguments = TrainingArguments(
        output_dir=f"{directory}/checkpoints",
        max_steps=steps,
        per_device_train_batch_size=batch,
        gradient_accumulation_steps=2,
        logging_steps=max(1, steps // 10),
        eval_strategy="steps",
        eval_steps=max(1, steps // 4),
        save_steps=max(1, steps // 2),
        save_total_limit=1,
        warmup_steps=max(1, steps // 10),
        report_to="none",
        disable_tqdm=True,
        use_cpu=not torch.cuda.is_available(),
    )
    torch.set_num_threads(1)
    set_seed(0)
    model = model_of(width)
    train_text, validation_text = standard_library_text()
    with tierstore.TierStore(
        f"{directory}/run", host_memory="32MiB", page_bytes="4MiB", resume=True
    ) as store:
        trainer = MuonTrainer(
            model=model,
            args=arguments,
            train_dataset=windows(train_text, 1000),
            eval_dataset=windows(validation_text, 16),
            store=store,
            lr=0.02,
            adamw_lr=3e-3,
            muon_options={"ns_dtype": torch.float32},
        )
        print(f"starts after step {store.committed.step}", flush=True)
        trainer.train()
        if trainer.is_world_process_zero():
            print(f"parameters sha256 {parameter_digest(model.named_parameters())}")


if __name__ == "__main__":
    typer.run(main)
