"""Striping of pages over several directories: the arithmetic, and the striping file.

Every directory of a striping has this file, which names all of them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from tierstore.errors import RunDirectoryError
from tierstore.run.sealed import body_errors, seal, unseal

# No directory gets less than this part of the pages that the fastest gets.
_SLOWEST = 100
# More than two digits of each weight ever make: a longer round was not meant.
_ROUND_MAX = 10**6


def weights_of(bandwidths: Sequence[float]) -> tuple[int, ...]:
    """Return the weights of directories of these bandwidths, in bytes per second.

    The weights are in MB/s, rounded to two digits: more is noise, and a round stays short.
    """
    megabytes = [bandwidth / 1e6 for bandwidth in bandwidths]
    least = max(*megabytes, _SLOWEST) / _SLOWEST
    return tuple(_two_digits(max(bandwidth, least)) for bandwidth in megabytes)


def _two_digits(value: float) -> int:
    unit: int = 10 ** max(0, math.floor(math.log10(value)) - 1)
    return round(value / unit) * unit


def stripe(weights: Sequence[int]) -> tuple[int, ...]:
    """Return the directory of every page of one round; page i lies in directory [i % length].

    Each page goes to the directory that is furthest behind its share of the pages so far,
    the first of several. None is ever a whole page ahead of its share, and after a round
    each has exactly that.

    Args:
        weights: positive; the shares are in proportion to them.
    """
    divisor = math.gcd(*weights)
    shares = [weight // divisor for weight in weights]
    pages = sum(shares)
    behind = [0] * len(shares)  # In parts of a page, of which it has as many as there are pages.
    places = []
    for _ in range(pages):
        behind = [part + share for part, share in zip(behind, shares, strict=True)]
        place = behind.index(max(behind))
        behind[place] -= pages
        places.append(place)
    return tuple(places)


@dataclass(frozen=True, slots=True, kw_only=True)
class Striping:
    """The content of the file STRIPING_NAME in one of the directories."""

    striping_id: str
    """Names this striping, the same in all of its directories."""
    index: int
    """Which of the directories this is. The first, 0, has everything but pages of others."""
    directories: tuple[str, ...]
    """Where each was when it was last used."""
    weights: tuple[int, ...]
    """Of each; see stripe()."""

    def __post_init__(self) -> None:
        counts = (self.index, *self.weights)
        if not all(type(count) is int and count >= 0 for count in counts) or 0 in self.weights:
            raise ValueError(
                f"index and weights must be non-negative integers, and weights not 0, in {self}"
            )
        if not 0 <= self.index < len(self.directories) == len(self.weights):
            raise ValueError(
                f"there must be a weight for each directory, and an index of one, in {self}"
            )
        if sum(self.weights) // math.gcd(*self.weights) > _ROUND_MAX:
            raise ValueError(f"the weights need a round of more than {_ROUND_MAX} pages in {self}")
        if not all(isinstance(text, str) for text in (self.striping_id, *self.directories)):
            raise ValueError(f"striping_id and directories must be strings in {self}")

    def to_bytes(self) -> bytes:
        """Return the content of the file."""
        body = {
            "striping_id": self.striping_id,
            "index": self.index,
            "directories": list(self.directories),
            "weights": list(self.weights),
        }
        return seal("striping", body)

    @classmethod
    def from_bytes(cls, data: bytes, where: str) -> Self:
        """Read the content of the file; ``where`` names it in errors.

        Raises:
            CorruptionError: it is not what was written.
            RunDirectoryError: a later version wrote it.
        """
        body = unseal("striping", data, where)
        with body_errors(where):
            texts, weights = tuple(body.pop("directories")), tuple(body.pop("weights"))
            return cls(**body, directories=texts, weights=weights)


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedDirectory:
    """The content of a directory that was named for a run."""

    location: str
    striping: Striping | None
    has_run: bool
    """Whether anything of a run is in it: its identity, a commit, a page."""


def match(held: Sequence[NamedDirectory]) -> Striping | None:
    """Return the striping whose directories were all named, in any order, and no others.

    Returns:
        None if the directories hold neither a run nor all of a striping.

    Raises:
        RunDirectoryError: naming the directory that does not belong, or is not named.
    """
    stripings = [each.striping for each in held if each.striping]
    if len(stripings) == len(held) and _is_whole(stripings):
        return stripings[0]  # Whatever is in them: a crash may have come while it was removed.
    # The striping file of the first directory is written first. If a crash came before the
    # others were, nothing is striped by it.
    unused = {
        each.striping.striping_id
        for each in held
        if each.striping and each.striping.index == 0 and not each.has_run
    }
    used = [
        each
        for each in held
        if each.has_run or (each.striping and each.striping.striping_id not in unused)
    ]
    if used:
        raise RunDirectoryError(_complaint(held, used))
    return None


def _is_whole(stripings: Sequence[Striping]) -> bool:
    ids = {striping.striping_id for striping in stripings}
    indices = sorted(striping.index for striping in stripings)
    return len(ids) == 1 and indices == [*range(len(stripings[0].directories))]


def _complaint(held: Sequence[NamedDirectory], used: Sequence[NamedDirectory]) -> str:
    """Return which directory does not fit the others, or is not among them."""
    striping = next((each.striping for each in used if each.striping), None)
    if striping is None:
        return (
            f"{_run_directory(used[0].location)} holds a run that is not striped over several "
            "directories: name it alone to go on with that run, or pass overwrite=True to delete it"
        )
    run = f"the run that is striped over {_listed(striping.directories)}"
    found: dict[int, str] = {}
    for each in held:
        place = _run_directory(each.location)
        if each not in used:
            return (
                f"{place} holds nothing of {run}: name exactly those directories, where they are "
                "now. Is the disk of one not mounted?"
            )
        if each.striping is None or each.striping.striping_id != striping.striping_id:
            return (
                f"{place} is not of {run}, but of another run: name the directories of one run, "
                "or pass overwrite=True to delete all that is in those named"
            )
        if each.striping.index in found:
            return (
                f"{found[each.striping.index]} and {place} are both number "
                f"{each.striping.index + 1} of {run}: one is a copy of the other. Name the one "
                "that was used last"
            )
        found[each.striping.index] = place
    absent = [path for index, path in enumerate(striping.directories) if index not in found]
    return (
        f"{_run_directory(held[0].location)} is of {run}: name {_listed(absent)} too, or where "
        "that is now, or pass overwrite=True to delete what is in those named"
    )


def _run_directory(location: str) -> str:
    """Return what a user knows a directory by: that above a rank's own."""
    return re.sub(r"/rank-\d{5}$", "", location)


def _listed(locations: Sequence[str]) -> str:
    *others, last = map(_run_directory, locations)
    return f"{', '.join(others)} and {last}" if others else last
