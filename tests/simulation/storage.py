"""A storage in memory that writes down what is asked of it, and its folders."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tests.simulation.disk import rank_node
from tests.simulation.log import Effect, Entry, Failure, Flush, Log, Node, Resize, Sync, Write
from tierstore.run.striped_storage import StripedStorage
from tierstore.storage.base import Folder, Storage, Transfer
from tierstore.storage.memory import MemoryFiles, MemoryFolder, MemoryStorage
from tierstore.units import Extent


class RecordedStorage(MemoryStorage):
    """A MemoryStorage whose operations are noted in a log.

    Args:
        log: where to.
        rank: whose files these are.
        files: the files, as Disk.open() gives them.
        directory: which of the rank's directories they are in.
    """

    def __init__(self, log: Log, rank: int, files: MemoryFiles, directory: int = 0) -> None:
        super().__init__(files)
        self.log = log
        self.rank = rank
        self.directory = directory
        self._directory = rank_node(rank, directory)

    def create(self, name: str, nbytes: int) -> None:
        """See Storage.create."""
        with self.log.mutex:
            removed = [Entry(self._directory, name, None)] if name in self.files.contents else []
            super().create(name, nbytes)
            node = self._node(name)
            self.log.add(
                self.rank,
                "create",
                f"{name} {nbytes}",
                *removed,
                Entry(self._directory, name, node),
                Resize(node, nbytes),
            )

    def write(self, name: str, extent: Extent, buffer: memoryview) -> Transfer:
        """See Storage.write."""
        with self.log.mutex:
            transfer = super().write(name, extent, buffer)
            effects: list[Write | Resize] = [Write(self._node(name), extent.offset, bytes(buffer))]
            if extent.offset + extent.nbytes == len(self.files.contents[name]):
                effects.append(Resize(self._node(name), extent.offset + extent.nbytes))
            self.log.add(self.rank, "write", f"{name} {extent.nbytes} at {extent.offset}", *effects)
            return transfer

    def flush(self, names: Sequence[str]) -> None:
        """See Storage.flush."""
        with self.log.mutex:
            super().flush(names)
            effects = [Flush(self._node(name)) for name in names]
            self.log.add(self.rank, "flush", " ".join(names), *effects)

    def put(self, name: str, data: bytes) -> None:
        """See Storage.put. Noted twice: as it is written, and as it is durable."""
        with self.log.mutex:
            self.put_unflushed(name, data)
            self.log.add(self.rank, "fsync", name, Flush(self._node(name)))

    def put_unflushed(self, name: str, data: bytes) -> None:
        """Do put() without its end."""
        with self.log.mutex:
            removed = [Entry(self._directory, name, None)] if name in self.files.contents else []
            super().put(name, data)
            node = self._node(name)
            self.log.add(
                self.rank,
                "put",
                f"{name} {len(data)}",
                *removed,
                Entry(self._directory, name, node),
                Resize(node, 0),
                Write(node, 0, data),
                Resize(node, len(data)),
            )

    def rename(self, name: str, new_name: str) -> None:
        """See Storage.rename."""
        with self.log.mutex:
            super().rename(name, new_name)
            entry = Entry(self._directory, new_name, self._node(new_name), name)
            self.log.add(self.rank, "rename", f"{name} -> {new_name}", entry)

    def link(self, name: str, new_name: str) -> None:
        """See Storage.link."""
        with self.log.mutex:
            super().link(name, new_name)
            entry = Entry(self._directory, new_name, self._node(new_name))
            self.log.add(self.rank, "link", f"{name} -> {new_name}", entry)

    def unlink(self, name: str) -> None:
        """See Storage.unlink."""
        with self.log.mutex:
            super().unlink(name)
            self.log.add(self.rank, "unlink", name, Entry(self._directory, name, None))

    def sync_directory(self) -> None:
        """See Storage.sync_directory."""
        with self.log.mutex:
            super().sync_directory()
            self.log.add(self.rank, "sync_directory", "", Sync(self._directory))

    def is_shared(self, name: str) -> bool:
        """See Storage.is_shared."""
        with self.log.mutex:
            return super().is_shared(name)

    def folder(self, path: str) -> Folder:
        """See Storage.folder."""
        return RecordedFolder(self, path)

    def fail(self, name: str) -> None:
        """Note that a write or flush of a file fails now."""
        self.log.add(self.rank, "failure", name, Failure(self._node(name)))

    def _node(self, name: str) -> Node:
        return self.log.node_of(self.files.contents[name], self.rank)


class RecordedStripedStorage(StripedStorage):
    """A StripedStorage over RecordedStorages that does one thing after the other.

    So the log of a schedule is the same each time, and says who asked.
    """

    def __init__(self, parts: Sequence[Storage], *, overwrite: bool) -> None:
        super().__init__(parts, lambda parts: [2e8] + [1e8] * (len(parts) - 1), overwrite=overwrite)

    def _together(self, calls: Sequence[Callable[[], None]]) -> None:
        for call in calls:
            call()


class RecordedFolder(MemoryFolder):
    """A folder of a RecordedStorage. All ranks share it."""

    def __init__(self, storage: RecordedStorage, path: str) -> None:
        super().__init__(storage.files.folders, path)
        self._log = storage.log
        self._rank = storage.rank

    def make(self, child: str) -> None:
        """See Folder.make."""
        with self._log.mutex:
            super().make(child)
            node = self._node(self._children[child])
            self._add("make", child, Entry(self._path, child, node, alone=True))

    def put(self, child: str, name: str, data: bytes) -> None:
        """See Folder.put. Noted twice: as it is written, and as it is durable."""
        with self._log.mutex:
            self.put_unflushed(child, name, data)
            self._add("fsync", f"{child}/{name}", Flush(self._nodes(child, name)[1]))

    def put_unflushed(self, child: str, name: str, data: bytes) -> None:
        """Do put() without its end."""
        with self._log.mutex:
            super().put(child, name, data)
            directory, node = self._nodes(child, name)
            self._add(
                "put",
                f"{child}/{name} {len(data)}",
                Entry(directory, name, node),
                Write(node, 0, data),
                Resize(node, len(data)),
            )

    def link(self, storage: Storage, name: str, child: str, new_name: str) -> None:
        """See Folder.link."""
        with self._log.mutex:
            super().link(storage, name, child, new_name)
            directory, node = self._nodes(child, new_name)
            self._add("link", f"{name} -> {child}/{new_name}", Entry(directory, new_name, node))

    def append(self, child: str, name: str, data: memoryview) -> None:
        """See Folder.append."""
        with self._log.mutex:
            existed = name in self._children.get(child, {})
            super().append(child, name, data)
            directory, node = self._nodes(child, name)
            end = len(self._children[child][name])
            self._add(
                "append",
                f"{child}/{name} {data.nbytes}",
                *([] if existed else [Entry(directory, name, node)]),
                Write(node, end - data.nbytes, bytes(data)),
                Resize(node, end),
            )

    def flush(self, child: str, name: str) -> None:
        """See Folder.flush."""
        with self._log.mutex:
            super().flush(child, name)
            self._add("flush", f"{child}/{name}", Flush(self._nodes(child, name)[1]))

    def unlink(self, child: str, name: str) -> None:
        """See Folder.unlink."""
        with self._log.mutex:
            super().unlink(child, name)
            directory = self._node(self._children[child])
            self._add("unlink", f"{child}/{name}", Entry(directory, name, None))

    def remove(self, child: str) -> None:
        """See Folder.remove."""
        with self._log.mutex:
            super().remove(child)
            self._add("remove", child, Entry(self._path, child, None))

    def rename(self, child: str, new_child: str) -> None:
        """See Folder.rename."""
        with self._log.mutex:
            super().rename(child, new_child)
            node = self._node(self._children[new_child])
            self._add(
                "rename", f"{child} -> {new_child}", Entry(self._path, new_child, node, child)
            )

    def sync(self, child: str) -> None:
        """See Folder.sync."""
        with self._log.mutex:
            super().sync(child)
            self._add("sync", child, Sync(self._node(self._children[child])))

    def sync_children(self) -> None:
        """See Folder.sync_children."""
        with self._log.mutex:
            super().sync_children()
            self._add("sync_children", "", Sync(self._path))

    def fail(self, child: str, name: str) -> None:
        """Note that a write or flush of a file fails now."""
        self._add("failure", f"{child}/{name}", Failure(self._nodes(child, name)[1]))

    def _add(self, kind: str, text: str, *effects: Effect) -> None:
        self._log.add(self._rank, f"folder.{kind}", text, *effects)

    def _node(self, thing: object) -> Node:
        return self._log.node_of(thing, self._rank)

    def _nodes(self, child: str, name: str) -> tuple[Node, Node]:
        files = self._children[child]
        return self._node(files), self._node(files[name])
