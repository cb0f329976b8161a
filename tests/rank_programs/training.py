"""One model laid out over ranks in every way, trained there with gradients that are injected.

Each rank takes its part of the same whole gradients, so that what all ranks have afterwards
is to equal, bit for bit, what one process makes of the whole ones.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

import muon
import tierstore
from examples.matrix_statistics import MatrixStatistics
from tests.rank_programs.collective_order import Issued, recorded
from tests.rank_programs.meshes import cpu_mesh
from tests.support.training import Shapes, make_groups

STEPS = 7

Tensors = dict[str, torch.Tensor]
States = dict[tuple[str, str], torch.Tensor]  # By names of parameter and state.
# name -> (shape, param group of training.make_groups()).
SHAPES: Shapes = {
    "wide": ((40, 24), 0),
    "four": ((4, 33), 0),
    "five": ((5, 16), 0),
    "one": ((1, 21), 0),
    "tall": ((65, 12), 0),
    "column": ((23, 1), 0),
    "square": ((32, 32), 0),
    "no_rows": ((0, 4), 0),
    "two": ((2, 9), 0),
    "again": ((40, 24), 0),
    "embedding": ((53, 16), 1),
    "bias": ((13,), 1),
    "scalar": ((), 1),
    "single": ((1,), 1),
    "nothing": ((0, 4), 1),
    "cube": ((3, 5, 7), 1),
    "rarely": ((29,), 1),
    "late": ((24, 40), 2),
    "later": ((9, 30), 2),
    "third": ((7, 8), 2),
    "last": ((3, 8), 4),
}
# Less than there are ranks, and rank 0 alone has any of it where rows are cut.
FEW: Shapes = {"row": ((1, 8), 0), "bias": ((1,), 1)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A training on several ranks."""

    layout: str
    """One of LAYOUTS."""
    shapes: Shapes = field(default_factory=lambda: SHAPES)
    uniform: bool = False
    """True: all parameters are float32."""
    directory: Path | None = None
    """Run directory; None: a store without files."""
    store: dict[str, Any] = field(default_factory=dict)
    """Options of TierStore."""
    of_ranks: list[dict[str, Any]] = field(default_factory=list)
    """Further options of TierStore, one dict per rank."""
    options: dict[str, Any] = field(default_factory=dict)
    """Options of Muon."""
    heads: dict[str, tuple[int, float]] = field(default_factory=dict)
    """Parameter name -> number of heads, and the power of their scale: for QK-clip."""
    first: int = 1
    last: int = STEPS
    absent_on: tuple[int, ...] = ()
    """Ranks that have no gradients at every third step."""

    def store_options(self, rank: int) -> dict[str, Any]:
        """Return the options of TierStore for a rank."""
        extra = self.of_ranks[rank] if self.of_ranks else {}
        return {"timeout": 30.0, **self.store, **extra}


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """State of one rank after a training."""

    positions: dict[str, torch.Tensor]
    """Parameter name -> the flat position in the whole parameter of each element held."""
    values: dict[str, torch.Tensor]
    """Parameter name -> those elements."""
    states: dict[tuple[str, str], list[tuple[tierstore.pages.Chunk, torch.Tensor]]]
    """(parameter name, state name) -> chunks that this rank owns, and their values."""
    issued: list[Issued]
    """Every collective that the thread that trains issued."""
    window: int
    """Number of pages that are stepped at once."""
    pages: int
    resting: int
    """Number of pages that rest in memory."""
    bytes_spread: int
    bytes_exchanged: int
    statistics: dict[tuple[str, tuple[int, ...]], dict[str, float]]
    """Of the matrices that this rank orthogonalized, if the case has a hook that takes them."""
    flops: list[int]
    """Operations of Newton-Schulz of each rank."""


# ---------------------------------------------------------------------------- QK-clip

Heads = Mapping[str, tuple[int, float]]


def clip_of(parameters: Mapping[str, torch.Tensor], heads: Heads) -> dict[str, Any]:
    """Return options of Muon: each of these parameters is an attention layer."""
    layers = {
        name: [
            muon.HeadRows(
                parameter=parameters[name],
                head=head,
                start=head * (len(parameters[name]) // count),
                stop=(head + 1) * (len(parameters[name]) // count),
                power=power,
            )
            for head in range(count)
        ]
        for name, (count, power) in heads.items()
    }
    return {"qk_clip": muon.QKClip(layers, threshold=1.0)} if layers else {}


def qk_logits(heads: Heads, step: int, rank: int = 0, ranks: int = 1) -> dict[str, Any]:
    """Return the largest logits of a step that a rank saw: of every n-th head."""
    found = {}
    for name, (count, _) in heads.items():
        wholes = 2.5 * torch.rand(count, generator=torch.Generator().manual_seed(step))
        seen = torch.arange(count) % ranks == rank
        found[name] = torch.where(seen, wholes, -math.inf)
    return found


# ---------------------------------------------------------------------------- one process


def whole_parameters(shapes: Shapes, uniform: bool = False) -> Tensors:
    """Of float32 and bfloat16 in turn, or of float32."""
    generator = torch.Generator().manual_seed(0)
    dtypes = itertools.cycle((torch.float32, torch.float32 if uniform else torch.bfloat16))
    return {
        name: torch.randn(shape, generator=generator).to(dtype)
        for (name, (shape, _)), dtype in zip(shapes.items(), dtypes, strict=False)
    }


def whole_gradients(shapes: Shapes, step: int, uniform: bool = False) -> Tensors:
    """The gradients of a step; without those that no rank has."""
    generator = torch.Generator().manual_seed(step)
    gradients = {}
    for (name, (shape, group)), whole in zip(
        shapes.items(), whole_parameters(shapes, uniform).values(), strict=True
    ):
        gradient = torch.randn(shape, generator=generator) * math.sqrt(step)
        # A whole group at some steps, the first among them; and one parameter alone.
        if (group == 2 and step % 4 == 1) or (name in ("rarely", "tall") and step % 3):
            continue
        gradients[name] = gradient.to(whole.dtype)
    return gradients


def one_process(
    shapes: Shapes,
    options: Mapping[str, Any],
    steps: int = STEPS,
    zeroed: Mapping[str, torch.Tensor] | None = None,
    heads: Heads | None = None,
    uniform: bool = False,
) -> tuple[Tensors, States]:
    """Return parameters and states after all steps of whole tensors.

    Args:
        shapes: the model.
        options: arguments of Muon.
        steps: how many.
        zeroed: where gradients are zero at every third step: flat positions by name.
        heads: as of a case.
        uniform: as of a case.
    """
    optimizer, parameters = _stepped(shapes, options, steps, zeroed or {}, heads or {}, uniform)
    states = {
        (name, state): tensor
        for name, of_parameter in optimizer.store.pages.read_states().items()
        for state, tensor in of_parameter.items()
        if state != "master"
    }
    return {name: p.detach() for name, p in parameters.items()}, states


def _stepped(
    shapes: Shapes,
    options: Mapping[str, Any],
    steps: int,
    zeroed: Mapping[str, torch.Tensor],
    heads: Heads,
    uniform: bool,
) -> tuple[muon.Muon, dict[str, nn.Parameter]]:
    values = whole_parameters(shapes, uniform)
    parameters = {name: nn.Parameter(whole) for name, whole in values.items()}
    clip = clip_of(parameters, heads)
    optimizer = muon.Muon(make_groups(parameters, shapes), **options, **clip)
    for step in range(1, steps + 1):
        gradients = whole_gradients(shapes, step, uniform)
        for name, positions in zeroed.items():
            if step % 3 == 0 and name in gradients:
                gradients[name].view(-1)[positions] = 0
        for name, parameter in parameters.items():
            parameter.grad = gradients.get(name)
        optimizer.step(qk_logits=qk_logits(heads, step) if heads else None)
    return optimizer, parameters


# ---------------------------------------------------------------------------- layouts

Layout = Callable[[Tensors], Tensors]


def _plain(wholes: Tensors) -> Tensors:
    return wholes


def _distributed(place: Callable[[torch.Tensor], Placement]) -> Layout:
    def layout(wholes: Tensors) -> Tensors:
        mesh = cpu_mesh()
        return {n: distribute_tensor(t, mesh, [place(t)]) for n, t in wholes.items()}

    return layout


def _rows(whole: torch.Tensor) -> Placement:
    return Shard(0) if whole.ndim else Replicate()


def _columns(whole: torch.Tensor) -> Placement:
    return Shard(whole.ndim - 1) if whole.ndim else Replicate()


def _module(tensors: Tensors) -> nn.Module:
    module = nn.Module()
    for name, tensor in tensors.items():
        module.register_parameter(name, nn.Parameter(tensor))
    return module


def _fsdp(wholes: Tensors) -> Tensors:
    module = _module({name: whole for name, whole in wholes.items() if whole.ndim})
    fully_shard(module, mesh=cpu_mesh())
    # Which has no parameters without a dimension: they are as they were.
    return {name: getattr(module, name, whole) for name, whole in wholes.items()}


def _hsdp(wholes: Tensors) -> Tensors:
    module = _module({name: whole for name, whole in wholes.items() if whole.ndim})
    fully_shard(module, mesh=cpu_mesh(2, 2, names=("dp", "shard")))
    return {name: getattr(module, name, whole) for name, whole in wholes.items()}


def _fsdp_and_tp(wholes: Tensors) -> Tensors:
    """Rows, columns and none in turn cut by tensor parallelism, and all by FSDP2 then."""
    mesh = cpu_mesh(2, 2, names=("dp", "tp"))
    tensors = {}
    for index, (name, whole) in enumerate(wholes.items()):
        if whole.ndim and index % 3 < min(2, whole.ndim):
            tensors[name] = distribute_tensor(whole, mesh["tp"], [Shard(index % 3)])
        elif whole.ndim:
            tensors[name] = whole
    module = _module(tensors)
    fully_shard(module, mesh=mesh["dp"])
    return {name: getattr(module, name, whole) for name, whole in wholes.items()}


def _stage(wholes: Tensors) -> Tensors:
    """Each of two stages lies on every second rank, and is a job of its own."""
    return {n: distribute_tensor(t, stage_mesh(), [_rows(t)]) for n, t in wholes.items()}


@functools.cache
def stage_mesh() -> DeviceMesh:
    """Return the mesh of the ranks with this rank's stage, in a world of four ranks."""
    return cpu_mesh(2, 2, names=("stage", "other"))["stage"]


def _experts(wholes: Tensors) -> Tensors:
    """Dense parameters over all ranks, and every second one on a mesh of its own."""
    everyone = cpu_mesh(4)
    mesh = cpu_mesh(2, 2, names=("dp", "ep"))
    placed: Tensors = {}
    for index, (name, whole) in enumerate(wholes.items()):
        if index % 2 == 0 or not whole.ndim:
            placed[name] = distribute_tensor(whole, everyone, [_rows(whole)])
        elif index % 4 == 1:
            placed[name] = distribute_tensor(whole, mesh["ep"], [Shard(0)])
        else:
            placed[name] = distribute_tensor(whole, mesh, [_columns(whole), Shard(0)])
    return placed


def _uneven(wholes: Tensors) -> Tensors:
    """Rows cut anywhere; of some parameters columns by other ranks, and some in two copies."""
    world_size = dist.get_world_size()
    one = cpu_mesh(world_size)
    two = cpu_mesh(2, world_size // 2) if world_size % 2 == 0 else one
    placed: Tensors = {}
    for index, (name, whole) in enumerate(wholes.items()):
        if not whole.ndim:
            placed[name] = distribute_tensor(whole, one, [Replicate()])
        elif index % 4 == 1 and whole.ndim > 1 and two.ndim == 2:
            placed[name] = unevenly(whole, two, [Shard(whole.ndim - 1), Shard(0)], seed=index)
        elif index % 4 in (2, 3) and two.ndim == 2:
            placed[name] = unevenly(whole, two, [Replicate(), Shard(0)], seed=index)
        else:
            placed[name] = unevenly(whole, one, [Shard(0)], seed=index)
    return placed


def unevenly(
    whole: torch.Tensor, mesh: DeviceMesh, placements: list[Placement], seed: int
) -> nn.Parameter:
    """Return a parameter cut at places that a seed decides, some ranks may have nothing.

    With an odd seed the local tensor tells what it holds, as Megatron-FSDP adds it.
    """
    generator = torch.Generator().manual_seed(seed)
    offsets, sizes = [0] * whole.ndim, list(whole.shape)
    for placement, size, index in zip(
        placements, mesh.shape, mesh.get_coordinate() or (), strict=True
    ):
        if not isinstance(placement, Shard):
            continue
        extent = whole.shape[placement.dim]
        cuts = torch.randint(extent + 1, (size - 1,), generator=generator).sort().values.tolist()
        bounds = [0, *cuts, extent]
        offsets[placement.dim] = bounds[index]
        sizes[placement.dim] = bounds[index + 1] - bounds[index]
    chunk = tierstore.pages.Chunk(tuple(offsets), tuple(sizes))
    own = DTensor.from_local(
        chunk.select(whole).contiguous(),
        mesh,
        placements,
        run_check=False,
        shape=whole.shape,
        stride=whole.stride(),
    )
    parameter = nn.Parameter(own, requires_grad=whole.is_floating_point())
    parameter.seed_of_cuts = seed
    if seed % 2:
        place = ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
        parameter._local_tensor.__create_chunk_list__ = lambda: [place]
    return parameter


LAYOUTS: dict[str, Layout] = {
    "plain": _plain,
    "uneven": _uneven,
    "rows": _distributed(_rows),
    "columns": _distributed(_columns),
    "copies": _distributed(lambda whole: Replicate()),
    "fsdp": _fsdp,
    "hsdp": _hsdp,
    "fsdp and tp": _fsdp_and_tp,
    "experts": _experts,
    "stages": _stage,
}


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to_local() if isinstance(tensor, DTensor) else tensor.detach()


class Model:
    """The parameters of a case as this rank has them."""

    def __init__(self, case: Case) -> None:
        layout = LAYOUTS[case.layout]
        shapes = {name: shape for name, (shape, _) in case.shapes.items()}
        positions = layout(
            {n: torch.arange(math.prod(s)).to(torch.float32).reshape(s) for n, s in shapes.items()}
        )
        self.positions = {name: local(tensor).long() for name, tensor in positions.items()}
        self.parameters = {
            name: tensor if isinstance(tensor, nn.Parameter) else nn.Parameter(tensor)
            for name, tensor in layout(whole_parameters(case.shapes, case.uniform)).items()
        }

    def set_gradients(self, gradients: Mapping[str, torch.Tensor]) -> None:
        """Take this rank's part of whole gradients."""
        for name, parameter in self.parameters.items():
            parameter.grad = None
            if name not in gradients:
                continue
            part = gradients[name].flatten()[self.positions[name]]
            if isinstance(parameter, DTensor):
                part = DTensor.from_local(
                    part,
                    parameter.device_mesh,
                    parameter.placements,
                    run_check=False,
                    shape=parameter.shape,
                    stride=parameter.stride(),
                )
            parameter.grad = part


def owned_states(
    optimizer: muon.Muon, parameters: Mapping[str, torch.Tensor]
) -> dict[tuple[str, str], list[tuple[tierstore.pages.Chunk, torch.Tensor]]]:
    """Return the chunks of every state that this rank owns, from a sweep that changes nothing."""
    found: dict[tuple[str, str], list[tuple[tierstore.pages.Chunk, torch.Tensor]]] = {}
    for parameter in parameters.values():
        parameter.grad = torch.zeros_like(parameter)
    with optimizer.store.pages.sweep() as pages:
        for page in pages:
            for shard in page.shards:
                for chunk in shard.chunks:
                    for state, values in chunk.states.items():
                        of_state = found.setdefault((shard.spec.name, state), [])
                        place = shard.spec.state_chunk(state, chunk.chunk)
                        is_encoded = isinstance(values, tierstore.pages.EncodedState)
                        of_state.append((place, values.read() if is_encoded else values.clone()))
    return found


def train(case: Case) -> Trained:
    """Be one rank of a training; go on with the run of the case where there is one."""
    rank = dist.get_rank()
    resume = case.directory is not None and case.first > 1
    stage_mesh.cache_clear()
    model = Model(case)
    directory, group = case.directory, dist.group.WORLD
    if case.layout == "stages":
        group = stage_mesh().get_group()
        directory = case.directory and case.directory / f"stage-{rank % 2}"
    options = {"process_group": group, **case.store_options(rank)}
    with (
        recorded(dist.get_process_group_ranks(group)) as issued,
        tierstore.TierStore(directory, resume=resume, **options) as store,
    ):
        optimizer = muon.Muon(
            make_groups(model.parameters, case.shapes),
            store=store,
            **case.options,
            **clip_of(model.parameters, case.heads),
        )
        if resume:
            assert optimizer.restore() == case.first - 1
        for step in range(case.first, case.last + 1):
            absent = step % 3 == 0 and rank in case.absent_on
            gradients = {} if absent else whole_gradients(case.shapes, step, case.uniform)
            model.set_gradients(gradients)
            logits = qk_logits(case.heads, step, rank, dist.get_world_size())
            optimizer.step(qk_logits=logits if case.heads else None)
        return trained_by(
            model,
            optimizer,
            issued,
            states=case.last == STEPS,
            hooks=case.options.get("hooks", ()),
        )


def trained_by(
    model: Model,
    optimizer: muon.Muon,
    issued: list[Issued],
    *,
    states: bool = True,
    hooks: Sequence[muon.UpdateHook] = (),
) -> Trained:
    """Return what this rank has now, with its states if they are asked for."""
    stats = optimizer.store.stats()
    taken = [hook.take() for hook in hooks if isinstance(hook, MatrixStatistics)]
    return Trained(
        statistics=taken[0] if taken else {},
        flops=optimizer.flops_by_rank(),
        positions=model.positions,
        values={name: local(p).clone() for name, p in model.parameters.items()},
        states=owned_states(optimizer, model.parameters) if states else {},
        issued=issued,
        window=optimizer.store.pages.window_max,
        pages=stats.pages,
        resting=stats.pages_in.get("host", 0),
        bytes_spread=stats.bytes_spread,
        bytes_exchanged=optimizer.bytes_exchanged,
    )
