"""Runs to publish, what stock PyTorch makes of what was published, and looks at directories."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
)

import muon
import tierstore
from tests.support import stock_reader
from tests.support.toy import MODEL, RANK, Toy
from tierstore.storage.base import Storage
from tierstore.tools.inspect.verify import verify

ROOT = Path(__file__).resolve().parents[2]

# Small enough for pages that hold a parameter cut in pieces.
PAGE_BYTES = 4096


class Ours:
    """A model of tests/support/stock_reader.py with our optimizer, its state in a run."""

    def __init__(
        self,
        directory: Path | Storage,
        kind: str = "layers",
        *,
        dtype: torch.dtype = torch.float32,
        named: bool = True,
        model: nn.Module | None = None,
        seed: int = 0,
        **options: Any,
    ) -> None:
        self.model = stock_reader.make_model(kind, seed, dtype) if model is None else model
        self.store = tierstore.TierStore(directory, **{"page_bytes": PAGE_BYTES, **options})
        self.optimizer = muon.Muon(make_groups(self.model, named=named), store=self.store)

    def train(self, *steps: int) -> Ours:
        for step in steps:
            stock_reader.train_step(self.model, [self.optimizer], step)
        return self

    def state(self) -> dict[str, Any]:
        return {
            "model": stock_reader.whole(self.model.state_dict()),
            "states": stock_reader.whole(self.store.pages.read_states()),
            "scalars": dict(self.store.pages.scalars),
            "step": self.store.step,
        }


def make_groups(model: nn.Module, *, named: bool = True) -> list[dict[str, Any]]:
    """Our groups for what stock_reader.make_optimizers() makes two optimizers of."""
    matrices, others = stock_reader.split_parameters(model)
    return [
        {
            "params": stock_reader.only_tensors(matrices, named),
            "algorithm": "muon",
            **stock_reader.MUON_OPTIONS,
        },
        {
            "params": stock_reader.only_tensors(others, named),
            "algorithm": "adamw",
            **stock_reader.ADAMW_OPTIONS,
        },
    ]


class Reference:
    """The same training with stock optimizers: what must be found again."""

    def __init__(
        self, kind: str = "layers", *, named: bool = False, model: nn.Module | None = None
    ) -> None:
        self.model = stock_reader.make_model(kind, seed=0) if model is None else model
        self.optimizers = stock_reader.make_optimizers(self.model, named=named)

    def train(self, *steps: int) -> Reference:
        for step in steps:
            stock_reader.train_step(self.model, self.optimizers, step)
        return self

    def model_state(self) -> dict[str, Any]:
        state: dict[str, Any] = stock_reader.whole(self.model.state_dict())
        return state

    def optimizer_state(self, *, flat: bool) -> dict[str, Any]:
        options = StateDictOptions(flatten_optimizer_state_dict=flat)
        state: dict[str, Any] = stock_reader.whole(
            get_optimizer_state_dict(self.model, self.optimizers, options=options)
        )
        return state


def save_with_dcp(reference: Reference, path: Path, *, flat: bool, prefix: bool) -> None:
    """Save a reference as a stock program does."""
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    optimizer = get_optimizer_state_dict(reference.model, reference.optimizers, options=options)
    model = get_model_state_dict(reference.model)
    state = {"model": model} if prefix else model
    dcp.save({**state, "optimizer": optimizer}, checkpoint_id=path, no_dist=True)


Job = tuple[str, str, dict[str, Any]]


def read_with_stock(jobs: Sequence[Job], scratch: Path, *, ranks: int = 0) -> dict[str, Any]:
    """Do the jobs of tests/support/stock_reader.py in processes of their own.

    Args:
        jobs: name, function and arguments of each.
        scratch: where to keep what goes there and comes back.
        ranks: processes of a gloo group, or 0 for one process without a group.
    """
    scratch.mkdir(parents=True, exist_ok=True)
    (scratch / "jobs.json").write_text(json.dumps(jobs))
    command = [sys.executable, "-m", "tests.support.stock_reader"]
    command += [str(scratch / "jobs.json"), str(scratch / "results")]
    group = [{"RANK": str(rank), "WORLD_SIZE": str(ranks)} for rank in range(ranks)] or [{}]
    processes = [
        subprocess.Popen(
            command, cwd=ROOT, env={**os.environ, **rank}, stderr=subprocess.PIPE, text=True
        )
        for rank in group
    ]
    try:
        errors = [process.communicate(timeout=200)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0] * len(processes), errors
    # Errors of jobs come as what they are.
    results: dict[str, Any] = torch.load(scratch / "results", weights_only=False)
    assert results.pop("strangers") == []
    return results


def assert_equal(actual: Any, expected: Any, place: str = "") -> None:
    """The same, tensors in dtype, shape and every bit."""
    if isinstance(expected, torch.Tensor):
        assert isinstance(actual, torch.Tensor), place
        assert actual.dtype == expected.dtype, place
        assert torch.equal(actual, expected), place
    elif isinstance(expected, dict):
        assert isinstance(actual, dict), place
        assert actual.keys() == expected.keys(), place
        for key in expected:
            assert_equal(actual[key], expected[key], f"{place}.{key}")
    elif isinstance(expected, list | tuple):
        assert type(actual) is type(expected), place
        assert len(actual) == len(expected), place
        for index, item in enumerate(expected):
            assert_equal(actual[index], item, f"{place}.{index}")
    else:
        assert actual == expected, place


def digests(directory: Path) -> dict[str, str]:
    """Name -> sha256 of all files in a directory."""
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in directory.iterdir()
    }


def pages_of(checkpoint: Path) -> list[Path]:
    return sorted(checkpoint.glob("rank-*.page-*"))


def inodes(paths: Iterable[Path]) -> set[int]:
    return {path.stat().st_ino for path in paths}


def run_pages(run: Path) -> list[Path]:
    return sorted((run / RANK).glob("page-*.[ab]"))


def tensors_in(checkpoint: Path) -> dict[str, torch.Tensor]:
    """Key -> tensor, read by DCP."""
    metadata = dcp.FileSystemReader(checkpoint).read_metadata()
    found = {
        key: torch.full(entry.size, 77, dtype=entry.properties.dtype)
        for key, entry in metadata.state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    dcp.load(found, checkpoint_id=checkpoint, no_dist=True)
    return found


def assert_holds_toy(checkpoint: Path, step: int) -> None:
    """Check that a checkpoint of a Toy is there, whole, and of this step."""
    assert verify(checkpoint).good
    found = tensors_in(checkpoint)
    assert {key for key in found if key.startswith("model.")} == {
        f"model.{name}" for name, *_ in MODEL[0] + MODEL[1]
    }
    for key, tensor in found.items():
        value = 1 - step / 4 if key.startswith("model.") else step
        assert torch.equal(tensor, torch.full_like(tensor, value)), key


def names_in(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir()) if directory.exists() else []


def assert_nothing_left(run: Path, folder: Path, published: Sequence[str] = ()) -> None:
    """Check that only these checkpoints are there, and no names but the run's own."""
    assert names_in(folder) == sorted(published)
    names = names_in(run / RANK)
    own = re.compile(
        r"run\.json|striping\.json|lock|dirty|clean|layout-[0-9a-f]{32}"
        r"|commit-\d{10}(\.\d+)?|page-\d{6}\.[ab](\.next)?"
    )
    assert [name for name in names if not own.fullmatch(name)] == []


def published_toy(directory: Path, steps: int = 3) -> Path:
    """Publish a run that is called "origin"; return the checkpoint."""
    toy = Toy(directory / "origin")
    for _ in range(steps):
        toy.step()
    toy.store.checkpoint(directory / "checkpoint")
    toy.store.close()
    return directory / "checkpoint"
