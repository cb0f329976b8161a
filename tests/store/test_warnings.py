"""Warnings: at the line of the program, once, with what to type."""

from __future__ import annotations

import _thread
import contextlib
import copy
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

import muon
import tierstore
from muon import newton_schulz
from tests.support.toy import step_on_two_ranks
from tests.support.twins import parameter


def warned(act: Callable[[], Any], times: int = 1) -> list[warnings.WarningMessage]:
    """Return the warnings that a user sees, who has set no filter."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for _ in range(times):
            act()
    return caught


def run_of(path: Path, seed: int = 0, **options: Any) -> tuple[tierstore.TierStore, muon.Muon]:
    """Return a store on a disk, and an optimizer whose gradients are there."""
    store = tierstore.TierStore(path, **options)
    weight = parameter(seed)
    weight.grad = torch.ones_like(weight)
    return store, muon.Muon([("weight", weight)], store=store)


# --------------------------------------------------------------------------------- each kind


def duplicates(path: Path) -> None:
    weight = parameter()
    muon.Muon([weight, weight])


def added_duplicates(path: Path) -> None:
    weight = parameter(1)
    muon.Muon([parameter()]).add_param_group({"params": [weight, weight]})


def duplicates_of_a_class(path: Path) -> None:
    weight = parameter()
    tierstore.Paged([("a", weight), ("b", weight)], torch.optim.AdamW)


def no_gradient(path: Path) -> None:
    muon.Muon([parameter()]).step()


def no_gradient_of_a_class(path: Path) -> None:
    tierstore.Paged([parameter()], torch.optim.SGD, lr=0.1).step()


def no_gradient_of_pages(path: Path) -> None:
    optimizer = muon.Muon([parameter()])
    optimizer.state_dict()
    with optimizer.store.pages.sweep() as pages:
        assert [*pages] == []


def skipped(path: Path) -> None:
    weight = parameter()
    weight.grad = torch.full_like(weight, torch.inf)
    muon.Muon([weight], nonfinite="skip").step()


def changed(path: Path) -> None:
    weight = nn.Parameter(torch.ones(3, 4, dtype=torch.bfloat16))
    optimizer = muon.Muon([weight])
    for _ in range(2):
        weight.grad = torch.ones_like(weight)
        optimizer.step()
        weight.detach().add_(1)


def slow_bfloat16(path: Path) -> None:
    weight = parameter(shape=(400, 500))
    weight.grad = torch.ones_like(weight)
    muon.Muon([weight]).step()


def opened_again(path: Path) -> tuple[tierstore.TierStore, muon.Muon]:
    """Return store and optimizer of a run with one step, before restore()."""
    store, optimizer = run_of(path)
    with store:
        optimizer.step()
    return run_of(path, resume=True)


def other_values(path: Path) -> None:
    store, optimizer = run_of(path)
    with store:
        optimizer.step()
    with tierstore.TierStore(path, resume=True) as store:
        muon.Muon([("weight", parameter())], store=store, lr=0.5).restore()


def other_rates(path: Path) -> None:
    store, optimizer = opened_again(path)
    with store:
        optimizer.restore()
        LambdaLR(optimizer, lambda step: 0.5)
        optimizer.step()


def registered_since(path: Path) -> None:
    store, optimizer = opened_again(path)
    with store:
        store.register(more={"a": 1})
        optimizer.restore()


def not_taken(path: Path) -> None:
    store, optimizer = run_of(path / "run")
    with store:
        store.register(more={"a": 1})
        optimizer.step()
        store.checkpoint(path / "checkpoint")
    store, optimizer = run_of(path / "new")
    with store:
        optimizer.restore(path / "checkpoint")


def changed_before_close(path: Path) -> None:
    store = _changed_after_a_step(path)
    store.close()


def changed_before_the_end_of_a_block(path: Path) -> None:
    with contextlib.ExitStack() as stack:
        stack.enter_context(_changed_after_a_step(path))


def _changed_after_a_step(path: Path) -> tierstore.TierStore:
    store, optimizer = run_of(path, commit_every=3)
    optimizer.step()
    store.synchronize()
    optimizer.step()
    for weight in optimizer.param_groups[0]["params"]:
        weight.detach().add_(1)
    return store


def other_ranks(path: Path) -> None:
    step_on_two_ranks(path)
    tierstore.TierStore(path, resume=True).close()


def averages_ahead(path: Path) -> None:
    model = nn.Linear(3, 4)
    with tierstore.TierStore(path) as store:
        averaged = tierstore.AveragedModel(model, copy.deepcopy(model), store)
        averaged.update(1)
        averaged.update(2)
        averaged.restore(1)


KINDS: list[tuple[Callable[[Path], None], str]] = [
    (duplicates, r"at position 1 is also at .* model\.named_parameters\(\)"),
    (added_duplicates, "position 1 is also at"),
    (duplicates_of_a_class, r"position 1 \('b'\) is also at"),
    (no_gradient, r"call backward\(\) before step\(\)"),
    (no_gradient_of_a_class, r"call backward\(\) before step\(\)"),
    (no_gradient_of_pages, r"call backward\(\) before step\(\)"),
    (skipped, r"skipped\. nonfinite='raise' stops .* torch\.autograd\.detect_anomaly\(\)"),
    (changed, r"'0\.0' was changed outside .* optimizer\.reset_state\(\[parameter\]\)"),
    (slow_bfloat16, 'pass ns_dtype="auto"'),
    (other_values, r"restore\(keep_hyperparameters=True\)"),
    (other_rates, r"store\.register\(scheduler=scheduler\)"),
    (registered_since, r"'more', which keeps .* before the next step\(\)"),
    (not_taken, r"call store\.register\(more=None\)"),
    (changed_before_close, r"Call synchronize\(\) right after the last step\(\)"),
    (changed_before_the_end_of_a_block, r"Call synchronize\(\) right after the last step\(\)"),
    (other_ranks, r"from 2 to 1 ranks: restore\(\) lays it out anew"),
    (averages_ahead, r"restore\(step, checkpoint=PATH, rewind=True\)"),
]


@pytest.mark.parametrize(("trigger", "text"), KINDS, ids=[kind.__name__ for kind, _ in KINDS])
def test_a_warning_is_at_the_line_of_the_program_and_says_what_to_type(
    trigger: Callable[[Path], None], text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slowness = 40.0 if trigger is slow_bfloat16 else 1.0
    monkeypatch.setattr(newton_schulz, "bfloat16_slowness", lambda: slowness)
    with pytest.warns(UserWarning, match=text) as caught:
        trigger(tmp_path)
    for warning in caught:
        assert warning.filename == __file__
        lines = range(trigger.__code__.co_firstlineno, trigger.__code__.co_firstlineno + 30)
        assert warning.lineno in lines
    assert len(caught) == 1


# ------------------------------------------------------------------------------- any caller


def test_one_line_warns_once_of_the_same() -> None:
    weight = parameter()
    optimizer = muon.Muon([weight], nonfinite="skip")

    def step() -> None:
        weight.grad = torch.full_like(weight, torch.inf)
        optimizer.step()

    assert len(warned(step, times=3)) == 1


def test_the_line_is_found_through_wrappers_of_torch() -> None:
    """A scheduler wraps step(), hooks and a profiler surround it, and a compiler calls it."""
    optimizer = muon.Muon([parameter()])
    scheduler = LambdaLR(optimizer, lambda step: 0.5)
    optimizer.register_step_pre_hook(lambda *_: None)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        (warning,) = warned(torch.no_grad()(optimizer.step))
    scheduler.step()
    assert warning.filename == __file__


@pytest.mark.long
def test_the_line_is_found_in_a_compiled_function() -> None:
    optimizer = muon.Muon([parameter()])
    (warning,) = [
        one
        for one in warned(torch.compile(lambda: optimizer.step(), backend="eager"))
        if "no parameter has a gradient" in str(one.message)
    ]
    assert warning.filename == __file__


def test_a_thread_of_autograd_warns_at_the_line_of_the_main_thread() -> None:
    caught, shown = [], _thread.allocate_lock()
    shown.acquire()

    def show(message: Any, category: Any, filename: str, *rest: Any) -> None:
        caught.append((str(message), filename))
        shown.release()

    with warnings.catch_warnings():
        warnings.simplefilter("default")
        warnings.showwarning = show
        _thread.start_new_thread(tierstore.pages.warn_user, ("type this",))
        assert shown.acquire(timeout=60)  # In C: the line of the main thread is here.
    assert caught == [("type this", __file__)]
