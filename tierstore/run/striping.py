"""How pages are dealt over several directories: the arithmetic, and the file that says it.

Every directory of a dealing has that file, so that each can be told from any other, and
each tells where the others are.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from tierstore.errors import RunDirectoryError
from tierstore.run.sealed import body_errors, seal, unseal

# A directory that is slower than this part of the fastest is dealt this part all the same.
_SLOWEST = 100
# More than two digits of each weight ever make: a longer round was not meant.
_ROUND_MAX = 10**6


def weights_of(bandwidths: Sequence[float]) -> tuple[int, ...]:
    """Return how much is dealt to directories of these bandwidths, in bytes per second.

    In MB/s, rounded to two digits: more is noise, and a round of the dealing stays short.
    """
    megabytes = [bandwidth / 1e6 for bandwidth in bandwidths]
    least = max(*megabytes, _SLOWEST) / _SLOWEST
    return tuple(_two_digits(max(bandwidth, least)) for bandwidth in megabytes)


def _two_digits(value: float) -> int:
    unit: int = 10 ** max(0, math.floor(math.log10(value)) - 1)
    return round(value / unit) * unit


def deal(weights: Sequence[int]) -> tuple[int, ...]:
    """Return the directory of every page of one round; page i is dealt as i % length.

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
class Dealing:
    """The content of the file DEALING_NAME in one of the directories."""

    dealing_id: str
    """Names this dealing, the same in all of its directories."""
    index: int
    """Which of the directories this is. The first, 0, has everything but pages of others."""
    directories: tuple[str, ...]
    """Where each was when it was last used."""
    weights: tuple[int, ...]
    """Of each; see deal()."""

    def __post_init__(self) -> None:
        counts = (self.index, *self.weights)
        if not all(type(count) is int and count >= 0 for count in counts) or 0 in self.weights:
            raise ValueError(f"an index or a weight is no number of its kind in {self}")
        if not 0 <= self.index < len(self.directories) == len(self.weights):
            raise ValueError(f"index, directories and weights do not fit in {self}")
        if sum(self.weights) // math.gcd(*self.weights) > _ROUND_MAX:
            raise ValueError(f"the weights make too long a round in {self}")
        if not all(isinstance(text, str) for text in (self.dealing_id, *self.directories)):
            raise ValueError(f"an id or a directory is no text in {self}")

    def to_bytes(self) -> bytes:
        """Return the content of the file."""
        body = {
            "dealing_id": self.dealing_id,
            "index": self.index,
            "directories": list(self.directories),
            "weights": list(self.weights),
        }
        return seal("dealing", body)

    @classmethod
    def from_bytes(cls, data: bytes, where: str) -> Self:
        """Read the content of the file; ``where`` names it in errors.

        Raises:
            CorruptionError: it is not what was written.
            RunDirectoryError: a later version wrote it.
        """
        body = unseal("dealing", data, where)
        with body_errors(where):
            texts, weights = tuple(body.pop("directories")), tuple(body.pop("weights"))
            return cls(**body, directories=texts, weights=weights)


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """What one of the directories that were named holds."""

    location: str
    dealing: Dealing | None
    has_run: bool
    """Whether anything of a run is in it: its identity, a commit, a page."""


def match(held: Sequence[Held]) -> Dealing | None:
    """Return the dealing whose directories were all named, in any order, and no others.

    Returns:
        None where none of the directories has anything of a run in it, nor all of a dealing.

    Raises:
        RunDirectoryError: naming the directory that does not belong, or is not named.
    """
    dealings = [each.dealing for each in held if each.dealing]
    if len(dealings) == len(held) and _is_whole(dealings):
        return dealings[0]  # Whatever is in them: a crash may have come while it was removed.
    # A crash may also come between the first file of a new dealing, which is that of the
    # first directory, and the others: that dealing is of nothing.
    unused = {
        each.dealing.dealing_id
        for each in held
        if each.dealing and each.dealing.index == 0 and not each.has_run
    }
    used = [
        each
        for each in held
        if each.has_run or (each.dealing and each.dealing.dealing_id not in unused)
    ]
    if used:
        raise RunDirectoryError(_complaint(held, used))
    return None


def _is_whole(dealings: Sequence[Dealing]) -> bool:
    ids = {dealing.dealing_id for dealing in dealings}
    indices = sorted(dealing.index for dealing in dealings)
    return len(ids) == 1 and indices == [*range(len(dealings[0].directories))]


def _complaint(held: Sequence[Held], used: Sequence[Held]) -> str:
    """Return which directory does not fit the others, or is not among them."""
    dealing = next((each.dealing for each in used if each.dealing), None)
    if dealing is None:
        return (
            f"{_run_directory(used[0].location)} holds a run that is not dealt over several "
            "directories: name it alone to go on with that run, or pass overwrite=True to delete it"
        )
    run = f"the run that is dealt over {_listed(dealing.directories)}"
    found: dict[int, str] = {}
    for each in held:
        place = _run_directory(each.location)
        if each not in used:
            return (
                f"{place} holds nothing of {run}: name exactly those directories, where they are "
                "now. Is the disk of one not mounted?"
            )
        if each.dealing is None or each.dealing.dealing_id != dealing.dealing_id:
            return (
                f"{place} is not of {run}, but of another run: name the directories of one run, "
                "or pass overwrite=True to delete all that is in those named"
            )
        if each.dealing.index in found:
            return (
                f"{found[each.dealing.index]} and {place} are both number "
                f"{each.dealing.index + 1} of {run}: one is a copy of the other. Name the one "
                "that was used last"
            )
        found[each.dealing.index] = place
    absent = [path for index, path in enumerate(dealing.directories) if index not in found]
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
