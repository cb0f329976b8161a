from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierstore.units import (
    SECTOR_BYTES,
    Extent,
    align_up,
    format_bytes,
    parse_bytes,
    parse_endurance,
)


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("0", 0),
        ("4096", 4096),
        ("7B", 7),
        ("16GiB", 16 * 2**30),
        ("256MiB", 256 * 2**20),
        ("3KiB", 3 * 1024),
        ("2TiB", 2 * 2**40),
        ("1.5 MB", 1_500_000),
        ("2kb", 2000),
        ("1GB", 10**9),
        ("0.5TB", 5 * 10**11),
        ("16.06PB", 16_060_000_000_000_000),
        ("9223372036854775807", 2**63 - 1),
        ("  8 gib\n", 8 * 2**30),
    ],
)
def test_parse_text(text: str, nbytes: int) -> None:
    assert parse_bytes(text) == nbytes


@given(st.integers(0, 2**63 - 1))
def test_parse_int_is_itself(nbytes: int) -> None:
    assert parse_bytes(nbytes) == nbytes


@pytest.mark.parametrize(
    "text",
    ["", "GiB", "1,5 GB", "1 GB 2", "1XB", "0x10", "1e3", "-1", "nan", "1.GiB", ".5GiB", "9" * 400],
)
def test_parse_refuses_text(text: str) -> None:
    with pytest.raises(ValueError, match="must look like '16GiB'") as error:
        parse_bytes(text)
    assert repr(text) in str(error.value)


@pytest.mark.parametrize("value", [True, 1.5, None, b"16GiB", [1]])
def test_parse_refuses_other_types(value: object) -> None:
    with pytest.raises(ValueError, match="must be an int or a string"):
        parse_bytes(value)  # type: ignore[arg-type]


def test_parse_refuses_negative() -> None:
    with pytest.raises(ValueError, match="must not be negative, got -1"):
        parse_bytes(-1)


@pytest.mark.parametrize("value", [2**63, "9223372036854775808", "8192PiB", 10**30])
def test_parse_refuses_more_than_a_file_may_have(value: int | str) -> None:
    with pytest.raises(ValueError, match="must be below 2\\^63 bytes"):
        parse_bytes(value)


@pytest.mark.parametrize(
    ("value", "nbytes"),
    [
        *(("600TBW", 6 * 10**14), (" 7 pbw\n", 7 * 10**15), ("1.2TBW", 1_200_000_000_000)),
        *(("2.5PBW", 25 * 10**14), (10**9, 10**9)),
    ],
)
def test_parse_endurance(value: int | str, nbytes: int) -> None:
    assert parse_endurance(value) == nbytes


@pytest.mark.parametrize(
    "value",
    [
        *("", "TBW", "0TBW", "0.0PBW", "-1TBW", "nanTBW", "infPBW", "600TB", "600", "600GBW"),
        *("600TBWW", "1DWPD", "6e2TBW", "9224PBW", "9" * 400 + "TBW"),
        *(0, -1, 2**63, True, math.nan, 1e15, b"600TBW"),
    ],
)
def test_other_endurances_are_refused(value: int | str) -> None:
    with pytest.raises(ValueError, match="such as '600TBW' or '7PBW'") as caught:
        parse_endurance(value)
    assert repr(value)[:80] in str(caught.value)
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (1536, "1.5 KiB"),
        (256 * 2**20, "256.0 MiB"),
        (3 * 2**29, "1.5 GiB"),
        (2**40, "1.0 TiB"),
        (2**50, "1024.0 TiB"),
        (-2048, "-2.0 KiB"),
    ],
)
def test_format(nbytes: int, text: str) -> None:
    assert format_bytes(nbytes) == text


@given(st.integers(0, 2**49))
def test_parse_reads_what_format_prints(nbytes: int) -> None:
    # One digit after the point: half of a tenth of the unit is lost at most, and a number
    # printed with a unit is at least nearly one of it.
    assert parse_bytes(format_bytes(nbytes)) == pytest.approx(nbytes, rel=0.051)


@given(st.integers(0, 2**70), st.integers(1, 2**40))
def test_align_up(nbytes: int, alignment: int) -> None:
    aligned = align_up(nbytes, alignment)
    assert aligned % alignment == 0
    assert nbytes <= aligned < nbytes + alignment


def test_extent_is_a_value() -> None:
    extent = Extent(SECTOR_BYTES, 3 * SECTOR_BYTES)
    assert (extent.offset, extent.nbytes) == (4096, 12288)
    assert len({extent, Extent(4096, 12288), Extent(0, 12288)}) == 2


@pytest.mark.parametrize("offset", [-4096, 1, 512])
def test_extent_refuses_offset(offset: int) -> None:
    with pytest.raises(ValueError, match="offset must be a multiple of 4096"):
        Extent(offset, SECTOR_BYTES)


@pytest.mark.parametrize("nbytes", [-4096, 0, 1, 4095])
def test_extent_refuses_nbytes(nbytes: int) -> None:
    with pytest.raises(ValueError, match="nbytes must be a positive multiple of 4096"):
        Extent(0, nbytes)
