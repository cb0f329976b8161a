"""Values of parameters that no step reads are written for commits only, unless each step is one."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import muon
import tierstore
from tests.support.encoded_training import (
    ADAMW,
    SHAPES,
    gradient,
    groups_of,
    parameters_of,
    step_in_place,
    train,
)
from tests.support.faults import Fault, FaultyStorage
from tests.support.independent_reader import read_run
from tierstore.storage.select import open_storage

PLACES = ("nvme", "host", "moved", "committed")
# Few buffers, and no page rests in memory unless it is moved there.
SMALL: dict[str, Any] = {"host_memory": "4MiB", "buffers": 4, "page_bytes": 16384}


def optimizer_of(parameters: dict[str, torch.nn.Parameter], **options: Any) -> muon.Muon:
    # Some CPUs have no instructions for bfloat16.
    return muon.Muon(groups_of(parameters), ns_dtype=torch.float32, **options)


@pytest.mark.parametrize(
    ("dtype", "master", "each_step", "at_commits"),
    [
        # Parameters beside remainders are compared with what pages have.
        (torch.bfloat16, "remainder", 2 + 2 + 2, 0),
        (torch.bfloat16, None, 4 + 2, 0),
        (torch.float32, None, 4, 4),
    ],
    ids=str,
)
def test_steps_write_the_ideal_bytes(
    tmp_path: Path, dtype: torch.dtype, master: str | None, each_step: int, at_commits: int
) -> None:
    parameter = torch.nn.Parameter(torch.zeros(1024, 1024, dtype=dtype))
    with tierstore.TierStore(tmp_path, host_memory="32MiB", buffers=2, commit_every=4) as store:
        optimizer = muon.Muon([("w", parameter)], store=store, master=master, ns_steps=0)
        parameter.grad = torch.ones_like(parameter)
        written, read = [], []
        for step in range(1, 10):
            before = store.stats()
            optimizer.step()
            store.commit()
            if step == 9:  # Not due.
                store.synchronize()
            after = store.stats()
            written.append(after.bytes_written - before.bytes_written)
            read.append(after.bytes_read - before.bytes_read)
    numel = parameter.numel()
    expected = [each_step + (at_commits if step in (4, 8, 9) else 0) for step in range(1, 10)]
    assert [found / numel for found in written] == pytest.approx(expected, rel=0.005)
    reads = 4 if master or dtype == torch.float32 else 6
    assert [found / numel for found in read[1:]] == pytest.approx([reads] * 8, rel=0.005)


@pytest.mark.quick(2)
@pytest.mark.parametrize("tier", ["nvme", "host", "both"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("commit_every", [3, None])
def test_every_commit_has_the_parameters(
    tmp_path: Path, dtype: torch.dtype, commit_every: int | None, tier: str
) -> None:
    """Also commits that are not due, and parameters without a gradient in the last steps."""
    options = {} if dtype == torch.float32 else {"master": "remainder"}
    expected = parameters_of(dtype)
    reference = optimizer_of(expected, **options)

    def do(step: int, parameters: dict[str, Any], optimizer: muon.Muon) -> None:
        has_all = step % 3 == 0
        for name, parameter in parameters.items():
            value = gradient(name, step, parameter).to(parameter.dtype)
            parameter.grad = value if has_all or name not in ADAMW else None
        optimizer.step()

    for begin, end in ((0, 1), (1, 3), (3, 7), (7, 8)):
        parameters = parameters_of(dtype)
        with tierstore.TierStore(
            tmp_path, commit_every=commit_every, resume=True, **SMALL
        ) as store:
            optimizer = optimizer_of(parameters, store=store, **options)
            assert optimizer.restore() == begin
            for step in range(begin, end):
                if tier != "nvme" and (tier == "host" or step % 2):
                    store.move("host" if step % 4 < 3 else "nvme")
                do(step, parameters, optimizer)
                do(step, expected, reference)
                store.pages.prefetch()
            store.synchronize()
            content = read_run(tmp_path)
        wanted = reference.store.pages.read_states()
        for name, parameter in parameters.items():
            assert torch.equal(parameter, expected[name]), name
            if dtype == torch.float32:
                wanted[name]["master"] = parameter
            for state, tensor in wanted[name].items():
                value = tensor.detach().float().numpy()
                assert np.array_equal(content.states[name][state], value), (name, state)


def test_a_change_between_commits_is_one_in_every_tier(tmp_path: Path) -> None:
    """Parameters with remainders are compared with their former values, whatever is committed."""
    found = []
    for place, commit_every in [("memory", 1), ("memory", 4), *((p, 4) for p in PLACES)]:
        parameters = parameters_of()
        path = None if place == "memory" else tmp_path / place
        with tierstore.TierStore(path, commit_every=commit_every, page_bytes=16384) as store:
            optimizer = optimizer_of(parameters, store=store, master="remainder")
            train(parameters, optimizer, range(1))
            if place != "memory":
                store.move("host" if place == "host" else "nvme")
            train(parameters, optimizer, range(1, 2))
            before = store.pages.read_states()["wide"]["master"].clone()
            with torch.no_grad():
                parameters["wide"][3, 5] += 1
            if place == "moved":
                store.move("host")
            if place == "committed":
                store.synchronize()
            before[3, 5] = parameters["wide"][3, 5].float()
            assert torch.equal(store.pages.read_states()["wide"]["master"], before)
            with pytest.warns(UserWarning, match=r"parameter 'wide' was changed outside"):
                step_in_place(parameters, optimizer)
            found.append(store.pages.read_states())
    for states in found[1:]:
        for name in SHAPES:
            for state, tensor in found[0][name].items():
                assert torch.equal(states[name][state], tensor), (name, state)


WRITES: dict[str, Callable[[torch.nn.Parameter], Any]] = {
    "in place": lambda p: p.detach().mul_(0),
    "through data": lambda p: p.data.copy_(torch.zeros_like(p)),
    "another tensor": lambda p: setattr(p, "data", torch.zeros_like(p)),
}


@pytest.mark.quick(6)
@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("commit_every", [1, 2, 3, None])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("tier", ["nvme", "both", "host"])
def test_a_commit_has_what_its_step_left(
    tmp_path: Path, dtype: torch.dtype, commit_every: int | None, write: str, tier: str
) -> None:
    """Averages that are swapped in for a validation are in no commit; or it is refused."""
    memory = {"nvme": "300KiB", "both": "600KiB", "host": "16MiB"}[tier]
    parameters = parameters_of(dtype)
    options: dict[str, Any] = {"commit_every": commit_every, "host_memory": memory}
    store = tierstore.TierStore(tmp_path, page_bytes=16384, **options)
    optimizer = optimizer_of(parameters, store=store)
    train(parameters, optimizer, range(1))
    if commit_every in (3, None):
        store.synchronize()
    train(parameters, optimizer, range(1, 2))
    left = {name: parameter.detach().clone() for name, parameter in parameters.items()}
    for parameter in parameters.values():
        WRITES[write](parameter)
    refuses = dtype == torch.float32 and commit_every in (3, None) and write != "another tensor"
    if refuses:
        with pytest.raises(ValueError, match="were changed since step 2, and a commit holds"):
            store.synchronize()
        assert store.committed.step == 1
        kept = r"close\(\) does not commit this step, and a restart finds step 1"
        # With one slot of each page, the commit before is gone: better this one than none.
        text = kept if commit_every else f"{kept}|commits them as they are now"
        with pytest.warns(UserWarning, match=text) as warned:
            store.close()
        found = 2 if "as they are now" in str(warned[0].message) else 1
        assert (found == 2) == (commit_every is None and tier != "host")
        with tierstore.TierStore(tmp_path, resume=True, page_bytes=16384, **options) as store:
            optimizer = optimizer_of(parameters_of(dtype), store=store)
            assert optimizer.restore() == found
        return
    store.commit()
    store.synchronize()
    store.close()
    others = parameters_of(dtype)
    with tierstore.TierStore(tmp_path, resume=True, page_bytes=16384, **options) as store:
        assert optimizer_of(others, store=store).restore() == 2
        for name, parameter in others.items():
            assert torch.equal(parameter, left[name]), name


@pytest.mark.quick(4)
@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("commit_every", [1, 2])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_parameter_without_a_gradient_that_a_program_edits(
    tmp_path: Path, dtype: torch.dtype, commit_every: int, write: str
) -> None:
    """The next step commits it, though it steps no page of the parameter."""
    parameters = parameters_of(dtype)
    options: dict[str, Any] = {"commit_every": commit_every, **SMALL}
    with tierstore.TierStore(tmp_path, **options) as store:
        optimizer = optimizer_of(parameters, store=store)
        train(parameters, optimizer, range(2))
        edited = next(name for name in parameters if name in ADAMW)
        WRITES[write](parameters[edited])
        for step in (2, 3):
            for name, parameter in parameters.items():
                value = gradient(name, step, parameter).to(dtype)
                parameter.grad = None if name in ADAMW else value
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # That it was changed outside of the optimizer.
                optimizer.step()
            store.commit()
    others = parameters_of(dtype)
    with tierstore.TierStore(tmp_path, resume=True, **options) as store:
        assert optimizer_of(others, store=store).restore() == 4
        for name, parameter in others.items():
            assert torch.equal(parameter, parameters[name]), name


def test_a_commit_does_not_wait_for_the_writes_of_its_step(tmp_path: Path) -> None:
    """All writes are held back; nevertheless the commit has values as it was called."""
    release = threading.Event()
    storage = FaultyStorage(open_storage(tmp_path / "rank-00000"))
    parameter = torch.nn.Parameter(torch.randn(64, 48))
    with tierstore.TierStore(storage, commit_every=2, page_bytes=4096, host_memory="1MiB") as store:
        optimizer = muon.Muon([("w", parameter)], store=store, ns_dtype=torch.float32)
        for step in range(2):
            parameter.grad = torch.randn(64, 48)
            if step:
                storage.arm(Fault("delayed", "write", probability=1.0, release=release))
            optimizer.step()
        expected = parameter.detach().clone()
        store.commit()
        assert not release.is_set()
        with torch.no_grad():
            parameter.fill_(7.0)
        release.set()
        store.synchronize()
        assert store.committed.step == 2
    content = read_run(tmp_path)
    assert np.array_equal(content.states["w"]["master"], expected.numpy())


def test_a_parameter_that_is_freed_before_the_commit(tmp_path: Path) -> None:
    parameter = torch.nn.Parameter(torch.randn(64, 48))
    with tierstore.TierStore(tmp_path, commit_every=4, **SMALL) as store:
        optimizer = muon.Muon([("w", parameter)], store=store, ns_dtype=torch.float32)
        for _ in range(2):
            store.synchronize()
            wanted = parameter.detach().clone()
            parameter.grad = torch.randn(64, 48)
            optimizer.step()
        parameter.data.untyped_storage().resize_(0)
        with pytest.raises(ValueError, match=r"memory of parameter 'w' was freed before its last"):
            store.synchronize()
        parameter.data.untyped_storage().resize_(wanted.nbytes)
        assert optimizer.restore() == 1
        assert torch.equal(parameter, wanted)


@pytest.mark.quick(4)
@pytest.mark.parametrize("commit_every", [4, None])
@pytest.mark.parametrize(
    "change",
    [
        lambda parameter: setattr(parameter, "data", parameter.data.double()),
        lambda parameter: setattr(parameter, "data", torch.empty(0, dtype=parameter.dtype)),
        lambda parameter: setattr(parameter, "data", torch.full_like(parameter, 7.0)),
    ],
    ids=["converted", "emptied", "replaced"],
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_parameter_that_is_converted_before_the_commit(
    tmp_path: Path,
    dtype: torch.dtype,
    change: Callable[[torch.nn.Parameter], None],
    commit_every: int | None,
) -> None:
    """The commit has what the step left."""
    options = {} if dtype == torch.float32 else {"master": "remainder"}
    expected, parameters = parameters_of(dtype), parameters_of(dtype)
    reference = optimizer_of(expected, **options)
    train(expected, reference, range(2))
    with tierstore.TierStore(tmp_path, commit_every=commit_every, **SMALL) as store:
        optimizer = optimizer_of(parameters, store=store, **options)
        train(parameters, optimizer, range(2))
        for parameter in parameters.values():
            change(parameter)
    content = read_run(tmp_path)
    states = reference.store.pages.read_states()
    assert content.step == 2
    for name, parameter in expected.items():
        wanted = states[name].get("master", parameter).detach().numpy()
        assert np.array_equal(content.states[name]["master"], wanted)


def test_parameters_without_any_state(tmp_path: Path) -> None:
    parameters = [torch.nn.Parameter(torch.randn(64, 48)) for _ in range(3)]
    specs = [
        tierstore.pages.PagedParameter(name=f"p{i}", tensor=parameter, states={})
        for i, parameter in enumerate(parameters)
    ]
    with tierstore.TierStore(tmp_path, commit_every=3, **SMALL) as store:
        store.pages.attach([tierstore.pages.PagedGroup(parameters=specs, hyperparameters={})])
        for step in range(4):
            for parameter in parameters:
                parameter.grad = torch.randn(64, 48)
            with store.pages.sweep() as pages:
                for page in pages:
                    for shard in page.shards:
                        for chunk in shard.chunks:
                            chunk.master -= chunk.grad
            store.commit()
            if step in (0, 2):
                store.move("host" if step else "nvme")
    content = read_run(tmp_path)
    for i, parameter in enumerate(parameters):
        assert np.array_equal(content.states[f"p{i}"]["master"], parameter.detach().numpy())


def test_a_state_dict_of_before_the_commit_stays(tmp_path: Path) -> None:
    parameters = parameters_of(torch.float32)
    with tierstore.TierStore(tmp_path, commit_every=3, **SMALL) as store:
        optimizer = optimizer_of(parameters, store=store)
        train(parameters, optimizer, range(2))
        states = store.pages.read_states()
        wanted = {name: {s: t.clone() for s, t in of.items()} for name, of in states.items()}
        store.synchronize()
        train(parameters, optimizer, range(2, 6))
    for name, of_name in states.items():
        for state, tensor in of_name.items():
            assert torch.equal(tensor, wanted[name][state])


def test_steps_alone_clear_no_remainder(tmp_path: Path) -> None:
    expected, parameters = parameters_of(), parameters_of()
    with tierstore.TierStore(tmp_path, commit_every=4, **SMALL) as store, warnings.catch_warnings():
        warnings.simplefilter("error")
        train(expected, optimizer_of(expected, master="remainder"), range(9))
        optimizer = optimizer_of(parameters, store=store, master="remainder")
        train(parameters, optimizer, range(9))
    for name, parameter in parameters.items():
        assert torch.equal(parameter, expected[name])


@pytest.mark.quick(4)
@pytest.mark.parametrize("first", ["optimizer", "model"])
@pytest.mark.parametrize("commit_every", [1, 2, None])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_commit_after_loads_has_both(
    tmp_path: Path, dtype: torch.dtype, commit_every: int | None, first: str
) -> None:
    """Of the optimizer and of the model, in either order."""
    source = parameters_of(dtype)
    trained = optimizer_of(source)
    train(source, trained, range(1))
    saved = trained.state_dict()
    parameters = parameters_of(dtype)
    options: dict[str, Any] = {"commit_every": commit_every, **SMALL}
    with tierstore.TierStore(tmp_path, **options) as store:
        optimizer = optimizer_of(parameters, store=store)
        train(parameters, optimizer, range(1, 3))
        if first == "optimizer":
            optimizer.load_state_dict(saved)
        with torch.no_grad():
            for name, parameter in parameters.items():
                parameter.copy_(source[name])
        if first == "model":
            optimizer.load_state_dict(saved)
    others = parameters_of(dtype)
    with tierstore.TierStore(tmp_path, resume=True, **options) as store:
        optimizer = optimizer_of(others, store=store)
        assert optimizer.restore() == 2
        found = optimizer.state_dict()["state"]
        for number, states in saved["state"].items():
            for state, tensor in states.items():
                assert torch.equal(found[number][state], tensor), (number, state)
    for name, parameter in others.items():
        assert torch.equal(parameter, source[name]), name
