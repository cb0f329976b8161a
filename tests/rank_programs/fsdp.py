"""Ranks of FSDP2 and DDP that train a small model, and one process with the same gradients."""

from __future__ import annotations

import contextlib
import io
import warnings
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, cast
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import swa_utils

import muon
import tierstore
from tests.rank_programs.meshes import cpu_mesh
from tests.support.attempts import attempt
from tests.support.fake_cuda import fake_cuda
from tests.support.kernel import peak_of
from tests.support.references import assert_same
from tierstore.layout.dtensors import local_tensor
from tierstore.paging import host_gradients
from tierstore.paging.host_gradients import HostGradient
from tierstore.ranks.peers import Alone
from tierstore.storage.memory import MemoryStorage

STREAMED: dict[str, Any] = {"page_bytes": 4096, "buffers": 5, "timeout": 30.0}
# 3 ranks have uneven parts of these rows, and some ranks none.
ROWS = (4, 5, 1)

Tensors = dict[str, torch.Tensor]


class Net(nn.Module):
    """Matrices of few rows one after the other, each with a residual path around it."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 6)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(6, rows), nn.Tanh(), nn.Linear(rows, 6, bias=False))
            for rows in ROWS
        )
        self.scale = nn.Parameter(torch.empty(1))
        generator = torch.Generator().manual_seed(3)
        for parameter in self.parameters():
            parameter.data = torch.randn(parameter.shape, generator=generator).to(dtype)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(tokens)
        for layer in self.layers:
            hidden = hidden + layer(hidden)
        return (hidden * self.scale).float().square().mean()


def tokens_of(step: int) -> torch.Tensor:
    """This rank's part of a batch."""
    generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
    return torch.randint(7, (5,), generator=generator)


def sharded(
    dtype: torch.dtype = torch.float32, mesh: DeviceMesh | None = None, **options: Any
) -> Net:
    model = Net(dtype)
    mesh = mesh or cpu_mesh()
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)
    return model


def optimizer_of(model: nn.Module, store: tierstore.TierStore, **options: Any) -> muon.Muon:
    return muon.Muon(muon.param_groups(model, lr=0.05, adamw_lr=0.01), store=store, **options)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    found = tensor.detach()
    return found.full_tensor() if isinstance(found, DTensor) else found


class Reference:
    """One process that steps whole parameters with the gradients that all ranks have."""

    def __init__(self, model: nn.Module, dtype: torch.dtype = torch.float32) -> None:
        self._model, self._mine = model, Net(dtype)
        self._optimizer = optimizer_of(self._mine, tierstore.TierStore(None, process_group=Alone()))

    def step(self) -> None:
        """Take the gradients that are there now; all ranks call it together."""
        theirs = self._model.parameters()
        for mine, other in zip(self._mine.parameters(), theirs, strict=True):
            grad = None if other.grad is None else whole(other.grad)
            mine.grad = None if grad is None else grad.clone()
        self._optimizer.step()

    def assert_identical(self) -> None:
        theirs = dict(self._model.named_parameters())
        for (name, mine), other in zip(self._mine.named_parameters(), theirs.values(), strict=True):
            assert torch.equal(mine, whole(other)), name

    @property
    def loss(self) -> float:
        """Of a batch that holds everything."""
        with torch.no_grad():
            return float(self._mine(torch.arange(7)))

    @property
    def state_dict(self) -> dict[str, Any]:
        return self._optimizer.state_dict()


SETTINGS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {
        "dtype": torch.bfloat16,
        "mp_policy": MixedPrecisionPolicy(reduce_dtype=torch.float32),
    },
    "offloaded": {"offload_policy": CPUOffloadPolicy(pin_memory=False)},
    "kept": {"reshard_after_forward": False},
}


def train(settings: str, directory: Path, store: Mapping[str, Any]) -> None:
    """Forward, backward and step, resumed in between; clipped, and accumulated once."""
    model = sharded(**SETTINGS[settings])
    dtype = SETTINGS[settings].get("dtype", torch.float32)
    reference = Reference(model, dtype)
    steps = iter(range(1, 7))
    on_host = store.get("step_on") == "cuda"
    for resume in (False, True):
        with contextlib.ExitStack() as stack:
            if on_host:  # Matrices are exchanged on the device, which is plain memory here.
                cuda = stack.enter_context(fake_cuda(parameters="cpu"))
                here = mock.patch("muon.pipeline.compute_device", return_value=torch.device("cpu"))
                stack.enter_context(here)
                # CPUOffloadPolicy(pin_memory=True) needs a GPU for this.
                cuda.lock(*map(local_tensor, model.parameters()))
            elif "step_on" in store:
                stack.enter_context(fake_cuda())
            opened = tierstore.TierStore(directory, resume=resume, **STREAMED, **store)
            stack.enter_context(opened)
            optimizer = optimizer_of(model, opened)
            if resume:
                for parameter in model.parameters():
                    parameter.detach().zero_()
                assert optimizer.restore() == 3
                reference.assert_identical()
            for step in (next(steps) for _ in range(3)):
                for part in range(1 + step % 2):
                    model(tokens_of(10 * step + part)).backward()
                norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                grads = [whole(p.grad) for p in model.parameters() if p.grad is not None]
                assert 0.4 < torch.nn.utils.get_total_norm(grads) < 0.51
                assert whole(norm) > 0.5
                reference.step()
                if on_host:
                    cuda.lock(
                        *(local_tensor(p.grad) for p in model.parameters() if p.grad is not None)
                    )
                optimizer.step()
                freed = all(p.grad is None for p in model.parameters())
                assert freed == bool(store.get("free_gradients"))
                model.zero_grad()
                reference.assert_identical()
            saved = optimizer.state_dict()["state"]
            for key, states in reference.state_dict["state"].items():
                for name, tensor in states.items():
                    assert torch.equal(whole(saved[key][name]), tensor)


def leaving(
    shape: tuple[int, ...],
    settings: str,
    backwards: int,
    max_norm: float | None,
    directory: Path,
    syncs: bool = True,
) -> list[str]:
    """Gradients that leave during backward, beside a model whose gradients stay.

    Bit for bit in each step, clipped by torch's function, resumed in between.

    Returns:
        Warnings about gradients that do not leave.
    """
    mesh = cpu_mesh(*shape, names=("replicate", "shard")[-len(shape) :])
    model, twin = (sharded(mesh=mesh, **SETTINGS[settings]) for _ in range(2))
    options = STREAMED | {"offload_gradients": "backward", "free_gradients": True}
    steps = iter(range(1, 7))
    with (
        fake_cuda(),
        tierstore.TierStore(None, timeout=30.0) as of_twin,
        warnings.catch_warnings(record=True) as caught,
    ):
        warnings.simplefilter("always")
        reference = optimizer_of(twin, of_twin)
        for resume in (False, True):
            with tierstore.TierStore(directory, resume=resume, **options) as store:
                optimizer = optimizer_of(model, store)
                if resume:
                    for parameter in model.parameters():
                        parameter.detach().zero_()
                assert optimizer.restore() == (3 if resume else 0)
                for step in (next(steps) for _ in range(3)):
                    for part in range(backwards):
                        for each in (model, twin):
                            each.set_requires_gradient_sync(syncs or part + 1 == backwards)
                            each(tokens_of(10 * step + part)).backward()
                    found = [local_tensor(p.grad) for p in model.parameters() if p.grad is not None]
                    assert all(isinstance(g, HostGradient) for g in found if g.numel())
                    if max_norm is not None:
                        norms = [
                            torch.nn.utils.clip_grad_norm_(each.parameters(), max_norm)
                            for each in (model, twin)
                        ]
                        assert whole(norms[0]) == whole(norms[1]) > max_norm
                    for each in (optimizer, reference):
                        each.step()
                    twin.zero_grad()
                    assert all(p.grad is None for p in model.parameters())
                    for mine, other in zip(model.parameters(), twin.parameters(), strict=True):
                        assert torch.equal(whole(mine), whole(other))
    found = [one for one in caught if "set_requires_gradient_sync" in str(one.message)]
    assert all(one.filename == __file__ for one in found)  # The line of backward().
    return [str(one.message) for one in found]


class Nested(nn.Module):
    """A part with a group of its own, whose gradients are reduced before those around it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.experts = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs + self.experts(torch.tanh(self.first(inputs)))


def nested(directory: Path) -> list[str]:
    """Return the warnings of a backward of nested groups."""
    model = nn.Sequential(Nested(), Nested())
    for module in (model[0].experts, model[0], model[1].experts, model[1], model):
        fully_shard(module, mesh=cpu_mesh(2, names=("shard",)))
    options = STREAMED | {"offload_gradients": "backward"}
    with (
        fake_cuda(),
        tierstore.TierStore(directory, **options) as store,
        warnings.catch_warnings(record=True) as caught,
    ):
        warnings.simplefilter("always")
        optimizer = optimizer_of(model, store)
        optimizer.restore()
        for _ in range(2):
            model(torch.ones(3, 6)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return [str(one.message) for one in caught if "gradient_sync" in str(one.message)]


LAYERS, WIDTH = 12, 256
MATRIX = 4 * WIDTH * WIDTH
"""Bytes of the matrix of a layer in float32."""


def step_once(model: nn.Module, optimizer: muon.Muon, inputs: torch.Tensor) -> None:
    model(inputs).square().mean().backward()
    optimizer.step()
    model.zero_grad()


def peaks(directory: Path) -> tuple[int, int]:
    """Return the most bytes of a training step in torch's allocator, which is the device here.

    The first number is of gradients that stay, the second of gradients that leave one by one.
    """
    found = []
    for options in ({}, {"offload_gradients": "backward"}):
        torch.manual_seed(0)
        layers = (nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False)) for _ in range(LAYERS))
        model = nn.Sequential(*layers)
        for layer in model:
            fully_shard(layer, mesh=cpu_mesh(1, names=("shard",)))
        fully_shard(model, mesh=cpu_mesh(1, names=("shard",)))
        inputs = torch.randn(4, WIDTH)
        with (
            fake_cuda(),
            mock.patch.object(host_gradients, "LEAVING_BYTES_MAX", MATRIX),
            tierstore.TierStore(
                directory / str(len(options)),
                page_bytes=MATRIX // 4,
                buffers=3,
                timeout=30.0,
                **options,
            ) as store,
        ):
            groups = [{"params": list(model.named_parameters()), "algorithm": "adamw"}]
            optimizer = muon.Muon(groups, store=store)
            optimizer.restore()
            step = partial(step_once, model, optimizer, inputs)
            step()
            found.append(peak_of(step))
    return found[0], found[1]


def summed(directory: Path) -> None:
    """Gradients of bfloat16 that leave are summed up in float32, as a program may do it."""
    model, twin = (sharded(**SETTINGS["bf16"]) for _ in range(2))
    sums: dict[int, torch.Tensor] = {}
    options: dict[str, Any] = {"offload_gradients": "backward", "free_gradients": True}
    with (
        fake_cuda(),
        tierstore.TierStore(None, timeout=30.0) as of_twin,
        tierstore.TierStore(
            directory, **STREAMED, **options, gradient_dtype=torch.float32
        ) as store,
    ):
        optimizer = optimizer_of(model, store)
        reference = optimizer_of(twin, of_twin, gradient=lambda p: sums.get(id(p)))
        optimizer.restore()
        for step in range(3):
            sums.clear()
            for part in range(3):
                for each in (model, twin):
                    each(tokens_of(10 * step + part)).backward()
                for parameter in twin.parameters():
                    if parameter.grad is not None:
                        grad = parameter.grad.float()
                        before = sums.get(id(parameter))
                        sums[id(parameter)] = grad if before is None else before + grad
                twin.zero_grad()
            for each in (optimizer, reference):
                each.step()
            for mine, other in zip(model.parameters(), twin.parameters(), strict=True):
                assert torch.equal(whole(mine), whole(other))


def offloaded_copies(directory: Path) -> tuple[list[bool], str]:
    """Train with CPUOffloadPolicy as beside a GPU, whose memory is page-locked.

    Returns:
        For each copy of a gradient to the host whether nobody waits for it, and the refusal of a
        parameter that ranks hold whole.
    """
    waited_for: list[bool] = []
    convert = torch.Tensor.to

    def to(tensor: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        if args == (torch.device("cpu"),) and options.keys() == {"non_blocking"}:
            waited_for.append(not options["non_blocking"])
        return convert(tensor, *args, **options)

    with (
        mock.patch.object(torch.Tensor, "pin_memory", lambda tensor: tensor),
        mock.patch.object(torch.Tensor, "to", to),
        tierstore.TierStore(directory, **STREAMED) as store,
    ):
        model = sharded(offload_policy=CPUOffloadPolicy(pin_memory=True))
        optimizer = optimizer_of(model, store)
        for step in range(2):
            loss = model(tokens_of(step))
            waited_for.clear()
            loss.backward()
            copies = list(waited_for)
            optimizer.step()
            optimizer.zero_grad()
    options = {"offload_gradients": "backward", "timeout": 30.0}
    with fake_cuda(), tierstore.TierStore(None, **options) as store:
        return copies, attempt(optimizer_of(Net(), store).step)


def averages(kind: str, directory: Path) -> None:
    """Averages of sharded or replicated weights, resumed in between, and evaluated."""
    for resume in (False, True):
        model, module = (Net() if kind == "ddp" else sharded() for _ in range(2))
        trained = DistributedDataParallel(model) if kind == "ddp" else model
        options = STREAMED | {"resume": resume}
        with (
            tierstore.TierStore(directory / "run", **options) as store,
            tierstore.TierStore(directory / "averages", **options) as of_averages,
        ):
            optimizer = optimizer_of(model, store)
            averaged = tierstore.AveragedModel(model, module, of_averages, decay=0.7, every=2)
            start = optimizer.restore()
            averaged.restore(start)
            if not resume:
                average = swa_utils.get_ema_multi_avg_fn(0.7)
                reference = swa_utils.AveragedModel(Net(), multi_avg_fn=average)
            for step in range(start + 1, start + 4):
                trained(tokens_of(step)).backward()
                optimizer.step()
                optimizer.zero_grad()
                averaged.update(store.step)
                store.commit()
                weights = Net()
                for mine, other in zip(weights.parameters(), model.parameters(), strict=True):
                    mine.data = whole(other)
                if step % 2 == 0:
                    reference.update_parameters(weights)
            expected = reference.module.parameters()
            for found, value in zip(module.parameters(), expected, strict=True):
                assert torch.equal(whole(found), value)
            tokens = torch.arange(7)
            with torch.no_grad():
                assert torch.equal(module(tokens), reference.module(tokens))


def averaged_otherwise() -> str:
    """Return the refusal of averages that are not sharded as the model is."""
    with tierstore.TierStore(MemoryStorage(), **STREAMED) as store:
        return attempt(lambda: tierstore.AveragedModel(sharded(), Net(), store))


def gathered(directory: Path, options: Mapping[str, Any]) -> str:
    """Forwards without a backward, after which FSDP2 keeps the gathered parameters.

    Returns:
        What is said of a step in the middle of a forward.
    """
    model = sharded(**options)
    reference = Reference(model)
    with tierstore.TierStore(directory, **STREAMED) as store:
        optimizer = optimizer_of(model, store)

        def train_on(tokens: torch.Tensor, *, evaluate: bool) -> None:
            model(tokens).backward()
            reference.step()
            if evaluate:
                loss()
            optimizer.step()
            optimizer.zero_grad()

        @torch.no_grad()
        def loss() -> float:
            found = float(model(torch.arange(7)))
            parameters = zip(model.parameters(), optimizer.state, strict=True)
            assert any(now is not parameter for now, parameter in parameters)
            return found

        train_on(tokens_of(1), evaluate=False)
        reference.assert_identical()
        store.synchronize()
        first = loss()
        assert first == reference.loss
        train_on(tokens_of(2), evaluate=True)
        second = loss()
        assert second == reference.loss != first
        assert optimizer.restore() == 1  # The second step was not committed.
        assert loss() == first
        inside = model.layers[0].register_forward_pre_hook(lambda *_: optimizer.step())
        message = attempt(lambda: model(tokens_of(3)))
        inside.remove()
    return message


def missing_gradients(partition: str) -> None:
    """On some ranks, which counts as zero; on all, where nothing is stepped."""
    model, reference = Net(), Net()
    with (
        tierstore.TierStore(None, timeout=30.0) as store,
        tierstore.TierStore(None, process_group=Alone()) as alone,
    ):
        optimizer = optimizer_of(model, store, partition=partition)
        theirs = optimizer_of(reference, alone)
        model.scale.requires_grad_(False)
        rank, world_size = dist.get_rank(), dist.get_world_size()
        for step in range(1, 7):
            everyone = zip(model.parameters(), reference.parameters(), strict=True)
            for index, (mine, other) in enumerate(everyone):
                generator = torch.Generator().manual_seed(100 * step + index)
                grad = torch.randn(mine.shape, generator=generator)
                # Without one all ranks have it, and so the owner.
                has = not ((index + step) % 3 == 0 and (rank + step) % world_size)
                owned_by_all = (index + step) % 3 != 0
                if step % 4 == index % 2 or mine is model.scale:
                    mine.grad = other.grad = None
                    continue
                mine.grad = grad if owned_by_all else torch.zeros_like(grad) if has else None
                other.grad = grad if owned_by_all else torch.zeros_like(grad)
            optimizer.step()
            theirs.step()
            for mine, other in zip(model.parameters(), reference.parameters(), strict=True):
                assert torch.equal(mine, other)


def wrapped(kind: str, directory: Path) -> None:
    """DDP, and a model that is compiled: what it is called then is in no key of torch's."""
    inner = Net()
    model: nn.Module = DistributedDataParallel(inner)
    if kind == "compiled":
        model = cast(nn.Module, torch.compile(inner, backend="eager"))
    with tierstore.TierStore(directory, **STREAMED) as store:
        optimizer = optimizer_of(model, store)
        reference = Reference(inner)
        for step in range(1, 4):
            # To run what is compiled takes long.
            (model if kind == "ddp" else inner)(tokens_of(step)).backward()
            if kind == "compiled":
                for parameter in inner.parameters():
                    dist.all_reduce(parameter.grad)
            reference.step()
            optimizer.step()
            model.zero_grad()
            reference.assert_identical()
        saved = get_optimizer_state_dict(model, optimizer)
        assert saved["state"].keys() == dict(inner.named_parameters()).keys()
        other = Net()
        other.load_state_dict(inner.state_dict())
        with tierstore.TierStore(None, timeout=30.0) as other_store:
            fresh = optimizer_of(other, other_store)
            set_optimizer_state_dict(other, fresh, saved)
            assert_same(fresh.state_dict()["state"], optimizer.state_dict()["state"])
        if dist.get_rank() == 0:
            buffer = io.BytesIO()
            torch.save(saved, buffer)


def placed_otherwise() -> dict[str, str]:
    """Gradients that lie on the ranks otherwise than their parameter."""
    mesh = cpu_mesh(2)
    messages = {}
    parameter = nn.Parameter(distribute_tensor(torch.ones(4, 4), mesh, [Replicate()]))
    plain = nn.Parameter(torch.ones(4, 4))
    with tierstore.TierStore(None, timeout=30.0) as store:
        optimizer = muon.Muon([("cut", parameter), ("plain", plain)], store=store)
        before = whole(parameter).clone()
        gradient = torch.ones(4, 4)
        parameter.grad = DTensor.from_local(gradient, mesh, [Partial()])
        messages["partial"] = attempt(optimizer.step)
        if dist.get_rank():
            parameter.grad = DTensor.from_local(gradient, mesh, [Replicate()])
        messages["partial on one"] = attempt(optimizer.step)
        parameter.grad = distribute_tensor(gradient, mesh, [Shard(0)])
        messages["sharded"] = attempt(optimizer.step)
        parameter.grad = None
        assert torch.equal(whole(parameter), before)
        parameter.grad = DTensor.from_local(gradient, mesh, [Partial()]).redistribute(
            placements=[Replicate()]
        )
        optimizer.step()
        assert not torch.equal(whole(parameter), before)
    return messages


@contextlib.contextmanager
def measuring(dtype: torch.dtype) -> Iterator[mock.Mock]:
    with mock.patch("muon.newton_schulz.fastest_dtype", return_value=dtype) as measure:
        yield measure


def measured_dtype() -> None:
    """Rank 0 finds float32 faster, and the others bfloat16."""
    rank = dist.get_rank()
    model = Net()
    with (
        tierstore.TierStore(None, timeout=30.0) as store,
        measuring(torch.bfloat16 if rank else torch.float32) as measure,
    ):
        optimizer = optimizer_of(model, store, ns_dtype="auto")
        assert measure.called == (rank == 0)
        assert optimizer.param_groups[0]["ns_dtype"] == torch.float32
        model(torch.arange(7)).backward()
        optimizer.step()
        saved = optimizer.state_dict()
        # Changed from one step to the next, by what is loaded too.
        optimizer.param_groups[0]["ns_dtype"] = torch.bfloat16
        optimizer.step()
        optimizer.load_state_dict(saved)
        assert optimizer.param_groups[0]["ns_dtype"] == torch.float32
        optimizer.step()
        torch.testing.assert_close(  # No rank has other values.
            _sum_over_ranks(model), dist.get_world_size() * _flat(model), rtol=0, atol=0
        )


def _flat(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()]).double()


def _sum_over_ranks(model: nn.Module) -> torch.Tensor:
    flat = _flat(model)
    dist.all_reduce(flat)
    return flat
