"""Paged beside the bits of classes: groups, hooks, whole parameters, and what is refused."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

import tierstore
from tests.support.class_training import PAGES, gradient, parameters
from tests.support.rank_pool import RankPool


class Counting(torch.optim.SGD):
    """Keeps a count in the group, and numbers of Python, as packages beside torch do."""

    def __init__(self, params: Any, lr: float = 0.1, by_gradient: str = "") -> None:
        super().__init__(params, lr)
        for group in self.param_groups:
            group.setdefault("k", 0)
        self.by_gradient = by_gradient

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["k"] += 1
            for p in group["params"]:
                if p.grad is not None:
                    state = self.state[p]
                    state["count"] = state.get("count", 0) + 1
                    if self.by_gradient == "group":
                        group["k"] += float(p.grad.abs().sum())
                    if self.by_gradient == "state":
                        state["count"] += float(p.grad.abs().sum())
                    p.add_(p.grad, alpha=-group["lr"] / (group["k"] + state["count"]))


class Lamb(torch.optim.Optimizer):
    """A rule that sees whole parameters: their norms."""

    def __init__(self, params: Any, lr: float = 0.1, clips: bool = False) -> None:
        super().__init__(params, {"lr": lr, "clips": clips})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            present = [p for p in group["params"] if p.grad is not None]
            total = torch.stack([p.grad.norm() for p in present]).norm()
            for p in present:
                state = self.state[p]
                if not state:
                    state["mean"] = torch.zeros_like(p)
                # Not in place.
                state["mean"] = 0.9 * state["mean"] + 0.1 * p.grad
                ratio = p.norm() / (state["mean"].norm() + 1e-6)
                if group["clips"]:
                    ratio = ratio / total.clamp(min=1)
                p.sub_(group["lr"] * ratio * state["mean"])


def twins(
    cls: Any, store: Any = None, dtype: torch.dtype = torch.float32, **options: Any
) -> tuple[Any, Any, Any]:
    """Return Paged with a class, the class, and a function that steps both with a gradient."""
    shapes = ((90, 40), (20, 30), (5, 5))
    own, other = parameters(dtype, shapes), parameters(dtype, shapes)
    paged = tierstore.Paged(own.items(), cls, store=store, **options)
    masters = [nn.Parameter(p.detach().float()) for p in other.values()]
    stock = cls(masters, **options)

    def step(number: int) -> None:
        for index, (mine, theirs) in enumerate(zip(own.values(), masters, strict=True)):
            grad = gradient(number, index, mine)
            mine.grad, theirs.grad = grad, None if grad is None else grad.float()
        paged.step()
        stock.step()
        for mine, theirs in zip(own.values(), masters, strict=True):
            assert torch.equal(mine.detach(), theirs.detach().to(dtype))

    return paged, stock, step


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("on_disk", [False, True])
@pytest.mark.parametrize("cls", [torch.optim.Muon, Lamb, Counting])
def test_a_class_that_is_not_listed_steps_whole_parameters(
    cls: Any, on_disk: bool, dtype: torch.dtype, tmp_path: Path
) -> None:
    """Rules of norms, with states that are replaced, counts in the group and numbers of Python."""
    with tierstore.TierStore(tmp_path, **PAGES) as store:
        paged, stock, step = twins(cls, store if on_disk else None, dtype)
        for number in range(1, 7):
            step(number)
        assert paged.param_groups[0].get("k") == stock.param_groups[0].get("k")
        for index, states in stock.state_dict()["state"].items():
            found = paged.state_dict()["state"][index]
            for name, value in states.items():
                assert torch.equal(torch.as_tensor(found[name]), torch.as_tensor(value))
                assert type(found[name]) is type(value) or isinstance(value, torch.Tensor)


def test_ranks_step_whole_parameters_and_no_parts_of_them(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """The user may say that a rule is one."""
    with RankPool(tmp_path_factory.mktemp("worlds")) as pool:
        pool.run(2, "tests.rank_programs.classes:step_whole")
        found = pool.run(2, "tests.rank_programs.classes:make_of_shards")
    for refused, accepted in found:
        assert refused.startswith("_Own sees whole parameters, and a rank has a part of 'w': use")
        assert accepted == ""


@pytest.mark.parametrize(
    ("cls", "options", "message"),
    [
        (torch.optim.LBFGS, {}, "LBFGS cannot be in pages: it evaluates the closure several times"),
        (torch.optim.SparseAdam, {}, "it takes sparse gradients alone: torch.optim.Adam takes"),
        (torch.optim.Adafactor, {}, r"Adafactor keeps a state 'col_var' of shape \[1, 7\] for a"),
        (torch.optim.Adam, {"capturable": True}, "capturable=True of Adam cannot be in pages"),
        (torch.optim.Adam, {"differentiable": True}, "states in pages have no gradients"),
        (torch.optim.Adam, {"lr": -1.0}, "Invalid learning rate: -1.0"),
        (Counting, {"by_gradient": "group"}, "Counting steps parameters together, or by numbers"),
        (Counting, {"by_gradient": "state"}, "Counting steps parameters together, or by numbers"),
        (Lamb, {"clips": True}, "step 1 of two parameters differs from steps of one at a time"),
    ],
)
def test_what_cannot_be_is_refused(cls: Any, options: dict[str, Any], message: str) -> None:
    parameter = nn.Parameter(torch.ones(4, 4))
    with pytest.raises(ValueError, match=message):
        tierstore.Paged([("w", parameter)], cls, **options)


@pytest.mark.parametrize("cls", ["AdamW", torch.nn.Linear, lambda params: None])
def test_something_else_than_a_class_is_refused(cls: Any) -> None:
    with pytest.raises(TypeError, match=r"Paged needs a class of optimizers, such as torch\.optim"):
        tierstore.Paged([nn.Parameter(torch.ones(4))], cls)


@pytest.mark.parametrize("package", ["bitsandbytes.optim", "torchao.optim"])
def test_optimizers_in_8_bits_are_refused_with_what_takes_their_place(package: str) -> None:
    """By the name of the package: its kernels need a GPU."""
    cls = type("AdamW8bit", (torch.optim.AdamW,), {"__module__": package})
    with pytest.raises(ValueError, match=r"muon\.Muon\(moments_dtype=torch\.int8\)"):
        tierstore.Paged([nn.Parameter(torch.ones(4))], cls)


def test_an_option_that_makes_other_states_may_not_be_changed_later() -> None:
    paged, _, step = twins(torch.optim.SGD, lr=0.1)
    step(1)
    paged.param_groups[0]["lr"] = 0.0  # States do not depend on it.
    paged.step()
    paged.param_groups[0]["momentum"] = 0.9
    with pytest.raises(ValueError, match=r"param group 0 has states=.*momentum_buffer"):
        paged.step()
    paged.param_groups[0]["momentum"] = 0
    paged.step()


@pytest.mark.parametrize("fused", [None, True])
def test_fused_kernels_of_a_cpu_step_whole_parameters(fused: bool | None) -> None:
    """They round otherwise at the ends of a tensor."""
    paged, _, step = twins(torch.optim.AdamW, fused=fused)
    for number in range(1, 5):
        step(number)
    [group] = paged.paged_groups()
    assert {parameter.elementwise for parameter in group.parameters} == {not fused}


def test_hooks_of_all_optimizers_are_called_once_in_a_step(tmp_path: Path) -> None:
    called = []
    handle = register_optimizer_step_post_hook(lambda *given: called.append(type(given[0])))
    try:
        with tierstore.TierStore(tmp_path, **PAGES) as store:
            paged, _, step = twins(torch.optim.AdamW, store)
            paged.register_step_post_hook(lambda *given: called.append("own"))
            step(1)
    finally:
        handle.remove()
    assert called == ["own", tierstore.Paged, torch.optim.AdamW]


def test_groups_and_closures_are_those_of_torch() -> None:
    own, other = (list(parameters(torch.float32).values()) for _ in range(2))
    options = {"lr": 1e-3, "weight_decay": 0.1}
    paged, stock = (
        make([{"params": of[:2], "lr": 0.01}, {"params": of[2:], "betas": (0.5, 0.9)}])
        for make, of in (
            (lambda groups: tierstore.Paged(groups, torch.optim.AdamW, **options), own),
            (lambda groups: torch.optim.AdamW(groups, **options), other),
        )
    )
    losses = []
    for optimizer, of in ((paged, own), (stock, other)):

        def closure(optimizer: Any = optimizer, of: Any = of) -> torch.Tensor:
            optimizer.zero_grad()
            loss = sum((p.square() * (1 + i)).sum() for i, p in enumerate(of))
            loss.backward()
            return loss

        for _ in range(3):
            losses.append(optimizer.step(closure))
    assert losses[:3] == losses[3:]
    assert all(map(torch.equal, own, other))
    ours, theirs = paged.state_dict(), stock.state_dict()
    assert ours["param_groups"] == theirs["param_groups"]
    assert list(ours["state"][0]) == list(theirs["state"][0])


@pytest.mark.parametrize(
    ("saved", "message"),
    [
        (torch.optim.Adam, r"is not of AdamW: decoupled_weight_decay is False, and not True"),
        (torch.optim.RAdam, "is not of AdamW: it has no 'amsgrad'"),
        (torch.optim.NAdam, "is not of AdamW, which has no 'momentum_decay'"),
    ],
)
def test_a_state_dict_of_another_class_is_refused(saved: Any, message: str) -> None:
    parameter = nn.Parameter(torch.ones(4, 4))
    parameter.grad = torch.ones(4, 4)
    stock = saved([parameter])
    stock.step()
    paged = tierstore.Paged([parameter], torch.optim.AdamW)
    with pytest.raises(ValueError, match=message):
        paged.load_state_dict(stock.state_dict())


def test_a_copy_goes_on_by_itself() -> None:
    paged, _, step = twins(torch.optim.Adagrad)
    step(1)
    copied = deepcopy(paged)
    before = paged.state_dict()["state"][0]["sum"].clone()
    for parameter in copied.param_groups[0]["params"]:
        parameter.grad = torch.ones_like(parameter)
    copied.step()
    assert torch.equal(paged.state_dict()["state"][0]["sum"], before)
    assert not torch.equal(copied.state_dict()["state"][0]["sum"], before)
    step(2)


def test_a_state_is_reset_and_assigned() -> None:
    """A parameter that begins anew gets the states that the class creates."""
    paged, _, step = twins(torch.optim.Rprop)
    step(1)
    [first, second, _] = paged.param_groups[0]["params"]
    paged.reset_state([first])
    assert paged.state[first]["step_size"].unique().tolist() == [pytest.approx(0.01)]
    assert paged.state[first]["step"] == 0
    paged.state[second]["prev"] = torch.zeros_like(second)
    assert not paged.state[second]["prev"].any()
    assert paged.state[second]["step"] == 1


@pytest.mark.parametrize(
    ("cls", "other", "message"),
    [
        (torch.optim.Adam, torch.optim.AdamW, "not of AdamW: decoupled_weight_decay is False"),
        (torch.optim.AdamW, torch.optim.RAdam, "not of RAdam, which has no 'amsgrad'"),
    ],
)
def test_a_run_of_another_class_with_the_same_states_is_refused(
    cls: Any, other: Any, message: str, tmp_path: Path
) -> None:
    with tierstore.TierStore(tmp_path, **PAGES) as store:
        _, _, step = twins(cls, store)
        step(1)
    own = parameters(torch.float32, ((90, 40), (20, 30), (5, 5)))
    before = {name: parameter.detach().clone() for name, parameter in own.items()}
    with tierstore.TierStore(tmp_path, resume=True, **PAGES) as store:
        paged = tierstore.Paged(own.items(), other, store=store)
        with pytest.raises(ValueError, match=message):
            paged.restore()
        assert all(torch.equal(own[name], before[name]) for name in own)
    with tierstore.TierStore(tmp_path, resume=True, **PAGES) as store:
        assert tierstore.Paged(own.items(), cls, store=store).restore() == 1
