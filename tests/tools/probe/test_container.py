"""Limits of containers, as control groups of both versions have them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tierstore.tools.probe import container
from tierstore.tools.probe.compute import machine

HOST = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
V2, V1 = "0::/job/own\n", "9:memory:/job/own\n4:cpu,cpuacct:/job/own\n0::/\n"
CASES = {
    "none": (V2, {}, HOST, None),
    "version 2": (
        V2,
        {"job/own/memory.max": "2097152", "job/own/cpu.max": "100000 100000"},
        2**21,
        1,
    ),
    "of a group around it": (
        V2,
        {"job/memory.max": "4096", "job/own/memory.max": "max", "job/own/cpu.max": "max 100000"},
        *(4096, None),
    ),
    "half a processor": (V2, {"job/own/cpu.max": "50000 100000"}, HOST, 1),
    "version 1": (
        V1,
        {
            "memory/job/own/memory.limit_in_bytes": "1048576",
            "cpu,cpuacct/job/own/cpu.cfs_quota_us": "100000",
            "cpu,cpuacct/job/own/cpu.cfs_period_us": "100000",
        },
        *(2**20, 1),
    ),
    "without limits": (
        V1,
        {
            "memory/job/own/memory.limit_in_bytes": str(2**63 - 4096),
            "cpu,cpuacct/job/own/cpu.cfs_quota_us": "-1",
            "cpu,cpuacct/job/own/cpu.cfs_period_us": "100000",
        },
        *(HOST, None),
    ),
    # A container sees its own group as the root, and in /proc the path that the host has.
    "seen as the root": (V2, {"memory.max": "8192", "cpu.max": "100000 100000"}, 8192, 1),
}


@pytest.mark.parametrize("case", CASES)
def test_limits(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own, files, memory_bytes, cores = CASES[case]
    (tmp_path / "own").write_text(own)
    for name, text in files.items():
        path = tmp_path / "cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    monkeypatch.setattr(container, "_OWN", tmp_path / "own")
    monkeypatch.setattr(container, "_ROOT", tmp_path / "cgroup")
    here = machine()
    assert here.memory_bytes == memory_bytes
    assert here.cores == (len(os.sched_getaffinity(0)) if cores is None else cores)


def test_a_process_on_one_processor() -> None:
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    try:
        assert machine().cores == 1
    finally:
        os.sched_setaffinity(0, before)
