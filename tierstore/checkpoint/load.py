"""Pages from a checkpoint that DCP can load, whoever wrote it and on however many ranks."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from tierstore import tagged
from tierstore.checkpoint.contents import plain_names
from tierstore.checkpoint.files import MARKER_NAME, METADATA_NAME, published_manifest
from tierstore.checkpoint.unpickle import read_metadata
from tierstore.checkpoint.verify import verify
from tierstore.errors import CheckpointError, CorruptionError
from tierstore.groups import MASTER, PagedGroup, ParameterSpec
from tierstore.manifest import Manifest
from tierstore.storage.paths import get_file
from tierstore.views import ChunkView, PageView


class CheckpointSource:
    """A checkpoint, checked, from which the states of some parameters can be read.

    Parameters are looked for as ``model.<name>`` or ``<name>``, states as
    ``optimizer.state.<name>.<state>``, hyperparameters by parameter or by group.

    Args:
        path: the directory.
        groups: the param groups that want their states.
        scalars: parameter name -> names of the scalars that it wants.

    Raises:
        CorruptionError: the checkpoint is damaged.
        CheckpointError: it is none, or has not all that is wanted; the message names the
            first that is absent.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        groups: Sequence[PagedGroup],
        scalars: Mapping[str, Mapping[str, float]],
    ) -> None:
        self._path = Path(path)
        report = verify(self._path)
        if report.kind == "run":
            raise CheckpointError(
                f"{self._path} is a run directory, not a checkpoint: open it with resume=True, or "
                "publish its last step with `tierstore checkpoint`"
            )
        if report.faults:
            raise CorruptionError(
                f"{self._path}: {report.faults[0].place}: {report.faults[0].what}; nothing of it "
                "was loaded. `tierstore verify` lists everything that is wrong"
            )
        self._metadata = read_metadata(get_file(self._path / METADATA_NAME), str(self._path))
        self._reader = FileSystemReader(self._path)
        self._reader.set_up_storage_reader(self._metadata, is_coordinator=True)
        specs = [parameter.spec for group in groups for parameter in group.parameters]
        self._names = self._names_of([spec.name for spec in specs])
        self._keys = {
            (spec.name, state): self._key(spec, state)
            for spec in specs
            for state, _ in spec.all_states
        }
        self.scalars = {
            name: {scalar: self._scalar(name, scalar) for scalar in wanted}
            for name, wanted in scalars.items()
        }
        self.hyperparameters = [self._hyperparameters(group) for group in groups]
        self.step, self.extra = self._position()

    def fill(self, page: PageView) -> None:
        """Read masters and states of a page, and round the masters into the parameters."""
        targets = {}
        items: list[ReadItem] = []
        for shard in page.shards:
            for chunk in shard.chunks:
                for state, _ in shard.spec.all_states:
                    key = self._keys[shard.spec.name, state]
                    for item in self._read_items(key, chunk):
                        targets[id(item)] = chunk.state(state)
                        items.append(item)
        self._read(items, targets)
        page.write_parameters()

    def _names_of(self, names: Sequence[str]) -> dict[str, str]:
        """Return the names that the parameters have in the checkpoint, less those of wrappers."""
        for unwrap_parallel in (False, True):
            plain = plain_names(names, unwrap_parallel=unwrap_parallel)
            found = {name: stripped for name, (stripped,) in plain.items()}
            if any(self._tensor(key) for key in _master_keys(next(iter(found.values()), ""))):
                break
        return found

    def _read_items(self, key: str, chunk: ChunkView) -> list[ReadItem]:
        """Return what must be read for one chunk: a piece of each stored one it overlaps."""
        place = ChunkStorageMetadata(torch.Size(chunk.chunk.offsets), torch.Size(chunk.chunk.sizes))
        stored = self._tensor(key)
        assert stored is not None
        return create_read_items_for_chunk_list(key, stored, [place])

    def _read(self, items: list[ReadItem], targets: Mapping[int, torch.Tensor]) -> None:
        self._reader.read_data(LoadPlan(items), cast(LoadPlanner, _Targets(targets))).wait()

    def _tensor(self, key: str) -> TensorStorageMetadata | None:
        found = self._metadata.state_dict_metadata.get(key)
        return found if isinstance(found, TensorStorageMetadata) else None

    def _key(self, spec: ParameterSpec, state: str) -> str:
        """Return the key of a state, after checking that the checkpoint has it in that shape."""
        name = self._names[spec.name]
        keys = [f"optimizer.state.{name}.{state}"]
        if state == MASTER:
            keys += _master_keys(name)
        for key in keys:
            stored = self._tensor(key)
            if stored is None:
                continue
            if tuple(stored.size) != spec.shape:
                raise CheckpointError(
                    f"{self._path} has {key!r} of shape {list(stored.size)}, here it is "
                    f"{list(spec.shape)}: build the model as it was"
                )
            return key
        raise CheckpointError(
            f"{self._path} has no tensor {' or '.join(map(repr, keys))}: it must be a checkpoint "
            "of this model and an optimizer of these param groups, under the names that "
            "torch.distributed.checkpoint.state_dict gives; an optimizer has them if it was given "
            "the named parameters of the whole model"
        )

    def _scalar(self, name: str, scalar: str) -> float:
        key = f"optimizer.state.{self._names[name]}.{scalar}"
        stored = self._tensor(key)
        if stored is None or stored.size.numel() != 1:
            raise CheckpointError(f"{self._path} has no number {key!r}")
        return float(self._small_tensor(key, stored))

    def _small_tensor(self, key: str, stored: TensorStorageMetadata) -> torch.Tensor:
        value = torch.empty(stored.size, dtype=stored.properties.dtype)
        whole = ChunkStorageMetadata(torch.Size([0] * value.ndim), value.size())
        items = create_read_items_for_chunk_list(key, stored, [whole])
        self._read(items, {id(item): value for item in items})
        return value

    def _hyperparameters(self, group: PagedGroup) -> dict[str, Any]:
        """Return what the checkpoint says of a group: by its first parameter, or as a list."""
        if not group.parameters:
            return {}
        name = self._names[group.parameters[0].name]
        # With the depth of their paths. A name like a number is that of a group there.
        prefixes = [] if name.isdigit() else [(f"optimizer.param_groups.{name}.", 2)]
        prefixes += [(prefix, 4) for prefix in self._groups_with(name)]
        paths = self._metadata.planner_data or {}
        found: dict[str, Any] = {}
        for prefix, depth in prefixes:
            for key in self._metadata.state_dict_metadata:
                if key.startswith(prefix):
                    # What is in a dict or list has a key of its own, and a longer path.
                    inner = paths.get(key, ())[depth:]
                    suffix = "".join(f".{part}" for part in inner)
                    first = key.removeprefix(prefix).removesuffix(suffix)
                    set_element(found, (first, *inner), self._value(key))
            if found:
                break
        return {key: value for key, value in found.items() if key not in ("params", "param_names")}

    def _groups_with(self, name: str) -> Iterator[str]:
        number = 0
        while (key := f"optimizer.param_groups.{number}.params") in (
            self._metadata.state_dict_metadata
        ):
            if name in self._value(key):
                yield key.removesuffix("params")
            number += 1

    def _value(self, key: str) -> Any:
        """Return a value that is not a tensor, or a tensor of few elements."""
        stored = self._metadata.state_dict_metadata[key]
        if isinstance(stored, TensorStorageMetadata):
            return self._small_tensor(key, stored)
        info = self._metadata.storage_data[MetadataIndex(key)]
        with open(self._path / info.relative_path, "rb") as file:
            file.seek(info.offset)
            data = file.read(info.length)
        # Plain values only: nothing that is read is executed.
        return torch.load(io.BytesIO(data), weights_only=True)

    def _position(self) -> tuple[int, Any]:
        """Return the step and, where tierstore published it, what was committed with it."""
        if not (self._path / MARKER_NAME).exists():
            steps = [scalars["step"] for scalars in self.scalars.values() if "step" in scalars]
            return int(max(steps, default=0)), None
        name = published_manifest(rank=0)
        manifest = Manifest.from_bytes(get_file(self._path / name), f"{self._path}/{name}")
        return manifest.step, tagged.decode(manifest.extra)


def _master_keys(name: str) -> list[str]:
    return [f"model.{name}", name]


class _Targets:
    """Says to a DCP reader where each item goes."""

    def __init__(self, targets: Mapping[int, torch.Tensor]) -> None:
        self._targets = targets

    def resolve_tensor(self, item: ReadItem) -> torch.Tensor:
        target = self._targets[id(item)]
        for dimension, (offset, size) in enumerate(
            zip(item.dest_offsets, item.lengths, strict=True)
        ):
            target = target.narrow(dimension, offset, size)
        return target

    def commit_tensor(self, item: ReadItem, tensor: torch.Tensor) -> None:
        """Nothing to do: the tensor is a view of the target."""
