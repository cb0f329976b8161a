"""Conversions to DCP directories, which stock PyTorch and restore() load."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

import muon
import tierstore
from tests.rank_programs.checkpoints import EXTRA, Job
from tests.support.kept import commit_with
from tests.support.published import (
    Ours,
    Reference,
    assert_equal,
    read_with_stock,
    save_with_dcp,
    tensors_in,
)
from tests.support.rank_pool import RankPool
from tests.support.small_net import begun, save, small_net, states_of, stock_adamw, train
from tests.support.thread_ranks import ThreadJob
from tests.support.toy import Toy
from tierstore.ranks.peers import Ranks
from tierstore.tools.convert import dcp as format_
from tierstore.tools.convert.convert import Conversion, convert
from tierstore.tools.convert.options import Reading
from tierstore.tools.inspect.verify import verify

WORK = "tests.rank_programs.checkpoints:work"
PARTS = "tests.rank_programs.checkpoints:work_in_parts"


def to_dcp(sources: Any, out: Path, **options: Any) -> Conversion:
    conversion = convert(sources, out, to="dcp", **options)
    report = verify(out)
    assert (report.kind, report.faults, report.notes) == ("plain checkpoint", (), ())
    return conversion


def trained(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Leave out what a run does not hold: buffers, frozen parameters, further names."""
    names = {key.split(".", 2)[2].rpartition(".")[0] for key in tensors if "optimizer" in key}
    kept = {f"model.{name}" for name in names}
    return {k: tensor for k, tensor in tensors.items() if k in kept or "optimizer" in k}


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    ("layout", "partition"),
    [("copies", "flat"), ("copies", "by_parameter"), ("rows", "auto"), ("columns", "auto")],
)
def test_run_of_three_ranks(layout: str, partition: str, pool: RankPool, tmp_path: Path) -> None:
    job = Job(
        run=tmp_path / "run",
        layout=layout,
        steps=(1, 2),
        partition=partition,
        checkpoint=tmp_path / "published",
        awkward=False,
    )
    pool.run(3, WORK, job)
    expected = tensors_in(tmp_path / "published")
    conversion = to_dcp(tmp_path / "run", tmp_path / "of run")
    assert (conversion.step, conversion.lost) == (2, [])
    assert_equal(tensors_in(tmp_path / "of run"), trained(expected))
    to_dcp(tmp_path / "published", tmp_path / "of published")
    assert_equal(tensors_in(tmp_path / "of published"), expected)


def test_frozen_and_tied_parameters_of_a_published_checkpoint(
    pool: RankPool, tmp_path: Path
) -> None:
    job = Job(run=tmp_path / "run", layout="rows", steps=(1,), checkpoint=tmp_path / "published")
    pool.run(3, WORK, job)
    expected = tensors_in(tmp_path / "published")
    assert {"model.twin.weight", "model.again.weight", "model.mean"} < expected.keys()
    conversion = to_dcp(tmp_path / "published", tmp_path / "out")
    assert conversion.nbytes < sum(tensor.nbytes for tensor in expected.values())
    assert_equal(tensors_in(tmp_path / "out"), expected)


def test_parts_that_were_never_merged(pool: RankPool, tmp_path: Path) -> None:
    disks = (0, 1, 1)
    job = Job(run=tmp_path / "run", layout="rows", steps=(1, 2), checkpoint=tmp_path / "checkpoint")
    pool.run(3, PARTS, job, disks)
    pool.run(
        1,
        WORK,
        Job(run=tmp_path / "one", layout="copies", steps=(1, 2), checkpoint=tmp_path / "expected"),
    )
    expected = tensors_in(tmp_path / "expected")
    parts = [tmp_path / f"disk-{disk}" for disk in (0, 1)]
    to_dcp([part / "checkpoint" for part in parts], tmp_path / "of checkpoint")
    assert_equal(tensors_in(tmp_path / "of checkpoint"), expected)
    to_dcp([part / "run" for part in parts], tmp_path / "of run")
    assert_equal(tensors_in(tmp_path / "of run"), trained(expected))
    for name in ("run", "checkpoint"):
        with pytest.raises(tierstore.CheckpointError, match="rank"):
            convert(parts[1] / name, tmp_path / "out", to="dcp")
    with pytest.raises(tierstore.CheckpointError, match="rank 1 is in two of the sources"):
        convert([parts[1] / "run", parts[1] / "run"], tmp_path / "out", to="dcp")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("source", ["run", pytest.param("published", marks=pytest.mark.long)])
def test_stock_optimizers_go_on(source: str, tmp_path: Path) -> None:
    ours = Ours(tmp_path / "run").train(1, 2)
    ours.store.checkpoint(tmp_path / "published", model=ours.model)
    ours.store.close()
    to_dcp(tmp_path / source, tmp_path / "prefixed")
    to_dcp(tmp_path / source, tmp_path / "bare", bare_keys=True)
    reference = Reference().train(1, 2)
    after = {step: reference.train(step).model_state() for step in (3, 4)}
    jobs: list[tuple[str, str, dict[str, Any]]] = [
        ("flat", "load", {"path": str(tmp_path / "prefixed"), "flat": True}),
        ("by group", "load", {"path": str(tmp_path / "prefixed"), "flat": False}),
        ("bare", "load", {"path": str(tmp_path / "bare"), "flat": True, "prefix": False}),
    ]
    if source == "run":  # It has no buffers, which a stock load asks for.
        for out in ("prefixed", "bare"):
            assert "mean" not in "".join(tensors_in(tmp_path / out))
        return
    for _, _, options in jobs:
        options |= {"model": "layers", "steps": [3, 4]}
    for name, result in read_with_stock(jobs, tmp_path / "scratch").items():
        for step in (3, 4):
            assert_equal(result["after"][step], after[step], name)
    jobs = [(name, job, {**options, "sharded": True}) for name, job, options in jobs[:2]]
    save_with_dcp(Reference().train(1, 2), tmp_path / "stock", flat=True, prefix=True)
    jobs.append(("stock", "load", {**jobs[0][2], "path": str(tmp_path / "stock")}))
    found = read_with_stock(jobs, tmp_path / "two", ranks=2)
    for name in ("flat", "by group"):
        assert_equal(found[name]["after"], found["stock"]["after"], name)


@pytest.mark.quick(2)
@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("prefix", [False, True])
def test_directory_of_stock_dcp(flat: bool, prefix: bool, tmp_path: Path) -> None:
    reference = Reference().train(1, 2)
    save_with_dcp(reference, tmp_path / "stock", flat=flat, prefix=prefix)
    conversion = to_dcp(tmp_path / "stock", tmp_path / "out", bare_keys=not prefix)
    assert (conversion.lost, conversion.notes) == ([], [])
    assert_equal(tensors_in(tmp_path / "out"), tensors_in(tmp_path / "stock"))
    ours = Ours(tmp_path / "run")
    ours.optimizer.restore(checkpoint=tmp_path / "out")
    ours.train(3).store.close()
    assert_equal(
        {key: t for key, t in ours.model.state_dict().items() if key != "mean"},
        {key: t for key, t in reference.train(3).model_state().items() if key != "mean"},
    )


def test_step_and_extra_come_back(tmp_path: Path) -> None:
    ours = Ours(tmp_path / "run").train(1)
    commit_with(ours.store, EXTRA)
    ours.store.checkpoint(tmp_path / "published", model=ours.model)
    ours.store.close()
    first = to_dcp(tmp_path / "published", tmp_path / "first")
    again = to_dcp(tmp_path / "first", tmp_path / "again")
    assert again.step == first.step == 1
    assert again.digests == first.digests
    (contents,) = format_.read([tmp_path / "again"], Reading())
    assert repr(contents.extra) == repr({"kept": {"state": EXTRA}})
    assert contents.groups[1].hyperparameters["betas"] == (0.8, 0.95)
    assert contents.scalars["hidden.bias"] == {"step": 1.0}


def test_a_run_begins_at_the_step_of_a_rule_without_counts(tmp_path: Path) -> None:
    """Muon has no step count of a parameter: the step stands apart."""
    weight = nn.Parameter(torch.eye(4))
    with tierstore.TierStore(tmp_path / "run") as store:
        optimizer = muon.Muon([("weight", weight)], store=store)
        for _ in range(2):
            weight.grad = torch.ones(4, 4)
            optimizer.step()
    to_dcp(tmp_path / "run", tmp_path / "out")
    with tierstore.TierStore(tmp_path / "new") as store:
        assert muon.Muon([("weight", weight)], store=store).restore(tmp_path / "out") == 2
        assert store.step == 2
    convert(tmp_path / "run", tmp_path / "model.safetensors", to="safetensors")
    to_dcp(tmp_path / "model.safetensors", tmp_path / "weights")
    with tierstore.TierStore(tmp_path / "other") as store:
        assert muon.Muon([("weight", weight)], store=store).restore(tmp_path / "weights") == 0


@pytest.mark.parametrize("count", [1, 2])
def test_registered_states_come_back(count: int, tmp_path: Path) -> None:
    """States of random generators come back to one rank: several would draw the same numbers."""
    toy = Toy(tmp_path / "run")
    toy.store.register(common={"epoch": 3}, random=tierstore.RandomState())
    toy.step()
    torch.manual_seed(5)
    toy.store.close()
    committed = torch.rand(2)
    to_dcp(tmp_path / "run", tmp_path / "out")

    def act(ranks: Ranks) -> tuple[int, Any]:
        toy = Toy(tmp_path / "new", process_group=ranks)
        common: dict[str, int] = {}
        toy.store.register(common=common, random=tierstore.RandomState())
        step = toy.store.restore(tmp_path / "out")
        toy.store.close()
        return step, common

    own = torch.rand(2, generator=torch.Generator().manual_seed(6))
    torch.manual_seed(6)
    assert ThreadJob(count).run(act) == [(1, {"epoch": 3})] * count
    assert torch.equal(torch.rand(2), committed if count == 1 else own)


@pytest.mark.parametrize(
    ("key", "written"),
    [
        *(("extra", text) for text in ("{", "[]", '{"of": {"$unknown": 1}}', "[" * 5000, 7)),
        *(("step", value) for value in ("7", -1, 2.0, float("inf"), [1], torch.tensor([1, 2]))),
    ],
)
def test_values_that_no_conversion_writes_are_damage(
    key: str, written: Any, tmp_path: Path
) -> None:
    net = small_net()
    optimizer = stock_adamw(net)
    train(net, optimizer, [1])
    model, states = states_of(net, optimizer)
    save({"model": model, "optimizer": states, f"tierstore.{key}": written}, tmp_path / "saved")
    damage = f"saved: tierstore.{key} does not have the content of its kind"
    with pytest.raises(tierstore.CorruptionError, match=damage):
        convert(tmp_path / "saved", tmp_path / "out", to="torch")
    with pytest.raises(tierstore.CorruptionError, match=damage):
        begun(tmp_path / "saved", tmp_path / "run")


class Odd(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 4))
        self.register_buffer("nothing", torch.empty(0, 3))
        self.register_buffer("scalar", torch.tensor(5))
        self.register_buffer("small", torch.arange(7, dtype=torch.int8))

    def get_extra_state(self) -> Any:
        return {"list": [1, (2.5, "x")], "tensor": torch.arange(3)}

    def set_extra_state(self, state: Any) -> None:
        pass


def test_all_kinds_of_values_of_a_model(tmp_path: Path) -> None:
    model = Odd()
    dcp.save(
        {"model": model.state_dict(), "dataloader": {"epoch": 3, "position": 4}},
        checkpoint_id=tmp_path / "stock",
        no_dist=True,
    )
    conversion = to_dcp(tmp_path / "stock", tmp_path / "out")
    (lost,) = conversion.lost
    assert lost == "'dataloader': 2 values of neither the model nor its optimizer"
    expected = {
        key: value.clone() for key, value in model.state_dict().items() if key != "_extra_state"
    }
    state = {
        "model": {
            **{k: torch.zeros_like(v) for k, v in expected.items()},
            "_extra_state": {"list": None, "tensor": torch.zeros(3, dtype=torch.int64)},
        }
    }
    dcp.load(state, checkpoint_id=tmp_path / "out", no_dist=True)
    extra = state["model"].pop("_extra_state")
    assert extra["list"] == [1, (2.5, "x")]
    assert extra["tensor"].tolist() == [0, 1, 2]
    for key, tensor in state["model"].items():
        assert torch.equal(tensor.float(), expected[key].float()), key
    with pytest.raises(tierstore.TierstoreError, match="not carried: 'dataloader'"):
        convert(tmp_path / "stock", tmp_path / "strict", to="dcp", strict=True)


def test_tensor_of_more_than_one_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(format_, "RECORD_DATA_BYTES_MAX", 1000)
    weight = torch.randn(77, 31)
    dcp.save({"model": {"weight": weight}}, checkpoint_id=tmp_path / "stock", no_dist=True)
    to_dcp(tmp_path / "stock", tmp_path / "out")
    assert torch.equal(tensors_in(tmp_path / "out")["model.weight"], weight)
    assert (
        len(
            dcp.FileSystemReader(tmp_path / "out")
            .read_metadata()
            .state_dict_metadata["model.weight"]
            .chunks
        )
        > 5
    )  # type: ignore[union-attr]


def test_dtype_of_the_weights(tmp_path: Path) -> None:
    reference = Reference().train(1)
    save_with_dcp(reference, tmp_path / "stock", flat=False, prefix=True)
    to_dcp(tmp_path / "stock", tmp_path / "out", dtype=torch.bfloat16)
    before, after = tensors_in(tmp_path / "stock"), tensors_in(tmp_path / "out")
    assert before.keys() == after.keys()
    for key, tensor in before.items():
        cast = key.startswith("model.") and key != "model.mean"
        assert torch.equal(after[key], tensor.to(torch.bfloat16) if cast else tensor), key


def test_states_of_no_group_are_refused_with_the_optimizer(tmp_path: Path) -> None:
    state = {"w": torch.randn(3, 2), "optimizer": {"state": {"w": {"exp_avg": torch.ones(3, 2)}}}}
    dcp.save(state, checkpoint_id=tmp_path / "stock", no_dist=True)
    with pytest.raises(tierstore.CheckpointError, match="convert the weights with --only model"):
        convert(tmp_path / "stock", tmp_path / "out", to="dcp")
    convert(tmp_path / "stock", tmp_path / "out", to="dcp", only="model")
    assert_equal(tensors_in(tmp_path / "out"), {"model.w": state["w"]})
