"""Format "megatron", read: checkpoints of Megatron-LM, NeMo and Megatron-Bridge.

They are DCP directories. Backend "torch_dist" stacks layers and experts and keeps what is not a
tensor as a file of torch.save; backend "fsdp_dtensor" has keys by parameter and SwiGLU in halves.
Docs: docs/internals/foreign-formats.md.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from tierstore.checkpoint.dcp_reader import StoredEntries
from tierstore.errors import CheckpointError, CorruptionError
from tierstore.inspection.reader import Reader
from tierstore.inspection.safe_pickle import StoredTensor
from tierstore.layout.chunks import Chunk
from tierstore.layout.encodings import MASTER
from tierstore.layout.other_rules import MOMENTUM
from tierstore.layout.state_parts import nested
from tierstore.run.file_names import METADATA_NAME
from tierstore.run.sealed import parse_json
from tierstore.tools.convert.contents import Contents, Group
from tierstore.tools.convert.dcp import checked_entries, stored_entry
from tierstore.tools.convert.entries import BUFFER, Entry
from tierstore.tools.convert.options import Reading
from tierstore.tools.convert.torch_archive import read_torch_bytes, small_tensor

_TRACKER = "latest_checkpointed_iteration.txt"
_CONFIG = "metadata.json"
_COMMON_FILE, _COMMON_KEY = "common.pt", "common_state/shard_0_1"
_ITERATION = re.compile(r"iter_\d{7,}")
_ORDER_NOTE = (
    "Megatron does not save the order of the parameters in the model: groups have the order of "
    "the files, by layer. To load an optimizer by position, as torch.optim does, make its groups "
    "in the order of param_names"
)
_SAVE_AGAIN = "save again with --ckpt-format torch_dist --dist-ckpt-optim-fully-reshardable"

# Of "torch_dist": the state of a parameter, and a bucket, which belongs to no parameter.
_STATE = re.compile(r"(?:chained_(\d+)\.)?optimizer\.state\.([^.]+)\.(.+)")
_BUCKET = re.compile(r"(?:chained_\d+\.)?optimizer\.distributed\..+")
_STATES, _META = "optimizer.state.", "optimizer.param_to_group_meta."  # Of "fsdp_dtensor".
_MASTERS = ("param", "fp32_param", "master_param")
_EXTRA_STATE = "_extra_state"

_HALF = re.compile(r"(.+\.linear_fc1\.(?:weight|bias)\d*)_([wv])")
_STACKED_LAYERS = re.compile(r"(.*\blayers)\.(?!\d+\.)(.+)")
_LAYER = re.compile(r"(.*?\blayers)\.(\d+)\.(.+)")
_STACKED_EXPERTS = re.compile(r"(.+\.mlp\.experts)\.experts\.(linear_fc[12]\.(?:weight|bias))")
_FUSED_PART = re.compile(r".+\.(?:weight|bias)\.\w+")
_EXPERT = re.compile(r".+\.mlp\.experts\..+")
_EMBEDDING = re.compile(r".*\b(?:word_embeddings|output_layer)\.weight")

# Name of a hyperparameter in Megatron -> its name in the destination.
_ADAMW = {name: name for name in ("lr", "betas", "eps", "weight_decay")}
_MUON = {
    **{name: name for name in ("lr", "momentum", "weight_decay", "nesterov", "ns_steps")},
    **{"momentum_beta": "momentum", "use_nesterov": "nesterov", "num_ns_steps": "ns_steps"},
}


def recognizes(path: Path) -> bool:
    """Return whether a path is a directory that Megatron saved, or its folder of an iteration."""
    if (path / _TRACKER).is_file():
        return True
    is_iteration = _ITERATION.fullmatch(path.name) is not None or (path / _CONFIG).is_file()
    return is_iteration and (path / METADATA_NAME).is_file()


def read(paths: Sequence[Path], reading: Reading) -> list[Contents]:
    """Read one iteration from each directory.

    Raises:
        CorruptionError: one is damaged.
        CheckpointError: one is of a kind that is not read; the message says what to do.
    """
    return [_read(_folder_of(path), reading) for path in paths]


def _folder_of(path: Path) -> Path:
    """Return the directory of an iteration: the path, or the one that the tracker file names."""
    tracker = path / _TRACKER
    if not tracker.is_file():
        return path
    text = tracker.read_bytes()[:64].decode(errors="replace").strip()
    name = f"iter_{int(text):07d}" if text.isascii() and text.isdigit() else text
    is_known = name == "release" or _ITERATION.fullmatch(name) is not None
    if not is_known or not (path / name).is_dir():
        raise CheckpointError(
            f"{tracker} names the iteration {text!r}, whose directory is not beside it: "
            "name the directory of an iteration"
        )
    return path / name


def _read(path: Path, reading: Reading) -> Contents:
    reader = Reader(path)
    names = reader.list()
    backend = _backend(reader) if _CONFIG in names else None
    if METADATA_NAME not in names or backend not in (None, "torch_dist", "fsdp_dtensor"):
        kind = backend or ("torch" if any(n.startswith("mp_rank_") for n in names) else "unknown")
        raise CheckpointError(
            f"{path} is a Megatron checkpoint of the format {kind!r}, which is not read: "
            f"{_SAVE_AGAIN}"
        )
    entries, _ = checked_entries(path, reading)
    common: Any = None
    if _COMMON_KEY in entries.keys:
        common = _common_state(f"{path}: {_COMMON_KEY}", entries.raw(_COMMON_KEY))
    elif _COMMON_FILE in names:
        common = _common_state(f"{path / _COMMON_FILE}", _content(reader, _COMMON_FILE))
    if backend == "fsdp_dtensor" or (backend is None and common is None):
        return _of_fsdp_dtensor(entries, reading)
    return _of_torch_dist(entries, common or {}, reading)


def _backend(reader: Reader) -> str:
    """Return the backend that the file beside the tensors names."""
    where = f"{reader.root / _CONFIG}"
    with _form_errors(where):
        return str(parse_json(_content(reader, _CONFIG))["sharded_backend"])


@contextmanager
def _form_errors(where: str) -> Iterator[None]:
    """Turn errors of the block about a value of another form into CorruptionError."""
    try:
        yield
    except (LookupError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise CorruptionError(f"{where} is not what Megatron writes") from error


def _content(reader: Reader, name: str) -> bytes:
    try:
        return reader.get(name)
    except CorruptionError as error:
        raise CorruptionError(f"{reader.root / name}: {error}") from error


def _common_state(where: str, data: bytes) -> Mapping[str, Any]:
    """Return the values that are not tensors of the model, from a file of torch.save."""
    value = read_torch_bytes(data, where)
    if isinstance(value, list) and len(value) == 1:
        value = value[0]
    if not isinstance(value, dict):
        raise CorruptionError(f"{where} is not a dict")
    return {
        str(key): _with_numbers(item, data)
        for key, item in value.items()
        if key in ("iteration", "optimizer") or not isinstance(item, StoredTensor)
    }


def _with_numbers(value: Any, data: bytes) -> Any:
    """Return a value with tensors of one element, such as step counts, as numbers."""
    if isinstance(value, dict):
        return {key: _with_numbers(item, data) for key, item in value.items()}
    if isinstance(value, list):
        return [_with_numbers(item, data) for item in value]
    if isinstance(value, StoredTensor) and all(size == 1 for size in value.shape):
        return small_tensor(value, data).item()
    return value


# ---------------------------------------------------------------------------- torch_dist


def _of_torch_dist(entries: StoredEntries, common: Mapping[str, Any], reading: Reading) -> Contents:
    optimizers = list(_optimizers_in(common.get("optimizer")))
    if reading.optimizer:
        _refuse_other_types(entries, common.get("optimizer"))
    model: list[Entry] = []
    by_optimizer: dict[str | None, list[Entry]] = defaultdict(list)
    others: list[str] = []
    for key in entries.keys:
        match = _STATE.fullmatch(key)
        if entries.tensor(key) is None:
            others.append(key)
        elif match is None and not _BUCKET.fullmatch(key):
            model.append(stored_entry(entries, key, _without_wrappers(key), MASTER))
        elif match is not None:
            number, state, name = match.groups()
            by_optimizer[number].append(stored_entry(entries, key, _without_wrappers(name), state))
    states: list[Entry] = []
    number_of: dict[str, int] = {}
    for number, stored in by_optimizer.items():
        whole = list(_as_in_the_model(stored))
        states += whole
        if number is not None:
            number_of |= {entry.parameter: int(number) for entry in whole}
    weights, found, dtypes = _paired(entries.path, model, states, reading)
    states_of: dict[str, set[str]] = defaultdict(set)
    for entry in found:
        states_of[entry.parameter].add(entry.state)
    if not reading.optimizer:
        return _model_alone(weights, states_of, [*others, *common])
    members: dict[str, list[str]] = defaultdict(list)
    hyperparameters: dict[str, dict[str, Any]] = {}
    scalars = {}
    for name, entry in weights.items():
        if name not in states_of:
            continue
        index = number_of.get(name, len(optimizers))
        known = optimizers[index : index + 1] or optimizers
        candidates = [group for optimizer in known for group in optimizer.groups]
        group = _group_of(entry, states_of[name], candidates, entries.path)
        values = _hyperparameters(group, states_of[name])
        hyperparameters[repr(values)] = values
        members[repr(values)].append(name)
        counts = [group.get("step"), *(optimizer.step for optimizer in known)]
        step = next((count for count in counts if isinstance(count, int | float)), None)
        if step is not None and MOMENTUM not in states_of[name]:
            scalars[name] = {"step": float(step)}
    notes = []
    if len(members) > 1:
        notes.append(
            "Megatron does not save which parameters a param group has. They were assigned by its "
            "default rules: biases and vectors to the group without weight decay, and experts, "
            "embeddings and matrices of Muon to their own groups"
        )
    return _contents(
        entries.path,
        weights=weights,
        states=found,
        groups=_groups(members, hyperparameters),
        scalars=scalars,
        dtypes=dtypes,
        iteration=common.get("iteration"),
        others=[*others, *common],
        notes=notes,
    )


@dataclass(frozen=True, slots=True)
class _Optimizer:
    """One optimizer of the common state."""

    groups: Sequence[dict[str, Any]]
    step: Any
    """The step count of all parameters, if it is not in the groups."""


def _optimizers_in(value: Any) -> Iterator[_Optimizer]:
    """Yield the optimizers of a chain in their order, or the only one."""
    if not isinstance(value, dict | list):
        return
    if isinstance(value, dict) and isinstance(value.get("param_groups"), list):
        state = value.get("state")
        step = state.get("common_step") if isinstance(state, dict) else None
        groups = [group for group in value["param_groups"] if isinstance(group, dict)]
        yield _Optimizer(groups, step)
        return
    items = value if isinstance(value, list) else list(_in_order(value))
    for item in items:
        yield from _optimizers_in(item)


def _in_order(value: Mapping[Any, Any]) -> Iterator[Any]:
    """Yield the items of a dict whose keys may be numbers, in their order."""
    for key in sorted(value, key=lambda key: (len(str(key)), str(key))):
        yield value[key]


def _refuse_other_types(entries: StoredEntries, optimizer: Any) -> None:
    """Refuse states that belong to no parameter.

    Raises:
        CheckpointError: the optimizer was saved in a form that is not read.
    """
    kinds = set(_sharding_types(optimizer)) - {"fully_reshardable"}
    bucket = next((key for key in entries.keys if _BUCKET.fullmatch(key)), None)
    if kinds or bucket is not None:
        kind = min(kinds, default="dp_reshardable")
        raise CheckpointError(
            f"{entries.path} has the optimizer in the form {kind!r}, whose elements belong to no "
            f"parameter: load it in Megatron and {_SAVE_AGAIN}, or convert the weights with "
            "--only model"
        )


def _sharding_types(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        for key, item in value.items():
            if key == "param_state_sharding_type":
                yield str(item)
            yield from _sharding_types(item)


def _group_of(
    entry: Entry, states: set[str], groups: Sequence[dict[str, Any]], path: Path
) -> dict[str, Any]:
    """Return the param group of a parameter, by the rules with which Megatron makes groups.

    Raises:
        CheckpointError: the rules leave several groups, or none.
    """
    is_muon = MOMENTUM in states
    found = [group for group in groups if ("betas" not in group) == is_muon]
    decays = not (entry.parameter.endswith(".bias") or len(entry.shape) == 1)
    rules: list[Callable[[dict[str, Any]], bool]] = [
        lambda g: bool(g.get("wd_mult", g.get("weight_decay", 1.0))) == decays,
        lambda g: bool(g.get("is_expert_parallel")) == bool(_EXPERT.fullmatch(entry.parameter)),
        lambda g: bool(g.get("is_decoupled_lr")) == bool(_EMBEDDING.fullmatch(entry.parameter)),
    ]
    for rule in rules:  # A rule without a group of its own was not used.
        found = [group for group in found if rule(group)] or found
    values = [_hyperparameters(group, states) for group in found]
    if not found or any(value != values[0] for value in values):
        raise CheckpointError(
            f"{path}: {len(found)} param groups may have {entry.parameter!r}, and Megatron does "
            "not save which one does: convert the weights with --only model"
        )
    return found[0]


# -------------------------------------------------------------------------- fsdp_dtensor


def _of_fsdp_dtensor(entries: StoredEntries, reading: Reading) -> Contents:
    model: list[Entry] = []
    states: list[Entry] = []
    leaves: dict[str, list[tuple[tuple[str | int, ...], str]]] = defaultdict(list)
    scalars: dict[str, dict[str, float]] = defaultdict(dict)
    others: list[str] = []
    for key in entries.keys:
        is_tensor = entries.tensor(key) is not None
        if key.startswith(_META):
            path = entries.path_of(key)
            if len(path) < 4:
                name, _, last = key.removeprefix(_META).rpartition(".")
                path = ("", "", name, last)
            leaves[_whole_name(str(path[2]))].append((path[3:], key))
        elif key.startswith(_STATES):
            name, _, state = key.removeprefix(_STATES).rpartition(".")
            name = _without_wrappers(name)
            if is_tensor and state != "step":
                states.append(stored_entry(entries, key, name, state))
            elif state == "step":
                with _form_errors(f"{entries.path}: {key}"):
                    scalars[_whole_name(name)]["step"] = float(entries.value(key))
            else:
                others.append(key)
        elif is_tensor and key.startswith("model."):
            name = _without_wrappers(key.removeprefix("model."))
            model.append(stored_entry(entries, key, name, MASTER))
        else:
            others.append(key)
    weights, found, dtypes = _paired(entries.path, model, list(_as_in_the_model(states)), reading)
    states_of: dict[str, set[str]] = defaultdict(set)
    for entry in found:
        states_of[entry.parameter].add(entry.state)
    if not reading.optimizer:
        return _model_alone(weights, states_of, others)
    members: dict[str, list[str]] = defaultdict(list)
    hyperparameters: dict[str, dict[str, Any]] = {}
    for name in weights:
        if name not in states_of:
            continue
        if name not in leaves:
            raise CheckpointError(
                f"{entries.path} has states of {name!r} and no hyperparameters of it "
                f"({_META}...): convert the weights with --only model"
            )
        known = {*_ADAMW, *_MUON, "step"}
        read = {path: entries.value(key) for path, key in leaves[name] if path[0] in known}
        with _form_errors(f"{entries.path}: hyperparameters of {name!r}"):
            meta = dict(nested(list(read.items())))
        step = meta.get("step")
        if isinstance(step, int | float) and MOMENTUM not in states_of[name]:
            scalars[name].setdefault("step", float(step))
        values = _hyperparameters(meta, states_of[name])
        hyperparameters[repr(values)] = values
        members[repr(values)].append(name)
    iteration = entries.value("iteration") if "iteration" in entries.keys else None
    return _contents(
        entries.path,
        weights=weights,
        states=found,
        groups=_groups(members, hyperparameters),
        scalars={name: values for name, values in scalars.items() if name in states_of},
        dtypes=dtypes,
        iteration=iteration,
        others=others,
        notes=[],
    )


# ---------------------------------------------------------------------- names and shapes


def _without_wrappers(name: str) -> str:
    """Return a name without the names of modules that wrap a model."""
    while name.startswith("module."):
        name = name.removeprefix("module.")
    return name


def _whole_name(name: str) -> str:
    """Return the name of a parameter, without the suffix of a half of it."""
    name = _without_wrappers(name)
    half = _HALF.fullmatch(name)
    return half[1] if half else name


def _as_in_the_model(entries: Sequence[Entry]) -> Iterator[Entry]:
    """Yield entries of the parameters of the model: halves joined, layers and experts apart.

    Raises:
        CheckpointError: an entry is a part of a parameter that cannot be put together.
    """
    halves: dict[tuple[str, str], dict[str, Entry]] = defaultdict(dict)
    for entry in entries:
        half = _HALF.fullmatch(entry.parameter)
        if half:
            found = halves[half[1], entry.state]
            found[half[2]] = entry
            if found.keys() == {"w", "v"}:
                del halves[half[1], entry.state]
                joined = replace(_joined(found["w"], found["v"]), parameter=half[1])
                yield from _as_in_the_model([joined])
            continue
        if _FUSED_PART.fullmatch(entry.parameter):
            raise CheckpointError(
                f"{entry.parameter!r} is a part of a projection that Megatron saves in parts "
                "(gated delta net, Mamba), which are not read: export the weights with Megatron"
            )
        for layer in _apart(entry, _STACKED_LAYERS, "{0}.{index}.{1}"):
            yield from _apart(layer, _STACKED_EXPERTS, "{0}.{1}{index}")
    for (_, state), found in halves.items():
        (only,) = found.values()
        raise CheckpointError(
            f"{state} of {only.parameter!r} is one half of a SwiGLU, and the other is missing"
        )


def _apart(entry: Entry, pattern: re.Pattern[str], name: str) -> Iterator[Entry]:
    """Yield the items of an entry that is stacked along its first dimension, or the entry."""
    match = pattern.fullmatch(entry.parameter)
    if match is None or not entry.shape:
        yield entry
        return
    for index in range(entry.shape[0]):
        yield _item(entry, index, name.format(*match.groups(), index=index))


def _item(entry: Entry, index: int, name: str) -> Entry:
    def read(chunk: Chunk, target: torch.Tensor) -> None:
        entry.read(Chunk((index, *chunk.offsets), (1, *chunk.sizes)), target[None])

    return replace(entry, parameter=name, shape=entry.shape[1:], read=read)


def _joined(first: Entry, second: Entry) -> Entry:
    """Return the concatenation of two entries along the first dimension."""
    if first.dtype != second.dtype or first.shape[1:] != second.shape[1:]:
        raise CorruptionError(
            f"{first.state} of {first.parameter!r} and {second.parameter!r} differ in form"
        )
    rows = first.shape[0]

    def read(chunk: Chunk, target: torch.Tensor) -> None:
        start, end = chunk.offsets[0], chunk.offsets[0] + chunk.sizes[0]
        for entry, begin, stop in ((first, 0, rows), (second, rows, rows + second.shape[0])):
            low, high = max(start, begin), min(end, stop)
            if low < high:
                part = Chunk((low - begin, *chunk.offsets[1:]), (high - low, *chunk.sizes[1:]))
                entry.read(part, target[low - start : high - start])

    return replace(first, shape=(rows + second.shape[0], *first.shape[1:]), read=read)


def _paired(
    path: Path, model: Sequence[Entry], states: Sequence[Entry], reading: Reading
) -> tuple[dict[str, Entry], list[Entry], dict[str, torch.dtype]]:
    """Return the weights by name, the states, and dtypes of weights that have another master.

    Args:
        path: for messages.
        model: the tensors of the model, as they are stored.
        states: the states, as in the model.
        reading: without the optimizer, states that fit no weight are left out.

    Raises:
        CheckpointError: a state has no weight, or another shape than its weight.
    """
    weights = _by_layer({entry.parameter: entry for entry in _as_in_the_model(model)})
    found: list[Entry] = []
    dtypes: dict[str, torch.dtype] = {}
    for entry in states:
        weight = weights.get(entry.parameter)
        if weight is None or weight.shape != entry.shape:
            if not reading.optimizer:
                continue
            what = "no weight" if weight is None else f"a weight of {list(weight.shape)}"
            raise CheckpointError(
                f"{path} has {entry.state} of {entry.parameter!r} with shape {list(entry.shape)}, "
                f"and {what} of this name: convert the weights with --only model"
            )
        if entry.state not in _MASTERS:
            found.append(entry)
        else:
            weights[entry.parameter] = replace(entry, state=MASTER)
            if weight.dtype != entry.dtype:
                dtypes[entry.parameter] = weight.dtype
    return weights, found, dtypes


def _by_layer(weights: Mapping[str, Entry]) -> dict[str, Entry]:
    """Return weights in the order of the files, but stacked layers layer by layer."""
    first: dict[str, int] = {}
    keys: dict[str, tuple[int, int, int]] = {}
    for number, name in enumerate(weights):
        layer = _LAYER.fullmatch(name)
        if layer is None:
            keys[name] = (number, 0, 0)
            continue
        stack, index, rest = layer.groups()
        place = first.setdefault(stack, number)
        keys[name] = (place, int(index), first.setdefault(f"{stack}.{rest}", number))
    return {name: weights[name] for name in sorted(weights, key=lambda name: keys[name])}


# ------------------------------------------------------------------------------- results


def _hyperparameters(group: Mapping[str, Any], states: set[str]) -> dict[str, Any]:
    """Return the hyperparameters of a group under the names of torch.optim."""
    is_muon = MOMENTUM in states
    names = _MUON if is_muon else _ADAMW
    values = {names[key]: value for key, value in group.items() if key in names}
    if isinstance(values.get("betas"), list):
        values["betas"] = tuple(values["betas"])
    return {**values, "algorithm": "muon" if is_muon else "adamw"}


def _model_alone(
    weights: Mapping[str, Entry], states_of: Mapping[str, set[str]], others: Sequence[str]
) -> Contents:
    """Return the model. If any weight has states, weights without states are buffers."""
    entries = [
        entry if name in states_of or not states_of else replace(entry, state=BUFFER)
        for name, entry in weights.items()
    ]
    return Contents(source="megatron", entries=entries, lost=list(_lost(others)))


def _groups(
    members: Mapping[str, Sequence[str]], hyperparameters: Mapping[str, dict[str, Any]]
) -> list[Group]:
    """Return the param groups, from the same keys of both."""
    return [
        Group(hyperparameters=hyperparameters[key], parameters=names)
        for key, names in members.items()
    ]


def _contents(
    path: Path,
    *,
    weights: Mapping[str, Entry],
    states: Sequence[Entry],
    groups: Sequence[Group],
    scalars: Mapping[str, Mapping[str, float]],
    dtypes: Mapping[str, torch.dtype],
    iteration: Any,
    others: Sequence[str],
    notes: Sequence[str],
) -> Contents:
    if iteration is not None and (not isinstance(iteration, int) or iteration < 0):
        raise CorruptionError(f"{path} has the iteration {iteration!r}")
    return Contents(
        source="megatron",
        entries=[*weights.values(), *states],
        groups=groups,
        scalars=scalars,
        dtypes=dtypes,
        step=iteration,
        notes=[*notes, _ORDER_NOTE],
        lost=list(_lost(others)),
    )


def _lost(keys: Sequence[str]) -> Iterator[str]:
    """Yield the values that the conversion leaves out."""
    carried = ("iteration", "optimizer", "checkpoint_version", "content_metadata", "common_state")
    extra_states = [key for key in keys if _EXTRA_STATE in key]
    heads = Counter(re.split(r"[./]", key)[0] for key in keys if _EXTRA_STATE not in key)
    for head, count in heads.items():
        if head not in carried:
            yield f"{head!r}: {count} values of neither the model nor its optimizer"
    if extra_states:
        yield (
            "the extra state of modules: it is for matrix products in FP8 "
            f"({len(extra_states)} values, such as {extra_states[0]!r})"
        )
