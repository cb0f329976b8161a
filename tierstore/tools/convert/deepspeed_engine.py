"""Files of DeepSpeed's engine at every ZeRO stage: model states, param groups and their shapes."""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from tierstore.errors import CheckpointError, CorruptionError, TierstoreError
from tierstore.inspection.reader import Reader, wrong_name
from tierstore.inspection.safe_pickle import StoredTensor, Unread
from tierstore.layout.encodings import MASTER
from tierstore.layout.parameters import dtype_name
from tierstore.run import tagged_json
from tierstore.run.manifest import are_states
from tierstore.tools.convert.contents import Contents, Group
from tierstore.tools.convert.entries import BUFFER, Entry, StoredFile
from tierstore.tools.convert.flat import Run, flat_entry, value_of
from tierstore.tools.convert.torch_files import TIERSTORE, holds_only_plain, tensor_entry

MODEL_FILE = re.compile(r"(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)_model_states\.pt")

# Settings of DeepSpeed's Muon that its files lack, under the names of torch.optim.Muon.
_MUON = {
    "algorithm": "muon",
    "nesterov": True,
    "ns_coefficients": (3.4445, -4.7750, 2.0315),
    "ns_steps": 5,
    "eps": 1e-7,
    "adjust_lr_fn": "original",
}
OWN = frozenset(
    {"module", "buffer_names", "optimizer", "param_shapes", "frozen_param_shapes"}
    | {"frozen_param_fragments", "shared_params", "data_sampler", "random_ltd", "global_steps"}
    | {"global_samples", "skipped_steps", "sparse_tensor_module_names", "csr_tensor_module_names"}
    | {"dp_world_size", "mp_world_size", "checkpoint_parallel_dimensions", "ds_config"}
    | {"ds_version", "universal_checkpoint_info", TIERSTORE}
)
"""Keys of model states that DeepSpeed itself writes; the program wrote all others."""


def folder_of(path: Path, latest: str) -> Path | None:
    """Return the folder of the files: the path, or the folder that its file ``latest`` names.

    Returns:
        None if the path is not a directory.

    Raises:
        CheckpointError: the folder is a link.
    """
    if not path.is_dir():
        return None
    file = path / latest
    if file.is_file() and file.stat().st_size < 256:
        tag = file.read_bytes().decode(errors="replace").strip()
        folder = path / tag
        if wrong_name(tag) is None and "/" not in tag and folder.is_dir():
            if folder.is_symlink():
                raise CheckpointError(f"{folder} is a link, which is not followed: name its target")
            return folder
    return path


@contextmanager
def structure_errors(path: Path) -> Iterator[None]:
    """Turn errors of the block about values that DeepSpeed does not write into CorruptionError.

    Raises:
        CorruptionError: for any error but TierstoreError, OSError and MemoryError.
    """
    try:
        yield
    except (TierstoreError, OSError, MemoryError):
        raise
    except Exception as error:  # A file may have any value at any place.
        raise CorruptionError(
            f"{path}: is not as DeepSpeed writes it ({type(error).__name__}: {error})"
        ) from error


@dataclass(kw_only=True)
class Rank:
    """Values and files that one rank saved."""

    number: int
    reader: Reader
    """Reader of the folder with the file."""
    name: str
    """Name of the file with the states."""
    optimizer: Mapping[str, Any]
    model: Mapping[str, Any] = field(default_factory=dict)
    model_file: StoredFile

    @property
    def file(self) -> StoredFile:
        """The file with the states."""
        return StoredFile(self.reader, self.name)


def by_rank(pattern: re.Pattern[str], names: Iterable[str], path: Path) -> dict[int, str]:
    """Return rank -> name of its file.

    Args:
        pattern: of the names, with the data-parallel and the tensor-parallel rank as groups.
        names: of all files.
        path: of the checkpoint, for messages.

    Raises:
        CheckpointError: there are several tensor-parallel ranks, or two files of a rank.
    """
    found: dict[int, str] = {}
    for name in names:
        match = pattern.fullmatch(name)
        if not match:
            continue
        if int(match[2]):
            raise CheckpointError(
                f"{path} has the file {name}: checkpoints with tensor parallelism are not read"
            )
        rank = int(match[1] or 0)
        if rank in found:
            raise CheckpointError(f"{path} has two files of one rank, {name} and {found[rank]}")
        found[rank] = name
    return found


def mapping_of(value: Any, reader: Reader, name: str) -> Mapping[str, Any]:
    """Return a value of the file ``name`` that must be a dict.

    Raises:
        CorruptionError: it is something else.
    """
    if not isinstance(value, dict):
        raise CorruptionError(f"{reader.root / name}: is not a file of DeepSpeed")
    return value


def stage_of(rank: Rank) -> int:
    """Return the stage; 1 for BF16_Optimizer, which states none.

    Raises:
        CheckpointError: it is not 1, 2 or 3.
    """
    value = rank.optimizer.get("zero_stage", 1)
    if isinstance(value, Unread) and len(value.arguments) == 1:
        value = value.arguments[0]
    if value not in (1, 2, 3):
        raise CheckpointError(f"{rank.file.path}: ZeRO stage {value!r} is not 1, 2 or 3")
    return int(value)


def zero_settings(model: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return ``zero_optimization`` of the configuration that model states have.

    Returns:
        None if the model states have only the path of a configuration, or none.
    """
    config = model.get("ds_config")
    if not isinstance(config, dict):
        return None
    zero = config.get("zero_optimization")
    return zero if isinstance(zero, dict) else {}


class EngineFiles(ABC):
    """Reader of the values that all stages have. A subclass says where states are.

    Args:
        ranks: all ranks, in order.

    Raises:
        CorruptionError: DeepSpeed did not write the files.
    """

    source = "deepspeed"
    """The format, for messages."""

    def __init__(self, ranks: Sequence[Rank]) -> None:
        self.ranks = ranks
        self.first = ranks[0]
        self.lost: list[str] = []
        self.notes: list[str] = []
        shapes = self.first.model.get("param_shapes")
        if not isinstance(shapes, list) or not all(_are_shapes(group) for group in shapes):
            raise CorruptionError(f"{self.first.model_file.path}: has no shapes of parameters")
        self.shapes: list[Mapping[str, tuple[int, ...]]] = shapes
        """Name -> shape of the parameters of each flat group, in the order in the group."""

    def contents(self) -> Contents:
        """Return all contents of the files.

        Raises:
            CorruptionError: a file is missing, or the files do not fit each other.
        """
        entries = [entry for number in range(len(self.shapes)) for entry in self.entries_of(number)]
        model = self.first.model
        return Contents(
            source=self.source,
            entries=[*entries, *self._others()],
            groups=self.groups(),
            scalars=self.scalars(),
            values=self._values(),
            aliases=self._aliases(),
            dtypes=self.dtypes(entries),
            step=_count(model.get("global_steps")),
            extra=self._extra(),
            notes=self.notes,
            lost=[*self.lost, *self._scale()],
        )

    @abstractmethod
    def entries_of(self, number: int) -> Iterator[Entry]:
        """Yield masters and states of a flat group."""

    @abstractmethod
    def states_of(self, rank: Rank, number: int) -> Mapping[str, Any]:
        """Return the states of a flat group in the file of a rank."""

    def scalars(self) -> dict[str, dict[str, float]]:
        """Return parameter -> name -> number of its state, such as the step count."""
        found: dict[str, dict[str, float]] = {}
        for number, shapes in enumerate(self.shapes):
            numbers = numbers_in(self.states_of(self.first, number), self.first.file)
            for rank in self.ranks[1:]:
                others = numbers_in(self.states_of(rank, number), rank.file)
                if others and others != numbers:
                    raise CheckpointError(
                        f"{self.first.file.path} and {rank.file.path} are of different steps: they "
                        f"have {numbers} and {others}. Name the folders of one step that all ranks "
                        "have saved"
                    )
            found |= {name: dict(numbers) for name in shapes if numbers}
        return found

    def common_dtype(self, what: str, dtypes: Sequence[torch.dtype]) -> torch.dtype:
        """Return the dtype of the parts of all ranks.

        Args:
            what: names the tensor in errors.
            dtypes: one for each rank.

        Raises:
            CheckpointError: they differ.
        """
        for rank, dtype in zip(self.ranks, dtypes, strict=True):
            if dtype != dtypes[0]:
                raise CheckpointError(
                    f"{rank.file.path}: {what} is {dtype_name(dtype)}, and rank 0 has "
                    f"{dtype_name(dtypes[0])}: the files are not of one run"
                )
        return dtypes[0]

    @abstractmethod
    def base(self, rank: Rank) -> Any:
        """Return the state dict of the optimizer that DeepSpeed wraps."""

    def groups(self) -> list[Group]:
        """Return the param groups of the optimizer that DeepSpeed wraps.

        Raises:
            CorruptionError: they do not have all parameters.
        """
        base = self.base(self.first)
        saved = base.get("param_groups") if isinstance(base, dict) else None
        if saved is None:
            self.lost.append(
                "hyperparameters: an elastic checkpoint has none, and param groups get none"
            )
            return [Group(hyperparameters={}, parameters=list(group)) for group in self.shapes]
        groups = []
        for group in saved:
            names = [name for number in group["params"] for name in self.shapes[number]]
            groups.append(Group(hyperparameters=_hyperparameters(group), parameters=names))
        if sum(len(group.parameters) for group in groups) != sum(map(len, self.shapes)):
            raise CorruptionError(f"{self.first.file.path}: its groups do not have all parameters")
        return groups

    def _others(self) -> Iterator[Entry]:
        """Yield tensors of the model that are not trained: buffers and frozen parameters."""
        model, file = self.first.model, self.first.model_file
        trained = {name for group in self.shapes for name in group}
        frozen = model.get("frozen_param_shapes") or {}
        aliases = self._aliases()
        for name, tensor in (model.get("module") or {}).items():
            skipped = name in trained or name in aliases or name in frozen
            if not skipped and isinstance(tensor, StoredTensor):
                yield tensor_entry(file, name, BUFFER, tensor)
        for name, shape in frozen.items():
            yield self._frozen(name, shape)

    def _frozen(self, name: str, shape: tuple[int, ...]) -> Entry:
        """Return the entry of a parameter that is not trained: whole, or in parts of all ranks."""
        tensors = [
            (rank.model.get("frozen_param_fragments") or {}).get(name) for rank in self.ranks
        ]
        first = tensors[0]
        if isinstance(first, StoredTensor) and first.shape == tuple(shape):
            return tensor_entry(self.first.model_file, name, BUFFER, first)
        part = -(-math.prod(shape) // len(self.ranks))
        runs, dtypes = [], []
        for rank, tensor in zip(self.ranks, tensors, strict=True):
            flat = flat_of(tensor, rank.model_file, f"elements of {name!r}")
            count = max(0, min(part, math.prod(shape) - rank.number * part))
            runs.append(run_of(rank.model_file, flat, Fragment(rank.number * part, count, 0)))
            dtypes.append(flat.dtype)
        return flat_entry(name, BUFFER, self.common_dtype(repr(name), dtypes), shape, runs)

    def _values(self) -> dict[str, Any]:
        """Return the values of the model that are not tensors, such as extra state."""
        found = {}
        for name, value in (self.first.model.get("module") or {}).items():
            if isinstance(value, StoredTensor):
                continue
            if holds_only_plain(value):
                found[name] = value
            else:
                self.lost.append(f"{name!r}: it has objects of unknown classes")
        return found

    def _aliases(self) -> dict[str, str]:
        shared = self.first.model.get("shared_params")
        return dict(shared) if isinstance(shared, dict) else {}

    def dtypes(self, entries: Sequence[Entry]) -> dict[str, torch.dtype]:
        """Return the dtypes of parameters in the model that differ from the dtypes of masters."""
        module = self.first.model.get("module") or {}
        masters = {entry.parameter: entry.dtype for entry in entries if entry.state == MASTER}
        return {
            name: tensor.dtype
            for name, tensor in module.items()
            if isinstance(tensor, StoredTensor) and masters.get(name) not in (None, tensor.dtype)
        }

    def _extra(self) -> dict[str, Any]:
        """Return the plain values that the program and the engine saved."""
        model = self.first.model
        extra: dict[str, Any] = {}
        for key, value in model.items():
            if key in OWN or value is None:
                continue
            if not are_states({key: value}):
                self.lost.append(f"{key!r}, which the program saved: not the name of a state")
                continue
            try:
                tagged_json.encode(value)
            except (TypeError, ValueError, CheckpointError):
                self.lost.append(f"{key!r}, which the program saved: not a plain value")
                continue
            extra[key] = value
        return extra

    def _scale(self) -> list[str]:
        scaler = self.first.optimizer.get("loss_scaler")
        scale = scaler.get("cur_scale") if isinstance(scaler, Unread) else None
        if scale in (None, 1, 1.0):
            return []
        return [f"the loss scale of fp16, {scale}"]


def _are_shapes(group: Any) -> bool:
    return isinstance(group, dict) and all(
        isinstance(name, str)
        and isinstance(shape, tuple)
        and all(type(size) is int and size >= 0 for size in shape)
        for name, shape in group.items()
    )


def _count(value: Any) -> int | None:
    return value if type(value) is int and value >= 0 else None


def _hyperparameters(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the hyperparameters of a group under the names of torch.optim."""
    left_out = ("params", "use_muon", "name", "ns_method")
    values = {key: value for key, value in group.items() if key not in left_out}
    if "use_muon" not in group:
        return values
    return values | (_MUON if group["use_muon"] else {"algorithm": "adamw"})


@dataclass(frozen=True, slots=True)
class Fragment:
    """Location of a rank's elements of a parameter: in the parameter and in its partition."""

    start: int
    numel: int
    offset: int


def numel_of(tensor: StoredTensor) -> int:
    """Return the number of elements."""
    return math.prod(tensor.shape)


def flat_of(tensor: Any, file: StoredFile, what: str) -> StoredTensor:
    """Return a value of a file that must be a flat tensor.

    Raises:
        CorruptionError: it is something else.
    """
    if not isinstance(tensor, StoredTensor) or len(tensor.shape) != 1 or tensor.strides != (1,):
        raise CorruptionError(f"{file.path}: {what} of a group are not a flat tensor")
    return tensor


def run_of(file: StoredFile, tensor: StoredTensor, piece: Fragment) -> Run:
    """Return where the elements of a fragment are, in a flat tensor of a file.

    Raises:
        CorruptionError: the tensor ends before them.
    """
    if piece.offset + piece.numel > numel_of(tensor):
        raise CorruptionError(f"{file.path}: a flat tensor ends before its parameters do")
    return Run(piece.start, piece.numel, file, tensor.offset + piece.offset * tensor.dtype.itemsize)


def numbers_in(states: Mapping[str, Any], file: StoredFile) -> dict[str, float]:
    """Return the numbers among the states of a flat group, such as the step count."""
    found: dict[str, float] = {}
    for name, value in states.items():
        if isinstance(value, StoredTensor) and not value.shape:
            found[name] = value_of(value, file)
        elif isinstance(value, int | float):
            found[name] = float(value)
    return found
