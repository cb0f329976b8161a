"""States of other shapes than their parameter."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import tierstore
from tests.support import independent_reader
from tierstore.errors import CorruptionError
from tierstore.layout import subgroups
from tierstore.layout.chunks import Chunk
from tierstore.layout.encodings import assign, values_of
from tierstore.layout.page_layout import PageLayout, lay_out
from tierstore.layout.parameters import ParameterSpec
from tierstore.run.layout_file import RankLayout
from tierstore.run.sealed import checksum_of

SHAPE = (7, 5)
STATES: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
    "whole": (SHAPE, torch.float32),
    "rows": ((7, 1), torch.float32),
    "columns": ((1, 5), torch.bfloat16),
    "number": ((), torch.float64),
    "one": ((1,), torch.int64),
    "factors.0": ((7, 7), torch.float32),
    "factors.1": ((5, 5), torch.float32),
    "by_name.deep.0.steps": ((3, 4, 5), torch.uint8),
    "long": ((500,), torch.float32),
}
"""Name -> shape and dtype."""
STEPS = 4


class Rule:
    """Adds the number of the step and the place of each element to all states.

    Args:
        directory: of the run; None keeps the states in memory.
        options: of the store.
    """

    def __init__(self, directory: Path | None, **options: Any) -> None:
        self.store = tierstore.TierStore(directory, page_bytes=4096, host_memory="1MiB", **options)
        self.tensors = {
            name: torch.nn.Parameter(torch.ones(SHAPE, dtype=dtype))
            for name, dtype in (("a", torch.float32), ("b", torch.bfloat16))
        }
        parameters = [
            tierstore.pages.PagedParameter(
                name=name,
                tensor=tensor,
                states={state: dtype for state, (_, dtype) in STATES.items()},
                shapes={state: shape for state, (shape, _) in STATES.items()},
                empty={"by_name.none": "none", "factors.2": "list"},
            )
            for name, tensor in self.tensors.items()
        ]
        self.store.pages.attach(
            [tierstore.pages.PagedGroup(parameters=parameters, hyperparameters={})]
        )

    def step(self, number: int) -> None:
        for tensor in self.tensors.values():
            tensor.grad = torch.ones_like(tensor)
        with self.store.pages.sweep() as pages:
            for page in pages:
                for shard in page.shards:
                    for chunk in shard.chunks:
                        assert tuple(chunk.chunk.sizes) == SHAPE
                        chunk.master.add_(number)
                        for state, (shape, dtype) in STATES.items():
                            values = values_of(chunk.state(state))
                            assert (tuple(values.shape), values.dtype) == (shape, dtype)
                            assign(chunk.state(state), values + change(state, number))


def change(state: str, number: int) -> torch.Tensor:
    shape, dtype = STATES[state]
    return (torch.arange(math.prod(shape)).remainder(5) + number).reshape(shape).to(dtype)


def expected(steps: int) -> dict[str, torch.Tensor]:
    found = {state: torch.zeros(shape, dtype=dtype) for state, (shape, dtype) in STATES.items()}
    for number in range(1, steps + 1):
        for state in found:
            found[state] = found[state] + change(state, number)
    return found


def require_states(rule: Rule, steps: int) -> None:
    found = rule.store.pages.read_states()
    for name in rule.tensors:
        for state, values in expected(steps).items():
            assert torch.equal(found[name][state], values), (name, state)
            assert found[name][state].dtype == values.dtype


@pytest.fixture(params=[None, 512])
def record_bytes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int | None:
    """Free states of more bytes than this are in several records."""
    if request.param is not None:
        monkeypatch.setattr(subgroups, "RECORD_DATA_BYTES_MAX", request.param)
        monkeypatch.setattr(independent_reader, "RECORD_BYTES_MAX", request.param)
    count: int | None = request.param
    return count


def test_in_memory() -> None:
    rule = Rule(None)
    for number in range(1, STEPS + 1):
        rule.step(number)
        require_states(rule, number)
    assert torch.equal(rule.store.pages.show_states("a")["factors.1"], expected(STEPS)["factors.1"])


@pytest.mark.usefixtures("record_bytes")
def test_resumed_published_and_begun_anew(tmp_path: Path) -> None:
    for number in range(1, STEPS + 1):
        rule = Rule(tmp_path / "run", resume=True)
        assert rule.store.restore() == number - 1
        rule.step(number)
        if number < STEPS:
            rule.store.commit()
            rule.store.close()
    rule.store.checkpoint(tmp_path / "published")
    require_states(rule, STEPS)
    rule.store.close()

    keys = {f"optimizer.state.b.{state}": state for state in STATES}
    found = {key: torch.empty_like(expected(0)[state]) for key, state in keys.items()}
    found["model.a"] = torch.empty(SHAPE)
    dcp.load(found, checkpoint_id=tmp_path / "published")
    for key, state in keys.items():
        assert torch.equal(found[key], expected(STEPS)[state]), key
    assert torch.equal(found["model.a"], torch.full(SHAPE, 1.0 + sum(range(1, STEPS + 1))))

    begun = Rule(tmp_path / "new")
    assert begun.store.restore(tmp_path / "published") == STEPS
    begun.step(STEPS + 1)
    require_states(begun, STEPS + 1)
    begun.store.close()
    for content in (
        independent_reader.read_run(tmp_path / "run"),
        independent_reader.read_checkpoint(tmp_path / "published"),
    ):
        for state, values in expected(STEPS).items():
            assert content.states["a"][state].tolist() == values.tolist(), state


def test_lists_and_empty_parts_are_in_a_checkpoint_as_stock_has_them(tmp_path: Path) -> None:
    rule = Rule(tmp_path / "run")
    rule.step(1)
    rule.store.checkpoint(tmp_path / "published")
    rule.store.close()
    metadata = dcp.FileSystemReader(tmp_path / "published").read_metadata()
    found = {
        metadata.planner_data[key][3:]
        for key in metadata.state_dict_metadata
        if key.startswith("optimizer.state.a.")
    }
    assert {("factors", 0), ("factors", 1), ("factors", 2), ("by_name", "none")} <= found
    assert ("by_name", "deep", 0, "steps") in found


@pytest.mark.usefixtures("record_bytes")
def test_written_states(tmp_path: Path) -> None:
    rule = Rule(tmp_path / "run")
    rule.step(1)
    values = {name: expected(3) for name in rule.tensors}
    rule.store.pages.write_states(values, {})
    require_states(rule, 3)
    wrong = {"a": {**expected(3), "factors.0": torch.zeros(7, 5)}}
    with pytest.raises(ValueError, match=r"'factors.0' of shape \[7, 5\] .* of shape \[7, 7\]"):
        rule.store.pages.write_states(wrong, {}, names=["a"])
    require_states(rule, 3)
    rule.store.close()


def page_of(state: str, **options: Any) -> tuple[ParameterSpec, PageLayout]:
    """Return a parameter with one float32 state, and a page of it."""
    spec = ParameterSpec(
        name="w",
        shape=SHAPE,
        dtype=torch.float32,
        states=((state, torch.float32),),
        elementwise=False,
        **options,
    )
    shard = subgroups.ParameterShard(spec, (Chunk((0, 0), SHAPE),))
    return spec, lay_out(subgroups.Subgroup(0, (shard,)))


def test_several_records(record_bytes: int | None) -> None:
    _, page = page_of("long", shapes=(("long", (500,)),))
    [records] = page.records.values()
    assert len(records["long"]) == (1 if record_bytes is None else 4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"shapes": {"s": (3, 3)}, "elementwise": True}, "it must stay whole on one rank"),
        ({"shapes": {"s": (3, 3)}, "unit": 1}, "it must stay whole on one rank"),
        ({"shapes": {"s": (3, 3)}, "partition": "flat"}, "it must stay whole on one rank"),
        ({"shapes": {"s": (0,)}}, "has a state 's' of shape \\[0\\], which has no elements"),
        ({"shapes": {"t": (3, 3)}}, "has a shape for 't', but no such state"),
        ({"shapes": {"s": (3, -1)}}, "for the shape of 's', must be sizes"),
        ({"shapes": {"s": (1,) * 17}}, "has 17 dimensions in 's', of at most 16"),
        ({"empty": {"t": "tuple"}}, "for the empty part 't'; it can be: none, list, dict"),
        ({"states": {"1.s": torch.float32}}, "must be an identifier other than 'master'"),
        ({"states": {"s..1": torch.float32}}, "must be an identifier other than 'master'"),
        ({"states": {"s.1": torch.float32}}, r"has the states \['s.1'\]: a list lacks an item"),
        ({"states": dict.fromkeys(("s", "s.0"), torch.float32)}, "in another value that is not a"),
        (
            {"shapes": {"s": (4, 1)}, "encodings": {"s": "int8_root"}},
            "which must be a float32 state of its shape",
        ),
    ],
)
def test_what_cannot_be_is_refused(options: dict[str, Any], message: str) -> None:
    tensor = torch.nn.Parameter(torch.ones(4, 6))
    given = {"states": {"s": torch.float32}, **options}
    with pytest.raises(ValueError, match=message):
        tierstore.pages.PagedParameter(name="w", tensor=tensor, **given)


def test_a_parameter_without_elements_has_no_other_states() -> None:
    tensor = torch.nn.Parameter(torch.ones(0, 6))
    with pytest.raises(ValueError, match=r"has no elements, and therefore no page for 's'"):
        tierstore.pages.PagedParameter(
            name="w", tensor=tensor, states={"s": torch.float32}, shapes={"s": (6, 6)}
        )


def test_a_layout_with_row_states_is_read() -> None:
    """As layouts had them before states had shapes."""
    spec = ParameterSpec(
        name="w",
        shape=(6, 4),
        dtype=torch.bfloat16,
        states=(("momentum_buffer", torch.float32), ("second_momentum_buffer", torch.float32)),
        elementwise=False,
        shapes=(("second_momentum_buffer", (6, 1)),),
    )
    earlier = spec.to_json()
    del earlier["shapes"]
    assert ParameterSpec.from_json({**earlier, "row_states": ["second_momentum_buffer"]}) == spec


@pytest.mark.parametrize(
    "change",
    [
        {"shapes": {"other": [3]}},
        {"shapes": {"s": [-1]}},
        {"shapes": {"s": [3, 3]}, "elementwise": True},
        {"shapes": {"s": [2.5]}},
        {"empty": {"t": "tuple"}},
    ],
)
def test_a_layout_with_other_shapes_is_damaged(change: dict[str, Any]) -> None:
    spec, page = page_of("s")
    layout = RankLayout.from_pages([[spec]], [page])
    changed = ParameterSpec.from_json({**spec.to_json(), **change})
    data = replace(layout, groups=[[changed]]).to_bytes()
    with pytest.raises(CorruptionError):
        RankLayout.from_bytes(data, "the layout", digest=checksum_of(data))
