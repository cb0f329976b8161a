"""Checks of the gradients of one step: presence, shape and dtype, finiteness, equal replicas."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from tierstore.errors import NonFiniteGradientError
from tierstore.layout.dtensors import (
    describe_placement,
    is_dtensor,
    local_tensor,
    same_placement,
    same_shape,
)
from tierstore.layout.ownership import SharedSubgroup
from tierstore.layout.parameters import PagedGroup, PagedParameter, ParameterSpec, dtype_name
from tierstore.layout.sharding import Holding
from tierstore.paging.device import Device
from tierstore.paging.fsdp import reshard
from tierstore.paging.host_gradients import HostGradient
from tierstore.paging.rank_checks import digest_of, hyperparameters_of, require_equal
from tierstore.paging.sources import Places
from tierstore.paging.views import without_collections
from tierstore.ranks.peers import Peers, agree

# Replicas of a gradient may be rounded differently. Gradients of other data differ by far more.
_GRADIENT_TOLERANCE = 0.01

_GRADIENT_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)

# Number of elements in a sample.
_SAMPLE_ELEMENTS = 64

# Number of parameters that a message names.
_NAMED_MAX = 3

_WEIGHTS = np.linspace(1, 2, _SAMPLE_ELEMENTS, dtype=np.float32)


@dataclass(frozen=True, slots=True, kw_only=True)
class Gradients:
    """The gradients of one step."""

    present: frozenset[str]
    """Names of the parameters that have a gradient on any rank."""
    nonfinite: str
    """Text of a warning if a gradient is not finite and nonfinite="skip"; else ""."""
    unread: NonFinite | None
    """This rank's check for gradients that are not finite, unless its result is known already."""


def agree_on_gradients(
    peers: Peers,
    groups: Sequence[PagedGroup],
    specs: Mapping[str, ParameterSpec],
    partition: Sequence[SharedSubgroup],
    places: Places,
    *,
    nonfinite: str,
    missing: str,
    waits: bool,
    compares: bool,
) -> Gradients:
    """Return the gradients of a step, after checking all of them.

    Args:
        peers: all ranks, which call this together.
        groups: the groups, the same on all ranks.
        specs: parameter name -> spec when the parameter was attached.
        partition: the subgroups of these groups.
        places: the devices of the step.
        nonfinite: as in Pages.sweep().
        missing: as in Pages.sweep().
        waits: whether to wait for the result of the check for finite gradients.
        compares: whether to compare the gradients of replicas.

    Raises:
        ValueError: a parameter or gradient does not fit; the ranks have different
            hyperparameters; replicas have different gradients; with ``missing="raise"``, a rank
            has no gradient. The message names the first.
        NonFiniteGradientError: with "raise", a gradient of any rank is not finite.
        PeerFailed: a parameter or gradient does not fit on another rank.
    """
    members = [parameter for group in groups for parameter in group.parameters]
    is_alone = peers.world_size == 1
    unread: NonFinite | None = None
    options = {"nonfinite": nonfinite, "missing": missing}

    @without_collections()
    def look() -> tuple[int, int, int, int, bytes]:
        nonlocal unread
        reshard(members)
        found = absent = 0  # A bit for each parameter, because every step sends this.
        for index, parameter in enumerate(members):
            grad = _check_gradient(parameter, specs[parameter.name], places)
            found |= (grad is not None) << index
            if grad is None and missing == "raise":  # Without elements it may have none.
                absent |= (local_tensor(parameter.tensor).numel() > 0) << index
        if nonfinite != "allow":
            unread = NonFinite(members, places.parameters)
        return (
            found,
            absent,
            0 if is_alone else digest_of(hyperparameters_of(groups, options)),
            unread.bits() if unread and waits else 0,
            gradient_samples(members) if compares and not is_alone else b"",
        )

    looked = agree(peers, "begin a step", look)
    found, absent, digests, bits, samples = zip(*looked, strict=True)
    require_equal(peers, digests, groups, options)
    present = functools.reduce(operator.or_, found)
    _require_everywhere(members, present, absent)
    _require_same_gradients(members, partition, samples)
    text = ""
    if union := functools.reduce(operator.or_, bits):
        ranks = [rank for rank, own in enumerate(bits) if own]
        text = describe_nonfinite(named_by(members, union), [] if is_alone else ranks)
        if nonfinite == "raise":
            raise NonFiniteGradientError(
                f"{text}. Nothing was changed: find their origin with "
                "torch.autograd.detect_anomaly(), or pass nonfinite='skip' to leave out such steps"
            )
    return Gradients(
        present=frozenset(named_by(members, present)),
        nonfinite=text,
        unread=None if waits else unread,
    )


def _check_gradient(
    parameter: PagedParameter, spec: ParameterSpec, places: Places
) -> torch.Tensor | None:
    """Return the gradient, after checking that the gradient and the parameter fit their page.

    Raises:
        ValueError: one does not fit; the message names the parameter.
    """
    tensor, grad = parameter.tensor, parameter.grad
    if tensor.shape != spec.shape or tensor.dtype != spec.dtype:
        raise ValueError(
            f"parameter {spec.name!r} was {spec.dtype} {list(spec.shape)} and is now "
            f"{tensor.dtype} {list(tensor.shape)}: convert the model before the first step"
        )
    if grad is None:
        return None
    if parameter.gradient is not None:
        _check_given(grad, tensor, spec.name)
        if parameter.grad is not grad:
            raise ValueError(
                f"the function that returns the gradient of {spec.name!r} returns another tensor "
                "each time: a step calls it several times, so keep the tensor and return it"
            )
    if type(grad) is not torch.Tensor or is_dtensor(tensor):
        _check_placement(grad, tensor, spec.name, places)
    if grad.layout != torch.strided:
        raise ValueError(
            f"the gradient of {spec.name!r} is sparse: only dense gradients are supported "
            "(for an embedding, sparse=False)"
        )
    if not places.moves_parameters:
        return grad
    held = places.dtype_of(spec.dtype)
    if torch.promote_types(grad.dtype, held) != held:
        raise ValueError(
            f"the gradient of {spec.name!r} is {grad.dtype}, but the store copies gradients for "
            f"its step in {held}: open it with gradient_dtype={grad.dtype}"
        )
    return grad


def _check_placement(grad: torch.Tensor, tensor: torch.Tensor, name: str, places: Places) -> None:
    """Check a gradient if it, or its parameter, is not a plain tensor."""
    if not same_placement(grad, tensor):
        raise ValueError(
            f"the gradient of {name!r} is {describe_placement(grad)}, but the parameter "
            f"is {describe_placement(tensor)}: redistribute the gradient"
        )
    if is_dtensor(grad):
        own, expected = (local_tensor(of_ranks).shape for of_ranks in (grad, tensor))
        if not same_shape(own, expected):
            raise ValueError(
                f"on this rank, the local tensor of the gradient of {name!r} has shape {list(own)} "
                f"and the local parameter {list(expected)}: shard both alike"
            )
    if isinstance(local_tensor(grad), HostGradient) and not places.has_slabs:
        raise ValueError(
            f"the gradient of {name!r} is in the host memory of another store: call "
            "zero_grad(), or open this store with offload_gradients='backward'"
        )


def _check_given(grad: object, tensor: torch.Tensor, name: str) -> None:
    """Check a gradient as torch does when a tensor is assigned to ``.grad``."""
    if not isinstance(grad, torch.Tensor):
        raise ValueError(
            f"the gradient of {name!r} is of type {type(grad).__name__}, expected a tensor or None"
        )
    fits = grad.shape == tensor.shape and grad.device == tensor.device
    if not fits or grad.dtype not in _GRADIENT_DTYPES:
        raise ValueError(
            f"the gradient of {name!r} is {dtype_name(grad.dtype)} {list(grad.shape)} on "
            f"{grad.device}, but the parameter is {dtype_name(tensor.dtype)} {list(tensor.shape)} "
            f"on {tensor.device}: pass a tensor of its shape and device, in float64, float32, "
            "bfloat16 or float16"
        )


def _require_everywhere(
    members: Sequence[PagedParameter], present: int, absent: Sequence[int]
) -> None:
    """Raise if a parameter has a gradient on some ranks only. Bit i stands for parameter i.

    Args:
        members: all parameters.
        present: bits of the parameters that have a gradient on any rank.
        absent: for each rank, bits of the parameters without a gradient.
    """
    for rank, own in enumerate(absent):
        if names := named_by(members, present & own):
            raise ValueError(
                f"rank {rank} has no gradient of {describe_names(names)}, but other ranks have. "
                "Nothing was changed: find the branch of the model that this rank skips, or "
                "leave out missing='raise', and its gradient counts as zeros"
            )


def _require_same_gradients(
    members: Sequence[PagedParameter], partition: Sequence[SharedSubgroup], samples: Sequence[bytes]
) -> None:
    """Raise if replicas differ, given gradient_samples() of every rank; b"" is not compared.

    A rank without a gradient is not compared.
    """
    if not all(samples):
        return
    found = np.stack([np.frombuffer(of, np.float32).reshape(-1, 2) for of in samples])
    shared = {
        shard.spec.name: shard.parameter for subgroup in partition for shard in subgroup.shards
    }
    by_holding: dict[Holding, list[int]] = {}
    for index, member in enumerate(members):
        if parameter := shared.get(member.name):
            by_holding.setdefault(parameter.holding, []).append(index)
    for holding, indices in by_holding.items():
        for replicas in holding.replicas():
            of_replicas = found[np.ix_(replicas, indices)]  # (replicas, parameters, 2)
            least, most = np.fmin.reduce(of_replicas), np.fmax.reduce(of_replicas)  # NaN is absent.
            with np.errstate(invalid="ignore"):
                differs = most - least > _GRADIENT_TOLERANCE * most[:, 1:]  # (parameters, 2)
            for position, column in np.argwhere(differs):
                values = of_replicas[:, position, column]
                first, other = sorted((int(np.nanargmin(values)), int(np.nanargmax(values))))
                raise ValueError(
                    f"ranks {replicas[first]} and {replicas[other]} hold the same elements of "
                    f"parameter {members[indices[position]].name!r} with different gradients. "
                    "Nothing was changed: reduce gradients over the ranks before step(), as "
                    "DistributedDataParallel and torch.distributed.all_reduce() do"
                )


class NonFinite:
    """The gradients of this rank with an element that is NaN or infinite.

    The device of the gradients computes this. The constructor does not wait for the device.

    Args:
        parameters: all parameters, on one device.
        device: this device.
    """

    @torch.no_grad()
    def __init__(self, parameters: Sequence[PagedParameter], device: Device) -> None:
        gradients = _gradients(parameters)
        self._parameters = parameters
        self._indices = list(gradients)
        self._flags, self._copy = device.fetch(_nonfinite(list(gradients.values())))

    def bits(self) -> int:
        """Return a bit for each parameter: 1 if the gradient is not finite. Waits for the device.

        The lowest bit stands for the first parameter.
        """
        self._copy.wait()
        return sum(1 << self._indices[i] for i in self._flags.nonzero().flatten().tolist())

    def require_none(self) -> None:
        """Raise NonFiniteGradientError if a gradient is not finite. Waits for the device."""
        if bits := self.bits():
            raise NonFiniteGradientError(
                f"{describe_nonfinite(named_by(self._parameters, bits))}. The step is not "
                "committed: restore() goes back to the last commit"
            )


def named_by(parameters: Sequence[PagedParameter], bits: int) -> list[str]:
    """Return the names of the parameters whose bit is 1. The lowest bit is the first parameter."""
    flags = zip(parameters, reversed(f"{bits:b}"), strict=False)
    return [parameter.name for parameter, flag in flags if flag == "1"]


def describe_nonfinite(names: Sequence[str], ranks: Sequence[int] = ()) -> str:
    """Return text that names parameters whose gradients are not finite, and the ranks."""
    where = f" (rank {', '.join(map(str, ranks))})" if ranks else ""
    return f"gradients with NaN or infinite elements: {describe_names(names)}{where}"


def describe_names(names: Sequence[str]) -> str:
    """Return text with the first names and the number of further names."""
    further = f" and {len(names) - _NAMED_MAX} more" if len(names) > _NAMED_MAX else ""
    return ", ".join(map(repr, names[:_NAMED_MAX])) + further


def _gradients(parameters: Sequence[PagedParameter]) -> dict[int, torch.Tensor]:
    """Return the local tensors of gradients that have elements, by index of the parameter."""
    return {
        index: local
        for index, parameter in enumerate(parameters)
        if (grad := parameter.grad) is not None and (local := local_tensor(grad)).numel()
    }


def _nonfinite(gradients: list[torch.Tensor]) -> torch.Tensor:
    """Return for each gradient whether an element is NaN or infinite: bool (gradients,)."""
    if not gradients:
        return torch.zeros(0, dtype=torch.bool)
    # Such an element makes the norm not finite. A CPU computes norm 2 many times faster than inf.
    left = any(isinstance(gradient, HostGradient) for gradient in gradients)
    order = math.inf if left or gradients[0].is_cuda else 2
    flags = ~torch.stack(torch._foreach_norm(gradients, order)).isfinite()
    if order == math.inf:  # The largest |element|, which is finite if all elements are.
        return flags
    for index in flags.nonzero().flatten().tolist():  # Norm 2 of finite elements may overflow.
        flags[index] = not torch._foreach_norm([gradients[index]], math.inf)[0].isfinite()
    return flags


def sample_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return elements of the local tensor at equal distances: (64,), or (0,)."""
    flat = local_tensor(tensor).reshape(-1)
    return flat[_positions(flat.numel()).to(flat.device)] if flat.numel() else flat


@functools.lru_cache(maxsize=1024)  # The layers of a model have the same shapes.
def _positions(numel: int) -> torch.Tensor:
    return torch.from_numpy(np.linspace(0, numel - 1, _SAMPLE_ELEMENTS).astype(np.int64))


def gradient_samples(parameters: Sequence[PagedParameter]) -> bytes:
    """Return two numbers for a sample of each gradient: float32 (parameters, 2).

    The numbers are a weighted sum of the elements, and the sum of their absolute values. Both are
    NaN without a gradient, and for a gradient that left its device: it was reduced before.
    """
    found = np.full((len(parameters), 2), np.nan, np.float32)
    samples = {
        index: sample_of(grad)
        for index, grad in _gradients(parameters).items()
        if not isinstance(grad, HostGradient)
    }
    if samples:
        elements = torch.stack(list(samples.values())).float().cpu().numpy()
        with np.errstate(invalid="ignore", over="ignore"):  # Infinite numbers are not compared.
            found[list(samples)] = np.stack([elements @ _WEIGHTS, abs(elements).sum(1)], 1)
    return found.tobytes()
