"""Striping of pages over several directories: the arithmetic, and the striping file.

Every directory of a striping has this file. The file names all directories.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from tierstore.errors import RunDirectoryError
from tierstore.run.sealed import body_errors, fields_of, is_count, require, seal, unseal

# Inverse of a fraction: every directory gets at least this fraction of the pages of the fastest.
_SLOWEST = 100
# Rounds of weights with two digits are much shorter.
_ROUND_MAX = 10**6


def weights_of(bandwidths: Sequence[float]) -> tuple[int, ...]:
    """Return the weights of directories with these bandwidths, in bytes per second.

    The weights are in MB/s, rounded to two digits: more digits are noise and make rounds long.
    """
    megabytes = [bandwidth / 1e6 for bandwidth in bandwidths]
    least = max(*megabytes, _SLOWEST) / _SLOWEST
    return tuple(_two_digits(max(bandwidth, least)) for bandwidth in megabytes)


def _two_digits(value: float) -> int:
    unit: int = 10 ** max(0, math.floor(math.log10(value)) - 1)
    return round(value / unit) * unit


def stripe(weights: Sequence[int]) -> tuple[int, ...]:
    """Return the directory of every page of one round; page i lies in directory [i % length].

    Each page goes to the directory that is furthest behind its share so far. If several are, it
    goes to the first. No directory is ever a whole page ahead of its share. After a round each
    directory has exactly its share.

    Args:
        weights: positive. Shares are proportional to weights.
    """
    divisor = math.gcd(*weights)
    shares = [weight // divisor for weight in weights]
    pages = sum(shares)
    behind = [0] * len(shares)  # In units of 1 / pages of a page.
    round_: list[int] = []
    while len(round_) < pages:
        behind = [part + share for part, share in zip(behind, shares, strict=True)]
        furthest = behind.index(max(behind))
        behind[furthest] -= pages
        round_.append(furthest)
    return tuple(round_)


@dataclass(frozen=True, slots=True, kw_only=True)
class Striping:
    """The content of the file STRIPING_NAME in one of the directories.

    Raises:
        ValueError: a field has a wrong type, or does not fit the other fields.
    """

    striping_id: str
    """Identifies the striping; the same in all of its directories."""
    index: int
    """Index of this directory. Directory 0 has all files except the pages of other directories."""
    directories: tuple[str, ...]
    """Location of each directory when the run was last opened."""
    weights: tuple[int, ...]
    """Weight of each directory; see stripe()."""

    def __post_init__(self) -> None:
        require(*(isinstance(text, str) for text in (self.striping_id, *self.directories)))
        require(*map(is_count, (self.index, *self.weights)), all(self.weights))
        require(self.index < len(self.directories) == len(self.weights))
        require(sum(self.weights) // math.gcd(*self.weights) <= _ROUND_MAX)

    def to_bytes(self) -> bytes:
        """Return the content of the file."""
        return seal("striping", fields_of(self))

    @classmethod
    def from_bytes(cls, data: bytes, where: str) -> Self:
        """Read the content of the file; ``where`` names it in errors.

        Raises:
            CorruptionError: the content is not what was written.
            RunDirectoryError: another version wrote it.
        """
        body = unseal("striping", data, where)
        with body_errors(where):
            texts, weights = tuple(body.pop("directories")), tuple(body.pop("weights"))
            return cls(**body, directories=texts, weights=weights)


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedDirectory:
    """The content of a directory that the user named for a run."""

    location: str
    striping: Striping | None
    has_run: bool
    """True if the directory holds the identity, a commit or a page of a run."""

    @property
    def path(self) -> str:
        """The directory that the user named: the parent of the rank's directory."""
        return _run_directory(self.location)


def match(named: Sequence[NamedDirectory]) -> Striping | None:
    """Return the striping whose directories are exactly the named ones, in any order.

    Returns:
        None if the directories hold neither a run nor a complete striping.

    Raises:
        RunDirectoryError: a directory does not belong to the run, or is missing; the message
            names it.
    """
    stripings = [directory.striping for directory in named if directory.striping]
    if stripings and len(stripings) == len(named):
        ids = {striping.striping_id for striping in stripings}
        indices = sorted(striping.index for striping in stripings)
        if len(ids) == 1 and indices == [*range(len(stripings[0].directories))]:
            return stripings[0]  # Even without a run: a crash may have interrupted its removal.
    # The striping file of the first directory is written first. After a crash before the other
    # files were written, the striping has no pages.
    unused = {
        directory.striping.striping_id
        for directory in named
        if directory.striping and directory.striping.index == 0 and not directory.has_run
    }
    used = [
        directory
        for directory in named
        if directory.has_run
        or (directory.striping and directory.striping.striping_id not in unused)
    ]
    if used:
        raise RunDirectoryError(_mismatch(named, used))
    return None


def _mismatch(named: Sequence[NamedDirectory], used: Sequence[NamedDirectory]) -> str:
    """Return text that names a directory that does not fit the others, or is missing."""
    striping = next((directory.striping for directory in used if directory.striping), None)
    if striping is None:
        return (
            f"{used[0].path} holds a run that is not striped over several directories: name only "
            "this directory to resume the run, or pass overwrite=True to delete it"
        )
    run = f"the run that is striped over {_listed(striping.directories)}"
    found: dict[int, str] = {}
    for directory in named:
        if directory not in used:
            return (
                f"{directory.path} holds nothing of {run}: name exactly those directories, where "
                "they are now. Is a disk not mounted?"
            )
        if directory.striping is None or directory.striping.striping_id != striping.striping_id:
            return (
                f"{directory.path} is not of {run}, but of another run: name the directories of "
                "one run, or pass overwrite=True to delete everything in the named directories"
            )
        index = directory.striping.index
        if index in found:
            return (
                f"{found[index]} and {directory.path} are both number {index + 1} of {run}: one "
                "is a copy of the other. Name the directory that was used last"
            )
        found[index] = directory.path
    missing = [path for index, path in enumerate(striping.directories) if index not in found]
    return (
        f"{named[0].path} is of {run}: name {_listed(missing)} too, or its new location, or pass "
        "overwrite=True to delete everything in the named directories"
    )


def _run_directory(location: str) -> str:
    return re.sub(r"/rank-\d{5}$", "", location)


def _listed(locations: Sequence[str]) -> str:
    *others, last = map(_run_directory, locations)
    return f"{', '.join(others)} and {last}" if others else last
