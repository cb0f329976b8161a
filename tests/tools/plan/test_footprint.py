"""Footprints of runs, against the counters and files of the runs themselves."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import muon
import tierstore
from muon.plan import PlannedMuon, paged_groups
from tests.rank_programs.training import SHAPES, Case, whole_parameters
from tests.support import training
from tests.support.rank_pool import RankPool
from tierstore.layout.sharding import Holding, whole_on
from tierstore.paging.shared_parameters import shared_parameter
from tierstore.tools.plan.footprint import Footprint, StoreOptions, footprint_of, subgroups_of
from tierstore.tools.plan.partitions import holding_of
from tierstore.tools.plan.step import messages_of

STEPS = 4


def planned(
    groups: list[dict[str, Any]],
    options: StoreOptions,
    holding: Callable[[tuple[int, ...]], Holding] = lambda shape: whole_on([0]),
    world_size: int = 1,
    rank: int = 0,
) -> Footprint:
    shared = [
        [shared_parameter(each, holding(each.spec.shape)) for each in group.parameters]
        for group in paged_groups(groups)
    ]
    subgroups = subgroups_of(shared, options, world_size)
    return footprint_of(subgroups, options, world_size=world_size, rank=rank)


def page_file_bytes(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.rglob("page-*"))


@pytest.mark.quick(5)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "store_options",
    [
        {"page_bytes": 4096, "host_memory": 2**20},
        {"page_bytes": 4096, "buffers": 3},
        {"page_bytes": 8192, "host_memory": 70_000, "commit_every": 3},
        {"host_memory": 200_000},
        {"page_bytes": 4096, "buffers": 2, "commit_every": None},
        {"page_bytes": 4096, "host_memory": 90_000, "device_memory": 30_000},
        {"page_bytes": 8192, "host_memory": 300_000, "step_on": "cpu"},
    ],
    ids=str,
)
def test_equals_the_run(dtype: torch.dtype, store_options: dict[str, Any], tmp_path: Path) -> None:
    """Awkward shapes, five groups of both algorithms."""
    parameters = training.make_parameters(dtype)
    groups = training.make_groups(parameters)
    footprint = planned(groups, StoreOptions(**store_options))
    with tierstore.TierStore(tmp_path, **store_options) as store:
        optimizer = muon.Muon(groups, store=store)
        for parameter in parameters.values():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        store.synchronize()
        before = store.stats()
        for _ in range(STEPS):
            optimizer.step()
        store.synchronize()
        after = store.stats()
        file_bytes = page_file_bytes(tmp_path)
    tiers = [tier.value for _, tier in footprint.pages]
    assert {tier: tiers.count(tier) for tier in set(tiers)} == after.pages_in
    assert footprint.state_bytes == after.state_bytes
    assert footprint.file_bytes == file_bytes
    assert footprint.host_bytes == after.host_bytes_peak
    assert footprint.device_bytes == after.device_bytes_peak
    assert STEPS * footprint.step_read_bytes == after.bytes_read - before.bytes_read
    commits = {None: 1, 1: STEPS, 3: 2}[store_options.get("commit_every", 1)]
    written = STEPS * footprint.step_written_bytes + commits * footprint.commit_written_bytes
    assert written == after.bytes_written - before.bytes_written


def assert_all_is_computed_once(
    works: list[list[tuple[Any, int, int]]], groups: list[dict[str, Any]]
) -> None:
    """Check that ranks together orthogonalize each matrix once, and step each element once."""
    total: Counter[str] = Counter()
    for counts, _, _ in itertools.chain.from_iterable(works):
        for (work, shape, _), count in counts.items():
            total[work] += count * math.prod(shape)
    numels: Counter[str] = Counter()
    for group in groups:
        numel = sum(parameter.numel() for _, parameter in group["params"])
        is_muon = group["algorithm"] == "muon"
        numels["muon_elements" if is_muon else "adamw_elements"] += numel
        numels["newton_schulz"] += numel if is_muon else 0
    assert total == numels


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    ("layout", "partition", "world_size"),
    [
        ("plain", "ddp", 2),
        ("plain", "ddp", 3),
        ("fsdp", "fsdp", 2),
        ("fsdp", "fsdp", 3),
        ("hsdp", "hsdp", 4),
    ],
)
def test_equals_the_run_of_each_rank(
    layout: str, partition: str, world_size: int, pool: RankPool, tmp_path: Path
) -> None:
    store_options = {"page_bytes": 4096, "host_memory": 60_000}
    case = Case(layout=layout, directory=tmp_path, store=store_options)
    found = pool.run(world_size, "tests.rank_programs.footprint:measure", case)
    groups = training.make_groups(whole_parameters(SHAPES), SHAPES)
    node_size = 2 if partition == "hsdp" else 1
    holding = partial(holding_of, partition=partition, world_size=world_size, node_size=node_size)
    optimizer = PlannedMuon(groups, {})
    shared = [
        [shared_parameter(each, holding(each.spec.shape)) for each in group.parameters]
        for group in optimizer.groups
    ]
    subgroups = subgroups_of(shared, StoreOptions(**store_options), world_size)
    works, _ = optimizer.works(subgroups, range(world_size), world_size)
    assert_all_is_computed_once(works, groups)
    received = [
        sum(nbytes for owner, nbytes in messages_of(subgroup, rank).items() if owner != rank)
        for subgroup in subgroups
        for rank in range(world_size)
    ]
    spread = sum(after.bytes_spread - before.bytes_spread for before, after, _, _ in found)
    # Messages are padded: each part of a parameter to 64 bytes.
    assert sum(received) <= spread <= sum(received) + 64 * world_size**2 * len(SHAPES)
    for rank, (before, after, file_bytes, exchanged) in enumerate(found):
        # What is gathered from a rank comes back, and the other way round.
        assert exchanged == sum(sent + received for _, sent, received in works[rank])
        footprint = planned(
            groups, StoreOptions(**store_options), holding, world_size=world_size, rank=rank
        )
        tiers = [tier.value for _, tier in footprint.pages]
        assert {tier: tiers.count(tier) for tier in set(tiers)} == after.pages_in
        assert footprint.state_bytes == after.state_bytes
        assert footprint.file_bytes == file_bytes
        assert footprint.host_bytes == after.host_bytes_peak
        assert footprint.step_read_bytes == after.bytes_read - before.bytes_read
        written = footprint.step_written_bytes + footprint.commit_written_bytes
        assert written == after.bytes_written - before.bytes_written
