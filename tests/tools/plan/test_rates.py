"""Rates of planned machines: from probes, from drives, and between measured shapes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from muon.plan import MuonPlan
from tests.tools.probe.test_result import PROBE, RATE
from tierstore.errors import PlanError
from tierstore.tools.plan.drives import parse_drives
from tierstore.tools.plan.rates import Rates, assumed_rates, disk_rates, measured_rates
from tierstore.tools.probe.result import Bandwidths, OptimizerRate, Probe, Rate

MUON = MuonPlan()


def exactly(value: float) -> Rate:
    return Rate(value, value, value, 1)


def newton_schulz(rows: int, columns: int, flops_per_s: float, count: int = 1) -> OptimizerRate:
    shape = count, rows, columns
    flops, _ = MUON.operations(("newton_schulz", shape, "bfloat16"))
    seconds = exactly(flops / flops_per_s)
    return OptimizerRate("muon", "cpu", "newton_schulz", shape, "bfloat16", seconds)


def measured(*rates: OptimizerRate) -> Rates:
    probe = probe_with(bandwidths=Bandwidths(RATE, RATE, RATE))
    compute = replaced(probe.compute, optimizers=rates)
    return measured_rates(replaced(probe, compute=compute), on_gpu=False)


def replaced(value: Any, **fields: Any) -> Any:
    return replace(value, **fields)


def probe_with(**fields: Any) -> Probe:
    directories = tuple(replaced(one, **fields) for one in PROBE.directories)
    return replaced(PROBE, directories=directories)  # type: ignore[no-any-return]


def damaged(**fields: Any) -> Probe:
    probe = probe_with(bandwidths=Bandwidths(RATE, RATE, RATE))
    found: Probe = replaced(probe, compute=replaced(probe.compute, **fields))
    return found


def work(shape: tuple[int, ...], dtype: str = "float32", seconds: float = 1.0) -> OptimizerRate:
    return OptimizerRate("muon", "cpu", "newton_schulz", shape, dtype, exactly(seconds))


def rate_of(rates: Rates, shape: tuple[int, int, int], dtype: str = "bfloat16") -> float:
    work = "newton_schulz", shape, dtype
    return MUON.operations(work)[0] / rates.seconds({work: 1}, MUON)


def test_between_measured_shapes() -> None:
    wide = newton_schulz(256, 1024, 400e9), newton_schulz(1024, 4096, 600e9)
    square = newton_schulz(256, 256, 100e9), newton_schulz(512, 512, 200e9)
    rates = measured(*wide, *square)
    # Halfway between the logarithms of 256 and 1024.
    assert rate_of(rates, (1, 512, 2048)) == pytest.approx((400e9 * 600e9) ** 0.5)
    # A tall matrix is computed as its transpose.
    assert rate_of(rates, (1, 2048, 512)) == pytest.approx((400e9 * 600e9) ** 0.5)
    # Nearly square matrices have rates of their own; beyond the ends the last one holds.
    assert rate_of(rates, (1, 300, 260)) == pytest.approx(100e9, rel=0.05)
    assert rate_of(rates, (1, 4096, 4096)) == pytest.approx(200e9)
    assert rate_of(rates, (1, 8, 64)) == pytest.approx(400e9)
    # Of another dtype nothing was measured.
    assert rate_of(rates, (1, 1024, 4096), "float32") == pytest.approx(600e9)


def test_batches_have_rates_of_their_own() -> None:
    one, batch = newton_schulz(128, 128, 50e9), newton_schulz(128, 128, 80e9, count=8)
    assert rate_of(measured(one, batch), (20, 128, 128)) == pytest.approx(80e9)
    assert rate_of(measured(one), (20, 128, 128)) == pytest.approx(50e9)


def elements(rows: int, columns: int, seconds: float) -> OptimizerRate:
    return OptimizerRate(
        "muon", "cpu", "adamw_elements", (1, rows, columns), "float32", exactly(seconds)
    )


def test_elements_take_their_time_per_byte() -> None:
    works = {("adamw_elements", (1, 1, 500_000), "float32"): 3}
    assert measured(elements(1000, 1000, 2.0)).seconds(works, MUON) == pytest.approx(3.0)


def test_elements_take_what_a_call_takes() -> None:
    """1 ms for each call, and 1 ns for each element."""
    rates = measured(elements(100, 100, 1.01e-3), elements(1000, 1000, 2e-3))
    for numel in (1, 10_000, 500_000, 10**9):
        works = {("adamw_elements", (1, 1, numel), "float32"): 2}
        expected = 2 * (1e-3 + 1e-9 * numel)
        assert rates.seconds(works, MUON) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("small_s", "numel", "expected"),
    [
        (3e-3, 10**9, 2e-3),  # A disturbed measurement: more elements never take less time.
        (3e-3, 1, 2e-3),
        (1e-6, 10**9, 2.0),  # The caches held the small one.
        (1e-6, 1, 2e-9),
    ],
)
def test_each_work_takes_time(small_s: float, numel: int, expected: float) -> None:
    """1000 x 1000 elements took 2 ms; what 100 x 100 took does not agree with it."""
    rates = measured(elements(100, 100, small_s), elements(1000, 1000, 2e-3))
    works = {("adamw_elements", (1, 1, numel), "float32"): 1}
    assert rates.seconds(works, MUON) == pytest.approx(expected)


def test_what_was_not_measured_is_assumed_and_said() -> None:
    drives = parse_drives("2x4TB@7/5GB/s")
    rates = assumed_rates(drives, on_gpu=True, flops=1e14)
    assert rates.disk == disk_rates(drives)
    assert (rates.disk.read, rates.disk.mixed_write) == (14e9, 5e9)
    assert any("100 TFLOP/s of the model" in text for text in rates.assumed)
    large = "newton_schulz", (1, 4096, 4096), "bfloat16"
    assert rates.seconds({large: 3}, MUON) == pytest.approx(3 * 30 * 4096**3 / 1e14)
    said = " ".join(assumed_rates(drives, on_gpu=True, pcie=5e10, network=1e10).assumed)
    assert "between host and GPU" not in said
    assert "network" not in said
    # A probe of the optimizer leaves the network alone.
    assert [text.split(" at ")[0] for text in measured(newton_schulz(8, 8, 1)).assumed] == [
        "the network"
    ]


def test_a_probe_gives_the_rates_of_its_disks() -> None:
    figures = Bandwidths(exactly(3e9), exactly(5e9), exactly(6e9))
    rates = measured_rates(probe_with(bandwidths=figures), on_gpu=False)
    assert rates.disk is not None
    assert (rates.disk.write, rates.disk.read) == (3e9, 5e9)
    assert rates.disk.mixed_read == rates.disk.mixed_write == 3e9  # The bytes of both count.
    together = Bandwidths(exactly(6e9), exactly(9e9), exactly(10e9))
    both = replaced(PROBE, together=together, directories=PROBE.directories * 2)
    found = measured_rates(both, on_gpu=False).disk
    assert found is not None
    assert found.read == 9e9


@pytest.mark.parametrize(
    ("probe", "on_gpu", "message"),
    [
        (PROBE, False, "no rate of reads"),
        (probe_with(bandwidths=Bandwidths(RATE, RATE, RATE)), True, "machine without a GPU"),
        (replaced(PROBE, directories=()), False, "no directory"),
        (damaged(checksum=exactly(0.0)), False, "the rate 'checksum' must be above 0"),
        (damaged(optimizers=(work((1, 2, 3), seconds=0.0),)), False, "which cannot be"),
        (damaged(optimizers=(work((4, 4)),)), False, "of shape .4, 4., .* cannot be"),
        (damaged(optimizers=(work((1, 0, 0)),)), False, "which cannot be"),
        (damaged(optimizers=(work((1, 2, 2), "zork"),)), False, "dtype 'zork' .* cannot be"),
    ],
)
def test_a_probe_that_does_not_fit_is_refused(probe: Probe, on_gpu: bool, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        measured_rates(probe, on_gpu=on_gpu)


def test_rates_that_cannot_be_are_refused() -> None:
    for options in ({"network": 0.0}, {"pcie": -1.0}, {"flops": float("nan")}):
        with pytest.raises(PlanError, match="must be above 0 and finite"):
            assumed_rates(None, on_gpu=True, **options)


def test_ranks_share_a_measured_processor() -> None:
    probe = damaged(optimizers=(newton_schulz(512, 512, 1e12),))
    one, two = (measured_rates(probe, on_gpu=False, cpu_ranks=count) for count in (1, 2))
    assert rate_of(two, (1, 512, 512)) == pytest.approx(rate_of(one, (1, 512, 512)) / 2)
    # Rates of another device say nothing.
    elsewhere = replaced(newton_schulz(512, 512, 1e12), device="cuda")
    assert (
        "matrix products"
        in measured_rates(damaged(optimizers=(elsewhere,)), on_gpu=False).assumed[0]
    )
