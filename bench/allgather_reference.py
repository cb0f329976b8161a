"""Reference for the exchange: every rank gathers and orthogonalizes all matrices."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.profiler import record_function

import muon
from muon.rounds import SharedMatrix


def gather_everywhere(
    matrix: SharedMatrix, parts: Sequence[torch.Tensor], dtype: torch.dtype
) -> tuple[torch.Tensor, int]:
    """Gather a matrix of shape (rows, columns); return it and the bytes sent to other ranks.

    The part of each rank is padded to the largest part.
    """
    largest = max(sum(chunk.numel for chunk in chunks) for chunks in matrix.chunks)
    padded = torch.zeros(largest, dtype=dtype)  # (largest,)
    flat = torch.cat([torch.empty(0, dtype=dtype), *(part.flatten() for part in parts)])  # (own,)
    padded[: flat.numel()] = flat
    world_size = dist.get_world_size()
    everything = [torch.empty_like(padded) for _ in range(world_size)]
    dist.all_gather(everything, padded)
    whole = torch.empty(matrix.shape, dtype=dtype)  # (rows, columns)
    for chunks, received in zip(matrix.chunks, everything, strict=True):
        start = 0
        for chunk in chunks:
            piece = received[start : start + chunk.numel].reshape(chunk.sizes)
            chunk.select(whole).copy_(piece)
            start += chunk.numel
    return whole, (world_size - 1) * padded.numel() * padded.itemsize


def updates(
    matrices: Sequence[SharedMatrix], inputs: Sequence[Sequence[torch.Tensor]], dtype: torch.dtype
) -> tuple[list[list[torch.Tensor]], int]:
    """Return the updates of this rank's chunks and the bytes sent to other ranks."""
    found, bytes_sent = [], 0
    for matrix, parts in zip(matrices, inputs, strict=True):
        with record_function("reference::gather"):
            whole, nbytes = gather_everywhere(matrix, parts, dtype)
        with record_function("reference::newton_schulz"):
            update = muon.orthogonalize_(whole)
        found.append([chunk.select(update) for chunk in matrix.chunks[dist.get_rank()]])
        bytes_sent += nbytes
    return found, bytes_sent
