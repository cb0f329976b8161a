"""Steps whose gradients have NaN or infinite elements, and steps without a gradient."""

from __future__ import annotations

import itertools
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

import muon
import tierstore
from tests.support.fake_cuda import fake_cuda
from tests.support.twins import PLACES, Twins, open_store, parameter

NAN, INF = float("nan"), float("inf")


def spoil(twins: Twins, value: float) -> None:
    """Give one parameter a gradient with one element that is not finite."""
    twins.set_gradients()
    for _, parameters in twins.both:
        grad = parameters["second"].grad
        assert grad is not None
        grad[0, 0] = value


def refused(*gradients: torch.Tensor) -> bool:
    """Return whether a step of AdamW is refused because of these gradients."""
    parameters = [nn.Parameter(torch.ones_like(gradient)) for gradient in gradients]
    optimizer = muon.Muon([{"params": parameters, "algorithm": "adamw"}])
    for each, gradient in zip(parameters, gradients, strict=True):
        each.grad = gradient
    try:
        optimizer.step()
    except tierstore.NonFiniteGradientError:
        return True
    return False


# ----------------------------------------------------------------------------------- raise


@pytest.mark.parametrize("algorithm", ["muon", "adamw"])
@pytest.mark.parametrize("value", [NAN, INF, -INF])
def test_a_step_is_refused_before_the_first_update(value: float, algorithm: str) -> None:
    twins = Twins(algorithm=algorithm)
    twins.step()
    spoil(twins, value)
    with (
        twins.unchanged(),
        pytest.raises(tierstore.NonFiniteGradientError, match="'second'") as raised,
    ):
        twins.optimizer.step()
    assert isinstance(raised.value, ValueError)
    assert "'first'" not in str(raised.value)
    assert twins.optimizer.store.step == 1
    twins.step()
    twins.assert_identical()


def refuse_second_step(store: tierstore.TierStore) -> Twins:
    """Do a step, commit it, and check that a step with a NaN is refused."""
    twins = Twins(store=store)
    twins.step()
    store.synchronize()
    spoil(twins, NAN)
    with pytest.raises(tierstore.NonFiniteGradientError):
        twins.optimizer.step()
    return twins


@pytest.mark.parametrize("commit_every", [1, 3, None])
def test_a_refused_step_is_not_committed_and_the_next_one_works(
    commit_every: int | None, tmp_path: Path
) -> None:
    with tierstore.TierStore(tmp_path, commit_every=commit_every) as store:
        twins = refuse_second_step(store)
        store.synchronize()
        assert store.step == store.committed.step == 1
        twins.step()
        store.synchronize()
        assert store.committed.step == 2
        twins.assert_identical()


def test_restore_goes_back_after_a_refused_step(tmp_path: Path) -> None:
    with tierstore.TierStore(tmp_path) as store:
        twins = refuse_second_step(store)
        assert twins.optimizer.restore() == 1
        twins.step()
        twins.assert_identical()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("value", [NAN, INF, -INF])
def test_one_element_anywhere_is_found(value: float, dtype: torch.dtype) -> None:
    for count in (1, 2, 17, 64, 1000, 4097):
        for position in (0, count // 2, count - 1):
            gradient = torch.ones(count, dtype=dtype)
            gradient[position] = value
            assert refused(torch.ones(3), gradient)
    columns = torch.ones(5, 6, dtype=dtype)
    columns[4, 1] = value
    assert refused(columns.T)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_large_gradients_whose_sum_overflows_are_finite(dtype: torch.dtype) -> None:
    assert not refused(torch.full((1000,), torch.finfo(dtype).max, dtype=dtype))


def test_infinite_elements_of_both_signs_are_found() -> None:
    assert refused(torch.tensor([INF, -INF]))


def test_gradients_without_elements_are_finite() -> None:
    assert not refused(torch.ones(0, 4), torch.ones(()), torch.ones(2, 0))


def test_a_message_names_some_of_many_parameters() -> None:
    parameters = [(f"p{index}", parameter()) for index in range(5)]
    optimizer = muon.Muon(parameters)
    for _, each in parameters:
        each.grad = torch.full_like(each, NAN)
    with pytest.raises(tierstore.NonFiniteGradientError, match=r"'p0', 'p1', 'p2' and 2 more"):
        optimizer.step()


def test_a_closure_is_evaluated_before_the_check() -> None:
    weight = parameter()
    optimizer = muon.Muon([("weight", weight)])

    def closure() -> torch.Tensor:
        loss = weight.log().sum()  # Some elements are negative.
        loss.backward()  # type: ignore[no-untyped-call]
        weight.grad = torch.full_like(weight, NAN)
        return loss

    with pytest.raises(tierstore.NonFiniteGradientError):
        optimizer.step(closure)


def test_a_grad_scaler_skips_steps_itself() -> None:
    weight = parameter()
    optimizer = muon.Muon([("weight", weight)])
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for factor, is_stepped in ((INF, False), (1.0, True)):
        before = weight.detach().clone()
        optimizer.zero_grad()
        scaler.scale((weight * factor).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        assert torch.equal(weight, before) != is_stepped
    assert scaler.get_scale() == 2.0
    assert optimizer.store.step == 1


# ----------------------------------------------------------------------------------- skip


@pytest.mark.parametrize("algorithm", ["muon", "adamw"])
@PLACES
def test_a_step_is_skipped_on_request(place: str, algorithm: str, tmp_path: Path) -> None:
    with open_store(place, tmp_path) as store:
        twins = Twins(algorithm=algorithm, store=store, nonfinite="skip")
        twins.step()
        spoil(twins, NAN)
        with twins.unchanged(), pytest.warns(UserWarning, match="'second'"):
            twins.optimizer.step()
        assert store.step == 1
        twins.step()
        assert store.step == 2
        twins.assert_identical()
        if place == "disk":
            store.synchronize()
            assert store.committed.step == 2


def test_the_first_step_may_be_skipped(tmp_path: Path) -> None:
    with tierstore.TierStore(tmp_path) as store:
        twins = Twins(store=store, nonfinite="skip")
        spoil(twins, INF)
        with pytest.warns(UserWarning, match="skipped"):
            twins.optimizer.step()
        assert store.step == 0
        twins.step()
        twins.assert_identical()


def test_a_skipped_step_frees_gradients() -> None:
    """Else the next backward would add to a NaN that nobody zeroes."""
    store = tierstore.TierStore(None, free_gradients=True)
    twins = Twins(store=store, nonfinite="skip")
    spoil(twins, NAN)
    with pytest.warns(UserWarning, match="skipped"):
        twins.optimizer.step()
    assert all(each.grad is None for each in twins.ours.values())


# ----------------------------------------------------------------------------------- allow


def test_all_gradients_are_allowed_on_request() -> None:
    weight = parameter()
    optimizer = muon.Muon([("weight", weight)], nonfinite="allow")
    weight.grad = torch.full_like(weight, NAN)
    optimizer.step()
    assert weight.isnan().all()


def test_a_sweep_allows_all_gradients_unless_told_otherwise() -> None:
    weight = parameter()
    with tierstore.TierStore(None) as store:
        member = tierstore.pages.PagedParameter(name="weight", tensor=weight)
        store.pages.attach([tierstore.pages.PagedGroup(parameters=[member], hyperparameters={})])
        weight.grad = torch.full_like(weight, NAN)
        with store.pages.sweep() as pages:
            assert len(list(pages)) == 1
        with (
            pytest.warns(UserWarning, match="skipped"),
            store.pages.sweep(nonfinite="skip") as pages,
        ):
            assert (pages.count, list(pages)) == (0, [])
        assert store.step == 1


def test_other_values_are_refused() -> None:
    with pytest.raises(ValueError, match="'raise', 'skip' or 'allow'"):
        muon.Muon([parameter()], nonfinite="warn")
    sweep = tierstore.TierStore(None).pages.sweep(nonfinite="warn")
    with pytest.raises(ValueError, match="'raise', 'skip' or 'allow'"), sweep:
        pass


# ------------------------------------------------------------------- gradients on a device


@pytest.mark.parametrize("step_on", [None, "cpu"])
@pytest.mark.parametrize("pace", [0, 0.3])
def test_a_step_on_a_device_fails_before_its_commit(
    pace: float, step_on: str | None, tmp_path: Path
) -> None:
    """The gradients are not waited for, so the step has begun when the error is known."""
    with fake_cuda(pace=pace):
        store = tierstore.TierStore(tmp_path, step_on=step_on, free_gradients=True)
        twins = Twins(store=store)
        twins.step()
        store.synchronize()
        spoil(twins, NAN)
        with pytest.raises(tierstore.NonFiniteGradientError, match=r"'second'.*restore\(\)"):
            twins.optimizer.step()
        with pytest.raises(tierstore.StoreFailedError, match="NonFiniteGradientError"):
            store.commit()
        assert store.committed.step == 1
        assert twins.optimizer.restore() == 1
        twins.step()
        twins.assert_identical()
        store.close()


@pytest.mark.parametrize(
    ("kind", "nonfinite"),
    [
        *itertools.product(("memory", "no commit yet", "commit_every=None"), ("raise", "skip")),
        ("committed", "skip"),
    ],
)
def test_a_step_on_a_device_is_refused_early_where_no_commit_is_kept(
    kind: str, nonfinite: str, tmp_path: Path
) -> None:
    with fake_cuda():
        options = {"commit_every": None} if kind == "commit_every=None" else {}
        store = tierstore.TierStore(None if kind == "memory" else tmp_path, **options)
        twins = Twins(store=store, nonfinite=nonfinite)
        twins.step()
        if kind in ("commit_every=None", "committed"):
            store.synchronize()
        spoil(twins, NAN)
        refusal = pytest.raises(tierstore.NonFiniteGradientError, match="Nothing was changed")
        warning = pytest.warns(UserWarning, match="skipped")
        with twins.unchanged(), refusal if nonfinite == "raise" else warning:
            twins.optimizer.step()
        twins.step()
        twins.assert_identical()
        store.close()


# ------------------------------------------------------------------------------ no gradient


def test_a_step_without_any_gradient_warns_once() -> None:
    optimizer = muon.Muon([("weight", parameter())])
    with pytest.warns(UserWarning, match="no parameter has a gradient"):
        optimizer.step()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.step()


def test_a_step_with_one_gradient_of_several_does_not_warn() -> None:
    first, second = parameter(0), parameter(1)
    optimizer = muon.Muon([("first", first), ("second", second)])
    first.grad = torch.ones_like(first)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.step()
