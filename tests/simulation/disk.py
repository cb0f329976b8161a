"""A disk that has crashed: what was made durable is there, of the rest anything may be.

Everything that a flush or a sync did not reach is a *unit* that a crash keeps or loses for
itself: one sector of a write, one length of a file, one change of a name. Units are
applied in any order, so that a name or a sector may end as any of its later versions.

No flush reaches a file after one of its writes or flushes has failed, as long as the machine runs:
a restart of the process has the same log. After a power loss its sectors are old, new or zero.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from tests.simulation.log import Entry, Failure, Flush, Log, Node, Resize, Sync, Write
from tierstore.storage.memory import Folders, MemoryFiles
from tierstore.units import SECTOR_BYTES


def rank_node(rank: int, directory: int = 0) -> Node:
    """Return the node of one of the directories of a rank's storage."""
    return f"rank {rank}" + (f", directory {directory}" if directory else "")


def is_mark(name: str) -> bool:
    """Return whether a file of a checkpoint is the mark of a rank that has verified it."""
    return name.endswith(".whole")


@dataclass
class Disk:
    """Everything durable: contents of files, and which name means what in which directory."""

    contents: dict[Node, bytes] = field(default_factory=dict)
    directories: dict[Node, dict[str, Node]] = field(default_factory=dict)
    folders: tuple[str, ...] = ()
    """Paths, and nodes, of the folders to publish in."""

    def open(self, log: Log, directories: int = 1) -> list[list[MemoryFiles]]:
        """Return the files of each rank in each directory, for storages that record in ``log``."""
        things: dict[Node, bytearray] = {}

        def content(node: Node) -> bytearray:
            if node not in things:
                things[node] = bytearray(self.contents.get(node, b""))
                log.know(things[node], node)
            return things[node]

        folders: Folders = {}
        for path in self.folders:
            folders[path] = {}
            for child, node in self.directories.get(path, {}).items():
                names = {
                    name: content(file) for name, file in self.directories.get(node, {}).items()
                }
                folders[path][child] = names
                log.know(names, node)
        ranks = []
        for rank in range(log.world_size):
            ranks.append([MemoryFiles(folders) for _ in range(directories)])
            for directory, files in enumerate(ranks[rank]):
                for name, node in self.directories.get(rank_node(rank, directory), {}).items():
                    files.contents[name] = content(node)
        return ranks

    def published(self) -> dict[str, dict[str, bytes]]:
        """Return the children of all folders that have a final name: child -> file -> content.

        Marks of verification are left out: they come after a checkpoint was published.
        """
        return {
            child: {
                name: self.contents.get(file, b"")
                for name, file in self.directories.get(node, {}).items()
                if not is_mark(name)
            }
            for path in self.folders
            for child, node in self.directories.get(path, {}).items()
            if not child.startswith(".")
        }


@dataclass(frozen=True, slots=True)
class Unit:
    """One thing that a crash keeps or loses for itself."""

    place: tuple[int, int]
    """Rank and index of its operation."""
    effect: Write | Resize | Entry


@dataclass
class Crash:
    """A crash of all ranks at one point each: what is on the disks for sure, and what may be.

    Args:
        log: what was done.
        cuts: for each rank, how many operations of its log had happened.
        base: the disks as they were before.
    """

    log: Log
    cuts: Sequence[int]
    base: Disk

    def __post_init__(self) -> None:
        self._contents: dict[Node, bytes] = dict(self.base.contents)
        self._directories = {node: dict(names) for node, names in self.base.directories.items()}
        data: dict[Node, list[Unit]] = {}
        names: dict[Node, list[Unit]] = {}
        failed: set[Node] = set()
        for place in self.log.merged(self.cuts):
            for effect in self.log.operations[place[0]][place[1]].effects:
                if isinstance(effect, Write):
                    data.setdefault(effect.node, []).extend(
                        Unit(place, part) for part in _sectors(effect)
                    )
                elif isinstance(effect, Resize):
                    data.setdefault(effect.node, []).append(Unit(place, effect))
                elif isinstance(effect, Entry):
                    names.setdefault(effect.directory, []).append(Unit(place, effect))
                elif isinstance(effect, Failure):
                    failed.add(effect.node)
                elif isinstance(effect, Flush):
                    if effect.node in failed:
                        continue
                    units = data.pop(effect.node, [])
                    self._contents[effect.node] = _changed(
                        self._contents.get(effect.node, b""), units
                    )
                else:
                    _sync(self._directories.setdefault(effect.directory, {}), names, effect)
        pending = [*data.values(), *names.values()]
        self.units = sorted((unit for units in pending for unit in units), key=_order)
        """The operations that were not durable, in order."""
        zeros = [
            Unit(unit.place, replace(unit.effect, data=bytes(len(unit.effect.data))))
            for node in failed
            for unit in data.get(node, [])
            if isinstance(unit.effect, Write)
        ]
        self.units_of_power_loss = sorted([*self.units, *zeros], key=_order)
        """The same, and the zeros that a power loss may leave in files that failed."""

    def image(self, kept: Sequence[Unit]) -> Disk:
        """Return the disks after a crash that kept these units, applied in this order."""
        contents = dict(self._contents)
        directories = {node: dict(names) for node, names in self._directories.items()}
        data: dict[Node, list[Unit]] = {}
        for unit in kept:
            if isinstance(unit.effect, Entry):
                _apply(directories.setdefault(unit.effect.directory, {}), unit.effect)
            else:
                data.setdefault(unit.effect.node, []).append(unit)
        for node, units in data.items():
            contents[node] = _changed(contents.get(node, b""), units)
        return Disk(contents, directories, self.base.folders)

    def describe(self, kept: Sequence[Unit]) -> str:
        """Return the log, with what became of each operation that had an effect."""
        pending = {unit.place for unit in self.units}
        lost = pending - {unit.place for unit in kept}
        partly = {unit.place for unit in kept} & {
            unit.place for unit in self.units if unit not in kept
        }
        fates = {}
        for place in self.log.merged(self.cuts):
            if place in partly:
                fates[place] = "partly"
            elif place in lost:
                fates[place] = "lost"
            elif place in pending:
                fates[place] = "kept"
            elif self.log.operations[place[0]][place[1]].effects:
                fates[place] = "durable"
        return self.log.describe(self.cuts, fates)


def choose(units: Sequence[Unit], generator: random.Random) -> list[Unit]:
    """Draw what a crash keeps: all, nothing, all but one, one alone, or any, in any order."""
    kind = generator.choice(("all", "none", "but one", "one", "any", "any", "any"))
    if not units or kind == "none":
        return []
    if kind == "but one":
        left_out = generator.choice(units)
        return [unit for unit in units if unit is not left_out]
    if kind == "one":
        return [generator.choice(units)]
    kept = list(units)
    if kind == "any":
        share = generator.choice((0.1, 0.5, 0.9))
        kept = [unit for unit in units if generator.random() < share]
        if generator.random() < 0.5:
            generator.shuffle(kept)
    return kept


def every_choice(units: Sequence[Unit]) -> list[list[Unit]]:
    """Return what a crash keeps, in all of the plain cases: all, none, each missing, each alone."""
    if not units:
        return [[]]
    choices = [list(units), []]
    if len(units) > 1:
        choices += [[unit] for unit in units]
    if len(units) > 2:
        choices += [[unit for unit in units if unit is not left_out] for left_out in units]
    return choices


def _order(unit: Unit) -> tuple[int, int]:
    return unit.place[1], unit.place[0]


def _sectors(write: Write) -> list[Write]:
    """Cut a write where sectors begin: each part reaches the disk or not."""
    parts, start = [], 0
    while start < len(write.data):
        end = start + SECTOR_BYTES - (write.offset + start) % SECTOR_BYTES
        parts.append(Write(write.node, write.offset + start, write.data[start:end]))
        start = end
    return parts


def _changed(content: bytes, units: Sequence[Unit]) -> bytes:
    """Return a file's content after some changes.

    A crash may keep a longer length without the data (zeros), and data without the length
    that makes it part of the file.
    """
    data, nbytes = bytearray(content), len(content)
    for unit in units:
        effect = unit.effect
        if isinstance(effect, Resize):
            nbytes = effect.nbytes
            if nbytes < len(data):
                data[nbytes:] = bytes(len(data) - nbytes)
        elif isinstance(effect, Write):
            end = effect.offset + len(effect.data)
            data.extend(bytes(max(0, end - len(data))))
            data[effect.offset : end] = effect.data
    data.extend(bytes(max(0, nbytes - len(data))))
    return bytes(data[:nbytes])


def _sync(names: dict[str, Node], pending: dict[Node, list[Unit]], sync: Sync) -> None:
    for unit in pending.pop(sync.directory, []):
        assert isinstance(unit.effect, Entry)
        _apply(names, unit.effect)


def _apply(names: dict[str, Node], entry: Entry) -> None:
    if entry.node is None:
        names.pop(entry.name, None)
        return
    if entry.alone and entry.old_name is None and entry.node in names.values():
        return  # It was made and renamed, and the rename came first.
    if entry.old_name is not None and names.get(entry.old_name) == entry.node:
        del names[entry.old_name]
    names[entry.name] = entry.node
