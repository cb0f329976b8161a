"""Trainings of a byte-level GPT in several processes, for benchmarks of losses."""

from __future__ import annotations

import functools
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
from gpt import training_device
from text import standard_library_text

T = TypeVar("T")


@functools.cache
def texts() -> tuple[torch.Tensor, torch.Tensor]:
    """Return the training and the validation text, where models are trained."""
    device = training_device()
    training, validation = standard_library_text()
    return training.to(device), validation.to(device)


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
