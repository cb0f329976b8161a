"""Checks of the gradients of one rank: elements that are not finite, and samples."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import numpy as np
import torch

from tierstore.errors import NonFiniteGradientError
from tierstore.layout.dtensors import local_tensor
from tierstore.layout.parameters import PagedParameter
from tierstore.paging.device import Device

# Number of elements in a sample.
_SAMPLE_ELEMENTS = 64

# Number of parameters that a message names.
_NAMED_MAX = 3

_WEIGHTS = np.linspace(1, 2, _SAMPLE_ELEMENTS, dtype=np.float32)


class NonFinite:
    """The gradients of this rank with an element that is NaN or infinite.

    They are looked for on the device of the gradients, which is not waited for.

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

        The lowest bit is that of the first parameter.
        """
        self._copy.wait()
        return sum(1 << self._indices[i] for i in self._flags.nonzero().flatten().tolist())

    def require_none(self) -> None:
        """Raise NonFiniteGradientError if there is one. Waits for the device."""
        if bits := self.bits():
            raise NonFiniteGradientError(
                f"{describe_nonfinite(named_by(self._parameters, bits))}. The step is not "
                "committed: restore() goes back to the last commit"
            )


def named_by(parameters: Sequence[PagedParameter], bits: int) -> list[str]:
    """Return the names of the parameters whose bit is 1; the lowest bit is that of the first."""
    return [parameter.name for index, parameter in enumerate(parameters) if bits >> index & 1]


def describe_nonfinite(names: Sequence[str], ranks: Sequence[int] = ()) -> str:
    """Return parameters whose gradients are not finite, and their ranks, as text for messages."""
    where = f" (rank {', '.join(map(str, ranks))})" if ranks else ""
    return f"gradients with NaN or infinite elements: {describe_names(names)}{where}"


def describe_names(names: Sequence[str]) -> str:
    """Return the first names, and the number of the others, as text for messages."""
    further = f" and {len(names) - _NAMED_MAX} more" if len(names) > _NAMED_MAX else ""
    return ", ".join(map(repr, names[:_NAMED_MAX])) + further


def _gradients(parameters: Sequence[PagedParameter]) -> dict[int, torch.Tensor]:
    """Return the local tensors of gradients, by index of the parameter, but not empty ones."""
    return {
        index: local
        for index, parameter in enumerate(parameters)
        if (grad := parameter.grad) is not None and (local := local_tensor(grad)).numel()
    }


def _nonfinite(gradients: list[torch.Tensor]) -> torch.Tensor:
    """Return whether an element of each gradient is NaN or infinite: bool (gradients,)."""
    if not gradients:
        return torch.zeros(0, dtype=torch.bool)
    # A norm with such an element is not finite. A CPU computes norm 2 many times as fast.
    order = math.inf if gradients[0].is_cuda else 2
    flags = ~torch.stack(torch._foreach_norm(gradients, order)).isfinite()
    if order == math.inf:  # The largest |element|, which is finite if all elements are.
        return flags
    for index in flags.nonzero().flatten().tolist():  # Finite elements may overflow norm 2.
        flags[index] = not gradients[index].isfinite().all()
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

    They are the sum of the elements with different weights, and the sum of their absolute values;
    NaN without a gradient.
    """
    found = np.full((len(parameters), 2), np.nan, np.float32)
    samples = {index: sample_of(grad) for index, grad in _gradients(parameters).items()}
    if samples:
        elements = torch.stack(list(samples.values())).float().cpu().numpy()
        with np.errstate(invalid="ignore", over="ignore"):  # Infinite numbers are not compared.
            found[list(samples)] = np.stack([elements @ _WEIGHTS, abs(elements).sum(1)], 1)
    return found.tobytes()
