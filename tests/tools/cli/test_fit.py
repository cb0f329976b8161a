"""``tierstore fit``: its screen, its exit codes, and programs that run as they are printed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tierstore
from tests.support.commands import call

CARD = ("--gpus", "1", "--gpu-memory", "24GiB", "--host-memory", "64GiB", "--tflops", "80")
DRIVE = ("--drives", "1x2TB@7/5GB/s,1200TBW")
SMALL = ("llama-3.2-1b", "--tokens", "64k", *CARD, *DRIVE)


def test_the_screen_answers_in_order() -> None:
    code, out, err = call("fit", *SMALL)
    assert (code, err) == (0, "")
    lines = out.splitlines()
    wanted = (
        "llama-3.2-1b: 1.24B parameters, muon, 1 node, 1 GPU of 24.0 GiB, ",
        "It fits.",
        "  one GPU        |",
        "  host memory    |",
        "  drives         |",
        "A step of 64k tokens takes ",
        "A day has ",
        "The drives last ",
        "plan ",
        "quickest ",
        "# quickest",
        "store = tierstore.TierStore(",
        "optimizer = muon.Muon(",
        "What matters most: ",
        "How far plans were from runs: ",
    )
    places = [next(i for i, line in enumerate(lines) if line.startswith(text)) for text in wanted]
    assert places == sorted(places)
    assert len(lines) <= 66


@pytest.mark.long
def test_options_give_the_plan_that_was_found() -> None:
    code, out, _ = call("fit", *SMALL, "--json")
    assert code == 0
    body = json.loads(out)
    assert body["fits"]
    for one in body["plans"]:
        options = [word for option in one["options"] for word in option.split()]
        code, out, _ = call("plan", *SMALL, *options, "--json")
        assert code == 0
        found, wanted = json.loads(out), one["plan"]
        assert found["step"]["seconds"] == pytest.approx(wanted["step"]["seconds"], rel=0.02)
        for need, asked in zip(found["needs"], wanted["needs"], strict=True):
            assert need["bytes"] == pytest.approx(asked["bytes"], rel=0.02)
        compile(one["program"], "program", "exec")


def test_what_does_not_fit_is_1() -> None:
    small = ("--gpus", "1", "--gpu-memory", "6GiB", "--host-memory", "8GiB", "--tflops", "80")
    code, out, _ = call("fit", "llama-3.2-3b", "--tokens", "64k", *small, *DRIVE)
    assert code == 1
    assert "No settings make it fit on these machines." in out
    (nearest,) = [line for line in out.splitlines() if line.startswith("It fits with ")]
    assert " a step" in nearest


@pytest.mark.long
def test_the_largest_size_of_a_family() -> None:
    code, out, _ = call("fit", "qwen3", "--largest", "--tokens", "64k", *CARD, *DRIVE)
    assert code == 0
    largest = out.split(":")[0]
    sizes = ["0.6b", "1.7b", "4b", "8b", "14b", "32b"]
    above = sizes[sizes.index(largest.removeprefix("qwen3-")) + 1]
    code, out, _ = call("fit", f"qwen3-{above}", "--tokens", "64k", *CARD, *DRIVE)
    assert code == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("llama-3.2-1b", "--tokens", "64k", *CARD), "needs drives"),
        (("llama-3.2-1b", "--tokens", "64k", *DRIVE), "depends on host_memory"),
        (("absent", "--tokens", "64k", *CARD, *DRIVE), "or a model such as llama-3.1-8b"),
        (("gpt-9", "--largest", "--tokens", "64k", *CARD, *DRIVE), "'gpt-9' is not a known family"),
        (("llama-3.2-1b", "--tokens", "many", *CARD, *DRIVE), "--tokens must be a number"),
    ],
)
def test_bad_arguments_are_2(arguments: tuple[str, ...], message: str) -> None:
    code, _, err = call("fit", *arguments)
    assert (code, message in err) == (2, True), err


class Layers(nn.Module):
    """Two layers of one matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64, bias=False) for _ in range(2))
        self.calls = 0

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            values = layer(values).relu()
        return values

    def gradient_checkpointing_enable(self) -> None:
        """Do nothing, as of a model without dropout."""


def test_the_program_runs_as_it_is_printed(tmp_path: Path) -> None:
    model = Layers()
    found = tierstore.fit(
        model,
        tokens=4096,
        host_memory="1GiB",
        drives="1x1TB@1/1GB/s",
        algorithm="torch.optim.AdamW",
    )
    best = found.plans[0]
    assert best.program.startswith("import tierstore\nimport torch\n\nstore = ")
    program = best.program.replace("/nvme/run", str(tmp_path / "run"))
    before = model.layers[0].weight.detach().clone()
    names: dict[str, Any] = {
        "model": model,
        "batches": torch.randn(3, 4096, 64),
        "loss_of": lambda model, part: model(part).square().mean(),
    }
    exec(program, names)
    with names["store"] as store:
        assert store.step == 3
        assert store.stats().host_bytes_peak <= best.plan.job.store.host_memory
    assert not torch.equal(before, model.layers[0].weight)


def test_a_module_on_the_meta_device() -> None:
    with torch.device("meta"):
        model = Layers()
    common: dict[str, Any] = {"tokens": 4096, "drives": "1x1TB@1/1GB/s"}
    assert tierstore.fit(model, host_memory="1GiB", **common).plans
    nothing = tierstore.fit(model, host_memory="300MiB", **common)
    assert not nothing.plans
    assert nothing.nearest[0].change == "4.0 GiB more host memory"
