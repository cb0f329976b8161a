"""Fine-tune all parameters of a causal language model of Hugging Face on one GPU.

Parameters stay on the GPU. The optimizer state rests on the disk and in host memory, and streams
through the GPU in each step. Stop the program at any moment, also with kill -9, and start the same
command again: it continues from the last committed step with the same losses, bit for bit::

    pip install transformers
    python examples/finetune.py MODEL text.txt runs/finetune --gpu 24

MODEL is a folder, or a name of the hub. The text is any file in UTF-8. The folder of the run gets
``store``, with pages and commits, and in the end ``model``, which ``from_pretrained()`` loads.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Annotated

import torch
import typer
from gpt import learning_rate_factor, training_device
from text import shuffled_windows, windows
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

import muon
import tierstore

# Tokens whose logits exist at once: for 128,256 words, backward has three tensors of 0.5 GiB each.
LOSS_TOKENS = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """Choices for a GPU of one size. The result of a step depends on it by rounding only."""

    offload_gradients: str | None
    """``offload_gradients`` of the store. "backward": gradients are in host memory."""
    device_memory: str
    """``device_memory`` of the store: pages of optimizer state that rest on the GPU."""
    micro_tokens: int
    """Most tokens in one forward and backward, which takes at least one window."""


# GiB for the 8.03e9 parameters of Llama 3.1 8B, whose 32 layers are 4,096 wide and whose vocabulary
# has 128,256 tokens. All are predicted, none is measured: `tierstore plan` says what a step takes,
# the rest is arithmetic.
#
#                                     24     48     80
#   parameters, bfloat16            15.0   15.0   15.0
#   gradients                        2.0   15.0   15.0   if they leave: the largest, and its sum
#   pages on the GPU                 1.8    1.3   25.2   24.0 rest there; the others are copied
#   inputs of layers                 1.0    2.0    4.0   256 KiB for each token of a micro-batch
#   one layer, computed again        1.6    3.2    6.4   400 KiB for each of these tokens
#   in backward                     21.4   36.5   65.6
#   in the output layer             20.3   35.8   61.7   1.5 of logits, 1.0 of its new gradient
#   in a step of Muon               18.1   31.6   55.5   a step of AdamW takes less
#
# The rest is for fragments, for CUDA, and for cards that have less than their name says.
SIZES = {
    # Gradients that stay would need 15.0 + 15.0 of 24 GiB.
    24: Size(offload_gradients="backward", device_memory="0", micro_tokens=4096),
    # Gradients fit, and need not cross the bus in each micro-batch.
    48: Size(offload_gradients=None, device_memory="0", micro_tokens=8192),
    # Pages on the GPU are not read: they are a quarter of the state of AdamW, half of Muon's.
    80: Size(offload_gradients=None, device_memory="24GiB", micro_tokens=16_384),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Options of the training loop. A resumed run needs the same values for the same bits."""

    use_muon: bool
    """Step hidden matrices with Muon; AdamW steps all else."""
    lr: float
    """Highest learning rate of all parameters."""
    context: int
    """Tokens in a window."""
    batch: int
    """Windows in a step."""
    micro_batch: int
    """Most windows in one forward and backward."""
    steps: int
    """Steps of the whole run."""
    seed: int
    """Seed of the order of windows, and of dropout."""


def summed_loss(head: nn.Module, hidden: Tensor, targets: Tensor) -> Tensor:
    """Return the summed loss in nats, () in float32 or wider.

    Hidden states are (tokens, width), targets int64 (tokens,).
    """
    logits = head(hidden)  # (tokens, vocabulary)
    wide = torch.promote_types(logits.dtype, torch.float32)
    return functional.cross_entropy(logits.to(wide), targets, reduction="sum")


def chunked_loss(head: nn.Module, hidden: Tensor, targets: Tensor, tokens: int) -> Tensor:
    """Return what summed_loss() returns, with the logits of at most ``tokens`` tokens at once."""
    pieces = zip(hidden.split(tokens), targets.split(tokens), strict=True)
    losses = [checkpoint(summed_loss, head, *piece, use_reentrant=False) for piece in pieces]
    return torch.stack(losses).sum()


def hidden_states(model: PreTrainedModel, inputs: Tensor) -> Tensor:
    """Return (windows, context, width), which the output layer reads, for (windows, context)."""
    return model.base_model(input_ids=inputs, use_cache=False).last_hidden_state


@torch.no_grad()
def has_plain_head(model: PreTrainedModel, inputs: Tensor) -> bool:
    """Return whether logits are what the output layer makes, neither scaled nor capped after it."""
    if (head := model.get_output_embeddings()) is None:
        return False
    logits = head(hidden_states(model, inputs))
    return torch.equal(logits, model(input_ids=inputs, use_cache=False).logits)


def train(
    store: tierstore.TierStore, model: PreTrainedModel, tokens: Tensor, options: Options
) -> None:
    """Train from the last committed step on; tokens are integers (tokens,) on the CPU."""
    torch.manual_seed(options.seed)
    # Tied weights are one parameter: it gets AdamW, as each embedding does.
    groups = muon.param_groups(
        model,
        lr=options.lr,
        adamw_lr=options.lr,
        is_muon=None if options.use_muon else lambda name, parameter: False,
    )
    # With this scale Muon takes the learning rate that was tuned for AdamW.
    optimizer = muon.Muon(groups, store=store, adjust_lr_fn="match_rms_adamw")
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: learning_rate_factor(step, options.steps)
    )
    kept = {name: getattr(options, name) for name in ("context", "batch", "lr", "seed")}
    data = {"position": 0, **kept}
    store.register(scheduler=scheduler, data=data, random=tierstore.RandomState())
    first_step = optimizer.restore()
    for name, value in kept.items():
        if data[name] != value:
            raise ValueError(
                f"the run began with --{name} {data[name]}, and this call has {value}: give the "
                "same, or name another folder"
            )
    print(f"starts after step {first_step} of {options.steps}", flush=True)

    head = model.get_output_embeddings()
    order = shuffled_windows((len(tokens) - 1) // options.context, options.seed, data["position"])
    for step in range(first_step + 1, options.steps + 1):
        started = time.perf_counter()
        loss = torch.zeros((), device=model.device)
        batch = windows(tokens, list(islice(order, options.batch)), options.context)
        for inputs, targets in zip(*(t.split(options.micro_batch) for t in batch), strict=True):
            hidden = hidden_states(model, inputs.to(model.device)).flatten(0, 1)
            summed = chunked_loss(head, hidden, targets.flatten().to(model.device), LOSS_TOKENS)
            part = summed / batch[0].numel()
            part.backward()
            loss += part.detach()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()  # Frees the gradients.
        scheduler.step()
        data["position"] += options.batch
        store.commit()
        now = f"loss {loss.item():.6f}"
        now += f"  {batch[0].numel() / (time.perf_counter() - started):,.0f} tokens/s"
        if torch.cuda.is_available():
            now += f"  GPU peak {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB"
        print(f"step {step}  {now}", flush=True)
    store.synchronize()


def main(
    model: Annotated[str, typer.Argument(help="A folder, or a name of the hub.")],
    text: Annotated[Path, typer.Argument(help="A file in UTF-8.", exists=True, dir_okay=False)],
    run: Annotated[Path, typer.Argument(help="A folder for pages, commits and the result.")],
    gpu: Annotated[int, typer.Option(help=f"GB of the GPU: one of {list(SIZES)}.")],
    use_muon: Annotated[bool, typer.Option("--muon", help="For what Muon has pretrained.")] = False,
    host_memory: Annotated[str, typer.Option(help="For pages and gradients.")] = "32GiB",
    context: Annotated[int, typer.Option(min=1, help="Tokens in a window.")] = 2048,
    batch: Annotated[int, typer.Option(min=1, help="Windows in a step.")] = 32,
    steps: Annotated[int | None, typer.Option(min=1, help="Default: the text once.")] = None,
    lr: Annotated[float, typer.Option(help="Highest learning rate.")] = 1e-5,
    seed: Annotated[int, typer.Option(help="Seed of the order of windows.")] = 0,
) -> None:
    """Fine-tune a model, or continue from the last commit of the run."""
    if gpu not in SIZES:
        raise typer.BadParameter(f"must be one of {list(SIZES)}, got {gpu}", param_hint="--gpu")
    size = SIZES[gpu]
    tokenizer = AutoTokenizer.from_pretrained(model)
    ids = tokenizer(text.read_text(encoding="utf-8"), add_special_tokens=False, verbose=False)
    tokens = torch.tensor(ids["input_ids"], dtype=torch.int32)
    if len(tokens) <= context:
        raise typer.BadParameter(f"has less than {context + 1} tokens", param_hint="TEXT")
    device = training_device()
    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16).to(device)
    if not has_plain_head(network, tokens[None, :16].to(device)):
        raise typer.BadParameter("scales or caps its logits, or adds to them", param_hint="MODEL")
    network.train()
    # transformers 5 calls it activation_checkpointing_enable, transformers 4 does not.
    network.gradient_checkpointing_enable({"use_reentrant": False})
    options = Options(
        use_muon=use_muon,
        lr=lr,
        context=context,
        batch=batch,
        micro_batch=max(1, size.micro_tokens // context),
        steps=max(1, (len(tokens) - 1) // context // batch) if steps is None else steps,
        seed=seed,
    )
    try:
        with tierstore.TierStore(
            run / "store",
            host_memory=host_memory,
            device_memory=size.device_memory,
            resume=True,
            offload_gradients=size.offload_gradients,
            free_gradients=True,
        ) as store:
            train(store, network, tokens, options)
    except (tierstore.TierstoreError, ValueError) as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(2) from error
    network.save_pretrained(run / "model")
    tokenizer.save_pretrained(run / "model")
    print(f"saved {run / 'model'}")


if __name__ == "__main__":
    typer.run(main)
