"""The page of a plan: its text, its pictures, and how a browser shows it."""

from __future__ import annotations

import builtins
import functools
import itertools
import math
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from tests.support.browser import CHROMIUM, measure
from tests.tools.plan.test_plan import SMALL, planned
from tierstore.errors import PlanError
from tierstore.tools.plan.curves import curves
from tierstore.tools.plan.drives import parse_drives
from tierstore.tools.plan.footprint import StoreOptions
from tierstore.tools.plan.formula import LANES
from tierstore.tools.plan.job import Job
from tierstore.tools.plan.model_files import read_model
from tierstore.tools.plan.page import html_of
from tierstore.tools.plan.plan import Plan, plan
from tierstore.tools.plan.rates import assumed_rates
from tierstore.tools.plan.wording import days_text, seconds_text, short_text

HOSTILE = '<script>alert("1")</script> & \x1b[31m \udcff ' + "x" * 300
SVG = "{http://www.w3.org/2000/svg}"
EMPTY = ("meta", "br")
"""Elements without an end."""
LARGE = StoreOptions(host_memory=2**25)


def llama() -> Plan:
    """Llama 3.1 8B on one GPU, with most of its state on one drive."""
    drives = parse_drives("1x3.84TB@7/5GB/s,1DWPD")
    job = Job(
        gpus=1,
        gpu_memory=80 * 2**30,
        host_memory=64 * 2**30,
        drives=drives,
        tokens=500_000,
        flops=4e14,
        store=StoreOptions(host_memory=8 * 2**30),
    )
    model = read_model(Path(__file__).parent / "configs/llama-3.1-8b.json")
    return plan(model, job, assumed_rates(drives, on_gpu=True, flops=4e14))


def replicated() -> Plan:
    """Two GPUs with a replica each, which do not fit, and a run that is too long."""
    return planned(
        **{"gpus": 2, "gpu_memory": 2**29 + 80 * 10**6, "partition": "ddp", "store": LARGE},
        **{"tokens": 1000, "flops": 1e12, "activation_bytes": 10**6, "steps": 10**12},
    )


def without_times() -> Plan:
    """A rank on the CPU. Neither its memory nor the model's own time is known."""
    return planned(store=SMALL)


def hostile() -> Plan:
    found = planned(gpus=1, model_s=10.0, store=SMALL)
    return replace(found, model=replace(found.model, name=HOSTILE))


@functools.cache
def plan_of(make: Callable[[], Plan]) -> Plan:
    return make()


@functools.cache
def page_of(make: Callable[[], Plan]) -> str:
    return html_of(plan_of(make))


PLANS = (llama, replicated, without_times, hostile)


class _Elements(HTMLParser):
    """Elements of a page; fails if one does not end where it should."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.count: Counter[str] = Counter()
        self.headings: list[str] = []
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.count[tag] += 1
        if tag not in EMPTY:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: Any) -> None:
        self.count[tag] += 1

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "h2":
            self.headings.append(data)


def pictures_of(page: str) -> list[ElementTree.Element]:
    return [ElementTree.fromstring(text) for text in re.findall(r"<svg.*?</svg>", page, re.DOTALL)]


def texts_of(picture: ElementTree.Element) -> list[str]:
    return ["".join(text.itertext()).strip() for text in picture.iter(f"{SVG}text")]


@pytest.mark.quick(1)
@pytest.mark.parametrize("make", PLANS)
def test_a_page_is_whole_and_loads_nothing(make: Callable[[], Plan]) -> None:
    page = page_of(make)
    elements = _Elements(page)
    pictures = pictures_of(page)
    assert elements.count["title"] == elements.count["h1"] == 1
    assert elements.count["svg"] == elements.count["figcaption"] == len(pictures) == 4
    assert not {"script", "link", "img", "image", "iframe"} & set(elements.count)
    links = set(re.findall(r"https?:[^\"'\s<]*", page))
    assert links == {"http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"}
    assert not re.search(r"@import|url\((?!#)|href=\"(?!#)", page)
    # Pictures share the names of one document.
    ids = re.findall(r'\bid="([^"]+)"', page)
    assert len(ids) == len(set(ids))
    assert {*re.findall(r'(?:url\(|href=")#([\w-]+)', page)} <= {*ids}
    for picture in pictures:
        assert picture.get("role") == "img"
        assert (picture.get("aria-label") or "").endswith(".")
        assert len(texts_of(picture)) > 5
    assert len(page) < 500_000


def test_equal_plans_have_equal_pages() -> None:
    assert html_of(replicated()) == page_of(replicated)


def test_answers_stand_in_order() -> None:
    page = page_of(llama)
    assert _Elements(page).headings == [
        "The drives last 115 days",
        "The job fits",
        "A step takes 77.5 s",
        "Paging is free from 6.31M tokens a step",
        "Algorithms beside each other",
        "Assumed",
    ]
    for text in ("The bottleneck is the model", "one more drive in each node", "50.7 GiB", "adamw"):
        assert text in page


def test_what_is_wrong_is_said() -> None:
    page = page_of(replicated)
    headings = _Elements(page).headings
    assert "worn out" in headings[0]
    assert headings[1] == "The job does not fit: one GPU"
    assert "`tierstore fit` finds settings with which it fits, or the nearest machine." in page
    assert "The run has 1,000,000,000,000 steps." in page
    assert "Activations are left out" not in page
    memory = texts_of(pictures_of(page)[0])
    assert memory.count("limit") == 2  # Of GPU and drive: the limit of the host is unknown.
    assert memory.count("above the limit") == 1


def test_what_is_unknown_is_said() -> None:
    page = page_of(without_times)
    assert "Forward and backward are left out" in page
    assert "The job fits in the memory that is known" in page
    assert "this job" not in texts_of(pictures_of(page)[3])
    found = planned(drives="1x3.84TB@7/5GB/s", store=SMALL, tokens=10**6, flops=1e13)
    assert "The endurance of the drives is unknown" in html_of(found)
    unnamed = plan(
        found.model,
        replace(found.job, drives=None),
        replace(found.rates, assumed=()),
        nvme_bytes=10**12,
    )
    page = html_of(unnamed)
    assert _Elements(page).headings[0] == "The life of the drives is unknown"
    assert "With drives 8 x as fast" in page
    assert "Every rate was measured by a probe." in page
    nothing = html_of(planned(store=StoreOptions(host_memory=2**30, commit_every=None)))
    assert "The drives last for ever" in nothing


def test_names_are_escaped() -> None:
    page = page_of(hostile)
    assert "&lt;script&gt;alert(&quot;1&quot;)" in page
    assert "\x1b" not in page
    page.encode("utf-8")


@pytest.mark.parametrize("make", PLANS)
def test_each_lane_that_works_has_a_bar(make: Callable[[], Plan]) -> None:
    time = plan_of(make).time
    texts = texts_of(pictures_of(page_of(make))[1])
    assert [text for text in texts if text in LANES] == list(time.lanes)
    for busy_s in time.lanes.values():
        assert seconds_text(busy_s) in texts


def test_replicas_have_lanes_of_the_network() -> None:
    assert {"model", "compute", "spread", "commit"} <= set(plan_of(replicated).time.lanes)


def test_curves_are_steps_of_the_formula() -> None:
    found = plan_of(replicated)
    drawn = curves(found)
    assert drawn.in_tokens
    assert found.model_s
    assert found.free_model_s
    assert found.free_tokens
    x = [point.x for point in drawn.by_model]
    assert x == sorted(x)
    assert x[0] <= 1000 / 3.9
    assert x[-1] >= 3.9 * found.free_tokens
    seconds = found.model_s * x[5] / 1000
    at_5 = found.formula.step(seconds)
    assert drawn.by_model[5].step_s == pytest.approx(at_5.seconds)
    assert drawn.by_model[5].resident_s == pytest.approx(at_5.resident_s)
    assert [point.x for point in drawn.by_drives] == [*range(1, 9)]
    assert drawn.by_drives[0].step_s == pytest.approx(found.time.seconds)
    steps = [point.step_s for point in drawn.by_drives]
    assert steps == sorted(steps, reverse=True)
    (faster,) = [one for one in found.changes if one.change == "one more drive in each node"]
    assert steps[1] == pytest.approx(faster.step_s)


def test_curves_of_many_drives_have_few_points() -> None:
    drawn = curves(planned(drives="30x3.84TB@7/5GB/s,1DWPD", store=SMALL, model_s=1.0))
    counts = [point.x for point in drawn.by_drives]
    assert 30 in counts
    assert counts[-1] == 60
    assert len(counts) <= 17
    assert not drawn.in_tokens


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        (seconds_text(0), "0 s"),
        (seconds_text(1e-14), "0 s"),
        (seconds_text(0.000285), "0.285 ms"),
        (seconds_text(0.026), "26.0 ms"),
        (seconds_text(0.3514), "351 ms"),
        (seconds_text(0.99996), "1.00 s"),
        (seconds_text(99.96), "100 s"),
        (seconds_text(0.0125), "12.5 ms"),
        (seconds_text(62.015), "62.0 s"),
        (seconds_text(1288), "1,288 s"),
        (days_text(None), "unknown"),
        (days_text(math.inf), "for ever"),
        (days_text(0.4), "9.6 hours"),
        (days_text(18.2), "18 days"),
        (days_text(4.2 * 365), "4.2 years"),
        (days_text(1e6), "2,740 years"),
        (short_text(8.03e9), "8.03B"),
        (short_text(12), "12"),
    ],
)
def test_numbers_as_text(text: str, wanted: str) -> None:
    assert text == wanted


def test_says_how_to_install_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def absent(name: str, *arguments: Any, **named: Any) -> Any:
        if name.partition(".")[0] == "matplotlib":
            raise ModuleNotFoundError(name)
        return real(name, *arguments, **named)

    found = plan_of(without_times)
    monkeypatch.setattr(builtins, "__import__", absent)
    with pytest.raises(PlanError, match=r"pip install 'tierstore\[plan\]'"):
        html_of(found)


@pytest.mark.quick(1)
@pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")
@pytest.mark.parametrize("make", PLANS)
def test_a_browser_shows_everything(make: Callable[[], Plan], tmp_path: Path) -> None:
    widths = (400, 1600)
    for width, seen in zip(widths, measure(page_of(make), widths, tmp_path), strict=True):
        assert seen["title"].startswith("Plan for ")
        assert seen["scroll"] <= seen["client"] <= width
        assert len(seen["texts"]) == 4
        for texts in seen["texts"]:
            assert min(text["size"] for text in texts) >= 8
            assert [text["text"] for text in texts if text["cut"]] == []
            for one, other in itertools.combinations(texts, 2):
                assert not _overlap(one, other), (one["text"], other["text"])


def _overlap(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Return whether two texts touch. A box of text is higher than its letters."""
    wide = min(one["right"], other["right"]) - max(one["left"], other["left"])
    high = min(one["bottom"], other["bottom"]) - max(one["top"], other["top"])
    return wide > -2 and high > 3
