"""Stock PyTorch reads what was published, in processes that have no tierstore.

What it must find is what stock optimizers come to in the same training.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict

from tests.support.published import (
    Job,
    Ours,
    Reference,
    assert_equal,
    read_with_stock,
    save_with_dcp,
)
from tests.support.stock_reader import Layers, make_model, whole

TRAINED = (1, 2, 3)
GOES_ON = (4, 5)
CASES = [(flat, named) for flat in (True, False) for named in (True, False)]


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Checkpoints of several runs, what stock PyTorch read of each, and the continued runs."""
    root = tmp_path_factory.mktemp("published")
    jobs: list[Job] = []
    gone_on: dict[str, Any] = {}
    for named in (True, False):
        ours = Ours(root / f"run-{named}", "everything", named=named).train(*TRAINED)
        path = str(root / f"everything-{named}")
        ours.store.checkpoint(path, model=ours.model)
        jobs += [
            (
                f"flat={flat}, named={named}",
                "load",
                {"model": "everything", "path": path, "flat": flat, "named": named}
                | {"steps": GOES_ON},
            )
            for flat in (True, False)
        ]
        jobs.append((f"convert {named}", "convert", {"path": path, "out": f"{path}.pt"}))
        gone_on[f"named={named}"] = ours.train(*GOES_ON).state()
        ours.store.close()
    jobs += torchtitan_jobs(root, gone_on)
    return {"stock": read_with_stock(jobs, root / "reader"), "ours": gone_on}


def torchtitan_jobs(root: Path, gone_on: dict[str, Any]) -> list[Job]:
    jobs: list[Job] = []
    for dtype in (torch.float32, torch.bfloat16):
        name = str(dtype).removeprefix("torch.")
        ours = Ours(root / f"run-{name}", "layers", dtype=dtype).train(*TRAINED)
        path = str(root / f"titan-{name}")
        ours.store.checkpoint(path, model=ours.model, model_prefix="")
        options = {"model": "layers", "path": path, "prefix": False}
        jobs += [
            (f"titan {name} to {target}", "load", {**options, "dtype": target})
            for target in {"float32", name}
        ]
        gone_on[f"titan {name}"] = ours.state()
        ours.store.close()
    return jobs


@pytest.mark.long
@pytest.mark.parametrize(("flat", "named"), CASES)
def test_a_whole_model_and_its_optimizers(
    flat: bool, named: bool, published: dict[str, Any]
) -> None:
    reference = Reference("everything", named=named).train(*TRAINED)
    found = published["stock"][f"flat={flat}, named={named}"]
    assert_equal(found["model"], reference.model_state())
    assert "cache" not in found["model"]  # Not persistent.
    assert found["model"]["module.1.num_batches_tracked"] == len(TRAINED)
    assert found["model"]["nothing"].shape == (0, 4)
    assert_equal(found["optimizer"], reference.optimizer_state(flat=flat))
    for step in GOES_ON:
        assert_equal(found["after"][step], reference.train(step).model_state())
    # Our run, which went on after it was published, is there as well.
    assert_equal(published["ours"][f"named={named}"]["model"], reference.model_state())


@pytest.mark.parametrize("named", [True, False])
def test_converted_to_one_file(named: bool, published: dict[str, Any]) -> None:
    reference = Reference("everything", named=named).train(*TRAINED)
    found = published["stock"][f"convert {named}"]
    assert_equal(found["model"], reference.model_state())
    expected = reference.optimizer_state(flat=False)
    assert_equal(found["optimizer"]["state"], expected["state"])
    groups = found["optimizer"]["param_groups"]
    for group, other in zip(groups, expected["param_groups"], strict=True):
        assert_equal({key: group[key] for key in other}, other)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_keys_of_torchtitan(dtype: str, published: dict[str, Any]) -> None:
    """Masters are loaded unchanged into a float32 model, and rounded into one of the dtype."""
    ours = published["ours"][f"titan {dtype}"]
    found = published["stock"][f"titan {dtype} to {dtype}"]
    assert_equal(found["model"], ours["model"])
    masters = published["stock"][f"titan {dtype} to float32"]
    for name, states in ours["states"].items():
        expected = states.pop("master", ours["model"][name])
        assert_equal(masters["model"][name], expected, name)
        for state, tensor in states.items():
            key = f"state.{name}.{state}"
            assert_equal(masters["optimizer"][key], tensor.float(), key)
            # torch.optim gives states the dtype of their parameter.
            assert_equal(found["optimizer"][key], tensor.to(getattr(torch, dtype)), key)
    if dtype == "float32":
        reference = Reference("layers").train(*TRAINED)
        assert_equal(found["model"], reference.model_state())
        assert_equal(found["optimizer"], reference.optimizer_state(flat=True))


@pytest.mark.long
@pytest.mark.parametrize("ranks", [1, 2])
def test_fsdp2(ranks: int, tmp_path: Path) -> None:
    with_stock_optimizers(ranks, tmp_path, flat=(True,))


@pytest.mark.long
@pytest.mark.parametrize("ranks", [1, 2])
def test_fsdp2_nested(ranks: int, tmp_path: Path) -> None:
    with_stock_optimizers(ranks, tmp_path, flat=(False,))


def with_stock_optimizers(ranks: int, tmp_path: Path, flat: tuple[bool, ...]) -> None:
    """Training continues, bit for bit, as from a stock checkpoint of the same training."""
    ours = Ours(tmp_path / "run").train(*TRAINED)
    ours.store.checkpoint(tmp_path / "checkpoint", model=ours.model)
    ours.store.close()
    reference = Reference("layers").train(*TRAINED)
    options = {"model": "layers", "sharded": True, "steps": GOES_ON}
    jobs: list[Job] = []
    for form in flat:
        stock = tmp_path / f"stock {form}"
        save_with_dcp(reference, stock, flat=form, prefix=True)
        for name, path in (("ours", tmp_path / "checkpoint"), ("stock", stock)):
            job = {**options, "path": str(path), "flat": form}
            jobs.append((f"{name} {form}", "load", job))
    found = read_with_stock(jobs, tmp_path / "reader", ranks=ranks)
    for form in flat:
        result = found[f"ours {form}"]
        assert_equal(result["model"], reference.model_state())
        assert_equal(result["optimizer"], reference.optimizer_state(flat=form))
        assert_equal(result["after"], found[f"stock {form}"]["after"])
        assert list(result["after"]) == list(GOES_ON)


class Extras(nn.Module):
    """A module with extra state of any kind."""

    def __init__(self, extra: Any) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)
        self.extra = extra

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        self.extra = state


@pytest.mark.parametrize(
    ("kind", "extra", "other"),
    [
        ("tensor", torch.arange(3), torch.zeros(3, dtype=torch.int64)),
        ("plain", (1, "two"), (0, "")),
        ("dict", {"calls": 3, "scale": {"in": torch.ones(2)}}, None),
        ("list", [torch.ones(1), torch.arange(2)], None),
        ("none", None, None),
    ],
)
def test_extra_state(kind: str, extra: Any, other: Any, tmp_path: Path) -> None:
    """DCP has an entry for each part of a dict, and one for anything else."""
    if kind == "dict":
        other = {"calls": 0, "scale": {"in": torch.zeros(2)}}
    if kind == "list":
        other = [torch.zeros(1), torch.zeros(2, dtype=torch.int64)]
    models = Extras(extra), Extras(other)
    ours = trained_ones(models[0], tmp_path)
    ours.store.checkpoint(tmp_path / "checkpoint", model=models[0])
    state = {"model": models[1].state_dict()}
    dcp.load(state, checkpoint_id=tmp_path / "checkpoint", no_dist=True)
    assert_equal(state["model"]["_extra_state"], extra)
    dcp.save({"model": models[0].state_dict()}, checkpoint_id=tmp_path / "stock", no_dist=True)
    stock = entries(tmp_path / "stock")
    assert entries(tmp_path / "checkpoint").items() >= stock.items()


def entries(checkpoint: Path) -> dict[str, Any]:
    """Key -> path in the state dict."""
    metadata = dcp.FileSystemReader(checkpoint).read_metadata()
    assert metadata.planner_data.keys() == metadata.state_dict_metadata.keys()
    return dict(metadata.planner_data)


def trained_ones(model: nn.Module, directory: Path) -> Ours:
    """A step of this model with gradients of ones."""
    ours = Ours(directory / "run", model=model)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.ones_like(parameter)
    ours.optimizer.step()
    return ours


def plain(model: nn.Module) -> nn.Module:
    return model


def checkpointed(model: nn.Module) -> nn.Module:
    model.hidden = checkpoint_wrapper(model.hidden)
    return model


def compiled_inside(model: nn.Module) -> nn.Module:
    model.hidden = torch.compile(model.hidden)
    return model


def compiled_ddp(model: nn.Module) -> nn.Module:
    return torch.compile(nn.parallel.DistributedDataParallel(model))


def ddp_compiled(model: nn.Module) -> nn.Module:
    return nn.parallel.DistributedDataParallel(torch.compile(model))


WRAPPERS = {
    "plain": plain,
    "compiled": torch.compile,
    "compiled inside": compiled_inside,
    "DDP": nn.parallel.DistributedDataParallel,
    "compiled DDP": compiled_ddp,
    "DDP of compiled": ddp_compiled,
    "checkpoint_wrapper": checkpointed,
    "checkpoint_wrapper of all": checkpoint_wrapper,
}


@pytest.fixture(scope="module")
def group(tmp_path_factory: pytest.TempPathFactory) -> Any:
    path = tmp_path_factory.mktemp("group") / "rendezvous"
    torch.distributed.init_process_group("gloo", init_method=f"file://{path}", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.quick(8)
@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("given", ["wrapped", "inner", "none"])
@pytest.mark.parametrize("wrapper", list(WRAPPERS))
def test_wrappers(wrapper: str, given: str, tmp_path: Path) -> None:
    """The names equal the names of torch's own helpers, whatever wraps the model."""
    inner = make_model("layers", seed=0)
    wrapped = WRAPPERS[wrapper](inner)
    ours = trained_ones(wrapped, tmp_path)
    model = {"wrapped": wrapped, "inner": inner, "none": None}[given]
    ours.store.checkpoint(tmp_path / "checkpoint", model=model)
    ours.store.close()
    expected: dict[str, Any] = {"model": whole(get_model_state_dict(wrapped))}
    if model is None:
        del expected["model"]["mean"]
    target = {"model": {name: torch.full_like(t, 7) for name, t in expected["model"].items()}}
    dcp.load(target, checkpoint_id=tmp_path / "checkpoint")
    assert_equal(target, expected)
    names = {name for name, _ in make_model("layers", seed=0).named_parameters()}
    found = entries(tmp_path / "checkpoint")
    assert {path[2] for path in found.values() if path[:2] == ("optimizer", "state")} == names


def test_without_a_model(tmp_path: Path) -> None:
    """The paged tensors under the names of the optimizer, and nothing else."""
    ours = Ours(tmp_path / "run", "everything").train(1)
    ours.store.checkpoint(tmp_path / "checkpoint")
    found = {path[1] for path in entries(tmp_path / "checkpoint").values() if path[0] == "model"}
    assert found == {name for name, p in ours.model.named_parameters() if p.requires_grad}
    state = {"model": {name: torch.full_like(ours.model.state_dict()[name], 7) for name in found}}
    dcp.load(state, checkpoint_id=tmp_path / "checkpoint", no_dist=True)
    assert_equal(state["model"], {name: ours.model.state_dict()[name] for name in found})


@pytest.mark.parametrize("given", [True, False])
def test_a_model_that_is_all_in_a_submodule_called_module(given: bool, tmp_path: Path) -> None:
    """As if it were wrapped in DistributedDataParallel; only the model itself tells."""
    model = nn.Module()
    model.module = Layers()
    ours = trained_ones(model, tmp_path)
    ours.store.checkpoint(tmp_path / "checkpoint", model=model if given else None)
    found = {path[1] for path in entries(tmp_path / "checkpoint").values() if path[0] == "model"}
    assert ("module.hidden.weight" in found) == given
    assert ("hidden.weight" in found) == (not given)


def test_frozen_and_unfrozen_between_checkpoints(tmp_path: Path) -> None:
    """A parameter is published wherever it is: in a page, or beside them."""
    model = make_model("layers", seed=0)
    model.head.requires_grad_(False)
    ours = Ours(tmp_path / "run", model=model).train(1)
    ours.store.checkpoint(tmp_path / "frozen", model=model)
    model.head.requires_grad_(True)
    ours.optimizer.add_param_group(
        {"params": [("head.weight", model.head.weight)], "algorithm": "adamw"}
    )
    # The group is not attached before the next step.
    ours.store.checkpoint(tmp_path / "unfrozen", model=model)
    before = whole(model.state_dict())
    ours.train(2)
    ours.store.checkpoint(tmp_path / "stepped", model=model)
    for path, expected in (
        ("frozen", before),
        ("unfrozen", before),
        ("stepped", whole(model.state_dict())),
    ):
        state = {"model": make_model("layers", seed=1).state_dict()}
        dcp.load(state, checkpoint_id=tmp_path / path, no_dist=True)
        assert_equal(state["model"], expected)


def test_a_scheduler_and_a_tensor_lr(tmp_path: Path) -> None:
    """Hyperparameters are those at the commit, not those that the groups began with."""
    ours = Ours(tmp_path / "run")
    ours.optimizer.param_groups[0]["lr"] = torch.tensor(0.25)
    scheduler = torch.optim.lr_scheduler.StepLR(ours.optimizer, step_size=1, gamma=0.5)
    ours.train(1)
    scheduler.step()
    ours.store.checkpoint(tmp_path / "checkpoint", model=ours.model)
    reference = Reference("layers")
    reference.optimizers[0].param_groups[0]["lr"] = torch.tensor(1.0)
    other_scheduler = [torch.optim.lr_scheduler.StepLR(o, 1) for o in reference.optimizers]
    assert len(other_scheduler) == 2  # They add initial_lr.
    state = {"optimizer": get_optimizer_state_dict(reference.model, reference.optimizers)}
    dcp.load(state, checkpoint_id=tmp_path / "checkpoint", no_dist=True)
    groups = state["optimizer"]["param_groups"]
    assert_equal([group["lr"] for group in groups], [torch.tensor(0.125), 0.002])
    assert_equal([group["initial_lr"] for group in groups], [torch.tensor(0.25), 0.004])
