"""Registered objects: each commit includes the states of objects that a program registers."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from typing_extensions import TypeIs

from tierstore.run import tagged_json
from tierstore.run.manifest import Manifest
from tierstore.run.random_state import RandomState
from tierstore.user_warnings import warn_user

logger = logging.getLogger("tierstore")


class Stateful(Protocol):
    """An object with a state, as in ``torch.distributed.checkpoint`` and torchtitan."""

    def state_dict(self) -> Any:
        """Return the state: plain values and small tensors."""

    def load_state_dict(self, state_dict: Any, /) -> Any:
        """Load a state that state_dict() returned."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CommittedStep:
    """A committed step, and the registered states that this rank gets back."""

    step: int
    """The step; 0 if nothing was committed."""
    tagged: Mapping[str, Any] = field(default_factory=dict)
    """Name -> state, as tagged_json.encode() returns it."""
    of_other_ranks: bool = False
    """True if a state is not of each rank of this job: the ranks of the commit were more or fewer,
    or a conversion has kept one set of states."""
    unequal: Sequence[str] = ()
    """Names whose states differ between the ranks of the commit. No rank gets these back."""

    @property
    def states(self) -> dict[str, Any]:
        """Name -> state. A new copy each time."""
        return {name: tagged_json.decode(state) for name, state in self.tagged.items()}


def committed_step(manifests: Sequence[Manifest], rank: int, world_size: int) -> CommittedStep:
    """Return the step and the states that one rank of a job gets back from a commit.

    Args:
        manifests: the manifests of all ranks of the commit, in order.
        rank: the rank of the job.
        world_size: the number of ranks of the job. If the commit has as many, each rank gets its
            own states; else it gets the states that are equal on all ranks of the commit.
    """
    step = manifests[0].step
    if len(manifests) == world_size:
        return CommittedStep(step=step, tagged=manifests[rank].states)
    found = [manifest.states for manifest in manifests]
    names = dict.fromkeys(name for states in found for name in states)
    equal = {
        name: found[0][name]
        for name in names
        if all(
            name in states and tagged_json.are_equal(states[name], found[0].get(name))
            for states in found
        )
    }
    unequal = tuple(name for name in names if name not in equal)
    return CommittedStep(step=step, tagged=equal, of_other_ranks=True, unequal=unequal)


class Registered:
    """The registered objects of a store, by name, in the order of their registration."""

    def __init__(self) -> None:
        self._objects: dict[str, Stateful | dict[Any, Any]] = {}
        self._dropped: set[str] = set()

    def __bool__(self) -> bool:
        return bool(self._objects)

    @property
    def names(self) -> Sequence[str]:
        """The names of all objects, in the order of their registration."""
        return tuple(self._objects)

    def add(self, objects: Mapping[str, Any]) -> None:
        """Register objects. None drops a name, including a name in a commit.

        Raises:
            TypeError, ValueError: an object has no state, or a name is invalid. Nothing was
                registered.
        """
        for name, given in objects.items():
            if name.startswith("$"):
                raise ValueError(f"the name of a registered object cannot begin with '$': {name!r}")
            if isinstance(given, type):
                raise TypeError(
                    f"register({name}=) got the class {given.__name__}: pass an object of the class"
                )
            if not (given is None or isinstance(given, dict) or _is_stateful(given)):
                raise TypeError(
                    f"register({name}=) takes a dict, or an object with state_dict() and "
                    f"load_state_dict(), got {type(given).__name__}"
                )
        for name, given in objects.items():
            self._dropped.discard(name)
            if given is None:
                self._objects.pop(name, None)
                self._dropped.add(name)
            else:
                self._objects[name] = given

    def ask(self) -> dict[str, Any]:
        """Return name -> state of each object, in the form of a manifest.

        Raises:
            TypeError, ValueError: a commit cannot hold a state; the message names the value.
        """
        states = {}
        for name, given in self._objects.items():
            with _naming(name):
                states[name] = given.state_dict() if _is_stateful(given) else dict(given)
        encoded: dict[str, Any] = tagged_json.encode(states, name="registered")
        return encoded

    def compare(self, committed: CommittedStep, *, begins: bool) -> None:
        """Compare the names in a commit with the registered names.

        Args:
            committed: the commit.
            begins: whether the commit is a checkpoint from which another run begins. That run may
                train other things, so a state without a registered object only gives a warning.

        Raises:
            ValueError: no object is registered for a state, or a state differs between ranks.

        Warns:
            UserWarning: the commit has no state of a registered object.
        """
        has = (*committed.tagged, *committed.unequal)
        left = [name for name in has if name not in {*self._objects, *self._dropped}]
        refused = [
            name
            for name in committed.unequal
            if not isinstance(self._objects.get(name), RandomState)
            and (name in self._objects or (name in left and not begins))
        ]
        if refused:
            raise ValueError(
                f"step {committed.step} was committed by another number of ranks. Their states of "
                f"{_listed(refused)} differ and cannot be divided among the ranks of this job. "
                "Nothing was changed: start the job with as many ranks; or call "
                f"store.register({_dropping(refused)}) before restore(), set the object to the "
                "state from which it continues, and register it after restore()"
            )
        states = committed.states
        for name, given in self._objects.items():
            if isinstance(given, dict) and not isinstance(states.get(name, {}), dict):
                raise ValueError(
                    f"step {committed.step} was committed with a {type(states[name]).__name__} as "
                    f"the state of {name!r}, which a dict cannot take. Nothing was changed: "
                    "register an object with load_state_dict() for it"
                )
        if left and not begins:
            raise ValueError(
                f"step {committed.step} was committed with {_listed(left)}, but no object of that "
                "name is registered. Nothing was changed: register it before restore(), or call "
                f"store.register({_dropping(left)}) to leave out its state"
            )
        if left:
            warn_user(
                f"the checkpoint has {_listed(left)}, but no object of that name is registered: "
                f"register it before restore(), or call store.register({_dropping(left)})"
            )
        if absent := [name for name in self._objects if name not in has]:
            warn_user(
                f"step {committed.step} was committed without {_listed(absent)}, which keeps its "
                "current state: set its state before the next step() if it must continue from there"
            )

    def load(self, committed: CommittedStep) -> None:
        """Load each object's state from a commit, if the commit has it."""
        states = committed.states
        for name, given in self._objects.items():
            if committed.of_other_ranks and isinstance(given, RandomState):
                logger.warning(
                    "step %d does not have states of each rank of this job: the random generators "
                    "%r keep the seeds of this program",
                    committed.step,
                    name,
                )
            elif name not in states:
                continue
            elif _is_stateful(given):
                with _naming(name):
                    given.load_state_dict(states[name])
            else:
                given.clear()
                given.update(states[name])


@contextlib.contextmanager
def _naming(name: str) -> Iterator[None]:
    """Add the name of the object to an error that the object raises."""
    try:
        yield
    except Exception as error:
        error.add_note(f"the registered object {name!r} raised this")
        raise


def _is_stateful(given: object) -> TypeIs[Stateful]:
    return callable(getattr(given, "state_dict", None)) and callable(
        getattr(given, "load_state_dict", None)
    )


def _listed(names: Sequence[str]) -> str:
    return ", ".join(map(repr, names))


def _dropping(names: Sequence[str]) -> str:
    return ", ".join(f"{name}=None" for name in names)
