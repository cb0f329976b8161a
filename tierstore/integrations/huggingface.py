"""Trainers of transformers that commit each step and resume from the last commit.

``class OwnTrainer(StoreTrainer, Seq2SeqTrainer): pass`` makes one of another trainer. Any optimizer
on the store works with it.
"""

from __future__ import annotations

import dataclasses
import json
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers.trainer_callback import ExportableState

from tierstore.integrations.loop_state import (
    load_loop_state,
    loop_state,
    publish,
    require_own,
    restore_optimizer,
    set_random_state,
)
from tierstore.store import TierStore

if TYPE_CHECKING:
    from transformers import Trainer
else:
    Trainer = object

_STATE_NAME = "trainer_state.json"  # In checkpoints of transformers.


class StoreTrainer(Trainer):
    """A mixin that stands before ``transformers.Trainer`` or a subclass of it.

    After each step, its evaluation and its saving, the step is committed with the scheduler, the
    TrainerState without its ``log_history``, random generators, the scaler and the persistent
    buffers of the model. ``train()`` continues from the commit of the store, if there is one, and
    skips the batches that were trained on. A checkpoint of the Trainer has the model as usual, and
    in its folder ``store`` what ``store.checkpoint()`` publishes: links to page files.

    Args:
        args: as of the Trainer.
        store: the store of the optimizer; opened with ``resume=True`` it resumes.
        kwargs: as of the Trainer.
    """

    optimizer: Any

    def __init__(self, *args: Any, store: TierStore, **kwargs: Any) -> None:
        self.store = store
        self._extra: Any = store.extra  # Of the last commit.
        super().__init__(*args, **kwargs)

    # -- Where training continues.

    def train(self, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Train from the commit of the store, or from the start if there is none.

        Args:
            resume_from_checkpoint: None or a bool. Neither changes anything, because the store
                decides.
            args: as of the Trainer.
            kwargs: as of the Trainer.

        Raises:
            ValueError: ``resume_from_checkpoint`` is a path, or no Trainer made the commit. Nothing
                was changed.
        """
        if not isinstance(resume_from_checkpoint, bool | None):
            raise ValueError(
                f"resume_from_checkpoint={str(resume_from_checkpoint)!r} is not where the store "
                f"continues, which is its step {self.store.committed_step}: leave the argument "
                "out. To begin from weights, load them into the model, and open the store in a new "
                "directory"
            )
        if self.store.step:  # train() was called before; the commit is to be that of its last step.
            self.store.synchronize()
        self.store.provide_extra(self._extra_now)
        if not self.store.committed_step:
            return super().train(None, *args, **kwargs)
        require_own(self.store.committed_step, self._extra, "trainer", "a Trainer")
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, _STATE_NAME).write_text(self._extra["trainer"], encoding="utf-8")
            return super().train(folder, *args, **kwargs)

    def _load_from_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        """Load nothing: the parameters come from the store, once the optimizer is there."""

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is not None:
            restore_optimizer(self.store, self.optimizer.optimizer)
            model = self.accelerator.unwrap_model(self.model)
            load_loop_state(self.store.extra, model, self.lr_scheduler)

    def _load_scaler(self, checkpoint: str | None) -> None:
        if checkpoint is not None and self.accelerator.scaler is not None:
            self.accelerator.scaler.load_state_dict(self._extra["scaler"])

    def _load_rng_state(self, checkpoint: str | None) -> None:
        if checkpoint is not None:
            set_random_state(self._extra["random"])

    # -- The optimizer, commits and checkpoints.

    def create_optimizer(self, model: torch.nn.Module | None = None) -> Any:
        """Create the optimizer, and wrap it for accelerate, which would write all state anew."""
        if not getattr(self.optimizer, "_is_accelerate_prepared", False):
            optimizer = super().create_optimizer(model)
            self.optimizer = self.accelerator.prepare_optimizer(optimizer, device_placement=False)
            self.optimizer._is_accelerate_prepared = True
        return self.optimizer

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        super()._maybe_log_save_evaluate(*args, **kwargs)
        self._commit()  # Last, because an evaluation draws random numbers, too.

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        self._commit()
        publish(
            self.store,
            Path(output_dir, "store"),
            self.model,
            is_main=self.accelerator.is_main_process,
            wait=self.accelerator.wait_for_everyone,
        )
        if self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), Path(output_dir, "scheduler.pt"))

    def _commit(self) -> None:
        self.store.commit(extra=self._extra_now())

    def _extra_now(self) -> dict[str, Any]:
        callbacks = [*self.callback_handler.callbacks, self.control]
        exported = [callback for callback in callbacks if isinstance(callback, ExportableState)]
        state = dataclasses.replace(self.state, log_history=[], stateful_callbacks=exported)
        model = self.accelerator.unwrap_model(self.model)
        extra = {
            "trainer": json.dumps(dataclasses.asdict(state)),
            **loop_state(model, self.lr_scheduler, self.accelerator.scaler),
        }
        self._extra = extra
        return extra
