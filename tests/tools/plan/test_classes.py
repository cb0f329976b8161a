"""Plans of classes of optimizers, against runs of Paged."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tierstore
from tests.rank_programs.classes import measure
from tests.support.class_training import CASES, WHOLE, case_of
from tests.support.rank_pool import RankPool
from tests.tools.plan.test_footprint import page_file_bytes
from tests.tools.plan.test_rates import exactly, measured
from tierstore.errors import PlanError
from tierstore.optim.classes import ELEMENTWISE
from tierstore.tools.plan.classes import ClassPlan
from tierstore.tools.plan.footprint import Footprint, StoreOptions
from tierstore.tools.plan.job import Job
from tierstore.tools.plan.model_files import model_from_listing
from tierstore.tools.plan.models import model_from_module
from tierstore.tools.plan.plan import Plan, plan, to_plain
from tierstore.tools.plan.rates import Rates, assumed_rates
from tierstore.tools.probe.result import OptimizerRate

OPTIONS: dict[str, Any] = {"page_bytes": 8192, "buffers": 3, "host_memory": 2**20}


def module() -> nn.Module:
    torch.manual_seed(0)
    layers = (nn.Linear(90, 70), nn.Linear(70, 70), nn.Linear(70, 30))
    return nn.Sequential(*layers).to(torch.bfloat16)


def planned(algorithm: str, rates: Rates | None = None, **options: Any) -> Plan:
    return planned_on(1, algorithm, rates, **options)


def planned_on(
    ranks: int, algorithm: str, rates: Rates | None = None, partition: str = "ddp", **options: Any
) -> Plan:
    store = StoreOptions(**OPTIONS)
    job = Job(cpu_ranks=ranks, partition=partition, store=store, optimizer=options)
    rates = rates or assumed_rates(None, on_gpu=False)
    return plan(model_from_module(module()), job, rates, algorithm=algorithm)


def algorithm_of(case: str) -> tuple[str, dict[str, Any]]:
    """Return the name of the class of a case, and options."""
    cls, options = case_of(case)
    package = "torch.optim" if cls.__module__.startswith("torch.") else "pytorch_optimizer"
    return f"{package}.{cls.__name__}", options


@pytest.mark.quick(7)
@pytest.mark.parametrize("case", [*CASES, *WHOLE])
def test_a_run_has_what_was_planned(case: str, tmp_path: Path) -> None:
    algorithm, options = algorithm_of(case)
    [found] = planned(algorithm, **options).ranks.classes
    counters = measure(algorithm, module(), tmp_path, OPTIONS, options)
    require_equal(found.footprint, *counters)
    assert page_file_bytes(tmp_path) == found.footprint.file_bytes


@pytest.mark.long
@pytest.mark.parametrize("case", WHOLE)
def test_ranks_own_what_was_planned(case: str, pool: RankPool, tmp_path: Path) -> None:
    algorithm, options = algorithm_of(case)
    found = planned_on(2, algorithm, **options).ranks
    program = "tests.rank_programs.classes:measure"
    counters = pool.run(2, program, algorithm, module(), tmp_path, OPTIONS, options)
    assert {one.rank for one in found.classes} == {0, 1}
    for one in found.classes:
        require_equal(one.footprint, *counters[one.rank])
    assert page_file_bytes(tmp_path) == found.total("file_bytes")


def require_equal(found: Footprint, before: tierstore.Stats, after: tierstore.Stats) -> None:
    """Check a footprint by the counters before and after a step."""
    assert after.host_bytes_peak == found.host_bytes
    assert after.state_bytes == found.state_bytes
    assert sum(after.pages_in.values()) == len(found.pages)
    assert after.bytes_read - before.bytes_read == found.step_read_bytes
    assert after.bytes_written - before.bytes_written == found.mean_written_bytes


def test_ranks_share_parameters_by_cost() -> None:
    """By elements, or bytes, one rank would have the vector, and the other both matrices."""
    model = model_from_listing({"vector": [10_000], "one": [64, 64], "other": [64, 64]})
    job = Job(cpu_ranks=2, partition="ddp")
    rates = assumed_rates(None, on_gpu=False)
    found = plan(model, job, rates, algorithm="pytorch_optimizer.SOAP")
    owned = {
        shard.spec.name: [stop - start for start, stop in shard.ranges]
        for subgroup in found.ranks.subgroups
        for shard in subgroup.shards
    }
    assert owned["one"] == owned["other"][::-1]


def test_ranks_with_most_state_are_laid_out() -> None:
    """Factors take more than the elements of the other ranks."""
    shapes = {"matrix": [80, 81], **{f"vector{number}": [10_000] for number in range(9)}}
    job = Job(cpu_ranks=10, partition="ddp", store=StoreOptions(page_bytes=4096))
    rates = assumed_rates(None, on_gpu=False)
    found = plan(model_from_listing(shapes), job, rates, algorithm="pytorch_optimizer.SOAP")
    assert len(found.ranks.classes) == 8
    assert found.ranks.most("state_bytes") >= 4 * (3 * 80 * 81 + 2 * (80**2 + 81**2))


def test_memory_of_a_step_has_its_states_and_eight_factors() -> None:
    """Of the largest page, which is the first weight."""
    numel, states = 70 * 90, 2 * 70 * 90 + 2 * (70**2 + 90**2)
    found = planned("pytorch_optimizer.SOAP").ranks.matrix_bytes
    assert found == 4 * (3 * numel + states + 8 * 90**2)


def test_the_code_makes_what_was_planned() -> None:
    found = planned("torch.optim.RMSprop", momentum="0.9", centered="True")
    assert found.call == (
        "tierstore.Paged(model.named_parameters(), torch.optim.RMSprop, store=store, momentum=0.9, "
        "centered=True)"
    )
    names = {"tierstore": tierstore, "torch": torch, "model": module(), "store": None}
    [group] = eval(found.call, names).paged_groups()
    specs = [parameter.spec for parameter in group.parameters]
    plan_of = ClassPlan().plan(
        names["model"], found.algorithm, on_gpu=False, options={"momentum": 0.9, "centered": True}
    )
    assert [parameter.spec for parameter in plan_of.groups[0].parameters] == specs


def test_the_classes_stand_beside_each_other() -> None:
    found = {one.algorithm: one.state_bytes for one in planned("torch.optim.SGD").beside}
    classes = (*ELEMENTWISE, torch.optim.Adafactor)
    assert found.keys() == {f"torch.optim.{cls.__name__}" for cls in classes}
    assert found["torch.optim.SGD"] < found["torch.optim.Adagrad"] < found["torch.optim.Adam"]
    assert found["torch.optim.SGD"] < found["torch.optim.Adafactor"] < found["torch.optim.Adagrad"]


def test_time_is_measured_for_the_class_and_goes_by_bytes() -> None:
    """22 bytes of an element are measured in bfloat16; momentum adds 8."""
    rates = assumed_rates(None, on_gpu=False)
    numel, name = model_from_module(module()).parameter_count, "torch.optim.RMSprop"
    rate = OptimizerRate("torch", "cpu", name, (2, 1, numel), "bfloat16", exactly(22.0))
    probed = replace(rates, measured=[rate])
    for options, expected in (({}, 22), ({"momentum": 0.9}, 30)):
        time = planned(name, probed, **options).time
        assert time.lanes["compute"] == pytest.approx(expected)
    other = replace(rates, measured=[replace(rate, optimizer="muon", work="muon_elements")])
    text = "memory of the optimizer at 20 GB/s: the probe lacks 'torch'"
    assert text in planned(name, other).rates.assumed
    assert text not in planned(name, probed).rates.assumed


def test_adafactor_keeps_rows_and_columns_of_matrices() -> None:
    """14 bytes of an element are measured; the biases have a state of their shape."""
    name = "torch.optim.Adafactor"
    weights, biases = 70 * 90 + 70 * 70 + 70 * 30, 70 + 70 + 30
    rate = OptimizerRate("torch", "cpu", name, (1, 1, weights), "bfloat16", exactly(14.0))
    rates = replace(assumed_rates(None, on_gpu=False), measured=[rate])
    expected = 14 + 22 * biases / weights
    assert planned(name, rates).time.lanes["compute"] == pytest.approx(expected)


def test_time_of_a_class_that_is_not_measured_is_unknown() -> None:
    found = planned("pytorch_optimizer.SOAP", precondition_frequency="10")
    assert not found.is_timed
    assert found.days is found.free_model_s is None
    assert not found.changes
    assert "compute" not in found.time.lanes
    assert "the computation of pytorch_optimizer.SOAP is left out" in found.rates.assumed[-1]
    [own] = found.beside  # No class of torch has the option.
    assert (own.algorithm, own.step_s, own.days) == (found.algorithm, None, None)
    step = to_plain(found)["step"]
    unknown = ("seconds", "resident_seconds", "exposed_seconds", "bottleneck")
    assert [step[key] for key in unknown] == [None] * 4
    assert "the optimizer's computation" not in step["busy_seconds"]
    beside = {one.algorithm: one.step_s for one in planned("pytorch_optimizer.SOAP").beside}
    assert beside.pop("pytorch_optimizer.SOAP") is None
    assert all(beside.values())


def test_parts_of_parameters_are_refused_by_classes_that_see_whole_ones() -> None:
    for algorithm in ("torch.optim.Adafactor", "pytorch_optimizer.SOAP"):
        with pytest.raises(PlanError, match=r"'fsdp' cuts '0.weight': plan with 'ddp'"):
            planned_on(2, algorithm, partition="fsdp")
    beside = planned_on(2, "torch.optim.SGD", partition="fsdp").beside
    assert "torch.optim.Adafactor" not in {one.algorithm for one in beside}
    job = Job(gpus=2, optimizer={"fused": "True"})  # On a CPU they see whole ones.
    rates = assumed_rates(None, on_gpu=True)
    found = plan(model_from_module(module()), job, rates, algorithm="torch.optim.AdamW")
    assert found.call.endswith("fused=True)")


def test_what_is_measured_gives_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tierstore.tools.plan.classes._SIZES", (8, 16))
    rates = [
        OptimizerRate("torch", "cpu", work, shape, dtype, exactly(min(seconds)))
        for (work, shape, dtype), seconds in ClassPlan().rates(torch.device("cpu"))
    ]
    found = planned("torch.optim.SGD", measured(*rates))
    assert found.time.lanes["compute"] > 0
    assert {one.algorithm for one in found.beside} == {*ClassPlan.algorithms}


@pytest.mark.parametrize(
    ("algorithm", "options", "message"),
    [
        ("SGD", {}, r"no algorithm 'SGD'.*or a class .* such as 'torch.optim.Adam'"),
        ("absent_package.Lion", {}, r"absent_package.Lion cannot be imported \(ModuleNotFound"),
        ("torch.optim.Lion", {}, r"torch.optim.Lion cannot be imported \(AttributeError"),
        ("torch.nn.Linear", {}, r"needs a class of optimizers.* got <class 'torch.nn.*Linear'>"),
        ("torch.optim.LBFGS", {}, r"refuses the job: LBFGS cannot be in pages: it evaluates"),
        ("pytorch_optimizer.SOAP", {"lr": "-1"}, r"SOAP: NegativeLRError: learning rate must be"),
        ("torch.optim.Adam", {"momentum": "0.9"}, r"refuses the job: .*argument 'momentum'"),
        ("torch.optim.Adam", {"capturable": "True"}, r"capturable=True of Adam cannot be in pages"),
        ("torch.optim.SGD", {"momentum": "-1"}, "Invalid momentum value: -1"),
    ],
)
def test_what_pages_cannot_have_is_refused(
    algorithm: str, options: dict[str, str], message: str
) -> None:
    with pytest.raises(PlanError, match=message):
        planned(algorithm, **options)
