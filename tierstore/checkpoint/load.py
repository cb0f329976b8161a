"""Loader of pages from any checkpoint that DCP can load."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tierstore.checkpoint.dcp_reader import Part, StoredEntries
from tierstore.checkpoint.model_contents import plain_names
from tierstore.checkpoint.saved_values import (
    CommittedValues,
    StockValues,
    converted_states,
    parameter_of,
)
from tierstore.checkpoint.stored_paths import at_top
from tierstore.errors import CheckpointError, CorruptionError
from tierstore.inspection.kinds import kind_of
from tierstore.inspection.reader import Reader
from tierstore.inspection.slices import Slices
from tierstore.inspection.verify_checkpoint import verify_checkpoint
from tierstore.layout.chunks import Chunk
from tierstore.layout.encodings import (
    ENCODINGS,
    MASTER,
    AnyState,
    EncodedState,
    JoinedState,
    StoredTensor,
    assign,
    encodings_of,
    values_of,
    whole_blocks,
)
from tierstore.layout.parameters import PagedGroup, ParameterSpec, refuse_codes
from tierstore.paging.views import PageView
from tierstore.ranks.peers import Peers
from tierstore.run import tagged_json
from tierstore.run.commit import Commit
from tierstore.run.registered import CommittedStep, committed_step

_NAMES = {"params", "param_names"}


@dataclass(frozen=True, slots=True)
class _Saved:
    """A state in a checkpoint."""

    encoding: str | None
    keys: Mapping[StoredTensor, str]
    """Tensor of the state -> its key."""

    def empty(self, state: str, dtype: torch.dtype, chunk: Chunk) -> AnyState:
        """Return memory for a chunk of the state, encoded as in the checkpoint."""
        if self.encoding is None:
            return torch.empty(chunk.sizes, dtype=dtype, device="cpu")
        encoding = ENCODINGS[self.encoding]
        tensors = {
            tensor.name: torch.empty(tensor.chunk(chunk).sizes, dtype=tensor.dtype, device="cpu")
            for tensor in encoding.stored(state)
        }
        return encoding.over(state, tensors)


class CheckpointSource:
    """A checked checkpoint as the source of the states of some parameters.

    The key of a parameter is ``model.<name>`` or ``<name>``, or begins with the prefix of a
    checkpoint of tierstore. The keys of its states are ``optimizer.state.<name>.<state>``.
    Hyperparameters are found by parameter or by group. A checkpoint of weights alone gives states
    of zeros, the step 0 and no hyperparameters.

    Args:
        path: the directory.
        groups: the param groups to load.
        scalars: parameter name -> the scalars to load, by name.
        peers: the ranks that load it together. Each rank checks a part, without a collective.
        is_earlier: whether parameters may have got their first scalars after the checkpoint. Such
            scalars are not loaded. Otherwise a missing scalar is an error.

    Raises:
        CorruptionError: the checkpoint is damaged.
        CheckpointError: the directory is not a checkpoint, or a required entry is missing; the
            message names the first.
        ValueError: the optimizer cannot use the hyperparameters of a group.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        groups: Sequence[PagedGroup],
        scalars: Mapping[str, Mapping[str, float]],
        peers: Peers,
        *,
        is_earlier: bool,
    ) -> None:
        self._path = Path(path)
        slices, commits = _checked(self._path, peers)
        self._entries = StoredEntries(self._path, slices)
        values: CommittedValues | StockValues
        if commits:
            values = CommittedValues(self._entries, commits[0])
        else:
            self._entries = _usual(self._entries)
            values = StockValues(self._entries)
        self._model_prefixes = values.model_prefixes
        self.is_weights_alone = not commits and not any(
            key.startswith("optimizer") for key in self._entries.keys
        )
        specs = [parameter.spec for group in groups for parameter in group.parameters]
        self._names = self._names_of([spec.name for spec in specs])
        self.left_out = sorted(self._trained() - {*self._names.values()})
        """Names in the checkpoint of trained parameters that are in no group."""
        self.never_stepped = [
            spec.name
            for spec in specs
            if not self.is_weights_alone and not values.was_stepped(self._names[spec.name])
        ]
        """Names of parameters that an optimizer in the checkpoint has without states."""
        stateless = (
            {spec.name for spec in specs} if self.is_weights_alone else {*self.never_stepped}
        )
        self._saved = {
            (spec.name, state): self._find(spec, state)
            for spec in specs
            for state, _ in ([(MASTER, None)] if spec.name in stateless else spec.all_states)
        }
        self.scalars = {
            name: dict(wanted)  # As in a new optimizer.
            if name in stateless
            else {scalar: values.scalar(self._names[name], scalar) for scalar in wanted}
            for name, wanted in scalars.items()
            if not is_earlier or values.has_scalars(self._names[name])
        }
        self.hyperparameters = [self._hyperparameters(values, group) for group in groups]
        counts = [scalars["step"] for scalars in self.scalars.values() if "step" in scalars]
        self.step = 0 if self.is_weights_alone else values.step(counts)
        if commits:
            manifests = [commit.manifest for commit in commits]
            self.committed = committed_step(manifests, peers.rank, peers.world_size)
        elif self.is_weights_alone:
            self.committed = CommittedStep(step=0)
        else:  # A conversion keeps one set of states.
            self.committed = CommittedStep(
                step=self.step,
                tagged=converted_states(self._entries) or {},
                of_other_ranks=peers.world_size > 1,
            )

    def fill(self, page: PageView) -> None:
        """Read masters and states of a page, and round the masters into the parameters."""
        parts: list[Part] = []
        decoded: list[tuple[AnyState, AnyState, Chunk]] = []
        for shard in page.shards:
            for view in shard.chunks:
                for state, dtype in shard.spec.all_states:
                    target = view.state(state)
                    saved = self._saved.get((shard.spec.name, state))
                    if saved is None:
                        view.reset(state)
                        continue
                    source, chunk = target, view.chunk
                    if saved.encoding != dict(shard.spec.encodings).get(state):
                        chunk = whole_blocks(shard.spec.shape, chunk)
                        source = saved.empty(state, dtype, chunk)
                        decoded.append((target, source, view.chunk.within(chunk)))
                    if isinstance(source, JoinedState):
                        [key] = saved.keys.values()
                        for place, of_record in source.parts:
                            parts += self._entries.parts(key, place, of_record)
                        continue
                    tensors = source.stored if isinstance(source, EncodedState) else {state: source}
                    for tensor, key in saved.keys.items():
                        place = tensor.chunk(chunk)
                        parts += self._entries.parts(key, place, tensors[tensor.name])
        self._entries.read(parts)
        for target, source, part in decoded:
            assign(target, part.select(values_of(source)))
        page.write_parameters()

    def _names_of(self, names: Sequence[str]) -> dict[str, str]:
        """Return parameter name -> name in the checkpoint. Names of wrappers are ignored."""
        for unwrap_parallel in (False, True):
            found = plain_names(names, unwrap_parallel=unwrap_parallel)
            first = next(iter(found.values()), "")
            if any(self._entries.tensor(key) for key in self._master_keys(first)):
                break
        return found

    def _trained(self) -> set[str]:
        """Return the names of all parameters that have a state in the checkpoint."""
        prefix = "optimizer.state."
        of_states = [key for key in self._entries.keys if key.startswith(prefix)]
        names = {parameter_of(key, self._entries.path_of(key)) for key in of_states}
        return {n for n in names if any(map(self._entries.tensor, self._master_keys(n)))}

    def _master_keys(self, name: str) -> list[str]:
        return [f"{prefix}{name}" for prefix in self._model_prefixes]

    def _find(self, spec: ParameterSpec, state: str) -> _Saved:
        """Find a state. Its encoding may differ from the encoding here."""
        name = self._names[spec.name]
        for encoding in encodings_of(state):
            stored = ENCODINGS[encoding].stored(state)
            found = {
                tensor: self._entries.tensor(f"optimizer.state.{name}.{tensor.name}")
                for tensor in stored
                if tensor.name != MASTER
            }
            if all(one and one.properties.dtype == tensor.dtype for tensor, one in found.items()):
                return _Saved(encoding, {tensor: self._key(spec, tensor) for tensor in stored})
        tensor = spec.values_of(state, dict(spec.all_states)[state])
        key = self._key(spec, tensor)
        saved = self._entries.tensor(key)
        assert saved is not None
        refuse_codes(f"{self._path}: {key!r}", saved.properties.dtype, tensor.dtype)
        return _Saved(None, {tensor: key})

    def _key(self, spec: ParameterSpec, tensor: StoredTensor) -> str:
        """Return the key of a tensor, after checking its shape in the checkpoint."""
        name, state = self._names[spec.name], tensor.name
        shape = tensor.chunk(Chunk((0,) * len(spec.shape), spec.shape)).sizes
        keys = [f"optimizer.state.{name}.{state}"]
        if state == MASTER:
            keys += self._master_keys(name)
        for key in keys:
            stored = self._entries.tensor(key)
            if stored is None:
                continue
            if tuple(stored.size) != shape:
                raise CheckpointError(
                    f"{self._path} has {key!r} of shape {list(stored.size)}, but here it is "
                    f"{list(shape)}: build the model as it was saved"
                )
            return key
        raise CheckpointError(
            f"{self._path} has no tensor {' or '.join(map(repr, keys))}: it must be a checkpoint "
            "of this model and an optimizer of these param groups, under the names that "
            "torch.distributed.checkpoint.state_dict gives; an optimizer has them if it was given "
            "the named parameters of the whole model"
        )

    def _hyperparameters(
        self, values: CommittedValues | StockValues, group: PagedGroup
    ) -> dict[str, Any]:
        """Return the hyperparameters in the checkpoint of the parameters of a group.

        Raises:
            CheckpointError: hyperparameters differ between parameters, or cannot be read.
            ValueError: the optimizer cannot use the hyperparameters.
        """
        first: tuple[str, dict[str, Any]] = ("", {})
        for parameter in group.parameters:
            name = self._names[parameter.name]
            found = values.hyperparameters(name)
            if found and not first[1]:
                first = name, found
            elif found and found is not first[1] and (key := _difference(first[1], found)):
                raise CheckpointError(
                    f"{self._path} has {key} {first[1].get(key)!r} for {first[0]!r} and "
                    f"{found.get(key)!r} for {name!r}, which are in one param group here: give "
                    "the optimizer the same param groups as in the checkpoint"
                )
        if self.is_weights_alone:
            return {}
        if group.parameters and not first[1] and isinstance(values, StockValues):
            raise CheckpointError(
                f"{self._path} has states of {group.parameters[0].name!r} and the others of its "
                "group, but no param group of them with the rule: save the optimizer with "
                "get_state_dict() of torch.distributed.checkpoint.state_dict"
            )
        left_out = _NAMES | values.taken
        found = {key: value for key, value in first[1].items() if key not in left_out}
        try:
            group.check(found)
        except ValueError:
            raise
        except Exception as error:  # For strange values check() may raise any error.
            raise CheckpointError(
                f"{self._path} has hyperparameters that cannot be used: {error}"
            ) from error
        return found


def _usual(entries: StoredEntries) -> StoredEntries:
    """Return entries with the model and the optimizer under the paths of torch's helpers."""
    tensors = [key for key in entries.keys if entries.tensor(key) is not None]
    return entries.at(
        at_top({key: entries.path_of(key) for key in entries.keys}, tensors, entries.path)
    )


def _difference(one: Mapping[str, Any], other: Mapping[str, Any]) -> str | None:
    """Return the first key whose values differ; None if all are equal."""
    keys = sorted((one.keys() | other.keys()) - _NAMES - {"name"})  # A label has no effect.
    return next((key for key in keys if _text(one, key) != _text(other, key)), None)


def _text(values: Mapping[str, Any], key: str) -> str:
    try:
        return json.dumps(tagged_json.encode(values.get(key)))
    except (TypeError, ValueError):  # A type that no commit holds.
        return repr(values.get(key))


def _checked(path: Path, peers: Peers) -> tuple[Slices, Sequence[Commit]]:
    """Check this rank's part of a checkpoint; return the slices and commits.

    Returns:
        The slices of its files, and the commits of all ranks if tierstore published it.
    """
    kind = kind_of(path)
    if kind == "run":
        raise CheckpointError(
            f"{path} is a run directory, not a checkpoint: open it with resume=True, or "
            "publish its last step with `tierstore checkpoint`"
        )
    reader = Reader(path, rank=peers.rank, world_size=peers.world_size)
    contents = verify_checkpoint(reader, published=kind == "checkpoint")
    if reader.faults or contents.slices is None:
        fault = reader.faults[0]
        raise CorruptionError(
            f"{path}: {fault.place}: {fault.what}; nothing of it "
            "was loaded. `tierstore verify` lists all faults"
        )
    return contents.slices, contents.commits
