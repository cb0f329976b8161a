"""Training with Lightning that commits each step and resumes from the last commit."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import lightning
from lightning.pytorch.loops.fetchers import _DataLoaderIterDataFetcher
from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy

from tierstore.integrations.loop_state import (
    RandomLater,
    data_order,
    register,
    require_own,
    restore_data_order,
    restore_optimizer,
)
from tierstore.run.random_state import RandomState
from tierstore.store import TierStore

_MAKER = "a Trainer of Lightning"


class Commit(lightning.Callback):
    """Commits each step, and lets ``Trainer.fit()`` continue from the last commit.

    A step is committed when the next batch begins, after the validation of the step, or when
    training ends. The commit includes the loops of the Trainer, schedulers, states of callbacks,
    random generators, gradient scaler and saved buffers. If the store has a commit, ``fit()``
    continues from it and skips the batches that were trained on. ``ModelCheckpoint`` saves weights.

    Args:
        store: the store of the module's only optimizer, and its attribute ``store``. Opened with
            ``resume=True`` it resumes.
    """

    def __init__(self, store: TierStore) -> None:
        self.store = store
        self._order: dict[str, Any] | None = None  # Order of the data of this epoch.
        self._continues: Any = None  # The state of the loop in the commit, until the next batch.
        self._random = RandomLater()
        self._before: Any = None  # The random generators before the next batch.
        self._committed = 0  # The last step that the Trainer has committed.
        self._begun = self._counted = 0  # See _LoopState.

    # -- Where training continues.

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Refuse settings that a store cannot resume. Restrict checkpoints to weights."""
        if stage != "fit":
            return
        if isinstance(trainer.strategy, FSDPStrategy | DeepSpeedStrategy):
            raise ValueError(
                f"Commit does not work with {type(trainer.strategy).__name__}, which replaces the "
                "parameters of the optimizer: use DDP, or fully_shard() in your own loop, as in "
                "examples/train_fsdp2.py"
            )
        for callback in trainer.checkpoint_callbacks:
            callback.save_weights_only = True

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Restore the last commit. The optimizer exists now."""
        store, processes = self.store, trainer.world_size
        if trainer.ckpt_path is not None:
            raise ValueError(
                f"ckpt_path={str(trainer.ckpt_path)!r} conflicts with the store, which continues "
                f"from its step {store.committed.step}: leave the argument out. To begin from "
                "weights, load them into the module, and open the store in a new directory"
            )
        optimizers = trainer.optimizers
        if [getattr(optimizer, "store", None) for optimizer in optimizers] != [store]:
            raise TypeError(
                "configure_optimizers() returns "
                f"{[type(optimizer).__name__ for optimizer in optimizers]}: Commit takes one "
                "optimizer, with its store as the attribute `store`"
            )
        for config in trainer.lr_scheduler_configs:
            if config.reduce_on_plateau and config.interval == "step":
                raise ValueError(
                    "a scheduler that watches a metric after each step cannot be resumed, because "
                    'Lightning does not keep metrics: give it the interval "epoch"'
                )
        if store.step:  # fit() was called before, so commit its last step first.
            store.synchronize()
        require_own(store.committed, "lightning", _MAKER, processes)
        register(store, pl_module, _Schedulers(trainer), None)
        store.register(random=self._random, lightning=_LoopState(self, trainer))
        self._committed = restore_optimizer(store, optimizers[0])

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Advance the data to the batch after the commit."""
        loop = trainer.fit_loop
        loaders = _loaders(trainer)
        if len(loaders) != 1 or isinstance(loop._data_fetcher, _DataLoaderIterDataFetcher):
            raise ValueError(
                "Commit cannot restore the position of several data loaders, or of "
                "training_step(dataloader_iter): train with one DataLoader"
            )
        if hasattr(loaders[0], "load_state_dict"):
            raise ValueError(
                "Commit keeps the position in the data itself: use a DataLoader without "
                "load_state_dict()"
            )
        self._order = None
        if self._continues is None:
            return
        kept = self._continues
        self._order = kept["order"]
        if self._order is not None:
            restore_data_order(loaders, self._order)
            fetcher = iter(loop._data_fetcher)
            for _ in range(kept["batches"]):
                next(fetcher)
            fetcher.fetched = 0  # The Trainer adds the batches that were trained on.
            if kept["batches"]:
                RandomState().load_state_dict(kept["before"])
            # If a validation is due, the Trainer begins with a batch that it counts but does not
            # train on.
            inner = loop.epoch_loop
            if inner._should_check_val_fx(fetcher) and not inner._should_accumulate():
                inner._batches_that_stepped -= 1
        if not kept["begun"]:
            self._random.set()
            self._continues = None

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        """Keep the state that determines the order of the epoch."""
        is_first = self._order is None
        self._order = data_order(_loaders(trainer))
        if is_first:  # The Trainer has begun to read before the order was known.
            iter(trainer.fit_loop._data_fetcher)

    # -- Commits.

    def on_train_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        """Commit the previous step."""
        if self._continues is not None:
            self._random.set()
            self._continues = None
        else:
            self._commit(begun=1)

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Keep the random generators as the next batch finds them."""
        self._before = RandomState().state_dict()

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """Keep the random generators as the next batch finds them."""
        self._before = RandomState().state_dict()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Commit the last step."""
        self._commit(begun=0)

    def _commit(self, *, begun: int) -> None:
        if self.store.step != self._committed:
            self._begun, self._counted = begun, 1
            try:
                self.store.commit()
            finally:
                self._begun = self._counted = 0
            self._committed = self.store.step


class _LoopState:
    """The state of a Trainer's loops and callbacks after the last step.

    ``_begun`` of the callback is 1 if the batch after the step has begun, ``_counted`` is 1 if the
    Trainer has counted the batch of the step.
    """

    def __init__(self, commit: Commit, trainer: Any) -> None:
        self._commit = commit
        self._trainer = trainer

    def state_dict(self) -> dict[str, Any]:
        commit, trainer, begun = self._commit, self._trainer, self._commit._begun
        loops = deepcopy(trainer.fit_loop.state_dict())
        progress, epochs = loops["epoch_loop.batch_progress"], loops["epoch_progress"]
        is_epoch_done = not begun and progress["is_last_batch"]
        progress["is_last_batch"] = False
        for counts in (progress["total"], progress["current"]):
            counts.update(dict.fromkeys(counts, counts["ready"] - begun))
        if is_epoch_done:
            progress["current"] = dict.fromkeys(progress["current"], 0)
        for counts in (epochs["total"], epochs["current"]):
            # After max_steps, the Trainer treats an epoch as done even if batches remain.
            done = counts["started"] - (not is_epoch_done)
            counts.update(ready=counts["started"], processed=done, completed=done)
        loops["epoch_loop.state_dict"]["_batches_that_stepped"] += 1 - commit._counted
        states = {each.state_key: each.state_dict() for each in trainer.callbacks}
        return {
            "loops": loops,
            "batches": progress["current"]["completed"],
            "begun": begun,
            "order": None if is_epoch_done else commit._order,
            "before": commit._before if begun else RandomState().state_dict(),
            "precision": trainer.precision_plugin.state_dict(),
            "callbacks": {key: state for key, state in states.items() if state},
        }

    def load_state_dict(self, kept: dict[str, Any]) -> None:
        trainer = self._trainer
        self._commit._continues = kept
        trainer.fit_loop.load_state_dict(kept["loops"])
        trainer.precision_plugin.load_state_dict(kept["precision"])
        for callback in trainer.callbacks:
            if callback.state_key in kept["callbacks"]:
                callback.load_state_dict(kept["callbacks"][callback.state_key])


class _Schedulers:
    """The schedulers of a Trainer as one."""

    def __init__(self, trainer: Any) -> None:
        self._schedulers = [config.scheduler for config in trainer.lr_scheduler_configs]

    def state_dict(self) -> dict[str, Any]:
        return {"schedulers": [scheduler.state_dict() for scheduler in self._schedulers]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for scheduler, state in zip(self._schedulers, state_dict["schedulers"], strict=True):
            scheduler.load_state_dict(state)


def _loaders(trainer: Any) -> list[Any]:
    """Return the data loaders of the training, with the samplers of its ranks."""
    loaders: list[Any] = trainer.fit_loop._combined_loader.flattened
    return loaders
