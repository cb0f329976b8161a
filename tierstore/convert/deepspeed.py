"""Format "deepspeed", read: checkpoints of ZeRO stages 1, 2 and 3, also with the optimizer on NVMe.

Each rank has a file with its parts of flat groups. Stages 1 and 2 cut a group of parameters,
joined, into equal partitions; stage 3 cuts each parameter. Docs: docs/internals/foreign-formats.md.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch

from tierstore.convert.contents import Contents, Group
from tierstore.convert.entries import BUFFER, Entry, StoredFile
from tierstore.convert.flat import Run, flat_entry, value_of
from tierstore.convert.options import Reading
from tierstore.convert.torch_files import tensor_entry
from tierstore.errors import CheckpointError, CorruptionError
from tierstore.inspection.reader import Reader
from tierstore.inspection.torch_archive import StoredTensor, Unread, read_torch_file
from tierstore.layout.parameters import MASTER
from tierstore.run import tagged_json

_OPTIMIZER_FILE = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
_MODEL_FILE = re.compile(r"(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)_model_states\.pt")
# Files of parallelism that cuts parameters otherwise.
_REFUSED = {
    "pipeline parallelism": re.compile(r"layer_\d+-model_.*|layer_\d+-model_states\.pt"),
    "experts of DeepSpeed's MoE": re.compile(r"layer_.*_expert_.*|expp_rank_.*"),
    "pipeline parallelism in ZeRO": re.compile(r".*_mp_rank_\d+_\d+_optim_states\.pt"),
}
_LATEST = "latest"
_SWAPPED = "offloaded_tensors"
_AIO_ALIGNED_BYTES = 1024
_MOMENTUM = "momentum_buffer"

# What DeepSpeed's Muon does and its files do not say, under the names of torch.optim.Muon.
_MUON = {
    "algorithm": "muon",
    "nesterov": True,
    "ns_coefficients": (3.4445, -4.7750, 2.0315),
    "ns_steps": 5,
    "eps": 1e-7,
    "adjust_lr_fn": "original",
}
# Keys of a state file that are of the run, not of a program that uses DeepSpeed.
_OWN = frozenset(
    {"module", "buffer_names", "optimizer", "param_shapes", "frozen_param_shapes"}
    | {"frozen_param_fragments", "shared_params", "data_sampler", "random_ltd", "global_steps"}
    | {"dp_world_size", "mp_world_size", "checkpoint_parallel_dimensions", "ds_config"}
    | {"ds_version", "universal_checkpoint_info"}
)


def recognizes(path: Path) -> bool:
    """Return whether a path is a directory that DeepSpeed saved, or the one of a step in it."""
    folder = _folder_of(path)
    return folder is not None and any(_OPTIMIZER_FILE.fullmatch(p.name) for p in folder.iterdir())


def _folder_of(path: Path) -> Path | None:
    """Return the folder of the files: the path, or the folder that its file ``latest`` names."""
    if not path.is_dir():
        return None
    latest = path / _LATEST
    if latest.is_file() and latest.stat().st_size < 256:
        tag = latest.read_bytes().decode(errors="replace").strip()
        if "/" not in tag and tag not in ("", ".", "..") and (path / tag).is_dir():
            return path / tag
    return path


@dataclass(kw_only=True)
class _Rank:
    """What one rank saved."""

    number: int
    reader: Reader
    """Of the folder with the file."""
    name: str
    optimizer: Mapping[str, Any]
    model: Mapping[str, Any] = field(default_factory=dict)
    model_file: StoredFile

    @property
    def file(self) -> StoredFile:
        """The file with the states."""
        return StoredFile(self.reader, self.name)


def read(paths: Sequence[Path], reading: Reading) -> list[Contents]:
    """Read the files of all ranks of one step, in one folder or in those of several nodes.

    Raises:
        CorruptionError: a file is damaged, or the files do not fit each other.
        CheckpointError: a rank is missing, or the files are of a kind that is not read.
    """
    ranks = _read_ranks(paths, reading)
    stage = _stage(ranks[0])
    reader = _PartitionedParameters(ranks) if stage == 3 else _PartitionedGroups(ranks)
    return [reader.contents()]


def _read_ranks(paths: Sequence[Path], reading: Reading) -> list[_Rank]:
    """Read the files of all ranks, without the tensors."""
    readers = [Reader(_folder_of(path) or path, reading.on_progress) for path in paths]
    places: dict[str, Reader] = {}
    for reader in readers:
        for name in reader.list():
            for what, pattern in _REFUSED.items():
                if pattern.fullmatch(name):
                    raise CheckpointError(
                        f"{reader.root} has the file {name}: checkpoints with {what} are not read"
                    )
            if _OPTIMIZER_FILE.fullmatch(name) or _MODEL_FILE.fullmatch(name):
                if name in places:
                    raise CheckpointError(
                        f"{places[name].root} and {reader.root} both have the file {name}: name "
                        "each part of the checkpoint once"
                    )
                places[name] = reader
    values = {
        name: _mapping(read_torch_file(reader, name, check=reading.check), reader, name)
        for name, reader in places.items()
    }
    optimizers = _by_rank(_OPTIMIZER_FILE, values, paths[0])
    models = _by_rank(_MODEL_FILE, values, paths[0])
    if not optimizers or sorted(optimizers) != list(range(len(optimizers))) or not models:
        raise CheckpointError(
            f"{paths[0]} lacks files of ranks: it has those with states of ranks "
            f"{sorted(optimizers)} and those with models of {sorted(models)}; name the folders of "
            "all nodes"
        )
    ranks = []
    for number in range(len(optimizers)):
        name = optimizers[number]
        model = models.get(number, models[min(models)])
        ranks.append(
            _Rank(
                number=number,
                reader=places[name],
                name=name,
                optimizer=_mapping(values[name].get("optimizer_state_dict"), places[name], name),
                model=values[model],
                model_file=StoredFile(places[model], model),
            )
        )
    for rank in ranks:
        _check_count(rank, len(ranks))
    if _stage(ranks[0]) == 3 and sorted(models) != sorted(optimizers):
        raise CheckpointError(f"{paths[0]} lacks model_states files of ZeRO-3 ranks")
    return ranks


def _by_rank(pattern: re.Pattern[str], names: Mapping[str, Any], path: Path) -> dict[int, str]:
    """Return rank -> name of its file."""
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
            raise CheckpointError(f"{path} has {name} and {found[rank]}, of one rank")
        found[rank] = name
    return found


def _check_count(rank: _Rank, count: int) -> None:
    """Compare the number of partitions that a rank states with the number of files."""
    stated = rank.optimizer.get("partition_count")
    if rank.optimizer.get("ds_zero_partition_groups"):
        raise CheckpointError(f"{rank.file.path}: partitions of expert parallelism are not read")
    for number in stated if isinstance(stated, list) else [stated]:
        if number is not None and number != count:
            raise CheckpointError(
                f"{rank.file.path} is of {number} partitions, and there are files of {count} "
                "ranks: name the folders of all nodes"
            )


def _mapping(value: Any, reader: Reader, name: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise CorruptionError(f"{reader.root / name}: is not a file of DeepSpeed")
    return value


def _stage(rank: _Rank) -> int:
    """Return the stage; 1 for BF16_Optimizer, which states none."""
    value = rank.optimizer.get("zero_stage", 1)
    if isinstance(value, Unread) and len(value.arguments) == 1:
        value = value.arguments[0]
    if value not in (1, 2, 3):
        raise CheckpointError(f"{rank.file.path}: ZeRO stage {value!r} is not 1, 2 or 3")
    return int(value)


class _Zero:
    """Reader of what all stages have in common. A subclass says where states are."""

    def __init__(self, ranks: Sequence[_Rank]) -> None:
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
        """Return all that the files hold."""
        entries: list[Entry] = []
        scalars: dict[str, dict[str, float]] = {}
        for number, shapes in enumerate(self.shapes):
            found = list(self.entries_of(number))
            entries += found
            numbers = self.scalars_of(number)
            scalars |= {name: dict(numbers) for name in shapes if numbers}
        model = self.first.model
        return Contents(
            source="deepspeed",
            entries=[*entries, *self._others()],
            groups=self.groups(),
            scalars=scalars,
            aliases=self._aliases(),
            dtypes=self._dtypes(entries),
            step=_count(model.get("global_steps")),
            extra=self._extra(),
            notes=self.notes,
            lost=[*self.lost, *self._scale()],
        )

    def entries_of(self, number: int) -> Iterator[Entry]:
        """Yield masters and states of a flat group."""
        raise NotImplementedError

    def states_of(self, rank: _Rank, number: int) -> Mapping[str, Any]:
        """Return the states of a flat group in the file of a rank."""
        raise NotImplementedError

    def scalars_of(self, number: int) -> dict[str, float]:
        """Return the numbers among the states of a flat group, the step count say."""
        found: dict[str, float] = {}
        for name, value in self.states_of(self.first, number).items():
            if isinstance(value, StoredTensor) and not value.shape:
                found[name] = value_of(value, self.first.file)
            elif isinstance(value, int | float):
                found[name] = float(value)
        return found

    def base(self, rank: _Rank) -> Any:
        """Return what the optimizer that DeepSpeed wraps saved."""
        raise NotImplementedError

    def groups(self) -> list[Group]:
        """Return the param groups of the optimizer that DeepSpeed wraps."""
        base = self.base(self.first)
        saved = base.get("param_groups") if isinstance(base, dict) else None
        if saved is None:
            self.lost.append(
                "an elastic checkpoint holds no hyperparameters: param groups get none"
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
            yield self.frozen(name, shape)

    def frozen(self, name: str, shape: tuple[int, ...]) -> Entry:
        """Return the entry of a parameter that is not trained."""
        tensor = (self.first.model.get("frozen_param_fragments") or {}).get(name)
        if not isinstance(tensor, StoredTensor) or tensor.shape != tuple(shape):
            raise CorruptionError(f"{self.first.model_file.path}: lacks the parameter {name!r}")
        return tensor_entry(self.first.model_file, name, BUFFER, tensor)

    def _aliases(self) -> dict[str, str]:
        shared = self.first.model.get("shared_params")
        return dict(shared) if isinstance(shared, dict) else {}

    def _dtypes(self, entries: Sequence[Entry]) -> dict[str, torch.dtype]:
        """Return the dtypes of parameters in the model where they are not those of masters."""
        module = self.first.model.get("module") or {}
        masters = {entry.parameter: entry.dtype for entry in entries if entry.state == MASTER}
        return {
            name: tensor.dtype
            for name, tensor in module.items()
            if isinstance(tensor, StoredTensor) and masters.get(name) not in (None, tensor.dtype)
        }

    def _extra(self) -> dict[str, Any]:
        """Return the plain values that the program saved, and those of the engine."""
        model = self.first.model
        extra: dict[str, Any] = {}
        for key, value in model.items():
            if key in _OWN or value is None:
                continue
            try:
                tagged_json.encode(value)
            except (TypeError, ValueError, CheckpointError):
                self.lost.append(f"{key!r}, which the program saved, is not of plain values")
                continue
            extra[key] = value
        return extra

    def _scale(self) -> list[str]:
        scaler = self.first.optimizer.get("loss_scaler")
        scale = scaler.get("cur_scale") if isinstance(scaler, Unread) else None
        if scale in (None, 1, 1.0):
            return []
        return [f"the loss scale of fp16, {scale}, is not carried"]


def _are_shapes(group: Any) -> bool:
    return isinstance(group, dict) and all(
        isinstance(name, str) and isinstance(shape, tuple) for name, shape in group.items()
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
class _Fragment:
    """Where a rank has elements of a parameter: the first in the parameter and in its partition."""

    start: int
    numel: int
    offset: int


class _PartitionedGroups(_Zero):
    """Stages 1 and 2: a group's parameters, joined and padded, are cut into equal partitions."""

    def base(self, rank: _Rank) -> Any:
        return rank.optimizer.get("base_optimizer_state")

    def states_of(self, rank: _Rank, number: int) -> Mapping[str, Any]:
        base = self.base(rank)
        if isinstance(base, list):  # An elastic checkpoint.
            return _mapping(base[number], rank.reader, rank.name)
        group = base["param_groups"][number]
        return _mapping(base["state"].get(group["params"][0], {}), rank.reader, rank.name)

    def entries_of(self, number: int) -> Iterator[Entry]:
        masters = [self._master(rank, number) for rank in self.ranks]
        fragments = self._fragments(number, [_numel(tensor) for tensor in masters])
        states = {MASTER: masters}
        for name, value in self.states_of(self.first, number).items():
            if isinstance(value, StoredTensor) and value.shape:
                states[name] = [self._state(rank, number, name) for rank in self.ranks]
        places = {
            state: self._whole(number, fragments, tensors)
            if self._is_whole(number, state)
            else fragments
            for state, tensors in states.items()
        }
        for parameter, shape in self.shapes[number].items():
            for state, tensors in states.items():
                runs = []
                for rank, tensor, own in zip(self.ranks, tensors, places[state], strict=True):
                    piece = own.get(parameter)
                    if piece is not None:
                        runs.append(_run(rank.file, tensor, piece))
                yield flat_entry(parameter, state, tensors[0].dtype, shape, runs)

    def _is_whole(self, number: int, state: str) -> bool:
        """Return whether a rank has a state of whole parameters where it has a part of them.

        So it is with Muon's momentum, unless the optimizer is offloaded: Newton-Schulz needs it.
        """
        base = self.base(self.first)
        group = base["param_groups"][number] if isinstance(base, dict) else {}
        offloaded = self._zero_settings().get("offload_optimizer")
        device = offloaded.get("device") if isinstance(offloaded, dict) else None
        return state == _MOMENTUM and bool(group.get("use_muon")) and device in (None, "none")

    def _whole(
        self,
        number: int,
        fragments: Sequence[Mapping[str, _Fragment]],
        tensors: Sequence[StoredTensor],
    ) -> list[dict[str, _Fragment]]:
        """Return where a state of whole parameters is; the first rank that has one counts."""
        shapes = self.shapes[number]
        places: list[dict[str, _Fragment]] = []
        seen: set[str] = set()
        for rank, own, tensor in zip(self.ranks, fragments, tensors, strict=True):
            members = [name for name in shapes if name in own]
            starts = list(accumulate((math.prod(shapes[name]) for name in members), initial=0))
            if members and _numel(tensor) != starts[-1]:
                raise CorruptionError(
                    f"{rank.file.path}: {_MOMENTUM} of group {number} has {_numel(tensor)} "
                    f"elements, and its parameters have {starts[-1]}"
                )
            places.append(
                {
                    name: _Fragment(0, math.prod(shapes[name]), start)
                    for name, start in zip(members, starts, strict=False)
                    if name not in seen
                }
            )
            seen.update(members)
        return places

    def _master(self, rank: _Rank, number: int) -> StoredTensor:
        groups = rank.optimizer.get("single_partition_of_fp32_groups")
        return _flat(groups[number] if isinstance(groups, list) else None, rank, "masters")

    def _state(self, rank: _Rank, number: int, name: str) -> StoredTensor:
        return _flat(self.states_of(rank, number).get(name), rank, name)

    def _fragments(self, number: int, lean: Sequence[int]) -> list[dict[str, _Fragment]]:
        """Return the fragments of each rank, by the name of the parameter.

        They follow from the order of the parameters, and they are in the files, too. Both must
        agree, except with ``round_robin_gradients``, where the files state another order than
        that of the elements.

        Args:
            number: of the group.
            lean: elements of each partition, without padding.
        """
        derived = self._derived(number, lean)
        stated = [self._stated(rank, number) for rank in self.ranks]
        if derived == stated or self._is_round_robin():
            return derived
        # Partitions that begin at parameters: each is padded to the largest one.
        for rank, own, elements in zip(self.ranks, stated, lean, strict=True):
            ends = 0
            for piece in sorted(own.values(), key=lambda piece: piece.offset):
                if piece.offset < ends or piece.offset + piece.numel > elements:
                    raise CorruptionError(f"{rank.file.path}: its fragments overlap or lie outside")
                ends = piece.offset + piece.numel
        return stated

    def _derived(self, number: int, lean: Sequence[int]) -> list[dict[str, _Fragment]]:
        partition = max(
            elements + self._padding(rank, number)
            for rank, elements in zip(self.ranks, lean, strict=True)
        )
        paddings = self.first.optimizer.get("param_alignment_paddings")
        aligned = paddings[number] if isinstance(paddings, list) else [0] * len(self.shapes[number])
        lengths = [math.prod(shape) for shape in self.shapes[number].values()]
        ends = accumulate(n + extra for n, extra in zip(lengths, aligned, strict=True))
        found: list[dict[str, _Fragment]] = [{} for _ in self.ranks]
        begin = 0
        for name, length, end in zip(self.shapes[number], lengths, ends, strict=True):
            for rank, own in enumerate(found):
                first = max(begin, rank * partition)
                last = min(begin + length, (rank + 1) * partition)
                if first < last:
                    own[name] = _Fragment(first - begin, last - first, first - rank * partition)
            begin = end
        return found

    def _padding(self, rank: _Rank, number: int) -> int:
        if "zero_stage" not in rank.optimizer:
            return 0  # BF16_Optimizer keeps the padding of masters.
        paddings = rank.optimizer.get("group_paddings")
        return int(paddings[number]) if isinstance(paddings, list) else 0

    def _stated(self, rank: _Rank, number: int) -> dict[str, _Fragment]:
        """Return the fragments in the file of a rank."""
        mappings = rank.optimizer.get("param_slice_mappings")
        if not isinstance(mappings, list):
            raise CorruptionError(f"{rank.file.path}: lacks param_slice_mappings")
        found = {}
        for name, address in mappings[number].items():
            offset, numel = address.get("start"), address.get("numel")
            before = sum(
                int(self._address(other, number, name)) for other in self.ranks[: rank.number]
            )
            found[name] = _Fragment(before, int(numel), int(offset))
        return found

    def _address(self, rank: _Rank, number: int, name: str) -> int:
        """Return how many elements of a parameter a rank has."""
        mappings = rank.optimizer.get("param_slice_mappings")
        address = mappings[number].get(name) if isinstance(mappings, list) else None
        return 0 if address is None else int(address.get("numel"))

    def _is_round_robin(self) -> bool:
        return self._zero_settings().get("round_robin_gradients") is True

    def _zero_settings(self) -> Mapping[str, Any]:
        config = self.first.model.get("ds_config")
        zero = config.get("zero_optimization") if isinstance(config, dict) else None
        return zero if isinstance(zero, dict) else {}


def _numel(tensor: StoredTensor) -> int:
    return math.prod(tensor.shape)


def _flat(tensor: Any, rank: _Rank, what: str) -> StoredTensor:
    if not isinstance(tensor, StoredTensor) or len(tensor.shape) != 1 or tensor.strides != (1,):
        raise CorruptionError(f"{rank.file.path}: {what} of a group are not a flat tensor")
    return tensor


def _run(file: StoredFile, tensor: StoredTensor, piece: _Fragment) -> Run:
    if piece.offset + piece.numel > _numel(tensor):
        raise CorruptionError(f"{file.path}: a flat tensor ends before its parameters do")
    return Run(piece.start, piece.numel, file, tensor.offset + piece.offset * tensor.dtype.itemsize)


class _PartitionedParameters(_Zero):
    """Stage 3: each rank has an equal part of each parameter, the last one padded."""

    def __init__(self, ranks: Sequence[_Rank]) -> None:
        super().__init__(ranks)
        for rank in ranks:
            if rank.model.get("param_shapes") != self.shapes:
                raise CorruptionError(
                    f"{rank.model_file.path}: has other parameters than the file of rank 0"
                )

    def base(self, rank: _Rank) -> Any:
        return rank.optimizer.get("optimizer_state_dict")

    def states_of(self, rank: _Rank, number: int) -> Mapping[str, Any]:
        state = _mapping(self.base(rank), rank.reader, rank.name).get("state", {})
        return _mapping(state.get(number, {}), rank.reader, rank.name)

    def entries_of(self, number: int) -> Iterator[Entry]:
        shapes = self.shapes[number]
        parts = [-(-math.prod(shape) // len(self.ranks)) for shape in shapes.values()]
        starts = [0, *accumulate(parts)]
        names = [MASTER]
        for name, value in self.states_of(self.first, number).items():
            if isinstance(value, StoredTensor) and value.shape:
                names.append(name)
        for state in names:
            sources = [self._source(rank, number, state, starts[-1]) for rank in self.ranks]
            dtype = sources[0][1]
            for (parameter, shape), part, start in zip(shapes.items(), parts, starts, strict=False):
                runs = []
                for rank, (file, _, offset) in enumerate(sources):
                    count = max(0, min(part, math.prod(shape) - rank * part))
                    runs.append(Run(rank * part, count, file, offset + start * dtype.itemsize))
                yield flat_entry(parameter, state, dtype, shape, runs)

    def _source(
        self, rank: _Rank, number: int, state: str, numel: int
    ) -> tuple[StoredFile, torch.dtype, int]:
        """Return the file with a flat state of a rank, its dtype, and the byte of its start."""
        groups = rank.optimizer.get("fp32_flat_groups")
        master = _flat(groups[number] if isinstance(groups, list) else None, rank, "masters")
        tensor = master
        if state != MASTER:
            tensor = _flat(self.states_of(rank, number).get(state), rank, state)
        if _numel(tensor) == numel:
            return rank.file, tensor.dtype, tensor.offset
        if _numel(tensor):
            raise CorruptionError(
                f"{rank.file.path}: {state} of subgroup {number} has {_numel(tensor)} elements, "
                f"and its parameters have {numel}"
            )
        return self._swapped(rank, number, state, numel, master, tensor.dtype)

    def _swapped(
        self,
        rank: _Rank,
        number: int,
        state: str,
        numel: int,
        master: StoredTensor,
        dtype: torch.dtype,
    ) -> tuple[StoredFile, torch.dtype, int]:
        """Return the same for a subgroup that was on NVMe: its elements alone are in a file."""
        identity = master.attributes.get("ds_id")
        if not isinstance(identity, str) or not re.fullmatch(r"\d+_\d+", identity):
            raise CorruptionError(
                f"{rank.file.path}: the elements of subgroup {number} are neither in it, nor does "
                "it say in which file they are"
            )
        prefix = "" if state == MASTER else f"{state}-"
        name = f"{_SWAPPED}/rank{rank.number:02d}/{prefix}{identity}.tensor.swp"
        file = StoredFile(rank.reader, name)
        try:
            with rank.reader.open(name) as opened:
                found = opened.nbytes
        except CorruptionError as error:
            raise CorruptionError(f"{file.path}: {error}") from error
        expected = numel * dtype.itemsize
        alignment = _AIO_ALIGNED_BYTES * self._parallelism()
        if not expected <= found <= -(-expected // alignment) * alignment:
            raise CorruptionError(
                f"{file.path}: has {found} bytes, and the parameters of subgroup {number} have "
                f"{expected} there, or {expected} padded to a multiple of {alignment}"
            )
        return file, dtype, 0

    def _parallelism(self) -> int:
        config = self.first.model.get("ds_config")
        settings = config.get("aio") if isinstance(config, dict) else None
        value = settings.get("intra_op_parallelism", 1) if isinstance(settings, dict) else 1
        return value if type(value) is int and 0 < value < 1024 else 1

    def frozen(self, name: str, shape: tuple[int, ...]) -> Entry:
        part = -(-math.prod(shape) // len(self.ranks))
        runs, dtype = [], torch.float32
        for rank in self.ranks:
            tensor = (rank.model.get("frozen_param_fragments") or {}).get(name)
            flat = _flat(tensor, rank, f"parameter {name!r}")
            count = max(0, min(part, math.prod(shape) - rank.number * part))
            piece = _Fragment(rank.number * part, count, 0)
            runs.append(_run(rank.model_file, flat, piece))
            dtype = flat.dtype
        return flat_entry(name, BUFFER, dtype, shape, runs)
