"""state_dict(): private mappings of page files, which cost no memory and keep their values."""

from __future__ import annotations

import ctypes
import errno
import re
import shutil
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

import muon
import tierstore
from tests.support import kernel, training
from tests.support.faults import Fault, FaultyStorage
from tests.support.isolated_process import result_apart
from tests.support.published import Ours, Reference, assert_equal, inodes, run_pages
from tests.support.references import assert_same
from tests.support.toy import RANK, Toy, open_muon, resumed
from tierstore.storage.select import open_storage

MIB = 2**20
HOST_MEMORY = 25 * MIB


def deleted_mappings(directory: Path) -> int:
    """Bytes of deleted files below a directory that this process maps."""
    text = Path("/proc/self/maps").read_text()
    pattern = rf"^([0-9a-f]+)-([0-9a-f]+) .* {re.escape(str(directory))}/.*\(deleted\)$"
    found = re.findall(pattern, text, re.M)
    return sum(int(end, 16) - int(begin, 16) for begin, end in found)


@pytest.mark.quick(1)
@pytest.mark.parametrize("engine", ["io_uring", "libaio", "aiofiles"])
@pytest.mark.parametrize("commit_every", [1, 2, None])
def test_tensors_keep_their_values_while_training_continues(
    commit_every: int | None, engine: str, tmp_path: Path
) -> None:
    """Two state dicts, from steps in both slots, with cut and empty parameters."""
    store, optimizer, parameters = open_muon(
        tmp_path, buffers=2, commit_every=commit_every, engine=engine
    )
    training.train(optimizer, parameters, range(1, 4))
    saved = [optimizer.state_dict()]
    expected = [deepcopy(saved[0])]
    training.train(optimizer, parameters, range(4, 5))
    saved.append(optimizer.state_dict())
    expected.append(deepcopy(saved[1]))
    training.train(optimizer, parameters, range(5, 25))
    store.synchronize()
    assert_same(saved, expected)
    reference_parameters = training.make_parameters(torch.bfloat16)
    reference = muon.Muon(training.make_groups(reference_parameters))
    training.train(reference, reference_parameters, range(1, 5))
    assert_same(saved[1]["state"], reference.state_dict()["state"])
    training.train(reference, reference_parameters, range(5, 25))
    training.assert_identical(
        training.snapshot(optimizer, parameters), training.snapshot(reference, reference_parameters)
    )
    store.close()
    shutil.rmtree(tmp_path)
    assert_same(saved, expected)  # The store is closed and its files are gone.


def test_writes_to_the_tensors_do_not_reach_the_run(tmp_path: Path) -> None:
    store, optimizer, parameters = open_muon(tmp_path, buffers=2)
    training.train(optimizer, parameters, range(1, 4))
    store.synchronize()
    before = {path: path.read_bytes() for path in run_pages(tmp_path)}
    saved = optimizer.state_dict()
    for states in saved["state"].values():
        for tensor in states.values():
            tensor.fill_(7)
    assert {path: path.read_bytes() for path in run_pages(tmp_path)} == before
    for states in saved["state"].values():
        for tensor in states.values():
            assert (tensor == 7).all()
    reference_parameters = training.make_parameters(torch.bfloat16)
    reference = muon.Muon(training.make_groups(reference_parameters))
    training.train(reference, reference_parameters, range(1, 4))
    assert_same(optimizer.state_dict()["state"], reference.state_dict()["state"])
    store.close()


def test_files_are_freed_with_the_tensors(tmp_path: Path) -> None:
    """Mapped files cost disk space; later, pages are written in place again."""
    store, optimizer, parameters = open_muon(tmp_path, buffers=2)
    training.train(optimizer, parameters, range(1, 3))
    saved = optimizer.state_dict()
    training.train(optimizer, parameters, range(3, 6))
    store.synchronize()
    # The mapped pages, and the unnamed files of parameters in several pages.
    assert deleted_mappings(tmp_path) > store.stats().state_bytes / 2
    one = saved["state"][0]["momentum_buffer"]
    expected = one.clone()
    del saved
    page = next(path for path in run_pages(tmp_path) if path.name == "page-000000.a")
    assert 0 < deleted_mappings(tmp_path) <= page.stat().st_size
    assert torch.equal(one, expected)
    del one
    assert deleted_mappings(tmp_path) == 0
    before = inodes(run_pages(tmp_path))
    training.train(optimizer, parameters, range(6, 9))
    store.synchronize()
    assert inodes(run_pages(tmp_path)) == before
    assert not list((tmp_path / RANK).glob("*.next"))
    store.close()


def test_torch_save_writes_each_tensor_once(tmp_path: Path) -> None:
    """It does not save the whole page of a tensor."""
    store, optimizer, parameters = open_muon(tmp_path / "run", buffers=2)
    training.train(optimizer, parameters, range(1, 4))
    saved = optimizer.state_dict()
    torch.save(saved, tmp_path / "optimizer.pt")
    nbytes = sum(t.nbytes for states in saved["state"].values() for t in states.values())
    assert nbytes < (tmp_path / "optimizer.pt").stat().st_size < nbytes + 40_000
    assert_same(torch.load(tmp_path / "optimizer.pt", weights_only=True), saved)
    store.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_loaded_back(dtype: torch.dtype, tmp_path: Path) -> None:
    """Loaded at once, from the files that are mapped, and after further steps."""
    store, optimizer, parameters = open_muon(tmp_path, dtype, buffers=2)
    training.train(optimizer, parameters, range(1, 4))
    saved = optimizer.state_dict()
    expected = deepcopy(saved)
    values = {name: parameter.detach().clone() for name, parameter in parameters.items()}
    optimizer.load_state_dict(saved)
    assert_same(saved, expected)
    assert_same(optimizer.state_dict(), expected)
    training.train(optimizer, parameters, range(4, 7))
    ended = training.snapshot(optimizer, parameters)
    for name, parameter in parameters.items():
        parameter.data.copy_(values[name])
    optimizer.load_state_dict(saved)
    assert_same(saved, expected)
    training.train(optimizer, parameters, range(4, 7))
    training.assert_identical(training.snapshot(optimizer, parameters), ended)
    store.close()


def test_state_of_one_parameter_reads_its_pages_alone(tmp_path: Path) -> None:
    """optimizer.state[p] also keeps its values."""
    store, optimizer, parameters = open_muon(tmp_path, buffers=2)
    training.train(optimizer, parameters, range(1, 4))
    read = store.stats().bytes_read
    tensors = {
        (name, state): optimizer.state[parameters[name]][state]
        for name, state in (("wide", "momentum_buffer"), ("embedding", "exp_avg"))
    }
    largest = max(path.stat().st_size for path in run_pages(tmp_path))
    assert store.stats().bytes_read - read <= 8 * largest < store.stats().state_bytes
    reference_parameters = training.make_parameters(torch.bfloat16)
    reference = muon.Muon(training.make_groups(reference_parameters))
    training.train(reference, reference_parameters, range(1, 4))
    training.train(optimizer, parameters, range(4, 9))
    store.synchronize()
    for (name, state), tensor in tensors.items():
        assert torch.equal(tensor, reference.state[reference_parameters[name]][state])
    store.close()


def test_publishing_while_a_state_dict_is_mapped(tmp_path: Path) -> None:
    ours = Ours(tmp_path / "run").train(1, 2)
    saved = ours.optimizer.state_dict()
    expected = deepcopy(saved)
    ours.store.checkpoint(tmp_path / "checkpoint", model=ours.model)
    ours.train(3, 4, 5)
    assert_same(saved, expected)
    state = {"model": ours.model.state_dict()}
    dcp.load(state, checkpoint_id=tmp_path / "checkpoint", no_dist=True)
    assert_equal(state["model"], Reference("layers").train(1, 2).model_state())
    ours.store.close()


def test_tensors_keep_their_values_across_restore(tmp_path: Path) -> None:
    """Steps after restore() overwrite later pages, but no mapped file."""
    toy = Toy(tmp_path)
    toy.step()
    toy.step()
    toy.store.synchronize()
    toy.step()
    states = toy.store.pages.read_states()
    with pytest.raises(tierstore.SweepError), toy.store.pages.sweep() as pages:
        next(pages)
    assert toy.store.restore() in (2, 3)
    at = toy.store.step
    toy.assert_at(at)
    for _ in range(3):
        toy.step()
    toy.assert_at(at + 3)
    assert torch.equal(states["second"]["average"], torch.full((9,), 3.0))
    toy.store.close()
    resumed(tmp_path, at + 3).store.close()


def test_tensors_keep_their_values_when_the_run_is_opened_again(tmp_path: Path) -> None:
    """By the same process, as a notebook does."""
    toy = Toy(tmp_path)
    toy.step()
    states = toy.store.pages.read_states()
    toy.store.close()
    for step in (2, 3, 4, 5):
        toy = resumed(tmp_path, step - 1)
        toy.step()
        toy.store.close()
        assert torch.equal(states["second"]["average"], torch.full((9,), 1.0))
    toy = Toy(tmp_path, overwrite=True)
    toy.step()
    toy.step()
    toy.store.close()
    assert torch.equal(states["second"]["average"], torch.full((9,), 1.0))


def test_a_damaged_page_is_not_handed_out(tmp_path: Path) -> None:
    """Reads of a mapping are not checked, so the page is checked before."""
    toy = Toy(tmp_path)
    toy.step()
    toy.store.synchronize()
    page = run_pages(tmp_path)[0]
    data = bytearray(page.read_bytes())
    data[page.stat().st_size - 4096 + 520] ^= 1
    page.write_bytes(data)
    with pytest.raises(tierstore.CorruptionError, match=r"page-000000\.a"):
        toy.store.pages.read_states()
    toy.store.__exit__(RuntimeError)


# ----------------------------------------------------------------------------- a full disk


def open_faulty(directory: Path) -> tuple[FaultyStorage, tierstore.TierStore, muon.Muon, Any]:
    storage = FaultyStorage(open_storage(directory / RANK))
    parameters = training.make_parameters(torch.bfloat16)
    store = tierstore.TierStore(storage, page_bytes=10000, buffers=2)
    return storage, store, muon.Muon(training.make_groups(parameters), store=store), parameters


@pytest.mark.parametrize("kind", ["lost", "misdirected"])
def test_a_lost_write_of_a_page_in_memory_is_not_handed_out(kind: Any, tmp_path: Path) -> None:
    """The page is right in memory; its file, which the tensors would map, is not."""
    storage = FaultyStorage(open_storage(tmp_path / "run" / RANK))
    toy = Toy(storage, buffers=None, host_memory=MIB)
    storage.arm(Fault(kind, "write", call=1))
    toy.step()
    toy.store.synchronize()
    with pytest.raises(tierstore.CorruptionError, match=r"page-\d+\.[ab]: "):
        toy.store.pages.read_states()
    toy.step()
    toy.store.synchronize()
    toy.assert_at(2)
    toy.store.close()


@pytest.mark.parametrize("operation", ["scratch", "map", "read"])
def test_a_state_dict_that_fails_can_be_retried(operation: str, tmp_path: Path) -> None:
    """Reading changes nothing, so training continues."""
    storage, store, optimizer, parameters = open_faulty(tmp_path)
    training.train(optimizer, parameters, range(1, 4))
    store.synchronize()
    storage.arm(Fault("error", operation, call=2, errno=errno.ENOSPC))  # type: ignore[arg-type]
    with pytest.raises(tierstore.StorageError) as caught:
        optimizer.state_dict()
    assert caught.value.errno == errno.ENOSPC
    del caught  # Its traceback keeps the mappings alive.
    storage.disarm()
    assert deleted_mappings(tmp_path) == 0
    training.train(optimizer, parameters, range(4, 6))
    reference_parameters = training.make_parameters(torch.bfloat16)
    reference = muon.Muon(training.make_groups(reference_parameters))
    training.train(reference, reference_parameters, range(1, 6))
    assert_same(optimizer.state_dict()["state"], reference.state_dict()["state"])
    store.close()


def test_a_full_disk_with_a_mapped_state_dict_fails_the_step(tmp_path: Path) -> None:
    """The step fails like one whose write fails, and the commit before it is intact."""
    storage, store, optimizer, parameters = open_faulty(tmp_path)
    training.train(optimizer, parameters, range(1, 4))
    store.synchronize()
    saved = optimizer.state_dict()
    expected = deepcopy(saved)
    training.train(optimizer, parameters, range(4, 5))
    store.synchronize()
    storage.arm(Fault("error", "create", call=2, errno=errno.ENOSPC))
    training.set_gradients(parameters, 5)
    with pytest.raises(tierstore.StorageError) as caught:
        optimizer.step()
    assert caught.value.errno == errno.ENOSPC
    storage.disarm()
    with pytest.raises(tierstore.StoreFailedError):
        optimizer.state_dict()
    assert optimizer.restore() == 4
    assert_same(saved, expected)
    del saved
    training.train(optimizer, parameters, range(5, 8))
    reference_parameters = training.make_parameters(torch.bfloat16)
    reference = muon.Muon(training.make_groups(reference_parameters))
    training.train(reference, reference_parameters, range(1, 8))
    assert_same(optimizer.state_dict()["state"], reference.state_dict()["state"])
    store.close()


# ---------------------------------------------------------------------------- DCP's helpers


@pytest.mark.quick(4)
@pytest.mark.parametrize("published", [True, False])
@pytest.mark.parametrize("begun", [False, True])
@pytest.mark.parametrize("flat", [False, True])
def test_loaded_with_dcp_through_its_helpers(
    flat: bool, begun: bool, published: bool, tmp_path: Path
) -> None:
    """get_optimizer_state_dict(), dcp.load() into it, set_optimizer_state_dict().

    From what stock optimizers saved, and from what our run published; before the first step
    and after some.
    """
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    reference = Reference("layers").train(1, 2, 3)
    if published:
        origin = Ours(tmp_path / "origin").train(1, 2, 3)
        origin.store.checkpoint(tmp_path / "checkpoint", model=origin.model)
        origin.store.close()
    else:
        state = {
            "model": reference.model.state_dict(),
            "optimizer": get_optimizer_state_dict(
                reference.model, reference.optimizers, options=options
            ),
        }
        dcp.save(state, checkpoint_id=tmp_path / "checkpoint", no_dist=True)
    ours = Ours(tmp_path / "run", seed=3)
    if begun:
        ours.train(11, 12)
    state = {
        "model": ours.model.state_dict(),
        "optimizer": get_optimizer_state_dict(ours.model, ours.optimizer, options=options),
    }
    # The groups have keys that torch.optim's groups do not have.
    planner = DefaultLoadPlanner(allow_partial_load=not published)
    dcp.load(state, checkpoint_id=tmp_path / "checkpoint", planner=planner, no_dist=True)
    ours.model.load_state_dict(state["model"])
    set_optimizer_state_dict(ours.model, ours.optimizer, state["optimizer"], options=options)
    del state
    assert ours.store.step == (2 if begun else 0)
    for step in (4, 5):
        assert_equal(ours.train(step).model.state_dict(), reference.train(step).model_state())
    ours.store.close()


# ---------------------------------------------------------------------------------- memory


def anonymous() -> int:
    """Resident bytes of anonymous memory, without free memory of the allocator."""
    ctypes.CDLL(None).malloc_trim(0)
    text = Path("/proc/self/status").read_text(encoding="ascii")
    match = re.search(r"^RssAnon:\s+(\d+) kB", text, re.M)
    assert match
    return int(match[1]) * 1024


def large_optimizer(directory: Path) -> tuple[tierstore.TierStore, muon.Muon, list[nn.Parameter]]:
    """AdamW parameters cut over several pages, and Muon parameters."""
    parameters = [nn.Parameter(torch.ones(1024, 4096, dtype=torch.bfloat16)) for _ in range(3)]
    matrices = [nn.Parameter(torch.ones(64, 32768, dtype=torch.bfloat16)) for _ in range(3)]
    store = tierstore.TierStore(directory, host_memory=HOST_MEMORY, page_bytes="8MiB")
    groups = [{"params": parameters, "algorithm": "adamw"}, {"params": matrices}]
    for parameter in (*parameters, *matrices):
        parameter.grad = torch.ones_like(parameter)
    return store, muon.Muon(groups, store=store), [*parameters, *matrices]


def touch(state_dict: dict[str, Any]) -> int:
    """Read all of a state dict; return its bytes."""
    tensors = [t for states in state_dict["state"].values() for t in states.values()]
    for tensor in tensors:
        assert torch.isfinite(tensor.view(-1)[::512].sum())
    return sum(tensor.nbytes for tensor in tensors)


def map_states(directory: Path) -> tuple[int, list[int]]:
    torch.set_num_threads(1)
    store, optimizer, _ = large_optimizer(directory / "run")
    optimizer.step()
    touch(optimizer.state_dict())  # Allocations that happen once.
    before = anonymous()
    saved = optimizer.state_dict()
    nbytes = touch(saved)
    mapped = anonymous()
    for _ in range(2):
        optimizer.step()
    stepped = anonymous()
    touch(saved)
    torch.save(saved, directory / "optimizer.pt")
    written = anonymous()
    store.close()
    return nbytes, [value - before for value in (mapped, stepped, written)]


def load_states(directory: Path) -> tuple[int, list[int], bool]:
    torch.set_num_threads(1)
    saved = torch.load(directory / "optimizer.pt", mmap=True, weights_only=True)
    store, optimizer, _ = large_optimizer(directory / "other")
    optimizer.step()
    kernel.reset_peak()
    before = anonymous()
    optimizer.load_state_dict(saved)
    peak = kernel.anonymous_peak() - before
    store.synchronize()
    equal = [
        torch.equal(optimizer.state_dict()["state"][index][state], tensor)
        for index, states in saved["state"].items()
        for state, tensor in states.items()
    ]
    store.close()
    return touch(saved), [peak, anonymous() - before], all(equal)


@pytest.mark.long
def test_costs_no_anonymous_memory(tmp_path: Path) -> None:
    """A state dict several times the budget costs none, nor does loading a mapped one."""
    nbytes, grown = result_apart(map_states, tmp_path)
    assert nbytes > 6 * HOST_MEMORY
    assert max(grown) < 6 * MIB
    nbytes, grown, equal = result_apart(load_states, tmp_path)
    assert equal
    assert nbytes > 6 * HOST_MEMORY
    assert max(grown) < 12 * MIB
