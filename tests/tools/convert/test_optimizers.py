"""State dicts of published optimizers: the moments that these gradients make, whatever the source.

The optimizers of others are not installed. Each is a few lines here, after its published update
rule and with the keys of its state dict; torch.optim is torch's own. What a conversion must give is
computed apart, in float64, from the gradients alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
)

import muon
import tierstore
from tests.support.commands import call
from tests.support.conversions import no_trace
from tierstore.tools.convert.convert import convert

STEPS, MU, BETAS = 4, 0.9, (0.8, 0.95)
MATRICES, OTHERS = ("hidden.weight", "head.weight"), ("hidden.bias", "head.bias")


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.ModuleDict({"hidden": nn.Linear(5, 7), "head": nn.Linear(7, 3)})


def gradients_of(step: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {
        name: torch.randn(parameter.shape, generator=generator)
        for name, parameter in make_model().named_parameters()
    }


def average(name: str, beta: float, power: int = 1) -> torch.Tensor:
    """The running average of the gradients of all steps, in float64."""
    found = torch.zeros(gradients_of(0)[name].shape, dtype=torch.float64)
    for step in range(STEPS):
        found = beta * found + (1 - beta) * gradients_of(step)[name].double() ** power
    return found


class Rule(torch.optim.Optimizer):
    """An optimizer that makes moments, of the kind that its source has, and changes no weight.

    Args:
        groups: param groups with the keys of the source.
        heavy_ball: whether Muon's momentum is a sum.
        moments: the names of AdamW's moments.
        flag_in_state: whether the states, not the groups, say which parameters are Muon's.
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        *,
        heavy_ball: bool,
        moments: tuple[str, str],
        flag_in_state: bool,
    ) -> None:
        super().__init__(groups, {})
        self._heavy_ball = heavy_ball
        self._moments = moments
        self._flag_in_state = flag_in_state

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                assert parameter.grad is not None
                gradient, state = parameter.grad, self.state[parameter]
                is_muon = group.get("use_muon", parameter.ndim == 2)
                if self._flag_in_state:
                    state["use_muon"] = is_muon
                if is_muon:
                    buffer = state.setdefault("momentum_buffer", torch.zeros_like(gradient))
                    if self._heavy_ball:
                        buffer.mul_(group["momentum"]).add_(gradient)
                    else:
                        buffer.lerp_(gradient, 1 - group["momentum"])
                    continue
                state["step"] = state.get("step", 0) + 1
                betas = group.get("betas", group.get("adamw_betas"))
                for name, beta, power in zip(self._moments, betas, (1, 2), strict=True):
                    state.setdefault(name, torch.zeros_like(gradient))
                    state[name].lerp_(gradient**power, 1 - beta)


OURS = ("exp_avg", "exp_avg_sq")
THEIRS = ("moment1", "moment2")
ONE_GROUP = {
    "lr": 0.02,
    "momentum": MU,
    "nesterov": True,
    "ns_steps": 5,
    "adamw_betas": BETAS,
    "adamw_eps": 1e-8,
}


def kellerjordan(matrices: list[nn.Parameter], others: list[nn.Parameter]) -> Any:
    groups = [
        {
            "params": matrices,
            "lr": 0.02,
            "momentum": MU,
            "weight_decay": 0.1,
            "use_muon": True,
        },
        {
            "params": others,
            "lr": 3e-4,
            "betas": BETAS,
            "eps": 1e-10,
            "weight_decay": 0.2,
            "use_muon": False,
        },
    ]
    return [Rule(groups, heavy_ball=False, moments=OURS, flag_in_state=False)]


def kellerjordan_2024(matrices: list[nn.Parameter], others: list[nn.Parameter]) -> Any:
    group = {**ONE_GROUP, "adamw_lr_ratio": 0.015, "adamw_wd": 0.2, "params": [*matrices, *others]}
    return [Rule([group], heavy_ball=True, moments=THEIRS, flag_in_state=True)]


def moonlight(matrices: list[nn.Parameter], others: list[nn.Parameter]) -> Any:
    group = {**ONE_GROUP, "wd": 0.1, "params": [*matrices, *others]}
    return [Rule([group], heavy_ball=True, moments=THEIRS, flag_in_state=True)]


def motif(matrices: list[nn.Parameter], others: list[nn.Parameter]) -> Any:
    more = {**ONE_GROUP, "weight_decay": 0.1, "none_grad": True}
    groups = [
        {"params": matrices, "names": list(MATRICES), "use_muon": True, **more},
        {"params": others, "use_muon": False, **more},
    ]
    return [Rule(groups, heavy_ball=True, moments=THEIRS, flag_in_state=False)]


def stock(matrices: list[nn.Parameter], others: list[nn.Parameter]) -> Any:
    return [
        torch.optim.Muon(matrices, lr=0.02, momentum=MU, weight_decay=0.1),
        torch.optim.AdamW(others, lr=3e-4, betas=BETAS, eps=1e-10, weight_decay=0.2),
    ]


def ours(matrices: list[nn.Parameter], others: list[nn.Parameter]) -> Any:
    groups: list[dict[str, Any]] = [
        {"params": matrices, "lr": 0.02, "momentum": MU, "weight_decay": 0.1},
        {
            "params": others,
            "algorithm": "adamw",
            "lr": 3e-4,
            "betas": BETAS,
            "eps": 1e-10,
            "weight_decay": 0.2,
        },
    ]
    return [muon.Muon(groups)]


@dataclass(frozen=True)
class Source:
    make: Callable[[list[nn.Parameter], list[nn.Parameter]], Any]
    muon: dict[str, Any]
    """Hyperparameters of Muon's group in the destination."""
    adamw: dict[str, Any]
    is_changed: bool = False
    """True if its momentum is a heavy ball."""


MUON = {"lr": 0.02, "momentum": MU, "weight_decay": 0.1, "adjust_lr_fn": "original"}
ADAMW = {"lr": 3e-4, "betas": BETAS, "eps": 1e-10, "weight_decay": 0.2}
RMS = {**MUON, "adjust_lr_fn": "match_rms_adamw", "nesterov": True, "ns_steps": 5}
SHARED = {"lr": 0.02, "betas": BETAS, "eps": 1e-8, "weight_decay": 0.1}
SOURCES = {
    "kellerjordan": Source(kellerjordan, MUON, ADAMW),
    "moonlight": Source(moonlight, RMS, SHARED, is_changed=True),
    "motif": Source(motif, RMS, SHARED, is_changed=True),
    "torch.optim": Source(stock, {**MUON, "adjust_lr_fn": None}, ADAMW),
    "muon.Muon": Source(ours, {**MUON, "adjust_lr_fn": None}, ADAMW),
}


def train(make: Callable[..., Any]) -> tuple[nn.Module, Any]:
    """Train; return the model and its optimizers."""
    model = make_model()
    named = dict(model.named_parameters())
    optimizers = make([named[n] for n in MATRICES], [named[n] for n in OTHERS])
    for step in range(STEPS):
        for name, gradient in gradients_of(step).items():
            named[name].grad = gradient
        for optimizer in optimizers:
            optimizer.step()
    return model, optimizers


def write(make: Callable[..., Any], path: Path) -> None:
    """Train, and save as a program does: without names of parameters."""
    model, optimizers = train(make)
    state = [optimizer.state_dict() for optimizer in optimizers]
    torch.save({"model": model.state_dict(), "optimizer": state}, path)


def assert_moments(path: Path) -> dict[str, dict[str, Any]]:
    """Check the states of a converted file; return the group of each parameter."""
    found = torch.load(path, weights_only=True)["optimizer"]
    groups = {}
    for group in found["param_groups"]:
        for number, name in zip(group["params"], group["param_names"], strict=True):
            groups[name] = group
            state = found["state"][number]
            expected = {"momentum_buffer": average(name, MU)}
            if name in OTHERS:
                expected = {
                    "exp_avg": average(name, BETAS[0]),
                    "exp_avg_sq": average(name, BETAS[1], power=2),
                }
                assert state.pop("step") == STEPS
            assert state.keys() == expected.keys()
            for key, tensor in expected.items():
                torch.testing.assert_close(state[key].double(), tensor, rtol=1e-6, atol=1e-6)
    assert groups.keys() == {*MATRICES, *OTHERS}
    return groups


@pytest.mark.parametrize("name", SOURCES)
def test_moments_and_hyperparameters(name: str, tmp_path: Path) -> None:
    source = SOURCES[name]
    write(source.make, tmp_path / "in.pt")
    conversion = convert(tmp_path / "in.pt", tmp_path / "out.pt", to="torch")
    assert conversion.lost == []
    if source.is_changed:
        (note,) = conversion.notes
        assert note.startswith("momentum_buffer of 2 parameters was a heavy ball and is now a")
    else:
        assert conversion.notes == []
    groups = assert_moments(tmp_path / "out.pt")
    for members, expected in ((MATRICES, source.muon), (OTHERS, source.adamw)):
        for parameter in members:
            group = groups[parameter]
            assert {key: group[key] for key in expected} == expected
    again = convert(tmp_path / "out.pt", tmp_path / "again.pt", to="torch")
    assert again.notes == []
    assert_moments(tmp_path / "again.pt")


def write_dcp(make: Callable[..., Any], path: Path, *, flat: bool) -> None:
    """Train, and save as programs do that use torch.distributed.checkpoint.state_dict."""
    model, optimizers = train(make)
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    optimizer = get_optimizer_state_dict(model, optimizers, options=options)
    dcp.save(
        {"model": get_model_state_dict(model), "optimizer": optimizer},
        checkpoint_id=path,
        no_dist=True,
    )


@pytest.mark.quick(3)
@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("name", SOURCES)
def test_moments_in_dcp(name: str, flat: bool, tmp_path: Path) -> None:
    """Also what was converted before: its momentum is not taken for a heavy ball again."""
    source = SOURCES[name]
    write_dcp(source.make, tmp_path / "in", flat=flat)
    first = convert(tmp_path / "in", tmp_path / "first", to="dcp")
    assert len(first.notes) == source.is_changed
    assert convert(tmp_path / "first", tmp_path / "second", to="dcp").notes == []
    convert(tmp_path / "second", tmp_path / "out.pt", to="torch")
    groups = assert_moments(tmp_path / "out.pt")
    for members, expected in ((MATRICES, source.muon), (OTHERS, source.adamw)):
        for parameter in members:
            group = groups[parameter]
            assert {key: group[key] for key in expected} == expected
            assert group.get("use_muon") is None


def test_a_convention_that_was_given_is_told_by_the_result(tmp_path: Path) -> None:
    def make(matrices: list[nn.Parameter], others: list[nn.Parameter]) -> Any:
        groups = [{"params": matrices, "lr": 0.02, "momentum": MU, "use_muon": True}]
        more = {"params": others, "betas": BETAS, "use_muon": False}
        return [Rule([*groups, more], heavy_ball=True, moments=OURS, flag_in_state=False)]

    write_dcp(make, tmp_path / "in", flat=True)
    with no_trace(tmp_path), pytest.raises(tierstore.CheckpointError, match="does not tell"):
        convert(tmp_path / "in", tmp_path / "out", to="dcp")
    convert(tmp_path / "in", tmp_path / "out", to="dcp", momentum_convention="heavy-ball")
    assert convert(tmp_path / "out", tmp_path / "out.pt", to="torch").notes == []
    assert_moments(tmp_path / "out.pt")


@pytest.mark.parametrize(
    ("name", "given"), [("torch.optim", "heavy-ball"), ("moonlight", "average")]
)
def test_a_convention_that_contradicts_the_files_is_refused(
    name: str, given: str, tmp_path: Path
) -> None:
    write(SOURCES[name].make, tmp_path / "in.pt")
    with no_trace(tmp_path), pytest.raises(tierstore.CheckpointError, match="the files tell"):
        convert(tmp_path / "in.pt", tmp_path / "out.pt", to="torch", momentum_convention=given)


def test_a_convention_without_momentum_is_refused(tmp_path: Path) -> None:
    torch.save(make_model().state_dict(), tmp_path / "in.pt")
    with no_trace(tmp_path), pytest.raises(tierstore.CheckpointError, match="does not apply"):
        convert(tmp_path / "in.pt", tmp_path / "out", to="dcp", momentum_convention="average")


@pytest.mark.parametrize("name", SOURCES)
def test_training_goes_on_in_muon(name: str, tmp_path: Path) -> None:
    """Our optimizer takes the state dict, and its next moments include the source's moments."""
    write(SOURCES[name].make, tmp_path / "in.pt")
    convert(tmp_path / "in.pt", tmp_path / "out.pt", to="torch")
    model = make_model()
    named = dict(model.named_parameters())
    groups: list[dict[str, Any]] = [
        {"params": [(n, named[n]) for n in MATRICES]},
        {"params": [(n, named[n]) for n in OTHERS], "algorithm": "adamw"},
    ]
    optimizer = muon.Muon(groups)
    optimizer.load_state_dict(torch.load(tmp_path / "out.pt")["optimizer"])
    gradients = gradients_of(STEPS)
    for parameter, gradient in gradients.items():
        named[parameter].grad = gradient
    optimizer.step()
    for parameter in MATRICES:
        expected = MU * average(parameter, MU) + (1 - MU) * gradients[parameter].double()
        state = optimizer.state[named[parameter]]["momentum_buffer"]
        torch.testing.assert_close(state.double(), expected, rtol=1e-6, atol=1e-6)
    for parameter in OTHERS:
        assert optimizer.state[named[parameter]]["step"] == STEPS + 1


@pytest.mark.parametrize("name", ["kellerjordan", "moonlight", "motif"])
def test_training_goes_on_in_torch(name: str, tmp_path: Path) -> None:
    write(SOURCES[name].make, tmp_path / "in.pt")
    convert(tmp_path / "in.pt", tmp_path / "out.pt", to="torch")
    named = dict(make_model().named_parameters())
    optimizer = torch.optim.Muon([named[name] for name in MATRICES])
    optimizer.load_state_dict(torch.load(tmp_path / "out.pt")["optimizers"]["muon"])
    gradients = gradients_of(STEPS)
    for parameter in MATRICES:
        named[parameter].grad = gradients[parameter]
    optimizer.step()
    for parameter in MATRICES:
        expected = MU * average(parameter, MU) + (1 - MU) * gradients[parameter].double()
        state = optimizer.state[named[parameter]]["momentum_buffer"]
        torch.testing.assert_close(state.double(), expected, rtol=1e-6, atol=1e-6)


def test_the_first_optimizer_of_kellerjordan_does_not_tell(tmp_path: Path) -> None:
    """It had a heavy ball first and a running average later, under the same keys."""
    write(kellerjordan_2024, tmp_path / "in.pt")
    arguments = ("convert", tmp_path / "in.pt", tmp_path / "out.pt", "--to", "torch")
    with no_trace(tmp_path):
        code, _, error = call(*arguments)
        assert (code, "pass --momentum-convention average or heavy-ball" in error) == (2, True)
    code, _, error = call(*arguments, "--momentum-convention", "heavy-ball")
    assert (code, "it was multiplied by 1 - momentum" in error) == (0, True)
    groups = assert_moments(tmp_path / "out.pt")
    expected = {"lr": 0.02, "weight_decay": 0.0, "adjust_lr_fn": "original", "algorithm": "muon"}
    assert {key: groups["head.weight"][key] for key in expected} == expected
    expected = {"lr": 0.02 * 0.015, "weight_decay": 0.2, "betas": BETAS, "algorithm": "adamw"}
    assert {key: groups["head.bias"][key] for key in expected} == expected


@pytest.mark.parametrize(
    "change", [{"muon_mode": "sgd"}, {"wd": None, "weight_decay": 0.1}, {"adamw_lr": 1e-3}], ids=str
)
def test_optimizers_that_resemble_another_do_not_tell(
    change: dict[str, Any], tmp_path: Path
) -> None:
    def make(matrices: list[nn.Parameter], others: list[nn.Parameter]) -> Any:
        group = {**ONE_GROUP, "wd": 0.1, **change, "params": [*matrices, *others]}
        group = {key: value for key, value in group.items() if value is not None}
        return [Rule([group], heavy_ball=True, moments=THEIRS, flag_in_state=True)]

    write(make, tmp_path / "in.pt")
    with no_trace(tmp_path), pytest.raises(tierstore.CheckpointError, match="momentum-convention"):
        convert(tmp_path / "in.pt", tmp_path / "out.pt", to="torch")


def flashoptim(tmp_path: Path, dtype: torch.dtype, state: dict[str, torch.Tensor]) -> Path:
    model = {"w": torch.randn(4, 3).to(dtype)}
    group = {"lr": 1e-3, "betas": BETAS, "weight_decay": 0.1, "params": [0]}
    optimizer = {"state": {0: state}, "param_groups": [group]}
    torch.save({"model": model, "optimizer": optimizer}, tmp_path / "in.pt")
    return tmp_path / "in.pt"


def test_states_that_flashoptim_has_packed(tmp_path: Path) -> None:
    whole = {
        "step": torch.tensor(2.0),
        "exp_avg": torch.randn(4, 3),
        "exp_avg_sq": torch.rand(4, 3),
    }
    bits = torch.ones(4, 3, dtype=torch.int8)
    for dtype, state, problem in (
        (torch.bfloat16, {**whole, "error_bits": bits}, "get_fp32_model_state_dict"),
        (
            torch.float32,
            {"exp_avg::quantized": bits, "exp_avg::scales": torch.ones(1)},
            "compress_state_dict=False",
        ),
    ):
        path = flashoptim(tmp_path, dtype, state)
        with no_trace(tmp_path), pytest.raises(tierstore.CheckpointError, match=problem):
            convert(path, tmp_path / "out.pt", to="torch")
    # Weights that were saved whole have the bits already.
    path = flashoptim(tmp_path, torch.float32, {**whole, "error_bits": bits})
    convert(path, tmp_path / "out.pt", to="torch")
    found = torch.load(tmp_path / "out.pt")["optimizer"]["state"][0]
    assert found.keys() == whole.keys()
