"""Operations on simulated disks, in order: one log per rank, to be cut anywhere."""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

Node = str | tuple[int, int, int]
"""A directory that is always there, by its path, or a file or child directory: the number of
the run that made it, the rank, and a count."""


@dataclass(frozen=True, slots=True)
class Write:
    """Bytes of a file were replaced; durable, sector by sector, after a Flush."""

    node: Node
    offset: int
    data: bytes


@dataclass(frozen=True, slots=True)
class Resize:
    """A file got another length; durable after a Flush."""

    node: Node
    nbytes: int


@dataclass(frozen=True, slots=True)
class Entry:
    """A name in a directory means another node, or none; durable after a Sync.

    Of a rename, ``old_name`` disappears in the same moment.
    """

    directory: Node
    name: str
    node: Node | None
    old_name: str | None = None
    alone: bool = False
    """True if the node is a directory, which has one name at most."""


@dataclass(frozen=True, slots=True)
class Flush:
    """Everything done to the data of a file is durable."""

    node: Node


@dataclass(frozen=True, slots=True)
class Sync:
    """Everything done to the names in a directory is durable."""

    directory: Node


@dataclass(frozen=True, slots=True)
class Failure:
    """A write or flush of a file failed, as kernels let it fail.

    Reads return the new bytes and later flushes succeed, but nothing of this file that was not
    durable then, and nothing that is written to it later, ever becomes durable.
    """

    node: Node


Effect = Write | Resize | Entry | Flush | Sync | Failure


@dataclass(frozen=True, slots=True)
class Operation:
    """One line of a log: an operation of a storage or folder, a gather, or a mark."""

    kind: str
    text: str
    effects: tuple[Effect, ...] = ()
    site: str = ""
    """For what makes something durable: the functions that asked for it, innermost first."""
    value: Any = None
    """The value of a mark, beside its kind."""

    def __str__(self) -> str:
        line = f"{self.kind:<16} {self.text}".rstrip()
        return f"{line}    [{self.site}]" if self.site else line


@dataclass(frozen=True, slots=True, kw_only=True)
class Weakening:
    """Flushes and syncs that a mutant of the protocol leaves out or delays."""

    dropped: frozenset[str] = frozenset()
    """Sites of flushes and syncs that do nothing."""
    delayed: frozenset[str] = frozenset()
    """Sites of flushes and syncs that happen too late: after the next rename of the rank, or
    after the program was told that they have."""


@dataclass
class Log:
    """The operations of all ranks of one run, each rank's in order.

    Args:
        world_size: number of ranks.
        generation: number of the run; nodes of different runs differ.
        weakening: flushes and syncs to leave out or to put off.
    """

    world_size: int = 1
    generation: int = 0
    weakening: Weakening = field(default_factory=Weakening)

    def __post_init__(self) -> None:
        self.operations: list[list[Operation]] = [[] for _ in range(self.world_size)]
        self.starts = [0] * self.world_size
        """Rank -> number of its operations that a log continued from another one begins with."""
        self.mutex = threading.RLock()
        self.sites: set[str] = set()
        """The functions that called a flush or a sync."""
        self._nodes: dict[int, Node] = {}
        self._known: list[object] = []  # So that no id is used twice.
        self._counts = [0] * self.world_size
        self._waiting: list[list[Operation]] = [[] for _ in range(self.world_size)]

    def continued(self, cuts: Sequence[int]) -> Log:
        """Return a log for the run that follows after all processes were killed at these cuts.

        The disks were not: what was not durable then still is not.
        """
        log = Log(self.world_size, self.generation + 1, self.weakening)
        gathers = [
            sum(op.kind == "gather" for op in operations[:cut])
            for operations, cut in zip(self.operations, cuts, strict=True)
        ]
        for rank, cut in enumerate(cuts):
            # What was told to the program that was killed is known to nobody any more.
            log.operations[rank] = [
                Operation(op.kind, op.text, op.effects, op.site)
                for op in self.operations[rank][:cut]
            ]
            while gathers[rank] < max(gathers):  # So that gathers of later runs pair up.
                log.operations[rank].append(Operation("gather", "not reached"))
                gathers[rank] += 1
        log.starts = log.lengths()
        return log

    def know(self, thing: object, node: Node) -> None:
        """Say which node an object in memory, a file's content or a directory, stands for."""
        self._nodes[id(thing)] = node
        self._known.append(thing)

    def node_of(self, thing: object, rank: int) -> Node:
        """Return the node of an object, a new one for an object not seen before."""
        node = self._nodes.get(id(thing))
        if node is None:
            self._counts[rank] += 1
            node = (self.generation, rank, self._counts[rank])
            self.know(thing, node)
        return node

    def add(self, rank: int, kind: str, text: str, *effects: Effect) -> None:
        """Note an operation that has just happened in memory."""
        durable = any(isinstance(effect, Flush | Sync) for effect in effects)
        site = f"{kind} < {_site()}" if durable else ""
        with self.mutex:
            if durable:
                self.sites.add(site)
            if site in self.weakening.dropped:
                self._append(rank, Operation(kind, f"{text} (left out)", (), site))
            elif site in self.weakening.delayed:
                self._waiting[rank].append(Operation(kind, f"{text} (late)", effects, site))
            else:
                self._append(rank, Operation(kind, text, effects, site))

    def gathered(self, rank: int, value: str) -> None:
        """Note that a gather() is about to return on a rank."""
        with self.mutex:
            self._append(rank, Operation("gather", value))

    def mark(self, rank: int, kind: str, value: Any) -> None:
        """Note something that is known to the program at this point, such as a commit."""
        with self.mutex:
            self.operations[rank].append(Operation(kind, str(value), value=value))
            if kind in ("committed", "published"):
                self._catch_up(rank)

    def lengths(self) -> list[int]:
        """Return how many operations each rank's log has."""
        return [len(operations) for operations in self.operations]

    def marks(self, rank: int, cut: int, kind: str) -> list[Any]:
        """Return the values of the marks of a kind that a rank set before a cut."""
        marks = self.operations[rank][self.starts[rank] : cut]
        return [op.value for op in marks if op.kind == kind]

    def merged(self, cuts: Sequence[int]) -> list[tuple[int, int]]:
        """Return (rank, index) of all operations before the cuts, as they may have happened.

        What a rank does after a gather comes after what any rank did before it; between two
        gathers the ranks touch different things.
        """
        order = []
        for rank, cut in enumerate(cuts):
            epoch = 0
            for index, operation in enumerate(self.operations[rank][:cut]):
                epoch += operation.kind == "gather"
                order.append((epoch, rank, index))
        return [(rank, index) for _, rank, index in sorted(order)]

    def epochs(self, rank: int) -> list[int]:
        """Return the start of this run, the gathers in it, and its end: what epochs lie between."""
        start, operations = self.starts[rank], self.operations[rank]
        gathers = [i for i in range(start, len(operations)) if operations[i].kind == "gather"]
        return [start, *gathers, len(operations)]

    def __str__(self) -> str:
        return self.describe(self.lengths())

    def describe(self, cuts: Sequence[int], fates: dict[tuple[int, int], str] | None = None) -> str:
        """Return a line for each operation before the cuts, and what became of it."""
        lines = []
        for rank, index in self.merged(cuts):
            fate = (fates or {}).get((rank, index), "")
            lines.append(f"{rank}:{index:<4} {fate:<9} {self.operations[rank][index]}")
        return "\n".join(lines)

    def _append(self, rank: int, operation: Operation) -> None:
        self.operations[rank].append(operation)
        if operation.kind in ("rename", "folder.rename"):
            self._catch_up(rank)

    def _catch_up(self, rank: int) -> None:
        late, self._waiting[rank] = self._waiting[rank], []
        self.operations[rank] += late


def _site() -> str:
    """Return the two innermost functions of tierstore on the stack that are not storage."""
    frame = sys._getframe(1)
    names: list[str] = []
    while frame is not None and len(names) < 2:
        module = frame.f_globals.get("__name__", "")
        if module.startswith("tierstore.") and not module.startswith(
            ("tierstore.storage", "tierstore.ranks.peers")
        ):
            code = frame.f_code
            name = code.co_qualname.replace("<locals>.", "")
            names.append(f"{module.removeprefix('tierstore.')}.{name}")
            if len(names) == 1:
                names[0] += f"+{frame.f_lineno - code.co_firstlineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return " < ".join(names)
