"""One model trained on several ranks, held by them in any way, published and begun from again.

Gradients are injected, the same whole ones everywhere, so that what is published is to equal,
bit for bit, what one process publishes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import itertools
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import muon
import tierstore
from tests.rank_programs.meshes import cpu_mesh
from tests.rank_programs.training import unevenly
from tests.support import stock_reader
from tests.support.attempts import attempt
from tests.support.kept import commit_with, kept_by, unwanted, wanted
from tests.support.published import PAGE_BYTES, make_groups
from tests.support.toy import verified
from tierstore.storage.folder import LocalFolder

EXTRA = {"position": (7, [torch.arange(3)])}


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """Work of all ranks: open a run, start or resume, train, publish."""

    run: Path | list[Path]
    """The run directory, or several directories."""
    layout: str
    """One of LAYOUTS: how ranks hold the model."""
    steps: tuple[int, ...]
    checkpoint: Path | None = None
    begin_from: Path | None = None
    rewind: bool = False
    """True: the run has steps, and goes back to ``begin_from``."""
    dtype: torch.dtype = torch.float32
    seed: int = 0
    partition: str = "auto"
    awkward: bool = True
    """True: the model has frozen and tied parameters."""
    bias_of_head: bool = False
    """True: the model has an additional parameter."""
    options: dict[str, Any] = field(default_factory=dict)
    """Options of checkpoint()."""
    normuon_beta: float | None = 0.9
    """Not None: with states of another shape than their parameter."""
    store: dict[str, Any] = field(default_factory=dict)
    """Options of TierStore."""


def make_model(job: Job) -> nn.Module:
    """A model with a buffer, and maybe with frozen parameters, one of them tied."""
    model: Any = stock_reader.make_model("layers", job.seed, job.dtype)
    if job.bias_of_head:
        model.head.bias = nn.Parameter(torch.zeros(stock_reader.VOCABULARY, dtype=job.dtype))
    if not job.awkward:
        return model
    model.second.requires_grad_(False)
    model.again = nn.Linear(23, 17, bias=False)
    model.again.weight = model.second.weight
    model.twin = model.hidden  # Tied and trained.
    return model


def by_rows(model: nn.Module) -> None:
    fully_shard(model, mesh=cpu_mesh())


def replicated_rows(model: nn.Module) -> None:
    """HSDP."""
    names = ("replica", "shard")
    mesh = cpu_mesh(2, dist.get_world_size() // 2, names=names)
    fully_shard(model, mesh=mesh)


def _replace_parameters(model: nn.Module, place: Callable[[nn.Parameter], nn.Parameter]) -> None:
    placed: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                if parameter not in placed:
                    placed[parameter] = place(parameter)
                    placed[parameter].requires_grad_(parameter.requires_grad)
                module._parameters[name] = placed[parameter]


def by_columns(model: nn.Module) -> None:
    mesh = cpu_mesh()

    def place(parameter: nn.Parameter) -> nn.Parameter:
        return nn.Parameter(distribute_tensor(parameter.data, mesh, [Shard(parameter.ndim - 1)]))

    _replace_parameters(model, place)


def unevenly_by_rows(model: nn.Module) -> None:
    """Frozen parameters stay whole."""
    mesh = cpu_mesh()

    def place(parameter: nn.Parameter) -> nn.Parameter:
        if not parameter.requires_grad:
            return parameter
        return unevenly(parameter.data, mesh, [Shard(0)], seed=parameter.numel())

    _replace_parameters(model, place)


LAYOUTS: dict[str, Callable[[nn.Module], Any]] = {
    "copies": lambda model: None,
    "rows": by_rows,
    "columns": by_columns,
    "uneven": unevenly_by_rows,
    "hsdp": replicated_rows,
}


def train_step(model: nn.Module, optimizer: muon.Muon, step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    for parameter in model.parameters():
        gradient = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
        if not parameter.requires_grad:
            continue
        if isinstance(parameter, DTensor):
            mesh, placements = parameter.device_mesh, parameter.placements
            if hasattr(parameter, "seed_of_cuts"):
                seed = parameter.seed_of_cuts
                gradient = unevenly(gradient, mesh, list(placements), seed).detach()
            else:
                gradient = distribute_tensor(gradient, mesh, placements)
        parameter.grad = gradient
    optimizer.step()


def open_job(job: Job) -> tuple[nn.Module, tierstore.TierStore, muon.Muon]:
    model = make_model(job)
    LAYOUTS[job.layout](model)
    options = {"page_bytes": PAGE_BYTES, "timeout": 60.0, **job.store}
    store = unwanted(tierstore.TierStore(job.run, **options))
    groups = make_groups(model)
    groups[0]["normuon_beta"] = job.normuon_beta
    optimizer = muon.Muon(groups, store=store, partition=job.partition)
    return model, store, optimizer


def work(job: Job) -> tuple[int, str]:
    """Do a job; return the step that it began from, and the state that was found there."""
    model, store, optimizer = open_job(job)
    with store:
        with wanted(store) as kept:
            began = optimizer.restore(checkpoint=job.begin_from, rewind=job.rewind)
        for step in job.steps:
            train_step(model, optimizer, step)
        if job.checkpoint is not None:
            commit_with(store, EXTRA)
            store.checkpoint(job.checkpoint, model=model, **job.options)
    return began, repr(kept.get("state"))


def parameters_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {
        name: (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach().clone()
        for name, tensor in model.named_parameters()
    }


def die_before_a_commit(job: Job) -> bool:
    """Leave what a job leaves that fails in its first step."""
    _, store, optimizer = open_job(job)
    optimizer.state_dict()  # Lays out the pages.
    with pytest.raises(RuntimeError, match="no luck"), store:
        raise RuntimeError("no luck")
    return True


def look(job: Job) -> tuple[int, str, str]:
    """Open a job's store and close it; return what it has before restore(), and its warning."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        _, store, _ = open_job(job)
    with store:
        text = " ".join(str(each.message) for each in caught)
        return store.committed.step, repr(kept_by(store)), text


def fail_to_open(job: Job) -> tuple[str, str]:
    with pytest.raises(tierstore.TierstoreError) as raised:
        open_job(job)
    return type(raised.value).__name__, str(raised.value)


def fail_to_open_where(job: Job, failing: int, operation: str) -> tuple[str, str]:
    """Open a store where an operation fails on one rank."""
    full = tierstore.StorageError("write", path="/disk/file", errno=errno.ENOSPC)
    with contextlib.ExitStack() as stack:
        if dist.get_rank() == failing:
            stack.enter_context(mock.patch(operation, side_effect=full))
        return fail_to_open(job)


def fail_to_restore(job: Job) -> tuple[str, str]:
    _, store, optimizer = open_job(job)
    with store, pytest.raises(tierstore.TierstoreError) as raised:
        optimizer.restore()
    return type(raised.value).__name__, str(raised.value)


def fail_to_begin(job: Job, good: Path) -> tuple[str, str]:
    """Begin from a bad checkpoint, then from a good one; return how the first ended."""
    model, store, optimizer = open_job(job)
    with store:
        before = parameters_of(model)
        with pytest.raises(tierstore.TierstoreError) as raised:
            optimizer.restore(checkpoint=job.begin_from)
        for name, tensor in parameters_of(model).items():
            assert torch.equal(tensor, before[name]), name
        assert optimizer.restore(checkpoint=good) == 3
    return type(raised.value).__name__, str(raised.value)


def fail_to_publish(job: Job, failing: int, refused: str = ".hidden") -> tuple[str, str, bool]:
    """Publish to a path that is refused on one rank, then to one that is not.

    Returns:
        How the first ended, and whether the run then went on.
    """
    assert job.checkpoint is not None
    model, store, optimizer = open_job(job)
    with store:
        train_step(model, optimizer, 1)
        name = refused if dist.get_rank() == failing else "good"
        with pytest.raises(tierstore.TierstoreError) as raised:
            store.checkpoint(job.checkpoint.with_name(name))
        train_step(model, optimizer, 2)
        store.checkpoint(job.checkpoint, model=model)
    return type(raised.value).__name__, str(raised.value), store.committed.step == 2


def interrupted(job: Job, failing: int) -> tuple[str, str]:
    """Publish while one rank is interrupted as it links its pages; return how it ended."""

    def interrupt(*arguments: Any) -> None:
        raise KeyboardInterrupt

    assert job.checkpoint is not None
    model, store, optimizer = open_job(job)
    train_step(model, optimizer, 1)
    store.synchronize()
    with contextlib.ExitStack() as stack:
        if dist.get_rank() == failing:
            stack.enter_context(mock.patch.object(LocalFolder, "link", interrupt))
        with pytest.raises(BaseException) as raised:
            store.checkpoint(job.checkpoint, model=model)
    with pytest.raises(tierstore.TierstoreError):
        train_step(model, optimizer, 2)
    store.close()
    return type(raised.value).__name__, str(raised.value)


def paged(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Without buffers and frozen parameters, which restore() leaves alone."""
    unpaged = ("model.second.", "model.again.", "model.mean")
    return {key: tensor for key, tensor in tensors.items() if not key.startswith(unpaged)}


def on_disk(directory: Path, disks: tuple[int, ...]) -> Path:
    """Return the directory that stands for the disk of this rank."""
    return directory / f"disk-{disks[dist.get_rank()]}"


def work_in_parts(job: Job, disks: tuple[int, ...]) -> tuple[int, str]:
    """As work(), with run and checkpoint on disks that not all ranks see."""
    assert job.checkpoint is not None
    assert isinstance(job.run, Path)
    run, checkpoint = on_disk(job.run.parent, disks), on_disk(job.checkpoint.parent, disks)
    return work(
        dataclasses.replace(
            job, run=run / job.run.name, checkpoint=checkpoint / job.checkpoint.name
        )
    )


def fail_to_open_in_parts(job: Job, disks: tuple[int, ...]) -> tuple[str, str]:
    assert isinstance(job.run, Path)
    return fail_to_open(dataclasses.replace(job, run=on_disk(job.run.parent, disks) / job.run.name))


def work_in_turned_directories(job: Job) -> tuple[int, str]:
    """As work(), but each rank after the first has the directories in the other order."""
    assert isinstance(job.run, list)
    return work(dataclasses.replace(job, run=job.run[:: -1 if dist.get_rank() else 1]))


def fail_to_publish_in_parts(
    job: Job,
    disks: tuple[int, ...],
    failing: int,
    operation: str,
    call: int,
    error: BaseException,
) -> tuple[str, str]:
    """Publish in parts while an operation fails on one rank; return how it ended.

    After an interrupt that is all; else the run goes on and publishes again.
    """
    calls = itertools.count(1)
    original = getattr(LocalFolder, operation)

    def fail(*arguments: Any) -> Any:
        if next(calls) == call:
            raise error
        return original(*arguments)

    assert job.checkpoint is not None
    place = on_disk(job.checkpoint.parent, disks) / job.checkpoint.name
    model, store, optimizer = open_job(job)
    train_step(model, optimizer, 1)
    with contextlib.ExitStack() as stack:
        if dist.get_rank() == failing:
            stack.enter_context(mock.patch.object(LocalFolder, operation, fail))
        with pytest.raises(BaseException) as raised:
            store.checkpoint(place, keep_last=2)
    if isinstance(error, Exception):
        train_step(model, optimizer, 2)
        store.checkpoint(place.with_name("later"), model=model)
    store.close()
    return type(raised.value).__name__, str(raised.value)


def unreadable_meanwhile(job: Job, failing: int, after: str) -> tuple[str, str]:
    """Publish while the disk of one rank cannot be read; return how the next call ended."""

    def read(*arguments: Any) -> None:
        raise tierstore.StorageError("read", path="/disk/file", errno=errno.EIO)

    assert job.checkpoint is not None
    model, store, optimizer = open_job(job)
    with contextlib.ExitStack() as stack:
        if dist.get_rank() == failing:
            stack.enter_context(mock.patch.object(LocalFolder, "read", read))
        train_step(model, optimizer, 1)
        store.checkpoint(job.checkpoint, model=model)
        verified(store)
    calls: dict[str, Callable[[], object]] = {
        "step": lambda: train_step(model, optimizer, 2),
        "checkpoint": lambda: store.checkpoint(f"{job.checkpoint}-later"),
    }
    with pytest.raises(tierstore.TierstoreError) as raised:
        calls[after]()
    store.close()
    return type(raised.value).__name__, str(raised.value)


def copied_pages(job: Job, failing: int | None) -> tuple[int, str]:
    """As work(), where nothing can be linked; one rank may find a page that is damaged."""

    def link(*arguments: Any) -> None:
        raise tierstore.StorageError("link", path="/disk/file", errno=errno.EXDEV)

    assert job.checkpoint is not None
    model, store, optimizer = open_job(job)
    with store, mock.patch.object(LocalFolder, "link", link):
        for step in job.steps:
            train_step(model, optimizer, step)
        commit_with(store, EXTRA)
        store.synchronize()
        if dist.get_rank() == failing:
            for page in job.run.glob(f"rank-{failing:05d}/page-*"):
                damaged = bytearray(page.read_bytes())
                damaged[600] ^= 1
                page.write_bytes(damaged)
        try:
            publication = store.checkpoint(job.checkpoint, model=model)
        except tierstore.TierstoreError as error:
            return 0, f"{type(error).__name__}: {error}"
        assert publication.done
    return publication.bytes_copied, ""


def publish_with_an_uneven_frozen_parameter(directory: Path) -> str:
    """Return what publishing raises."""
    model = nn.Linear(4, 6)
    mesh = cpu_mesh()
    model.bias = unevenly(model.bias.data, mesh, [Shard(0)], seed=2).requires_grad_(False)
    assert model.bias.to_local().shape != (3,)
    with tierstore.TierStore(directory / "run", timeout=60.0) as store:
        optimizer = muon.Muon([{"params": [("weight", model.weight)]}], store=store)
        model.weight.grad = torch.ones_like(model.weight)
        optimizer.step()
        return attempt(lambda: store.checkpoint(directory / "checkpoint", model=model))
