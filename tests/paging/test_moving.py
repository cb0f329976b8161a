"""Memory never exceeds the budgets while pages move, and the reported peak is exact."""

from __future__ import annotations

import contextlib
import itertools
import mmap
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import tierstore
from tests.support.toy import Spec, Toy
from tierstore.paging import buffers, page_table
from tierstore.paging.device import Device, DeviceBuffer
from tierstore.paging.tier_plan import Budget, Tier, place
from tierstore.storage.memory import MemoryStorage
from tierstore.units import SECTOR_BYTES

KIB = 1024
SMALL_PAGES = 4 * KIB  # Every matrix below is larger, so it has a page to itself.


class Ledger:
    """Counts the bytes of arenas that are allocated and not freed, on host and device."""

    def __init__(self) -> None:
        self._arenas: list[tuple[weakref.ref[mmap.mmap], int]] = []
        self.on_host = self.on_device = self.on_both = 0
        self.failing: int | None = None
        """Number of the next allocation that fails."""
        self.error: type[BaseException] = KeyboardInterrupt
        self._device = 0
        self.arenas_taken = 0

    @property
    def now(self) -> int:
        """Bytes that are allocated on host and device together."""
        return self._host + self._device

    @property
    def _host(self) -> int:
        alive = ((reference(), nbytes) for reference, nbytes in self._arenas)
        return sum(nbytes for arena, nbytes in alive if arena is not None and not arena.closed)

    def took_arena(self, arena: mmap.mmap, nbytes: int) -> None:
        if nbytes > SECTOR_BYTES:  # Else the arena of an empty pool.
            self.arenas_taken += 1
            self._arenas.append((weakref.ref(arena), nbytes))
        self.on_host = max(self.on_host, self._host)
        self.on_both = max(self.on_both, self.now)

    def allocating(self) -> None:
        if self.failing is not None:
            self.failing -= 1
            if not self.failing:
                self.failing = None
                raise self.error("while memory is allocated")

    def took_device(self, buffer: DeviceBuffer) -> None:
        nbytes = buffer.tensor.numel()
        self._device += nbytes
        self.on_device = max(self.on_device, self._device)
        self.on_both = max(self.on_both, self.now)
        weakref.finalize(buffer.tensor, self._free_device, nbytes)

    def _free_device(self, nbytes: int) -> None:
        self._device -= nbytes


@contextlib.contextmanager
def counting(*, apart: bool = False, beside: bool = False) -> Iterator[Ledger]:
    """Count all memory that stores allocate.

    Args:
        apart: pages are stepped on a separate device.
        beside: parameters are on a separate device, and ``step_on="cpu"`` steps pages.
    """
    ledger = Ledger()
    map_arena, populate, allocate = buffers.map_memory, buffers._populate, Device.allocate

    def counted_map(nbytes: int) -> mmap.mmap:
        arena = map_arena(nbytes)
        ledger.took_arena(arena, nbytes - buffers.HUGE_PAGE_BYTES)
        return arena

    def counted_populate(arena: mmap.mmap, offset: int, nbytes: int) -> None:
        ledger.allocating()
        populate(arena, offset, nbytes)

    def counted_allocate(device: Device, nbytes: int) -> DeviceBuffer:
        ledger.allocating()
        buffer = allocate(device, nbytes)
        ledger.took_device(buffer)
        return buffer

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(buffers, "map_memory", counted_map)
        patch.setattr(buffers, "_populate", counted_populate)
        patch.setattr(Device, "allocate", counted_allocate)
        patch.setattr(buffers, "_lock_pages", lambda *args: None)
        if apart:
            patch.setattr(Device, "is_host", False)
        if beside:
            other = type("Other", (Device,), {"is_host": False})()
            patch.setattr(page_table, "device_of", lambda groups: torch.device("cuda"))
            open_device = {"cuda": other, "cpu": Device()}
            patch.setattr(page_table, "open_device", lambda device: open_device[device.type])
        yield ledger


def matrix(name: str, rows: int) -> Spec:
    """A parameter whose page has 2 KiB of master and 2 KiB of momentum per row."""
    return (name, (rows, 512), torch.bfloat16, {"momentum": torch.float32}, False)


def matrices(count: int, rows: int = 32, prefix: str = "m") -> list[Spec]:
    return [matrix(f"{prefix}{number}", rows) for number in range(count)]


def budgets_for(specs: list[Spec], host: int, device: int) -> tuple[int, int]:
    """Return the budgets that hold these numbers of pages of equal matrices, and two buffers."""
    toy = Toy(None, [specs], page_bytes=SMALL_PAGES)  # type: ignore[arg-type]
    page = toy.store.stats().state_bytes // len(specs)
    return (host + 2) * page, device * page


def assert_counted(toy: Toy, ledger: Ledger) -> None:
    stats = toy.store.stats()
    assert (ledger.on_host, ledger.on_device) == (stats.host_bytes_peak, stats.device_bytes_peak)


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("changed", [False, True])
@pytest.mark.parametrize("start", ["nvme", "host", "device"])
@pytest.mark.parametrize("end", ["nvme", "host", "device"])
def test_moving_stays_within_budgets_that_just_hold_all_pages(
    start: str, end: str, changed: bool, apart: bool
) -> None:
    specs = matrices(6)
    host_memory, device_memory = budgets_for(specs, 4, 6)
    with counting(apart=apart) as ledger:
        toy = Toy(
            MemoryStorage(),
            [specs],
            page_bytes=SMALL_PAGES,
            buffers=None,
            commit_every=3 if changed else 1,
            host_memory=host_memory,
            device_memory=device_memory,
        )
        for step, tier in enumerate([start, end, start], start=1):
            toy.store.move(tier)
            toy.step()
            toy.assert_at(step)
        assert 0 < ledger.on_host <= host_memory
        assert ledger.on_device <= device_memory
        assert_counted(toy, ledger)
        toy.store.close()


def test_moving_without_a_directory_needs_memory_for_one_more_page() -> None:
    specs = matrices(6)
    with counting() as ledger:
        toy = Toy(None, [specs], page_bytes=SMALL_PAGES)  # type: ignore[arg-type]
        toy.step()
        pages = toy.store.stats().state_bytes
        for step, tier in enumerate(["device", "host", "device"], start=2):
            toy.store.move(tier)
            toy.step()
            toy.assert_at(step)
        assert ledger.on_host == ledger.on_device == pages
        assert ledger.on_both == pages + pages // len(specs)
        assert_counted(toy, ledger)


def test_attaching_a_group_swaps_pages_between_tiers() -> None:
    """Neither tier has a byte to spare, and the pages are newer than their files."""
    first, late = matrices(3), matrices(2, prefix="late")
    host_memory, device_memory = budgets_for(first, 2, 2)
    budget = Budget(host_memory=host_memory, device_memory=device_memory, buffers=None)
    before, after = (place([device_memory // 2] * count, budget).tiers for count in (3, 5))
    changes = set(zip(before, after, strict=False))
    assert {(Tier.HOST, Tier.DEVICE), (Tier.DEVICE, Tier.HOST)} <= changes
    with counting() as ledger:
        toy = Toy(
            MemoryStorage(),
            [first],
            page_bytes=SMALL_PAGES,
            buffers=None,
            commit_every=None,
            host_memory=host_memory,
            device_memory=device_memory,
        )
        toy.step()
        toy.attach(late)
        toy.step()
        states = toy.store.pages.read_states()
        for name, states_of in states.items():
            steps = 1 if name.startswith("late") else 2
            assert torch.equal(states_of["momentum"], torch.full((32, 512), float(steps)))
            assert torch.equal(states_of["master"], torch.full((32, 512), 1 - steps / 4))
        assert ledger.on_host <= host_memory
        assert ledger.on_device <= device_memory
        assert_counted(toy, ledger)
        toy.store.close()


@pytest.mark.parametrize("step_on", [None, "cpu"])
def test_moving_to_the_current_tier_allocates_nothing(step_on: str | None) -> None:
    with counting(beside=step_on == "cpu") as ledger:
        toy = Toy(MemoryStorage(), [matrices(4)], page_bytes=SMALL_PAGES, step_on=step_on)
        toy.step()
        taken = ledger.arenas_taken
        assert taken
        toy.store.move("nvme")
        assert ledger.arenas_taken == taken
        toy.step()
        toy.assert_at(2)
        assert_counted(toy, ledger)
        toy.store.close()


def test_slabs_of_a_late_group_replace_buffers() -> None:
    host_memory = 3_000 * KIB
    with counting(beside=True) as ledger:
        toy = Toy(
            MemoryStorage(),
            [matrices(40)],
            page_bytes=SMALL_PAGES,
            buffers=None,
            step_on="cpu",
            host_memory=host_memory,
        )
        toy.step()
        toy.store.move("nvme")
        assert ledger.on_host > host_memory * 0.9
        toy.attach([matrix("late", 64)])
        toy.step()
        assert ledger.on_host <= host_memory
        assert_counted(toy, ledger)
        toy.store.close()


@pytest.mark.quick(8)
@pytest.mark.parametrize("closing", [False, True])
@pytest.mark.parametrize("error", [KeyboardInterrupt, tierstore.BudgetError])
@pytest.mark.parametrize(
    ("call", "step_on"),
    [
        *itertools.product(["nvme to host", "host to nvme", "late group"], [None, "cpu"]),
        ("device to host", None),
        ("host to device", None),
    ],
)
def test_a_failed_placement_frees_its_memory(
    call: str, step_on: str | None, error: type[BaseException], closing: bool
) -> None:
    """On close(), or before restore() allocates again, although the traceback is alive."""
    specs, late = matrices(6), matrices(8, prefix="late")
    host_memory, device_memory = budgets_for(specs, 4, 6 if "device" in call else 0)
    if step_on == "cpu":
        host_memory += 3 * 32 * 512 * (2 + 2)  # Slabs of parameters and gradients.
    for failing in range(1, 20):
        with counting(beside=step_on == "cpu") as ledger:
            ledger.error = error
            toy = Toy(
                MemoryStorage(),
                [specs],
                page_bytes=SMALL_PAGES,
                buffers=None,
                step_on=step_on,
                host_memory=host_memory,
                device_memory=device_memory,
            )
            start, _, end = call.partition(" to ")
            if end:
                toy.store.move(start)
            toy.step()
            toy.store.synchronize()
            ledger.failing, failure = failing, None
            try:
                if end:
                    toy.store.move(end)
                else:
                    toy.attach(late)
            except error as caught:
                failure = caught
                for name, *_ in late:
                    toy.parameters.pop(name, None)
                if not closing:
                    assert toy.store.restore() == 1
                    toy.assert_at(1)
                    toy.step()
            ledger.failing = None
            assert ledger.on_host <= host_memory
            toy.store.close()
            assert not ledger.now
        if failure is None:
            break
    assert failing > 1


@pytest.mark.parametrize("error", [KeyboardInterrupt, tierstore.BudgetError])
def test_the_first_placement_can_be_retried(error: type[BaseException]) -> None:
    """No step was done yet, so the store does not fail."""
    specs = matrices(6)
    host_memory, device_memory = budgets_for(specs, 3, 2)
    with counting() as ledger:
        ledger.error = error
        toy = Toy(
            MemoryStorage(),
            [],
            page_bytes=SMALL_PAGES,
            buffers=None,
            host_memory=host_memory,
            device_memory=device_memory,
        )
        for failing in (1, 3, 6):  # The buffers, a page of the host, one of the device.
            ledger.failing = failing
            with pytest.raises(error):
                toy.attach(specs)
            toy.groups.clear()
            assert not ledger.now
        toy.attach(specs)
        toy.step()
        toy.assert_at(1)
        assert ledger.on_host <= host_memory
        assert ledger.on_device <= device_memory
        toy.store.close()


@pytest.mark.quick(3)
@pytest.mark.parametrize("error", [KeyboardInterrupt, torch.OutOfMemoryError])
@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("stepped", [0, 2])
@pytest.mark.parametrize(
    ("call", "step_on"),
    [
        *itertools.product(["move", "late group"], [None, "cpu"]),
        ("move back", None),
    ],
)
def test_a_store_without_a_directory_works_after_a_failed_placement(
    call: str, step_on: str | None, stepped: int, apart: bool, error: type[BaseException]
) -> None:
    """It keeps its state, whether a step, the same call, or a read follows."""
    specs, late = matrices(6), matrices(4, prefix="late")
    for failing in range(1, 20):
        for following in ("step", "again", "read", "write"):
            with counting(apart=apart, beside=step_on == "cpu") as ledger:
                ledger.error = error
                toy = Toy(None, [specs], page_bytes=SMALL_PAGES, step_on=step_on)  # type: ignore[arg-type]
                toy.store.move("device" if call == "move back" else "host")
                for _ in range(stepped):
                    toy.step()
                before = ledger.now

                def act(toy: Toy = toy) -> None:
                    if call == "late group":
                        toy.attach(late)
                    else:
                        toy.store.move("host" if call == "move back" else "device")

                ledger.failing, failure = failing, None
                try:
                    act()
                except error as caught:
                    ledger.failing, failure = None, caught
                    for name, *_ in late:
                        toy.parameters.pop(name, None)
                    if following == "again":
                        act()
                        toy.step()
                    elif following == "write":
                        toy.store.pages.write_states(toy.store.pages.read_states())
                    elif following == "step":
                        toy.step()
                    if call != "late group":
                        toy.assert_at(toy.store.step)
                    if following != "again":
                        assert toy.store.pages.read_states().keys() == {name for name, *_ in specs}
                        assert ledger.now == before
                ledger.failing = None
                toy.store.close()
                assert not ledger.now
        if failure is None:
            break
    assert failing > 1


operations = st.lists(
    st.one_of(
        st.sampled_from(["step", "step", "prefetch", "host", "nvme", "device"]),
        st.lists(st.integers(4, 40), min_size=1, max_size=3),  # The rows of a late group.
    ),
    max_size=8,
)


@given(
    rows=st.lists(st.integers(4, 40), min_size=1, max_size=7),
    operations=operations,
    host_memory=st.integers(8, 700).map(lambda n: n * KIB),
    device_memory=st.integers(0, 400).map(lambda n: n * KIB),
    step_on=st.sampled_from([None, "cpu"]),
    commit_every=st.sampled_from([1, 2, None]),
    apart=st.booleans(),
)
def test_any_sequence_of_moves_stays_within_the_budgets(
    rows: list[int],
    operations: list[str | list[int]],
    host_memory: int,
    device_memory: int,
    step_on: str | None,
    commit_every: int | None,
    apart: bool,
) -> None:
    options: dict[str, Any] = {
        "step_on": step_on,
        "host_memory": host_memory,
        "device_memory": device_memory if step_on is None else 0,
        "commit_every": commit_every,
        "page_bytes": SMALL_PAGES,
        "buffers": None,
    }
    steps: dict[str, int] = {}

    def late(rows: list[int]) -> None:
        names = [f"m{len(steps) + number}" for number in range(len(rows))]
        toy.attach([matrix(name, count) for name, count in zip(names, rows, strict=True)])
        steps.update(dict.fromkeys(names, 0))

    with (
        counting(apart=apart, beside=step_on == "cpu") as ledger,
        contextlib.suppress(tierstore.BudgetError),
    ):
        toy = Toy(MemoryStorage(), [], **options)
        late(rows)
        for operation in ["step", *operations, "step"]:
            if isinstance(operation, list):
                late(operation)
            elif operation == "step":
                toy.step()
                steps = {name: count + 1 for name, count in steps.items()}
            elif operation == "prefetch":
                toy.store.pages.prefetch()
            else:
                with contextlib.suppress(tierstore.BudgetError):
                    toy.store.move(operation)
        for name, states in toy.store.pages.read_states().items():
            assert (states["momentum"] == steps[name]).all()
            assert (states["master"] == 1 - steps[name] / 4).all()
        assert_counted(toy, ledger)
        toy.store.close()
    assert ledger.on_host <= host_memory
    assert (
        apart or ledger.on_device <= device_memory
    )  # With a separate device, pages are also copied to be stepped.
