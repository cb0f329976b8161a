"""A reader of published checkpoints that is independent of what wrote them."""

from __future__ import annotations

import io
import json
import pickle
from collections.abc import Mapping

import torch

from tests.simulation.plan import Version


def check_published(files: Mapping[str, bytes], version: Version) -> None:
    """Check that a published checkpoint holds a version of the simulated run.

    Args:
        files: name -> content, as the process has just written them: they are unpickled.
        version: what was published.

    Raises:
        AssertionError: it does not; the text says what is wrong.
    """
    absent = {".metadata", "tierstore.json"} - files.keys()
    if absent:
        raise AssertionError(f"a published checkpoint has no {sorted(absent)}")
    listed = json.loads(files["tierstore.json"].partition(b"\n")[2])["files"]
    sizes = {name: len(content) for name, content in files.items() if name != "tierstore.json"}
    if sizes != {name: described["nbytes"] for name, described in listed.items()}:
        raise AssertionError(f"a published checkpoint has {sizes}, and not what it lists")
    metadata = pickle.loads(files[".metadata"])
    for name, states in version.states.items():
        for state, expected in states.items():
            key = f"model.{name}" if state == "master" else f"optimizer.state.{name}.{state}"
            if not torch.equal(_tensor(files, metadata, key), expected):
                raise AssertionError(f"{key} is not of step {version.step}")


def _tensor(files: Mapping[str, bytes], metadata: object, key: str) -> torch.Tensor:
    """Read a tensor as DCP does: each chunk from its slice of a file."""
    described = metadata.state_dict_metadata[key]  # type: ignore[attr-defined]
    result = torch.full(described.size, torch.nan)
    for chunk in described.chunks:
        (info,) = (
            info
            for index, info in metadata.storage_data.items()  # type: ignore[attr-defined]
            if index.fqn == key and index.offset == chunk.offsets
        )
        data = files[info.relative_path][info.offset : info.offset + info.length]
        place = tuple(
            slice(offset, offset + size)
            for offset, size in zip(chunk.offsets, chunk.sizes, strict=True)
        )
        try:
            result[place] = torch.load(io.BytesIO(data), weights_only=True)
        except Exception as error:  # Bytes that are not a record can raise anything.
            raise AssertionError(f"a record of {key} cannot be read") from error
    return result
