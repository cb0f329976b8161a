"""Format "universal", written: files that DeepSpeed loads with ``"load_universal": true``.

One folder serves ZeRO stages 1, 2 and 3 on any number of ranks; docs/internals/foreign-formats.md
says which file each of them reads.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch

from tierstore.checkpoint.dcp_writer import portable
from tierstore.errors import CheckpointError
from tierstore.inspection.reader import wrong_name
from tierstore.layout.encodings import MASTER
from tierstore.layout.other_rules import MOMENTUM, is_radam_or_nadam
from tierstore.layout.parameters import dtype_name
from tierstore.tools.convert.contents import Contents
from tierstore.tools.convert.deepspeed_engine import OWN
from tierstore.tools.convert.entries import BUFFER, Entry
from tierstore.tools.convert.options import Options
from tierstore.tools.convert.pipeline import Piece
from tierstore.tools.convert.torch_archive_writer import torch_file
from tierstore.tools.convert.torch_files import DTYPES, TIERSTORE
from tierstore.tools.convert.torch_writer import plain_hyperparameters
from tierstore.tools.convert.universal import (
    CAT_DIM,
    LATEST,
    MASTERS,
    OPTIMIZER_FILE,
    PARAM,
    PARAM_GROUPS,
    STAGE_3_MODEL_FILE,
    STEP,
    WHOLE_MODEL_FILE,
    ZERO,
)

_VERSION = "0.19.8"
"""The version of DeepSpeed that reads this layout."""
_STATES = ("exp_avg", "exp_avg_sq")
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_NAME_BYTES_MAX = 255
_FILE_BYTES = 8192
"""About what a file takes beside its elements."""


class Writer:
    """Writes a directory that DeepSpeed's ``load_checkpoint`` gets, for Adam and AdamW.

    Args:
        contents: what is written.
        options: ``dtype`` is the dtype of the parameters in the model; masters are float32.

    Raises:
        CheckpointError: DeepSpeed would not load such parameters or states.
    """

    def __init__(self, contents: Contents, options: Options) -> None:
        if not contents.groups:
            raise CheckpointError(
                "the source has no optimizer, and DeepSpeed loads no universal checkpoint without "
                "one: convert the weights to torch or safetensors, and load them into the model"
            )
        self._contents = contents
        found: dict[str, dict[str, Entry]] = defaultdict(dict)
        for entry in contents.entries:
            found[entry.parameter][entry.state] = entry
        self._step = _step_of(contents)
        self._dtypes: dict[str, torch.dtype] = {}
        self._shapes: list[OrderedDict[str, torch.Size]] = []
        self._trained: list[Entry] = []
        for group in contents.groups:
            if is_radam_or_nadam(group.hyperparameters):
                raise CheckpointError(
                    f"the group of {group.parameters[0]!r} is of RAdam or NAdam, and DeepSpeed "
                    f"{_VERSION} loads universal checkpoints of Adam and AdamW only: convert to "
                    "dcp or torch"
                )
            for name in group.parameters:
                entries = _checked(name, found[name])
                dtype = options.dtype or contents.dtypes.get(name, entries[0].dtype)
                if dtype != torch.float32:
                    self._dtypes[name] = dtype
                self._trained += [entry.cast(torch.float32) for entry in entries]
            self._shapes.append(
                OrderedDict((n, torch.Size(found[n][MASTER].shape)) for n in group.parameters)
            )
        self._others = [entry for entry in contents.entries if entry.state == BUFFER]
        self.entries: Sequence[Entry] = [*self._trained, *self._others]
        self.lost: Sequence[str] = [
            f"{state!r} of {name!r}: DeepSpeed has no such state"
            for name, numbers in contents.scalars.items()
            for state in numbers
            if state != STEP
        ]
        files = len(self._trained) + len(contents.grouped) + 4
        self.nbytes = sum(entry.nbytes for entry in self.entries) + files * _FILE_BYTES + 2**20

    @contextmanager
    def writing(self, directory: Path) -> Iterator[Callable[[Piece], None]]:
        """Write a file for each state of each parameter, then the files of the engine."""
        tag = f"global_step{self._global_step()}_universal"
        (directory / LATEST).write_text(tag)
        folder = directory / tag
        (folder / ZERO).mkdir(parents=True)
        for name in self._contents.grouped:
            (folder / ZERO / name).mkdir()
            self._write(folder / ZERO / name / f"{STEP}.pt", self._step_tensor())
        self._write(folder / OPTIMIZER_FILE, self._optimizer_state())
        self._write(folder / STAGE_3_MODEL_FILE, self._model_states({}))
        with ExitStack() as stack:
            files = _Files(stack, self._files(folder))
            yield files.put
            files.finish()

    def _global_step(self) -> int:
        step = self._contents.step
        return int(self._step) if step is None else step

    def _files(self, folder: Path) -> Iterator[_TorchFile]:
        """Yield the files with tensors of entries, in the order of entries."""
        for entry in self._trained:
            name = MASTERS if entry.state == MASTER else entry.state
            path = folder / ZERO / entry.parameter / f"{name}.pt"
            yield _TorchFile(path, [entry], lambda t: {PARAM: next(iter(t.values())), CAT_DIM: 0})
        yield _TorchFile(folder / WHOLE_MODEL_FILE, self._others, self._model_states)

    def _write(self, path: Path, value: Any) -> None:
        """Write a file without tensors of entries."""
        with torch_file(path, [], lambda tensors: value):
            pass

    def _step_tensor(self) -> torch.Tensor:
        return torch.tensor(self._step, dtype=torch.float32, device="cpu")

    def _optimizer_state(self) -> dict[str, Any]:
        """Return the state for stages 1 and 2 (PARAM_GROUPS) and for stage 3 (the inner dict).

        Stage 3 gives all groups the first hyperparameters: only values that are equal in all groups
        are written. It gives all subgroups the same step object: the step is a number, because each
        subgroup would count up the same tensor. torch.optim needs a tensor.
        """
        groups = [plain_hyperparameters(group) for group in self._contents.groups]
        # Keys of torch.optim; "algorithm" is of muon.Muon.
        is_stock = all("foreach" in group and "algorithm" not in group for group in groups)
        common = {
            key: value
            for key, value in groups[0].items()
            if all(key in group and _equal(group[key], value) for group in groups)
        }
        numbers = list(range(len(groups)))
        return {
            PARAM_GROUPS: [
                {**group, "params": [n]} for n, group in zip(numbers, groups, strict=True)
            ],
            "optimizer_state_dict": {
                "state": {0: {STEP: self._step_tensor() if is_stock else int(self._step)}},
                PARAM_GROUPS: [{**common, "params": numbers}],
            },
            "ds_version": _VERSION,
        }

    def _model_states(self, tensors: Mapping[tuple[str, str], Any]) -> dict[str, Any]:
        """Return the values that the engine reads of the run itself.

        Args:
            tensors: stand-ins for buffers and frozen parameters.
        """
        contents = self._contents
        module = OrderedDict({name: tensor for (name, _), tensor in tensors.items()})
        module |= OrderedDict(contents.values)
        extra = portable(contents.extra or {})
        if not OWN.isdisjoint(extra):
            extra = {"extra": extra}
        return {
            "lr_scheduler": None,
            "skipped_steps": 0,
            **extra,
            "module": module,
            "param_shapes": self._shapes,
            "shared_params": dict(contents.aliases),
            "global_steps": self._global_step(),
            "dp_world_size": 1,
            "mp_world_size": 1,
            "ds_version": _VERSION,
            TIERSTORE: {DTYPES: self._dtypes},
        }


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.equal(other)
    return type(one) is type(other) and bool(one == other)


def _step_of(contents: Contents) -> float:
    """Return the only step count of all parameters."""
    counts = {name: contents.scalars.get(name, {}).get(STEP) for name in contents.grouped}
    name = next(iter(counts))
    if MOMENTUM in {entry.state for entry in contents.entries}:
        return 0.0  # Refused later, with a better reason.
    for other, count in counts.items():
        if count is None:
            raise CheckpointError(
                f"the source has no step count of {other!r}, which DeepSpeed needs: a parameter "
                "that was never stepped has none; leave it out with --exclude"
            )
        if count != counts[name]:
            raise CheckpointError(
                f"{name!r} had {counts[name]:g} steps and {other!r} {count:g}, and DeepSpeed has "
                "one count for all: leave out the parameters of the other count with --exclude"
            )
    return float(counts[name] or 0.0)


def _checked(name: str, found: Mapping[str, Entry]) -> list[Entry]:
    """Return the master and the states of a parameter.

    Raises:
        CheckpointError: DeepSpeed would not load them.
    """
    if wrong_name(name) is not None or "/" in name or len(name.encode()) > _NAME_BYTES_MAX:
        raise CheckpointError(
            f"the parameter {name!r} cannot be a folder, as a universal checkpoint has it: rename "
            "it, or convert to dcp or torch"
        )
    if MOMENTUM in found:
        raise CheckpointError(
            f"{name!r} has {MOMENTUM}, and DeepSpeed {_VERSION} loads universal checkpoints of "
            "Adam and AdamW only, not of Muon: convert to dcp or torch"
        )
    master = found.get(MASTER)
    if master is None:
        raise CheckpointError(f"the source has no weight of parameter {name!r}: name it as well")
    states = [found[state] for state in found if state != MASTER]
    if sorted(entry.state for entry in states) != sorted(_STATES):
        raise CheckpointError(
            f"{name!r} has the states {[entry.state for entry in states]}, and DeepSpeed "
            f"{_VERSION} loads universal checkpoints with {' and '.join(_STATES)}: a parameter "
            "that was never stepped has none; leave it out with --exclude"
        )
    for entry in (master, *states):
        if entry.dtype not in _DTYPES or entry.shape != master.shape:
            raise CheckpointError(
                f"{entry.state} of {name!r} is {dtype_name(entry.dtype)} {list(entry.shape)}: "
                f"DeepSpeed's are float32 of the shape of the parameter, {list(master.shape)}"
            )
    return [master, *(found[state] for state in _STATES)]


class _TorchFile(NamedTuple):
    """A file of torch.save to write."""

    path: Path
    entries: Sequence[Entry]
    value_of: Callable[[Mapping[tuple[str, str], Any]], Any]


class _Files:
    """Files of torch.save that are written one after the other, as pieces come.

    Args:
        stack: closes the file that is open, if writing fails.
        files: all files; together they have all entries, in order.
    """

    def __init__(self, stack: ExitStack, files: Iterator[_TorchFile]) -> None:
        self._stack = stack
        self._files = files
        self._keys: set[tuple[str, str]] = set()
        self._put: Callable[[Piece], None]

    def put(self, piece: Piece) -> None:
        """Write the next piece."""
        while piece.entry.key not in self._keys:
            self._begin(next(self._files))
        self._put(piece)

    def finish(self) -> None:
        """Write the files without elements, for which no piece came."""
        for file in self._files:
            self._begin(file)
        self._stack.close()

    def _begin(self, file: _TorchFile) -> None:
        self._stack.close()
        self._keys = {entry.key for entry in file.entries}
        self._put = self._stack.enter_context(torch_file(*file))
