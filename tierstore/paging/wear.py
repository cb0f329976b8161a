"""The wear of the drives that a run writes to: used and remaining share of their rated life."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
from collections.abc import Sequence
from pathlib import Path

from tierstore.layout.page_layout import PageLayout
from tierstore.paging.page import Page
from tierstore.paging.tier_plan import Tier
from tierstore.ranks.peers import Peers, agree
from tierstore.storage.drives import Drive, drives_below
from tierstore.units import format_bytes, parse_endurance

logger = logging.getLogger("tierstore")

# decisions: The pace of wear is known after ten minutes.
PACE_SECONDS = 600

_FEW_DAYS = 30
_NEARLY_USED = 0.9
_SECONDS_PER_DAY = 86_400
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def rated_life(endurance: int | str | None, directories: Sequence[Path]) -> int | None:
    """Return the bytes that may be written to one drive in its life; None: do not count.

    Raises:
        ValueError: the endurance cannot be parsed, or the store has no directory with a path.
    """
    if endurance is not None and not directories:
        raise ValueError(
            "endurance= counts writes to the drives of directories, but this store has no "
            "directory with a path: name a directory, or leave endurance out"
        )
    return None if endurance is None else parse_endurance(endurance)


class Wear:
    """The wear of the drives of one rank. Changes no setting.

    All drives count alike. The model: all ranks of the node write the same amount, and each drive
    gets an equal share. Writes before the store was opened are taken from the most worn drive.

    Args:
        life: bytes that may be written to one drive; None: do not count.
        directories: the directories of the run. They exist.
        peers: all ranks. All ranks construct a Wear together.
        commit_every: as in TierStore.
        buffers: as in TierStore.
    """

    def __init__(
        self,
        life: int | None,
        directories: Sequence[Path],
        peers: Peers,
        *,
        commit_every: int | None,
        buffers: int | None,
    ) -> None:
        self._life = life
        self._commit_every = commit_every
        self._buffers = buffers
        self._written_before = 0
        self._was_told = self._was_warned = False
        if life is not None:
            self._where = directories[0]
            self._look_at_drives(life, directories, peers)

    def _look_at_drives(self, life: int, directories: Sequence[Path], peers: Peers) -> None:
        drives: dict[str, Drive] = {}

        def look() -> tuple[str, list[str]]:
            for directory in directories:
                drives.update((drive.name, drive) for drive in _drives_of(directory))
            return _node(), list(drives)

        found = agree(peers, "look at the drives", look)
        sharing = [
            rank
            for rank, (node, names) in enumerate(found)
            if node == found[peers.rank][0] and not drives.keys().isdisjoint(names)
        ]
        self._ranks, self._drives = len(sharing), len(drives)
        self._speaks = peers.rank == sharing[0]  # One rank of the node logs.
        unknown = [drive for drive in drives.values() if drive.bytes_written is None]
        if unknown:
            self._log(
                logging.WARNING,
                f"earlier writes to {', '.join(drive.name for drive in unknown)} are unknown "
                f"({unknown[0].unknown}). drive_life_used and drive_days_left count writes from "
                "now on, as if the drive was new. Install smartmontools, and run as a user who may "
                "read SMART",
            )
        worst = max(drives.values(), key=lambda drive: drive.bytes_written or 0)
        if worst.bytes_written is not None:
            self._written_before = worst.bytes_written
            used = worst.bytes_written / life
            text = (
                f"{used:.1%} of the rated life of {worst.name} is used: "
                f"{_terabytes(worst.bytes_written)} of {_terabytes(life)} are written"
            )
            if used >= _NEARLY_USED:
                text += (
                    ". Replace it soon, and copy checkpoints to another disk. commit_every= and "
                    "host_memory= can make steps write less: the log says how much once the pace "
                    "is known"
                )
            self._log(logging.WARNING if used >= _NEARLY_USED else logging.INFO, text)

    def life_used(self, nbytes: int) -> float | None:
        """Return the used share of the rated life.

        Args:
            nbytes: bytes that this rank has written since the store was opened.
        """
        if self._life is None:
            return None
        return (self._written_before + self._per_drive(nbytes)) / self._life

    def days_left(self, nbytes: int, seconds: float) -> float | None:
        """Return the days left at the pace so far; None before the pace is known.

        Args:
            nbytes: as in life_used().
            seconds: time since the store was opened.
        """
        if self._life is None or not nbytes or seconds < PACE_SECONDS:
            return None
        written = self._per_drive(nbytes)
        left = max(0.0, self._life - self._written_before - written)
        return left / written * seconds / _SECONDS_PER_DAY

    def look(self, pages: Sequence[Page], nbytes: int, seconds: float) -> None:
        """Log the days that are left once the pace is known, and warn once when they are few.

        Args:
            pages: the pages of this rank.
            nbytes: as in life_used().
            seconds: as in days_left().
        """
        days = None if self._was_warned else self.days_left(nbytes, seconds)
        if days is None or (self._was_told and days >= _FEW_DAYS):
            return
        self._was_told, self._was_warned = True, days < _FEW_DAYS
        text = f"{days:,.1f} days of the rated life of the drives are left at the pace so far"
        if self._was_warned or (self.life_used(nbytes) or 0) >= _NEARLY_USED:
            text += self._savings([(page.layout, page.tier) for page in pages], days)
        self._log(logging.WARNING if self._was_warned else logging.INFO, text)

    def _savings(self, pages: Sequence[tuple[PageLayout, Tier]], days: float) -> str:
        """Return text that names options with fewer writes, and the resulting life of drives."""
        every = longer = self._commit_every
        if every is not None:
            longer = 10 if every < 10 else 2 * every
        now = bytes_per_step(pages, every)
        text = f". A step writes {format_bytes(round(now * self._ranks))}"
        resting = [(layout, Tier.HOST) for layout, _ in pages]
        more = sum(layout.nbytes for layout, tier in pages if tier is Tier.NVME)
        memory = f", {format_bytes(more)} more of host_memory on each rank"
        if self._buffers is not None:
            memory += " and without buffers="
        least = now
        for change, then in [
            ("", bytes_per_step(pages, longer)),
            (memory, bytes_per_step(resting, longer)),
        ]:
            if then < least:
                least = then
                lasts = f"for {days * now / then:,.1f} days" if then else "without limit"
                text += (
                    f"; with commit_every={longer}{change} it writes "
                    f"{format_bytes(round(then * self._ranks))}, {lasts}"
                )
        return text + ". A crash may lose the steps after a commit. Nothing was changed"

    def _per_drive(self, nbytes: int) -> float:
        return nbytes * self._ranks / self._drives

    def _log(self, level: int, text: str) -> None:
        if self._speaks:
            logger.log(level, "%s: %s", self._where, text)


def bytes_per_step(pages: Sequence[tuple[PageLayout, Tier]], commit_every: int | None) -> float:
    """Return the bytes of pages that a step writes on average, with its share of commits.

    Args:
        pages: layout and tier of each page.
        commit_every: as in TierStore; None without commits.
    """
    step = sum(layout.step_nbytes for layout, tier in pages if tier is Tier.NVME)
    total = sum(layout.nbytes for layout, _ in pages)
    return step if commit_every is None else step + (total - step) / commit_every


def _drives_of(directory: Path) -> Sequence[Drive]:
    """Return the drives of a directory, or one unknown drive."""
    try:
        if found := drives_below(directory):
            return found
        device = os.stat(directory).st_dev
        name, reason = f"device {os.major(device)}:{os.minor(device)}", "no drive of it is known"
    except OSError as error:  # The store may be able to go on.
        name, reason = str(directory), os.strerror(error.errno or 0)
    return [Drive(name, None, None, None, reason)]


def _terabytes(nbytes: int) -> str:
    return f"{nbytes / 1e12:,.1f} TB"


def _node() -> str:
    """Return a value that identifies the node of this rank, also in containers."""
    with contextlib.suppress(OSError):
        return _BOOT_ID.read_text()
    return socket.gethostname()
