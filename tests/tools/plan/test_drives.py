"""Texts that describe drives, and how long drives last."""

from __future__ import annotations

import math
from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierstore.errors import PlanError
from tierstore.tools.plan.drives import Drives, parse_drives, wear_of


def test_the_texts_of_the_guide() -> None:
    assert parse_drives("4x3.84TB@7/5GB/s,1DWPD") == Drives(
        count=4,
        capacity=3_840_000_000_000,
        read_rate=7e9,
        write_rate=5e9,
        endurance=3.84e12 * 365 * 5,
    )
    assert parse_drives("2TB@3500/3000MB/s,1200TBW").endurance == 1.2e15
    assert parse_drives("2TB@3500/3000MB/s,7PBW").endurance == 7e15
    assert parse_drives(" 1x1TiB@1/0.5GiB/s ") == Drives(
        count=1, capacity=2**40, read_rate=2**30, write_rate=2**29, endurance=None
    )


UNITS = {"MB": 10**6, "GB": 10**9, "TB": 10**12, "PB": 10**15}
UNITS |= {"MiB": 2**20, "GiB": 2**30, "TiB": 2**40, "PiB": 2**50}


@given(
    count=st.integers(1, 1000),
    capacity=st.decimals("0.01", "999", places=2),
    capacity_unit=st.sampled_from(sorted(UNITS)),
    rates=st.tuples(st.integers(1, 9999), st.integers(1, 9999)),
    rate_unit=st.sampled_from([unit for unit in sorted(UNITS) if unit[0] != "P"]),
    dwpd=st.none() | st.decimals("0.1", "60", places=1),
)
def test_every_text(
    count: int,
    capacity: Decimal,
    capacity_unit: str,
    rates: tuple[int, int],
    rate_unit: str,
    dwpd: Decimal | None,
) -> None:
    text = f"{count}x{capacity}{capacity_unit}@{rates[0]}/{rates[1]}{rate_unit}/s"
    drives = parse_drives(text if dwpd is None else f"{text},{dwpd}DWPD")
    assert drives.count == count
    assert drives.capacity == int(capacity * UNITS[capacity_unit])
    assert drives.read_rate == rates[0] * UNITS[rate_unit]
    assert drives.write_rate == rates[1] * UNITS[rate_unit]
    if dwpd is None:
        assert drives.endurance is None
    else:
        assert drives.endurance == pytest.approx(float(dwpd) * drives.capacity * 1825)


@pytest.mark.parametrize(
    "text",
    [
        *("", "4x", "4x3.84TB", "1x1TB@1GB/s", "1x1XB@1/1GB/s", "1 x1TB@1/1GB/s", "9" * 10_000),
        *("-1x1TB@1/1GB/s", "1x1TB@1e9/1GB/s", "1x1TB@nan/1GB/s"),
        *("0x1TB@1/1GB/s", "1x0TB@1/1GB/s", "1x1TB@0/1GB/s", "1x1TB@1/1GB/s,0DWPD"),
        *("1x1TB@1/1GB/s,1", "1x1TB@1/1GB/s,1DWPD,1TBW", "1x1TB@1/1GB/s,0TBW"),
        *("1x99999PB@1/1GB/s", "1x1TB@1/1GB/s,99999PBW"),
    ],
)
def test_other_texts_are_refused(text: str) -> None:
    with pytest.raises(PlanError, match=r"4x3\.84TB@7/5GB/s,1DWPD") as caught:
        parse_drives(text)
    assert len(str(caught.value)) < 350


@given(st.text(max_size=40))
def test_any_text_is_parsed_or_refused(text: str) -> None:
    try:
        drives = parse_drives(text)
    except PlanError:
        return
    assert drives.nbytes > 0


def test_one_small_drive_under_8e9_parameters() -> None:
    """415 TB a day are 108 writes of a drive of 3.84 TB."""
    drive = parse_drives("3.84TB@7/5GB/s,1DWPD")
    wear = wear_of(drive, step_bytes=8e9 * 6, step_s=10)
    assert round(wear.bytes_per_day / 1e12) == 415
    assert round(wear.drive_writes_per_day) == 108
    assert wear.days is not None
    assert wear.days == pytest.approx(1825 / wear.drive_writes_per_day)
    assert wear_of(drive, step_bytes=8e9 * 6, step_s=10, used=0.5).days == wear.days / 2
    assert wear_of(drive, step_bytes=8e9 * 6, step_s=10, used=1.2).days == 0


@given(
    drives=st.integers(1, 100),
    step_bytes=st.integers(1, 10**15),
    step_s=st.floats(0.01, 1e5),
    tbw=st.integers(1, 10**5),
)
def test_day_by_day(drives: int, step_bytes: int, step_s: float, tbw: int) -> None:
    """Writing for the days that drives last uses their endurance up."""
    of = parse_drives(f"{drives}x1TB@1/1GB/s,{tbw}TBW")
    wear = wear_of(of, step_bytes=step_bytes, step_s=step_s)
    assert wear.days is not None
    assert wear.steps is not None
    assert wear.days * wear.bytes_per_day == pytest.approx(drives * tbw * 1e12)
    assert wear.steps * step_bytes == pytest.approx(drives * tbw * 1e12)


def test_what_is_not_written_or_not_known() -> None:
    assert wear_of(parse_drives("1TB@1/1GB/s,1TBW"), step_bytes=0, step_s=1).days == math.inf
    assert wear_of(parse_drives("1TB@1/1GB/s"), step_bytes=1, step_s=1).days is None
