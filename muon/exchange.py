"""Brings the parts of matrices together on their owners, and their updates back.

Everything that is sent is known from the chunks that each rank has: nothing is padded or
negotiated, and nothing waits for the device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import chain

import torch
import torch.distributed as dist

import tierstore
from muon.rounds import Round


class Exchange:
    """Exchanges matrices over a group whose every rank makes the same calls in the same order.

    That holds for ranks that have no part of a matrix, too. Several rounds may be in flight,
    at whatever points of their way.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        *,
        wait: Callable[[dist.Work], None],
        device: torch.device,
    ) -> None:
        """Take a group for these exchanges.

        Args:
            group: of the ranks that the chunks of the matrices are listed by.
            wait: blocks until a collective is done, or raises what went wrong.
            device: where the matrices lie; one that the backend of the group serves.
        """
        self.bytes_sent = 0
        """What this rank has sent to others so far."""
        self._group = group
        self._rank = dist.get_rank(group)
        self._wait = wait
        self._device = device
        # Of rounds that are done: touching new memory would take about as long as sending it.
        self._free: list[torch.Tensor] = []

    def begin(self, round_: Round, dtype: torch.dtype) -> RoundInFlight:
        """Begin a round: its inputs can be written to. Nothing is sent yet.

        Args:
            round_: what is exchanged.
            dtype: of what is sent, both ways.
        """
        return RoundInFlight(self, round_, dtype)

    def _take(self, nbytes: int) -> torch.Tensor:
        """Return a buffer of at least so many bytes."""
        buffer = self._free.pop() if self._free else None
        if buffer is None or buffer.nbytes < nbytes:
            buffer = None  # Gone before there is another.
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
    """One round on its way. Each method is called once, in the order in which they come here."""

    def __init__(self, exchange: Exchange, round_: Round, dtype: torch.dtype) -> None:
        rank = exchange._rank
        sent, received = round_.sent(rank), round_.received(rank)
        self._exchange = exchange
        self._shapes = {index: round_.matrices[index].shape for index in round_.owned(rank)}
        self._work: dist.Work
        self._sent_counts = [_numel(parts) for parts in sent]
        self._received_counts = [_numel(parts) for parts in received]
        # The parts of this rank lie in front, those of the matrices that it owns behind them.
        numels = [sum(self._sent_counts), sum(self._received_counts)]
        self._buffer = exchange._take(sum(numels) * dtype.itemsize)  # (nbytes or more,)
        both = self._buffer[: sum(numels) * dtype.itemsize].view(dtype)  # (sent + received,)
        self._sent, self._received = torch.split(both, numels)  # (sent,), (received,)
        self._received_parts = _views(self._received, received)
        self.inputs: dict[int, list[torch.Tensor]] = {index: [] for index in round_.matrices}
        """For each matrix of the round one tensor for each chunk that this rank has of it.

        They are to be written before send_inputs(), and are in the dtype of the exchange.
        """
        for index, _, view in _views(self._sent, sent):
            self.inputs[index].append(view)

    def send_inputs(self) -> None:
        """Start to send the inputs to the owners."""
        self._work = self._exchange._start(
            self._received, self._received_counts, self._sent, self._sent_counts
        )

    def receive_matrices(self) -> dict[int, torch.Tensor]:
        """Wait for the matrices that this rank owns, and return each whole.

        They are contiguous, have memory of their own and may be used up.
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
        """Start to send updates to where the matrices came from.

        Args:
            updates: one for each matrix that this rank owns, of its shape.
        """
        for index, chunk, view in self._received_parts:
            view.copy_(chunk.select(updates[index]))
        self._work = self._exchange._start(
            self._sent, self._sent_counts, self._received, self._received_counts
        )

    def receive_updates(self) -> dict[int, list[torch.Tensor]]:
        """Wait for the updates; return those of this rank's chunks, in the place of the inputs."""
        self._exchange._wait(self._work)
        return self.inputs

    def release(self) -> None:
        """Give the memory of the updates to a later round.

        What reads them may still be queued on the current stream of a GPU.
        """
        self._exchange._free.append(self._buffer)


def _numel(parts: Sequence[tuple[int, tierstore.Chunk]]) -> int:
    return sum(chunk.numel for _, chunk in parts)


def _views(
    buffer: torch.Tensor, parts: Sequence[Sequence[tuple[int, tierstore.Chunk]]]
) -> list[tuple[int, tierstore.Chunk, torch.Tensor]]:
    """Return for each chunk its matrix, itself and its part of a buffer that has all in turn."""
    flat = list(chain.from_iterable(parts))
    pieces = torch.split(buffer, [chunk.numel for _, chunk in flat])  # (chunk.numel,) of each
    return [
        (index, chunk, piece.view(chunk.sizes))  # (chunk rows, chunk columns)
        for (index, chunk), piece in zip(flat, pieces, strict=True)
    ]
