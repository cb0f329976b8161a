"""The wear of drives while a run writes: what is counted, and what the log says of it."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from typing_extensions import override

import tierstore
from tests.support.smart import install_drives, install_smartctl, smart_log
from tests.support.thread_ranks import ThreadJob
from tests.support.toy import Spec, Toy
from tierstore.paging.wear import Wear
from tierstore.ranks.peers import Alone

DAY = 86_400
DRIVES = 2
LIFE = 1_000_000_000_000_000
BEFORE = 512_000_000_000_000

# A float32 parameter, whose values are written for commits only, and one of bfloat16.
LARGE: Spec = ("large", (150, 200), torch.float32, {"average": torch.float32}, False)
HALF: Spec = ("half", (150, 200), torch.bfloat16, {"average": torch.float32}, False)
GROUPS = [[LARGE], [HALF]]


class Clock:
    """time.monotonic(), which can be put forward."""

    def __init__(self) -> None:
        self._real = time.monotonic
        self.ahead = 0.0

    def __call__(self) -> float:
        return self._real() + self.ahead


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(time, "monotonic", clock)
    return clock


@pytest.fixture
def no_smartctl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))


@pytest.fixture(autouse=True)
def drives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install_drives(tmp_path, monkeypatch)


@pytest.fixture(autouse=True)
def log(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    with caplog.at_level(logging.INFO, "tierstore"):
        yield caplog


def said(log: pytest.LogCaptureFixture, words: str) -> list[tuple[str, str]]:
    """Return level and text of what was logged with these words."""
    return [(one.levelname, one.getMessage()) for one in log.records if words in one.getMessage()]


def opened(tmp_path: Path, **options: Any) -> Toy:
    return Toy(tmp_path / "run", GROUPS, page_bytes=2**20, **{"endurance": LIFE, **options})


def train(toy: Toy, steps: int) -> int:
    """Step and commit; return the bytes that were written."""
    before = toy.store.stats().bytes_written
    for _ in range(steps):
        toy.step()
        toy.store.commit()
    return toy.store.stats().bytes_written - before


def test_smart_and_what_the_run_writes_add_up(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    clock: Clock,
    log: pytest.LogCaptureFixture,
) -> None:
    install_smartctl(tmp_path / "bin", monkeypatch, smart_log(BEFORE))
    with opened(tmp_path, endurance="1PBW").store as store:
        assert store.stats().drive_life_used == BEFORE / LIFE
    assert said(log, "rated life") == [
        (
            "INFO",
            f"{tmp_path}/run: 51.2% of the rated life of nvme0n1 is used: 512.0 TB of "
            "1,000.0 TB are written",
        )
    ]
    toy = opened(tmp_path, endurance=BEFORE + 10**9, overwrite=True)
    train(toy, 5)
    assert toy.store.stats().drive_days_left is None
    clock.ahead += 10 * DAY
    stats = toy.store.stats()
    per_drive = stats.bytes_written / DRIVES
    assert stats.drive_life_used == pytest.approx((BEFORE + per_drive) / (BEFORE + 10**9))
    assert stats.drive_days_left is not None
    left = 10**9 - per_drive
    assert stats.drive_days_left == pytest.approx(left / (stats.bytes_written_per_day / DRIVES))
    toy.store.close()


@pytest.mark.usefixtures("no_smartctl")
def test_without_smart_drives_count_as_new(
    tmp_path: Path, clock: Clock, log: pytest.LogCaptureFixture
) -> None:
    for resume in (False, True):  # The pace of a resumed run counts from its opening.
        log.clear()
        toy = opened(tmp_path, resume=resume)
        if resume:
            toy.store.restore()
        stats = toy.store.stats()
        assert (stats.drive_life_used, stats.drive_days_left) == (0, None)
        train(toy, 1)
        clock.ahead += DAY
        stats = toy.store.stats()
        assert stats.drive_life_used == stats.bytes_written / DRIVES / LIFE
        assert stats.drive_days_left == pytest.approx(LIFE * DRIVES / stats.bytes_written, rel=0.01)
        toy.store.close()
        ((level, text),) = said(log, "unknown")
        assert level == "WARNING"
        assert "writes to nvme0n1, nvme1n1 are unknown (smartctl is not installed)" in text
        assert "as if the drive was new" in text


def test_a_directory_on_no_known_drive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, log: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("tierstore.storage.drives.BLOCK_DEVICES", tmp_path / "absent")
    toy = opened(tmp_path)
    written = train(toy, 1)
    assert toy.store.stats().drive_life_used == written / LIFE
    assert len(said(log, "no drive of it is known")) == 1
    toy.store.close()


@pytest.mark.usefixtures("no_smartctl")
def test_nothing_is_counted_unless_asked_for(
    tmp_path: Path, clock: Clock, log: pytest.LogCaptureFixture
) -> None:
    toy = opened(tmp_path, endurance=None)
    clock.ahead += DAY
    train(toy, 1)
    stats = toy.store.stats()
    assert (stats.drive_life_used, stats.drive_days_left) == (None, None)
    assert said(log, "drive") == []
    toy.store.close()


@pytest.mark.parametrize(("share", "level"), [(0.89, "INFO"), (0.9, "WARNING"), (1.5, "WARNING")])
def test_a_worn_drive_is_warned_of(
    share: float,
    level: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    clock: Clock,
    log: pytest.LogCaptureFixture,
) -> None:
    install_smartctl(tmp_path / "bin", monkeypatch, smart_log(int(share * LIFE)))
    toy = opened(tmp_path)
    ((found, text),) = said(log, "rated life")
    assert found == level
    assert ("Replace it soon" in text) == (level == "WARNING")
    log.clear()
    clock.ahead += DAY
    train(toy, 2)
    (told,) = said(log, "are left")  # With what would help, if the drive is worn.
    assert ("commit_every=10" in told[1]) == (level == "WARNING")
    assert told[0] == ("WARNING" if share > 1 else "INFO")
    if share > 1:
        assert toy.store.stats().drive_days_left == 0
    toy.store.close()


@pytest.mark.usefixtures("no_smartctl")
def test_the_warning_says_what_other_options_write(
    tmp_path: Path, clock: Clock, log: pytest.LogCaptureFixture
) -> None:
    """Runs with these options write so much."""
    toy = opened(tmp_path, endurance=10**9)
    train(toy, 2)
    assert said(log, "are left") == []  # The pace is not known yet.
    clock.ahead += 601
    per_step = train(toy, 10) / 10
    ((level, text),) = said(log, "are left")
    assert level == "WARNING"
    toy.store.close()
    size, lasts = r"([\d.]+) KiB", r"for ([\d.]+) days"
    found = re.search(
        rf": ([\d.]+) days .* A step writes {size}; with commit_every=10 it writes {size}, "
        rf"{lasts}; with commit_every=10, {size} more of host_memory on each rank and "
        rf"without buffers= it writes {size}, {lasts}. A crash may lose",
        text,
    )
    assert found is not None, text
    days, now, with_every, days_with_every, more, with_more, days_with_more = map(
        float, found.groups()
    )
    assert now * 1024 == pytest.approx(per_step, rel=0.001)
    assert days_with_every == pytest.approx(days * now / with_every, abs=0.1)
    assert days_with_more == pytest.approx(10 * days, abs=0.1 * 10)
    options: dict[str, Any] = {"host_memory": f"{more}KiB", "buffers": None}
    for changed, claim in ({}, with_every), (options, with_more):
        toy = opened(tmp_path, commit_every=10, overwrite=True, **changed)
        train(toy, 10)
        assert train(toy, 20) / 20 == pytest.approx(claim * 1024, rel=0.002)
        toy.store.close()
    assert toy.store.stats().pages_in == {"host": 2}


@pytest.mark.usefixtures("no_smartctl")
def test_a_pace_that_becomes_too_fast_is_warned_of(
    tmp_path: Path, clock: Clock, log: pytest.LogCaptureFixture
) -> None:
    toy = opened(tmp_path, endurance=10**9, buffers=None, commit_every=None)
    train(toy, 1)
    toy.store.synchronize()
    clock.ahead += 100 * DAY
    train(toy, 1)
    toy.store.move("nvme")
    train(toy, 1)
    assert [level for level, _ in said(log, "are left")] == ["INFO"]
    clock.ahead -= 100 * DAY - 600
    train(toy, 2)
    (_, (level, text)) = said(log, "are left")
    assert level == "WARNING"
    assert re.search(r"commit_every=None, [\d.]+ KiB more of .* 0 B, without limit", text)
    toy.store.close()


@pytest.mark.parametrize("directory", [None, []])
def test_without_a_directory_it_is_refused(directory: list[str] | None) -> None:
    with pytest.raises(ValueError, match=r"name a directory, or leave endurance out"):
        tierstore.TierStore(directory, endurance="600TBW")


@pytest.mark.usefixtures("no_smartctl")
def test_ranks_of_a_node_count_together(tmp_path: Path, log: pytest.LogCaptureFixture) -> None:
    def run(ranks: Any) -> tuple[int, float | None]:
        toy = opened(tmp_path, process_group=ranks)
        train(toy, 2)
        stats = toy.store.stats()
        toy.store.close()
        return stats.bytes_written, stats.drive_life_used

    outcomes = ThreadJob(2).run(run)
    for nbytes, used in outcomes:
        assert used == 2 * nbytes / DRIVES / LIFE
    assert len(said(log, "are unknown")) == 1


def test_ranks_must_agree(tmp_path: Path) -> None:
    def run(ranks: Any) -> None:
        life = ("600TBW", "7PBW")[ranks.rank]
        tierstore.TierStore(tmp_path / "run", endurance=life, process_group=ranks)

    for outcome in ThreadJob(2).run(run):
        assert isinstance(outcome, ValueError)
        assert "endurance is 600000000000000 on rank 0 and 7000000000000000 on rank 1" in str(
            outcome
        )


@pytest.mark.usefixtures("no_smartctl")
def test_other_nodes_and_other_drives_do_not_count(tmp_path: Path) -> None:
    class Job(Alone):
        """This rank, two more of its node, one with another drive, and another node."""

        world_size = 4

        @override
        def gather(self, value: Any) -> list[Any]:
            call, (node, drives), reason = value
            found = [(node, drives), (node, drives[:1]), (node, ["sda"]), ("other", drives)]
            return [(call, one, reason) for one in found]

    wear = Wear(1000, [tmp_path], Job(), commit_every=1, buffers=None)
    assert wear.life_used(100) == 100 * 2 / DRIVES / 1000
