"""Settings that make a job run: they fit, and the search has the same figures as a plan."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from tierstore.errors import PlanError
from tierstore.tools.plan.drives import parse_drives
from tierstore.tools.plan.families import families, sizes_of
from tierstore.tools.plan.fit import Fit, fit_job, options_of
from tierstore.tools.plan.footprint import StoreOptions
from tierstore.tools.plan.job import Job
from tierstore.tools.plan.model_files import model_from_listing, read_model
from tierstore.tools.plan.plan import Plan, Planner, choose
from tierstore.tools.plan.rates import Rates, assumed_rates
from tierstore.tools.plan.search import Search

GIB, GB = 2**30, 10**9
CARD = {"gpus": 1, "gpu_memory": 24 * GIB, "host_memory": 64 * GIB}
DRIVE = "1x2TB@7/5GB/s,1200TBW"


def machine(drives: str = DRIVE, **fields: Any) -> tuple[Job, dict[bool, Rates]]:
    found = parse_drives(drives)
    job = Job(drives=found, **{"tokens": 65_536, "flops": 8e13, **fields})
    return job, {
        on_gpu: assumed_rates(found, on_gpu=on_gpu, flops=job.flops if on_gpu else None)
        for on_gpu in (True, False)
    }


def fitted(name: str, algorithm: str = "adamw", **fields: Any) -> Fit:
    job, rates = machine(**fields)
    return fit_job(read_model(name), job, rates, algorithm=algorithm)


def titles(found: Fit) -> dict[str, Plan]:
    return {one.title: one.plan for one in found.plans}


@pytest.mark.parametrize("algorithm", ["adamw", pytest.param("muon", marks=pytest.mark.long)])
def test_8b_on_one_card_of_24_gb(algorithm: str) -> None:
    """By hand: 15 GiB of bfloat16 parameters leave no room for as many gradients."""
    found = fitted("llama-3.1-8b", algorithm, **CARD)
    plans = titles(found)
    assert list(plans) == ["quickest", "least memory", "longest life"]
    for one in plans.values():
        assert one.fits
        assert one.job.store.offload_gradients == "backward"
        assert one.job.checkpointing
        # Parameters, the largest gradient and its sum, the context; activations and pages beside.
        gpu = next(need for need in one.needs if need.place == "GPU")
        least = 2 * 8_030_261_248 + 2 * 2 * 128_256 * 4096 + 2**29
        assert least < gpu.nbytes < 0.97 * 24 * GIB
        # Model: 8 operations for each parameter and token, as each layer is computed again.
        model_s = 8 * 8_030_261_248 * 65_536 / 8e13
        assert one.time.seconds > model_s
    quickest, least_memory, longest = plans.values()
    assert least_memory.time.seconds > quickest.time.seconds
    hosts = [next(n.nbytes for n in p.needs if n.place == "host") for p in plans.values()]
    # Gradients of all parameters, and the program.
    assert 15 * GIB + 3 * GIB < hosts[1] < hosts[0] <= 0.95 * 64 * GIB
    assert longest.steps_allowed is not None
    assert quickest.steps_allowed is not None
    assert longest.steps_allowed > 1.3 * quickest.steps_allowed
    if algorithm == "adamw":  # 1,200 TB, and 96 GB a step: 12 bytes of an element.
        assert quickest.steps_allowed == pytest.approx(1.2e15 / (12 * 8_030_261_248), rel=0.01)


def test_options_equal_the_plan() -> None:
    """Typed into ``tierstore plan``, they give the same plan."""
    best = titles(fitted("llama-3.1-8b", **CARD))["quickest"]
    assert options_of(best.job) == [
        *("--micro-tokens 2048", "--store-memory 57GiB"),
        *("--offload-gradients backward", "--checkpointing"),
    ]


@pytest.mark.long
def test_parameters_that_no_card_holds_go_to_the_host() -> None:
    """70B on one card of 80 GB: 141 GB of parameters."""
    found = fitted(
        "llama-3.1-70b",
        drives="4x3.84TB@7/5GB/s,1DWPD",
        gpus=1,
        gpu_memory=80 * GIB,
        host_memory=1024 * GIB,
        flops=4e14,
    )
    for one in titles(found).values():
        assert one.job.parameters_on == "host"
        parts = {need.place: need.parts for need in one.needs}
        assert parts["host"]["parameters"] == parts["host"]["gradients"] == 2 * 70_553_706_496
        # Two layers, the embedding, the head and the last norm.
        layer = 2 * (2 * 8192**2 + 2 * 8192 * 1024 + 3 * 8192 * 28_672 + 2 * 8192)
        outside = 2 * (2 * 128_256 * 8192 + 8192)
        assert parts["GPU"]["gathered parameters"] == 2 * layer + outside
        assert "parameters" not in parts["GPU"]
    # Parameters cross the bus twice up in each micro-batch, beside forward and backward.
    best = titles(found)["quickest"]
    assert best.job.micro_batches <= 8


@pytest.mark.long
def test_the_nearest_machines_if_nothing_fits() -> None:
    found = fitted("llama-3.1-8b", gpus=1, gpu_memory=16 * GIB, host_memory=32 * GIB)
    assert not found.plans
    assert 1 <= len(found.nearest) <= 3
    for one in found.nearest:
        assert "instead of" in one.change or "more host memory" in one.change
    job, rates = machine(gpus=1, gpu_memory=24 * GIB, host_memory=32 * GIB)
    assert "GPUs of 24 GiB instead of 16.0 GiB" in {one.change for one in found.nearest}
    assert fit_job(read_model("llama-3.1-8b"), job, rates, algorithm="adamw").plans


@pytest.mark.long
def test_two_changes_if_one_is_not_enough() -> None:
    found = fitted(
        "llama-3.1-8b", drives="1x100GB@7/5GB/s", gpus=1, gpu_memory=8 * GIB, host_memory=8 * GIB
    )
    assert not found.plans
    assert found.nearest
    assert all(" and " in one.change for one in found.nearest)


@pytest.mark.long
def test_states_lose_bits_only_if_full_ones_do_not_fit() -> None:
    room = {**CARD, "host_memory": 64 * GIB}
    wide = fitted("llama-3.1-8b", **room)
    assert all(one.is_exact for one in wide.plans)
    # A step of AdamW has 12 bytes in five sets of pages; with 8 bits and remainders 6.
    narrow = fitted("llama-3.1-8b", drives="1x350GB@7/5GB/s", **room)
    assert narrow.plans
    assert not any(one.is_exact for one in narrow.plans)
    assert all("moments_dtype" in one.plan.job.optimizer for one in narrow.plans)


@pytest.mark.long
def test_a_run_that_wears_drives_out_is_not_proposed() -> None:
    found = fitted("llama-3.1-8b", steps=15_000, **CARD)
    for one in found.plans:
        assert one.plan.lasts
        assert one.loses_steps > 1


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"gpus": 1, "gpu_memory": GB}, "depends on host_memory, which the job does not say"),
        ({"gpus": 1, "host_memory": GB}, "depends on gpu_memory"),
        ({"host_memory": GB, "tokens": None, "flops": None}, "depends on tokens"),
    ],
)
def test_a_machine_that_is_not_known_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        fitted("llama-3.2-1b", **fields)


JOBS: list[tuple[str, dict[str, Any]]] = [
    ("llama-3.2-1b", CARD),
    ("llama-3.2-1b", {"gpus": 4, "gpu_memory": 24 * GIB, "host_memory": 64 * GIB}),
    ("qwen3-0.6b", {"host_memory": 32 * GIB}),
    ("qwen3-4b", {**CARD, "gpu_memory": 16 * GIB}),
]
CASES = [
    (*job, algorithm) for job in JOBS for algorithm in ("adamw", "muon", "torch.optim.RMSprop")
]


@pytest.mark.parametrize(
    ("name", "fields", "algorithm"),
    [CASES[1], *(pytest.param(*case, marks=pytest.mark.long) for case in (CASES[0], *CASES[2:]))],
)
def test_the_search_has_the_figures_of_plans(
    name: str, fields: dict[str, Any], algorithm: str
) -> None:
    """Every tenth setting that is found, laid out as a store would."""
    job, rates = machine(**fields)
    chosen, model = choose(None, algorithm), read_model(name)
    search = Search(model, chosen.plan, chosen.algorithm, rates)
    settings = list(search.settings(job, is_exact=True))
    assert len({options for one in settings for options in options_of(one.job)}) > 5
    for one in settings[:: max(1, len(settings) // 5)]:
        exact = Planner(model, chosen, rates[one.job.steps_on_gpu], None).plan(one.job)
        memory = sum(
            need.nbytes * (one.job.node_size if need.place == "GPU" else 1)
            for need in exact.needs
            if need.place != "NVMe"
        )
        # Rounds of matrices between ranks are left out.
        rounds = 0 if one.job.world_size == 1 else one.job.node_size * 2 * GIB
        assert memory - rounds <= one.memory + 0.05 * memory
        assert one.memory <= 1.05 * memory
        assert one.step_s == pytest.approx(exact.time.seconds, rel=0.1)
        written = exact.ranks.total("mean_written_bytes") / one.job.world_size
        # Pages of equal size: one more or less rests in memory.
        page = max(layout.nbytes for layout in exact.ranks.classes[0].footprint.layouts)
        assert one.written == pytest.approx(written, abs=page)


PUBLISHED = {
    "llama-2-7b": 6.74,
    "llama-2-13b": 13.0,
    "llama-2-70b": 69.0,
    "llama-3.1-8b": 8.03,
    "llama-3.1-70b": 70.6,
    "llama-3.1-405b": 406,
    "llama-3.2-1b": 1.24,
    "llama-3.2-3b": 3.21,
    "mistral-7b": 7.25,
    "qwen2.5-0.5b": 0.494,
    "qwen2.5-1.5b": 1.54,
    "qwen2.5-3b": 3.09,
    "qwen2.5-7b": 7.62,
    "qwen2.5-14b": 14.8,
    "qwen2.5-32b": 32.8,
    "qwen2.5-72b": 72.7,
    "qwen3-0.6b": 0.596,
    "qwen3-1.7b": 1.72,
    "qwen3-4b": 4.02,
    "qwen3-8b": 8.19,
    "qwen3-14b": 14.8,
    "qwen3-32b": 32.8,
    "deepseek-v3": 671,
}
"""Billions of parameters, as on the pages of the models."""


def test_families_have_the_parameters_that_are_published() -> None:
    names = [f"{family}-{size}" for family in families() for size in sizes_of(family)]
    assert sorted(names) == sorted(PUBLISHED)
    for name, billions in PUBLISHED.items():
        count = read_model(name).parameter_count / 1e9
        digits = 2 - math.floor(math.log10(billions))
        assert round(count, digits) == billions, name
    # Of DeepSeek-V3's parameters, a token passes through 37 billion.
    assert read_model("deepseek-v3").active_count / 1e9 == pytest.approx(37, rel=0.02)
    with pytest.raises(PlanError, match="'gpt-9' is not a known family of models"):
        sizes_of("gpt-9")


def test_a_listing_without_layers_or_experts() -> None:
    model = model_from_listing({"up": [512, 256], "down": [256, 512]})
    job, rates = machine(host_memory=8 * GIB)
    found = fit_job(model, job, rates)
    assert found.plans
    store = found.plans[0].plan.job.store
    assert replace(store, host_memory=0) == replace(StoreOptions(), host_memory=0)


def test_a_model_of_one_page_fits() -> None:
    model = model_from_listing({"w": {"shape": [1000, 1000], "dtype": "bfloat16"}})
    job, rates = machine(**CARD)
    plans = fit_job(model, job, rates).plans
    assert plans
    assert all(tier.value == "host" for _, tier in plans[0].plan.ranks.classes[0].footprint.pages)


@pytest.mark.long
def test_the_least_memory_has_the_smallest_micro_batches() -> None:
    found = fitted("qwen3-8b", **CARD)
    least = titles(found)["least memory"]
    assert least.job.micro_tokens == 2048
    needed = sum(need.nbytes for need in least.needs if need.place != "NVMe")
    for one in titles(found).values():
        assert needed <= sum(need.nbytes for need in one.needs if need.place != "NVMe")


@pytest.mark.long
def test_settings_of_the_job_are_replaced() -> None:
    """A job that was planned with settings gets the answer of one without."""
    wanted = titles(fitted("llama-3.1-8b", **CARD))["quickest"].job
    store = StoreOptions(host_memory=GIB, buffers=3, step_on="cpu", offload_gradients="backward")
    found = fitted("llama-3.1-8b", store=store, micro_tokens=1, checkpointing=True, **CARD)
    assert titles(found)["quickest"].job == wanted


@pytest.mark.long
def test_drives_without_life_are_refused() -> None:
    with pytest.raises(PlanError, match="100% of the rated life of the drives is used"):
        fitted("llama-3.2-1b", wear=1.0, **CARD)
    found = fitted("llama-3.2-1b", steps=10**8, **CARD)
    assert (found.plans, found.is_worn_out) == ([], True)
    (nearest,) = found.nearest
    count = int(nearest.change.split()[0])
    assert nearest.change == f"{count} drives in each node instead of 1"
    enough = fitted("llama-3.2-1b", steps=10**8, drives=DRIVE.replace("1x", f"{count}x"), **CARD)
    assert enough.plans
    assert 0.9 * max(one.plan.steps_allowed or 0 for one in enough.plans) < 10**8


@pytest.mark.long
def test_a_class_that_is_not_timed_steps_on_the_gpu() -> None:
    found = fitted("llama-3.2-1b", "pytorch_optimizer.SOAP", **CARD)
    assert all(one.plan.job.steps_on_gpu for one in found.plans)
