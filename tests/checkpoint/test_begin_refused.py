"""restore(checkpoint=) of a checkpoint that does not fit the model: refused, nothing changed."""

from __future__ import annotations

import copy
import math
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

import muon
import tierstore
from tests.support import training
from tests.support.adamw import AdamW
from tests.support.originals import edit
from tests.support.published import (
    Ours,
    Reference,
    assert_equal,
    names_in,
    pages_of,
    published_toy,
    save_with_dcp,
)
from tests.support.toy import FIRST, FOURTH, MODEL, RANK, SECOND, THIRD, Spec, Toy, unchanged


def cut_page(checkpoint: Path) -> None:
    page = pages_of(checkpoint)[0]
    with page.open("r+b") as file:
        file.truncate(page.stat().st_size - 4096)


def flip_page(checkpoint: Path) -> None:
    with pages_of(checkpoint)[1].open("r+b") as file:
        file.seek(520)
        file.write(b"\x55")


def remove_page(checkpoint: Path) -> None:
    pages_of(checkpoint)[0].unlink()


def flip_metadata(checkpoint: Path) -> None:
    data = bytearray((checkpoint / ".metadata").read_bytes())
    data[len(data) // 2] ^= 32
    (checkpoint / ".metadata").write_bytes(data)


def flip_unpaged(checkpoint: Path) -> None:
    data = bytearray((checkpoint / "unpaged").read_bytes())
    data[-300] ^= 1
    (checkpoint / "unpaged").write_bytes(data)


def flip_manifest(checkpoint: Path) -> None:
    data = bytearray((checkpoint / "rank-00000.commit").read_bytes())
    data[-5] ^= 1
    (checkpoint / "rank-00000.commit").write_bytes(data)


@pytest.mark.parametrize(
    "damage", [cut_page, flip_page, remove_page, flip_metadata, flip_unpaged, flip_manifest]
)
def test_damage_is_found_before_anything_is_changed(
    damage: Callable[[Path], None], tmp_path: Path
) -> None:
    checkpoint = published_toy(tmp_path)
    shutil.copytree(checkpoint, tmp_path / "damaged")
    damage(tmp_path / "damaged")
    toy = Toy(tmp_path / "run")
    with unchanged(tmp_path / "run"), pytest.raises(tierstore.CorruptionError, match="damaged"):
        toy.store.restore(checkpoint=tmp_path / "damaged")
    toy.assert_at(0)
    # The store is as good as new.
    assert toy.store.restore(checkpoint=checkpoint) == 3
    toy.step()
    toy.assert_at(4)
    toy.store.close()


def test_a_run_is_refused_before_its_pages_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To read a large run takes minutes, and the message is about its name alone."""
    checkpoint = published_toy(tmp_path)
    run = tmp_path / "other"
    other = Toy(run)
    other.step()
    other.store.close()
    toy = Toy(tmp_path / "run")
    real, opened = os.open, []

    def note(path: Any, *arguments: Any, **options: Any) -> int:
        opened.append(Path(path))
        return real(path, *arguments, **options)

    with monkeypatch.context() as patched:
        patched.setattr(os, "open", note)
        with pytest.raises(tierstore.CheckpointError, match="is a run directory, not a checkpoint"):
            toy.store.restore(checkpoint=run)
        assert not [path for path in opened if run in path.parents]
        assert toy.store.restore(checkpoint=checkpoint) == 3
        assert {page.name for page in pages_of(checkpoint)} <= {path.name for path in opened}
    toy.store.close()


def other_shapes(directory: Path) -> Toy:
    first: Spec = ("first", (5, 8), torch.bfloat16, {"momentum": torch.bfloat16}, False)
    return Toy(directory, [[first, SECOND], [THIRD]])


def missing_states(directory: Path) -> Toy:
    third: Spec = ("third", (3, 4), torch.float16, {"momentum": torch.float16}, False)
    return Toy(directory, [[FIRST, SECOND], [third]])


def another_parameter(directory: Path) -> Toy:
    return Toy(directory, [*MODEL, [FOURTH]])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (other_shapes, r"'model.first' of shape \[5, 7\], but here it is \[5, 8\]"),
        (missing_states, r"no tensor 'optimizer\.state\.third\.momentum'"),
        (another_parameter, r"no tensor .*fourth"),
    ],
)
def test_another_model(make: Callable[[Path], Toy], message: str, tmp_path: Path) -> None:
    checkpoint = published_toy(tmp_path)
    toy = make(tmp_path / "run")
    with (
        unchanged(tmp_path / "run"),
        pytest.raises(tierstore.CheckpointError, match=message),
    ):
        toy.store.restore(checkpoint=checkpoint)
    toy.assert_at(0)
    toy.step()
    toy.assert_at(1)
    toy.store.close()


@pytest.mark.parametrize("lacks", ["hidden.bias.exp_avg_sq", "hidden.bias.exp_avg"])
def test_an_optimizer_that_lacks_a_state(lacks: str, tmp_path: Path) -> None:
    """Missing states are invented only for a parameter that has none."""
    reference = Reference().train(1)
    state = {
        "model": reference.model.state_dict(),
        "optimizer": reference.optimizer_state(flat=True),
    }
    del state["optimizer"][f"state.{lacks}"]
    dcp.save(state, checkpoint_id=tmp_path / "stock", no_dist=True)
    ours = Ours(tmp_path / "run")
    before = ours.state()["model"]
    with pytest.raises(tierstore.CheckpointError, match=f"no tensor 'optimizer.state.{lacks}'"):
        ours.optimizer.restore(checkpoint=tmp_path / "stock")
    assert_equal(ours.state()["model"], before)
    ours.store.close()


@pytest.mark.parametrize(("options", "message"), [({"amsgrad": True}, "amsgrad")])
def test_options_that_are_not_supported(
    options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    """Refused like a state dict with them, before anything is changed."""
    model = nn.Linear(5, 4)
    reference = AdamW(model.parameters(), **options)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    reference.step()
    state = {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, reference)}
    dcp.save(state, checkpoint_id=tmp_path / "stock", no_dist=True)
    other = nn.Linear(5, 4)
    before = copy.deepcopy(other.state_dict())
    groups = [{"params": list(other.named_parameters()), "algorithm": "adamw"}]
    with tierstore.TierStore(tmp_path / "run") as store:
        optimizer = muon.Muon(groups, store=store)
        with pytest.raises(ValueError, match=message):
            optimizer.restore(checkpoint=tmp_path / "stock")
        assert_equal(other.state_dict(), before)
        assert not optimizer.param_groups[0]["amsgrad"]
        for parameter in other.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()


LR = "optimizer.param_groups.0.lr"


def moved(metadata: Metadata, key: str, path: Any) -> None:
    """Give LR another key and another path in the state dict, in ``.metadata``."""
    metadata.state_dict_metadata[key] = metadata.state_dict_metadata.pop(LR)
    metadata.storage_data[MetadataIndex(key)] = metadata.storage_data.pop(MetadataIndex(LR))
    del metadata.planner_data[LR]
    metadata.planner_data[key] = path


PATHS: dict[str, tuple[Callable[[Metadata], Any], str]] = {
    "far": (
        lambda m: moved(m, f"{LR}.{10**11}", ("optimizer", "param_groups", 0, "lr", 10**11)),
        "dicts and lists",
    ),
    "negative": (
        lambda m: moved(m, f"{LR}.-1", ("optimizer", "param_groups", 0, "lr", -1)),
        "dicts and lists",
    ),
    "inside another value": (
        lambda m: moved(m, f"{LR}.0", ("optimizer", "param_groups", 0, "eps", 0)),
        "path of another key",
    ),
    "of another key": (lambda m: moved(m, LR, ("optimizer", "lr")), "path of another key"),
    "deep": (
        lambda m: moved(
            m, f"{LR}{'.0' * 9999}", ("optimizer", "param_groups", 0, "lr", *[0] * 9999)
        ),
        "path of another key",
    ),
    "no path": (lambda m: moved(m, LR, 7), "path of another key"),
    "a path with something else": (
        lambda m: moved(m, f"{LR}.None", ("optimizer", "param_groups", 0, "lr", None)),
        "path of another key",
    ),
    "a group": (
        lambda m: moved(m, "optimizer.param_groups.0.7", ("optimizer", "param_groups", 0, 7)),
        "dicts and lists",
    ),
}


@pytest.mark.parametrize(("change", "message"), PATHS.values(), ids=PATHS)
def test_hyperparameters_at_strange_paths(
    change: Callable[[Metadata], Any], message: str, tmp_path: Path
) -> None:
    """Refused without building a list of 10**11 items."""
    save_with_dcp(Reference().train(1), tmp_path / "stock", flat=False, prefix=True)
    edit(tmp_path / "stock", change)
    assert_refused(tmp_path, message)


def test_a_list_in_place_of_a_number(tmp_path: Path) -> None:
    save_with_dcp(Reference().train(1), tmp_path / "stock", flat=False, prefix=True)
    path = ("optimizer", "param_groups", 0, "lr", 0)
    edit(tmp_path / "stock", lambda metadata: moved(metadata, f"{LR}.0", path))
    assert_refused(tmp_path, "lr must be a number", ValueError)


def assert_refused(
    tmp_path: Path, message: str, error: type[Exception] = tierstore.CheckpointError
) -> None:
    """Check that ``stock`` is refused, and that the model can still be trained."""
    ours = Ours(tmp_path / "run")
    before = copy.deepcopy((ours.model.state_dict(), ours.optimizer.param_groups))
    with pytest.raises(error, match=message):
        ours.optimizer.restore(checkpoint=tmp_path / "stock")
    assert_equal((ours.model.state_dict(), ours.optimizer.param_groups), before)
    ours.train(1).store.close()


@pytest.mark.parametrize("flat", [True, False])
def test_hyperparameters_of_classes_that_are_not_unpickled(flat: bool, tmp_path: Path) -> None:
    reference = Reference().train(1)
    reference.optimizers[0].param_groups[0]["lr"] = np.float64(0.5)
    save_with_dcp(reference, tmp_path / "stock", flat=flat, prefix=True)
    name = "hidden.weight" if flat else "0"
    message = rf"'optimizer\.param_groups\.{name}\.lr' is of a class that .* its item\(\)"
    assert_refused(tmp_path, message)


def test_hyperparameters_of_any_size(tmp_path: Path) -> None:
    """Values that are too large for a commit are refused."""
    reference = Reference().train(1)
    reference.optimizers[0].param_groups[0]["table"] = torch.zeros(2**24 + 1)
    save_with_dcp(reference, tmp_path / "stock", flat=False, prefix=True)
    assert_refused(tmp_path, r"'optimizer\.param_groups\.0\.table' has 64\.0 MiB, but a small")


@pytest.mark.parametrize("count", [math.nan, math.inf, -1.0])
def test_step_counts_that_are_not_counts(count: float, tmp_path: Path) -> None:
    reference = Reference().train(1)
    for state in reference.optimizers[1].state.values():
        state["step"].fill_(count)
    save_with_dcp(reference, tmp_path / "stock", flat=True, prefix=True)
    assert_refused(tmp_path, f"has the step {count}")


def test_unnamed_parameters(tmp_path: Path) -> None:
    """The checkpoint has the names of the model, which the optimizer lacks."""
    ours = Ours(tmp_path / "run", named=False).train(1)
    ours.store.checkpoint(tmp_path / "checkpoint", model=ours.model)
    ours.store.close()
    other = Ours(tmp_path / "other", named=False)
    with pytest.raises(tierstore.CheckpointError, match=r"'model\.0\.0'"):
        other.optimizer.restore(checkpoint=tmp_path / "checkpoint")
    other.store.close()
    named = Ours(tmp_path / "named", seed=3)
    assert named.optimizer.restore(checkpoint=tmp_path / "checkpoint") == 1
    named.store.close()


@pytest.mark.parametrize("which", ["run", "rank", "empty", "absent", "file"])
def test_not_a_checkpoint(which: str, tmp_path: Path) -> None:
    published_toy(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("mine")
    path = {"run": tmp_path / "origin", "rank": tmp_path / "origin" / RANK}.get(
        which, tmp_path / which
    )
    toy = Toy(tmp_path / "new")
    with unchanged(tmp_path / "new"), pytest.raises(tierstore.CheckpointError, match=str(path)):
        toy.store.restore(checkpoint=path)
    toy.assert_at(0)
    toy.store.close()


@pytest.mark.parametrize("state", ["resumed", "stepped", "failed"])
def test_a_run_that_has_steps(state: str, tmp_path: Path) -> None:
    checkpoint = published_toy(tmp_path)
    toy = Toy(tmp_path / "run")
    toy.step()
    toy.store.synchronize()
    if state == "resumed":
        toy.store.close()
        toy = Toy(tmp_path / "run", resume=True)
    elif state == "failed":
        with pytest.raises(tierstore.SweepError), toy.store.pages.sweep() as pages:
            next(pages)
    with pytest.raises(tierstore.RunDirectoryError, match="has steps already"):
        toy.store.restore(checkpoint=checkpoint)
    assert toy.store.restore() == 1
    toy.assert_at(1)
    toy.store.close()


def test_a_store_without_a_directory() -> None:
    parameters = training.make_parameters()
    optimizer = muon.Muon(training.make_groups(parameters))
    with pytest.raises(tierstore.RunDirectoryError, match="needs a store with a directory"):
        optimizer.restore(checkpoint="anywhere")
    assert names_in(Path("anywhere")) == []
