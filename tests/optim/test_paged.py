"""Paged beside the bits of classes: groups, hooks, whole parameters, and what is refused."""

from __future__ import annotations

import gc
import weakref
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from pytorch_optimizer import AliG, ScalableShampoo
from pytorch_optimizer.base.exception import NoClosureError
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


class CountingOtherwise(Counting):
    """Has the keys and states of its base."""


class Lamb(torch.optim.Optimizer):
    """A rule that sees whole parameters: their norms."""

    def __init__(self, params: Any, lr: float = 0.1, clips: bool = False) -> None:
        super().__init__(params, {"lr": lr, "clips": clips})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            present = [p for p in group["params"] if p.grad is not None]
            total = sum((p.grad.square().sum() for p in present), torch.zeros(())).sqrt()
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
        assert refused.startswith("_Own sees whole parameters, but a rank has a part of 'w': use")
        assert accepted == ""


@pytest.mark.parametrize(
    ("cls", "options", "message"),
    [
        (torch.optim.LBFGS, {}, "LBFGS cannot be in pages: it evaluates the closure several times"),
        (torch.optim.SparseAdam, {}, "it takes sparse gradients alone: torch.optim.Adam takes"),
        (ScalableShampoo, {}, "ScalableShampoo keeps a state 'pre_conditioner' of PreConditioner"),
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


def test_groups_and_closures_equal_torch() -> None:
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
        (torch.optim.Adam, r"is not of AdamW: decoupled_weight_decay is False, not True"),
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
        (torch.optim.Adam, torch.optim.AdamW, "is of Adam, and not of AdamW"),
        (torch.optim.AdamW, torch.optim.RAdam, "is of AdamW, and not of RAdam"),
        (Counting, CountingOtherwise, "is of Counting, and not of CountingOtherwise"),
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


def test_fused_kernels_step_tensors_in_another_order_of_memory() -> None:
    """They read memory as it lies: a parameter in channels_last has its states in rows here.

    Its elements are a multiple of what a vector register holds: others are rounded otherwise.
    """
    random = torch.randn(4, 3, 8, 4).contiguous(memory_format=torch.channels_last)
    own, other = (nn.Parameter(random.clone()) for _ in range(2))
    paged = tierstore.Paged([own], torch.optim.AdamW, fused=True, lr=0.1)
    stock = torch.optim.AdamW([other], fused=True, lr=0.1)
    for step in range(3):
        grad = torch.full_like(random, 1.0 + step) * random
        own.grad, other.grad = grad, grad.clone()
        paged.step()
        stock.step()
    assert torch.equal(own, other)
    state, expected = paged.state_dict()["state"][0], stock.state_dict()["state"][0]
    assert torch.equal(state["exp_avg"], expected["exp_avg"])


def test_an_error_of_the_class_says_where_it_was() -> None:
    with pytest.raises(NoClosureError) as raised:
        tierstore.Paged([("w", nn.Parameter(torch.ones(4, 4)))], AliG)
    assert raised.value.__notes__ == ["in trial steps of small tensors to find what AliG keeps"]


class Exchanging(torch.optim.SGD):
    """Exchanges its two states in each step, and keeps a part of one in a third."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state.update(now=torch.zeros_like(p), before=torch.zeros_like(p))
                state["now"], state["before"] = state["before"], state["now"]
                state["now"].copy_(p.grad)
                state["rows"] = state["before"][:, :1].clone()
                p.sub_(state["now"] - state["before"] + state["rows"], alpha=group["lr"])


@pytest.mark.parametrize("on_disk", [False, True])
def test_states_that_are_exchanged(on_disk: bool, tmp_path: Path) -> None:
    with tierstore.TierStore(tmp_path, **PAGES) as store:
        paged, stock, step = twins(Exchanging, store if on_disk else None)
        for number in range(1, 8):
            step(number)
        for index, states in stock.state_dict()["state"].items():
            for state, value in states.items():
                assert torch.equal(paged.state_dict()["state"][index][state], value), (index, state)


class Accumulating(torch.optim.SGD):
    """Counts every second step, has a state that is None, and an option that is a dtype."""

    def __init__(self, params: Any, lr: float = 0.1, kept_in: Any = torch.float32) -> None:
        super().__init__(params, lr)
        for group in self.param_groups:
            group.setdefault("kept_in", kept_in)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    state = self.state[p]
                    if not state:
                        state.update(step=0, half=0, none=None, sum=torch.zeros_like(p))
                    assert state["none"] is None
                    state["sum"] += p.grad.to(group["kept_in"])
                    state["half"] += 1
                    if state["half"] == 2:
                        p.sub_(state["sum"], alpha=group["lr"])
                        state["sum"].zero_()
                        state["half"] = 0
                        state["step"] += 1


def test_states_before_the_first_count_are_kept() -> None:
    paged, stock, step = twins(Accumulating)
    step(1)
    step(2)
    paged.load_state_dict(paged.state_dict())
    assert paged.param_groups[0]["kept_in"] is torch.float32
    for number in range(3, 8):
        step(number)
    saved = stock.state_dict()
    found = paged.state_dict()["state"]
    for index, states in saved["state"].items():
        assert states.keys() == found[index].keys()
    parameter = paged.param_groups[0]["params"][0]
    paged = tierstore.Paged([parameter], torch.optim.AdamW)
    ones = torch.ones_like(parameter)
    paged.state[parameter] = {"step": 0, "exp_avg": ones, "exp_avg_sq": ones}
    parameter.grad = torch.zeros_like(parameter)
    paged.step()
    assert torch.equal(paged.state[parameter]["exp_avg"], torch.full_like(ones, 0.9))


class CountingItself(Counting):
    """Counts in an attribute."""

    calls = 0

    def step(self, closure: Any = None) -> None:
        self.calls = self.calls + 1
        super().step(closure)


class Late(Counting):
    """Creates a state at its fourth step."""

    def step(self, closure: Any = None) -> None:
        super().step(closure)
        for p in self.param_groups[0]["params"]:
            if self.state[p]["count"] == 4:
                self.state[p]["late"] = torch.zeros_like(p)


@pytest.mark.parametrize(
    ("cls", "message"),
    [
        (CountingItself, "CountingItself keeps tensors or counts in its attributes outside"),
        (Late, "Late creates states, or changes their shapes, after the first step"),
    ],
)
def test_numbers_and_states_that_a_commit_would_lack_are_refused(cls: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tierstore.Paged([nn.Parameter(torch.ones(4, 4))], cls)


class OwnNAdam(torch.optim.NAdam):
    """Has the states of its base."""


@pytest.mark.parametrize(
    ("cls", "options"),
    [
        (torch.optim.Rprop, [{"lr": 0.1}, {"lr": 0.4}]),
        (OwnNAdam, [{}, {}]),
    ],
)
def test_each_group_has_the_first_states_of_its_options(cls: Any, options: Any) -> None:
    """They go to the class before any step; later, a parameter without a step has none there."""
    own, other = ([nn.Parameter(torch.ones(3, 3)) for _ in options] for _ in range(2))
    paged, stock = (
        make([{"params": [p], **given} for p, given in zip(of, options, strict=True)])
        for make, of in ((lambda groups: tierstore.Paged(groups, cls), own), (cls, other))
    )
    stock.load_state_dict(paged.state_dict())
    for of in (own, other):
        of[1].grad = torch.ones(3, 3)
    paged.step()
    stock.step()
    assert all(map(torch.equal, own, other))
    assert list(paged.state_dict()["state"]) == [1]


def test_a_run_with_counts_and_keys_of_its_own_goes_on(tmp_path: Path) -> None:
    """Also one of a class whose options have other names than its keys, and without lr."""

    class Named(Counting):
        def __init__(self, params: Any, rate: float = 0.1) -> None:
            super().__init__(params, rate)
            for group in self.param_groups:
                group["mine"] = group.pop("lr")
            self.defaults = {"mine": rate, "k": 0}

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            for group in self.param_groups:
                group["k"] += 1
                for p in group["params"]:
                    p.add_(p.grad, alpha=-group["mine"])

    for steps in (1, 2):
        parameter = nn.Parameter(torch.zeros(4, 4))
        with tierstore.TierStore(tmp_path, resume=True, **PAGES) as store:
            groups = [{"params": [("w", parameter)], "momentum": 0.5}]
            paged = tierstore.Paged(groups, Named, store=store)
            assert paged.restore() == steps - 1
            parameter.grad = torch.ones(4, 4)
            paged.param_groups[0]["mine"] *= 0.5
            paged.step()
            paged.load_state_dict(paged.state_dict())
            store.commit()
            assert paged.param_groups[0]["k"] == steps
    assert parameter.unique().tolist() == [pytest.approx(-0.075)]


def test_a_state_dict_of_other_options_is_refused_or_keeps_ours() -> None:
    def saved(**options: Any) -> dict[str, Any]:
        parameter = nn.Parameter(torch.ones(4, 4))
        parameter.grad = torch.ones(4, 4)
        stock = torch.optim.AdamW([parameter], **options)
        stock.step()
        return stock.state_dict()

    parameter = nn.Parameter(torch.ones(4, 4))
    paged = tierstore.Paged([parameter], torch.optim.AdamW)
    paged.load_state_dict(saved(fused=True, lr=0.5))
    assert paged.param_groups[0]["fused"] is None
    assert paged.param_groups[0]["lr"] == 0.5
    with pytest.raises(ValueError, match=r"keep the states .*max_exp_avg_sq.*, but pages hold"):
        paged.load_state_dict(saved(amsgrad=True, lr=0.1))
    assert paged.param_groups[0]["lr"] == 0.5
    parameter.grad = torch.ones(4, 4)
    paged.step()


def test_a_group_may_have_no_parameters() -> None:
    parameter = nn.Parameter(torch.ones(4, 4))
    groups = [{"params": [parameter]}, {"params": []}]
    paged = tierstore.Paged(groups, torch.optim.AdamW)
    parameter.grad = torch.ones(4, 4)
    paged.step()
    assert list(paged.state_dict()["state"]) == [0]


def test_a_whole_parameter_of_several_records_is_refused() -> None:
    parameter = nn.Parameter(torch.zeros(()).expand(1 << 15, 1 << 14))
    with pytest.raises(ValueError, match=r"takes more than one record of a page, but Muon sees"):
        tierstore.Paged([parameter], torch.optim.Muon)
    tierstore.Paged([parameter], torch.optim.AdamW)


def test_a_step_that_raises_keeps_no_gradient() -> None:
    class Failing(torch.optim.SGD):
        fails = False

        def step(self, closure: Any = None) -> None:
            if Failing.fails:
                raise RuntimeError("no")
            super().step(closure)

    parameter = nn.Parameter(torch.ones(4, 4))
    paged = tierstore.Paged([parameter], Failing, lr=0.1)
    Failing.fails = True
    parameter.grad = torch.ones(4, 4)
    left = weakref.ref(parameter.grad)
    with pytest.raises(RuntimeError, match="no"):
        paged.step()
    parameter.grad = None
    gc.collect()
    assert left() is None
