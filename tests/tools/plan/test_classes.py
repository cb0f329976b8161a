"""Plans of classes of torch.optim, against runs of Paged."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tierstore
from tests.support.class_training import CASES, case_of
from tests.tools.plan.test_footprint import page_file_bytes
from tests.tools.plan.test_rates import exactly, measured
from tierstore.errors import PlanError
from tierstore.optim.classes import ELEMENTWISE
from tierstore.tools.plan.classes import ClassPlan
from tierstore.tools.plan.footprint import StoreOptions
from tierstore.tools.plan.job import Job
from tierstore.tools.plan.models import model_from_module
from tierstore.tools.plan.plan import Plan, plan
from tierstore.tools.plan.rates import Rates, assumed_rates
from tierstore.tools.probe.result import OptimizerRate

OPTIONS: dict[str, Any] = {"page_bytes": 8192, "buffers": 3, "host_memory": 2**20}


def module() -> nn.Module:
    return nn.Sequential(nn.Linear(90, 70), nn.Linear(70, 30)).to(torch.bfloat16)


def planned(algorithm: str, rates: Rates | None = None, **options: Any) -> Plan:
    job = Job(store=StoreOptions(**OPTIONS), optimizer=options)
    rates = rates or assumed_rates(None, on_gpu=False)
    return plan(model_from_module(module()), job, rates, algorithm=algorithm)


@pytest.mark.parametrize("case", CASES)
def test_a_run_has_what_was_planned(case: str, tmp_path: Path) -> None:
    cls, options = case_of(case)
    found = planned(f"torch.optim.{cls.__name__}", **options)
    model = module()
    written = []
    with tierstore.TierStore(tmp_path, **OPTIONS) as store:
        optimizer = tierstore.Paged(model.named_parameters(), cls, store=store, **options)
        for _ in range(2):
            for parameter in model.parameters():
                parameter.grad = torch.ones_like(parameter)
            optimizer.step()
            store.synchronize()
            written.append(store.stats().bytes_written)
        footprint = found.ranks.classes[0].footprint
        assert store.stats().host_bytes_peak == footprint.host_bytes
        assert written[1] - written[0] == footprint.mean_written_bytes
        assert page_file_bytes(tmp_path) == footprint.file_bytes


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
    assert found.keys() == {f"torch.optim.{cls.__name__}" for cls in ELEMENTWISE}
    assert found["torch.optim.SGD"] < found["torch.optim.Adagrad"] < found["torch.optim.Adam"]


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


def test_what_is_measured_gives_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tierstore.tools.plan.classes._SIZES", (64, 256))
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
        ("torch.optim.LBFGS", {}, r"no algorithm 'torch.optim.LBFGS'.*such as 'torch.optim.Adam'"),
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
