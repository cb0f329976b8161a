"""restore(checkpoint=) of what is no checkpoint of this model: refused, nothing changed."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

import muon
import tierstore
from tests import training
from tests.publishing import Ours, Reference, assert_equal, names_in, pages_of, published_toy
from tests.toy import FIRST, FOURTH, MODEL, RANK, SECOND, THIRD, Spec, Toy, unchanged


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
        (other_shapes, r"'model.first' of shape \[5, 7\], here it is \[5, 8\]"),
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


def test_a_checkpoint_without_the_optimizer(tmp_path: Path) -> None:
    """Of a model alone one can load the model, with DCP; states are not made up."""
    reference = Reference("layers")
    dcp.save(
        {"model": reference.model.state_dict()}, checkpoint_id=tmp_path / "stock", no_dist=True
    )
    ours = Ours(tmp_path / "run")
    before = ours.state()["model"]
    with pytest.raises(tierstore.CheckpointError, match=r"no tensor 'optimizer\.state"):
        ours.optimizer.restore(checkpoint=tmp_path / "stock")
    assert_equal(ours.state()["model"], before)
    ours.store.close()


@pytest.mark.parametrize(
    ("options", "message"), [({"amsgrad": True}, "amsgrad"), ({"maximize": True}, "maximize")]
)
def test_options_that_are_not_supported(
    options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    """Refused like a state dict with them, before anything is changed."""
    model = nn.Linear(5, 4)
    reference = torch.optim.AdamW(model.parameters(), **options)
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


def test_unnamed_parameters(tmp_path: Path) -> None:
    """Their names in the checkpoint are those of the model, which nobody has here."""
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
        with pytest.raises(tierstore.SweepError), toy.store.sweep() as pages:
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
