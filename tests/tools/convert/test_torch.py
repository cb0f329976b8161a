"""Files of torch.save: stock models and optimizers in, and what torch.load takes out."""

from __future__ import annotations

import argparse
import os
import random
import re
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tierstore
from tests.support import stock_reader
from tests.support.commands import call
from tests.support.conversions import no_trace
from tests.support.kept import commit_with
from tests.support.published import Ours, Reference, assert_equal, tensors_in
from tierstore.tools.convert.convert import convert
from tierstore.tools.convert.torch_names import match_names


def stock_file(reference: Reference) -> dict[str, Any]:
    return {
        "model": reference.model.state_dict(),
        "optimizers": [optimizer.state_dict() for optimizer in reference.optimizers],
    }


def continued(loaded: dict[str, Any], *steps: int) -> dict[str, Any]:
    """Go on with stock optimizers from what a file holds."""
    other = Reference()
    other.model.load_state_dict(loaded["model"])
    for optimizer, algorithm in zip(other.optimizers, ("muon", "adamw"), strict=True):
        optimizer.load_state_dict(loaded["optimizers"][algorithm])
    return other.train(*steps).model_state()


@pytest.mark.parametrize("named", [False, True])
def test_stock_optimizers_to_dcp_and_back(named: bool, tmp_path: Path) -> None:
    reference = Reference(named=named).train(1, 2)
    torch.save(stock_file(reference), tmp_path / "in.pt")
    convert(tmp_path / "in.pt", tmp_path / "dcp", to="dcp", assume_model_order=not named)
    ours = Ours(tmp_path / "run")
    ours.optimizer.restore(checkpoint=tmp_path / "dcp")
    ours.model.load_state_dict({"mean": reference.model.state_dict()["mean"]}, strict=False)
    ours.train(3).store.close()
    conversion = convert(tmp_path / "dcp", tmp_path / "out.pt", to="torch")
    assert (conversion.lost, conversion.notes) == ([], [])
    again = convert(tmp_path / "out.pt", tmp_path / "again", to="dcp")
    assert_equal(tensors_in(tmp_path / "again"), tensors_in(tmp_path / "dcp"))
    assert again.lost == []
    expected = reference.train(3).model_state()
    assert_equal(ours.model.state_dict(), expected)


def test_what_torch_load_and_stock_optimizers_take(tmp_path: Path) -> None:
    ours = Ours(tmp_path / "run").train(1, 2)
    commit_with(ours.store, (1, 2))
    ours.store.checkpoint(tmp_path / "published", model=ours.model)
    ours.store.close()
    convert(tmp_path / "published", tmp_path / "out.pt", to="torch")
    for mapped in (False, True):
        loaded = torch.load(tmp_path / "out.pt", weights_only=True, mmap=mapped)
        assert loaded.keys() == {"model", "optimizer", "optimizers", "tierstore"}
        assert loaded["tierstore"]["step"] == 2
    reference = Reference().train(1, 2)
    assert_equal(dict(loaded["model"]), reference.model_state())
    assert_equal(
        continued(torch.load(tmp_path / "out.pt"), 3, 4), reference.train(3, 4).model_state()
    )
    with zipfile.ZipFile(tmp_path / "out.pt") as archive:
        assert archive.testzip() is None
    fresh = Ours(tmp_path / "fresh", seed=9)
    fresh.model.load_state_dict(loaded["model"])
    fresh.optimizer.load_state_dict(loaded["optimizer"])
    fresh.train(3, 4).store.close()
    assert_equal(fresh.model.state_dict(), reference.model_state())


def test_data_is_aligned_as_torch_save_aligns_it(tmp_path: Path) -> None:
    torch.save({f"w{n}": torch.randn(n) for n in range(1, 9)}, tmp_path / "in.pt")
    convert(tmp_path / "in.pt", tmp_path / "out.pt", to="torch")
    loaded = torch.load(tmp_path / "out.pt", mmap=True)["model"]
    assert {tensor.data_ptr() % 64 for tensor in loaded.values()} == {0}


def test_all_dtypes_shapes_and_orders(tmp_path: Path) -> None:
    base = torch.randn(6, 8)
    model = {
        "transposed": base.t(),
        "slice": base[1:3, ::2],
        "row": base[2],
        "permuted": torch.randn(2, 1, 3, 4).permute(2, 0, 3, 1),
        "columns": torch.randn(5, 7, 1)[:, None].transpose(0, 2),
        "nothing": torch.empty(0, 3),
        "scalar": torch.tensor(2.5),
        "tied": base,
        "tied again": base,
        "expanded": torch.arange(3.0).expand(4, 3),
    }
    dtypes = (torch.float64, torch.bfloat16, torch.float16, torch.int64)
    more = (torch.int8, torch.uint8, torch.bool, torch.complex64, torch.uint16)
    model |= {str(dtype): torch.arange(5).to(dtype) for dtype in (*dtypes, *more)}
    torch.save(model, tmp_path / "in.pt")
    convert(tmp_path / "in.pt", tmp_path / "out.pt", to="torch")
    found = torch.load(tmp_path / "out.pt")["model"]
    assert found.keys() == model.keys()
    for key, tensor in model.items():
        assert found[key].dtype == tensor.dtype
        assert torch.equal(found[key].cfloat(), tensor.cfloat()), key
    assert found["tied"].data_ptr() == found["tied again"].data_ptr()


def test_model_and_optimizer_in_two_files_and_two_groups(tmp_path: Path) -> None:
    model = stock_reader.make_model("layers", 0)
    decayed = [p for p in model.parameters() if p.ndim >= 2]
    others = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95))
    stock_reader.train_step(model, [optimizer], 1)
    torch.save({f"_orig_mod.{k}": v for k, v in model.state_dict().items()}, tmp_path / "m.pt")
    torch.save(optimizer.state_dict(), tmp_path / "o.pt")
    sources = [tmp_path / "m.pt", tmp_path / "o.pt"]
    conversion = convert(sources, tmp_path / "dcp", to="dcp", assume_model_order=True)
    assert conversion.lost == []
    names = {id(p): name for name, p in model.named_parameters()}
    found = tensors_in(tmp_path / "dcp")
    for parameter in (*decayed, *others):
        key = f"optimizer.state.{names[id(parameter)]}"
        state = optimizer.state[parameter]
        assert torch.equal(found[f"{key}.exp_avg"], state["exp_avg"])
        assert torch.equal(found[f"{key}.exp_avg_sq"], state["exp_avg_sq"])
        assert torch.equal(found[f"model.{names[id(parameter)]}"], parameter)


Shapes = list[tuple[int, ...]]


@pytest.mark.parametrize(
    ("groups", "tensors", "expected"),
    [
        ([[(2,), (3,)]], [("a", (2,)), ("b", (3,))], [["a", "b"]]),
        ([[(3,)], [(2,)]], [("a", (2,)), ("b", (3,))], [["b"], ["a"]]),
        ([[(2,)]], [("a", (2,)), ("buffer", (3,))], [["a"]]),
        ([[None, (3,)]], [("a", (2,)), ("b", (3,))], [["a", "b"]]),
    ],
)
def test_names_follow_from_shapes(groups: Any, tensors: Any, expected: list[list[str]]) -> None:
    assert match_names(groups, tensors) == expected


@pytest.mark.parametrize(
    ("groups", "tensors", "problem"),
    [
        ([[(2,)], [(2,)]], [("a", (2,)), ("b", (2,))], "in several ways"),
        ([[(2,)]], [("a", (2,)), ("b", (2,))], "in several ways"),
        ([[(2,)]], [("a", (3,))], "fit no tensors"),
        ([[(2,), (2,)]], [("a", (2,))], "fit no tensors"),
    ],
)
def test_names_that_do_not_follow_are_refused(groups: Any, tensors: Any, problem: str) -> None:
    with pytest.raises(tierstore.CheckpointError, match=problem):
        match_names(groups, tensors)


def test_objects_are_named_and_never_made(tmp_path: Path) -> None:
    model = nn.Linear(3, 4)
    torch.save(
        {"model": model.state_dict(), "args": argparse.Namespace(lr=0.1), "epoch": 3},
        tmp_path / "in.pt",
    )
    code, _, error = call("convert", tmp_path / "in.pt", tmp_path / "out.pt", "--to", "torch")
    assert code == 0
    assert error == (
        "tierstore: not carried: 'args': neither the model nor an optimizer\n"
        "tierstore: not carried: 'epoch': neither the model nor an optimizer\n"
    )
    with no_trace(tmp_path):
        code, _, error = call(
            *("convert", tmp_path / "in.pt", tmp_path / "strict.pt", "--to", "torch", "--strict")
        )
        assert code == 1
        assert re.search(r"not carried: 'args': .* \(and 1 more\)\n", error)


class Hostile:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.path}",)


def test_hostile_pickles_run_nothing(tmp_path: Path) -> None:
    mark = tmp_path / "executed"
    torch.save({"model": {"w": torch.ones(3)}, "x": Hostile(mark)}, tmp_path / "in.pt")
    convert(tmp_path / "in.pt", tmp_path / "out.pt", to="torch")
    torch.save({"model": {"w": torch.ones(3), Hostile(mark): 3}}, tmp_path / "key.pt")
    with pytest.raises(tierstore.CorruptionError, match="a key of a strange kind"):
        convert(tmp_path / "key.pt", tmp_path / "out2.pt", to="torch")
    assert not mark.exists()


def one_matrix(groups: Sequence[dict[str, Any]], state: dict[int, Any]) -> dict[str, Any]:
    model = {"w": torch.arange(12.0).view(3, 4), "b": torch.arange(4.0)}
    return {"model": model, "optimizer": {"state": state, "param_groups": list(groups)}}


@pytest.mark.parametrize(("convention", "factor"), [("average", 1.0), ("heavy-ball", 0.1)])
def test_convention_must_be_given_where_no_key_tells(
    convention: str, factor: float, tmp_path: Path
) -> None:
    momentum = torch.randn(3, 4)
    group = {"lr": 0.02, "momentum": 0.9, "nesterov": True, "ns_steps": 5, "params": [0]}
    file = one_matrix([group], {0: {"momentum_buffer": momentum}})
    del file["model"]["b"]
    torch.save(file, tmp_path / "in.pt")
    arguments = ("convert", tmp_path / "in.pt", tmp_path / "out.pt", "--to", "torch")
    with no_trace(tmp_path):
        code, _, error = call(*arguments)
        assert (code, "pass --momentum-convention average or heavy-ball" in error) == (2, True)
    assert call(*arguments, "--momentum-convention", convention)[0] == 0
    found = torch.load(tmp_path / "out.pt")["optimizer"]["state"][0]["momentum_buffer"]
    torch.testing.assert_close(found, momentum * factor)


def test_states_without_parameters_are_refused(tmp_path: Path) -> None:
    parameter = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.AdamW([("there", parameter)])
    parameter.grad = torch.ones(3)
    optimizer.step()
    state = optimizer.state_dict()
    state["param_groups"][0].pop("param_names")
    for file, problem in (
        ({"model": {"w": torch.ones(4)}, "optimizer": state}, "have no names"),
        ([1, 2], "neither a state dict nor a dict of them"),
        ({"a": 1}, "neither a model nor an optimizer"),
        ({"one": {"w": torch.ones(2)}, "two": {"w": torch.ones(2)}}, "several models"),
    ):
        torch.save(file, tmp_path / "in.pt")
        with no_trace(tmp_path), pytest.raises(tierstore.CheckpointError, match=problem):
            convert(tmp_path / "in.pt", tmp_path / "out.pt", to="torch")


@pytest.mark.long
@pytest.mark.parametrize("count", [60, pytest.param(200, marks=pytest.mark.long)])
def test_damaged_files(count: int, tmp_path: Path) -> None:
    torch.save(stock_file(Reference(named=True).train(1)), tmp_path / "in.pt")
    original = (tmp_path / "in.pt").read_bytes()
    convert(tmp_path / "in.pt", tmp_path / "o.pt", to="torch")
    expected = torch.load(tmp_path / "o.pt")["model"]
    (tmp_path / "o.pt").unlink()
    numbers = random.Random(count)
    with no_trace(tmp_path):
        for number in range(count):
            data = bytearray(original)
            if numbers.random() < 0.2:
                del data[numbers.randrange(len(data)) :]
            else:
                data[numbers.randrange(len(data))] ^= 1 << numbers.randrange(8)
            (tmp_path / "in.pt").write_bytes(data)
            code, _, error = call("convert", tmp_path / "in.pt", tmp_path / "o.pt", "--to", "torch")
            if code == 0:
                assert_equal(torch.load(tmp_path / "o.pt")["model"], expected)
                (tmp_path / "o.pt").unlink()
            else:
                assert code in (1, 2), (number, error)
                assert error.startswith("tierstore: "), (number, error)
        (tmp_path / "in.pt").write_bytes(original)
