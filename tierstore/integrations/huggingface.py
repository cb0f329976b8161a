"""Trainers of transformers that commit each step and resume from the last commit.

``class OwnTrainer(StoreTrainer, Seq2SeqTrainer): pass`` adapts another trainer. Any optimizer on
the store works with it.
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
    RandomLater,
    publish,
    register,
    require_own,
    restore_optimizer,
)
from tierstore.store import TierStore

if TYPE_CHECKING:
    from transformers import Trainer
else:
    Trainer = object

_STATE_NAME = "trainer_state.json"  # In checkpoints of transformers.


class StoreTrainer(Trainer):
    """A mixin placed before ``transformers.Trainer`` or a subclass of it.

    Each step is committed after its evaluation and saving. The commit includes the scheduler, the
    TrainerState without its ``log_history``, random generators, the scaler and the persistent
    buffers of the model. If the store has a commit, ``train()`` continues from it and skips the
    batches that were trained on. A checkpoint of the Trainer has the model as usual. Its folder
    ``store`` has the result of ``store.checkpoint()``: links to page files.

    Args:
        args: as in the Trainer.
        store: the store of the optimizer. Opened with ``resume=True`` it resumes.
        kwargs: as in the Trainer.
    """

    optimizer: Any

    def __init__(self, *args: Any, store: TierStore, **kwargs: Any) -> None:
        self.store = store
        self._random = RandomLater()
        super().__init__(*args, **kwargs)

    # -- Where training continues.

    def train(self, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Train from the commit of the store, or from the start if there is none.

        Args:
            resume_from_checkpoint: None or a bool. The value has no effect, because the store
                decides.
            args: as in the Trainer.
            kwargs: as in the Trainer.

        Raises:
            ValueError: ``resume_from_checkpoint`` is a path, or another program made the commit.
                Nothing was changed.
        """
        if not isinstance(resume_from_checkpoint, bool | None):
            raise ValueError(
                f"resume_from_checkpoint={str(resume_from_checkpoint)!r} conflicts with the store, "
                f"which continues from its step {self.store.committed.step}: leave the argument "
                "out. To begin from weights, load them into the model, and open the store in a new "
                "directory"
            )
        if self.store.step:  # train() was called before, so commit its last step first.
            self.store.synchronize()
        committed = self.store.committed
        if not committed.step:
            return super().train(None, *args, **kwargs)
        require_own(committed, "trainer", "a Trainer", None)
        with tempfile.TemporaryDirectory() as folder:
            state = json.loads(committed.states["trainer"]["json"])
            state["is_local_process_zero"] = self.is_local_process_zero()
            state["is_world_process_zero"] = self.is_world_process_zero()
            Path(folder, _STATE_NAME).write_text(json.dumps(state), encoding="utf-8")
            return super().train(folder, *args, **kwargs)

    def _load_from_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        """Load nothing: the store restores the parameters once the optimizer exists."""

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is not None:
            restore_optimizer(self.store, self.optimizer.optimizer)

    def _load_scaler(self, checkpoint: str | None) -> None:
        """Load nothing: the store has loaded the scaler with the scheduler."""

    def _load_rng_state(self, checkpoint: str | None) -> None:
        self._random.set()

    # -- The optimizer, commits and checkpoints.

    def create_optimizer(self, model: torch.nn.Module | None = None) -> Any:
        """Create the optimizer; wrap it, because accelerate would rewrite all its state."""
        if not getattr(self.optimizer, "_is_accelerate_prepared", False):
            optimizer = super().create_optimizer(model)
            self.optimizer = self.accelerator.prepare_optimizer(optimizer, device_placement=False)
            self.optimizer._is_accelerate_prepared = True
        return self.optimizer

    def create_scheduler(self, *args: Any, **kwargs: Any) -> Any:
        """Create the scheduler, and register the state of the Trainer with the store."""
        scheduler = super().create_scheduler(*args, **kwargs)
        model, scaler = self.accelerator.unwrap_model(self.model), self.accelerator.scaler
        register(self.store, model, self.lr_scheduler, scaler)
        self.store.register(random=self._random, trainer=_TrainerState(self))
        return scheduler

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        super()._maybe_log_save_evaluate(*args, **kwargs)
        self.store.commit()  # Commit last: an evaluation also draws random numbers.

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        self.store.commit()
        publish(
            self.store,
            Path(output_dir, "store"),
            self.model,
            is_main=self.accelerator.is_main_process,
            wait=self.accelerator.wait_for_everyone,
        )
        if self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), Path(output_dir, "scheduler.pt"))


class _TrainerState:
    """The progress of a Trainer, in the form of its file. train() restores it to the Trainer."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer

    def state_dict(self) -> dict[str, str]:
        trainer = self._trainer
        callbacks = [*trainer.callback_handler.callbacks, trainer.control]
        exported = [callback for callback in callbacks if isinstance(callback, ExportableState)]
        state = dataclasses.replace(trainer.state, log_history=[], stateful_callbacks=exported)
        # Equal on all ranks, so that another number of ranks can continue; see train().
        state.is_local_process_zero = state.is_world_process_zero = True
        return {"json": json.dumps(dataclasses.asdict(state))}

    def load_state_dict(self, state_dict: dict[str, str]) -> None:
        pass
