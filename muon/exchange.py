"""All-to-all exchange of matrices: shards go to the owner of a matrix, its update goes back.

All message sizes follow from the chunks of each rank, so nothing is padded or negotiated and
nothing waits for the device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import chain

import torch
import torch.distributed as dist

import tierstore
from muon.rounds import Round


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
        self._group = group
        self._rank = dist.get_rank(group)
        self._wait = wait
        self._device = device
        # Buffers of released rounds: touching new memory takes about as long as sending it.
        self._free: list[torch.Tensor] = []

    def begin(self, round_: Round, dtype: torch.dtype) -> RoundInFlight:
        """Begin a round: the caller may write the inputs. Nothing is sent yet.

        Args:
            round_: the matrices to exchange.
            dtype: dtype of inputs and updates on the wire.
        """
        return RoundInFlight(self, round_, dtype)

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
        self.bytes_sent += (sum(input_counts) - input_counts[self._rank]) * input_.itemsize
        work: dist.Work = dist.all_to_all_single(
            output, input_, output_counts, input_counts, group=self._group, async_op=True
        )
        return work


class RoundInFlight:
    """One round in flight. Call each method once, in the order of their definition."""

    def __init__(self, exchange: Exchange, round_: Round, dtype: torch.dtype) -> None:
        rank = exchange._rank
        sent, received = round_.sent(rank), round_.received(rank)
        self._exchange = exchange
        self._shapes = {index: round_.matrices[index].shape for index in round_.owned(rank)}
        self._work: dist.Work
        self._sent_counts = [_numel(parts) for parts in sent]
        self._received_counts = [_numel(parts) for parts in received]
        # First the parts that this rank sends, then the parts of the matrices that it owns.
        numels = [sum(self._sent_counts), sum(self._received_counts)]
        self._buffer = exchange._take(sum(numels) * dtype.itemsize)  # (nbytes or more,)
        both = self._buffer[: sum(numels) * dtype.itemsize].view(dtype)  # (sent + received,)
        self._sent, self._received = torch.split(both, numels)  # (sent,), (received,)
        self._received_parts = _views(self._received, received)
        self.inputs: dict[int, list[torch.Tensor]] = {index: [] for index in round_.matrices}
        """For each matrix of the round one tensor per chunk of this rank, in the chunk's shape.

        The caller writes them before send_inputs().
        """
        for index, _, view in _views(self._sent, sent):
            self.inputs[index].append(view)

    def send_inputs(self) -> None:
        """Start sending the inputs to the owners of their matrices."""
        self._work = self._exchange._start(
            self._received, self._received_counts, self._sent, self._sent_counts
        )

    def receive_matrices(self) -> dict[int, torch.Tensor]:
        """Wait for the matrices that this rank owns and return them whole.

        The matrices are contiguous, share no memory, and may be overwritten.
        """
        self._exchange._wait(self._work)
        matrices = {
            index: self._received.new_empty(shape)  # (rows, columns)
            for index, shape in self._shapes.items()
        }
        for index, chunk, view in self._received_parts:
            chunk.select(matrices[index]).copy_(view)
        return matrices

    def send_updates(self, updates: Mapping[int, torch.Tensor]) -> None:
        """Start sending the updates to the ranks that hold parts of their matrices.

        Args:
            updates: one for each matrix that this rank owns, of shape (rows, columns).
        """
        for index, chunk, view in self._received_parts:
            view.copy_(chunk.select(updates[index]))
        self._work = self._exchange._start(
            self._sent, self._sent_counts, self._received, self._received_counts
        )

    def receive_updates(self) -> dict[int, list[torch.Tensor]]:
        """Wait for the updates of this rank's chunks; they replace the content of ``inputs``."""
        self._exchange._wait(self._work)
        return self.inputs

    def release(self) -> None:
        """Give the memory of the updates to a later round.

        Kernels that read the updates may still be queued on the current stream of a GPU.
        """
        self._exchange._free.append(self._buffer)


def _numel(parts: Sequence[tuple[int, tierstore.Chunk]]) -> int:
    return sum(chunk.numel for _, chunk in parts)


def _views(
    buffer: torch.Tensor, parts: Sequence[Sequence[tuple[int, tierstore.Chunk]]]
) -> list[tuple[int, tierstore.Chunk, torch.Tensor]]:
    """Return (matrix, chunk, view) for each chunk, with chunks consecutive in the buffer."""
    flat = list(chain.from_iterable(parts))
    pieces = torch.split(buffer, [chunk.numel for _, chunk in flat])  # (chunk.numel,) of each
    return [
        (index, chunk, piece.view(chunk.sizes))  # (chunk rows, chunk columns)
        for (index, chunk), piece in zip(flat, pieces, strict=True)
    ]
