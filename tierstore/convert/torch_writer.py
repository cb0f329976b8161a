"""Format "torch", written: one file that torch.load(weights_only=True) reads."""

from __future__ import annotations

import io
import json
import pickle
import struct
import sys
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from typing_extensions import override

from tierstore.checkpoint.dcp_writer import portable
from tierstore.convert.contents import Contents, Group
from tierstore.convert.entries import BUFFER, Entry
from tierstore.convert.options import Options
from tierstore.convert.pipeline import Piece, bytes_of
from tierstore.convert.torch_files import BY_ALGORITHM, TIERSTORE
from tierstore.layout.parameters import MASTER
from tierstore.run import tagged_json

FILE = "checkpoint.pt"
"""The name of the file in the temporary directory."""

_ALIGNMENT_BYTES = 64
_ZIP64_BYTES = 20  # Of an extra field that zipfile writes before ours.
_HEADER_BYTES = 30


class Writer:
    """Writes a dict with "model", "optimizer" and "tierstore"; see docs/guide/convert.md.

    Args:
        contents: what is written.
        options: ``dtype`` counts.
    """

    def __init__(self, contents: Contents, options: Options) -> None:
        self.entries: Sequence[Entry] = contents.cast_weights(options.dtype)
        self.lost: Sequence[str] = ()
        self._contents = contents
        self.nbytes = sum(entry.nbytes + 1024 for entry in self.entries) + 2**20

    @contextmanager
    def writing(self, directory: Path) -> Iterator[Callable[[Piece], None]]:
        """Write the pickle, then one member of the archive for each tensor."""
        with zipfile.ZipFile(directory / FILE, "w", zipfile.ZIP_STORED) as archive:
            stream = io.BytesIO()
            pickler = _Pickler(stream, first_number=len(self.entries))
            pickler.dump(self._state())
            archive.writestr("archive/data.pkl", stream.getvalue())
            archive.writestr("archive/byteorder", sys.byteorder)
            archive.writestr("archive/version", "3\n")
            members = _Members(archive, self.entries)
            yield members.put
            members.finish(pickler.small)

    def _state(self) -> dict[str, Any]:
        """Return the dict that the file holds, with stand-ins for the tensors of entries."""
        contents = self._contents
        tensors = {entry.key: _Tensor(str(i), entry) for i, entry in enumerate(self.entries)}
        weights = {
            name: tensors[entry.key]
            for entry in self.entries
            if entry.state in (MASTER, BUFFER)
            for name in (entry.parameter,)
        }
        weights |= {alias: weights[name] for alias, name in contents.aliases.items()}
        state: dict[str, Any] = {}
        if weights or contents.values:
            state["model"] = OrderedDict({**weights, **contents.values})
        if contents.groups:
            states: dict[str, dict[str, Any]] = {
                name: {
                    key: torch.tensor(float(number), dtype=torch.float32, device="cpu")
                    for key, number in numbers.items()
                }
                for name, numbers in contents.scalars.items()
            }
            for entry in self.entries:
                if entry.state not in (MASTER, BUFFER):
                    states.setdefault(entry.parameter, {})[entry.state] = tensors[entry.key]
            state["optimizer"] = _state_dict(contents.groups, states)
            algorithms = [group.hyperparameters.get("algorithm") for group in contents.groups]
            if len(set(algorithms)) > 1:
                state[BY_ALGORITHM] = {
                    str(algorithm): _state_dict(
                        [
                            g
                            for g, a in zip(contents.groups, algorithms, strict=True)
                            if a == algorithm
                        ],
                        states,
                    )
                    for algorithm in dict.fromkeys(algorithms)
                }
        extra = json.dumps(tagged_json.encode(contents.extra))
        state[TIERSTORE] = {
            "step": contents.step,
            "extra": extra,
            "source": contents.source,
            "notes": list(contents.notes),
        }
        return state


def _state_dict(groups: Sequence[Group], states: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state dict of an optimizer with these groups, as torch.optim has it."""
    packed: dict[int, Any] = {}
    param_groups: list[dict[str, Any]] = []
    start = 0
    for group in groups:
        numbers = list(range(start, start + len(group.parameters)))
        packed |= {
            number: states[name]
            for number, name in zip(numbers, group.parameters, strict=True)
            if name in states
        }
        values = {
            key: str(value) if isinstance(value, torch.dtype) else value
            for key, value in portable(dict(group.hyperparameters)).items()
        }
        start += len(numbers)
        param_groups.append({**values, "param_names": list(group.parameters), "params": numbers})
    return {"state": packed, "param_groups": param_groups}


class _Tensor(NamedTuple):
    """Stands for a tensor whose elements are the member "data/<key>"."""

    key: str
    entry: Entry


class _Storage(NamedTuple):
    """Stands for the storage of a tensor."""

    key: str
    dtype: torch.dtype
    nbytes: int


class _Pickler(pickle.Pickler):
    """Pickles tensors as torch.save does.

    Args:
        stream: receives the pickle.
        first_number: the number of the member of the first tensor that is in memory.
    """

    def __init__(self, stream: io.BytesIO, first_number: int) -> None:
        super().__init__(stream, protocol=2)
        self._first_number = first_number
        self.small: list[torch.Tensor] = []
        """The tensors in memory, which follow in members of the archive."""

    @override
    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, torch.Tensor):
            self.small.append(obj.detach().contiguous())
            key = str(self._first_number + len(self.small) - 1)
            return _rebuilt(_Storage(key, obj.dtype, obj.nbytes), tuple(obj.shape))
        if isinstance(obj, _Tensor):
            entry = obj.entry
            return _rebuilt(_Storage(obj.key, entry.dtype, entry.nbytes), entry.shape)
        return NotImplemented

    @override
    def persistent_id(self, obj: Any) -> Any:
        if not isinstance(obj, _Storage):
            return None
        kind = _storage_class(obj.dtype)
        itemsize = 1 if kind is torch.UntypedStorage else obj.dtype.itemsize
        return ("storage", kind, obj.key, "cpu", obj.nbytes // itemsize)


def _storage_class(dtype: torch.dtype) -> Any:
    """Return the class that torch.save pickles for a dtype; newer dtypes have none."""
    name = torch.storage._dtype_to_storage_type_map().get(dtype)
    return torch.UntypedStorage if name is None else getattr(torch, name)


def _rebuilt(storage: _Storage, shape: tuple[int, ...]) -> Any:
    """Return the function that torch.save pickles for a tensor, and its arguments."""
    strides = torch.empty(shape, dtype=torch.uint8, device="meta").stride()
    hooks: OrderedDict[str, Any] = OrderedDict()
    arguments: tuple[Any, ...] = (storage, 0, shape, tuple(strides), False, hooks)
    if _storage_class(storage.dtype) is torch.UntypedStorage:
        return torch._utils._rebuild_tensor_v3, (*arguments, storage.dtype)
    return torch._utils._rebuild_tensor_v2, arguments


class _Members:
    """Members of the archive, one for each tensor, aligned as torch.save aligns them."""

    def __init__(self, archive: zipfile.ZipFile, entries: Sequence[Entry]) -> None:
        self._archive = archive
        self._entries = entries
        self._number = -1
        self._member: Any = None

    def put(self, piece: Piece) -> None:
        """Append the next piece."""
        while self._number < 0 or self._entries[self._number] is not piece.entry:
            self._begin_next()
        self._member.write(bytes_of(piece.tensor))

    def finish(self, small: Sequence[torch.Tensor]) -> None:
        """Write tensors without elements that are left, and the tensors in memory."""
        for _ in self._entries[self._number + 1 :]:
            self._begin_next()
        for tensor in small:
            self._begin_next()
            if tensor.nbytes:
                self._member.write(bytes_of(tensor))
        if self._member is not None:
            self._member.close()

    def _begin_next(self) -> None:
        if self._member is not None:
            self._member.close()
        self._number += 1
        info = zipfile.ZipInfo(f"archive/data/{self._number}")
        data = self._archive.start_dir + _HEADER_BYTES + len(info.filename) + _ZIP64_BYTES + 4
        info.extra = struct.pack("<2sH", b"FB", -data % _ALIGNMENT_BYTES) + bytes(
            -data % _ALIGNMENT_BYTES
        )
        # The sizes and the checksum are written when the member is closed.
        self._member = self._archive.open(info, "w", force_zip64=True)
