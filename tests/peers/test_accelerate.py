"""Loops of accelerate: interrupted anywhere and resumed, they see the same batches."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import muon
import tierstore
from tests.peers import loops
from tests.peers.loops import BATCH, ROWS, StoppedError, assert_equal, dataset
from tests.support.fake_cuda import fake_cuda


class Rows(IterableDataset[tuple[torch.Tensor, ...]]):
    """A dataset without an index, whose order is fixed."""

    def __iter__(self) -> Iterator[tuple[torch.Tensor, ...]]:
        return iter(dataset())


LOADERS = {**loops.LOADERS, "iterable": lambda: DataLoader(Rows(), batch_size=BATCH)}


class Loop:
    """A loop over two epochs with dropout and batch norm, which notes what it trained on."""

    def __init__(
        self,
        store: tierstore.TierStore,
        loader: str = "shuffled",
        *,
        seedable: bool = False,
        max_norm: float | None = None,
        cls: Any = None,
    ) -> None:
        from accelerate import Accelerator
        from accelerate.utils import DataLoaderConfiguration

        from tierstore.integrations.accelerate import prepare

        self.store = store
        self.max_norm = max_norm
        self.norms: list[torch.Tensor] = []
        self.accelerator = Accelerator(
            cpu=True,
            gradient_accumulation_steps=2,
            dataloader_config=DataLoaderConfiguration(use_seedable_sampler=seedable),
        )
        layers = [torch.nn.Linear(8, 16), torch.nn.BatchNorm1d(16), torch.nn.Dropout(0.3)]
        model = torch.nn.Sequential(*layers, torch.nn.Linear(16, 1))
        optimizer: tierstore.PagedOptimizer
        if cls is None:
            groups = muon.param_groups(model, lr=0.02)
            optimizer = muon.Muon(groups, store=store, ns_dtype=torch.float32)
        else:
            optimizer = tierstore.Paged(model.named_parameters(), cls, store=store)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        self.model, self.optimizer, self.batches, self.scheduler, self.began = prepare(
            self.accelerator, model, optimizer, LOADERS[loader](), scheduler
        )
        self.kept: Any = None
        self.seen: list[tuple[int, list[int]]] = []
        """The step that each batch belongs to, and the numbers of its rows."""

    def run(self, stop_at: int = 100, epochs: int = 2) -> None:
        """Train until a batch is reached, counted over the epochs of this process."""
        for epoch in range(self.batches.epoch, epochs):
            assert self.batches.epoch == epoch
            for numbers, inputs, targets in self.batches:
                if len(self.seen) == stop_at:
                    raise StoppedError
                self.train_on(inputs, targets)
                step = self.store.step + (not self.accelerator.sync_gradients)
                self.seen.append((step, numbers.tolist()))

    def train_on(self, inputs: torch.Tensor, targets: torch.Tensor) -> None:
        with self.accelerator.accumulate(self.model):
            loss = torch.nn.functional.mse_loss(self.model(inputs), targets)
            self.accelerator.backward(loss)
            if self.max_norm is not None and self.accelerator.sync_gradients:
                clip = self.accelerator.clip_grad_norm_
                self.norms.append(clip(self.model.parameters(), self.max_norm))
            self.optimizer.step()
            self.scheduler.step()
            self.optimizer.zero_grad()

    def result(self) -> dict[str, torch.Tensor]:
        return {name: value.clone() for name, value in self.model.state_dict().items()}


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("seedable", [False, True])
@pytest.mark.parametrize("loader", LOADERS)
def test_stopped_in_any_batch(loader: str, seedable: bool, tmp_path: Path) -> None:
    with tierstore.TierStore(tmp_path / "whole") as store:
        whole = Loop(store, loader, seedable=seedable)
        whole.run()
        assert store.step == 6
        expected = whole.result()
    steps = [step for step, _ in whole.seen]
    assert steps == [1, 1, 2, 2, 3, 4, 4, 5, 5, 6]
    for stop_at in range(10):
        torch.manual_seed(0)
        directory = tmp_path / f"stopped-{stop_at}"
        with pytest.raises(StoppedError), tierstore.TierStore(directory) as store:
            Loop(store, loader, seedable=seedable).run(stop_at)
        # A run that has a commit does not depend on the seed.
        torch.manual_seed(stop_at if stop_at >= 2 else 0)
        with tierstore.TierStore(directory, resume=True) as store:
            resumed = Loop(store, loader, seedable=seedable)
            # The step of the batch before was committed if it was the last batch of the step.
            assert resumed.began == sum(steps.index(step + 1) <= stop_at for step in range(1, 6))
            resumed.run()
            again = [each for each in whole.seen if each[0] > resumed.began]
            assert resumed.seen == again
            assert_equal(resumed.result(), expected)


def test_a_class_of_torch_stopped_in_any_batch(tmp_path: Path) -> None:
    with tierstore.TierStore(tmp_path / "whole") as store:
        whole = Loop(store, cls=torch.optim.NAdam, max_norm=0.01)
        whole.run()
    for stop_at in (3, 7):
        torch.manual_seed(0)
        with pytest.raises(StoppedError), tierstore.TierStore(tmp_path / f"{stop_at}") as store:
            Loop(store, cls=torch.optim.NAdam, max_norm=0.01).run(stop_at)
        with tierstore.TierStore(tmp_path / f"{stop_at}", resume=True) as store:
            resumed = Loop(store, cls=torch.optim.NAdam, max_norm=0.01)
            resumed.run()
            assert_equal(resumed.result(), whole.result())


def test_the_step_before_a_break(tmp_path: Path) -> None:
    def train(directory: Path, steps: int) -> dict[str, torch.Tensor]:
        torch.manual_seed(0)
        with tierstore.TierStore(directory, resume=True) as store:
            loop = Loop(store)
            while store.step < steps:
                for _, inputs, targets in loop.batches:
                    loop.train_on(inputs, targets)
                    if store.step == steps:
                        break
            return loop.result()

    expected = train(tmp_path / "whole", 5)
    train(tmp_path / "resumed", 2)
    with tierstore.TierStore(tmp_path / "resumed", resume=True) as store:
        assert store.committed.step == 2
    assert_equal(train(tmp_path / "resumed", 5), expected)


def test_saved_and_begun_from_there(tmp_path: Path) -> None:
    with tierstore.TierStore(tmp_path / "whole") as store:
        loop = Loop(store)
        with pytest.raises(StoppedError):
            loop.run(4)
        loop.accelerator.save_state(str(tmp_path / "saved"))
        saved_bytes = sum(
            path.stat().st_size for path in (tmp_path / "saved").glob("*.bin") if path.is_file()
        )
        assert saved_bytes < 5_000  # No state of the optimizer.
    with tierstore.TierStore(tmp_path / "expected") as store:
        torch.manual_seed(0)
        whole = Loop(store)
        whole.run()
    torch.manual_seed(7)
    with tierstore.TierStore(tmp_path / "new") as store:
        begun = Loop(store)
        assert begun.began == 0
        begun.accelerator.load_state(str(tmp_path / "saved"))
        assert store.step == 2
        begun.run()
        assert begun.seen == whole.seen[4:]
        assert_equal(begun.result(), whole.result())
    # The store decides where a run continues.
    with tierstore.TierStore(tmp_path / "new", resume=True) as store:
        resumed = Loop(store)
        with pytest.raises(
            ValueError, match=r"saved'\) conflicts with the store, which continues.* 6"
        ):
            resumed.accelerator.load_state(str(tmp_path / "saved"))
        assert_equal(resumed.result(), whole.result())


def test_a_state_that_was_saved_within_a_step(tmp_path: Path) -> None:
    """It is the state of the step before, and the run that saved it goes on unchanged."""
    with tierstore.TierStore(tmp_path / "run") as store:
        loop = Loop(store)
        for index, (_, inputs, targets) in enumerate(loop.batches):
            if index == 3:
                loop.accelerator.save_state(str(tmp_path / "saved"))
                break
            loop.train_on(inputs, targets)
    with tierstore.TierStore(tmp_path / "whole") as store:
        torch.manual_seed(0)
        whole = Loop(store)
        whole.run()
    with tierstore.TierStore(tmp_path / "new") as store:
        begun = Loop(store)
        begun.accelerator.load_state(str(tmp_path / "saved"))
        assert store.step == 1
        begun.run()
        assert begun.seen == whole.seen[2:]
        assert_equal(begun.result(), whole.result())


def test_what_is_refused(tmp_path: Path) -> None:
    from accelerate import Accelerator
    from accelerate.utils import DataLoaderConfiguration

    from tierstore.integrations.accelerate import prepare

    model = torch.nn.Linear(4, 4)
    loader: Any = DataLoader(TensorDataset(torch.zeros(4, 4)), batch_size=2)

    def prepare_with(optimizer: torch.optim.Optimizer, **options: Any) -> Any:
        scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer)
        return prepare(Accelerator(cpu=True, **options), model, optimizer, loader, scheduler)

    with pytest.raises(TypeError, match="AdamW has no TierStore as its attribute `store`"):
        prepare_with(torch.optim.AdamW(model.parameters()))
    with tierstore.TierStore(tmp_path / "run") as store:
        optimizer = muon.Muon(muon.param_groups(model, lr=0.02), store=store)
        stateful = DataLoaderConfiguration(use_stateful_dataloader=True)
        with pytest.raises(ValueError, match="leave out use_stateful_dataloader=True"):
            prepare_with(optimizer, dataloader_config=stateful)
        persistent: Any = DataLoader(dataset(), num_workers=1, persistent_workers=True)
        with pytest.raises(ValueError, match="leave out persistent_workers=True"):
            prepare(Accelerator(cpu=True), model, optimizer, persistent, None)
        loop = Loop(store)
        with pytest.raises(ValueError, match="prepare\\(\\) was called before"):
            prepare(loop.accelerator, model, optimizer, loader, loop.scheduler)
        with pytest.raises(ValueError, match="has no folder 'store'"):
            loop.accelerator.load_state(str(tmp_path))


def test_a_run_of_another_program_is_refused(tmp_path: Path) -> None:
    with tierstore.TierStore(tmp_path / "run") as store:
        model = torch.nn.Linear(4, 4)
        optimizer = muon.Muon(muon.param_groups(model, lr=0.02), store=store)
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()
        store.register(own={"at": 1})
        store.commit()
    with tierstore.TierStore(tmp_path / "run", resume=True) as store:
        with pytest.raises(ValueError, match=r"step 1 .* was not committed by a loop of prepare"):
            Loop(store)
        assert store.committed.step == 1


@pytest.mark.parametrize("call", ["checkpoint", "synchronize"])
def test_a_step_that_the_program_commits_itself(call: str, tmp_path: Path) -> None:
    with tierstore.TierStore(tmp_path / "whole") as store:
        whole = Loop(store)
        whole.run()
    torch.manual_seed(0)
    with contextlib.suppress(StoppedError), tierstore.TierStore(tmp_path / "run") as store:
        loop = Loop(store)
        for number, (_, inputs, targets) in enumerate(loop.batches):
            loop.train_on(inputs, targets)
            if number == 3:
                if call == "checkpoint":
                    store.checkpoint(tmp_path / "published")
                store.synchronize()
                raise StoppedError
    with tierstore.TierStore(tmp_path / "run", resume=True) as store:
        resumed = Loop(store)
        assert resumed.began == 2
        resumed.run()
        assert resumed.seen == whole.seen[4:]
        assert_equal(resumed.result(), whole.result())


def test_a_break_within_accumulated_batches_and_a_kept_iterator(tmp_path: Path) -> None:
    """The batches after the last step are not taken for trained on."""

    def batches_of(loop: Loop, count: int) -> list[list[int]]:
        seen = []
        iterator = iter(loop.batches)
        for numbers, inputs, targets in iterator:
            loop.train_on(inputs, targets)
            seen.append(numbers.tolist())
            if len(seen) == count:
                break
        loop.kept = iterator
        return seen

    with tierstore.TierStore(tmp_path / "run") as store:
        loop = Loop(store)
        first = batches_of(loop, 2)
        batches_of(loop, 1)  # The epoch begins again; its first batch is not stepped.
        assert store.step == 1
    with tierstore.TierStore(tmp_path / "run", resume=True) as store:
        loop = Loop(store)
        assert loop.began == 1
        rest = batches_of(loop, 100)
        assert sorted(number for numbers in first + rest for number in numbers) == [*range(ROWS)]


def test_a_state_of_other_processes_and_of_another_program(tmp_path: Path) -> None:
    with tierstore.TierStore(tmp_path / "other") as store:
        model = torch.nn.Sequential(torch.nn.Linear(8, 16))
        optimizer = muon.Muon(muon.param_groups(model, lr=0.02), store=store)
        model(torch.ones(1, 8)).sum().backward()
        optimizer.step()
        store.register(scheduler={})
        store.commit()
        store.checkpoint(tmp_path / "saved/store")
    with tierstore.TierStore(tmp_path / "run") as store:
        from accelerate import Accelerator

        from tierstore.integrations.accelerate import prepare

        model = torch.nn.Sequential(torch.nn.Linear(8, 16))
        optimizer = muon.Muon(muon.param_groups(model, lr=0.02), store=store)
        accelerator = Accelerator(cpu=True)
        prepare(accelerator, model, optimizer, LOADERS["in order"](), None)
        with pytest.raises(ValueError, match="was not committed by a loop of prepare"):
            accelerator.load_state(str(tmp_path / "saved"))


def test_saving_again_into_a_folder_keeps_what_is_there_until_then(tmp_path: Path) -> None:
    with tierstore.TierStore(tmp_path / "run") as store:
        loop = Loop(store)
        with pytest.raises(StoppedError):
            loop.run(4)
        for _ in range(2):
            loop.accelerator.save_state(str(tmp_path / "saved"))
            assert (tmp_path / "saved/store/.metadata").exists()
            assert not (tmp_path / "saved/store.old").exists()
    with tierstore.TierStore(tmp_path / "new") as store:
        loop = Loop(store)
        with pytest.raises((tierstore.CheckpointError, FileExistsError)):
            loop.accelerator.save_state(str(tmp_path / "saved"))  # No step to publish.
        assert (tmp_path / "saved/store/.metadata").exists()


def test_a_rewind_by_a_program_that_carries_the_states_along(tmp_path: Path) -> None:
    with tierstore.TierStore(tmp_path / "whole") as store:
        whole = Loop(store)
        whole.run()
    torch.manual_seed(0)
    with contextlib.suppress(StoppedError), tierstore.TierStore(tmp_path / "run") as store:
        loop = Loop(store)
        for number, (_, inputs, targets) in enumerate(loop.batches):
            if number == 4:
                store.checkpoint(tmp_path / "step-2")
            loop.train_on(inputs, targets)
    with tierstore.TierStore(tmp_path / "run", resume=True) as store:
        layers = [torch.nn.Linear(8, 16), torch.nn.BatchNorm1d(16), torch.nn.Dropout(0.3)]
        model = torch.nn.Sequential(*layers, torch.nn.Linear(16, 1))
        optimizer = muon.Muon(muon.param_groups(model, lr=0.02), store=store)
        store.register(**{name: {} for name in store.committed.states})
        assert optimizer.restore(tmp_path / "step-2", rewind=True) == 2
    with tierstore.TierStore(tmp_path / "run", resume=True) as store:
        resumed = Loop(store)
        assert resumed.began == 2
        resumed.run()
        assert resumed.seen == whole.seen[4:]
        assert_equal(resumed.result(), whole.result())


def test_a_loop_with_one_object_more_or_less(tmp_path: Path) -> None:
    with tierstore.TierStore(tmp_path / "whole") as store:
        whole = Loop(store)
        whole.run()
    torch.manual_seed(0)
    with pytest.raises(StoppedError), tierstore.TierStore(tmp_path / "run") as store:
        Loop(store).run(4)
    with tierstore.TierStore(tmp_path / "run", resume=True) as store:
        store.register(more={"a": 1})
        with pytest.warns(UserWarning, match="step 2 was committed without 'more'"):
            loop = Loop(store)
        with contextlib.suppress(StoppedError):
            loop.run(1)
    refused = pytest.raises(ValueError, match=r"step 3 was committed with 'more'.*\(more=None\)")
    with tierstore.TierStore(tmp_path / "run", resume=True) as store, refused:
        Loop(store)
    with tierstore.TierStore(tmp_path / "run", resume=True) as store:
        store.register(more=None)
        resumed = Loop(store)
        resumed.run()
        assert_equal(resumed.result(), whole.result())


def test_gradients_that_left_are_summed_and_clipped(tmp_path: Path) -> None:
    """By accelerate itself, with the norms and weights of gradients that stay."""
    found = []
    for name, options in {"stay": {}, "leave": {"offload_gradients": "backward"}}.items():
        torch.manual_seed(0)
        with fake_cuda(), tierstore.TierStore(tmp_path / name, **options) as store:
            loop = Loop(store, max_norm=0.05)
            loop.run()
            found.append((loop.norms, loop.result()))
    (norms, result), (expected_norms, expected) = found
    assert norms == expected_norms
    assert len(norms) > 2
    assert min(norms) > 0.05
    assert_equal(result, expected)
