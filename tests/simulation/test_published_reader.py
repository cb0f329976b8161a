"""The simulation reports every fault of a published checkpoint."""

from __future__ import annotations

import io
import json
import pickle
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch

from tests.simulation.plan import Version
from tests.simulation.published_reader import check_published

STATES = {"weight": {"master": torch.ones(3), "momentum": torch.zeros(3)}}


class Index(NamedTuple):
    """The position of a chunk in the metadata of DCP."""

    fqn: str
    offset: tuple[int, ...]


def published(record_of_master: Any = None) -> dict[str, bytes]:
    """Return the files of a checkpoint; ``record_of_master`` changes one record."""
    fqn = "weight"
    keys = f"model.{fqn}", f"optimizer.state.{fqn}.momentum"
    tensors = dict(zip(keys, STATES["weight"].values(), strict=True))
    described, stored, data = {}, {}, b""
    for key, tensor in tensors.items():
        file = io.BytesIO()
        torch.save(tensor, file)
        record = file.getvalue()
        if record_of_master is not None and key.startswith("model."):
            record = record_of_master(record)
        chunk = SimpleNamespace(offsets=(0,), sizes=(3,))
        described[key] = SimpleNamespace(size=(3,), chunks=[chunk])
        stored[Index(key, (0,))] = SimpleNamespace(
            relative_path="page", offset=len(data), length=len(record)
        )
        data += record
    metadata = SimpleNamespace(state_dict_metadata=described, storage_data=stored)
    files = {"page": data, ".metadata": pickle.dumps(metadata)}
    listed = {name: {"nbytes": len(content)} for name, content in files.items()}
    return {**files, "tierstore.json": b"\n" + json.dumps({"files": listed}).encode()}


VERSION = Version(step=1, extra=None, rates=(), counts={}, states=STATES, world_size=1)


def test_a_whole_one_is_right() -> None:
    check_published(published(), VERSION)


@pytest.mark.parametrize("length", [0, 1, 100, -1])
def test_a_record_that_is_cut(length: int) -> None:
    with pytest.raises(AssertionError, match=r"record of model\.weight cannot be read"):
        check_published(published(lambda record: record[:length]), VERSION)


def test_a_record_of_other_values() -> None:
    def damaged(record: bytes) -> bytes:
        return record.replace(torch.ones(3).numpy().tobytes(), bytes(12))

    with pytest.raises(AssertionError, match=r"model\.weight"):
        check_published(published(damaged), VERSION)
