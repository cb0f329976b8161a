"""Format "torch", written: one file that torch.load(weights_only=True) reads."""

from __future__ import annotations

import json
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from tierstore.checkpoint.dcp_writer import portable, state_number
from tierstore.layout.encodings import MASTER
from tierstore.layout.parameters import STEPPED
from tierstore.layout.state_parts import state_of
from tierstore.run import tagged_json
from tierstore.tools.convert.contents import Contents, Group
from tierstore.tools.convert.entries import BUFFER, Entry
from tierstore.tools.convert.options import Options
from tierstore.tools.convert.pipeline import Piece
from tierstore.tools.convert.torch_archive_writer import torch_file
from tierstore.tools.convert.torch_files import BY_ALGORITHM, DTYPES, TIERSTORE

FILE = "checkpoint.pt"
"""The name of the file in the temporary directory."""


class Writer:
    """Writes a dict with "model", "optimizer" and "tierstore"; see docs/reference/conversions.md.

    Args:
        contents: what is written.
        options: ``dtype`` counts.
    """

    def __init__(self, contents: Contents, options: Options) -> None:
        self.entries: Sequence[Entry] = contents.cast_weights(options.dtype)
        self.lost: Sequence[str] = ()
        self._contents = contents
        self._dtypes = dict(contents.dtypes) if options.dtype is None else {}
        self.nbytes = sum(entry.nbytes + 1024 for entry in self.entries) + 2**20

    @contextmanager
    def writing(self, directory: Path) -> Iterator[Callable[[Piece], None]]:
        """Write the pickle, then one member of the archive for each tensor."""
        with torch_file(directory / FILE, self.entries, self._state) as put:
            yield put

    def _state(self, tensors: Mapping[tuple[str, str], Any]) -> dict[str, Any]:
        """Return the dict that the file holds, with these stand-ins for the tensors of entries."""
        contents = self._contents
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
            parts: dict[str, dict[str, Any]] = defaultdict(dict)
            for entry in self.entries:
                if entry.state not in (MASTER, BUFFER):
                    parts[entry.parameter][entry.state] = tensors[entry.key]
            for name, of in contents.scalars.items():  # After tensors, whose order layouts have.
                parts[name] |= {k: state_number(k, part) for k, part in of.items() if k != STEPPED}
            states = {name: state_of(own, {}) for name, own in parts.items()}
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
            DTYPES: self._dtypes,
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
        start += len(numbers)
        values = plain_hyperparameters(group)
        param_groups.append({**values, "param_names": list(group.parameters), "params": numbers})
    return {"state": packed, "param_groups": param_groups}


def plain_hyperparameters(group: Group) -> dict[str, Any]:
    """Return the hyperparameters of a group as values that torch.load(weights_only=True) reads."""
    return {
        key: str(value) if isinstance(value, torch.dtype) else value
        for key, value in portable(dict(group.hyperparameters)).items()
    }
