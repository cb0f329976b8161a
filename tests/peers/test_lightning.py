"""Training with Lightning: interrupted anywhere and resumed, it sees the same batches."""

from __future__ import annotations

import contextlib
import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

import muon
import tierstore
from tests.peers.loops import BATCH, LOADERS, StoppedError, assert_equal, dataset
from tests.support.fake_cuda import fake_cuda


@functools.cache
def module_class() -> Any:
    import lightning

    class Module(lightning.LightningModule):
        """Dropout, batch norm and a schedule; it notes what it trained on."""

        def __init__(self, store: tierstore.TierStore, stop_at: int, *, manual: bool) -> None:
            super().__init__()
            layers = [torch.nn.Linear(8, 16), torch.nn.BatchNorm1d(16), torch.nn.Dropout(0.3)]
            self.layers = torch.nn.Sequential(*layers, torch.nn.Linear(16, 1))
            self.automatic_optimization = not manual
            self.store = store
            self.stop_at = stop_at
            self.seen: list[list[int]] = []
            self.logged: list[int] = []
            """The step that a logger would get in each batch."""
            self.validated: list[int] = []
            """The steps after which a validation ended."""

        def optimizer_of(self) -> tierstore.PagedOptimizer:
            groups = muon.param_groups(self, lr=0.02)
            return muon.Muon(groups, store=self.store, ns_dtype=torch.float32)

        def configure_optimizers(self) -> Any:
            optimizer = self.optimizer_of()
            scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
            return [optimizer], [{"scheduler": scheduler, "interval": "step"}]

        def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            numbers, inputs, targets = batch
            return numbers, inputs + 0.01 * torch.randn_like(inputs), targets

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            numbers, inputs, targets = batch
            if len(self.seen) == self.stop_at:
                raise StoppedError
            self.seen.append(numbers.tolist())
            self.logged.append(self.trainer.fit_loop.epoch_loop._batches_that_stepped)
            loss = torch.nn.functional.mse_loss(self.layers(inputs), targets)
            if self.automatic_optimization:
                return loss
            self.manual_backward(loss / 2)
            if batch_idx % 2 == 1 or self.trainer.is_last_batch:
                self.optimizers().step()
                self.lr_schedulers().step()
                self.optimizers().zero_grad()
            return None

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            _, inputs, targets = batch
            self.log("loss", torch.nn.functional.mse_loss(self.layers(inputs), targets))

        def on_validation_epoch_end(self) -> None:
            if not self.trainer.sanity_checking:
                self.validated.append(self.store.step)

    return Module


class Trained:
    """A training of two epochs, until it is stopped in a batch."""

    def __init__(
        self,
        directory: Path,
        loader: str = "shuffled",
        stop_at: int = 100,
        *,
        manual: bool = False,
        callbacks: tuple[Any, ...] = (),
        more: dict[str, Any] | None = None,
        store_options: dict[str, Any] | None = None,
        **options: Any,
    ) -> None:
        import lightning

        from tierstore.integrations.lightning import Commit

        defaults: dict[str, Any] = {
            "accelerator": "cpu",
            "max_epochs": 2,
            "accumulate_grad_batches": 1 if manual else 2,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "logger": False,
            "default_root_dir": directory,
        }
        self.stopped = False
        with (
            contextlib.suppress(StoppedError),
            tierstore.TierStore(directory / "run", resume=True, **(store_options or {})) as store,
        ):
            self.began = store.committed.step
            store.register(**(more or {}))
            module = module_class()(store, stop_at, manual=manual)
            self.trainer = lightning.Trainer(
                callbacks=[Commit(store), *callbacks], **{**defaults, **options}
            )
            self.stopped = True
            self.trainer.fit(module, LOADERS[loader](), DataLoader(dataset(), batch_size=BATCH))
            self.stopped = False
        self.steps = store.step
        self.seen, self.validated, self.logged = module.seen, module.validated, module.logged
        self.result = {name: value.clone() for name, value in module.state_dict().items()}


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("limit", [{}, {"max_epochs": -1, "max_steps": 6}])
@pytest.mark.parametrize("manual", [False, True])
@pytest.mark.parametrize("loader", LOADERS)
def test_stopped_in_any_batch(
    loader: str, manual: bool, limit: dict[str, int], tmp_path: Path
) -> None:
    whole = Trained(tmp_path / "whole", loader, manual=manual, **limit)
    assert whole.steps == 6
    assert len(whole.seen) == 10
    assert whole.validated == [3, 6]
    begins = {0: 0, 1: 2, 2: 4, 3: 5, 4: 7, 5: 9, 6: 10}  # Step -> the batches before the next.
    for stop_at in range(1, 10):
        torch.manual_seed(0)
        directory = tmp_path / f"stopped-{stop_at}"
        stopped = Trained(directory, loader, stop_at, manual=manual, **limit)
        assert stopped.stopped
        torch.manual_seed(stop_at if stop_at >= 2 else 0)  # A commit has its own seeds.
        resumed = Trained(directory, loader, manual=manual, **limit)
        assert resumed.began == max(step for step, begin in begins.items() if begin <= stop_at)
        assert resumed.seen == whole.seen[begins[resumed.began] :]
        assert resumed.logged == whole.logged[begins[resumed.began] :]
        assert_equal(resumed.result, whole.result)
        assert sorted({*stopped.validated, *resumed.validated}) == [3, 6]
        again = Trained(directory, loader, manual=manual, **limit)
        assert (again.began, again.seen) == (6, [])
        assert_equal(again.result, whole.result)


def test_a_class_of_torch_stopped_in_a_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def optimizer_of(module: Any) -> tierstore.Paged:
        return tierstore.Paged(module.named_parameters(), torch.optim.RAdam, store=module.store)

    monkeypatch.setattr(module_class(), "optimizer_of", optimizer_of)
    whole = Trained(tmp_path / "whole", "shuffled")
    torch.manual_seed(0)
    assert Trained(tmp_path / "run", "shuffled", 6).stopped
    resumed = Trained(tmp_path / "run", "shuffled")
    assert resumed.began == 3
    assert_equal(resumed.result, whole.result)


@pytest.mark.parametrize("step", range(1, 9))
def test_a_training_that_is_longer_than_planned(step: int, tmp_path: Path) -> None:
    whole = Trained(tmp_path / "whole", max_epochs=-1, max_steps=9)
    torch.manual_seed(0)
    first = Trained(tmp_path / "run", max_epochs=-1, max_steps=step)
    assert first.steps == step
    second = Trained(tmp_path / "run", max_epochs=-1, max_steps=9)
    assert first.seen + second.seen == whole.seen
    assert_equal(second.result, whole.result)


def test_more_epochs_than_planned(tmp_path: Path) -> None:
    whole = Trained(tmp_path / "whole", max_epochs=3)
    torch.manual_seed(0)
    first = Trained(tmp_path / "run", max_epochs=1)
    second = Trained(tmp_path / "run", max_epochs=3)
    assert first.seen + second.seen == whole.seen
    assert_equal(second.result, whole.result)


def test_published_after_a_validation_and_killed(tmp_path: Path) -> None:
    """A step that checkpoint() commits before the Trainer would also resumes."""
    import lightning

    class Publish(lightning.Callback):
        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            pl_module.store.checkpoint(tmp_path / f"published-{trainer.current_epoch}")
            raise StoppedError

    whole = Trained(tmp_path / "whole")
    torch.manual_seed(0)
    stopped = Trained(tmp_path / "run", callbacks=(Publish(),))
    assert stopped.stopped
    resumed = Trained(tmp_path / "run")
    assert resumed.began == 3
    assert stopped.seen + resumed.seen == whole.seen


def test_states_of_callbacks_and_their_files(tmp_path: Path) -> None:
    from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint

    def callbacks(directory: Path) -> tuple[Any, ...]:
        best = ModelCheckpoint(directory / "best", monitor="loss", save_top_k=2)
        return best, EarlyStopping("loss", patience=5)

    whole = callbacks(tmp_path / "whole")
    Trained(tmp_path / "whole", callbacks=whole)
    torch.manual_seed(0)
    Trained(tmp_path / "run", stop_at=8, callbacks=callbacks(tmp_path / "run"))
    resumed = callbacks(tmp_path / "run")
    result = Trained(tmp_path / "run", callbacks=resumed).result
    assert resumed[0].best_model_score == whole[0].best_model_score
    assert resumed[1].state_dict() == whole[1].state_dict()
    names = [
        {path.name for path in (tmp_path / run / "best").iterdir()} for run in ("whole", "run")
    ]
    assert names[0] == names[1] == {"epoch=0-step=3.ckpt", "epoch=1-step=6.ckpt"}
    saved = torch.load(tmp_path / "run/best/epoch=1-step=6.ckpt", weights_only=False)
    assert "optimizer_states" not in saved
    assert_equal(saved["state_dict"], result)


REFUSED = {
    "ckpt_path": (ValueError, "conflicts with the store, which continues from its step 0"),
    "other optimizer": (TypeError, r"returns \['AdamW'\]: Commit takes one optimizer"),
    "two loaders": (ValueError, "train with one DataLoader"),
    "stateful loader": (ValueError, r"use a DataLoader without load_state_dict\(\)"),
    "plateau by step": (ValueError, 'give it the interval "epoch"'),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_refused(what: str, tmp_path: Path) -> None:
    import lightning

    from tierstore.integrations.lightning import Commit

    class Other(module_class()):  # type: ignore[misc]
        def configure_optimizers(self) -> Any:
            if what == "other optimizer":
                return torch.optim.AdamW(self.parameters())
            (optimizer,), schedulers = super().configure_optimizers()
            if what != "plateau by step":
                return [optimizer], schedulers
            scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
            return [optimizer], [{"scheduler": scheduler, "interval": "step", "monitor": "loss"}]

    class Stateful(DataLoader[Any]):
        def load_state_dict(self, state: Any) -> None:
            raise NotImplementedError

    kind, text = REFUSED[what]
    with tierstore.TierStore(tmp_path / "run") as store:
        module = Other(store, 100, manual=False)
        weights = tmp_path / "weights.ckpt"
        saved = {"pytorch-lightning_version": lightning.__version__}
        torch.save({**saved, "state_dict": module.state_dict()}, weights)
        loader: Any = (Stateful if what == "stateful loader" else DataLoader)(dataset())
        trainer = lightning.Trainer(
            callbacks=[Commit(store)], accelerator="cpu", max_epochs=1, barebones=True
        )
        with pytest.raises(kind, match=text):
            trainer.fit(
                module,
                [loader, loader] if what == "two loaders" else loader,
                ckpt_path=weights if what == "ckpt_path" else None,
            )
        assert store.step == 0


def test_fit_again_in_one_process(tmp_path: Path) -> None:
    import lightning

    from tierstore.integrations.lightning import Commit

    class OneOptimizer(module_class()):  # type: ignore[misc]
        """A store takes one optimizer, and each fit() asks for one."""

        @functools.cached_property
        def optimizers_and_schedulers(self) -> Any:
            return super().configure_optimizers()

        def configure_optimizers(self) -> Any:
            return self.optimizers_and_schedulers

    whole = Trained(tmp_path / "whole")
    torch.manual_seed(0)
    with tierstore.TierStore(tmp_path / "run") as store:
        module = OneOptimizer(store, 100, manual=False)
        for epochs in (1, 2):
            trainer = lightning.Trainer(
                callbacks=[Commit(store)],
                accelerator="cpu",
                max_epochs=epochs,
                accumulate_grad_batches=2,
                default_root_dir=tmp_path,
                logger=False,
            )
            validation = DataLoader(dataset(), batch_size=BATCH)
            trainer.fit(module, LOADERS["shuffled"](), validation)
        assert module.seen == whole.seen
        assert_equal(module.state_dict(), whole.result)


def test_a_run_of_another_program_is_refused(tmp_path: Path) -> None:
    with tierstore.TierStore(tmp_path / "run") as store:
        model = torch.nn.Linear(4, 4)
        optimizer = muon.Muon(muon.param_groups(model, lr=0.02), store=store)
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()
        store.register(own={"at": 1})
        store.commit()
    with pytest.raises(ValueError, match=r"step 1 .* was not committed by a Trainer of Lightning"):
        Trained(tmp_path)


def test_a_loop_with_one_object_more_or_less(tmp_path: Path) -> None:
    whole = Trained(tmp_path / "whole")
    torch.manual_seed(0)
    first = Trained(tmp_path / "run", stop_at=5, more={"more": {"a": 1}})
    assert first.stopped
    with pytest.raises(ValueError, match=r"was committed with 'more'.*\(more=None\)"):
        Trained(tmp_path / "run")
    resumed = Trained(tmp_path / "run", more={"more": None})
    assert resumed.seen == whole.seen[5:]
    assert_equal(resumed.result, whole.result)
    with pytest.warns(UserWarning, match="step 6 was committed without 'more'"):
        Trained(tmp_path / "run", more={"more": {"a": 1}})


def test_a_rewind_by_a_program_that_carries_the_states_along(tmp_path: Path) -> None:
    import lightning

    class Publish(lightning.Callback):
        def on_train_batch_start(
            self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int
        ) -> None:
            if batch_idx == 4 and trainer.current_epoch == 0:
                pl_module.store.checkpoint(tmp_path / "step-2")

    whole = Trained(tmp_path / "whole")
    torch.manual_seed(0)
    Trained(tmp_path / "run", callbacks=(Publish(),))
    with tierstore.TierStore(tmp_path / "run/run", resume=True) as store:
        module = module_class()(store, 0, manual=False)
        optimizer = muon.Muon(muon.param_groups(module, lr=0.02), store=store)
        store.register(**{name: {} for name in store.committed.states})
        assert optimizer.restore(tmp_path / "step-2", rewind=True) == 2
    resumed = Trained(tmp_path / "run")
    assert resumed.began == 2
    assert resumed.seen == whole.seen[4:]
    assert_equal(resumed.result, whole.result)


def test_gradients_that_left_are_summed_and_clipped(tmp_path: Path) -> None:
    """By Lightning itself, with the weights of gradients that stay, and other ones unclipped."""
    results = {}
    for name, max_norm, options in (
        ("stay", 0.05, {}),
        ("leave", 0.05, {"offload_gradients": "backward"}),
        ("unclipped", None, {"offload_gradients": "backward"}),
    ):
        torch.manual_seed(0)
        with fake_cuda():
            trained = Trained(tmp_path / name, store_options=options, gradient_clip_val=max_norm)
        results[name] = trained.result
    assert_equal(results["leave"], results["stay"])
    assert any(not torch.equal(results["unclipped"][n], v) for n, v in results["stay"].items())
