"""Format "torch", read: files of torch.save with a model, optimizers, or both."""

from __future__ import annotations

import itertools
import json
import math
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from tierstore.checkpoint.dcp_reader import PIECE_BYTES, mapped_tensor
from tierstore.checkpoint.dcp_writer import NUMBERS
from tierstore.checkpoint.stored_paths import MOMENTS
from tierstore.errors import CheckpointError, CorruptionError
from tierstore.inspection.reader import Reader
from tierstore.inspection.safe_pickle import StoredTensor, Unread
from tierstore.layout.chunks import Chunk, is_dense, storage_order
from tierstore.layout.encodings import MASTER
from tierstore.layout.parameters import dtype_name
from tierstore.layout.records import RECORD_DTYPES
from tierstore.layout.state_parts import empty_kind, is_key, parts_of
from tierstore.run import tagged_json
from tierstore.run.sealed import body_errors, is_count, require
from tierstore.tools.convert.contents import Contents, Group, Unnamed
from tierstore.tools.convert.conventions import RENAMED, standard_groups
from tierstore.tools.convert.entries import Entry, Read, StoredChunk, StoredFile, read_stored
from tierstore.tools.convert.options import Reading
from tierstore.tools.convert.pipeline import bytes_of
from tierstore.tools.convert.torch_archive import read_torch_file
from tierstore.tools.convert.torch_names import Shape
from tierstore.units import format_bytes

TIERSTORE = "tierstore"
"""Key of the step and extra in a file that tierstore wrote."""
DTYPES = "dtypes"
"""Key, in what tierstore adds, of the dtypes of parameters in the model."""
BY_ALGORITHM = "optimizers"
"""Key of the state dicts by algorithm, which have the tensors of "optimizer"."""

_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt", ".tar")
_MODEL_KEYS = ("model", "state_dict", "model_state_dict", "module", "net")
_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype)
_META = "torch._utils._rebuild_meta_tensor_no_storage"
_STRIDED_BYTES_MAX = 256 * 2**20
_DEPTH_MAX = 50
_SMALL_NUMEL_MAX = 1024


def recognizes(path: Path) -> bool:
    """Return whether a path is a file with the suffix of torch.save."""
    return path.is_file() and path.suffix in _SUFFIXES


def read(paths: Sequence[Path], reading: Reading) -> list[Contents]:
    """Read files together: a model and its optimizer may be in two.

    Raises:
        CorruptionError: a file is damaged, or was not written by torch.save.
        CheckpointError: a file has nothing to convert, or parameters without names.
    """
    resolved = [path.resolve() for path in paths]  # A link that the user names is followed.
    return read_files([(reading.reader(path.parent), path.name) for path in resolved], reading)


def read_files(files: Sequence[tuple[Reader, str]], reading: Reading) -> list[Contents]:
    """Read files, given the readers of their directories; links are not followed.

    Raises:
        CorruptionError, CheckpointError: as in read().
    """
    found = _Found(reading)
    for reader, name in files:
        value = read_torch_file(reader, name)
        found.take(_Value(StoredFile(reader, name), value), f"{reader.root / name}")
    order = Contents(source="torch", wrapped=reading.wrapped, order=found.order)
    orders = [order] if found.order else []
    if orders and not found.models and not found.optimizers:
        return orders
    return [found.contents(optimizer=reading.optimizer), *orders]


def sorted_contents(
    file: StoredFile, value: Any, reading: Reading, *, ordered: bool
) -> list[Contents]:
    """Return the contents of a value that is, or has as items, a model and optimizers.

    Args:
        file: the file of its tensors; one of ShardedTensor knows its own.
        value: the value.
        reading: ``optimizer`` counts.
        ordered: whether the tensors of the model are in the order of the model.

    Raises:
        CheckpointError: it has neither a model nor an optimizer.
    """
    found = _Found(reading)
    found.take(_Value(file, value), f"{file.path.parent}")
    contents = found.contents(optimizer=reading.optimizer)
    return [contents if ordered else replace(contents, order=None)]


@dataclass(frozen=True, slots=True)
class ShardedTensor(StoredTensor):
    """A tensor whose elements are in several places, also of several files."""

    parts: tuple[StoredChunk, ...] = ()
    """Chunks that tile it."""


@dataclass(frozen=True, slots=True)
class _Value:
    """A value, and the file that its tensors are in."""

    file: StoredFile
    value: Any


@dataclass(slots=True)
class _Found:
    """Values found in some files."""

    reading: Reading
    models: list[_Value] = field(default_factory=list)
    optimizers: list[_Value] = field(default_factory=list)
    order: dict[str, Shape] = field(default_factory=dict)
    """Parameter -> shape, of files with tensors on the device "meta", which have no elements."""
    lost: list[str] = field(default_factory=list)
    dtypes: dict[str, torch.dtype] = field(default_factory=dict)
    step: int | None = None
    extra: Any = None

    def take(self, held: _Value, where: str) -> None:
        """Sort the values of one file."""
        file, value = held.file, held.value
        if not isinstance(value, dict):
            raise CheckpointError(f"{where} holds neither a state dict nor a dict of them")
        shapes = _meta_shapes(value)
        if shapes:
            self.order |= shapes
            return
        if _is_optimizer(value):
            self.optimizers.append(held)
            return
        parts = {key: part for key, part in value.items() if _is_model(part)}
        optimizers = {key: list(_optimizers_in(part)) for key, part in value.items()}
        outer = [key for key, part in value.items() if not optimizers[key] and _has_optimizer(part)]
        if not any(optimizers.values()) and not outer and not set(_MODEL_KEYS) & parts.keys():
            if _is_model(value):  # Dicts of tensors in it are extra state of modules.
                self.models.append(held)
                return
            if not parts:
                raise CheckpointError(f"{where} holds neither a model nor an optimizer")
        known = [key for key in _MODEL_KEYS if key in parts] or list(parts)
        if len(parts) > 1 and len(known) > 1 and known[0] not in _MODEL_KEYS:
            raise CheckpointError(f"{where} holds several models, {known}: save one of them")
        ours = value.get(TIERSTORE)
        for key, part in value.items():
            if key in known[:1]:
                self.models.append(_Value(file, part))
            elif optimizers[key]:
                if not (ours and key == BY_ALGORITHM):
                    self.optimizers += [_Value(file, one) for one in optimizers[key]]
            elif key in outer:
                self.take(_Value(file, part), f"{key!r} of {where}")
            elif key == TIERSTORE and isinstance(part, dict):
                step, extra = _step_and_extra(part, where)
                if None not in (step, self.step) and step != self.step:
                    raise CheckpointError(
                        f"{where} is of step {step}, and a file before it of step {self.step}: "
                        "name the files of one step"
                    )
                self.step = self.step if step is None else step
                self.extra = self.extra if extra is None else extra
                self.dtypes |= dtypes_in(part) or {}
            else:
                self.lost.append(f"{key!r}: neither the model nor an optimizer")

    def contents(self, *, optimizer: bool) -> Contents:
        """Return the contents of all files together.

        Args:
            optimizer: whether an optimizer without names is wanted.
        """
        model = _model(self.models)
        for held in self.optimizers:
            _check_optimizer(held.value, held.file)
        groups = [
            _StoredGroup(held.file, held.value["state"], part)
            for held in self.optimizers
            for group in held.value["param_groups"]
            for part in _by_flag(held.value["state"], group)
        ]
        names = _given_names(groups)
        unnamed = None
        if names is None and optimizer:
            unnamed = Unnamed(
                shapes=[group.shapes for group in groups], named=partial(_optimizer, groups)
            )
        states = _optimizer(groups, names) if names is not None else _optimizer([], [])
        return replace(
            model,
            wrapped=self.reading.wrapped,
            entries=[*model.entries, *states.entries],
            groups=states.groups,
            scalars=states.scalars,
            unnamed=unnamed,
            dtypes=self.dtypes,
            step=self.step,
            extra=self.extra,
            lost=[*model.lost, *self.lost, *states.lost],
        )


@dataclass(frozen=True, slots=True)
class _StoredGroup:
    """A param group in a file."""

    file: StoredFile
    states: Mapping[Any, Any]
    """Number or name of a parameter -> its states, of the whole optimizer."""
    values: Mapping[str, Any]

    @property
    def shapes(self) -> list[Shape | None]:
        """The shapes of its parameters; None where no state tells."""
        return [_shape(self.states.get(number, {})) for number in self.values["params"]]


def _optimizer(groups: Sequence[_StoredGroup], names: Sequence[Sequence[str]]) -> Contents:
    """Return groups and states of their parameters, given the names of these."""
    entries: list[Entry] = []
    found: list[Group] = []
    scalars: dict[str, dict[str, Any]] = {}
    lost: list[str] = []
    for stored, members in zip(groups, names, strict=True):
        file = stored.file
        states = {
            name: dict(stored.states.get(number, {}))
            for name, number in zip(members, stored.values["params"], strict=True)
        }
        for key, value in stored.values.items():
            if not _is_hyperparameter(value):
                lost.append(f"{key!r} of a param group: it has unknown objects")
        group = {k: _small(file, v) for k, v in stored.values.items() if _is_hyperparameter(v)}
        flags = {name: state["use_muon"] for name, state in states.items() if "use_muon" in state}
        found += standard_groups(group, list(states), states, flags)
        for name, values in states.items():
            numbers: dict[str, Any] = {}
            for key in itertools.filterfalse(is_key, values):
                lost.append(f"{key!r} of {name!r}: not the name of a state")
            for key, value in parts_of({k: v for k, v in values.items() if is_key(k)}).items():
                if key in NUMBERS and isinstance(value, StoredTensor):
                    numbers[key] = _number(file, key, value)
                elif isinstance(value, StoredTensor):
                    entries.append(tensor_entry(file, name, RENAMED.get(key, key), value))
                elif isinstance(value, int | float) and key != "use_muon":
                    numbers[key] = _number(file, key, value)
                elif empty_kind(value) is not None and key not in NUMBERS:
                    numbers[key] = value
                elif key != "use_muon":
                    lost.append(f"{key!r} of {name!r}: neither tensor nor number")
            if numbers:
                scalars[name] = numbers
    return Contents(source="torch", entries=entries, groups=found, scalars=scalars, lost=lost)


def _number(file: StoredFile, key: str, value: Any) -> int | float:
    """Return a number in the state of a parameter.

    Raises:
        CorruptionError: a float cannot hold it, or a "step" is not finite.
    """
    if isinstance(value, StoredTensor):
        is_one = math.prod(value.shape) == 1 and not value.dtype.is_complex
        value = _small(file, value).item() if is_one else math.nan
    number: int | float = value
    try:
        is_finite = math.isfinite(float(number))
        if key != "step" or is_finite:
            return float(number) if key in NUMBERS else number
    except OverflowError:  # An int that is larger than any float.
        pass
    raise CorruptionError(f"{file.path}: {key!r} of a parameter must be a finite number")


def _check_optimizer(value: Mapping[str, Any], file: StoredFile) -> None:
    """Check the structure of the state dict of an optimizer.

    Raises:
        CorruptionError: a value has another type than in torch.optim.
    """
    wrong = None
    for number, state in value["state"].items():
        if type(number) not in (int, str) or not isinstance(state, dict):
            wrong = f"the state of {number!r:.80}"
        elif type(state.get("use_muon")) not in (bool, type(None)):
            wrong = f"'use_muon' of {number!r:.80}"
    for group in value["param_groups"]:
        if not all(type(number) in (int, str) for number in group["params"]):
            wrong = "the parameters of a group"
        elif not all(type(key) is str for key in group):
            wrong = "a param group"
        elif "adamw_lr_ratio" in group and not all(
            type(group.get(key)) in (int, float) for key in ("lr", "adamw_lr_ratio")
        ):
            wrong = "the learning rate of a group"
    if wrong is not None:
        raise CorruptionError(f"{file.path}: {wrong} of the optimizer is not what torch.optim has")


def _step_and_extra(value: Mapping[Any, Any], where: str) -> tuple[int | None, Any]:
    """Return the step and extra of a file that tierstore wrote."""
    step = value.get("step")
    with body_errors(where):
        require(step is None or is_count(step))
        extra = value.get("extra", "null")
        require(type(extra) is str)
        return step, tagged_json.decode(json.loads(extra))


def dtypes_in(ours: Any) -> dict[str, torch.dtype] | None:
    """Return parameter -> dtype in the model, if a file has the dtypes that tierstore adds.

    Raises:
        CheckpointError: a dtype is not one that tierstore writes.
    """
    given = ours.get(DTYPES) if isinstance(ours, dict) else None
    if not isinstance(given, dict):
        return None
    found = {
        name: dtype
        for name, dtype in given.items()
        if isinstance(name, str) and isinstance(dtype, torch.dtype) and dtype.is_floating_point
    }
    for name, dtype in found.items():
        if dtype not in RECORD_DTYPES:
            raise CheckpointError(
                f"{DTYPES!r} of {TIERSTORE!r} says that {name!r} is {dtype_name(dtype)}, which "
                "tierstore does not write: remove it from the file"
            )
    return found


def _meta_shapes(values: Mapping[Any, Any]) -> dict[str, Shape]:
    """Return name -> shape, if all values are tensors on the device "meta"; else nothing."""
    shapes: dict[str, Shape] = {}
    for name, value in values.items():
        if not isinstance(value, Unread) or value.name != _META or len(value.arguments) < 2:
            return {}
        shape = value.arguments[1]
        if type(shape) is not tuple or not all(type(size) is int for size in shape):
            return {}
        shapes[str(name)] = shape
    return shapes


def _is_optimizer(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and isinstance(value.get("state"), dict)
        and isinstance(value.get("param_groups"), list)
        and all(
            isinstance(g, dict) and isinstance(g.get("params"), list) for g in value["param_groups"]
        )
    )


def _is_model(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and not _is_optimizer(value)
        and all(isinstance(key, str) for key in value)
        and any(isinstance(item, StoredTensor) for item in value.values())
    )


def _optimizers_in(value: Any) -> Iterator[dict[str, Any]]:
    """Yield the state dicts of optimizers that a value is, or has as items."""
    if _is_optimizer(value):
        yield value
    elif isinstance(value, list | tuple | dict):
        items = list(value.values() if isinstance(value, dict) else value)
        if items and all(map(_is_optimizer, items)):
            yield from items


def _has_optimizer(value: Any) -> bool:
    """Return whether a dict has the state dict of an optimizer somewhere in it."""
    return isinstance(value, dict) and any(
        _is_optimizer(item) or _has_optimizer(item) for item in value.values()
    )


def _model(models: Sequence[_Value]) -> Contents:
    """Return the contents of models; a tied tensor has the first of its names."""
    entries: list[Entry] = []
    values: dict[str, Any] = {}
    aliases: dict[str, str] = {}
    lost: list[str] = []
    for held in models:
        first: dict[Any, str] = {}
        for name, value in held.value.items():
            if not isinstance(value, StoredTensor):
                if holds_only_plain(value):
                    values[name] = value
                else:
                    lost.append(f"{name!r}: it has tensors in it, or objects of unknown classes")
            elif math.prod(value.shape) and first.setdefault(value, name) != name:
                aliases[name] = first[value]
            else:
                entries.append(tensor_entry(held.file, name, MASTER, value))
    order = {
        entry.parameter: entry.shape
        for entry in entries
        if entry.dtype.is_floating_point or entry.dtype.is_complex
    }
    return Contents(
        source="torch",
        entries=entries,
        values=values,
        aliases=aliases,
        order=order if models else None,
        lost=lost,
    )


def _given_names(groups: Sequence[_StoredGroup]) -> list[list[str]] | None:
    """Return the names of the parameters of each group; None if they have numbers."""
    named: list[list[str]] = []
    for group in groups:
        numbers, given = group.values["params"], group.values.get("param_names")
        if all(isinstance(number, str) for number in numbers):
            given = numbers
        if isinstance(given, list) and len(given) == len(numbers):
            named.append([str(name) for name in given])
    if named and len(named) < len(groups):
        raise CheckpointError("some param groups have names of parameters, and others do not")
    if len(named) < len(groups):
        return None
    flat = [name for names in named for name in names]
    if len(set(flat)) < len(flat):
        raise CheckpointError("two parameters of the optimizers have one name")
    return named


def _shape(state: Mapping[str, Any]) -> Shape | None:
    """Return the shape of a parameter, if its states tell one."""
    tensors = [
        value for key, value in state.items() if str(key).removesuffix("::quantized") in MOMENTS
    ]
    shapes = {value.shape for value in tensors if isinstance(value, StoredTensor)}
    return shapes.pop() if len(shapes) == 1 else None


def _by_flag(
    state: Mapping[Any, Mapping[str, Any]], group: Mapping[str, Any]
) -> Iterator[dict[str, Any]]:
    """Yield a group, in two if it has parameters of Muon and of AdamW, as Moonlight's has.

    Each of the two has its parameters in the order of the model, and the group does not.
    """
    flags = [state.get(number, {}).get("use_muon") for number in group["params"]]
    for flag in dict.fromkeys(flags) or [None]:
        part = dict(group)
        for key in ("params", "param_names"):
            items = part.get(key)
            if isinstance(items, list) and len(items) == len(flags):
                pairs = zip(items, flags, strict=True)
                part[key] = [item for item, its_flag in pairs if its_flag == flag]
        yield part


def _small(file: StoredFile, value: Any) -> Any:
    """Return a hyperparameter, or a number of a state, with its tensor in memory."""
    if not isinstance(value, StoredTensor):
        return value
    if math.prod(value.shape) > _SMALL_NUMEL_MAX:
        raise CheckpointError(f"{file.path}: a hyperparameter has shape {list(value.shape)}")
    tensor = torch.empty(value.shape, dtype=value.dtype, device="cpu")
    tensor_entry(file, "", "", value).read(Chunk((0,) * tensor.ndim, value.shape), tensor)
    return tensor


def _is_hyperparameter(value: Any) -> bool:
    return isinstance(value, StoredTensor) or holds_only_plain(value)


def holds_only_plain(value: Any, depth: int = 0) -> bool:
    """Return whether a value has only types that torch.load(weights_only=True) reads, no tensor."""
    if type(value) in (dict, OrderedDict, list, tuple, set):
        items = value.values() if isinstance(value, dict) else value
        return depth < _DEPTH_MAX and all(holds_only_plain(item, depth + 1) for item in items)
    return type(value) in _PLAIN


def tensor_entry(file: StoredFile, name: str, state: str, tensor: StoredTensor) -> Entry:
    """Return the entry of a tensor in a file of torch.save."""
    if isinstance(tensor, ShardedTensor):
        return Entry(
            parameter=name,
            state=state,
            dtype=tensor.dtype,
            shape=tensor.shape,
            read=read_stored(tensor.dtype, tensor.parts),
        )
    order = storage_order(tensor.shape, tensor.strides)
    if is_dense(tensor.shape, tensor.strides):
        read = _read_permuted(file, tensor, order)
    else:
        read = _read_strided(file, name, tensor, order)
    return Entry(parameter=name, state=state, dtype=tensor.dtype, shape=tensor.shape, read=read)


def _read_permuted(file: StoredFile, tensor: StoredTensor, order: Sequence[int]) -> Read:
    """Return the function that reads a tensor whose dimensions are stored in this order."""
    sizes = tuple(tensor.shape[dim] for dim in order)
    stored = StoredChunk(Chunk((0,) * len(sizes), sizes), file, tensor.offset)
    read_permuted = read_stored(tensor.dtype, [stored])

    def read(chunk: Chunk, target: torch.Tensor) -> None:
        offsets = tuple(chunk.offsets[dim] for dim in order)
        box = Chunk(offsets, tuple(chunk.sizes[dim] for dim in order))
        read_permuted(box, target.permute(tuple(order)))

    return read


def _read_strided(file: StoredFile, name: str, tensor: StoredTensor, order: Sequence[int]) -> Read:
    """Return the function that reads a tensor with gaps, such as each second column.

    The gaps are also read, at most PIECE_BYTES at once.
    """
    sizes = zip(tensor.shape, tensor.strides, strict=True)
    nbytes = (1 + sum((size - 1) * step for size, step in sizes)) * tensor.dtype.itemsize
    if nbytes > _STRIDED_BYTES_MAX:
        raise CheckpointError(
            f"{name!r} is a tensor of {format_bytes(nbytes)} with gaps between its elements in "
            f"{file.path}: save tensor.contiguous()"
        )
    strides = [tensor.strides[dim] for dim in order]
    numel_max = PIECE_BYTES // tensor.dtype.itemsize

    def fill(target: torch.Tensor, start: int) -> None:
        """Fill a tensor in storage order, from the element at ``start`` on."""
        steps = strides[len(strides) - target.ndim :]
        numel = 1 + sum((n - 1) * step for n, step in zip(target.shape, steps, strict=True))
        if numel > numel_max:
            half = len(target) // 2
            if half:
                fill(target[:half], start)
                fill(target[half:], start + half * steps[0])
            else:
                fill(target[0], start)
            return
        data = mapped_tensor(numel, tensor.dtype)
        file.read_into(bytes_of(data), tensor.offset + start * tensor.dtype.itemsize)
        target.copy_(data.as_strided(target.shape, steps))

    def read(chunk: Chunk, target: torch.Tensor) -> None:
        start = sum(n * step for n, step in zip(chunk.offsets, tensor.strides, strict=True))
        fill(target.permute(tuple(order)), start)

    return read
