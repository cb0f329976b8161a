"""A run resumes with or without the wrappers of a model, whose names are parts of parameter names.

The wrappers are torch.compile, checkpoint wrappers, FSDP, DataParallel and DistributedDataParallel.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import muon
import tierstore
from tests.support.kept import commit_with, wanted
from tests.support.published import tensors_in
from tests.support.toy import (
    FIRST,
    SECOND,
    THIRD,
    Spec,
    Toy,
    make_run,
    unchanged,
    unchanged_parameters,
)
from tierstore.tools.inspect.verify import verify

Wrap = Callable[[nn.Module], nn.Module]


def compiled(model: nn.Module) -> nn.Module:
    wrapped: Any = torch.compile(model)  # Nothing is compiled before a forward.
    return nn.Sequential(wrapped)


def checkpointed(model: nn.Module) -> nn.Module:
    return nn.Sequential(checkpoint_wrapper(model))


def parallel(model: nn.Module) -> nn.Module:
    return nn.DataParallel(nn.Sequential(model))


def parallel_inside(model: nn.Module) -> nn.Module:
    return nn.Sequential(nn.DataParallel(model))


def train(model: nn.Module, directory: Path | None, steps: range) -> dict[int, dict[str, Any]]:
    """Restore, do some steps, and return the state at the end."""
    with tierstore.TierStore(directory, resume=directory is not None) as store:
        optimizer = muon.Muon(muon.param_groups(model), store=store)
        if directory is not None:
            with wanted(store) as kept:
                assert optimizer.restore() == steps.start
            assert kept == ({"state": f"step {steps.start}"} if steps.start else {})
        for step in steps:
            for weight in model.parameters():
                weight.grad = torch.full_like(weight, step + 1.0)
            optimizer.step()
            if directory is not None:
                commit_with(store, f"step {step + 1}")
        state: dict[int, dict[str, Any]] = optimizer.state_dict()["state"]
    return state


@pytest.mark.quick(3)
@pytest.mark.parametrize("wrapped_first", [True, False])
@pytest.mark.parametrize("wrap", [compiled, checkpointed, parallel, parallel_inside])
def test_a_run_resumes_with_or_without_a_wrapper(
    wrap: Wrap, wrapped_first: bool, tmp_path: Path
) -> None:
    """The result equals a model that was never wrapped, also after a resume without a step."""
    expected = nn.Linear(3, 4)
    layers = [nn.Linear(3, 4) for _ in range(3)]
    for layer in layers:
        layer.load_state_dict(expected.state_dict())
    expected_state = train(nn.Sequential(expected), None, range(5))
    for layer, wrapped, steps in zip(
        layers,
        (wrapped_first, not wrapped_first, wrapped_first),
        (range(2), range(2, 2), range(2, 5)),
        strict=True,
    ):
        state = train(wrap(layer) if wrapped else nn.Sequential(layer), tmp_path, steps)
    torch.testing.assert_close(state, expected_state, rtol=0, atol=0)
    torch.testing.assert_close(layers[2].state_dict(), expected.state_dict(), rtol=0, atol=0)


def named(*names: str) -> list[list[Spec]]:
    """Return the toy model with its first two parameters under other names."""
    return [[(name, *spec[1:]) for name, spec in zip(names, (FIRST, SECOND), strict=True)], [THIRD]]


def test_a_step_that_was_restored_under_other_names_is_published_whole(tmp_path: Path) -> None:
    make_run(tmp_path / "run")
    groups = named("_orig_mod.first", "_orig_mod.second")
    toy = Toy(tmp_path / "run", groups, resume=True)
    assert toy.store.restore() == 3
    toy.store.checkpoint(tmp_path / "checkpoint")
    toy.store.close()
    for directory in (tmp_path / "run", tmp_path / "checkpoint"):
        assert verify(directory).faults == ()
    assert "model.first" in tensors_in(tmp_path / "checkpoint")


def test_a_module_named_module_keeps_its_name(tmp_path: Path) -> None:
    """Checkpoints have the keys that the model has without a wrapper."""
    toy = Toy(tmp_path / "run", named("layer.module.first", "layer.second"))
    toy.step()
    toy.store.checkpoint(tmp_path / "checkpoint")
    toy.store.close()
    assert {"model.layer.module.first", "model.layer.second"} <= tensors_in(
        tmp_path / "checkpoint"
    ).keys()


def test_names_that_are_equal_without_wrappers_are_told_apart(tmp_path: Path) -> None:
    """A model with both names resumes as it is, and is refused in another order."""
    same: Spec = ("module.first", *FIRST[1:])
    toy = Toy(tmp_path, [[FIRST, same]])
    toy.step()
    toy.store.close()
    toy = Toy(tmp_path, [[same, FIRST]], resume=True)
    with (
        unchanged(tmp_path),
        unchanged_parameters(toy),
        pytest.raises(tierstore.RunMismatchError, match=r"has in group 0 'module\.first'"),
    ):
        toy.store.restore()
    toy.store.close()
    toy = Toy(tmp_path, [[FIRST, same]], resume=True)
    assert toy.store.restore() == 1
    toy.store.close()


def test_a_refused_model_is_compared_without_wrappers(tmp_path: Path) -> None:
    """The first difference is not a wrapper, and the advice begins with what loses nothing."""
    make_run(tmp_path)
    toy = Toy(tmp_path, named("module.first", "module.2nd"), resume=True)
    with pytest.raises(
        tierstore.RunMismatchError,
        match=r"lacks 1 .*'second'.* has further 1 .*'module\.2nd'.* Build the model",
    ) as caught:
        toy.store.restore()
    advice = str(caught.value)
    assert advice.index("as they were") < advice.index("another directory")
    assert advice.index("another directory") < advice.index("overwrite=True")
    toy.store.close()
