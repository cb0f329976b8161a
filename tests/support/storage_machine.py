"""State machine that compares a storage with a dict, over random operations.

Two names of one file are two keys of one bytearray.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule

from tests.support.transfers import random_bytes, read_bytes, write_bytes
from tierstore.errors import StorageError
from tierstore.storage.base import Storage
from tierstore.units import SECTOR_BYTES

_SECTORS_MAX = 6


class StorageMachine(RuleBasedStateMachine):
    """Operations on ``tested``, an empty storage, compared with a dict of bytearrays.

    Subclass it and set ``tested`` and ``raw_bytes``, which returns a file's content
    without using the storage.
    """

    tested: Storage
    raw_bytes: Callable[[str], bytes]

    names = st.sampled_from(["a", "b", "c"])
    sectors = st.integers(1, _SECTORS_MAX)
    seeds = st.integers(0, 2**32)

    def __init__(self) -> None:
        super().__init__()
        self.model: dict[str, bytearray] = {}

    def fails_unless(self, possible: bool) -> AbstractContextManager[object]:
        """Expect a StorageError from the block unless the operation is possible."""
        return nullcontext() if possible else pytest.raises(StorageError)

    @rule(name=names, sectors=sectors)
    def create(self, name: str, sectors: int) -> None:
        self.tested.create(name, sectors * SECTOR_BYTES)
        self.model[name] = bytearray(sectors * SECTOR_BYTES)

    @rule(name=names, seed=seeds, nbytes=st.integers(0, _SECTORS_MAX * SECTOR_BYTES))
    def put(self, name: str, seed: int, nbytes: int) -> None:
        self.tested.put(name, random_bytes(nbytes, seed))
        self.model[name] = bytearray(random_bytes(nbytes, seed))

    @rule(name=names, first=st.integers(0, _SECTORS_MAX), sectors=sectors, seed=seeds)
    def write(self, name: str, first: int, sectors: int, seed: int) -> None:
        start, nbytes = first * SECTOR_BYTES, sectors * SECTOR_BYTES
        if start + nbytes > len(self.model.get(name, b"")):
            return
        content = random_bytes(nbytes, seed)
        write_bytes(self.tested, name, start, content)
        self.model[name][start : start + nbytes] = content

    @rule(name=names, first=st.integers(0, _SECTORS_MAX), sectors=sectors)
    def read(self, name: str, first: int, sectors: int) -> None:
        start, nbytes = first * SECTOR_BYTES, sectors * SECTOR_BYTES
        expected = self.model.get(name, b"")[start : start + nbytes]
        with self.fails_unless(len(expected) == nbytes):
            assert read_bytes(self.tested, name, start, nbytes) == expected

    @rule(name=names, new_name=names)
    def link(self, name: str, new_name: str) -> None:
        possible = name in self.model and new_name not in self.model
        with self.fails_unless(possible):
            self.tested.link(name, new_name)
        if possible:
            self.model[new_name] = self.model[name]

    @rule(name=names)
    def is_shared(self, name: str) -> None:
        links = sum(content is self.model.get(name) for content in self.model.values())
        with self.fails_unless(links > 0):
            assert self.tested.is_shared(name) == (links > 1)

    @rule(name=names, new_name=names)
    def rename(self, name: str, new_name: str) -> None:
        if name != new_name and self.model.get(name) is self.model.get(new_name, b""):
            return  # The system then keeps both names of the file.
        with self.fails_unless(name in self.model):
            self.tested.rename(name, new_name)
        if name in self.model:
            self.model[new_name] = self.model.pop(name)

    @rule(name=names)
    def unlink(self, name: str) -> None:
        with self.fails_unless(name in self.model):
            self.tested.unlink(name)
        self.model.pop(name, None)

    def teardown(self) -> None:
        """Compare all files, then remove them for the next sequence."""
        assert self.tested.list() == sorted(self.model)
        for name, content in self.model.items():
            assert self.tested.size(name) == len(content)
            assert self.raw_bytes(name) == content
            self.tested.unlink(name)
