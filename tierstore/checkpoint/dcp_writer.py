"""Writer of ``.metadata``, where DCP finds the file and offset of every value of a checkpoint.

The keys are the same as in ``torch.distributed.checkpoint.state_dict`` for a model and its
optimizer. Hyperparameters are stored both by group and by parameter.
"""

from __future__ import annotations

import io
import math
import pickle
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint._traverse import traverse_state_dict
from torch.distributed.checkpoint.filesystem import _StorageInfo

from tierstore.checkpoint.model_contents import Names
from tierstore.errors import CheckpointError
from tierstore.layout.chunks import Chunk
from tierstore.layout.encodings import MASTER
from tierstore.layout.other_rules import RULE
from tierstore.layout.parameters import STEPPED
from tierstore.layout.records import record_length
from tierstore.layout.state_parts import EMPTY, Path, nested, state_path
from tierstore.run import tagged_json
from tierstore.run.commit import Commit, CommittedPage
from tierstore.run.file_names import UNPAGED_NAME, published_page

# The version that DCP writes into its metadata.
_DCP_VERSION = "1.0.0"

_BYTES = dcp.BytesStorageMetadata()


def checkpoint_metadata(
    commits: Sequence[tuple[Commit, Sequence[CommittedPage]]],
    names: Names,
    unpaged: Iterable[tuple[str, Any, Hashable]],
    model_prefix: str,
    append: Callable[[bytes], int],
) -> bytes:
    """Write the values that are not paged; return the content of ``.metadata``.

    Args:
        commits: the commit of each rank, with its pages.
        names: the names of the paged parameters.
        unpaged: name, value and identity of unpaged values; see ModelContents.values().
        model_prefix: prefix of the names of the model: "model.", or "" as in torchtitan.
        append: adds bytes to the file UNPAGED_NAME and returns their offset.

    Raises:
        CheckpointError: two values have the same key.
    """
    catalog = Catalog(append, UNPAGED_NAME)
    first, _ = commits[0]  # All ranks have the same groups and values.
    # A class may not start from zeros: leave keys out, so that stock DCP reports them as missing.
    left_out = {
        spec.name
        for group in first.groups
        for spec in group
        if not spec.elementwise and not first.scalars.get(spec.name, {}).get(STEPPED, 1.0)
    }
    for commit, pages in commits:
        for page in pages:
            file = published_page(commit.manifest.rank, page.number)
            for record in (
                record for section in page.layout.sections for record in section.records
            ):
                is_left_out = record.state != MASTER and record.parameter.name in left_out
                if not (record.is_copy or is_left_out):
                    length = record_length(record.chunk.sizes, record.dtype)
                    info = _StorageInfo(file, record.offset, length)
                    shape = record.parameter.state_shape(record.state)
                    for path in state_paths(
                        names[record.parameter.name], record.state, model_prefix
                    ):
                        catalog.add_chunk(path, record.dtype, shape, record.chunk, info)
    _add_scalars(catalog, first, names, model_prefix, left_out)
    groups = zip(first.groups, first.manifest.hyperparameters, strict=True)
    add_hyperparameters(
        catalog,
        [
            (
                [names[spec.name][0] for spec in specs],
                {k: v for k, v in tagged_json.decode(saved).items() if k != RULE},
            )
            for specs, saved in groups
        ],
    )
    for name, value, same in unpaged:
        catalog.add_value([model_path(model_prefix, name)], value, same)
    return pickle.dumps(catalog.metadata)


class Catalog:
    """The keys of a checkpoint, and the extent of each key in its file.

    Args:
        append: adds bytes to a file and returns their offset.
        file: the name of the file.
    """

    def __init__(self, append: Callable[[bytes], int], file: str) -> None:
        self.metadata = dcp.Metadata(
            {},
            planner_data={},
            storage_data={},
            storage_meta=dcp.StorageMeta(),
            version=_DCP_VERSION,
        )
        self._append = append
        self._file = file
        self._written: dict[Hashable, _StorageInfo] = {}

    def add_chunk(
        self,
        path: Path,
        dtype: torch.dtype,
        shape: Sequence[int],
        chunk: Chunk,
        info: _StorageInfo,
    ) -> None:
        """Add one chunk of a tensor of this shape."""
        key = ".".join(map(str, path))
        self.metadata.planner_data[key] = path
        tensor = self.metadata.state_dict_metadata.setdefault(
            key, dcp.TensorStorageMetadata(dcp.TensorProperties(dtype), torch.Size(shape), [])
        )
        assert isinstance(tensor, dcp.TensorStorageMetadata)
        offsets, sizes = torch.Size(chunk.offsets), torch.Size(chunk.sizes)
        index = dcp.MetadataIndex(key, offsets, len(tensor.chunks))
        tensor.chunks.append(dcp.ChunkStorageMetadata(offsets, sizes))
        self.metadata.storage_data[index] = info

    def add_value(self, paths: Iterable[Path], value: Any, same: Hashable) -> None:
        """Add a tensor or another value. Values with the same identity are written once.

        As in DCP, each item of a dict, or of a list of tensors or dicts, has a key.
        """
        leaves: list[tuple[Path, Any]] = []
        traverse_state_dict({"": value}, lambda inner, leaf: leaves.append((inner[1:], leaf)))
        for inner, leaf in leaves:
            self._add_leaf([(*path, *inner) for path in paths], leaf, (same, inner))

    def add_rest(
        self,
        name: str,
        scalars: Mapping[str, float],
        states: Iterable[str] = (),
        empty: Iterable[tuple[str, str]] = (),
    ) -> None:
        """Add the state of a parameter other than its tensors, in the form of torch.optim.

        Args:
            name: name of the parameter.
            scalars: the numbers of its state.
            states: names of its tensors. A list without tensors is one value.
            empty: name and kind of each empty part.
        """
        nothing = torch.empty(0, device="cpu")
        parts: list[tuple[Path, Any]] = [(state_path(state), nothing) for state in states]
        parts += [(state_path(part), EMPTY[kind]) for part, kind in empty]
        parts += [
            (state_path(scalar), state_number(scalar, number))
            for scalar, number in scalars.items()
            if scalar != STEPPED  # No optimizer has this scalar.
        ]
        leaves: list[tuple[Path, Any]] = []
        traverse_state_dict(nested(parts) if parts else {}, lambda *leaf: leaves.append(leaf))
        for path, value in leaves:
            if value is not nothing:
                self._add_leaf([("optimizer", "state", name, *path)], value, _identity(value))

    def _add_leaf(self, paths: Iterable[Path], value: Any, same: Hashable) -> None:
        if isinstance(value, torch.Tensor):
            value = _plain(value)
        info = self._written.get(same)
        if info is None:
            stream = io.BytesIO()
            torch.save(value, stream)
            data = stream.getvalue()
            info = self._written[same] = _StorageInfo(self._file, self._append(data), len(data))
        for path in paths:
            key = ".".join(map(str, path))
            if key in self.metadata.state_dict_metadata:
                raise CheckpointError(
                    f"two values have the key {key!r} in a checkpoint: rename one of them"
                )
            if isinstance(value, torch.Tensor):
                shape = tuple(value.shape)
                self.add_chunk(path, value.dtype, shape, Chunk((0,) * len(shape), shape), info)
            else:
                self.metadata.planner_data[key] = path
                self.metadata.state_dict_metadata[key] = _BYTES
                self.metadata.storage_data[dcp.MetadataIndex(key)] = info


def _identity(value: Any) -> Hashable:
    """Return an identity that is equal for equal numbers and parts of a state."""
    return "state", type(value), float(value) if isinstance(value, torch.Tensor) else repr(value)


def state_paths(names: Sequence[str], state: str, model_prefix: str) -> list[Path]:
    """Return the paths of a state. A master is in the model, under all names of the parameter."""
    if state == MASTER:
        return [model_path(model_prefix, name) for name in names]
    return [("optimizer", "state", names[0], *state_path(state))]


def model_path(model_prefix: str, name: str) -> Path:
    """Return the path of a value of the model."""
    outer = model_prefix.removesuffix(".")
    return (outer, name) if outer else (name,)


def _add_scalars(
    catalog: Catalog, commit: Commit, names: Names, model_prefix: str, left_out: Collection[str]
) -> None:
    """Add the values that are not in pages: step counts, and all states of an empty parameter."""
    scalars = commit.scalars
    for spec in (spec for group in commit.groups for spec in group):
        if math.prod(spec.shape) == 0:
            for tensor in spec.stored:
                paths = state_paths(names[spec.name], tensor.name, model_prefix)
                shape = spec.state_shape(tensor.name)
                value = torch.zeros(shape, dtype=tensor.dtype, device="cpu")
                catalog.add_value(paths, value, ("empty", shape, tensor.dtype))
        if spec.name in left_out:
            continue
        states = [name for name, _ in spec.states]
        catalog.add_rest(names[spec.name][0], scalars.get(spec.name, {}), states, spec.empty)


def add_hyperparameters(
    catalog: Catalog, groups: Iterable[tuple[Sequence[str], Mapping[str, Any]]]
) -> None:
    """Add hyperparameters as a list of groups, and by parameter, as torchtitan does.

    Args:
        catalog: of the checkpoint.
        groups: for each group, the names of its parameters, and its hyperparameters.
    """
    for number, (members, hyperparameters) in enumerate(groups):
        group = {**portable(hyperparameters), "param_names": list(members)}
        params: Path = ("optimizer", "param_groups", number, "params")
        catalog.add_value([params], list(members), ("names", number))
        for key, value in group.items():
            paths: list[Path] = [("optimizer", "param_groups", number, key)]
            # A parameter whose name is a number would have the same key as a group.
            paths += [
                ("optimizer", f"param_groups.{name}.{key}")
                for name in members
                if not name.isdigit()
            ]
            catalog.add_value(paths, value, ("group", number, key))


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor without other elements in its storage: torch.save writes whole storages."""
    tensor = tensor.detach().cpu().contiguous()
    if tensor.untyped_storage().nbytes() != tensor.nbytes:
        tensor = tensor.clone()
    return tensor


# Pickle writes longer ints in another form, which torch does not read.
_INT_BITS_MAX = 2000


NUMBERS = ("step", "mu", "eta", "mu_product")
"""Numbers of a parameter that classes of torch.optim hold as tensors of shape ()."""


def state_number(name: str, number: float) -> torch.Tensor | float:
    """Return a number in the state of a parameter, as a tensor if torch.optim has it as a tensor.

    The tensor is float32, or float64 if float32 is not exact. An int of a run stays an int.
    """
    if name not in NUMBERS or type(number) is int:
        return number
    exact = torch.tensor(number, dtype=torch.float64, device="cpu")
    step = exact.to(torch.float32)
    return step if step.double() == exact else exact


def portable(value: Any) -> Any:
    """Convert a value of tagged_json.decode() to types that torch.load(weights_only) reads.

    Numpy scalars become Python scalars. Numpy arrays of numbers become tensors, other arrays lists.
    Times become text. Ints of more than 2000 bits become hexadecimal text.
    """
    if isinstance(value, dict):  # An OrderedDict or a Counter stays one.
        return type(value)({portable(key): portable(item) for key, item in value.items()})
    if type(value) in (list, tuple):
        return type(value)(map(portable, value))
    if isinstance(value, np.generic):
        return _python_scalar(value)
    if isinstance(value, np.ndarray):
        return _tensor_or_list(value)
    if type(value) is int and value.bit_length() > _INT_BITS_MAX:
        return hex(value)
    return value


def _python_scalar(scalar: np.generic) -> Any:
    convert = {"f": float, "c": complex, "m": str, "M": str}.get(scalar.dtype.kind)
    return scalar.item() if convert is None else convert(scalar)


def _tensor_or_list(array: np.ndarray[Any, Any]) -> Any:
    if array.dtype.kind in "mM":
        array = array.astype(str)
    if array.dtype.kind in "SU":
        return array.tolist()
    # Torch has only one byte order, and these are its longest floats.
    wider = {"f": np.float64, "c": np.complex128}.get(array.dtype.kind)
    if wider is not None and array.dtype.itemsize > np.dtype(wider).itemsize:
        array = array.astype(wider)
    return torch.from_numpy(array.astype(array.dtype.newbyteorder("=")))
