"""Loops of accelerate that commit each step and resume from the last commit."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, DistributedType
from accelerate.optimizer import AcceleratedOptimizer

from tierstore.integrations.loop_state import (
    data_order,
    load_loop_state,
    loop_state,
    publish,
    require_own,
    restore_data_order,
    restore_optimizer,
    set_random_state,
)
from tierstore.store import TierStore

_FOLDER = "store"  # In what save_state() writes.
_KEY = "accelerate"  # In the extra of a commit.
_MAKER = "a loop of prepare()"


def prepare(
    accelerator: Accelerator, model: Any, optimizer: Any, loader: Any, scheduler: Any
) -> tuple[Any, Any, Batches, Any, int]:
    """Prepare a loop as ``accelerator.prepare()`` does, and restore the last commit.

    A step is committed when the loop asks for the batch after it, with the scheduler, random
    generators, gradient scaler, saved buffers of the model and the position in the data. The last
    step before a ``break`` is committed by the next loop, or when the store is closed.

    ``accelerator.save_state()``, called after ``scheduler.step()``, publishes the step in the
    folder ``store`` beside its own files; ``accelerator.load_state()`` begins a new run from there.

    Args:
        accelerator: of one process, or of several that each hold all parameters.
        model: the model of the optimizer.
        optimizer: has its store as the attribute ``store``, and its states on it.
        loader: a DataLoader. Its batches may not depend on random numbers, except for their order.
        scheduler: a scheduler of learning rates, or None.

    Returns:
        The model, the optimizer, the batches, the scheduler, and the step; 0 in a new run.

    Raises:
        TypeError: the optimizer has no store.
        ValueError: the accelerator shards parameters, the loader keeps the position in the data or
            its workers, steps were done, or no such loop made the commit.
        RunMismatchError: the run does not fit the model.
    """
    store = getattr(optimizer, "store", None)
    if not isinstance(store, TierStore):
        raise TypeError(f"{type(optimizer).__name__} has no TierStore as its attribute `store`")
    _check_accelerator(accelerator)
    if loader.persistent_workers:
        raise ValueError(
            "workers that outlive an epoch draw other orders after a resume: leave out "
            "persistent_workers=True"
        )
    if store.step:
        raise ValueError(
            f"the store is at step {store.step} already: prepare() comes first, once for an "
            "opened store"
        )
    require_own(store.committed_step, store.extra, _KEY, _MAKER, accelerator.num_processes)
    model, prepared, loader, scheduler = accelerator.prepare(
        model, _StoreOptimizer(optimizer, accelerator.scaler), loader, scheduler
    )
    plain = accelerator.unwrap_model(model, keep_torch_compile=False)
    batches = Batches(accelerator, plain, optimizer, loader, scheduler, store)
    accelerator.register_save_state_pre_hook(batches.publish)
    accelerator.register_load_state_pre_hook(batches.begin_from)
    step = batches.restore()
    store.provide_extra(batches.extra)
    return model, prepared, batches, scheduler, step


class Batches:
    """The batches of a data loader: a ``for`` loop that comes to its end is an epoch.

    The first loop after a resume leaves out the batches that were trained on; these may be all of
    its epoch. For what a DataLoader has besides batches, there is ``loader``.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        model: torch.nn.Module,
        optimizer: Any,
        loader: Any,
        scheduler: Any,
        store: TierStore,
    ) -> None:
        self.loader = loader
        """The data loader as accelerate prepared it."""
        self._accelerator = accelerator
        self._model = model
        self._optimizer = optimizer
        self._scheduler = scheduler
        self._store = store
        self._continues: Any = None  # The extra of the commit, until the next loop.
        self._position: dict[str, Any] = {}
        self._committed = 0  # The last step that was committed with its extra.

    @property
    def epoch(self) -> int:
        """The epoch of the next ``for`` loop, from 0; one that a ``break`` ended is not counted."""
        epoch: int = self.loader.iteration
        return epoch

    def __len__(self) -> int:
        """Return the number of batches of a whole epoch."""
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        self._commit()  # If a `break` ended the loop before.
        extra, self._continues = self._continues, None
        epoch, batches = self.epoch, self.loader
        if extra is None:
            self._position = {"epoch": epoch, "batch": 0, "order": data_order([self.loader])}
        else:
            # Again, because load_state() loads what it has saved within a step.
            load_loop_state(extra, self._model, self._scheduler)
            self._accelerator.step = 0  # A commit is at the end of what was accumulated.
            restore_data_order([self.loader], self._position["order"])
            batches = self._accelerator.skip_first_batches(batches, self._position["batch"])
        for batch in batches:
            if extra is not None:  # The order of the epoch was drawn by now.
                set_random_state(extra["random"])
                extra = None
            self._position = {**self._position, "batch": self._position["batch"] + 1}
            yield batch
            self._commit()
        if extra is not None:
            set_random_state(extra["random"])
        self.loader.iteration = epoch + 1

    def restore(self, checkpoint: Path | None = None) -> int:
        """Restore the commit of the store, or begin its run from a checkpoint; return the step."""
        step = restore_optimizer(self._store, self._optimizer, checkpoint)
        if step:
            extra = self._store.extra
            require_own(step, extra, _KEY, _MAKER, self._accelerator.num_processes)
            load_loop_state(extra, self._model, self._scheduler, self._accelerator.scaler)
            self._continues, self._position = extra, extra[_KEY]
            self.loader.iteration = self._position["epoch"]
        self._committed = step
        return step

    def extra(self) -> dict[str, Any]:
        """Return the extra of a commit of the last step."""
        position = {**self._position, "processes": self._accelerator.num_processes}
        state = loop_state(self._model, self._scheduler, self._accelerator.scaler)
        return {_KEY: position, **state}

    def _commit(self) -> None:
        if self._store.step != self._committed:
            self._store.commit(extra=self.extra())
            self._committed = self._store.step

    # -- Hooks of the accelerator.

    def publish(self, models: Any, weights: Any, folder: str) -> None:
        """Publish the last step beside the files of ``save_state()``."""
        if self._store.step != self._committed:  # The loop commits it again, at its end.
            self._store.commit(extra=self.extra())
        publish(
            self._store,
            Path(folder, _FOLDER),
            self._model,
            is_main=self._accelerator.is_main_process,
            wait=self._accelerator.wait_for_everyone,
        )

    def begin_from(self, models: Any, folder: str) -> None:
        """Begin the run from what publish() wrote, before ``load_state()`` loads the rest."""
        if self._store.step:
            raise ValueError(
                f"load_state({folder!r}) is not where the store continues, which is its step "
                f"{self._store.step}: leave it out, or open the store in a new directory"
            )
        checkpoint = Path(folder, _FOLDER)
        if not checkpoint.is_dir():
            raise ValueError(
                f"{folder} has no folder {_FOLDER!r}, where save_state() publishes the store after "
                "prepare(): convert it with `tierstore convert`, or load its weights alone"
            )
        self.restore(checkpoint)


class _StoreOptimizer(AcceleratedOptimizer):
    """The optimizer of a loop, whose state save_state() leaves where it is."""

    _is_accelerate_prepared = True

    def __init__(self, optimizer: Any, scaler: Any) -> None:
        super().__init__(optimizer, device_placement=False, scaler=scaler)

    def state_dict(self) -> dict[str, Any]:
        """Return where the state is."""
        return {"tierstore": _FOLDER}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load nothing: begin_from() has restored the state."""
        if state_dict != self.state_dict():
            raise ValueError(
                "the state of this optimizer is in its store: load_state_dict() of the attribute "
                "`optimizer` takes the state of torch.optim"
            )


def _check_accelerator(accelerator: Accelerator) -> None:
    kind = accelerator.distributed_type
    if kind in (DistributedType.FSDP, DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM):
        raise ValueError(
            f"prepare() does not work with {kind.value} of accelerate, which replaces the "
            "parameters of the optimizer: use fully_shard() in a loop of your own, as "
            "examples/train_fsdp2.py does"
        )
    if accelerator.use_stateful_dataloader:
        raise ValueError(
            "prepare() keeps the position in the data in the commit: leave out "
            "use_stateful_dataloader=True"
        )
    if accelerator._optimizers:
        raise ValueError("prepare() was called before, or the accelerator has another optimizer")
