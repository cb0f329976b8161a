"""Plans of jobs, against figures worked out by hand and against each other."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import muon
import tierstore
from tierstore.checkpoint.directory import CheckpointDirectory
from tierstore.errors import BudgetError, PlanError
from tierstore.tools.plan.drives import parse_drives
from tierstore.tools.plan.footprint import StoreOptions
from tierstore.tools.plan.job import Job
from tierstore.tools.plan.memory import extra_sets
from tierstore.tools.plan.model_files import model_from_listing, read_model
from tierstore.tools.plan.plan import FREE, Plan, plan, to_plain
from tierstore.tools.plan.rates import Rates, assumed_rates

GB = 10**9
DRIVE = "1x3.84TB@7/5GB/s,1DWPD"
MATRICES = {
    f"layers.{layer}.{name}.weight": {"shape": [1024, 1024], "dtype": "bfloat16"}
    for layer in range(4)
    for name in ("up_proj", "down_proj")
}


def planned(
    listing: Any = None, drives: str = DRIVE, rates: Rates | None = None, **fields: Any
) -> Plan:
    model = model_from_listing(MATRICES if listing is None else listing)
    job = Job(drives=parse_drives(drives), **fields)
    return plan(model, job, rates or assumed_rates(job.drives, on_gpu=job.on_gpu, flops=1e16))


CONTEXT = 2**29
SMALL = StoreOptions(host_memory=2**25, page_bytes=2**22, buffers=4)
"""8 pages of one matrix pass through 4 buffers."""


def test_wear_of_8b_parameters() -> None:
    """6 bytes of each parameter every 10 s are 415 TB a day, 108 drive writes per day."""
    listing = {
        f"layers.{n}.weight": {"shape": [40000, 20000], "dtype": "bfloat16"} for n in range(10)
    }
    found = planned(
        listing, gpus=1, model_s=10.0, store=StoreOptions(host_memory=64 * 2**30, buffers=2)
    )
    assert found.wear is not None
    assert found.wear.bytes_per_day * found.time.seconds / 86_400 == pytest.approx(48e9, rel=1e-5)
    per_step = found.wear.bytes_per_day * found.time.seconds / 10.0  # As if it were 10 s.
    assert per_step == pytest.approx(415e12, rel=0.001)
    assert found.wear.drive_writes_per_day * found.time.seconds / 10 == pytest.approx(108, rel=0.01)
    assert found.steps_allowed == pytest.approx(3.84e12 * 1825 / 48e9, rel=1e-5)
    assert found.days == pytest.approx(found.steps_allowed * found.time.seconds / 86_400)


def test_a_run_that_wears_its_drives_out_is_not_allowed() -> None:
    allowed = planned(store=SMALL).steps_allowed
    assert allowed is not None
    assert planned(store=SMALL, steps=math.floor(allowed)).lasts
    assert not planned(store=SMALL, steps=math.ceil(allowed) + 1).lasts
    half = planned(store=SMALL, endurance=0.5).steps_allowed
    assert half == pytest.approx(allowed / 2)
    # A fifth of the life is used already, and three fifths may be: two fifths are left.
    assert planned(store=SMALL, endurance=0.6, wear=0.2).steps_allowed == pytest.approx(
        0.4 * allowed
    )
    for used_up in (
        planned(store=SMALL, endurance=0.1, wear=0.2),
        planned(store=SMALL, wear=1.5),
    ):
        assert used_up.steps_allowed == 0
        assert not used_up.lasts
    halves = planned(store=SMALL, endurance=0.5)
    assert halves.beside[0].days == halves.days
    unknown = planned(store=SMALL, drives="1x3.84TB@7/5GB/s", steps=10**9)
    assert unknown.steps_allowed is None
    assert unknown.lasts


def test_memory_is_worked_out_part_by_part() -> None:
    found = planned(gpus=1, gpu_memory=GB, host_memory=GB, checkpoints=2, store=SMALL)
    by_place = {need.place: need for need in found.needs}
    numel = 8 * 1024 * 1024
    assert by_place["GPU"].parts["parameters"] == 2 * numel
    assert by_place["GPU"].parts["gradients"] == 2 * numel
    assert by_place["GPU"].parts["context of CUDA"] == CONTEXT
    # A page of 6 MiB and framing: stepped at most one at once, and three are on their way.
    page = found.ranks.classes[0].footprint.layouts[0].nbytes
    assert 6 * 2**20 < page < 6 * 2**20 + 2**14
    assert by_place["GPU"].parts["pages on the device"] == 4 * page
    # The matrix that is given, those before and after a step, and two square products.
    assert by_place["GPU"].parts["tensors of the optimizer"] == 5 * 2 * 1024**2
    assert by_place["host"].parts == {"buffers of pages": 4 * page, "the program": 3 * 2**30}
    assert by_place["NVMe"].parts == {
        "pages of the run": 8 * page,
        "their second slots": 8 * page,
        "published checkpoints": 16 * page,
        "while one is published": 8 * page,
    }
    assert not found.fits  # A program with CUDA has more than a GB of host memory.
    assert planned(gpus=1, gpu_memory=GB, host_memory=4 * GB, store=SMALL).fits


def test_fsdp_gathers_two_layers_and_what_is_outside_of_them() -> None:
    outside = {"embed_tokens.weight": {"shape": [512, 1024], "dtype": "bfloat16"}}
    found = planned({**outside, **MATRICES}, gpus=2, store=SMALL)
    (gpu,) = [need for need in found.needs if need.place == "GPU"]
    layer, embedding = 2 * 2 * 1024**2, 2 * 512 * 1024
    assert gpu.parts["gathered parameters"] == 2 * layer + embedding
    # Gradients of a layer, and the input of their reduction; of the embedding, until the end.
    assert gpu.parts["gradients to be reduced"] == 2 * layer + embedding
    assert gpu.parts["parameters"] == (4 * layer + embedding) // 2


def test_experts_are_gathered_by_the_ranks_that_have_them() -> None:
    experts = {f"layers.{n}.experts": {"shape": [8, 64, 32], "dtype": "bfloat16"} for n in range(2)}
    for ranks, nbytes in ((1, 2 * 8 * 64 * 32 * 2), (4, 2 * 2 * 64 * 32 * 2)):
        found = planned(experts, gpus=8, expert_parallel=ranks, store=SMALL)
        (gpu,) = [need for need in found.needs if need.place == "GPU"]
        assert gpu.parts["gathered parameters"] == nbytes
        assert gpu.parts["parameters"] == 2 * 2 * 8 * 64 * 32 // 8
    with pytest.raises(PlanError, match="experts can be dealt to 3 ranks only with"):
        planned(experts, gpus=8, expert_parallel=3, store=SMALL)
    with pytest.raises(PlanError, match="8 experts cannot be dealt equally to 16 ranks"):
        planned(experts, gpus=16, expert_parallel=16, store=SMALL)


def test_pages_beyond_counting_are_refused() -> None:
    large = {"w": {"shape": [2**20, 2**14], "dtype": "bfloat16"}}
    with pytest.raises(PlanError, match=r"in pages of 64\.0 KiB are more than 131,072 pages"):
        planned(large, store=StoreOptions(host_memory=2**20))


def test_paging_is_free_from_there_on() -> None:
    found = planned(gpus=1, flops=1e14, tokens=1000, store=SMALL)
    assert found.free_model_s is not None
    assert found.free_tokens == pytest.approx(
        found.free_model_s * 1e14 / (6 * found.model.parameter_count)
    )
    for factor, free in ((1.0, True), (0.97, False), (3.0, True)):
        time = found.formula.step(factor * found.free_model_s)
        assert (time.exposed_s <= FREE * time.seconds) == free
    resident = planned(store=StoreOptions(host_memory=2**30, commit_every=None))
    assert resident.time.exposed_s == pytest.approx(0, abs=1e-9)
    assert resident.free_model_s == 0


def test_the_time_of_a_disk_bound_step() -> None:
    """All bytes in and out, each direction at half speed while the other is busy."""
    slow = planned(drives="1x1TB@0.1/0.1GB/s", store=SMALL)
    footprint = slow.ranks.classes[0].footprint
    moved = footprint.step_read_bytes + footprint.step_written_bytes
    assert slow.time.seconds == pytest.approx(moved / 1e8, rel=0.1)
    assert slow.bottleneck == "the drives"
    # Two ranks of a node share its drives, and own half each.
    shared = planned(drives="1x1TB@0.1/0.1GB/s", cpu_ranks=2, store=SMALL)
    assert shared.time.seconds == pytest.approx(slow.time.seconds, rel=0.15)


def test_changes_are_plans_of_their_own() -> None:
    drives = "2x1TB@0.1/0.1GB/s,1DWPD"
    found = planned(drives=drives, store=SMALL)
    by_text = {one.change: one for one in found.changes}
    third = planned(drives=drives.replace("2x", "3x"), store=SMALL)
    more = by_text["one more drive in each node"]
    assert more.step_s == pytest.approx(third.time.seconds)
    assert more.days == pytest.approx(third.days)
    assert more.step_s < 0.75 * found.time.seconds
    (half,) = [one for text, one in by_text.items() if text.startswith("half of the pages")]
    assert half.step_s < found.time.seconds
    # Momentum of bfloat16 parameters is bfloat16 already.
    assert "momentum in bfloat16" not in by_text
    wide = {name: value["shape"] for name, value in MATRICES.items()}
    narrower = {
        one.change for one in planned(wide, store=replace(SMALL, host_memory=2**26)).changes
    }
    assert "momentum in bfloat16" in narrower


def test_states_in_fewer_bytes_are_changes_of_a_plan() -> None:
    found = planned(drives="1x1TB@0.1/0.1GB/s,1DWPD", store=SMALL)
    by_text = {one.change: one for one in found.changes}
    for text, options in (
        ("momentum in 8 bits", {"momentum_dtype": torch.int8}),
        ("masters as remainders", {"master": "remainder"}),
    ):
        alone = planned(drives="1x1TB@0.1/0.1GB/s,1DWPD", store=SMALL, optimizer=options)
        assert by_text[text].step_s == pytest.approx(alone.time.seconds)
        assert by_text[text].step_s < found.time.seconds
        assert text not in {one.change for one in alone.changes}
    assert "moments of AdamW in 8 bits" not in by_text  # All parameters are Muon's.


def test_muon_beside_adamw() -> None:
    found = planned(store=SMALL)
    muon, adamw = found.beside
    assert (muon.algorithm, adamw.algorithm) == ("muon", "adamw")
    assert muon.step_s == found.time.seconds
    # Master and two moments against master and momentum: 12 bytes of an element against 6.
    assert adamw.state_bytes == pytest.approx(2 * muon.state_bytes, rel=0.01)
    assert adamw.written_bytes == pytest.approx(2 * muon.written_bytes, rel=0.01)


def test_commits_of_resting_pages_are_spread_over_steps() -> None:
    """10 steps and one commit of all pages: a tenth of the bytes of a step that commits."""
    store = StoreOptions(host_memory=2**30)
    each = planned(store=store, model_s=1.0)
    tenth = planned(store=replace(store, commit_every=10), model_s=1.0)
    assert each.wear is not None
    assert tenth.wear is not None
    assert tenth.wear.bytes_per_day == pytest.approx(each.wear.bytes_per_day / 10, rel=0.01)
    hundredth = planned(store=replace(store, commit_every=100), drives="1x1TB@0.01/0.01GB/s")
    waiting = planned(store=store, drives="1x1TB@0.01/0.01GB/s")
    assert hundredth.time.seconds < 0.1 * waiting.time.seconds


def test_matrices_are_counted_where_steps_are_computed() -> None:
    in_steps, in_messages = "tensors of the optimizer", "parameters in flight"
    on_host = replace(SMALL, step_on="cpu", host_memory=2**27)
    found = planned(gpus=2, partition="ddp", store=on_host)
    by_place = {need.place: need.parts for need in found.needs}
    assert in_steps not in by_place["GPU"]
    assert by_place["host"][in_steps] == 2 * found.ranks.matrix_bytes
    # 16 MiB of parameters are less than may be in flight, so all are at once.
    assert by_place["GPU"][in_messages] == 2 * 8 * 1024**2
    ranks_of_cpu = planned(cpu_ranks=2, partition="ddp", store=SMALL)
    parts = {need.place: need.parts for need in ranks_of_cpu.needs}["host"]
    assert parts[in_messages] == 2 * 2 * 8 * 1024**2
    assert parts[in_steps] == 2 * ranks_of_cpu.ranks.matrix_bytes


@pytest.mark.long
@pytest.mark.parametrize("algorithm", ["muon", "adamw"])
def test_8b_on_a_gpu_of_24_gb(algorithm: str) -> None:
    """By hand: 8.03e9 bfloat16 parameters, and the largest gradient, of 128256 x 4096."""
    model = read_model(Path(__file__).parent / "configs" / "llama-3.1-8b.json")
    drives = parse_drives("4x3.84TB@7/5.5GB/s,1DWPD")
    job = Job(gpus=1, gpu_memory=24 * 2**30, host_memory=128 * 2**30, drives=drives)
    rates = assumed_rates(drives, on_gpu=True)

    def needs(**options: Any) -> dict[str, Any]:
        store = StoreOptions(host_memory=64 * 2**30, **options)
        found = plan(model, replace(job, store=store), rates, algorithm=algorithm)
        return {need.place: need for need in found.needs}

    stay, leave = needs(), needs(offload_gradients="backward")
    parameters, largest = 2 * 8_030_261_248, 2 * 128_256 * 4096
    assert not stay["GPU"].fits
    assert leave["GPU"].fits
    assert leave["GPU"].parts["parameters"] == parameters
    assert (stay["GPU"].parts["gradients"], leave["GPU"].parts["gradients"]) == (
        parameters,
        largest,
    )
    assert leave["host"].parts["copies of gradients and parameters"] == parameters
    # Slabs with the gradients of four pages.
    assert leave["GPU"].parts["pages on the device"] > stay["GPU"].parts["pages on the device"]


def test_gradients_that_ddp_reduces_do_not_leave() -> None:
    store = StoreOptions(offload_gradients="backward")
    with pytest.raises(PlanError, match="DDP reduces them later: plan with fsdp or hsdp"):
        Job(gpus=2, partition="ddp", store=store)


@pytest.mark.parametrize("partition", ["ddp", "fsdp", "hsdp"])
def test_all_ranks_together_have_the_state_once(partition: str) -> None:
    one = planned(store=SMALL)
    found = planned(nodes=2, gpus=2, partition=partition, store=SMALL)
    assert found.ranks.total("state_bytes") == pytest.approx(
        one.ranks.total("state_bytes"), rel=0.01
    )
    spread = sum(sum(each.spread_bytes) for each in found.ranks.classes)
    assert (spread > 0) == (partition != "fsdp")


def test_thousands_of_ranks_take_seconds() -> None:
    """Classes of equal ranks are laid out, not ranks."""
    found = planned(nodes=512, gpus=8, store=SMALL)
    assert found.job.world_size == 4096
    assert len(found.ranks.classes) <= 8
    assert sum(one.count for one in found.ranks.classes) == 4096


def test_json_has_all_answers() -> None:
    found = planned(gpus=1, gpu_memory=GB, flops=1e14, tokens=1000, store=SMALL)
    body = to_plain(found)
    assert body["fits"]
    assert body["rank"]["pages"] == {"device": 0, "host": 0, "nvme": 8}
    assert {"device", "host", "nvme"} == set(body["rank"]["pages"])
    assert body["step"]["seconds"] == found.time.seconds
    assert body["step"]["lane_seconds"] == found.time.lanes
    assert [one["algorithm"] for one in body["beside"]] == ["muon", "adamw"]
    numbers = [body["wear"]["days"], body["free"]["tokens"], body["step"]["exposed_seconds"]]
    assert all(math.isfinite(number) for number in numbers)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"nodes": 0}, "nodes must be a number above 0 and below 2.63, got 0"),
        ({"gpus": -1}, "gpus must be a number 0 or more and below 2.63, got -1"),
        ({"model_s": math.nan}, "model_s must be a number 0 or more .* got nan"),
        ({"flops": 1e12}, "needs the tokens of a step"),
        ({"nodes": 10_000, "gpus": 8}, "80000 ranks are more than"),
        ({"partition": "zero"}, "a partition is one of"),
        (
            {"optimizer": {"lr": 1}},
            "option 'lr' does not affect a plan",
        ),
    ],
)
def test_nonsense_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        planned(**fields)


def test_wrong_names_and_stores_are_refused() -> None:
    model, job = model_from_listing(MATRICES), Job(drives=parse_drives(DRIVE))
    rates = assumed_rates(job.drives, on_gpu=False)
    with pytest.raises(PlanError, match=r"no optimizer 'lion' is installed.*'muon'"):
        plan(model, job, rates, optimizer="lion")
    with pytest.raises(PlanError, match=r"no algorithm 'sgd'.*'muon', 'adamw'"):
        plan(model, job, rates, algorithm="sgd")
    for options in ({"commit_every": 0}, {"buffers": 1}, {"step_on": "tpu"}, {"page_bytes": 0}):
        with pytest.raises(PlanError):
            StoreOptions(**options)  # type: ignore[arg-type]
    with pytest.raises(BudgetError, match="pass host_memory="):
        plan(model, replace(job, store=StoreOptions(host_memory=2**20)), rates)


@pytest.mark.parametrize("kept", [1, 2, 3])
def test_a_disk_holds_the_sets_of_page_files_that_are_planned(
    kept: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counted just before the oldest checkpoint goes."""
    model = nn.Linear(512, 512, bias=False)
    found = 0
    retain = CheckpointDirectory.retain

    def counted(*arguments: Any) -> None:
        nonlocal found
        files = {p.stat().st_ino: p.stat().st_blocks for p in tmp_path.rglob("*") if p.is_file()}
        found = max(found, 512 * sum(files.values()))
        retain(*arguments)

    monkeypatch.setattr(CheckpointDirectory, "retain", counted)
    with tierstore.TierStore(tmp_path / "run") as store:
        optimizer = muon.Muon([{"params": list(model.named_parameters())}], store=store)
        for step in range(6):
            model.weight.grad = torch.ones_like(model.weight)
            optimizer.step()
            store.commit()
            if step:
                store.checkpoint(tmp_path / f"step-{step}", keep_last=kept)
        state = store.stats().state_bytes
    sets = 2 + kept + extra_sets(kept)
    assert found / state == pytest.approx(sets, rel=0.05)
