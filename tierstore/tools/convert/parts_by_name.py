"""Files whose names say that they are one of several, as ``model-00002-of-00003.safetensors``."""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

from tierstore.errors import CheckpointError

# Not an epoch "3-of-10", or the rank 8 of an adapter in "lora_rank8".
_NUMBER = re.compile(
    r"(?:^|[-_.])(?:rank|consolidated)[-_.]?(\d+)(?=[-_.])|(?<!\d)(\d{4,6})(?=[-_]of[-_]\d{4,6})"
)
_TOTAL = re.compile(r"[-_]of[-_](\d+)")


def require_all_parts(paths: Iterable[Path]) -> None:
    """Refuse files that are parts of a checkpoint if other parts are missing.

    The name of a file of a rank does not say how many ranks there are: their files are beside it.

    Example: with ``x-00001-of-00003.bin`` alone, two files are missing; with ``rank0.pt``, the file
    ``rank1.pt`` beside it.

    Raises:
        CheckpointError: names the files that are there, and says how many are missing.
    """
    given: dict[tuple[Path, str, str], set[int]] = defaultdict(set)
    for path in paths:
        found = _NUMBER.search(path.name)
        if found and found.lastindex:
            start, end = found.span(found.lastindex)
            place = path.parent, path.name[:start], path.name[end:]
            given[place].add(int(path.name[start:end]))
    for (folder, before, after), numbers in given.items():
        name = re.compile(f"{re.escape(before)}(\\d+){re.escape(after)}")
        beside = {int(match[1]) for file in os.listdir(folder) if (match := name.fullmatch(file))}
        total = _TOTAL.match(after)
        everything = beside | numbers
        are_ranks = everything == {*range(len(everything))}
        count = int(total[1]) if total else len(everything if are_ranks else numbers)
        missing = count - len(numbers)
        if missing > 0:
            raise CheckpointError(
                f"{folder / before}*{after} is a checkpoint in parts, and {missing} of them are "
                f"not named ({len(beside - numbers)} are beside the others): name all files, or "
                "their directory"
            )
