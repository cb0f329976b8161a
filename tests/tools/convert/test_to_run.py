"""Conversions to a run of one rank, which opens with resume=True, also on others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import muon
import tierstore
from tests.rank_programs.checkpoints import EXTRA, Job
from tests.store.test_state_shapes import Rule, expected, require_states
from tests.support.conversions import no_trace
from tests.support.kept import commit_with, kept_by, unwanted
from tests.support.published import Ours, Reference, assert_equal, save_with_dcp, tensors_in
from tests.support.rank_pool import RankPool
from tests.support.stock_reader import make_model
from tierstore.tools.convert import tierstore_writer
from tierstore.tools.convert.convert import convert
from tierstore.tools.inspect.verify import verify

WORK = "tests.rank_programs.checkpoints:work"


def state(ours: Ours) -> dict[str, Any]:
    return {**ours.state(), "extra": repr(kept_by(ours.store))}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_run_to_run_is_the_same_run(dtype: torch.dtype, tmp_path: Path) -> None:
    ours = Ours(tmp_path / "run", dtype=dtype).train(1, 2)
    commit_with(ours.store, EXTRA)
    ours.store.close()
    conversion = convert(tmp_path / "run", tmp_path / "again", to="tierstore")
    assert (conversion.step, conversion.lost) == (2, [])
    assert verify(tmp_path / "again").good
    found = []
    for name in ("run", "again"):
        other = Ours(tmp_path / name, dtype=dtype, seed=5, resume=True)
        unwanted(other.store)
        assert other.optimizer.restore() == 2
        other.model.load_state_dict({"mean": torch.ones(3)}, strict=False)
        found.append(state(other))
        found.append(state(other.train(3, 4)))
        other.store.close()
    assert_equal(found[2], found[0])
    assert_equal(found[3], found[1])


@pytest.mark.parametrize("source", ["stock", "stock.pt"])
def test_stock_optimizers_resume_as_a_run(
    source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tierstore_writer, "_PAGE_BYTES", 4096)  # Parameters in several pages.
    reference = Reference().train(1, 2)
    save_with_dcp(reference, tmp_path / "stock", flat=False, prefix=True)
    convert(tmp_path / "stock", tmp_path / "stock.pt", to="torch")
    conversion = convert(tmp_path / source, tmp_path / "run", to="tierstore")
    assert conversion.lost == [
        "1 buffers or frozen tensors of the model, such as 'mean': a run holds the parameters and "
        "states of its optimizer"
    ]
    assert len(list((tmp_path / "run/rank-00000").glob("page-*"))) > 2
    ours = Ours(tmp_path / "run", resume=True)
    assert ours.optimizer.restore() == 2
    ours.model.load_state_dict({"mean": reference.model.state_dict()["mean"]}, strict=False)
    ours.train(3).store.close()
    assert_equal(ours.model.state_dict(), reference.train(3).model_state())


def test_three_ranks_to_dcp_to_two_ranks_to_torch(pool: RankPool, tmp_path: Path) -> None:
    job = Job(run=tmp_path / "run", layout="copies", steps=(1, 2), partition="flat", awkward=False)
    pool.run(3, WORK, job)
    convert(tmp_path / "run", tmp_path / "dcp", to="dcp")
    begun = Job(
        run=tmp_path / "two",
        layout="copies",
        steps=(3,),
        partition="by_parameter",
        awkward=False,
        begin_from=tmp_path / "dcp",
    )
    assert [step for step, _ in pool.run(2, WORK, begun)] == [2, 2]
    convert(tmp_path / "two", tmp_path / "out.pt", to="torch")
    expected = Job(
        run=tmp_path / "one",
        layout="copies",
        steps=(1, 2, 3),
        awkward=False,
        checkpoint=tmp_path / "published",
    )
    pool.run(1, WORK, expected)
    file = torch.load(tmp_path / "out.pt")
    found = {f"model.{name}": tensor for name, tensor in file["model"].items()}
    for group in file["optimizer"]["param_groups"]:
        for name, number in zip(group["param_names"], group["params"], strict=True):
            for key, value in file["optimizer"]["state"][number].items():
                found[f"optimizer.state.{name}.{key}"] = value
    wanted = tensors_in(tmp_path / "published")  # With the buffer, which a run does not hold.
    assert_equal(found, {key: t for key, t in wanted.items() if key != "model.mean"})


def test_run_on_other_ranks(pool: RankPool, tmp_path: Path) -> None:
    job = Job(run=tmp_path / "run", layout="rows", steps=(1, 2), awkward=False)
    pool.run(3, WORK, job)
    convert(tmp_path / "run", tmp_path / "one", to="tierstore")
    resumed = Job(
        run=tmp_path / "one",
        layout="rows",
        steps=(3,),
        awkward=False,
        store={"resume": True},
    )
    assert [step for step, _ in pool.run(2, WORK, resumed)] == [2, 2]
    whole = Job(run=tmp_path / "whole", layout="copies", steps=(1, 2, 3), awkward=False)
    pool.run(1, WORK, whole)
    for name in ("one", "whole"):
        convert(tmp_path / name, tmp_path / f"{name} dcp", to="dcp")
    assert_equal(tensors_in(tmp_path / "one dcp"), tensors_in(tmp_path / "whole dcp"))


def test_weights_alone_on_several_ranks(pool: RankPool, tmp_path: Path) -> None:
    """Two ranks begin from weights alone as one rank does from the model that has them."""
    torch.save(make_model("layers", 5).state_dict(), tmp_path / "weights.pt")
    convert(tmp_path / "weights.pt", tmp_path / "weights", to="dcp")
    begun = Job(
        run=tmp_path / "two",
        layout="rows",
        steps=(1, 2),
        awkward=False,
        begin_from=tmp_path / "weights",
    )
    assert [step for step, _ in pool.run(2, WORK, begun)] == [0, 0]
    whole = Job(run=tmp_path / "one", layout="copies", steps=(1, 2), awkward=False, seed=5)
    pool.run(1, WORK, whole)
    for name in ("one", "two"):
        convert(tmp_path / name, tmp_path / f"{name} dcp", to="dcp")
    assert_equal(tensors_in(tmp_path / "two dcp"), tensors_in(tmp_path / "one dcp"))


def test_dtype_of_the_parameters(tmp_path: Path) -> None:
    weight = nn.Parameter(torch.randn(5, 4))
    optimizer = torch.optim.AdamW([("w", weight)])
    weight.grad = torch.randn(5, 4)
    optimizer.step()
    file = {"model": {"w": weight}, "optimizer": optimizer.state_dict()}
    torch.save(file, tmp_path / "in.pt")
    convert(tmp_path / "in.pt", tmp_path / "run", to="tierstore", dtype=torch.bfloat16)
    parameter = nn.Parameter(torch.zeros(5, 4, dtype=torch.bfloat16))
    with tierstore.TierStore(tmp_path / "run", resume=True) as store:
        groups = [{"params": [("w", parameter)], "algorithm": "adamw"}]
        assert muon.Muon(groups, store=store).restore() == 1
        assert torch.equal(store.pages.read_states()["w"]["master"], weight)
        assert torch.equal(parameter, weight.to(torch.bfloat16))


def test_momentum_with_the_dtype_of_each_parameter(tmp_path: Path) -> None:
    dtypes = {"a": torch.bfloat16, "b": torch.float32}
    weights = [(name, nn.Parameter(torch.randn(4, 4).to(d))) for name, d in dtypes.items()]
    with tierstore.TierStore(tmp_path / "run") as store:
        optimizer = muon.Muon([{"params": weights, "algorithm": "muon"}], store=store)
        for _, parameter in weights:
            parameter.grad = torch.randn_like(parameter)
        optimizer.step()
        expected = store.pages.read_states()
    convert(tmp_path / "run", tmp_path / "again", to="tierstore")
    with tierstore.TierStore(tmp_path / "again", resume=True) as store:
        assert muon.Muon([{"params": weights, "algorithm": "muon"}], store=store).restore() == 1
        assert_equal(store.pages.read_states(), expected)


def test_a_source_without_weights_or_optimizer_is_refused(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(3)}, tmp_path / "weights.pt")
    weight = nn.Parameter(torch.randn(5, 4))
    optimizer = torch.optim.AdamW([("w", weight)])
    weight.grad = torch.randn(5, 4)
    optimizer.step()
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
    with no_trace(tmp_path):
        for name, problem in (("weights", "has no optimizer"), ("optimizer", "no weight of")):
            with pytest.raises(tierstore.CheckpointError, match=problem):
                convert(tmp_path / f"{name}.pt", tmp_path / "run", to="tierstore")


def test_a_rule_with_states_of_any_shape(tmp_path: Path) -> None:
    rule = Rule(tmp_path / "in")
    rule.step(1)
    rule.store.commit()
    rule.store.close()
    for source, to in (("in", "tierstore"), ("tierstore", "dcp"), ("dcp", "torch")):
        assert convert(tmp_path / source, tmp_path / to, to=to).lost == []
    assert verify(tmp_path / "tierstore").good
    for path, checkpoint in (("tierstore", None), ("new", tmp_path / "dcp")):
        other = Rule(tmp_path / path, resume=checkpoint is None)
        other.store.restore(checkpoint)
        require_states(other, 1)
        other.store.close()
    state = torch.load(tmp_path / "torch", weights_only=True)["optimizer"]["state"][1]
    assert_equal(
        {key: state[key] for key in ("whole", "number")},
        {key: expected(1)[key] for key in ("whole", "number")},
    )
    first, second, third = state["factors"]
    assert_equal([first, second], [expected(1)[f"factors.{number}"] for number in range(2)])
    assert (third, state["by_name"]["none"]) == ([], None)
    assert_equal(state["by_name"]["deep"][0]["steps"], expected(1)["by_name.deep.0.steps"])


def test_a_stack_of_matrices(tmp_path: Path) -> None:
    """Pages cut it between matrices."""

    def make(run: str, *, resume: bool) -> tuple[nn.Parameter, muon.Muon]:
        stack = nn.Parameter(torch.ones(3, 6, 8))
        group = {"params": [("w", stack)], "algorithm": "muon", "matrices": (("stack",),)}
        store = tierstore.TierStore(tmp_path / run, resume=resume)
        return stack, muon.Muon([group], store=store)

    stack, optimizer = make("in", resume=False)
    stack.grad = torch.randn(3, 6, 8)
    optimizer.step()
    optimizer.store.commit()
    optimizer.store.close()
    convert(tmp_path / "in", tmp_path / "again", to="tierstore")
    other, optimizer = make("again", resume=True)
    assert optimizer.restore() == 1
    assert torch.equal(other, stack)
    optimizer.store.close()
