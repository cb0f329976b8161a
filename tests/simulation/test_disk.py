"""Content of a simulated disk after a crash, case by case."""

from __future__ import annotations

import errno
import random

import pytest

from tests.simulation.disk import Crash, Disk, choose, every_choice
from tests.simulation.log import Log, Weakening
from tests.simulation.simulator import draw_cuts
from tests.simulation.storage import RecordedStorage
from tests.simulation.write_back import OPERATIONS, FailedWriteBack
from tests.support.transfers import aligned_buffer
from tierstore.errors import StorageError
from tierstore.units import SECTOR_BYTES, Extent

OLD, NEW = b"o" * SECTOR_BYTES, b"n" * SECTOR_BYTES
FOLDER = "/checkpoints"


class Machine:
    """One rank's storage on a disk that can crash after any operation."""

    def __init__(self, disk: Disk | None = None, weakening: Weakening | None = None) -> None:
        self.disk = Disk(folders=(FOLDER,)) if disk is None else disk
        self.log = Log(weakening=weakening or Weakening())
        ((files,),) = self.disk.open(self.log)
        self.storage = RecordedStorage(self.log, 0, files)
        self.folder = self.storage.folder(FOLDER)

    def write(self, name: str, content: bytes) -> None:
        self.storage.write(name, Extent(0, len(content)), aligned_buffer(content)).wait()

    def crash(self) -> Crash:
        return Crash(self.log, self.log.lengths(), self.disk)

    def images(self) -> list[Machine]:
        """The machine after every crash of the plain kinds, and after some drawn ones."""
        crash = self.crash()
        units = crash.units_of_power_loss
        drawn = [choose(units, random.Random(seed)) for seed in range(200)]
        return [Machine(crash.image(kept)) for kept in every_choice(units) + drawn]


def contents(machines: list[Machine], name: str) -> set[bytes | None]:
    return {
        machine.storage.get(name) if name in machine.storage.list() else None
        for machine in machines
    }


def committed_file(content: bytes) -> Machine:
    machine = Machine()
    machine.storage.create("page", len(content))
    machine.write("page", content)
    machine.storage.flush(["page"])
    machine.storage.sync_directory()
    return machine


def test_what_is_synced_is_there() -> None:
    assert contents(committed_file(OLD + OLD).images(), "page") == {OLD + OLD}


def test_each_sector_of_a_write_is_old_or_new() -> None:
    machine = committed_file(OLD + OLD)
    machine.write("page", NEW + NEW)
    assert contents(machine.images(), "page") == {OLD + OLD, OLD + NEW, NEW + OLD, NEW + NEW}


def test_a_sector_may_be_of_any_write() -> None:
    machine = committed_file(OLD)
    machine.write("page", NEW)
    machine.write("page", b"3" * SECTOR_BYTES)
    assert contents(machine.images(), "page") == {OLD, NEW, b"3" * SECTOR_BYTES}


def test_a_name_without_sync_may_be_absent_and_a_file_without_flush_empty() -> None:
    machine = Machine()
    machine.storage.create("page", SECTOR_BYTES)
    machine.write("page", NEW)
    assert contents(machine.images(), "page") == {None, b"", bytes(SECTOR_BYTES), NEW}


def test_flush_makes_no_name_durable_and_sync_no_data() -> None:
    machine = Machine()
    machine.storage.create("flushed", 2)
    machine.storage.flush(["flushed"])
    assert contents(machine.images(), "flushed") == {None, bytes(2)}
    machine = Machine()
    machine.storage.create("named", 2)
    machine.storage.sync_directory()
    assert contents(machine.images(), "named") == {b"", bytes(2)}


def test_put_may_be_cut_in_the_middle_and_is_durable_afterwards() -> None:
    machine = Machine()
    machine.storage.put("file", b"1")
    machine.storage.sync_directory()
    machine.storage.put("file", b"23")
    assert contents(machine.images(), "file") == {None, b"1", b"23"}
    log = machine.log
    (put,) = [i for i, op in enumerate(log.operations[0]) if op.text == "file 2"]
    crash = Crash(log, [put + 1], machine.disk)
    images = [crash.image(choose(crash.units, random.Random(seed))) for seed in range(300)]
    assert {None, b"1", b"", b"23"} < contents(list(map(Machine, images)), "file")
    machine.storage.sync_directory()
    assert contents(machine.images(), "file") == {b"23"}


def test_a_rename_happens_or_not() -> None:
    machine = committed_file(OLD)
    machine.storage.put("page.tmp", b"new")
    machine.storage.sync_directory()
    machine.storage.rename("page.tmp", "page")
    found = {
        (machine.storage.get("page"), "page.tmp" in machine.storage.list())
        for machine in machine.images()
    }
    assert found == {(OLD, True), (b"new", False)}


def test_links_are_one_file() -> None:
    machine = committed_file(OLD)
    machine.folder.make("child")
    machine.folder.link(machine.storage, "page", "child", "linked")
    machine.folder.sync("child")
    machine.folder.sync_children()
    assert machine.storage.is_shared("page")
    machine.write("page", NEW)
    for image in machine.images():
        assert image.storage.is_shared("page")
        assert image.folder.get("child", "linked") == image.storage.get("page")


def test_a_child_has_one_name_in_the_end() -> None:
    machine = Machine()
    machine.folder.make("temporary")
    machine.folder.put("temporary", "file", b"1")
    machine.folder.sync("temporary")
    machine.folder.rename("temporary", "final")
    children = {tuple(image.folder.children()) for image in machine.images()}
    assert children == {(), ("temporary",), ("final",)}
    machine.folder.sync_children()
    assert {tuple(image.folder.children()) for image in machine.images()} == {("final",)}


def test_names_in_a_child_need_a_sync_of_their_own() -> None:
    machine = Machine()
    machine.folder.make("child")
    machine.folder.append("child", "file", memoryview(b"12"))
    machine.folder.flush("child", "file")
    machine.folder.sync_children()
    assert {tuple(image.folder.files("child")) for image in machine.images()} == {(), ("file",)}


@pytest.mark.parametrize("change", ["dropped", "delayed"])
def test_a_weakened_sync_is_none(change: str) -> None:
    strong = committed_file(OLD)
    (site,) = [site for site in strong.log.sites if site.startswith("sync_directory")]
    weakened = Machine(weakening=Weakening(**{change: frozenset({site})}))
    weakened.storage.put("file", b"1")
    weakened.storage.sync_directory()
    assert contents(weakened.images(), "file") == {None, b"1"}
    weakened.storage.rename("file", "renamed")
    renamed = contents(weakened.images(), "renamed")
    assert renamed == ({None, b"1"} if change == "dropped" else {b"1"})


def test_no_rank_is_past_a_gather_that_another_has_not_reached() -> None:
    log = Log(3)
    for number in range(4):
        for rank in range(3):
            for _ in range((rank + number) % 3):
                log.add(rank, "unlink", "file")
            log.gathered(rank, str(number))
    seen = set()
    for seed in range(500):
        cuts = draw_cuts(log, random.Random(seed))
        gathered = [
            [op.kind for op in log.operations[r][: cuts[r]]].count("gather") for r in range(3)
        ]
        for rank in range(3):
            # It has done all that comes before the last gather that some rank is past.
            reached = [i for i, op in enumerate(log.operations[rank]) if op.kind == "gather"]
            assert max(gathered) == 0 or cuts[rank] >= reached[max(gathered) - 1]
        seen.add(tuple(cuts))
    assert len(seen) > 50


def test_a_log_says_what_became_of_each_operation() -> None:
    machine = committed_file(OLD)
    machine.write("page", NEW + NEW)
    machine.storage.put("file", b"1")
    crash = machine.crash()
    kept = [unit for unit in crash.units if unit.place[1] != crash.units[0].place[1]]
    lines = crash.describe(kept).splitlines()
    assert len(lines) == len(machine.log.operations[0])
    assert [line.split()[1] for line in lines if " write " in line] == ["durable", "lost"]
    assert [line.split()[1] for line in lines if " put " in line] == ["kept"]


def test_nothing_that_is_written_to_a_file_that_failed_becomes_durable() -> None:
    machine = committed_file(OLD)
    machine.storage.fail("page")
    machine.write("page", NEW)
    machine.storage.flush(["page"])
    assert machine.storage.get("page") == NEW
    crash = machine.crash()
    assert contents([Machine(crash.image(crash.units))], "page") == {NEW}  # Of a kill.
    assert contents(machine.images(), "page") == {OLD, NEW, bytes(SECTOR_BYTES)}


def test_a_file_that_failed_fails_after_a_restart_of_the_process() -> None:
    machine = committed_file(OLD)
    machine.storage.fail("page")
    crash = machine.crash()
    again = Machine(crash.image(crash.units))
    again.log = machine.log.continued(machine.log.lengths())
    ((files,),) = again.disk.open(again.log)
    again.storage, again.disk = RecordedStorage(again.log, 0, files), machine.disk
    again.write("page", NEW)
    again.storage.flush(["page"])
    assert contents(again.images(), "page") == {OLD, NEW, bytes(SECTOR_BYTES)}


def test_a_file_made_anew_is_durable_after_a_flush() -> None:
    machine = committed_file(OLD)
    machine.storage.fail("page")
    machine.storage.create("page", SECTOR_BYTES)
    machine.write("page", NEW)
    machine.storage.flush(["page"])
    machine.storage.sync_directory()
    assert contents(machine.images(), "page") == {NEW}


@pytest.mark.parametrize("operation", OPERATIONS)
def test_an_operation_fails_once_and_shows_the_new_bytes(operation: str) -> None:
    machine = Machine()
    storage = FailedWriteBack(machine.storage, operation, 2, seed=0)
    folder = storage.folder(FOLDER)
    folder.make("child")
    folder.put("child", "small", b"1")
    storage.put("small", b"1")
    storage.create("page", SECTOR_BYTES)
    storage.write("page", Extent(0, SECTOR_BYTES), aligned_buffer(OLD)).wait()
    storage.flush(["page"])
    folder.flush("child", "small")

    def again() -> None:
        folder.put("child", "small", b"2")
        storage.put("small", b"2")
        storage.write("page", Extent(0, SECTOR_BYTES), aligned_buffer(NEW)).wait()
        storage.flush(["page"])
        folder.flush("child", "small")

    with pytest.raises(StorageError) as caught:
        again()
    assert caught.value.errno == errno.EIO
    again()
    assert (storage.get("small"), folder.get("child", "small")) == (b"2", b"2")
    assert storage.get("page") == NEW
    assert any(op.kind.endswith("failure") for op in machine.log.operations[0])
