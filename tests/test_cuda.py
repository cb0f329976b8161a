"""Parameters on a GPU: the same bits in every tier, and as on the CPU where that computes."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import muon
import tierstore
from tests.muon.test_encoded_states import OPTIONS as ENCODED
from tests.support import encoded_training, training
from tests.support.class_training import PAGES, gradient, parameters
from tests.support.devices import needs_cuda

STEPS = 8
PAGE_BYTES = 10000


def on_device(dtype: torch.dtype) -> dict[str, torch.nn.Parameter]:
    return {
        name: torch.nn.Parameter(parameter.detach().to("cuda"))
        for name, parameter in training.make_parameters(dtype).items()
    }


def train(
    parameters: dict[str, torch.nn.Parameter], store: tierstore.TierStore, **options: Any
) -> dict[str, torch.Tensor]:
    """Train with gradients made on the CPU, so that they are the same everywhere."""
    optimizer = muon.Muon(training.make_groups(parameters), store=store, **options)
    on_host = {name: torch.nn.Parameter(p.detach().cpu()) for name, p in parameters.items()}
    for step in range(1, STEPS + 1):
        training.set_gradients(on_host, step)
        for name, parameter in parameters.items():
            grad = on_host[name].grad
            parameter.grad = None if grad is None else grad.to(parameter.device)
        optimizer.step()
    found = training.snapshot(optimizer, parameters)
    return {name: tensor.cpu() for name, tensor in found.items()}


BUDGETS: dict[str, dict[str, Any]] = {
    "nvme": {"buffers": 2},
    "host": {},
    "device": {"device_memory": "1MiB", "buffers": 2},
    "some of each": {"device_memory": 100_000, "host_memory": 150_000},
}


@needs_cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("budget", BUDGETS.values(), ids=BUDGETS)
def test_same_bits_in_every_tier(
    budget: dict[str, Any], dtype: torch.dtype, tmp_path: Path
) -> None:
    expected = train(on_device(dtype), tierstore.TierStore(None, page_bytes=PAGE_BYTES))
    with tierstore.TierStore(tmp_path, page_bytes=PAGE_BYTES, **budget) as store:
        training.assert_identical(train(on_device(dtype), store), expected)
        assert store.stats().device_bytes_peak > 0
    parameters = on_device(dtype)
    with tierstore.TierStore(tmp_path, resume=True, **budget) as store:
        optimizer = muon.Muon(training.make_groups(parameters), store=store)
        assert optimizer.restore() == STEPS
        found = training.snapshot(optimizer, parameters)
        training.assert_identical({name: t.cpu() for name, t in found.items()}, expected)


@needs_cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("directory", [True, False])
def test_computing_on_the_host_gives_what_the_cpu_gives(
    directory: bool, dtype: torch.dtype, tmp_path: Path
) -> None:
    expected = train(training.make_parameters(dtype), tierstore.TierStore(None))
    with tierstore.TierStore(
        tmp_path if directory else None, page_bytes=PAGE_BYTES, step_on="cpu"
    ) as store:
        training.assert_identical(train(on_device(dtype), store), expected)
        assert store.stats().device_bytes_peak == 0


@needs_cuda
@pytest.mark.parametrize("commit_every", [1, 3])
@pytest.mark.parametrize("options", ENCODED, ids=str)
@pytest.mark.parametrize("budget", BUDGETS.values(), ids=BUDGETS)
def test_encoded_states_are_the_same_bits_in_every_tier(
    budget: dict[str, Any], options: dict[str, Any], commit_every: int, tmp_path: Path
) -> None:
    """A parameter is changed in between, and the run resumed."""

    def train(parameters: dict[str, torch.nn.Parameter], optimizer: muon.Muon) -> None:
        for step in range(3):
            for name, parameter in parameters.items():
                grad = encoded_training.gradient(name, step, parameter.cpu())
                parameter.grad = grad.to(parameter.device)
            optimizer.step()

    def change(parameters: dict[str, torch.nn.Parameter]) -> None:
        with torch.no_grad():
            parameters["wide"].mul_(2)

    def encoded_on_device() -> dict[str, torch.nn.Parameter]:
        made = encoded_training.parameters_of().items()
        return {name: torch.nn.Parameter(parameter.detach().cuda()) for name, parameter in made}

    expected = encoded_on_device()
    in_memory = muon.Muon(
        encoded_training.groups_of(expected),
        store=tierstore.TierStore(None, commit_every=commit_every),
        **options,
    )
    train(expected, in_memory)
    change(expected)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # Of the change.
        train(expected, in_memory)
    wanted = in_memory.store.pages.read_states()
    parameters = encoded_on_device()
    sizes = {"page_bytes": PAGE_BYTES, "commit_every": commit_every}
    with tierstore.TierStore(tmp_path, **sizes, **budget) as store:
        optimizer = muon.Muon(encoded_training.groups_of(parameters), store=store, **options)
        train(parameters, optimizer)
        change(parameters)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            train(parameters, optimizer)
    resumed = encoded_on_device()
    with tierstore.TierStore(tmp_path, resume=True, **sizes, **budget) as store:
        optimizer = muon.Muon(encoded_training.groups_of(resumed), store=store, **options)
        assert optimizer.restore() == 6
        states = store.pages.read_states()
    for name, parameter in resumed.items():
        assert torch.equal(parameter, expected[name])
        assert torch.equal(parameter, parameters[name])
        for state, tensor in wanted[name].items():
            assert torch.equal(states[name][state].cpu(), tensor.cpu()), (name, state)


@needs_cuda
def test_moving_between_all_tiers(tmp_path: Path) -> None:
    dtype = torch.bfloat16
    expected = train(on_device(dtype), tierstore.TierStore(None, page_bytes=PAGE_BYTES))
    parameters = on_device(dtype)
    with tierstore.TierStore(tmp_path, page_bytes=PAGE_BYTES, device_memory="1MiB") as store:
        optimizer = muon.Muon(training.make_groups(parameters), store=store)
        on_host = {name: torch.nn.Parameter(p.detach().cpu()) for name, p in parameters.items()}
        for step in range(1, STEPS + 1):
            store.move(("nvme", "device", "host")[step % 3])
            training.set_gradients(on_host, step)
            for name, parameter in parameters.items():
                grad = on_host[name].grad
                parameter.grad = None if grad is None else grad.to("cuda")
            optimizer.step()
        found = training.snapshot(optimizer, parameters)
        training.assert_identical({name: t.cpu() for name, t in found.items()}, expected)


@needs_cuda
@pytest.mark.parametrize("step_on", [None, "cpu"])
def test_gradients_leave_the_gpu_during_backward(step_on: str | None) -> None:
    """A few are on their way at a time. Two backwards make one gradient."""
    layers, width, steps = 24, 4096, 3

    def train(offload_gradients: str | None) -> tuple[list[torch.Tensor], int]:
        torch.manual_seed(0)
        linears = [torch.nn.Linear(width, width, bias=False) for _ in range(layers)]
        model = torch.nn.Sequential(*linears).to("cuda", torch.bfloat16)
        inputs = torch.randn(16, width, device="cuda", dtype=torch.bfloat16)
        group = {"params": list(model.named_parameters()), "algorithm": "adamw"}
        options = {"offload_gradients": offload_gradients, "step_on": step_on}
        with tierstore.TierStore(None, free_gradients=True, **options) as store:
            optimizer = muon.Muon([group], store=store)
            for _ in range(steps):  # The first lays out pages, and its gradients stay.
                before = torch.cuda.memory_allocated()
                torch.cuda.reset_peak_memory_stats()
                for _ in range(2):
                    model(inputs).square().mean().backward()
                torch.cuda.synchronize()
                peak = torch.cuda.max_memory_allocated() - before
                optimizer.step()
        return [parameter.detach().cpu() for parameter in model.parameters()], peak

    gradients = layers * width * width * 2
    stays, stays_peak = train(None)
    leaves, leaves_peak = train("backward")
    assert all(torch.equal(a, b) for a, b in zip(leaves, stays, strict=True))
    assert stays_peak >= gradients
    assert leaves_peak < gradients / 2


@needs_cuda
def test_page_buffers_are_page_locked(tmp_path: Path) -> None:
    parameters = on_device(torch.bfloat16)
    with tierstore.TierStore(tmp_path, page_bytes=PAGE_BYTES, buffers=2) as store:
        optimizer = muon.Muon(training.make_groups(parameters), store=store)
        for parameter in parameters.values():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        with store.pages.sweep() as pages:
            chunks = [c for page in pages for shard in page.shards for c in shard.chunks]
            on_gpu = [state.is_cuda for chunk in chunks for state in chunk.states.values()]
        assert on_gpu
        assert all(on_gpu)
        assert all(buffer.tensor.is_pinned() for buffer in store._session.pager._pool._all)


@needs_cuda
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_gradients_that_are_not_finite_are_never_committed(
    dtype: torch.dtype, value: float, tmp_path: Path
) -> None:
    shapes = {"large": (513, 65), "empty": (0, 4), "scalar": ()}
    parameters = {
        name: torch.nn.Parameter(torch.zeros(shape, dtype=dtype, device="cuda"))
        for name, shape in shapes.items()
    }
    parameters["other"] = torch.nn.Parameter(torch.zeros(3, device="cuda"))
    group = {"params": list(parameters.items()), "algorithm": "adamw"}
    with tierstore.TierStore(tmp_path) as store:
        optimizer = muon.Muon([group], store=store)
        for parameter in parameters.values():  # Their sum overflows.
            parameter.grad = torch.full_like(parameter, torch.finfo(parameter.dtype).max)
        optimizer.step()
        store.synchronize()
        parameters["large"].grad[512, 64] = value  # type: ignore[index]
        with pytest.raises(tierstore.NonFiniteGradientError, match="'large'"):
            optimizer.step()
        assert store.committed.step == 1
        assert optimizer.restore() == 1


@needs_cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("options", [{}, {"foreach": False}, {"foreach": True}, {"fused": True}])
@pytest.mark.parametrize("cls", [torch.optim.AdamW, torch.optim.SGD])
def test_a_class_of_torch_has_its_bits(
    cls: Any, options: dict[str, Any], dtype: torch.dtype, tmp_path: Path
) -> None:
    """Over copies of float32, where pages stream from a directory."""
    own, stock = (
        {name: torch.nn.Parameter(p.detach().cuda()) for name, p in parameters(dtype).items()}
        for _ in range(2)
    )
    masters = [torch.nn.Parameter(p.detach().float()) for p in stock.values()]
    reference = cls(masters, **options)
    with tierstore.TierStore(tmp_path, **PAGES) as store:
        paged = tierstore.Paged(own.items(), cls, store=store, **options)
        for step in range(1, STEPS + 1):
            for index, (mine, theirs) in enumerate(zip(own.values(), masters, strict=True)):
                grad = gradient(step, index, mine.detach().cpu())
                mine.grad = None if grad is None else grad.cuda()
                theirs.grad = None if grad is None else grad.cuda().float()
            paged.step()
            reference.step()
        for mine, theirs in zip(own.values(), masters, strict=True):
            assert torch.equal(mine, theirs.to(dtype))
