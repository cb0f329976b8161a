"""Trainings of a byte-level GPT in several processes, for benchmarks of losses."""

from __future__ import annotations

import functools
import itertools
import multiprocessing
import os
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import torch
from rich.progress import track

sys.path.append(str(Path(__file__).parents[1] / "examples"))
from gpt import GPT, Options, learning_rate_factor, training_device, validation_loss
from text import shuffled_windows, standard_library_text, windows

T = TypeVar("T")


@functools.cache
def texts() -> tuple[torch.Tensor, torch.Tensor]:
    """Return the training and the validation text, where models are trained."""
    device = training_device()
    training, validation = standard_library_text()
    return training.to(device), validation.to(device)


def losses_of(
    model: GPT,
    optimizer: torch.optim.Optimizer,
    options: Options,
    *,
    seed: int,
    every: int,
    before: Callable[[], None] = lambda: None,
    after: Callable[[], None] = lambda: None,
) -> list[tuple[int, float]]:
    """Train a model; it sees the same batches with each optimizer.

    Args:
        model: the model.
        optimizer: of its parameters.
        options: of the training.
        seed: of the order of batches.
        every: steps from one validation loss to the next.
        before: called before each forward.
        after: called after each backward.

    Returns:
        (step, validation loss in nats per byte), also of the last step.
    """
    text, validation_text = texts()
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: learning_rate_factor(step, options.steps)
    )
    order = shuffled_windows((len(text) - 1) // options.context, seed, 0)
    losses = []
    for step in range(1, options.steps + 1):
        before()
        batch = windows(text, list(itertools.islice(order, options.batch)), options.context)
        model(*batch).backward()
        after()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        if step % every == 0 or step == options.steps:
            losses.append((step, validation_loss(model, validation_text, options)))
    return losses


def train_all(train: Callable[..., T], jobs: Sequence[Sequence[Any]], description: str) -> list[T]:
    """Call a function with each of some arguments; return the results in this order.

    There is a process for each core, with one thread, so that losses are the same on any number of
    cores.
    """
    with ProcessPoolExecutor(
        len(os.sched_getaffinity(0)),
        mp_context=multiprocessing.get_context("spawn"),
        initializer=torch.set_num_threads,
        initargs=(1,),
    ) as pool:
        runs = [pool.submit(train, *job) for job in jobs]
        return [run.result() for run in track(runs, description=description)]
