"""The result of a probe as JSON: the same back, anything else refused by name."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tierstore.errors import PlanError
from tierstore.tools.probe.result import (
    Bandwidths,
    Compute,
    DirectoryProbe,
    Drive,
    Machine,
    OptimizerRate,
    Probe,
    Rate,
    Sustained,
)

NUMBERS = st.floats(0, 1e300, allow_nan=False)
COUNTS = st.integers(0, 2**63 - 1)
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
RATES = st.builds(Rate, NUMBERS, NUMBERS, NUMBERS, COUNTS)
MAYBE = st.none() | RATES
BANDWIDTHS = st.builds(Bandwidths, RATES, MAYBE, MAYBE)
DRIVES = st.builds(
    Drive, TEXTS, st.none() | TEXTS, st.none() | COUNTS, st.none() | COUNTS, st.none() | TEXTS
)
DIRECTORIES = st.builds(
    DirectoryProbe,
    path=TEXTS,
    engine=TEXTS,
    engine_reason=TEXTS,
    direct=st.booleans(),
    memory_alignment=st.none() | COUNTS,
    offset_alignment=st.none() | COUNTS,
    filesystem=COUNTS,
    free_bytes=COUNTS,
    page_bytes=COUNTS,
    pages_in_flight=COUNTS,
    written_bytes=COUNTS,
    bandwidths=BANDWIDTHS,
    sustained=st.none() | st.builds(Sustained, COUNTS, RATES, NUMBERS),
    commit_seconds=RATES,
    drives=st.lists(DRIVES, max_size=2).map(tuple),
    notes=st.lists(TEXTS, max_size=2).map(tuple),
)
MACHINES = st.builds(
    Machine,
    host=TEXTS,
    cpu=TEXTS,
    cores=COUNTS,
    threads=COUNTS,
    memory_bytes=COUNTS,
    kernel=TEXTS,
    torch=TEXTS,
    gpu=st.none() | TEXTS,
    locked_memory_bytes=st.none() | COUNTS,
    huge_pages=st.none() | TEXTS,
)
OPTIMIZERS = st.builds(
    OptimizerRate, TEXTS, TEXTS, TEXTS, st.lists(COUNTS, max_size=3).map(tuple), TEXTS, RATES
)
COMPUTES = st.builds(
    Compute, RATES, RATES, RATES, MAYBE, MAYBE, st.lists(OPTIMIZERS, max_size=2).map(tuple)
)
PROBES = st.builds(
    Probe,
    TEXTS,
    MACHINES,
    st.lists(DIRECTORIES, max_size=2).map(tuple),
    st.none() | BANDWIDTHS,
    COMPUTES,
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=5,
)

RATE = Rate(2.0, 1.0, 3.0, 5)
PROBE = Probe(
    "2026-01-01T00:00:00+00:00",
    Machine("h", "c", 2, 2, 8, "Linux", "2.9", None, None, "always"),
    (
        DirectoryProbe(
            *("/d", "io_uring", "", True, 512, 512, 7, 1, 2, 3, 4, Bandwidths(RATE, None, None)),
            *(None, RATE, (Drive("sda", None, None, None, "no"),), ()),
        ),
    ),
    None,
    Compute(
        RATE, RATE, RATE, None, None, (OptimizerRate("m", "cpu", "w", (1, 2, 3), "float32", RATE),)
    ),
)


def places(value: Any, way: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the keys and indices that lead to every value inside a JSON value."""
    inner: Any = ()
    if isinstance(value, dict | list):
        inner = value.items() if isinstance(value, dict) else enumerate(value)
    found = []
    for key, item in inner:
        found += [(*way, key), *places(item, (*way, key))]
    return found


def changed(way: tuple[Any, ...], value: Any) -> str:
    """Return the JSON of PROBE with another value at one place."""
    body = json.loads(PROBE.to_json())
    inner = body
    for key in way[:-1]:
        inner = inner[key]
    inner[way[-1]] = value
    return json.dumps(body)


@given(PROBES)
@settings(suppress_health_check=[HealthCheck.too_slow])
def test_json_gives_the_same_probe(probe: Probe) -> None:
    assert json.loads(probe.to_json())["format"] == 2
    assert Probe.from_json(probe.to_json()) == probe


@given(st.text() | JSON.map(json.dumps) | st.binary())
def test_garbage_is_refused(text: str | bytes) -> None:
    with pytest.raises(PlanError, match="file is not the result of a probe"):
        Probe.from_json(text, "file")


@given(st.sampled_from(places(json.loads(PROBE.to_json()))), JSON)
@settings(max_examples=300)
def test_a_changed_value_is_refused_or_kept(way: tuple[Any, ...], value: Any) -> None:
    """Accepted values are written as they were read: none is dropped, none has another type."""
    text = changed(way, value)
    try:
        probe = Probe.from_json(text)
    except PlanError:
        return
    assert json.loads(probe.to_json()) == json.loads(text)


@pytest.mark.parametrize(
    ("way", "value", "message"),
    [
        (("format",), 1, "'format' is not 2"),
        (("machine", "cores"), -1, r"'machine\.cores' is not a count"),
        (("machine", "cores"), True, r"'machine\.cores' is not a count"),
        (("machine", "host"), None, r"'machine\.host' is not a text"),
        (("machine", "more"), 1, r"'machine\.more' is not known"),
        (("directories", 0, "direct"), 1, r"'directories\[0\]\.direct' is not true or false"),
        (("directories", 0, "drives"), {}, r"'directories\[0\]\.drives' is not a list or object"),
        (("compute", "copy", "median"), -1.0, r"'compute\.copy\.median' is not a number"),
        (("compute", "copy", "median"), float("inf"), r"'compute\.copy\.median' is not a number"),
        (("compute", "copy"), {"median": 1.0}, r"'compute\.copy\.highest' is missing"),
    ],
)
def test_wrong_values_are_named(way: tuple[Any, ...], value: Any, message: str) -> None:
    with pytest.raises(PlanError, match=f"x.json is not the result of a probe: {message}"):
        Probe.from_json(changed(way, value), "x.json")


def test_keys_twice_are_refused() -> None:
    with pytest.raises(PlanError):
        Probe.from_json(PROBE.to_json().replace('"cores": 2', '"cores": 2, "cores": 2'))
