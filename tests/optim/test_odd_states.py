"""Odd states of classes: with the bits of the class, or refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from pytorch_optimizer import SOAP, ScheduleFreeAdamW, Shampoo
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    get_state_dict,
    set_state_dict,
)

import tierstore
from tests.support.class_training import PAGES, gradient, parameters
from tests.support.rank_pool import RankPool
from tierstore.tools.convert.convert import convert

SHAPES = ((7, 5), (6, 6), (4,))


def twins(cls: Any, **options: Any) -> tuple[Any, Any, Callable[[int], None]]:
    own, other = parameters(torch.float32, SHAPES), parameters(torch.float32, SHAPES)
    paged = tierstore.Paged(own.items(), cls, **options)
    stock = cls([*other.values()], **options)

    def step(number: int) -> None:
        for index, (mine, theirs) in enumerate(zip(own.values(), other.values(), strict=True)):
            mine.grad, theirs.grad = (gradient(number, index, of) for of in (mine, theirs))
        paged.step()
        stock.step()
        for mine, theirs in zip(own.values(), other.values(), strict=True):
            assert torch.equal(mine, theirs)

    return paged, stock, step


@pytest.mark.parametrize("cls", [SOAP, Shampoo, ScheduleFreeAdamW])
def test_a_state_dict_before_the_first_step_begins_anew(cls: Any) -> None:
    paged, _, step = twins(cls)
    paged.load_state_dict(paged.state_dict())
    parameter = paged.param_groups[0]["params"][0]
    paged.state[parameter] = dict(paged.state[parameter].items())
    for number in range(1, 9):
        step(number)


@pytest.mark.parametrize("cls", [SOAP, Shampoo])
def test_numbers_equal_the_class(cls: Any) -> None:
    paged, stock, step = twins(cls)
    for number in range(1, 4):
        step(number)
    parameter, other = paged.param_groups[0]["params"][0], stock.param_groups[0]["params"][0]
    shown = paged.state[parameter]
    for name, value in stock.state[other].items():
        if isinstance(value, int | float):
            assert (shown[name], type(shown[name])) == (value, type(value))
    key = next(name for name, value in shown.items() if isinstance(value, torch.Tensor))
    shown[key] = 2 * shown[key]
    stock.state[other][key].mul_(2)
    for number in range(4, 9):
        step(number)


def test_parts_of_lists_cannot_be_assigned_alone() -> None:
    paged, stock, step = twins(SOAP)
    step(1)
    parameter, other = paged.param_groups[0]["params"][0], stock.param_groups[0]["params"][0]
    with pytest.raises(TypeError, match="does not support item assignment"):
        paged.state[parameter]["GG"][0] = torch.zeros(7, 7)
    paged.state[parameter]["GG"] = [2 * factor for factor in paged.state[parameter]["GG"]]
    for factor in stock.state[other]["GG"]:
        factor.mul_(2)
    for number in range(2, 5):
        step(number)


def test_a_copy_goes_on_with_the_bits_of_the_class() -> None:
    paged, _, step = twins(SOAP, precondition_frequency=2)
    for number in range(1, 4):
        step(number)
    own, other = copy.deepcopy(paged), copy.deepcopy(paged)
    for number in range(4, 9):
        for optimizer in (own, other):
            for index, parameter in enumerate(optimizer.param_groups[0]["params"]):
                parameter.grad = gradient(number, index, parameter)
            optimizer.step()
    step(4)
    pairs = zip(own.param_groups[0]["params"], other.param_groups[0]["params"], strict=True)
    assert all(torch.equal(one, two) for one, two in pairs)


def test_a_checkpoint_leaves_out_states_of_parameters_without_a_step(tmp_path: Path) -> None:
    """Stock DCP names them, and restore() lets them begin anew."""
    named = parameters(torch.float32, SHAPES)
    with tierstore.TierStore(tmp_path / "run", **PAGES) as store:
        paged = tierstore.Paged(named.items(), SOAP, store=store)
        for number in (1, 2):
            named["p0"].grad = gradient(number, 0, named["p0"])
            paged.step()
        store.checkpoint(tmp_path / "published")
    model = nn.ParameterDict(parameters(torch.float32, SHAPES))
    stock = SOAP(model.parameters())
    contents = {"optimizer": get_optimizer_state_dict(model, stock)}
    with pytest.raises(dcp.api.CheckpointException, match=r"Missing key .* optimizer.state.p1"):
        dcp.load(contents, checkpoint_id=tmp_path / "published")

    begun = parameters(torch.float32, SHAPES)
    with tierstore.TierStore(tmp_path / "new", **PAGES) as store:
        again = tierstore.Paged(begun.items(), SOAP, store=store)
        assert again.restore(tmp_path / "published") == 2
        for number in (3, 4, 6):
            for optimizer, of in ((paged, named), (again, begun)):
                for index, parameter in enumerate(of.values()):
                    parameter.grad = gradient(number, index, parameter)
                if optimizer is again:
                    optimizer.step()
    reference = parameters(torch.float32, SHAPES)
    stock = SOAP([*reference.values()])
    for number in (1, 2, 3, 4, 6):
        for index, parameter in enumerate(reference.values()):
            grad = gradient(number, index, parameter)
            parameter.grad = grad if number > 2 or index == 0 else None
        stock.step()
    for name, parameter in reference.items():
        assert torch.equal(begun[name], parameter)


def test_ranks_with_zeros_and_others_agree(tmp_path: Path) -> None:
    with RankPool(tmp_path) as pool:
        pool.run(2, "tests.rank_programs.classes:load_parts")


class Odd(torch.optim.Optimizer):
    """Keeps what a test says.

    Args:
        params: as of a class.
        keeps: called with the state, the parameter and the number of the step.
    """

    def __init__(self, params: Any, keeps: Any = None, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})
        self.keeps = keeps
        self.count = torch.zeros(1)
        self.kept: dict[Any, Any] = {}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["number"] = group.get("number", 0) + 1
            for p in group["params"]:
                if p.grad is not None:
                    self.keeps(self, self.state[p], p, group["number"])
                    p.sub_(p.grad, alpha=group["lr"])


class Counting(torch.optim.Optimizer):
    """Keeps an int, a float, and momentum."""

    def __init__(self, params: Any, lr: float = 0.125) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in [p for p in group["params"] if p.grad is not None]:
                state = self.state[p]
                if not state:
                    state.update(step=0, decayed=1.0, momentum=torch.zeros_like(p))
                state["step"] += 1
                state["decayed"] *= 0.5
                state["momentum"].lerp_(p.grad, 0.25)
                p.sub_(state["momentum"], alpha=group["lr"] / state["step"] + state["decayed"])


def trained(
    steps: range, run: Path | None = None, begin: Path | None = None, publish: Path | None = None
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """The class after these steps: as it is, or in a run that begins from a checkpoint."""
    torch.manual_seed(0)
    model = nn.Linear(6, 5)
    store = None if run is None else tierstore.TierStore(run)
    optimizer: Any = Counting(model.parameters())
    if store is not None:
        optimizer = tierstore.Paged(model.named_parameters(), Counting, store=store)
        assert begin is None or optimizer.restore(checkpoint=begin) == steps.start - 1
    for step in steps:
        for index, parameter in enumerate(model.parameters()):
            parameter.grad = gradient(step, index, parameter)
        optimizer.step()
    if store is not None:
        with store:
            store.checkpoint(publish, model=model)
    return model, optimizer


@pytest.mark.parametrize("way", ["published", "resumed", "converted", "torch"])
def test_a_class_that_counts_in_ints_loads_a_checkpoint(way: str, tmp_path: Path) -> None:
    """Stock DCP loads it into the class, also after a restore and without a further step."""
    trained(range(1, 4), tmp_path / "run", publish=tmp_path / "published")
    if way == "resumed":
        trained(range(4, 4), tmp_path / "new", tmp_path / "published", tmp_path / "resumed")
    if way in ("converted", "torch"):
        to = "dcp" if way == "converted" else "torch"
        convert(tmp_path / "run", tmp_path / way, to=to)
    model, optimizer = trained(range(1, 2))
    if way == "torch":
        saved = torch.load(tmp_path / way, weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
    else:
        states, numbers = get_state_dict(model, optimizer)
        loaded = {"model": states, "optimizer": numbers}
        dcp.load(loaded, checkpoint_id=tmp_path / way, no_dist=True)
        set_state_dict(model, optimizer, model_state_dict=states, optim_state_dict=numbers)
    expected, other = trained(range(1, 4))
    for mine, theirs in zip(model.parameters(), expected.parameters(), strict=True):
        assert torch.equal(mine, theirs)
        for name, value in other.state[theirs].items():
            found = optimizer.state[mine][name]
            assert type(found) is type(value)
            assert torch.equal(torch.as_tensor(found), torch.as_tensor(value))


class Decaying(tierstore.PagedOptimizer):
    """Keeps a number that begins as an int and does not stay whole."""

    def paged_parameter(self, group: Any, name: str, tensor: Any, **placing: Any) -> Any:
        return tierstore.pages.PagedParameter(
            name=name, tensor=tensor, states={}, elementwise=True, **placing
        )

    def scalars_of(self, group: Any) -> dict[str, float]:
        return {"decay": 1}

    def step_pages(self, pages: Any) -> None:
        for _ in pages:
            pass
        for name in pages.present:
            self.store.pages.scalars[name]["decay"] *= 0.5


def test_a_number_that_begins_as_an_int_is_not_cut(tmp_path: Path) -> None:
    def step(optimizer: Decaying) -> float:
        for parameter in (p for group in optimizer.param_groups for p in group["params"]):
            parameter.grad = torch.ones(4)
        optimizer.step()
        return optimizer.store.pages.scalars["w"]["decay"]

    weight, other = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4))
    with tierstore.TierStore(tmp_path / "run") as store:
        optimizer = Decaying([("w", weight)], {}, store=store)
        assert step(optimizer) == 0.5
        optimizer.load_state_dict(optimizer.state_dict())
        assert step(optimizer) == 0.25
        optimizer.add_param_group({"params": [("other", other)]})
        assert step(optimizer) == 0.125
    with tierstore.TierStore(tmp_path / "run", resume=True) as store:
        optimizer = Decaying(
            [{"params": [(n, p)]} for n, p in (("w", weight), ("other", other))], {}, store=store
        )
        assert optimizer.restore() == 3
        assert step(optimizer) == 0.0625


def _exchanged(optimizer: Any, state: Any, p: Any, number: int) -> None:
    state.setdefault("a", torch.zeros_like(p))
    state["b"] = state["a"]


def _view(optimizer: Any, state: Any, p: Any, number: int) -> None:
    state["both"] = p.new_zeros(2, *p.shape)
    state["one"] = state["both"][0]


@pytest.mark.parametrize(
    ("keeps", "message"),
    [
        (_exchanged, "keeps 'b' in the memory of a: pages store each"),
        (_view, "keeps 'one' in the memory of both: pages store each"),
        (lambda o, s, p, n: s.update(anchor=p), "keeps 'anchor' in the memory of the parameter"),
        (lambda o, s, p, n: o.state["all"].update(k=n), r"keeps \['all'\] outside of the states"),
        (lambda o, s, p, n: o.count.add_(1), "keeps tensors or counts in its attributes"),
        (lambda o, s, p, n: o.kept.update({p: n}), "keeps tensors or counts in its attributes"),
        (lambda o, s, p, n: s.update(master=1.0), "a state 'master', but pages use this name"),
        (lambda o, s, p, n: s.update({"a.b": 1.0}), r"of the parts \['a.b'\]: pages have dicts"),
        (lambda o, s, p, n: s.update(of={"0": p + 1}), "a state 'of' of dict: pages have tensors"),
        (lambda o, s, p, n: s.update(of={0: p + 1}), "a state 'of' of dict: pages have tensors"),
        (lambda o, s, p, n: s.update(of=(p + 1, p + 2)), "a state 'of' of tuple: pages have"),
        (lambda o, s, p, n: s.update(of=[p + 1, 1.0]), "keeps a number in a list, 'of.1'"),
        (lambda o, s, p, n: s.update(of=p.numel()), "by numbers of their gradients or shapes"),
        (lambda o, s, p, n: s.update(of=2**60 + 1), "that a float cannot represent exactly"),
    ],
)
def test_what_cannot_be_is_refused(keeps: Any, message: str) -> None:
    parameter = nn.Parameter(torch.ones(4, 3))
    with pytest.raises(ValueError, match=message):
        _stepped(parameter, keeps, 1)
    assert torch.equal(parameter, torch.ones(4, 3))


def _stepped(parameter: nn.Parameter, keeps: Any, steps: int) -> None:
    paged = tierstore.Paged([("w", parameter)], Odd, keeps=keeps)
    for _ in range(steps):
        parameter.grad = torch.ones_like(parameter)
        paged.step()


def test_other_numbers_in_a_group_are_refused() -> None:
    def keeps(optimizer: Any, state: Any, p: Any, number: int) -> None:
        state.update({"k": 2} if p.ndim == 1 else {})

    named = parameters(torch.float32, SHAPES)
    with pytest.raises(ValueError, match=r"keeps the numbers \['k'\] for 'p2', and \[\] for the"):
        tierstore.Paged(named.items(), Odd, keeps=keeps)


@pytest.mark.parametrize(
    ("later", "message"),
    [
        (lambda state, p: state.update(x=torch.zeros_like(p)), "changes 'x' of 'w' from None to"),
        (lambda state, p: state.update(x=1.0), "changes 'x' of 'w' from None to 1.0"),
        (lambda state, p: state.update(k=2.5), "changes 'k' of 'w' from .*int.* to .*float"),
        (lambda state, p: state.update(t=None), r"changes 't' of 'w' from float32 \[4, 3\] to"),
        (lambda state, p: state.update(t=p[:1] + 1), r"\[4, 3\] to float32 \[1, 3\]"),
    ],
)
def test_what_changes_later_is_refused_by_name(later: Any, message: str) -> None:
    def keeps(optimizer: Any, state: Any, p: Any, number: int) -> None:
        if not state:
            state.update(x=None, k=2, t=torch.zeros_like(p))
        if number == 10:
            later(state, p)

    with pytest.raises(ValueError, match=message):
        _stepped(nn.Parameter(torch.ones(4, 3)), keeps, 10)
