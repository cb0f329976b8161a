"""Sealed files: a first line with kind, format version and checksum, then JSON."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import xxhash

from tierstore.errors import CorruptionError, RunDirectoryError

FORMAT_VERSION = 1


def is_count(value: object) -> bool:
    """Return whether a value is an int in the range of a count."""
    return type(value) is int and 0 <= value < 2**63


def require(*conditions: bool) -> None:
    """Raise ValueError unless all conditions hold. body_errors() makes it a CorruptionError."""
    if not all(conditions):
        raise ValueError("a field has a wrong type or value")


def fields_of(instance: Any) -> dict[str, Any]:
    """Return the fields of a dataclass instance in order."""
    return {field.name: getattr(instance, field.name) for field in dataclasses.fields(instance)}


def seal(kind: str, body: dict[str, Any]) -> bytes:
    """Return a file of a kind: its first line, then the body as JSON."""
    text = json.dumps(body, allow_nan=False, separators=(",", ":")).encode()
    return f"tierstore {kind} {FORMAT_VERSION} {xxhash.xxh3_128_hexdigest(text)}\n".encode() + text


def checksum_of(data: bytes) -> str:
    """Return the checksum that the first line of a sealed file holds."""
    return data.partition(b"\n")[0].split()[-1].decode()


def unseal(kind: str, data: bytes, where: str) -> dict[str, Any]:
    """Return the body of a sealed file; ``where`` names the file in errors.

    Raises:
        CorruptionError: the content is not what was written.
        RunDirectoryError: another version wrote the file.
    """
    head, _, text = data.partition(b"\n")
    match = re.fullmatch(rb"tierstore (\w+) (\d+) ([0-9a-f]{32})", head)
    if match is None or match[1].decode() != kind:
        raise CorruptionError(f"{where} does not begin like a tierstore {kind} file")
    if int(match[2]) != FORMAT_VERSION:
        raise RunDirectoryError(
            f"{where} has format version {int(match[2])}, but this tierstore reads version "
            f"{FORMAT_VERSION}: use the version of tierstore that wrote it"
        )
    if xxhash.xxh3_128_hexdigest(text) != match[3].decode():
        raise CorruptionError(f"{where} is damaged: its checksum does not match its content")
    with body_errors(where):
        body = parse_json(text)
        require(type(body) is dict)
        return cast(dict[str, Any], body)


def parse_json(data: bytes) -> Any:
    """Return the value of a JSON text.

    Raises:
        ValueError: the text is not JSON, is nested deeper than Python's JSON supports, or has a
            key twice in one object.
    """
    try:
        return json.loads(data, object_pairs_hook=_object)
    except RecursionError as error:
        raise ValueError("JSON that is nested too deep") from error


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    require(len(values) == len(pairs))
    return values


@contextmanager
def body_errors(where: str) -> Iterator[None]:
    """Convert errors of the block about the form of a body to CorruptionError."""
    try:
        yield
    except (LookupError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise CorruptionError(
            f"{where} does not have the content of its kind: it is damaged, or of another program"
        ) from error
