"""All-to-all exchange of matrices: shards go to the owner of a matrix, its update goes back.

All message sizes follow from the chunks of each rank, so nothing is padded or negotiated and
nothing waits for the device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain

import torch
import torch.distributed as dist
from torch.profiler import record_function

import tierstore
from muon.rounds import Round

Parts = Mapping[int, Sequence[torch.Tensor]]
"""For each matrix of a round one tensor per chunk of this rank, in the chunk's shape."""


class Exchange:
    """Exchanges matrices over a process group.

    All ranks of the group make the same calls in the same order, also ranks that hold no part
    of a matrix. Several rounds may be in flight at different stages.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        *,
        wait: Callable[[dist.Work], None],
        device: torch.device,
    ) -> None:
        """Use a process group for exchanges.

        Args:
            group: its ranks are the positions in ``SharedMatrix.chunks``.
            wait: blocks until a collective is done, or raises the error of the collective.
            device: where the matrices lie; the backend of the group must serve it.
        """
        self.bytes_sent = 0
        """Bytes that this rank has sent to other ranks."""
        self.rank = dist.get_rank(group)
        """This rank's position in ``SharedMatrix.chunks``."""
        self._group = group
        self._wait = wait
        self._device = device
        # Buffers of ended rounds: touching new memory takes about as long as sending it.
        self._free: list[torch.Tensor] = []

    def stages(
        self,
        round_: Round,
        dtype: torch.dtype,
        *,
        write_inputs: Callable[[Parts], None],
        orthogonalize: Callable[[list[torch.Tensor]], list[torch.Tensor]],
        apply_updates: Callable[[Parts], None],
    ) -> Iterator[None]:
        """Exchange the matrices of one round in three stages.

        Yields where a collective is in flight: first the inputs travel to the owners of their
        matrices, then the updates travel back. Kernels that read the updates may still be queued
        on the current stream of a GPU when the last stage ends.

        Args:
            round_: the matrices to exchange.
            dtype: dtype of inputs and updates on the wire.
            write_inputs: writes the parts that this rank sends.
            orthogonalize: returns the updates of the matrices that this rank owns, both of shapes
                (rows, columns). The matrices are contiguous, share no memory, and may be
                overwritten.
            apply_updates: reads the updates of the parts that this rank sent.
        """
        sent, received = round_.sent(self.rank), round_.received(self.rank)
        sent_counts, received_counts = _counts(sent), _counts(received)
        # First the parts that this rank sends, then the parts of the matrices that it owns.
        numels = [sum(sent_counts), sum(received_counts)]
        buffer = self._take(sum(numels) * dtype.itemsize)  # (nbytes or more,)
        both = buffer[: sum(numels) * dtype.itemsize].view(dtype)  # (sent + received,)
        parts, owned = torch.split(both, numels)  # (sent,), (received,)
        own_parts: dict[int, list[torch.Tensor]] = {index: [] for index in round_.matrices}
        for index, _, view in _views(parts, sent):
            own_parts[index].append(view)
        owned_parts = list(_views(owned, received))
        write_inputs(own_parts)
        with record_function("muon::gather"):
            work = self._start(owned, received_counts, parts, sent_counts)
        yield
        with record_function("muon::gather"):
            self._wait(work)
            matrices = {
                index: owned.new_empty(round_.matrices[index].shape)  # (rows, columns)
                for index in round_.owned(self.rank)
            }
            for index, chunk, view in owned_parts:
                round_.matrices[index].select(matrices[index], chunk).copy_(view)
        updates = dict(zip(matrices, orthogonalize([*matrices.values()]), strict=True))
        with record_function("muon::scatter"):
            for index, chunk, view in owned_parts:
                view.copy_(round_.matrices[index].select(updates[index], chunk))
            work = self._start(parts, sent_counts, owned, received_counts)
        del matrices, updates  # Their memory is free while the updates travel.
        yield
        with record_function("muon::scatter"):
            self._wait(work)
        apply_updates(own_parts)
        self._free.append(buffer)

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """Return the sum of a tensor over the ranks; all of them call this."""
        values = values.to(self._device)
        with record_function("muon::sum"):
            self._wait(dist.all_reduce(values, group=self._group, async_op=True))
        return values

    def _take(self, nbytes: int) -> torch.Tensor:
        """Return a buffer of at least ``nbytes`` bytes."""
        buffer = self._free.pop() if self._free else None
        if buffer is None or buffer.nbytes < nbytes:
            buffer = None  # Free the small buffer before the large one is allocated.
            buffer = torch.empty(nbytes, dtype=torch.uint8, device=self._device)  # (nbytes,)
        return buffer

    def _start(
        self,
        output: torch.Tensor,
        output_counts: list[int],
        input_: torch.Tensor,
        input_counts: list[int],
    ) -> dist.Work:
        self.bytes_sent += (sum(input_counts) - input_counts[self.rank]) * input_.itemsize
        work: dist.Work = dist.all_to_all_single(
            output, input_, output_counts, input_counts, group=self._group, async_op=True
        )
        return work


_Chunks = Sequence[Sequence[tuple[int, tierstore.Chunk]]]


def _counts(chunks: _Chunks) -> list[int]:
    """Return the number of elements that travel to or from each rank."""
    return [sum(chunk.numel for _, chunk in rank_chunks) for rank_chunks in chunks]


def _views(
    buffer: torch.Tensor, chunks: _Chunks
) -> Iterator[tuple[int, tierstore.Chunk, torch.Tensor]]:
    """Yield (matrix, chunk, view) for each chunk, with chunks consecutive in the buffer."""
    flat = list(chain.from_iterable(chunks))
    pieces = torch.split(buffer, [chunk.numel for _, chunk in flat])  # (chunk.numel,) of each
    for (index, chunk), piece in zip(flat, pieces, strict=True):
        yield index, chunk, piece.view(chunk.sizes)  # (chunk rows, chunk columns)
