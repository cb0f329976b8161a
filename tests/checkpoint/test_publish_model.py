"""checkpoint(model=...): names without wrappers, and values that a checkpoint cannot hold."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

import muon
import tierstore
from tests.support.published import assert_equal, assert_nothing_left, tensors_in


class Model(nn.Module):
    """Parameters in modules of any names, buffers, and an extra state."""

    def __init__(
        self, modules: dict[str, nn.Module], buffer: Any = None, extra_state: Any = None
    ) -> None:
        super().__init__()
        for name, module in modules.items():
            self.add_module(name, module)
        self.register_buffer("mean", torch.ones(3) if buffer is None else buffer)
        self.extra_state = extra_state

    def get_extra_state(self) -> Any:
        return self.extra_state

    def set_extra_state(self, state: Any) -> None:
        self.extra_state = state


class Trained:
    """A model after some steps of a run."""

    def __init__(self, directory: Path, model: nn.Module) -> None:
        self.model = model
        self.run, self.folder = directory / "run", directory / "folder"
        self.store = tierstore.TierStore(self.run, page_bytes=4096)
        groups = [{"params": list(model.named_parameters()), "algorithm": "adamw"}]
        self.optimizer = muon.Muon(groups, store=self.store)
        self.step()

    def step(self) -> None:
        for parameter in self.model.parameters():
            parameter.grad = torch.ones_like(parameter)
        self.optimizer.step()


@pytest.mark.parametrize("given", [True, False])
def test_a_name_that_ends_like_a_wrapper(given: bool, tmp_path: Path) -> None:
    """The last part of a name is not a module."""
    modules = {"my_orig_mod": nn.Linear(3, 2), "_orig_model": nn.Linear(2, 2)}
    inner = nn.Module()
    inner.register_parameter("_orig_mod", nn.Parameter(torch.ones(4)))
    trained = Trained(tmp_path, Model({**modules, "inner": inner}))
    model = trained.model if given else None
    trained.store.checkpoint(trained.folder / "1", model=model)
    names = {name for name, _ in trained.model.named_parameters()}
    assert {"my_orig_mod.weight", "_orig_model.bias", "inner._orig_mod"} < names
    found = tensors_in(trained.folder / "1")
    assert {f"model.{name}" for name in names} <= found.keys()
    if given:
        state = {"model": {key: torch.zeros_like(t) for key, t in state_of(trained.model).items()}}
        dcp.load(state, checkpoint_id=trained.folder / "1", no_dist=True)
        assert_equal(state["model"], state_of(trained.model))
    trained.store.close()


def state_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {
        key: value for key, value in model.state_dict().items() if isinstance(value, torch.Tensor)
    }


@pytest.mark.parametrize("given", [True, False])
def test_two_names_that_are_equal_without_wrappers(given: bool, tmp_path: Path) -> None:
    outer = nn.Linear(2, 2)
    outer.add_module("_orig_mod", nn.Linear(2, 2))
    trained = Trained(tmp_path, Model({"layer": outer}))
    trained.store.synchronize()
    with pytest.raises(
        tierstore.CheckpointError, match=r"'layer\.weight' and 'layer\._orig_mod\.weight' have the"
    ):
        trained.store.checkpoint(trained.folder / "1", model=trained.model if given else None)
    assert_nothing_left(trained.run, trained.folder)
    trained.step()
    trained.store.close()


class Stubborn:
    def __reduce__(self) -> Any:
        raise RuntimeError("not now")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"buffer": torch.eye(3).to_sparse()}, r"'mean' of the model .*torch\.sparse_coo"),
        ({"buffer": torch.ones(3, device="meta")}, r"'mean' of the model .*device meta"),
        (
            {"extra_state": {"a": [torch.ones(2), {"b": torch.eye(3).to_sparse()}]}},
            r"'_extra_state\.a\.1\.b' of the model .*torch\.sparse_coo",
        ),
        ({"extra_state": {"f": lambda: 1}}, r"'_extra_state\.f' of the model .*lambda"),
        ({"extra_state": Stubborn()}, r"'_extra_state' of the model .*not now"),
    ],
)
def test_values_that_a_checkpoint_cannot_hold(
    options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    """The error names the value, and nothing is written."""
    trained = Trained(tmp_path, Model({"layer": nn.Linear(2, 2)}, **options))
    trained.store.synchronize()
    with pytest.raises(tierstore.CheckpointError, match=message):
        trained.store.checkpoint(trained.folder / "1", model=trained.model)
    assert_nothing_left(trained.run, trained.folder)
    trained.step()
    trained.store.checkpoint(trained.folder / "2")
    trained.store.close()
