"""Format "deepspeed", read: checkpoints of ZeRO stages 1, 2 and 3, also with the optimizer on NVMe.

Each rank has a file with its parts of flat groups. Stages 1 and 2 cut a group of parameters,
joined, into equal partitions; stage 3 cuts each parameter. Docs: docs/internals/foreign-formats.md.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from typing_extensions import override

from tierstore.errors import CheckpointError, CorruptionError
from tierstore.inspection.reader import Reader
from tierstore.inspection.safe_pickle import StoredTensor
from tierstore.layout.encodings import MASTER
from tierstore.tools.convert.contents import Contents
from tierstore.tools.convert.deepspeed_engine import (
    MODEL_FILE,
    EngineFiles,
    Fragment,
    Rank,
    by_rank,
    flat_of,
    folder_of,
    mapping_of,
    numel_of,
    run_of,
    stage_of,
    structure_errors,
    zero_settings,
)
from tierstore.tools.convert.entries import Entry, StoredFile
from tierstore.tools.convert.flat import Run, flat_entry
from tierstore.tools.convert.options import Reading
from tierstore.tools.convert.torch_archive import read_torch_file

_OPTIMIZER_FILE = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
_OLD = re.compile(r".*_mp_rank_\d+optim_states\.pt")
# Files of other ways to cut parameters, and of earlier versions.
_REFUSED = {
    "names of DeepSpeed before 0.6, of 2022,": _OLD,
    "pipeline parallelism": re.compile(r"layer_\d+-model_.*|layer_\d+-model_states\.pt"),
    "experts of DeepSpeed's MoE": re.compile(r"layer_.*_expert_.*|expp_rank_.*"),
    "pipeline parallelism in ZeRO": re.compile(r".*_mp_rank_\d+_\d+_optim_states\.pt"),
}
_LATEST = "latest"
_SWAPPED = "offloaded_tensors"
_AIO_ALIGNED_BYTES = 1024
_AIO_PARALLELISM_MAX = 1023
_MOMENTUM = "momentum_buffer"


def recognizes(path: Path) -> bool:
    """Return whether a path is a directory that DeepSpeed saved, or its folder of one step."""
    folder = folder_of(path, _LATEST)
    names = [] if folder is None else [child.name for child in folder.iterdir()]
    has_models = "zero" not in names and any(map(MODEL_FILE.fullmatch, names))  # Else universal.
    return has_models or any(_OPTIMIZER_FILE.fullmatch(n) or _OLD.fullmatch(n) for n in names)


def read(paths: Sequence[Path], reading: Reading) -> list[Contents]:
    """Read the files of all ranks of one step, in one folder or in a folder for each node.

    Raises:
        CorruptionError: a file is damaged, or the files do not fit each other.
        CheckpointError: a rank is missing, or the files are of a kind that is not read.
    """
    with structure_errors(paths[0]):
        ranks = _read_ranks(paths, reading)
        stage = stage_of(ranks[0])
        reader = _PartitionedParameters(ranks) if stage == 3 else _PartitionedGroups(ranks)
        return [reader.contents()]


def _read_ranks(paths: Sequence[Path], reading: Reading) -> list[Rank]:
    """Read the files of all ranks, without the tensors."""
    folders = [folder_of(path, _LATEST) or path for path in paths]
    tags = {folder.name for folder, path in zip(folders, paths, strict=True) if folder != path}
    if len(tags) > 1:
        raise CheckpointError(
            f"the files {_LATEST!r} of the sources name different steps, {sorted(tags)}: name the "
            "folders of one step that all nodes have"
        )
    readers = [reading.reader(folder) for folder in folders]
    places: dict[str, Reader] = {}
    for reader in readers:
        for name in reader.list():
            for what, pattern in _REFUSED.items():
                if pattern.fullmatch(name):
                    raise CheckpointError(
                        f"{reader.root} has the file {name}: checkpoints with {what} are not read"
                    )
            if _OPTIMIZER_FILE.fullmatch(name) or MODEL_FILE.fullmatch(name):
                if name in places:
                    raise CheckpointError(
                        f"{places[name].root} and {reader.root} both have the file {name}: name "
                        "each part of the checkpoint once"
                    )
                places[name] = reader
    values = {
        name: mapping_of(read_torch_file(reader, name), reader, name)
        for name, reader in places.items()
    }
    optimizers = by_rank(_OPTIMIZER_FILE, values, paths[0])
    models = by_rank(MODEL_FILE, values, paths[0])
    if not optimizers and models:
        raise CheckpointError(
            f"{paths[0]} has no file of an optimizer: ZeRO stage 0 saves everything with the "
            f"model. Name the file {models[min(models)]} itself, with --from torch"
        )
    if not optimizers or sorted(optimizers) != list(range(len(optimizers))) or not models:
        raise CheckpointError(
            f"{paths[0]} lacks files of ranks: it has states of ranks {sorted(optimizers)} and "
            f"models of ranks {sorted(models)}; name the folders of all nodes"
        )
    ranks = []
    for number in range(len(optimizers)):
        name = optimizers[number]
        model = models.get(number, models[min(models)])
        ranks.append(
            Rank(
                number=number,
                reader=places[name],
                name=name,
                optimizer=mapping_of(values[name].get("optimizer_state_dict"), places[name], name),
                model=values[model],
                model_file=StoredFile(places[model], model),
            )
        )
    for rank in ranks:
        _check_count(rank, len(ranks))
    _refuse_different(
        "global_steps",
        {str(places[n].root / n): values[n].get("global_steps") for n in models.values()},
    )
    if stage_of(ranks[0]) == 3 and sorted(models) != sorted(optimizers):
        raise CheckpointError(f"{paths[0]} lacks model_states files of ZeRO-3 ranks")
    return ranks


def _refuse_different(what: str, found: Mapping[str, Any]) -> None:
    """Refuse files that do not agree.

    Args:
        what: the value that is compared.
        found: path -> value.
    """
    (first, value), *others = found.items()
    for path, other in others:
        if other != value:
            raise CheckpointError(
                f"{first} and {path} are of different steps: {what} is {value} and {other}. Name "
                "the folders of one step that all ranks have saved"
            )


def _check_count(rank: Rank, count: int) -> None:
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


class _PartitionedGroups(EngineFiles):
    """Stages 1 and 2: a group's parameters, joined and padded, are cut into equal partitions."""

    @override
    def base(self, rank: Rank) -> Any:
        return rank.optimizer.get("base_optimizer_state")

    @override
    def states_of(self, rank: Rank, number: int) -> Mapping[str, Any]:
        base = self.base(rank)
        if isinstance(base, list):  # An elastic checkpoint.
            return mapping_of(base[number], rank.reader, rank.name)
        group = base["param_groups"][number]
        return mapping_of(base["state"].get(group["params"][0], {}), rank.reader, rank.name)

    @override
    def entries_of(self, number: int) -> Iterator[Entry]:
        masters = [self._master(rank, number) for rank in self.ranks]
        fragments = self._fragments(number, [numel_of(tensor) for tensor in masters])
        states = {MASTER: masters}
        for name, value in self.states_of(self.first, number).items():
            if isinstance(value, StoredTensor) and value.shape:
                states[name] = [self._state(rank, number, name) for rank in self.ranks]
        places = {
            state: self._whole(number, fragments, tensors)
            if self._is_whole(number, state, tensors, masters)
            else fragments
            for state, tensors in states.items()
        }
        dtypes = {
            state: self.common_dtype(f"{state} of group {number}", [t.dtype for t in tensors])
            for state, tensors in states.items()
        }
        for parameter, shape in self.shapes[number].items():
            for state, tensors in states.items():
                runs = []
                for rank, tensor, own in zip(self.ranks, tensors, places[state], strict=True):
                    piece = own.get(parameter)
                    if piece is not None:
                        runs.append(run_of(rank.file, tensor, piece))
                yield flat_entry(parameter, state, dtypes[state], shape, runs)

    def _is_whole(
        self,
        number: int,
        state: str,
        tensors: Sequence[StoredTensor],
        masters: Sequence[StoredTensor],
    ) -> bool:
        """Return whether a state is of whole parameters, although a rank has parts of them.

        Muon's momentum is, unless the optimizer is offloaded: Newton-Schulz needs whole matrices.
        """
        base = self.base(self.first)
        group = base["param_groups"][number] if isinstance(base, dict) else {}
        if state != _MOMENTUM or not group.get("use_muon"):
            return False
        settings = zero_settings(self.first.model)
        if settings is None:
            return any(map(lambda a, b: numel_of(a) != numel_of(b), tensors, masters))
        offloaded = settings.get("offload_optimizer")
        device = offloaded.get("device") if isinstance(offloaded, dict) else None
        return device in (None, "none")

    def _whole(
        self,
        number: int,
        fragments: Sequence[Mapping[str, Fragment]],
        tensors: Sequence[StoredTensor],
    ) -> list[dict[str, Fragment]]:
        """Return where a state of whole parameters is: on the first rank that has it."""
        shapes = self.shapes[number]
        places: list[dict[str, Fragment]] = []
        seen: set[str] = set()
        for rank, own, tensor in zip(self.ranks, fragments, tensors, strict=True):
            members = [name for name in shapes if name in own]
            starts = list(accumulate((math.prod(shapes[name]) for name in members), initial=0))
            if members and numel_of(tensor) != starts[-1]:
                raise CorruptionError(
                    f"{rank.file.path}: {_MOMENTUM} of group {number} has {numel_of(tensor)} "
                    f"elements, and its parameters have {starts[-1]}"
                )
            places.append(
                {
                    name: Fragment(0, math.prod(shapes[name]), start)
                    for name, start in zip(members, starts, strict=False)
                    if name not in seen
                }
            )
            seen.update(members)
        return places

    def _master(self, rank: Rank, number: int) -> StoredTensor:
        groups = rank.optimizer.get("single_partition_of_fp32_groups")
        return flat_of(groups[number] if isinstance(groups, list) else None, rank.file, "masters")

    def _state(self, rank: Rank, number: int, name: str) -> StoredTensor:
        return flat_of(self.states_of(rank, number).get(name), rank.file, name)

    def _fragments(self, number: int, lean: Sequence[int]) -> list[dict[str, Fragment]]:
        """Return the fragments of each rank, by the name of the parameter.

        The order of the parameters determines the fragments, and the files also record them. Both
        must agree, except with ``round_robin_gradients``: the recorded order then differs from the
        order of the elements. Without settings, the layout tells which case it is: partitions that
        begin at parameters cut no parameter, and differ in size.

        Args:
            number: of the group.
            lean: elements of each partition, without padding.
        """
        derived = self._derived(number, lean)
        stated = [self._stated(rank, number) for rank in self.ranks]
        if derived == stated or self._is_round_robin(number, derived, stated, lean):
            return derived
        # Partitions that begin at parameters: each is padded to the largest one.
        for rank, own, elements in zip(self.ranks, stated, lean, strict=True):
            ends = 0
            for piece in sorted(own.values(), key=lambda piece: piece.offset):
                if piece.offset < ends or piece.offset + piece.numel > elements:
                    raise CorruptionError(f"{rank.file.path}: its fragments overlap or lie outside")
                ends = piece.offset + piece.numel
        return stated

    def _derived(self, number: int, lean: Sequence[int]) -> list[dict[str, Fragment]]:
        partition = max(
            elements + self._padding(rank, number)
            for rank, elements in zip(self.ranks, lean, strict=True)
        )
        paddings = self.first.optimizer.get("param_alignment_paddings")
        aligned = paddings[number] if isinstance(paddings, list) else [0] * len(self.shapes[number])
        lengths = [math.prod(shape) for shape in self.shapes[number].values()]
        ends = accumulate(n + extra for n, extra in zip(lengths, aligned, strict=True))
        found: list[dict[str, Fragment]] = [{} for _ in self.ranks]
        begin = 0
        for name, length, end in zip(self.shapes[number], lengths, ends, strict=True):
            for rank, own in enumerate(found):
                first = max(begin, rank * partition)
                last = min(begin + length, (rank + 1) * partition)
                if first < last:
                    own[name] = Fragment(first - begin, last - first, first - rank * partition)
            begin = end
        return found

    def _padding(self, rank: Rank, number: int) -> int:
        if "zero_stage" not in rank.optimizer:
            return 0  # BF16_Optimizer keeps the padding of masters.
        paddings = rank.optimizer.get("group_paddings")
        return int(paddings[number]) if isinstance(paddings, list) else 0

    def _stated(self, rank: Rank, number: int) -> dict[str, Fragment]:
        """Return the fragments that the file of a rank records."""
        mappings = rank.optimizer.get("param_slice_mappings")
        if not isinstance(mappings, list):
            raise CorruptionError(f"{rank.file.path}: lacks param_slice_mappings")
        found = {}
        for name, address in mappings[number].items():
            offset, numel = address.get("start"), address.get("numel")
            before = sum(
                int(self._address(other, number, name)) for other in self.ranks[: rank.number]
            )
            found[name] = Fragment(before, int(numel), int(offset))
        return found

    def _address(self, rank: Rank, number: int, name: str) -> int:
        """Return how many elements of a parameter a rank has."""
        mappings = rank.optimizer.get("param_slice_mappings")
        address = mappings[number].get(name) if isinstance(mappings, list) else None
        return 0 if address is None else int(address.get("numel"))

    def _is_round_robin(
        self,
        number: int,
        derived: Sequence[Mapping[str, Fragment]],
        stated: Sequence[Mapping[str, Fragment]],
        lean: Sequence[int],
    ) -> bool:
        settings = zero_settings(self.first.model)
        if settings is not None:
            return settings.get("round_robin_gradients") is True
        names = [name for own in stated for name in own]
        is_cut = len(set(names)) < len(names)
        fits = [sum(piece.numel for piece in own.values()) for own in derived] == list(lean)
        if is_cut == fits:
            return is_cut
        raise CheckpointError(
            f"{self.first.model_file.path}: does not tell whether round_robin_gradients was set, "
            f"on which the order of the elements of group {number} depends: load the checkpoint in "
            "DeepSpeed with a config that is a dict, and save it again"
        )


class _PartitionedParameters(EngineFiles):
    """Stage 3: each rank has an equal part of each parameter, the last one padded."""

    def __init__(self, ranks: Sequence[Rank]) -> None:
        super().__init__(ranks)
        for rank in ranks:
            if rank.model.get("param_shapes") != self.shapes:
                raise CorruptionError(
                    f"{rank.model_file.path}: has other parameters than the file of rank 0"
                )

    @override
    def base(self, rank: Rank) -> Any:
        return rank.optimizer.get("optimizer_state_dict")

    @override
    def states_of(self, rank: Rank, number: int) -> Mapping[str, Any]:
        state = mapping_of(self.base(rank), rank.reader, rank.name).get("state", {})
        return mapping_of(state.get(number, {}), rank.reader, rank.name)

    @override
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
            dtype = self.common_dtype(f"{state} of subgroup {number}", [s[1] for s in sources])
            for (parameter, shape), part, start in zip(shapes.items(), parts, starts, strict=False):
                runs = []
                for rank, (file, _, offset) in enumerate(sources):
                    count = max(0, min(part, math.prod(shape) - rank * part))
                    runs.append(Run(rank * part, count, file, offset + start * dtype.itemsize))
                yield flat_entry(parameter, state, dtype, shape, runs)

    def _source(
        self, rank: Rank, number: int, state: str, numel: int
    ) -> tuple[StoredFile, torch.dtype, int]:
        """Return the file with a flat state of a rank, its dtype, and the byte of its start."""
        groups = rank.optimizer.get("fp32_flat_groups")
        master = flat_of(groups[number] if isinstance(groups, list) else None, rank.file, "masters")
        tensor = master
        if state != MASTER:
            tensor = flat_of(self.states_of(rank, number).get(state), rank.file, state)
        if numel_of(tensor) == numel:
            return rank.file, tensor.dtype, tensor.offset
        if numel_of(tensor):
            raise CorruptionError(
                f"{rank.file.path}: {state} of subgroup {number} has {numel_of(tensor)} elements, "
                f"and its parameters have {numel}"
            )
        return self._swapped(rank, number, state, numel, master, tensor.dtype)

    def _swapped(
        self,
        rank: Rank,
        number: int,
        state: str,
        numel: int,
        master: StoredTensor,
        dtype: torch.dtype,
    ) -> tuple[StoredFile, torch.dtype, int]:
        """Return the same for a subgroup that was on NVMe, whose elements have their own file."""
        identity = master.attributes.get("ds_id")
        if not isinstance(identity, str) or not re.fullmatch(r"\d+_\d+", identity):
            raise CorruptionError(
                f"{rank.file.path}: neither has the elements of subgroup {number} nor names the "
                "file that has them"
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
        if not isinstance(config, dict):
            return _AIO_PARALLELISM_MAX
        settings = config.get("aio")
        value = settings.get("intra_op_parallelism", 1) if isinstance(settings, dict) else 1
        return value if type(value) is int and 0 < value <= _AIO_PARALLELISM_MAX else 1
