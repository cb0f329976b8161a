"""Loops of accelerate that commit each step and resume from the last commit."""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, DistributedType
from accelerate.optimizer import AcceleratedOptimizer

from tierstore.integrations.loop_state import (
    RandomLater,
    data_order,
    publish,
    register,
    require_own,
    restore_data_order,
    restore_optimizer,
)
from tierstore.store import TierStore

_FOLDER = "store"  # Within the output of save_state().
_KEY = "accelerate"  # Batches are registered under this name.
_MAKER = "a loop of prepare()"


def prepare(
    accelerator: Accelerator, model: Any, optimizer: Any, loader: Any, scheduler: Any
) -> tuple[Any, Any, Batches, Any, int]:
    """Prepare a loop as ``accelerator.prepare()`` does, and restore the last commit.

    A step is committed when the loop asks for the next batch, with the scheduler, random
    generators, gradient scaler, saved buffers of the model and the position in the data. The last
    step before a ``break`` is committed by the next loop, or when the store is closed.

    ``accelerator.save_state()``, called after ``scheduler.step()``, publishes the step in the
    folder ``store`` beside its own files. ``accelerator.load_state()`` begins a new run from there.

    Args:
        accelerator: of one process, or of several that each hold all parameters.
        model: the model of the optimizer.
        optimizer: its states are on the store that is its attribute ``store``.
        loader: a DataLoader. Only the order of its batches may depend on random numbers.
        scheduler: a scheduler of learning rates, or None.

    Returns:
        The model, the optimizer, the batches, the scheduler, and the step; 0 in a new run.

    Raises:
        TypeError: the optimizer has no store.
        ValueError: the accelerator shards parameters, the loader keeps the position in the data or
            its workers, steps were done, or another kind of loop made the commit.
        RunMismatchError: the run does not fit the model.
    """
    store = getattr(optimizer, "store", None)
    if not isinstance(store, TierStore):
        raise TypeError(f"{type(optimizer).__name__} has no TierStore as its attribute `store`")
    _check_accelerator(accelerator)
    if loader.persistent_workers:
        raise ValueError(
            "workers that outlive an epoch draw different orders after a resume: leave out "
            "persistent_workers=True"
        )
    if store.step:
        raise ValueError(
            f"the store is at step {store.step} already: call prepare() first, once for an opened "
            "store"
        )
    require_own(store.committed, _KEY, _MAKER, accelerator.num_processes)
    model, prepared, loader, scheduler = accelerator.prepare(
        model, _StoreOptimizer(optimizer, accelerator.scaler), loader, scheduler
    )
    plain = accelerator.unwrap_model(model, keep_torch_compile=False)
    batches = Batches(accelerator, plain, optimizer, loader, scheduler, store)
    accelerator.register_save_state_pre_hook(batches.publish)
    accelerator.register_load_state_pre_hook(batches.begin_from)
    return model, prepared, batches, scheduler, batches.restore()


class Batches:
    """The batches of a data loader. A ``for`` loop that reaches its end is an epoch.

    The first loop after a resume skips the batches that were trained on. These may be all batches
    of its epoch. Other attributes of the DataLoader are in ``loader``.
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
        """The data loader prepared by accelerate."""
        self._accelerator = accelerator
        self._model = model
        self._optimizer = optimizer
        self._store = store
        self._continues = False  # True from a restore to the next loop.
        self._position: dict[str, Any] = {}
        self._committed = 0  # The last step that the loop has committed.
        self._random = RandomLater()
        self._objects = register(store, model, scheduler, accelerator.scaler)
        self._begun_from: dict[str, Any] = {}  # Name -> restored state, until the next loop.
        store.register(random=self._random, accelerate=self)

    @property
    def epoch(self) -> int:
        """The epoch of the next ``for`` loop, from 0. A loop ended by ``break`` does not count."""
        epoch: int = self.loader.iteration
        return epoch

    def __len__(self) -> int:
        """Return the number of batches of a whole epoch."""
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        self._commit()  # If a `break` ended the loop before.
        epoch, batches = self.epoch, self.loader
        if not self._continues:
            self._position = {"epoch": epoch, "batch": 0, "order": data_order([self.loader])}
        else:
            self._continues = False
            # Load again, because load_state() loads states that were saved within a step.
            for name, state in self._begun_from.items():
                self._objects[name].load_state_dict(state)
            self._begun_from = {}
            self._accelerator.step = 0  # A commit is at the end of an accumulation.
            restore_data_order([self.loader], self._position["order"])
            batches = self._accelerator.skip_first_batches(batches, self._position["batch"])
        for batch in batches:
            self._random.set()  # The order of the epoch was drawn by now.
            self._position = {**self._position, "batch": self._position["batch"] + 1}
            yield batch
            self._commit()
        self._random.set()
        self.loader.iteration = epoch + 1

    def restore(self, checkpoint: Path | None = None) -> int:
        """Restore the commit of the store, or begin its run from a checkpoint; return the step."""
        step = restore_optimizer(self._store, self._optimizer, checkpoint)
        if step and not self._continues:
            raise ValueError(f"{checkpoint} was not committed by {_MAKER}: load its weights alone")
        return step

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the data after the last batch."""
        return {**self._position, "processes": self._accelerator.num_processes}

    def load_state_dict(self, position: dict[str, Any]) -> None:
        """Let the next loop begin after the batch of a position.

        Raises:
            ValueError: the position is of another number of processes.
        """
        found, expected = position["processes"], self._accelerator.num_processes
        if found != expected:
            raise ValueError(
                f"the position in the data is of {found} processes, but this is a loop of "
                f"{expected}, which has other batches: continue it with as many"
            )
        self._continues, self._position = True, position
        self._committed = self._store.step
        self.loader.iteration = position["epoch"]

    def _commit(self) -> None:
        if self._store.step != self._committed:
            self._store.commit()
            self._committed = self._store.step

    # -- Hooks of the accelerator.

    def publish(self, models: Any, weights: Any, folder: str) -> None:
        """Publish the last step beside the files of ``save_state()``."""
        if self._store.step != self._committed:  # The loop commits the step again when it ends.
            self._store.commit()
        publish(
            self._store,
            Path(folder, _FOLDER),
            self._model,
            is_main=self._accelerator.is_main_process,
            wait=self._accelerator.wait_for_everyone,
        )

    def begin_from(self, models: Any, folder: str) -> None:
        """Begin the run from a checkpoint of publish(), before ``load_state()`` loads the rest."""
        if self._store.step:
            raise ValueError(
                f"load_state({folder!r}) conflicts with the store, which continues from its step "
                f"{self._store.step}: leave it out, or open the store in a new directory"
            )
        checkpoint = Path(folder, _FOLDER)
        if not checkpoint.is_dir():
            raise ValueError(
                f"{folder} has no folder {_FOLDER!r}, where save_state() publishes the store after "
                "prepare(): convert it with `tierstore convert`, or load only its weights"
            )
        self.restore(checkpoint)
        self._begun_from = deepcopy({n: given.state_dict() for n, given in self._objects.items()})


class _StoreOptimizer(AcceleratedOptimizer):
    """The optimizer of a loop. save_state() does not write its state."""

    _is_accelerate_prepared = True

    def __init__(self, optimizer: Any, scaler: Any) -> None:
        super().__init__(optimizer, device_placement=False, scaler=scaler)

    def state_dict(self) -> dict[str, Any]:
        """Return a text that says where the state is."""
        return {"tierstore": _FOLDER}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load nothing: begin_from() has restored the state."""
        if state_dict != self.state_dict():
            raise ValueError(
                "the state of this optimizer is in its store: to load a state of torch.optim, call "
                "load_state_dict() of the attribute `optimizer`"
            )


def _check_accelerator(accelerator: Accelerator) -> None:
    kind = accelerator.distributed_type
    if kind in (DistributedType.FSDP, DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM):
        raise ValueError(
            f"prepare() does not work with {kind.value} of accelerate, which replaces the "
            "parameters of the optimizer: use fully_shard() in your own loop, as in "
            "examples/train_fsdp2.py"
        )
    if accelerator.use_stateful_dataloader:
        raise ValueError(
            "prepare() keeps the position in the data in the commit: leave out "
            "use_stateful_dataloader=True"
        )
    if accelerator._optimizers:
        raise ValueError("prepare() was called before, or the accelerator has another optimizer")
