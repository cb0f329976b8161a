"""Running averages of the weights of a model, in separate pages."""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping

import torch
from torch import nn

from tierstore.compiling import not_compiled
from tierstore.layout.dtensors import describe_placement, local_tensor
from tierstore.layout.parameters import PagedGroup, PagedParameter, unwrapped_name
from tierstore.paging.buffers import Buffer, BufferPool
from tierstore.paging.views import ChunkView
from tierstore.run.registered import CommittedStep
from tierstore.store import TierStore
from tierstore.user_warnings import warn_user


class AveragedModel:
    """An exponential moving average of the weights of a model, for evaluation and checkpoints.

    Each ``every`` steps an average becomes ``decay * average + (1 - decay) * weight``; the first
    time it becomes the weight. Averages are in float32 or wider. For narrower parameters they are
    masters in pages, rounded into the parameters of ``averaged``. Pages are read, written and
    committed only at these steps. The operations are the same as in
    ``torch.optim.swa_utils.AveragedModel`` with ``get_ema_multi_avg_fn(decay)``.

    If the weights have the same bits, a resumed run ends with the same averages as a run without
    interruption: averages are durable before update() returns, and an update that the pages have is
    not repeated. With several ranks, all ranks make each call together.

    Args:
        model: the model that is trained. The parameters that require gradients at construction
            are averaged.
        averaged: another model with the same trained parameters (names, shapes, dtypes,
            placements) and buffers, for example a deepcopy. Its plain tensors may be on another
            device. Frozen parameters do not change; each update copies buffers.
        store: a store with a directory and a ``commit_every``, only for the averages.
        decay: weight of the past, from 0 to 1. It may differ from run to run.
        every: steps from one update to the next; constant in a run.

    Raises:
        ValueError: an argument is out of range, the models differ, the store has no directory, or
            its ``step_on`` is set and the weights are on another device than the averages.
    """

    def __init__(
        self,
        model: nn.Module,
        averaged: nn.Module,
        store: TierStore,
        *,
        decay: float = 0.999,
        every: int = 1,
    ) -> None:
        if not 0 <= decay <= 1:
            raise ValueError(f"decay must be from 0 to 1, got {decay!r}")
        if type(every) is not int or every < 1:
            raise ValueError(f"every must be a whole number above 0, got {every!r}")
        if store.stats().engine == "none":
            raise ValueError("averages need a store with a directory; this one has none")
        self.module = averaged
        """The model with the averages."""
        self.store = store
        self._model = model
        self._decay = decay
        self._every = every
        self._weights = _trained(model)
        self._averages = _averages_of(self._weights, averaged)
        self._elsewhere = frozenset(
            name
            for name, average in self._averages.items()
            if self._weights[name].device != average.device
        )
        if self._elsewhere and store.pages.step_on is not None:
            raise ValueError(
                "averages on another device than the weights are stepped where they are: leave "
                "step_on out of their store"
            )
        _require_same_buffers(model, averaged)
        self._seen = 0  # The last step that update() was called for.
        # Stored in commits with the averages: the step of the run that they belong to.
        self._kept = kept = {"step": 0, "every": every}
        store.register(averages=kept)
        # During an update: the weights to average, as gradients. A weight on another device than
        # its average is replaced by a tensor of zeros that takes no memory.
        self._now = now = dict[str, torch.Tensor]()
        self._staging: Buffer | None = None  # Page-locked, for weights on a GPU.
        parameters = [
            PagedParameter(
                name=name,
                tensor=tensor,
                elementwise=True,
                gradient=functools.partial(_weight_of, now, name),
            )
            for name, tensor in self._averages.items()
        ]
        store.pages.attach([PagedGroup(parameters=parameters, hyperparameters={})])

    @not_compiled
    @torch.no_grad()
    def update(self, step: int) -> None:
        """Update the averages, if an update is due. Call it after each step.

        Call it before the step is committed: a commit of the run is then never ahead of the
        averages. Returns when they are durable. Weights on another device are copied with each
        page; from a GPU through page-locked memory for the largest piece, beside host_memory.

        Args:
            step: the number of steps of the run, as in ``optimizer.store.step``.

        Raises:
            ValueError: an update was missed, the run went back, or different parameters are trained
                now. Nothing was changed.
            StorageError, CorruptionError: pages could not be read or written. The store has failed.
                restore() goes back to the previous averages, if they exist.
        """
        if step < self._seen:
            raise ValueError(
                f"update() was called for step {self._seen}, and now for step {step}: after "
                "restore() of the run, call restore() of the averages"
            )
        self._seen = step
        with self.store.pages.calling("update()"):
            if step % self._every == 0 and step > self._kept["step"]:
                self._take(step)
            if self.store.committed.step < self.store.step:  # Also after an interrupt.
                self.store.synchronize()

    def _take(self, step: int) -> None:
        last = self._kept["step"]
        if last and step - last > self._every:
            raise ValueError(
                f"the averages are of step {last}, and this is step {step}: call update() after "
                f"each step, or at least after every {self._every}"
            )
        changed = _trained(self._model).keys() ^ self._weights.keys()
        if changed:
            raise ValueError(
                f"parameter {min(changed)!r} was frozen or unfrozen after this AveragedModel was "
                "made: make another, on a new store"
            )
        begins = self.store.step == 0
        try:
            for name, average in self._averages.items():
                weight = self._weights[name].detach()
                if name in self._elsewhere:
                    weight = average.new_zeros((), dtype=weight.dtype).expand(average.shape)
                self._now[name] = weight
            with self.store.pages.sweep() as pages:
                for page in pages:
                    for shard in page.shards:
                        for chunk in shard.chunks:
                            self._average(shard.parameter.name, chunk, begins=begins)
                self._kept["step"] = step
        finally:
            self._now.clear()
            self._staging = None
        self._take_buffers()

    def _take_buffers(self) -> None:
        buffers = _buffers(self._model)
        for name, buffer in _buffers(self.module).items():
            buffer.copy_(buffers[name])

    def _average(self, name: str, chunk: ChunkView, *, begins: bool) -> None:
        now = chunk.grad
        assert now is not None
        if name in self._elsewhere:
            piece = chunk.chunk.select(self._weights[name].detach())
            now = self._brought(piece, chunk.master.device)
        if begins:
            chunk.master.copy_(now)
        else:
            chunk.master.lerp_(now.to(chunk.master.dtype), 1 - self._decay)

    def _brought(self, piece: torch.Tensor, device: torch.device) -> torch.Tensor:
        """Return a piece of a weight on the device of its average, valid until the next call."""
        if device.type != "cpu":
            return piece.to(device)
        if self._staging is None or self._staging.tensor.nbytes < piece.nbytes:
            self._staging = None  # Free it before new memory is allocated.
            self._staging = BufferPool(1, piece.nbytes, page_locked=piece.device).acquire()
        staging = self._staging.tensor[: piece.nbytes].view(piece.dtype)
        return staging.view(piece.shape).copy_(piece)

    def restore(
        self,
        step: int,
        checkpoint: str | os.PathLike[str] | None = None,
        *,
        rewind: bool = False,
    ) -> None:
        """Go back to the committed averages, to continue from a step of the run.

        Without a commit the averages begin with the next update. Buffers are copied from the model
        as it is now: load them into the model first.

        Args:
            step: the result of ``restore()`` of the run.
            checkpoint: begin from these averages, published by ``store.checkpoint()``.
            rewind: with ``checkpoint``, continue from it in this run of averages.

        Raises:
            ValueError: the averages lack an update before ``step`` or have a different ``every``,
                or the store does not hold averages. Nothing was changed.
            CheckpointError, RunDirectoryError, RunMismatchError, CorruptionError, StorageError: as
                in ``TierStore.restore()``.

        Warns:
            UserWarning: the averages are ahead of the run.
        """

        def check(committed: CommittedStep) -> None:
            if not committed.step and checkpoint is None:
                return
            kept = committed.states.get("averages")
            if not isinstance(kept, dict) or kept.keys() != self._kept.keys():
                raise ValueError(
                    f"{checkpoint or 'the store'} holds no averages of an AveragedModel"
                )
            if kept["every"] != self._every:
                raise ValueError(
                    f"the averages have an update every {kept['every']} steps: pass "
                    f"every={kept['every']} instead of {self._every}"
                )
            if step - kept["step"] >= self._every:
                raise ValueError(
                    f"the averages are of step {kept['step']}, the run is at step {step}, and "
                    f"every {self._every} steps there is an update: restore averages of the steps "
                    "between, or begin new ones with overwrite=True"
                )

        self.store.restore(checkpoint, rewind=rewind, check=check)
        with torch.no_grad():
            self._take_buffers()
        last, self._seen = self._kept["step"], step
        if last > step:
            warn_user(
                f"the averages are of step {last}, and the run is at step {step}, as after a kill: "
                f"they change again after step {last}. If you rewound the run, rewind the averages "
                "with restore(step, checkpoint=PATH, rewind=True)"
            )


def _weight_of(
    now: Mapping[str, torch.Tensor], name: str, average: torch.Tensor
) -> torch.Tensor | None:
    return now.get(name)


def _trained(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return name -> trained parameter. Names lack the parts that wrappers add."""
    named = model.named_parameters()
    return {unwrapped_name(n, without_module=False): p for n, p in named if p.requires_grad}


def _buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    named = model.named_buffers()
    return {unwrapped_name(name, without_module=False): buffer for name, buffer in named}


def _averages_of(weights: dict[str, nn.Parameter], averaged: nn.Module) -> dict[str, nn.Parameter]:
    """Return name -> parameter of the averaged model, for trained weights."""
    named = averaged.named_parameters()
    found = {unwrapped_name(name, without_module=False): average for name, average in named}
    for name in (*weights, *(_trained(averaged).keys() - weights.keys())):
        given, expected = _description(found.get(name)), _description(weights.get(name))
        if given != expected:
            raise ValueError(
                f"parameter {name!r} is {expected} in the model and {given} in the averaged model: "
                "pass a deepcopy of the model (of model.module for DDP), or another model that is "
                "built and sharded likewise"
            )
        if _share_memory(found[name], weights[name]):
            raise ValueError(
                f"parameter {name!r} has the same memory in both models: pass a deepcopy of the "
                "model"
            )
    return {name: found[name] for name in weights}


def _require_same_buffers(model: nn.Module, averaged: nn.Module) -> None:
    theirs, ours = ({n: list(b.shape) for n, b in _buffers(m).items()} for m in (model, averaged))
    for name in theirs.keys() | ours.keys():
        if theirs.get(name) != ours.get(name):
            raise ValueError(
                f"buffer {name!r} has shape {theirs.get(name)} in the model and {ours.get(name)} "
                "in the averaged model: pass a deepcopy of the model"
            )


def _description(parameter: nn.Parameter | None) -> str:
    if parameter is None:
        return "absent"
    return f"{parameter.dtype} {list(parameter.shape)}, {describe_placement(parameter)}"


def _share_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    one, other = local_tensor(one), local_tensor(other)
    return one.numel() > 0 and (one.device, one.data_ptr()) == (other.device, other.data_ptr())
