"""Format "universal", read: DeepSpeed's universal checkpoints.

Each state of a parameter has a file. Docs: docs/internals/foreign-formats.md.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from typing_extensions import override

from tierstore.errors import CheckpointError, CorruptionError
from tierstore.inspection.reader import wrong_name
from tierstore.inspection.safe_pickle import StoredTensor
from tierstore.layout.encodings import MASTER
from tierstore.tools.convert.contents import Contents
from tierstore.tools.convert.deepspeed_engine import (
    MODEL_FILE,
    EngineFiles,
    Rank,
    by_rank,
    folder_of,
    mapping_of,
    numbers_in,
    structure_errors,
    zero_settings,
)
from tierstore.tools.convert.entries import Entry, StoredFile
from tierstore.tools.convert.options import Reading
from tierstore.tools.convert.torch_archive import read_torch_file
from tierstore.tools.convert.torch_files import TIERSTORE, dtypes_in, tensor_entry

LATEST = "latest_universal"
ZERO = "zero"
"""The folder with a folder of each parameter."""
OPTIMIZER_FILE = f"{ZERO}/optimizer_state.pt"
WHOLE_MODEL_FILE = "mp_rank_00_model_states.pt"
"""Model states for stages 1 and 2, with all tensors that are not trained."""
STAGE_3_MODEL_FILE = "zero_pp_rank_0_mp_rank_00_model_states.pt"
"""Model states for stage 3; DeepSpeed writes one for each rank, and reads the first."""
PARAM, CAT_DIM = "param", "cat_dim"
"""Keys of a file of a state: the tensor, and the dimension that tensor parallelism cuts."""
PARAM_GROUPS = "param_groups"
MASTERS, STEP = "fp32", "step"
"""Names of files of a parameter, without their suffix; others are names of states."""


def recognizes(path: Path) -> bool:
    """Return whether a path has a file ``latest_universal``, or is a folder named in one."""
    folder = folder_of(path, LATEST)
    return folder is not None and (folder / OPTIMIZER_FILE).is_file()


def read(paths: Sequence[Path], reading: Reading) -> list[Contents]:
    """Read universal checkpoints, one from each path.

    Raises:
        CorruptionError: a file is missing or damaged, or the files do not fit each other.
        CheckpointError: they are of a kind that is not read.
    """
    found = []
    for path in paths:
        with structure_errors(path):
            found.append(_Files(_read_ranks(path, reading)).contents())
    return found


def _read_ranks(path: Path, reading: Reading) -> list[Rank]:
    """Read the files that are not of a single parameter."""
    reader = reading.reader(folder_of(path, LATEST) or path)

    def read_file(name: str) -> Mapping[str, Any]:
        return mapping_of(read_torch_file(reader, name), reader, name)

    optimizer = read_file(OPTIMIZER_FILE)
    names = [name for name in reader.list() if MODEL_FILE.fullmatch(name)]
    if WHOLE_MODEL_FILE in names:  # Has everything that the others have.
        names = [name for name in names if name.startswith("mp_rank_")]
    models = by_rank(MODEL_FILE, names, path)
    if not models or sorted(models) != list(range(len(models))):
        raise CheckpointError(
            f"{path} lacks files of model states: it has files of ranks {sorted(models)}"
        )
    ranks = [
        Rank(
            number=number,
            reader=reader,
            name=OPTIMIZER_FILE,
            optimizer=optimizer,
            model=read_file(models[number]),
            model_file=StoredFile(reader, models[number]),
        )
        for number in sorted(models)
    ]
    model = ranks[0].model
    is_cut = WHOLE_MODEL_FILE in names and model.get("dp_world_size") != 1
    if is_cut and (zero_settings(model) or {}).get("round_robin_gradients") is True:
        raise CheckpointError(
            f"{ranks[0].model_file.path} is of a run with round_robin_gradients: DeepSpeed's tool "
            "gives parameters the elements of others, so convert the checkpoint that it was made of"
        )
    return ranks


class _Files(EngineFiles):
    """A universal checkpoint. Each rank has the same optimizer file."""

    source = "universal"

    def __init__(self, ranks: Sequence[Rank]) -> None:
        super().__init__(ranks)
        self._reader = self.first.reader
        self._steps: dict[str, dict[str, float]] = {}

    @override
    def base(self, rank: Rank) -> Any:
        return rank.optimizer

    @override
    def states_of(self, rank: Rank, number: int) -> Mapping[str, Any]:
        """Return the states in the common file; with stage 3 they are of one rank only."""
        inner = rank.optimizer.get("optimizer_state_dict")
        states = inner.get("state") if isinstance(inner, dict) else None
        found = states.get(number) if isinstance(states, dict) else None
        return found if isinstance(found, dict) else {}

    @override
    def scalars(self) -> dict[str, dict[str, float]]:
        return {**super().scalars(), **self._steps}

    @override
    def entries_of(self, number: int) -> Iterator[Entry]:
        first: tuple[str, set[str]] | None = None
        for parameter, shape in self.shapes[number].items():
            files = self._files_of(parameter)
            if MASTERS not in files:
                raise CorruptionError(f"{self._path(parameter, MASTERS)}: is missing")
            states = set(files) - {MASTERS}
            if states:
                first = first or (parameter, states)
                if states != first[1]:
                    raise CorruptionError(
                        f"{self._reader.root}: {parameter!r} has the states {sorted(states)}, and "
                        f"{first[0]!r} of the same group {sorted(first[1])}: files are missing"
                    )
            for name in sorted(states - {STEP}):
                yield self._entry(parameter, name, name, shape)
            yield self._entry(parameter, MASTER, MASTERS, shape)
            if STEP in states:
                value = self._value(parameter, STEP)
                self._steps[parameter] = numbers_in({STEP: value}, self._file(parameter, STEP))

    def _files_of(self, parameter: str) -> list[str]:
        """Return the names of the files of a parameter, without the suffix.

        Raises:
            CorruptionError: its folder is missing, or its name is not one of a folder.
        """
        wrong = wrong_name(parameter)
        if wrong is not None:
            raise CorruptionError(f"{self._reader.root}: the parameter {parameter!r} {wrong}")
        try:
            names = self._reader.list(f"{ZERO}/{parameter}")
        except (OSError, ValueError) as error:  # The latter if the name cannot be encoded.
            raise CorruptionError(
                f"{self._reader.root}: the folder {ZERO}/{parameter!r} of a parameter cannot be "
                f"listed: {error}"
            ) from error
        return [name.removesuffix(".pt") for name in names if name.endswith(".pt")]

    def _file(self, parameter: str, name: str) -> StoredFile:
        return StoredFile(self._reader, f"{ZERO}/{parameter}/{name}.pt")

    def _path(self, parameter: str, name: str) -> Path:
        return self._file(parameter, name).path

    def _value(self, parameter: str, name: str) -> Any:
        return read_torch_file(self._reader, self._file(parameter, name).name)

    def _entry(self, parameter: str, state: str, name: str, shape: tuple[int, ...]) -> Entry:
        """Return the entry of a tensor, which stage 3 stores flattened.

        Raises:
            CheckpointError: the tensor is not the whole parameter.
            CorruptionError: the file has no tensor.
        """
        value = self._value(parameter, name)
        path = self._path(parameter, name)
        if isinstance(value, dict):
            if value.get("is_expert_param"):
                raise CheckpointError(f"{path}: experts of DeepSpeed's MoE are not read")
            value = value.get(PARAM)
        if not isinstance(value, StoredTensor):
            raise CorruptionError(f"{path}: has no tensor")
        if value.shape == (math.prod(shape),) and value.strides == (1,):
            strides = torch.empty(shape, device="meta").stride()
            value = StoredTensor(value.offset, value.dtype, shape, tuple(strides))
        if value.shape != shape:
            raise CheckpointError(
                f"{path}: is {list(value.shape)}, and the parameter is {list(shape)} in the model: "
                "checkpoints with tensor parallelism are not read"
            )
        return tensor_entry(self._file(parameter, name), parameter, state, value)

    @override
    def dtypes(self, entries: Sequence[Entry]) -> dict[str, torch.dtype]:
        given = dtypes_in(self.first.model.get(TIERSTORE))
        return super().dtypes(entries) if given is None else given
