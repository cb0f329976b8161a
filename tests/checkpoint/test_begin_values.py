"""restore(checkpoint=): hyperparameters, scalars and names in the checkpoint."""

from __future__ import annotations

import io
import math
from collections import Counter, OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.metadata import Metadata

import muon
import tierstore
from tests.run.test_tagged_json import same
from tests.support.originals import edit, entry_of
from tests.support.published import Ours, Reference, assert_equal, save_with_dcp
from tests.support.toy import Toy
from tierstore.checkpoint import dcp_reader
from tierstore.inspection import run_reader, slices, verify_checkpoint
from tierstore.run.manifest import Manifest
from tierstore.tools.inspect.verify import verify


@pytest.mark.parametrize("prefix", ["model.", "", "net."])
def test_names_of_the_model(prefix: str, tmp_path: Path) -> None:
    """The prefix of the names is found in the checkpoint."""
    ours = Ours(tmp_path / "run").train(1, 2)
    ours.store.checkpoint(tmp_path / "checkpoint", model=ours.model, model_prefix=prefix)
    ours.store.close()
    other = Ours(tmp_path / "other", seed=3)
    assert other.optimizer.restore(checkpoint=tmp_path / "checkpoint") == 2
    expected = Reference("layers").train(1, 2).model_state()
    found = dict(other.model.named_parameters())
    for name, parameter in found.items():
        assert torch.equal(parameter, expected[name]), name
    other.store.close()


@pytest.mark.parametrize("prefix", ["model.", "", "net."])
def test_a_module_called_model(prefix: str, tmp_path: Path) -> None:
    """Its frozen parameter has the key of another parameter with the prefix "model."."""

    def make(directory: str, value: float) -> tuple[nn.Module, muon.Muon]:
        model = nn.Module()
        model.weight = nn.Parameter(torch.full((3, 3), value))
        model.model = nn.Module()
        model.model.weight = nn.Parameter(torch.full((3, 3), 7.0), requires_grad=False)
        store = tierstore.TierStore(tmp_path / directory)
        groups = [{"params": [("weight", model.weight)], "algorithm": "adamw"}]
        return model, muon.Muon(groups, store=store)

    model, optimizer = make("one", 0.5)
    model.weight.grad = torch.zeros(3, 3)
    optimizer.step()
    optimizer.store.checkpoint(tmp_path / "checkpoint", model=model, model_prefix=prefix)
    optimizer.store.close()
    other, optimizer = make("two", 0.25)
    optimizer.restore(checkpoint=tmp_path / "checkpoint")
    assert torch.equal(other.weight, model.weight)
    optimizer.store.close()


# What a commit carries, and stock readers would make of a pickle by running it, or not at all.
# fmt: off
ODD: dict[str, Any] = {
    "numbers": [np.float64(0.1), np.float32(3), np.longdouble(2), np.uint8(7), np.bool_(True)],
    "arrays": [np.arange(3.0), np.array(7, ">u2"), np.zeros((2, 0)), np.array([1j, 2])],
    "long": np.array([0.5], np.longdouble),
    "tensors": {"in": [torch.ones(2, dtype=torch.bfloat16)], "out": torch.tensor(3)},
    "milestones": Counter({30: 2, 80: 1}), "counted": (Counter(a=1),),
    "ordered": OrderedDict(b=1, a=2), "large": [2**500, -(2**511)],
    "where": {(1, np.float64(2.0)): torch.float16}, "nothing": [{}, [], (), None, math.inf],
}
# fmt: on


def test_hyperparameters_of_every_kind(tmp_path: Path) -> None:
    """Every kind of value is loaded as it was, without unpickling code."""
    toy = Toy(tmp_path / "origin")
    toy.step()
    toy.groups[0].hyperparameters.update({"lr": np.float64(0.25), **ODD})
    toy.step()
    toy.store.checkpoint(tmp_path / "checkpoint")
    toy.store.close()
    assert verify(tmp_path / "checkpoint").notes == ()  # Such as of values that were not made.
    other = Toy(tmp_path / "run")
    assert other.store.restore(checkpoint=tmp_path / "checkpoint") == 2
    assert same(other.groups[0].hyperparameters, {"lr": np.float64(0.25), **ODD})
    assert same(other.groups[1].hyperparameters, {"lr": 0.25})
    other.step()
    other.assert_at(3)
    other.store.close()


def test_a_schedule_that_numpy_computes(tmp_path: Path) -> None:
    """Its learning rates are scalars of numpy; stock readers get scalars of Python."""
    ours = Ours(tmp_path / "run")
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        ours.optimizer, lambda step: 0.5 * (1 + np.cos(step / 10))
    )
    ours.train(1)
    scheduler.step()
    rates = [group["lr"] for group in ours.optimizer.param_groups]
    assert {type(rate) for rate in rates} == {np.float64}
    ours.store.commit()
    ours.store.checkpoint(tmp_path / "checkpoint", model=ours.model)
    ours.store.close()
    dcp_to_torch_save(tmp_path / "checkpoint", tmp_path / "file.pt")
    groups = torch.load(tmp_path / "file.pt", weights_only=True)["optimizer"]["param_groups"]
    assert same([groups[number]["lr"] for number in range(2)], [*map(float, rates)])
    other = Ours(tmp_path / "other", seed=3)
    other.optimizer.restore(checkpoint=tmp_path / "checkpoint")
    assert same([group["lr"] for group in other.optimizer.param_groups], rates)
    other.store.close()


def test_two_hyperparameters_of_one_key(tmp_path: Path) -> None:
    """DCP joins the keys of dicts with dots."""
    toy = Toy(tmp_path / "run")
    toy.step()
    toy.groups[0].hyperparameters.update({"a.b": 1, "a": {"b": torch.ones(1)}})
    toy.step()
    message = r"the key 'optimizer\.param_groups\.0\.a\.b' .* rename one"
    with pytest.raises(tierstore.CheckpointError, match=message):
        toy.store.checkpoint(tmp_path / "checkpoint")
    assert not (tmp_path / "checkpoint").exists()
    toy.groups[0].hyperparameters.pop("a")
    toy.step()
    toy.store.checkpoint(tmp_path / "checkpoint")
    toy.store.close()
    assert verify(tmp_path / "checkpoint").good


def test_scalars_come_from_the_commit(tmp_path: Path) -> None:
    """They are not rounded to float32, as for stock readers."""
    count = float(2**24 + 1)
    toy = Toy(tmp_path / "origin")
    toy.store.pages.scalars["second"] = {"step": count}
    toy.step()
    toy.store.checkpoint(tmp_path / "checkpoint")
    toy.store.close()
    other = Toy(tmp_path / "run")
    other.store.pages.scalars["second"] = {"step": 0.0}
    assert other.store.restore(checkpoint=tmp_path / "checkpoint") == 1
    assert other.store.pages.scalars == {"second": {"step": count}}
    other.store.close()


def test_parameters_whose_names_are_numbers(tmp_path: Path) -> None:
    """Their hyperparameters have the keys of groups, and are found by group."""
    rates = [0.25, 0.5]

    def make(directory: str) -> muon.Muon:
        model = torch.nn.ParameterList([torch.ones(3, 3), torch.ones(3)])
        named = list(model.named_parameters())
        groups = [
            {"params": named[:1], "lr": rates[0]},
            {"params": named[1:], "lr": rates[1], "algorithm": "adamw"},
        ]
        return muon.Muon(groups, store=tierstore.TierStore(tmp_path / directory))

    first = make("one")
    for group in first.param_groups:
        group["params"][0].grad = torch.ones_like(group["params"][0])
    first.step()
    first.store.checkpoint(tmp_path / "checkpoint")
    rates = [0.0, 0.0]
    second = make("two")
    assert second.restore(checkpoint=tmp_path / "checkpoint") == 1
    for mine, theirs in zip(second.param_groups, first.param_groups, strict=True):
        assert {**mine, "params": 0} == {**theirs, "params": 0}
        assert torch.equal(mine["params"][0], theirs["params"][0])
    first.store.close()
    second.store.close()


class Numbered(nn.Module):
    """One parameter is called like a group; others are in a module called like another group."""

    def __init__(self) -> None:
        super().__init__()
        self.register_parameter("0", nn.Parameter(torch.ones(8)))
        self.add_module("1", nn.Linear(8, 4))

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """(batch, 8) -> (batch, 4)"""
        result: torch.Tensor = self.get_submodule("1")(values * self.get_parameter("0"))
        return result


def step_of_ones(model: nn.Module, *optimizers: torch.optim.Optimizer) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    for optimizer in optimizers:
        optimizer.step()


@pytest.mark.parametrize("source", ["published", "stock", "flat"])
def test_parameters_below_names_like_numbers(source: str, tmp_path: Path) -> None:
    """The keys of "1.weight" begin like the keys of group 1, whose first parameter is "0"."""
    model = Numbered()
    if source == "published":
        ours = Ours(tmp_path / "origin", model=model)
        assert ours.optimizer.param_groups[1]["param_names"][0] == "0"
        ours.optimizer.param_groups[1]["lr"] = 0.5
        step_of_ones(model, ours.optimizer)
        ours.store.checkpoint(tmp_path / "checkpoint", model=model)
        ours.store.close()
    else:
        reference = Reference(model=model)
        reference.optimizers[1].param_groups[0]["lr"] = 0.5
        step_of_ones(model, *reference.optimizers)
        save_with_dcp(reference, tmp_path / "checkpoint", flat=source == "flat", prefix=True)
    other = Ours(tmp_path / "run", model=Numbered())
    before = [set(group) for group in other.optimizer.param_groups]
    assert other.optimizer.restore(checkpoint=tmp_path / "checkpoint") == 1
    assert [set(group) for group in other.optimizer.param_groups] == before
    assert other.optimizer.param_groups[1]["lr"] == 0.5
    other.store.close()


def test_hyperparameters_with_a_key_for_each_item(tmp_path: Path) -> None:
    """A list with a tensor, or a dict, has a key for each item."""
    parts = {"schedule": {"warmup": [torch.tensor(1.0), {"then": 2}], "kind": "linear"}, "x": [1]}
    for flat in (True, False):
        reference = Reference("layers").train(1)
        reference.optimizers[0].param_groups[0] |= parts
        save_with_dcp(reference, tmp_path / f"stock-{flat}", flat=flat, prefix=True)
        ours = Ours(tmp_path / f"run-{flat}", seed=3)
        ours.optimizer.restore(checkpoint=tmp_path / f"stock-{flat}")
        found = ours.optimizer.param_groups[0]
        assert_equal({key: found[key] for key in parts}, parts)
        ours.store.close()


def test_tensors_that_were_stored_transposed(tmp_path: Path) -> None:
    """A stock checkpoint keeps the strides that a tensor had."""
    reference = Reference("layers").train(1)
    for name, parameter in reference.model.named_parameters():
        if name == "hidden.weight":
            parameter.data = parameter.data.T.contiguous().T
    save_with_dcp(reference, tmp_path / "stock", flat=True, prefix=True)
    ours = Ours(tmp_path / "run", seed=3)
    assert ours.optimizer.restore(checkpoint=tmp_path / "stock") == 1
    for name, parameter in ours.model.named_parameters():
        assert torch.equal(parameter, reference.model.get_parameter(name)), name
    ours.store.close()


def test_a_tensor_that_was_stored_with_a_longer_one(tmp_path: Path) -> None:
    """torch.save writes a view with all elements of its storage."""
    reference = Reference("layers").train(1)
    save_with_dcp(reference, tmp_path / "stock", flat=True, prefix=True)
    weight = reference.model.get_parameter("hidden.weight").detach()
    longer = torch.cat([torch.zeros(5), weight.reshape(-1)])
    file = io.BytesIO()
    torch.save(longer[5:].view(weight.shape), file)

    def change(metadata: Metadata) -> None:
        info = entry_of(metadata, "model.hidden.weight")
        path = tmp_path / "stock" / info.relative_path
        info.offset, info.length = path.stat().st_size, len(file.getvalue())
        path.write_bytes(path.read_bytes() + file.getvalue())

    edit(tmp_path / "stock", change)
    assert verify(tmp_path / "stock").good
    ours = Ours(tmp_path / "run", seed=3)
    ours.optimizer.restore(checkpoint=tmp_path / "stock")
    assert torch.equal(ours.model.get_parameter("hidden.weight"), weight)
    ours.store.close()


def test_tensors_that_were_stored_without_checksums(tmp_path: Path) -> None:
    reference = Reference("layers").train(1)
    torch.serialization.set_crc32_options(False)
    try:
        save_with_dcp(reference, tmp_path / "stock", flat=True, prefix=True)
    finally:
        torch.serialization.set_crc32_options(True)
    ours = Ours(tmp_path / "run", seed=3)
    assert ours.optimizer.restore(checkpoint=tmp_path / "stock") == 1
    for name, parameter in ours.model.named_parameters():
        assert torch.equal(parameter, reference.model.get_parameter(name)), name
    ours.store.close()


@pytest.mark.parametrize("published", [True, False])
def test_everything_is_parsed_once(
    published: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Metadata and manifests, and each slice of a file, however many pages have a part of it."""
    checkpoint = tmp_path / "checkpoint"
    reference = Reference("layers").train(1)
    if published:
        source = Ours(tmp_path / "source").train(1)
        source.store.checkpoint(checkpoint, model=source.model)
        source.store.close()
    else:
        save_with_dcp(reference, checkpoint, flat=True, prefix=True)
    ours = Ours(tmp_path / "run", seed=3)
    parsed: Counter[Any] = Counter()

    def counted(owner: Any, name: str) -> None:
        original = getattr(owner, name)

        def call(*arguments: Any, **options: Any) -> Any:
            piece = arguments[1] if name == "_elements" else None
            parsed[name, piece and (arguments[0].name, piece.offset, arguments[2])] += 1
            return original(*arguments, **options)

        monkeypatch.setattr(owner, name, call)

    counted(slices, "_elements")
    counted(verify_checkpoint, "read_metadata")
    counted(Manifest, "from_bytes")
    counted(run_reader, "parse_marker")
    assert ours.optimizer.restore(checkpoint=checkpoint) == 1
    assert set(parsed.values()) == {1}
    assert {name for name, _ in parsed} >= {"_elements", "read_metadata"}
    assert (("from_bytes", None) in parsed) == published
    ours.store.close()


def test_a_large_tensor_is_read_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory need not hold a whole tensor, however many pages have a part of it."""
    reference = Reference("layers").train(1)
    save_with_dcp(reference, tmp_path / "stock", flat=True, prefix=True)
    ours = Ours(tmp_path / "run", seed=3)
    monkeypatch.setattr(dcp_reader.FileSystemReader, "read_data", None)  # Nobody needs it.
    monkeypatch.setattr(dcp_reader, "PIECE_BYTES", 200)
    assert ours.optimizer.restore(checkpoint=tmp_path / "stock") == 1
    for name, parameter in ours.model.named_parameters():
        assert torch.equal(parameter, reference.model.get_parameter(name)), name
    ours.store.close()
