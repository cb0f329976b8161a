"""Parameters that pages may cut between units of rows: stacks of matrices."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import tierstore
from tierstore.layout.records import record_nbytes

SHAPE = (16, 12, 20)
PAGE_BYTES = 2 * record_nbytes((2, *SHAPE[1:]), torch.float32)  # Of two matrices with their state.


class Stack:
    """One parameter, whose step subtracts the largest element of each matrix from all of it."""

    def __init__(self, directory: Path | None, unit: int | None = 1, **options: Any) -> None:
        self.store = tierstore.TierStore(directory, page_bytes=PAGE_BYTES, buffers=3, **options)
        values = torch.arange(3840.0).reshape(SHAPE)
        self.tensor = torch.nn.Parameter(values)
        parameter = tierstore.pages.PagedParameter(
            name="stack", tensor=self.tensor, states={"sum": torch.float32}, unit=unit
        )
        self.store.pages.attach(
            [tierstore.pages.PagedGroup(parameters=[parameter], hyperparameters={})]
        )
        self.pages = 0

    def step(self) -> None:
        self.tensor.grad = torch.ones_like(self.tensor)
        self.pages = 0
        with self.store.pages.sweep() as pages:
            for page in pages:
                self.pages += 1
                for chunk in (chunk for shard in page.shards for chunk in shard.chunks):
                    assert tuple(chunk.chunk.sizes[1:]) == SHAPE[1:]
                    largest = chunk.master.amax(dim=(1, 2), keepdim=True)
                    chunk.master.sub_(largest)
                    chunk.states["sum"].add_(largest)


def expected(steps: int) -> tuple[torch.Tensor, torch.Tensor]:
    values, sums = torch.arange(3840.0).reshape(SHAPE), torch.zeros(SHAPE)
    for _ in range(steps):
        largest = values.amax(dim=(1, 2), keepdim=True)
        values, sums = values - largest, sums + largest
    return values, sums


def assert_at(stack: Stack, steps: int) -> None:
    values, sums = expected(steps)
    assert torch.equal(stack.tensor, values)
    assert torch.equal(stack.store.pages.read_states()["stack"]["sum"], sums)


def test_a_stack_spreads_over_pages_and_resumes(tmp_path: Path) -> None:
    stack = Stack(tmp_path / "run")
    stack.step()
    assert stack.pages == 8
    assert_at(stack, 1)
    stack.store.close()
    stack = Stack(tmp_path / "run", resume=True)
    stack.store.restore()
    stack.step()
    assert_at(stack, 2)
    stack.store.checkpoint(tmp_path / "published")
    stack.store.close()
    values, sums = expected(2)
    found = {key: torch.zeros(SHAPE) for key in ("model.stack", "optimizer.state.stack.sum")}
    dcp.load(found, checkpoint_id=tmp_path / "published")
    assert torch.equal(found["model.stack"], values)
    assert torch.equal(found["optimizer.state.stack.sum"], sums)


def test_without_files_a_parameter_stays_whole() -> None:
    stack = Stack(None)
    stack.step()
    assert stack.pages == 1
    assert_at(stack, 1)


def test_without_units_it_is_one_page(tmp_path: Path) -> None:
    stack = Stack(tmp_path, unit=None)
    stack.step()
    assert stack.pages == 1
    stack.store.close()


@pytest.mark.parametrize(("before", "after"), [(1, None), (None, 1), (1, 2)])
def test_other_units_are_refused_at_a_resume(
    before: int | None, after: int | None, tmp_path: Path
) -> None:
    stack = Stack(tmp_path, unit=before)
    stack.step()
    stack.store.close()

    def resume() -> None:
        again = Stack(tmp_path, unit=after, resume=True)
        try:
            again.store.restore()
        finally:
            again.store.close()

    with pytest.raises(tierstore.RunMismatchError, match=r"First difference.*in units of 1 rows"):
        resume()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"unit": 5}, "of 16 rows cannot have units of 5 rows"),
        ({"unit": 0}, "of 16 rows cannot have units of 0 rows"),
        ({"unit": -1}, "of 16 rows cannot have units of -1 rows"),
        ({"unit": 2.0}, r"of 16 rows cannot have units of 2\.0 rows"),
        ({"unit": 2, "elementwise": True}, "is elementwise and has units of 2 rows: leave one out"),
    ],
)
def test_units_that_cannot_be(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"parameter 'stack' {message}"):
        tierstore.pages.PagedParameter(name="stack", tensor=torch.ones(SHAPE), **fields)


def test_a_parameter_without_dimensions_has_no_units() -> None:
    with pytest.raises(ValueError, match="of 0 rows cannot have units of 1 rows"):
        tierstore.pages.PagedParameter(name="scalar", tensor=torch.ones(()), unit=1)
