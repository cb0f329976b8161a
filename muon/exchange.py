"""All-to-all exchange of matrices: shards go to the owner of a matrix, its update goes back.

All message sizes follow from the chunks of each rank. Messages are therefore not padded or
negotiated, and do not wait for the device.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain

import torch
import torch.distributed as dist
from torch.profiler import record_function

import tierstore
from muon.rounds import Round

Parts = Mapping[int, Sequence[torch.Tensor]]
"""For each matrix of a round: one tensor per chunk of this rank, in the chunk's shape; or one with
the averages of its rows, of shape (..., numbers for a row)."""


class Exchange:
    """Exchanges matrices over a process group.

    All ranks of the group make the same calls in the same order, including ranks without a part of
    a matrix. Several rounds may be in flight at different stages.
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
            device: device of the matrices. The backend of the group must support it.
        """
        self.bytes_sent = 0
        """Bytes that this rank has sent to other ranks."""
        self.rank = dist.get_rank(group)
        """This rank's position in ``SharedMatrix.chunks``."""
        self._group = group
        self._wait = wait
        self._device = device
        # Keep buffers of ended rounds: touching new memory takes about as long as sending it.
        self._free: list[torch.Tensor] = []

    def stages(
        self,
        round_: Round,
        dtype: torch.dtype,
        *,
        with_averages: bool,
        write_inputs: Callable[[Parts, Parts], None],
        orthogonalize: Callable[[list[torch.Tensor], list[torch.Tensor]], list[torch.Tensor]],
        apply_updates: Callable[[Parts, Parts], None],
    ) -> Iterator[None]:
        """Exchange the matrices of one round in three stages.

        Yields while a collective is in flight: first the inputs are sent to the owners of their
        matrices, then the updates are sent back. When the last stage ends, kernels that read the
        updates may still be queued on the current stream of a GPU.

        Args:
            round_: the matrices to exchange.
            dtype: dtype of inputs and updates on the wire.
            with_averages: whether to send the averages of NorMuon with each part: one average for
                each row, as bits after the elements. Otherwise the averages of a part are empty.
            write_inputs: writes the parts that this rank sends, and their averages with pack().
            orthogonalize: returns the updates of the matrices that this rank owns, both of shapes
                (rows, columns), and changes their averages, (rows, 1). The matrices are contiguous,
                share no memory, and may be overwritten.
            apply_updates: reads the updates of the parts that this rank sent, and their averages
                with unpack().
        """
        sent, received = round_.sent(self.rank), round_.received(self.rank)
        # decisions: Averages of rows lie with every part of a row.
        width = max(1, torch.float32.itemsize // dtype.itemsize) if with_averages else 0
        sent_counts, received_counts = _counts(sent, width), _counts(received, width)
        # First the parts that this rank sends, then the parts of the matrices that it owns.
        numels = [sum(sent_counts), sum(received_counts)]
        buffer = self._take(sum(numels) * dtype.itemsize)  # (nbytes or more,)
        both = buffer[: sum(numels) * dtype.itemsize].view(dtype)  # (sent + received,)
        parts, owned = torch.split(both, numels)  # (sent,), (received,)
        own_parts: dict[int, list[torch.Tensor]] = {index: [] for index in round_.matrices}
        own_rows: dict[int, list[torch.Tensor]] = {index: [] for index in round_.matrices}
        for index, _, view, rows in _views(parts, sent, width):
            own_parts[index].append(view)
            own_rows[index].append(rows)
        owned_parts = list(_views(owned, received, width))
        write_inputs(own_parts, own_rows)
        with record_function("muon::gather"):
            work = self._start(owned, received_counts, parts, sent_counts)
        yield
        with record_function("muon::gather"):
            self._wait(work)
            matrices = {
                index: owned.new_empty(round_.matrices[index].shape)  # (rows, columns)
                for index in round_.owned(self.rank)
            }
            averages = {
                index: owned.new_empty((len(matrix), 1), dtype=torch.float32)
                for index, matrix in matrices.items()
            }
            for index, chunk, view, rows in owned_parts:
                round_.matrices[index].select(matrices[index], chunk).copy_(view)
                if width:
                    unpack(rows, round_.matrices[index].select_rows(averages[index], chunk))
        found = orthogonalize([*matrices.values()], [*averages.values()])
        updates = dict(zip(matrices, found, strict=True))
        with record_function("muon::scatter"):
            for index, chunk, view, rows in owned_parts:
                view.copy_(round_.matrices[index].select(updates[index], chunk))
                if width:
                    pack(round_.matrices[index].select_rows(averages[index], chunk), rows)
            work = self._start(parts, sent_counts, owned, received_counts)
        del matrices, found, updates  # Free their memory while the updates are in flight.
        yield
        with record_function("muon::scatter"):
            self._wait(work)
        apply_updates(own_parts, own_rows)
        # decisions: The exchange keeps its buffers.
        self._free.append(buffer)

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """Return the sum of a tensor over the ranks. All ranks call this."""
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


_Chunks = Sequence[Sequence[tuple[int, tierstore.pages.Chunk]]]


def pack(averages: torch.Tensor, wire: torch.Tensor) -> None:
    """Write float32 averages of shape (..., 1) to the dtype of the wire, without rounding."""
    wire.copy_(_in_dtype(averages, wire.dtype))


def unpack(wire: torch.Tensor, averages: torch.Tensor) -> None:
    """Read averages that pack() has written."""
    _in_dtype(averages, wire.dtype).copy_(wire)


def _in_dtype(averages: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the bits of float32 averages of shape (..., 1) as numbers of a narrower dtype."""
    return averages.view(dtype) if dtype.itemsize < averages.itemsize else averages


def _numel(chunk: tierstore.pages.Chunk, width: int) -> int:
    """Return the count of numbers sent for a chunk, with ``width`` more for each row."""
    return chunk.numel + math.prod(chunk.sizes[:-1]) * width


def _counts(chunks: _Chunks, width: int) -> list[int]:
    """Return how many numbers are sent to or received from each rank."""
    return [sum(_numel(chunk, width) for _, chunk in rank_chunks) for rank_chunks in chunks]


def _views(
    buffer: torch.Tensor, chunks: _Chunks, width: int
) -> Iterator[tuple[int, tierstore.pages.Chunk, torch.Tensor, torch.Tensor]]:
    """Yield (matrix, chunk, elements, averages) for each chunk, in the order of the buffer.

    Elements have the shape of the chunk, averages its shape with ``width`` for the last dimension.
    """
    flat = list(chain.from_iterable(chunks))
    pieces = torch.split(buffer, [_numel(chunk, width) for _, chunk in flat])
    for (index, chunk), piece in zip(flat, pieces, strict=True):
        elements, averages = piece[: chunk.numel], piece[chunk.numel :]
        yield (
            index,
            chunk,
            elements.view(chunk.sizes),
            averages.view(*chunk.sizes[:-1], width),
        )
