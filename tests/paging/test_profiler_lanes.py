"""A profile shows transfers beside the computation that overlaps with them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

import muon
import tierstore


def ranges_of(path: Path) -> dict[str, list[dict[str, Any]]]:
    found: dict[str, list[dict[str, Any]]] = {}
    for event in json.loads(path.read_text())["traceEvents"]:
        if event.get("ph") == "X" and event["name"].startswith(("tierstore::", "muon::")):
            found.setdefault(event["name"].split()[0], []).append(event)
    return found


def test_a_profile_shows_transfers_beside_the_step(tmp_path: Path) -> None:
    matrices = [torch.nn.Parameter(torch.randn(64, 128)) for _ in range(6)]
    bias = torch.nn.Parameter(torch.randn(4))
    for parameter in (*matrices, bias):
        parameter.grad = torch.randn_like(parameter)
    groups = [{"params": matrices}, {"params": [bias], "algorithm": "adamw"}]
    with tierstore.TierStore(tmp_path / "run", page_bytes=65536, buffers=2) as store:
        optimizer = muon.Muon(groups, store=store)
        optimizer.step()
        store.synchronize()  # Or writes of this step begin within the profile.
        every_thread = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
        with profile(
            activities=[ProfilerActivity.CPU], experimental_config=every_thread
        ) as profiled:
            optimizer.step()
            store.synchronize()
        pages = store.stats().pages
    profiled.export_chrome_trace(str(tmp_path / "trace.json"))
    ranges = ranges_of(tmp_path / "trace.json")
    assert len(ranges["tierstore::swap_in"]) == len(ranges["tierstore::swap_out"]) == pages
    assert len(ranges["muon::newton_schulz"]) == len(matrices)
    assert {name for name in ranges if name.startswith("muon::")} == {
        *("muon::momentum", "muon::newton_schulz", "muon::apply", "muon::adamw")
    }
    assert ranges["tierstore::commit"]
    threads = {
        lane: {event["tid"] for event in ranges[lane]}
        for lane in ("tierstore::swap_in", "tierstore::swap_out", "muon::apply")
    }
    assert all(len(found) == 1 for found in threads.values())
    assert len(set.union(*threads.values())) == 3
