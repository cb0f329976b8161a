"""Format "huggingface", read: directories of Trainer and accelerate, FSDP's included.

Weights and optimizers are in files of safetensors, torch.save or DCP, recognized by their names.
Docs: docs/internals/foreign-formats.md.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from tierstore.errors import CheckpointError, CorruptionError
from tierstore.inspection.reader import Reader
from tierstore.run.sealed import body_errors, is_count, parse_json, require
from tierstore.tools.convert import dcp, safetensors_files, torch_files
from tierstore.tools.convert.contents import Contents
from tierstore.tools.convert.entries import StoredFile
from tierstore.tools.convert.options import Reading
from tierstore.tools.convert.rank_files import Held, fitting, parts_of_dtensors, whole
from tierstore.tools.convert.torch_archive import read_torch_file

_OPTIMIZER = re.compile(r"optimizer\.pt|optimizer(_\d+)?\.bin")
_OPTIMIZER_FOLDER = re.compile(r"optimizer_\d+")

# Weights, in the order of preference: with a full state dict of FSDP, Trainer writes them twice.
_WEIGHTS_FOLDER = re.compile(r"pytorch_model_fsdp_\d+")
_WEIGHTS = (
    re.compile(r"pytorch_model_fsdp(_\d+)?\.bin"),
    re.compile(r"model(_\d+)?\.safetensors|model\.safetensors\.index\.json"),
    re.compile(r"pytorch_model(_\d+)?\.bin|pytorch_model\.bin\.index\.json"),
)
_INDEX = ".index.json"

# Files of single ranks of FSDP2, which accelerate writes with use_dcp=False.
_OF_RANK = re.compile(r"((?:pytorch_model_fsdp|optimizer)(?:_\d+)?)_rank(\d+)\.bin")

_XLA, _SAGEMAKER = "of FSDP on XLA", "of model parallelism on SageMaker"
_REFUSED = {
    _XLA: re.compile(r"rank\d+-of-\d+-.*"),
    _SAGEMAKER: re.compile(r"optimizer\.(pt|bin)_.*"),
    "of PEFT (--from safetensors reads its weights)": re.compile(r"adapter_model\..*"),
}
_STATE = "trainer_state.json"


def recognizes(path: Path) -> bool:
    """Return whether a path is a directory with more than weights in safetensors."""
    if not path.is_dir():
        return False
    patterns = [_OPTIMIZER, _OPTIMIZER_FOLDER, _WEIGHTS_FOLDER, _OF_RANK, _WEIGHTS[0], _WEIGHTS[2]]
    patterns += [_REFUSED[_XLA], _REFUSED[_SAGEMAKER]]
    return any(pattern.fullmatch(child.name) for child in path.iterdir() for pattern in patterns)


def read(paths: Sequence[Path], reading: Reading) -> list[Contents]:
    """Read directories.

    Raises:
        CorruptionError: a file is damaged, or not the one that the index names.
        CheckpointError: a directory has files of a kind that is not read, or no weights.
    """
    return [
        replace(contents, source="huggingface")
        for path in paths
        for contents in _read(path, reading)
    ]


def _read(path: Path, reading: Reading) -> Iterator[Contents]:
    reader = reading.reader(path)
    names = reader.list()
    for name in names:
        for what, pattern in _REFUSED.items():
            if pattern.fullmatch(name):
                raise CheckpointError(f"{path} has the file {name}, {what}: it is not read")
    weights = _weights(names)
    if not weights:
        raise CheckpointError(f"{path} has no weights, such as model.safetensors")
    optimizers = _matching(names, _OPTIMIZER)
    folders = _matching(names, _OPTIMIZER_FOLDER)
    of_ranks = _matching(names, _OF_RANK)
    found = [] if of_ranks else _read_weights(reader, weights, reading)
    seen: set[str] = set()
    for contents, name in zip(found, weights, strict=False):
        if seen & contents.weights.keys():
            raise CheckpointError(
                f"{path} has several models with tensors of the same names: convert {name} and "
                "the file of its optimizer alone, as two sources"
            )
        seen |= contents.weights.keys()
    yield from found
    yield from _read_ranks(reader, of_ranks, reading)
    if optimizers:
        yield from torch_files.read_files([(reader, name) for name in optimizers], reading)
    yield from dcp.read([_folder(path, name) for name in folders], reading)
    lost = [
        f"{name!r} beside the weights"
        for name in names
        if name.startswith(safetensors_files.TRAINER)
        and name not in (*optimizers, *folders, *of_ranks)
    ]
    step = None
    if _STATE in names:
        with body_errors(f"{path / _STATE}"):
            step = parse_json(reader.get(_STATE))["global_step"]
            require(is_count(step))
        lost.append(f"{_STATE!r}, except its step")
    yield Contents(source="huggingface", step=step, notes=_unread(names, weights), lost=lost)


def _matching(names: Sequence[str], pattern: re.Pattern[str]) -> list[str]:
    return [name for name in names if pattern.fullmatch(name)]


def _weights(names: Sequence[str]) -> list[str]:
    """Return the files or folders with weights, or the index of such files."""
    for pattern in (_OF_RANK, _WEIGHTS_FOLDER, *_WEIGHTS):
        found = _matching(names, pattern)
        if found:
            return [name for name in found if name.endswith(_INDEX)] or found
    return []


def _unread(names: Sequence[str], weights: Sequence[str]) -> list[str]:
    """Return a note on each file of weights that is not read, because another one is."""
    others = [name for pattern in _WEIGHTS for name in _matching(names, pattern)]
    if weights[0].endswith(_INDEX):
        return []
    return [
        f"weights are read from {weights[0]!r}, and not from {name!r} beside it"
        for name in others
        if name not in weights
    ]


def _read_weights(reader: Reader, names: Sequence[str], reading: Reading) -> list[Contents]:
    """Return the contents of each model."""
    if _WEIGHTS_FOLDER.fullmatch(names[0]):
        return dcp.read([_folder(reader.root, name) for name in names], reading)
    if names[0].endswith(_INDEX):
        files = safetensors_files.read_index(reader, names[0])
        if names[0] == f"model.safetensors{_INDEX}":
            return [safetensors_files.read_files(reader, files, reading)]
        found = torch_files.read_files([(reader, name) for name in files], reading)
        held = {name for contents in found for name in (*contents.weights, *contents.aliases)}
        if held != set().union(*files.values()):
            raise CorruptionError(f"{reader.root / names[0]}: names other tensors than its files")
        return found
    if names[0].endswith(".safetensors"):
        return [safetensors_files.read_files(reader, {name: None}, reading) for name in names]
    return [
        contents for name in names for contents in torch_files.read_files([(reader, name)], reading)
    ]


def _read_ranks(reader: Reader, names: Sequence[str], reading: Reading) -> Iterator[Contents]:
    """Yield the contents of each model and each optimizer in files of single ranks."""
    held: dict[str, list[Held]] = defaultdict(list)
    for name in names:
        match = _OF_RANK.fullmatch(name)
        assert match is not None
        value = read_torch_file(reader, name)
        held[match[1]].append(Held(int(match[2]), StoredFile(reader, name), value))
    for ranks in held.values():
        with fitting(f"{ranks[0].file.path}"):
            value = whole(ranks, parts_of_dtensors)
        yield from torch_files.sorted_contents(ranks[0].file, value, reading, ordered=True)


def _folder(path: Path, name: str) -> Path:
    """Return the path of a folder that is not a link."""
    if (path / name).is_symlink() or not (path / name).is_dir():
        raise CorruptionError(f"{path / name}: is a link, or not a folder")
    return path / name
