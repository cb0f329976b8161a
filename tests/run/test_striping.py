"""Pages are striped in proportion to weights, evenly, and always in the same way."""

from __future__ import annotations

import itertools
import json
import math
from collections import Counter
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from tierstore.errors import CorruptionError, RunDirectoryError
from tierstore.run.striping import NamedDirectory, Striping, match, stripe, weights_of

WEIGHTS = st.lists(st.integers(1, 99), min_size=1, max_size=6)
BANDWIDTHS = st.lists(st.floats(1e5, 1e11), min_size=1, max_size=8)


@pytest.mark.parametrize(
    ("weights", "expected"),
    [
        ([7], [0]),
        ([10, 10], [0, 1]),
        ([10, 10, 10], [0, 1, 2]),
        ([20, 10], [0, 1, 0]),
        ([30, 10], [0, 0, 1, 0]),
        ([1100, 1000], [0, 1] * 10 + [0]),
        ([200, 200, 100], [0, 1, 2, 0, 1]),
    ],
)
def test_rounds_by_hand(weights: list[int], expected: list[int]) -> None:
    assert list(stripe(weights)) == expected


@given(WEIGHTS)
def test_a_round_has_exactly_the_shares(weights: list[int]) -> None:
    counts = Counter(stripe(weights))
    divisor = math.gcd(*weights)
    assert [counts[place] for place in range(len(weights))] == [w // divisor for w in weights]


@given(WEIGHTS)
def test_every_beginning_is_near_the_shares(weights: list[int]) -> None:
    """Never a page ahead; of two directories so never a page behind."""
    shares = [Fraction(weight, sum(weights)) for weight in weights]
    counts = [0] * len(weights)
    for pages, place in enumerate(stripe(weights), start=1):
        counts[place] += 1
        ahead = [count - pages * share for count, share in zip(counts, shares, strict=True)]
        assert max(ahead) < 1
        assert min(ahead) >= -sum(Fraction(1, n) for n in range(1, len(weights)))


@given(st.integers(1, 99), st.integers(1, 99))
def test_consecutive_pages_alternate_as_far_as_the_shares_let_them(one: int, other: int) -> None:
    """The slower of two directories never gets two in a row."""
    places = stripe([one, other]) * 2
    slower = 0 if one < other else 1
    assert (slower, slower) not in itertools.pairwise(places)


@given(BANDWIDTHS)
def test_weights_are_the_bandwidths_in_two_digits(bandwidths: list[float]) -> None:
    weights = weights_of(bandwidths)
    fastest = max(*bandwidths, 1e8)
    for bandwidth, weight in zip(bandwidths, weights, strict=True):
        assert weight >= 1
        assert len(str(weight).rstrip("0")) <= 2
        expected = max(bandwidth, fastest / 100) / 1e6
        assert abs(weight - expected) <= max(0.05 * expected, 0.5) * 1.0001
    assert len(stripe(weights)) < 10**5


@pytest.mark.parametrize(
    ("bandwidths", "expected"),
    [
        ([2.345e9, 1.15e9], (2300, 1200)),
        ([999e6, 996e6, 994e6], (1000, 1000, 990)),
        ([7e9, 1e3], (7000, 70)),
        ([1e3], (1,)),
    ],
)
def test_weights_by_hand(bandwidths: list[float], expected: tuple[int, ...]) -> None:
    assert weights_of(bandwidths) == expected


# -------------------------------------------------------------------------- the file


def striping(index: int = 0, name: str = "d", count: int = 2) -> Striping:
    return Striping(
        striping_id=name,
        index=index,
        directories=tuple(f"/disk{number}/run/rank-00000" for number in range(count)),
        weights=(10,) * count,
    )


def test_the_file_by_hand() -> None:
    head, _, text = striping(1).to_bytes().partition(b"\n")
    assert head == b"tierstore striping 1 " + xxhash.xxh3_128_hexdigest(text).encode()
    assert json.loads(text) == {
        "striping_id": "d",
        "index": 1,
        "directories": ["/disk0/run/rank-00000", "/disk1/run/rank-00000"],
        "weights": [10, 10],
    }
    assert Striping.from_bytes(striping(1).to_bytes(), "here") == striping(1)


def test_every_flipped_bit_is_seen() -> None:
    whole = striping().to_bytes()
    for position in range(len(whole)):
        damaged = whole[:position] + bytes([whole[position] ^ 4]) + whole[position + 1 :]
        with pytest.raises((CorruptionError, RunDirectoryError)):
            Striping.from_bytes(damaged, "here")


@pytest.mark.parametrize(
    "change",
    [
        {"index": 2},
        {"index": -1},
        {"index": True},
        {"weights": (10,)},
        {"weights": (10, 0)},
        {"weights": (10, 0.5)},
        {"weights": (10**12, 1)},
        {"directories": ("/one", 2)},
        {"directories": (), "weights": ()},
        {"striping_id": 7},
    ],
)
def test_what_cannot_be_is_refused(change: dict[str, Any]) -> None:
    body = {"striping_id": "d", "index": 0, "directories": ("/1", "/2"), "weights": (1, 2)}
    Striping(**body)  # type: ignore[arg-type]
    with pytest.raises(ValueError):
        Striping(**(body | change))


# ------------------------------------------------------------------------- matching


def held(
    name: str, of: Striping | None = None, *, has_run: bool | None = None, at: str = ""
) -> NamedDirectory:
    """A directory with a page in it if it has a striping, unless something else is said."""
    return NamedDirectory(
        location=at or f"/{name}/run/rank-00000",
        striping=of,
        has_run=of is not None if has_run is None else has_run,
    )


@pytest.mark.parametrize("has_run", list(itertools.product([True, False], repeat=3)))
def test_all_directories_of_a_striping_are_right_in_any_order(has_run: Sequence[bool]) -> None:
    """Whatever of the run is in them: a crash may have removed any of it."""
    three = [
        held(f"disk{index}", striping(index, count=3), has_run=has_run[index]) for index in range(3)
    ]
    for directories in itertools.permutations(three):
        found = match(directories)
        assert found is not None
        assert found.striping_id == "d"


@pytest.mark.parametrize(
    "directories",
    [
        [held("a"), held("b")],
        [held("disk0", striping(0), has_run=False)],
        [held("disk0", striping(0), has_run=False), held("disk1")],
        [held("disk1"), held("disk0", striping(0), has_run=False), held("new")],
        [
            held("disk0", striping(0, count=3), has_run=False),
            held("disk1", striping(1, count=3), has_run=False),
            held("disk2"),
        ],
    ],
)
def test_nothing_of_a_run_is_a_place_to_begin_in(directories: list[NamedDirectory]) -> None:
    assert match(directories) is None


BOTH = r"/disk0/run and /disk1/run"


@pytest.mark.parametrize(
    ("directories", "expected"),
    [
        ([held("disk0", striping(0))], rf"^/disk0/run is of .*{BOTH}: name /disk1/run too"),
        ([held("disk1", striping(1))], rf"^/disk1/run is of .*{BOTH}: name /disk0/run too"),
        ([held("disk1", striping(1), has_run=False)], "name /disk0/run too"),
        ([held("disk0", striping(0)), held("new")], rf"^/new/run holds nothing of .*{BOTH}"),
        ([held("new"), held("disk1", striping(1))], "^/new/run holds nothing of .*not mounted"),
        (
            [held("disk0", striping(0)), held("disk1", striping(1)), held("new")],
            "^/new/run holds nothing of",
        ),
        (
            [held("disk0", striping(0)), held("other", striping(1, "e"))],
            "^/other/run is not of .*, but of another run",
        ),
        (
            [held("disk0", striping(0)), held("plain", has_run=True)],
            "^/plain/run is not of .*, but of another run",
        ),
        (
            [held("disk0", striping(0)), held("disk1", striping(1)), held("copy", striping(1))],
            "^/disk1/run and /copy/run are both number 2 of",
        ),
        ([held("plain", has_run=True), held("new")], "^/plain/run holds a run that is not striped"),
        (
            [held("a", striping(0, count=4)), held("b", striping(2, count=4))],
            r"name /disk1/run and /disk3/run too",
        ),
    ],
)
def test_what_does_not_belong_is_named(directories: list[NamedDirectory], expected: str) -> None:
    with pytest.raises(RunDirectoryError, match=expected):
        match(directories)
