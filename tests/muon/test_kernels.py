"""Kernels of one pass over memory: the bits of torch's operations, on a CPU and on a GPU."""

from __future__ import annotations

import itertools
import logging
import subprocess
import sys
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import muon
import tierstore
from muon.kernels import cpu, rounding, rules
from tests.support.adamw import AdamW
from tests.support.devices import needs_avx2, needs_cuda
from tierstore.layout import encoding_kernels

# Some are stepped in several pieces.
SHAPES = {
    "wide": (256, 1025),
    "tall": (520, 264),
    "embedding": (1031, 257),
    "stack": (2, 1030, 257),
}
RULES: dict[str, dict[str, Any]] = {
    "default": {},
    "nesterov=False": {"nesterov": False, "momentum": 0.3},
    "float32 momentum": {"momentum_dtype": torch.float32},
    "maximize": {"maximize": True},
}
FEWER_BYTES: dict[str, dict[str, Any]] = {
    "8 bits": {"master": "24bit", "momentum_dtype": torch.int8, "moments_dtype": torch.int8},
    "16 bits": {"master": "remainder", "moments_dtype": torch.bfloat16},
    "moments alone": {"moments_dtype": torch.int8},
    "8 bits, upwards": {
        "moments_dtype": torch.int8,
        "momentum_dtype": torch.int8,
        "maximize": True,
    },
}
DEVICES = [pytest.param("cpu", marks=needs_avx2), pytest.param("cuda", marks=needs_cuda)]


@pytest.fixture
def threads() -> Iterator[None]:
    """More threads than cores, so that each tensor is cut."""
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


def train(device: str, dtype: torch.dtype, rule: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Train four steps; parameters are changed in between, also to what is not finite.

    Returns:
        The states as pages keep them, and the parameters.
    """
    generator = torch.Generator(device).manual_seed(0)

    def random(shape: tuple[int, ...]) -> torch.Tensor:
        numbers = torch.randn(shape, generator=generator, device=device, dtype=torch.float32)
        return numbers.to(dtype)

    parameters = {name: torch.nn.Parameter(random(shape)) for name, shape in SHAPES.items()}
    of_muon = {key: value for key, value in rule.items() if key != "moments_dtype"}
    of_adamw = {
        key: value for key, value in rule.items() if key in ("maximize", "master", "moments_dtype")
    }
    groups = [
        {
            "params": [(name, parameters[name]) for name in ("wide", "tall")],
            "algorithm": "muon",
            "ns_dtype": torch.float32,
            **of_muon,
        },
        {
            "params": [(name, parameters[name]) for name in ("embedding", "stack")],
            "algorithm": "adamw",
            "weight_decay": 0.1,
            **of_adamw,
        },
    ]
    optimizer = muon.Muon(groups)
    for step in range(4):
        for parameter in parameters.values():
            parameter.grad = random(tuple(parameter.shape)) * 10.0 ** (step - 2)
        if step == 2:
            with torch.no_grad():
                for parameter in parameters.values():
                    of_row = parameter.view(-1, parameter.shape[-1])[3, 5:9]
                    of_row.copy_(torch.tensor([0.0, 7.5, float("inf"), float("nan")]))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # Of the change.
            optimizer.step()
    found = optimizer.store.pages.read_states()
    states = {f"{n}.{s}": t for n, of_one in found.items() for s, t in of_one.items()}
    return states | dict(parameters)


def leave_out_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Step by operations of torch alone."""
    monkeypatch.setattr(rules, "kernels_for", lambda device: None)
    monkeypatch.setattr(rules, "encoded_kernels_for", lambda device: None)
    monkeypatch.setattr(rounding, "kernels_for", lambda device: None)
    monkeypatch.setattr(encoding_kernels, "fit", lambda *tensors: False)


@pytest.mark.quick(2)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *itertools.product(RULES, [torch.float32, torch.bfloat16, torch.float16, torch.float64]),
        *itertools.product(FEWER_BYTES, [torch.float32, torch.bfloat16]),
    ],
)
@pytest.mark.usefixtures("threads")
def test_a_training_has_the_bits_of_torch(
    device: str, name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    rule = (RULES | FEWER_BYTES)[name]
    found = train(device, dtype, rule)
    leave_out_kernels(monkeypatch)
    torch.testing.assert_close(found, train(device, dtype, rule), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("device", DEVICES)
def test_kernels_run(device: str) -> None:
    assert rules.kernels_for(torch.device(device)) is not None


@needs_cuda
def test_kernels_of_states_in_fewer_bytes_run_on_a_gpu() -> None:
    assert rules.encoded_kernels_for(torch.device("cuda")) is not None


@needs_avx2
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("maximize", [False, True])
def test_a_large_embedding_equals_the_reference(weight_decay: float, maximize: bool) -> None:
    options: dict[str, Any] = {"lr": 3e-3, "weight_decay": weight_decay, "maximize": maximize}
    generator = torch.Generator().manual_seed(0)
    ours = torch.nn.Parameter(torch.randn((1031, 129), generator=generator))
    theirs = torch.nn.Parameter(ours.detach().clone())
    group = {"params": [("embedding", ours)], "algorithm": "adamw", "betas": (0.9, 0.999)}
    optimizer = muon.Muon([group | options])
    reference = AdamW([theirs], **options)
    for _ in range(5):
        ours.grad = torch.randn(ours.shape, generator=generator)
        theirs.grad = ours.grad.clone()
        optimizer.step()
        reference.step()
    assert torch.equal(ours, theirs)


NUMBERS = st.floats(width=32, allow_nan=True, allow_infinity=True)


@needs_avx2
@pytest.mark.usefixtures("threads")
@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    numel=st.integers(1, 100),
    seed=st.integers(0, 2**32 - 1),
    special=st.lists(NUMBERS, max_size=8),
    dtypes=st.tuples(*[st.sampled_from([torch.float32, torch.bfloat16])] * 4),
    momentum=st.sampled_from([0.0, 0.3, 0.5, 0.95]),
    nesterov=st.booleans(),
    maximize=st.booleans(),
    is_rounded=st.booleans(),
)
def test_each_rule_has_the_bits_of_torch(
    numel: int,
    seed: int,
    special: list[float],
    dtypes: tuple[torch.dtype, ...],
    momentum: float,
    nesterov: bool,
    maximize: bool,
    is_rounded: bool,
) -> None:
    """Of any number of elements, some of them zeros, infinite, not a number, or changed."""
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.randn((5, numel), generator=generator)
    numbers[:, : len(special)] = torch.tensor(special)[:numel]
    narrow = numbers[4].bfloat16()
    narrow[::3] *= -1  # Also zeros, which are as good as equal.
    found = []
    for kernels in (rules.kernels_for(torch.device("cpu")), None):
        buffer, values = numbers[1].to(dtypes[1], copy=True), numbers[2].clone()
        parameter = values.bfloat16()
        parameter[::2] = narrow[::2]
        is_changed: list[bool] = []
        master: Any = values
        if is_rounded:
            master = tierstore.pages.RoundedMaster(
                values, parameter, lambda bit, into=is_changed: into.append(bool(bit))
            )
        grad, out = numbers[0].to(dtypes[0]), torch.empty(numel, dtype=dtypes[2])
        mean, mean_sq = numbers[3].clone(), numbers[1].square()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(rules, "kernels_for", lambda device, found=kernels: found)
            patch.setattr(cpu, "_PART_NUMEL", 16)
            rules.momentum_(
                grad, buffer, momentum=momentum, nesterov=nesterov, out=out, maximize=maximize
            )
            rules.adamw_(
                [master],
                [grad],
                [mean],
                [mean_sq],
                steps=[3.0],
                lr=1e-3,
                betas=(momentum, 0.9),
                eps=1e-8,
                weight_decay=0.1,
                maximize=maximize,
            )
            update = numbers[0].to(dtypes[3])
            rules.muon_(master, update, lr=0.02, adjusted_lr=0.03, weight_decay=0.1)
        found.append([out, buffer, mean, mean_sq, values, parameter, torch.tensor(any(is_changed))])
    torch.testing.assert_close(*found, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("algorithm", ["muon", "adamw"])
@pytest.mark.parametrize("master", [None, "remainder"])
def test_a_backward_after_the_step_is_refused_as_with_torch_optim(
    device: str, dtype: torch.dtype, algorithm: str, master: str | None
) -> None:
    """autograd finds that a weight that it kept has changed."""
    weight = torch.nn.Parameter(torch.randn((300, 300), device=device).to(dtype))
    group = {"params": [("weight", weight)], "algorithm": algorithm, "master": master}
    optimizer = muon.Muon([group], ns_dtype=torch.float32)
    weight.grad = torch.ones_like(weight)
    values = torch.randn((300, 1), device=device, requires_grad=True)
    loss = (weight @ values.to(dtype)).sum()
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@needs_avx2
def test_steps_go_on_where_no_kernels_are_built(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    expected = train("cpu", torch.bfloat16, {})
    monkeypatch.setitem(sys.modules, "muon.kernels.cpu", None)  # As if it could not be imported.
    rules.kernels_for.cache_clear()
    try:
        with caplog.at_level(logging.WARNING, "muon"):
            found = train("cpu", torch.bfloat16, {})
    finally:
        rules.kernels_for.cache_clear()
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
    [message] = caplog.messages
    assert message.startswith("steps on cpu take more passes over memory: ")


@pytest.mark.quick(3)
@needs_avx2
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("before_first_use", [True, False])
@pytest.mark.parametrize("rule", [{}, FEWER_BYTES["8 bits"]], ids=["default", "8 bits"])
@pytest.mark.parametrize("by_kernels", [True, False])
def test_the_default_dtype_does_not_matter(
    dtype: torch.dtype,
    before_first_use: bool,
    rule: dict[str, Any],
    by_kernels: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    expected = train("cpu", torch.bfloat16, rule)
    if not by_kernels:
        monkeypatch.setattr(encoding_kernels, "fit", lambda *tensors: False)
    if before_first_use:
        rules.kernels_for.cache_clear()
    default = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        found = train("cpu", torch.bfloat16, rule)
    finally:
        torch.set_default_dtype(default)
    assert rules.kernels_for(torch.device("cpu")) is not None
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


class Waiting(torch.Tensor):
    """A tensor without memory of its own, as collectives return before they have ended."""

    def __new__(cls, tensor: torch.Tensor) -> Waiting:
        made: Waiting = torch.Tensor._make_wrapper_subclass(cls, tensor.shape, dtype=tensor.dtype)
        made.tensor = tensor
        return made

    @classmethod
    def __torch_dispatch__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        own = [arg.tensor if isinstance(arg, Waiting) else arg for arg in args]
        return function(*own, **(kwargs or {}))


@needs_avx2
@pytest.mark.parametrize("algorithm", ["muon", "adamw"])
@pytest.mark.parametrize("make", [Waiting, torch._neg_view], ids=["wrapper", "negative"])
def test_gradients_that_are_not_plain_memory(make: Any, algorithm: str) -> None:
    found = []
    for change in (make, lambda grad: make(grad) * 1):
        weight = torch.nn.Parameter(torch.ones(300, 300))
        optimizer = muon.Muon(
            [{"params": [("weight", weight)], "algorithm": algorithm}], ns_dtype=torch.float32
        )
        weight.grad = change(torch.randn(300, 300, generator=torch.Generator().manual_seed(0)))
        optimizer.step()
        found.append(weight.detach())
    assert torch.equal(*found)


@needs_avx2
def test_tensors_of_other_shapes_and_freed_ones_are_refused() -> None:
    """By operations of torch."""
    grad, master, update_ = torch.ones(200), torch.ones(200), torch.ones(200)
    options: dict[str, Any] = {"lr": 0.1, "adjusted_lr": 0.1, "weight_decay": 0.1}
    with pytest.raises(RuntimeError):
        rules.muon_(master, update_[:100], **options)
    with pytest.raises(RuntimeError):
        rules.momentum_(grad, master[:100], momentum=0.9, nesterov=True, out=update_)
    parameter = master.bfloat16()
    parameter.untyped_storage().resize_(0)
    rounded = tierstore.pages.RoundedMaster(master, parameter, lambda changed: None)
    with pytest.raises(RuntimeError):
        rules.muon_(rounded, update_, **options)


@needs_avx2
def test_a_parameter_in_float32_that_is_not_the_master(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for kernels in (rules.kernels_for(torch.device("cpu")), None):
        monkeypatch.setattr(rules, "kernels_for", lambda device, found=kernels: found)
        master, parameter = torch.ones(100), torch.full((100,), 2.0)
        rounded = tierstore.pages.RoundedMaster(master, parameter, lambda changed: None)
        rules.muon_(rounded, torch.ones(100), lr=0.1, adjusted_lr=0.1, weight_decay=0.1)
        found.append(torch.stack([master, parameter]))
    assert torch.equal(*found)


@pytest.mark.long
def test_the_first_root_of_a_process_has_the_bits_of_the_next() -> None:
    # Each process forks before its threads exist; several at once, so that the threads of a process
    # do not begin together.
    program = """
import os, torch, muon
for _ in range(200):
    child = os.fork()
    if child == 0:
        numbers = torch.rand(4099, generator=torch.Generator().manual_seed(0))
        os._exit(not torch.equal(numbers.sqrt(), numbers.sqrt()))
    assert os.waitpid(child, 0)[1] == 0
"""
    processes = [subprocess.Popen([sys.executable, "-c", program]) for _ in range(4)]
    assert [process.wait(300) for process in processes] == [0] * 4
