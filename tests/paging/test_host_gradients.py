"""Gradients that leave the device during backward."""

from __future__ import annotations

import copy
import gc
import math
import pickle
import random
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import muon
import tierstore
from tests.support import killed_processes, training
from tests.support.fake_cuda import fake_cuda
from tests.support.faults import FaultyStorage
from tests.support.killed_processes import KillAt
from tierstore.paging.device import Copy
from tierstore.storage.base import Storage
from tierstore.storage.select import open_storage

STEPS = 4
PAGE_BYTES = 16384


def backward(parameters: dict[str, torch.nn.Parameter], step: int) -> None:
    """Give the parameters the gradients of a step by a backward."""
    twins = {name: torch.nn.Parameter(p.detach()) for name, p in parameters.items()}
    training.set_gradients(twins, step)
    terms = [
        (p * twins[name].grad).sum() for name, p in parameters.items() if _has_grad(twins, name)
    ]
    torch.stack([term.float() for term in terms]).sum().backward()


def _has_grad(twins: dict[str, torch.nn.Parameter], name: str) -> bool:
    return twins[name].grad is not None


class Run:
    """A model on a GPU, and an optimizer that steps it.

    Args:
        directory: of the store.
        options: arguments of the store.
        cls: a class of torch in place of Muon.
        of_optimizer: arguments of Muon.
    """

    def __init__(
        self,
        directory: Path | Storage | None,
        options: dict[str, Any],
        cls: Any = None,
        **of_optimizer: Any,
    ) -> None:
        self.parameters = training.make_parameters(torch.bfloat16)
        self.store = tierstore.TierStore(directory, page_bytes=PAGE_BYTES, **options)
        self.optimizer: tierstore.PagedOptimizer
        if cls is None:
            groups = training.make_groups(self.parameters)
            of_optimizer = {"ns_dtype": torch.float32, **of_optimizer}
            self.optimizer = muon.Muon(groups, store=self.store, **of_optimizer)
        else:
            self.optimizer = tierstore.Paged(self.parameters.items(), cls, store=self.store)
        if directory is not None:
            self.optimizer.restore()

    def on_host(self) -> dict[str, bool]:
        """Parameter name -> whether its gradient is on the host, for those that have one."""
        return {
            name: "in host memory" in repr(parameter.grad)
            for name, parameter in self.parameters.items()
            if parameter.grad is not None and parameter.numel()
        }

    def snapshot(self) -> dict[str, torch.Tensor]:
        return training.snapshot(self.optimizer, self.parameters)


LEAVES: dict[str, Any] = {"offload_gradients": "backward", "free_gradients": True}
STAYS: dict[str, Any] = {"free_gradients": True}
CLIPPERS: dict[str, Callable[[Run, float], torch.Tensor]] = {
    "optimizer": lambda run, limit: run.optimizer.clip_grad_norm_(limit),
    "torch": lambda run, limit: nn.utils.clip_grad_norm_(run.parameters.values(), limit),
    "largest": lambda run, limit: nn.utils.clip_grad_norm_(with_gradients(run), limit, math.inf),
}


def train(
    run: Run, *, backwards: int = 1, max_norm: float | None = None, clipper: str = "torch"
) -> list[torch.Tensor]:
    norms = []
    for step in range(run.store.step + 1, run.store.step + STEPS + 1):
        for number in range(backwards):
            backward(run.parameters, step * backwards + number)
        if max_norm is not None:
            norms.append(CLIPPERS[clipper](run, max_norm))
        run.optimizer.step()
        left = [p for p in run.parameters.values() if p.grad is not None]
        assert not any(parameter.numel() for parameter in left)
    return norms


@pytest.mark.quick(4)
@pytest.mark.parametrize("backwards", [1, 3])
@pytest.mark.parametrize("clipper", [None, *CLIPPERS])
@pytest.mark.parametrize("pace", [0, 0.3])
@pytest.mark.parametrize("in_directory", [True, False])
@pytest.mark.parametrize("step_on", [None, "cpu"])
def test_results_equal_gradients_that_stay(
    step_on: str | None,
    in_directory: bool,
    pace: float,
    clipper: str | None,
    backwards: int,
    tmp_path: Path,
) -> None:
    """Bit for bit, clipped by torch's function, and after a resume."""
    max_norm = None if clipper is None else 0.5
    by_torch = "largest" if clipper == "largest" else "torch"
    stays = Run(None, STAYS)
    expected = train(stays, backwards=backwards, max_norm=max_norm, clipper=by_torch)
    middle = copy.deepcopy(stays.snapshot())
    expected += train(stays, backwards=backwards, max_norm=max_norm, clipper=by_torch)
    with fake_cuda(pace=pace):
        options = {**LEAVES, "step_on": step_on}
        leaves = Run(tmp_path if in_directory else None, options)
        clip = clipper or "torch"
        norms = train(leaves, backwards=backwards, max_norm=max_norm, clipper=clip)
        training.assert_identical(leaves.snapshot(), middle)
        if in_directory:
            leaves.store.close()
            leaves = Run(tmp_path, {**options, "resume": True})
        norms += train(leaves, backwards=backwards, max_norm=max_norm, clipper=clip)
        assert norms == expected
        training.assert_identical(leaves.snapshot(), stays.snapshot())
        leaves.store.close()


@pytest.mark.parametrize("step_on", [None, "cpu"])
@pytest.mark.parametrize("cls", [torch.optim.NAdam, torch.optim.SGD])
def test_a_class_of_torch_steps_gradients_that_left(
    cls: Any, step_on: str | None, tmp_path: Path
) -> None:
    """Of two backwards, clipped: the bits of the class over copies of float32."""
    with fake_cuda():
        options = {**LEAVES, "step_on": step_on}
        run = Run(tmp_path, options, cls)
        norms = train(run, backwards=2, max_norm=0.5)
        values = run.snapshot()
        run.store.close()
    stays = Run(None, STAYS, cls)
    assert all(map(torch.equal, norms, train(stays, backwards=2, max_norm=0.5)))
    training.assert_identical(values, stays.snapshot())


def go_on(directory: Path, step_on: str | None, steps: int, kill_at: int = 0) -> None:
    """Train on up to a step with gradients that leave, unless the process is killed."""
    torch.set_num_threads(1)
    kill = KillAt(kill_at)
    storage = FaultyStorage(open_storage(directory / "rank-00000"), on_operation=kill)
    with fake_cuda(pace=0.3):
        run = Run(storage, {**LEAVES, "step_on": step_on, "resume": True})
        for step in range(run.store.step + 1, steps + 1):
            for number in range(3):
                backward(run.parameters, step * 3 + number)
            nn.utils.clip_grad_norm_(run.parameters.values(), 0.5)
            run.optimizer.step()
            run.store.commit()
        run.store.close()


@pytest.mark.quick(1)
@pytest.mark.parametrize("step_on", [None, "cpu"])
def test_killed_and_resumed(step_on: str | None, tmp_path: Path) -> None:
    """Clipped sums of three backwards, killed with SIGKILL at any operation of the storage."""
    stays = Run(None, STAYS)
    train(stays, backwards=3, max_norm=0.5)
    generator, killed = random.Random(1), 0
    for attempt in range(3):
        directory = tmp_path / str(attempt)
        child = killed_processes._processes.Process(
            target=go_on, args=(directory, step_on, STEPS, generator.randint(5, 40))
        )
        child.start()
        child.join()
        assert child.exitcode in (0, -signal.SIGKILL)
        killed += child.exitcode != 0
        go_on(directory, step_on, STEPS)
        found = Run(directory, {"resume": True})
        training.assert_identical(found.snapshot(), stays.snapshot())
        found.store.close()
    assert killed > 1


def test_all_gradients_leave_during_backward(tmp_path: Path) -> None:
    with fake_cuda():
        run = Run(tmp_path, LEAVES)
        backward(run.parameters, 1)
        assert run.on_host()
        assert all(run.on_host().values())
        for name, parameter in run.parameters.items():
            grad = parameter.grad
            if grad is not None and parameter.numel():
                assert (grad.shape, grad.dtype) == (parameter.shape, parameter.dtype)
                with pytest.raises(RuntimeError, match=f"gradient of '{name}' is in host memory"):
                    grad.sum()
        run.optimizer.zero_grad()
        assert not run.on_host()
        backward(run.parameters, 2)
        run.optimizer.step()
        run.store.close()
        backward(run.parameters, 3)
        assert not any(run.on_host().values())


def test_a_gradient_is_clipped_once(tmp_path: Path) -> None:
    """A clipped gradient refuses what would compute with it, and the step is as if it was not."""
    stays = Run(None, STAYS)
    backward(stays.parameters, 1)
    nn.utils.clip_grad_norm_(stays.parameters.values(), 0.5)
    stays.optimizer.step()
    with fake_cuda():
        run = Run(tmp_path, LEAVES)
        backward(run.parameters, 1)
        for _ in range(3):  # A loop that logs norms.
            nn.utils.get_total_norm([p.grad.detach() for p in with_gradients(run)])
        run.optimizer.clip_grad_norm_(0.5)
        for again in (
            lambda: run.optimizer.clip_grad_norm_(0.5),
            lambda: nn.utils.clip_grad_norm_(run.parameters.values(), 0.5),
            lambda: with_gradients(run)[0].grad.mul_(torch.tensor(0.5)),
        ):
            with pytest.raises(RuntimeError, match="clip once for each step"):
                again()
        with pytest.raises(RuntimeError, match=r"call zero_grad\(\) before backward\(\)"):
            backward(run.parameters, 2)
        run.optimizer.step()
        training.assert_identical(run.snapshot(), stays.snapshot())
        backward(run.parameters, 2)
        run.optimizer.zero_grad()
        backward(run.parameters, 2)
        run.optimizer.clip_grad_norm_(0.5)
        run.store.close()


def with_gradients(run: Run) -> list[Any]:
    return [p for p in run.parameters.values() if p.grad is not None and p.numel()]


def test_another_norm_is_refused(tmp_path: Path) -> None:
    with fake_cuda():
        run = Run(tmp_path, LEAVES)
        backward(run.parameters, 1)
        with pytest.raises(RuntimeError, match=r"norm of order 1\.0 .* order 2 and infinity"):
            run.optimizer.clip_grad_norm_(1.0, 1.0)
        run.store.close()


@pytest.mark.parametrize("step_on", [None, "cpu"])
def test_sums_in_float32(step_on: str | None, tmp_path: Path) -> None:
    """gradient_dtype: of three backwards, as sums that a program keeps itself."""
    sums: dict[torch.Tensor, torch.Tensor] = {}
    kept = Run(None, {}, gradient=sums.get)
    with fake_cuda():
        options = {**LEAVES, "gradient_dtype": torch.float32, "step_on": step_on}
        run = Run(tmp_path, options)
        for step in range(1, STEPS + 1):
            sums.clear()
            for number in range(3):
                backward(run.parameters, step * 3 + number)
                backward(kept.parameters, step * 3 + number)
                for parameter in kept.parameters.values():
                    if parameter.grad is None:
                        continue
                    wide = parameter.grad.float()
                    sums[parameter] = sums[parameter] + wide if parameter in sums else wide
                    parameter.grad = None
            norm = nn.utils.get_total_norm(list(sums.values()))
            assert run.optimizer.clip_grad_norm_(0.5) == norm
            for total in sums.values():
                total.mul_((0.5 / (norm + 1e-6)).clamp(max=1.0))
            run.optimizer.step()
            kept.optimizer.step()
        training.assert_identical(run.snapshot(), kept.snapshot())
        kept.store.close()
        run.store.close()


def test_gradients_that_were_assigned_are_stepped(tmp_path: Path) -> None:
    """And gradients of the first step, before pages are laid out."""
    with fake_cuda():
        store = tierstore.TierStore(tmp_path, page_bytes=PAGE_BYTES, **LEAVES)
        parameters = training.make_parameters(torch.bfloat16)
        groups = training.make_groups(parameters)
        optimizer = muon.Muon(groups, store=store, ns_dtype=torch.float32)
        stays = Run(None, STAYS)
        for step in (1, 2):
            for each in (parameters, stays.parameters):
                training.set_gradients(each, step)
            optimizer.step()
            stays.optimizer.step()
        training.assert_identical(training.snapshot(optimizer, parameters), stays.snapshot())
        stays.store.close()
        store.close()


def test_gradients_that_are_not_finite_are_found_on_the_host(tmp_path: Path) -> None:
    with fake_cuda():
        run = Run(tmp_path, LEAVES, nonfinite="skip")
        backward(run.parameters, 1)
        (run.parameters["wide"] * float("inf")).sum().backward()
        with pytest.warns(UserWarning, match="'wide'"):
            run.optimizer.step()
        assert run.store.step == 0
        assert not run.on_host()
        run.store.close()


def test_gradients_count_towards_host_memory(tmp_path: Path) -> None:
    peaks = []
    for number, options in enumerate((STAYS, LEAVES)):
        with fake_cuda():
            run = Run(tmp_path / str(number), options)
            backward(run.parameters, 1)
            run.optimizer.step()
            peaks.append(run.store.stats().host_bytes_peak)
            run.store.close()
    gradients = sum(parameter.nbytes for parameter in run.parameters.values())
    assert gradients <= peaks[1] - peaks[0] <= gradients + 64 * len(run.parameters)


@pytest.mark.long
def test_too_little_host_memory_is_refused(tmp_path: Path) -> None:
    parameter = torch.nn.Parameter(torch.zeros(1000, 1000))
    group = {"params": [("embedding", parameter)], "algorithm": "adamw"}
    options = {"page_bytes": PAGE_BYTES, "host_memory": "3MiB", "buffers": 2, **LEAVES}
    with (
        fake_cuda(),
        tierstore.TierStore(tmp_path, **options) as store,
        pytest.raises(tierstore.BudgetError, match="host_memory"),
    ):
        muon.Muon([group], store=store).restore()


@pytest.mark.skipif(not hasattr(torch.Tensor, "grad_dtype"), reason="torch lacks grad_dtype")
def test_gradients_of_another_dtype_are_refused(tmp_path: Path) -> None:
    with fake_cuda():
        run = Run(tmp_path, LEAVES)
        parameter = run.parameters["wide"]
        parameter.grad_dtype = torch.float32
        with pytest.raises(ValueError, match=r"'wide' is .* gradient_dtype=torch\.float32"):
            parameter.sum().backward()
        run.store.close()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"offload_gradients": "forward"}, "None or 'backward', got 'forward'"),
        ({"gradient_dtype": torch.int8}, "float32 or float64, got torch.int8"),
        ({"step_on": "xpu"}, "step_on must be 'cpu', a GPU such as 'cuda:0', or None, got 'xpu'"),
    ],
)
def test_refused_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tierstore.TierStore(None, **options)


@pytest.fixture
def _on_gpu() -> Iterator[None]:
    with fake_cuda():
        yield


def small_run(directory: Path | None, *, freeze: bool = False) -> tuple[Any, Any, Any]:
    """Return a model of two layers after a step, its optimizer, and its store."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 4))
    model[1].requires_grad_(not freeze)
    store = tierstore.TierStore(directory, page_bytes=PAGE_BYTES, **LEAVES)
    group = {"params": list(model.named_parameters()), "algorithm": "adamw"}
    optimizer = muon.Muon([group], store=store)
    loss_of(model).backward()
    optimizer.step()
    return model, optimizer, store


def loss_of(model: torch.nn.Module) -> torch.Tensor:
    loss: torch.Tensor = model(torch.ones(2, 8)).square().mean()
    return loss


REFUSED: dict[str, Callable[[torch.Tensor], object]] = {
    "sum": lambda grad: grad + torch.ones_like(grad, device="cpu"),
    "product": lambda grad: grad.mul_(torch.ones(8, 8)),
    "sum without a share": lambda grad: grad.add_(torch.ones(8, 8), alpha=0),
    "data": lambda grad: setattr(grad, "data", torch.zeros(8, 8)),
    "number": lambda grad: grad.mul_(0.5),
    "norms of rows": lambda grad: grad.norm(dim=0),
    "sum with a number": lambda grad: grad + 1,
    "argument": lambda grad: torch.add(torch.ones(8, 8), 1, out=grad),
    "address": lambda grad: grad.data_ptr(),
    "shared": lambda grad: grad.share_memory_(),
    "exported": lambda grad: torch.from_dlpack(grad),
    "pickled": pickle.dumps,
    "copied": copy.deepcopy,
    "zeroed": lambda grad: grad.zero_(),
}


@pytest.mark.usefixtures("_on_gpu")
@pytest.mark.parametrize("use", REFUSED.values(), ids=REFUSED)
def test_all_else_is_refused_and_changes_nothing(use: Callable[[torch.Tensor], object]) -> None:
    model, optimizer, store = small_run(None)
    loss_of(model).backward()
    [weight, *_] = optimizer.paged_groups()[0].parameters
    before = weight.grad.left.host.clone()
    with pytest.raises(RuntimeError):
        use(weight.tensor.grad)
    assert torch.equal(weight.grad.left.host, before)
    store.close()


@pytest.mark.usefixtures("_on_gpu")
def test_a_number_that_left_is_not_a_factor() -> None:
    parameter = nn.Parameter(torch.ones(1))
    with tierstore.TierStore(None, offload_gradients="backward") as store:
        optimizer = muon.Muon(
            [{"params": [("scale", parameter)], "algorithm": "adamw"}], store=store
        )
        for _ in range(2):
            optimizer.zero_grad()
            parameter.sum().backward()
            optimizer.step()
        with pytest.raises(RuntimeError, match="in host memory"):
            torch.ones(3).mul_(parameter.grad)


@pytest.mark.usefixtures("_on_gpu")
def test_a_list_is_scaled_whole_or_not_at_all() -> None:
    model, _, store = small_run(None)
    loss_of(model).backward()
    first, second, *_ = [parameter.grad for parameter in model.parameters()]
    second.mul_(torch.tensor(0.5))
    plain = torch.ones(3)
    with pytest.raises(RuntimeError, match="clip once for each step"):
        torch._foreach_mul_([plain, first, second], torch.tensor(0.5))
    assert torch.equal(plain, torch.ones(3))
    assert first.left.factor is None
    store.close()


@pytest.mark.usefixtures("_on_gpu")
def test_a_penalty_of_a_gradient_has_its_graph() -> None:
    found = []
    for options in ({}, {"offload_gradients": "backward"}):
        torch.manual_seed(0)
        model = nn.Linear(8, 4)
        with tierstore.TierStore(None, **options) as store:
            group = {"params": list(model.named_parameters()), "algorithm": "adamw"}
            optimizer = muon.Muon([group], store=store)
            for _ in range(3):
                optimizer.zero_grad()
                loss_of(model).backward(create_graph=True)
                penalty = model.weight.grad.norm()
                model.weight.grad = None
                penalty.backward()
                optimizer.step()
            found.append(model.weight.detach().clone())
    assert torch.equal(*found)


@pytest.mark.usefixtures("_on_gpu")
def test_a_gradient_that_left_for_another_store_is_refused() -> None:
    model, optimizer, store = small_run(None)
    loss_of(model).backward()
    store.close()
    group = {"params": list(model.named_parameters()), "algorithm": "adamw"}
    with tierstore.TierStore(None) as other:
        optimizer = muon.Muon([group], store=other)
        with pytest.raises(ValueError, match="in the host memory of another store"):
            optimizer.step()
        optimizer.zero_grad()
        loss_of(model).backward()
        optimizer.step()


@pytest.mark.usefixtures("_on_gpu")
def test_a_backward_that_makes_a_graph() -> None:
    model, optimizer, store = small_run(None)
    for _ in range(2):
        loss_of(model).backward(create_graph=True)
    optimizer.step()
    assert store.step == 2
    store.close()


def test_copies_that_ended_are_forgotten() -> None:
    with fake_cuda() as cuda:

        def count() -> int:
            gc.collect()
            copies = [each for each in gc.get_objects() if isinstance(each, Copy)]
            return sum(getattr(copy.event, "cuda", None) is cuda for copy in copies)

        model, optimizer, store = small_run(None)
        counts = []
        for _ in range(3):
            for _ in range(5):
                loss_of(model).backward()
            optimizer.step()
            counts.append(count())
        assert len(set(counts)) == 1
        store.close()


@pytest.mark.usefixtures("_on_gpu")
def test_parameters_that_are_unfrozen_later() -> None:
    model, optimizer, store = small_run(None, freeze=True)
    model.requires_grad_(True)
    for _ in range(2):  # The first step adds the hooks.
        optimizer.zero_grad()
        loss_of(model).backward()
        optimizer.step()
    loss_of(model).backward()
    assert all("in host memory" in repr(parameter.grad) for parameter in model.parameters())
    store.close()


def test_a_gradient_that_is_not_finite_changes_nothing(tmp_path: Path) -> None:
    with fake_cuda():
        run = Run(tmp_path, LEAVES)
        backward(run.parameters, 1)
        run.optimizer.step()
        run.store.synchronize()
        backward(run.parameters, 2)
        (run.parameters["wide"] * float("nan")).sum().backward()
        with pytest.raises(tierstore.NonFiniteGradientError, match="'wide'"):
            run.optimizer.step()
        run.optimizer.zero_grad()
        assert run.optimizer.restore() == 1  # A GPU is not waited for before the step.
        backward(run.parameters, 2)
        run.optimizer.step()
        assert run.store.step == 2
        run.store.close()
