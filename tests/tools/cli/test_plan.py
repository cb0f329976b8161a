"""``tierstore plan``."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.support.commands import call, call_process
from tests.tools.plan.test_rates import PROBE, RATE, probe_with
from tierstore.storage.drives import Drive
from tierstore.tools.probe.result import Bandwidths

CONFIGS = Path(__file__).resolve().parents[1] / "plan/configs"
DRIVES = ("--drives", "4x3.84TB@7/5GB/s,1DWPD")
JOB = (CONFIGS / "llama-3.1-8b.json", "--gpus", "8", *DRIVES)
TIMES = ("--tokens", "4M", "--tflops", "400")


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """A listing of a model that is planned at once."""
    path = tmp_path / "listing.json"
    path.write_text(json.dumps({"up.weight": [64, 32], "down.weight": [32, 64]}))
    return path


def test_the_table_answers_in_order() -> None:
    code, out, err = call("plan", *JOB, *TIMES, "--gpu-memory", "80GiB", "--host-memory", "1TiB")
    assert (code, err) == (0, "")
    wanted = (
        "llama: 8.03B parameters, muon, 1 node, 8 GPUs of 80.0 GiB, 1.0 TiB of host memory, fsdp",
        "It fits.",
        "  one GPU        |###",
        "  host memory    |#",
        "  drives         |#",
        "A step of ",
        "Busy: the model ",
        "A day has ",
        "Paging is free (2% or less) beside forward and backward of ",
        "Each node writes ",
        "The drives last ",
        "what would help ",
        "beside ",
        "What matters most: a step takes ",
        "Activations are estimated from shapes: ",
        "Assumed: matrix products of the optimizer at the 400 TFLOP/s of the model; ",
        "How far plans were from runs: not compared on a GPU yet; ",
    )
    lines = out.splitlines()
    places = [next(i for i, line in enumerate(lines) if line.startswith(text)) for text in wanted]
    assert places == sorted(places)
    assert len(lines) < 40


def test_json_is_one_object() -> None:
    code, out, _ = call("plan", *JOB, *TIMES, "--json")
    assert code == 0
    body = json.loads(out)
    assert (body["fits"], body["lasts"], body["parameters"]) == (True, True, 8030261248)


@pytest.mark.long
def test_options_with_which_it_fits() -> None:
    limits = ("--gpu-memory", "13GiB", "--host-memory", "1TiB")
    code, out, _ = call("plan", *JOB, *TIMES, *limits)
    assert code == 1
    (advice,) = [line for line in out.splitlines() if line.startswith("It fits with ")]
    options = [word for word in advice.partition(":")[0].split()[3:] if word != "and"]
    code, out, _ = call("plan", *JOB, *TIMES, *limits, *options)
    assert (code, out.splitlines()[2]) == (0, "It fits.")


def test_what_does_not_fit_or_last_is_1(small: Path) -> None:
    code, out, _ = call("plan", *JOB, *TIMES, "--gpu-memory", "13GiB")
    assert code == 1
    assert "DOES NOT FIT" in out
    assert "It fits with " not in out  # Without --host-memory, everything would.
    code, out, _ = call("plan", *JOB, *TIMES, "--steps", "10000000")
    assert code == 1
    assert "NOT ALLOWED: the run has 10,000,000 steps" in out
    code, out, err = call("plan", small, *DRIVES, "--store-memory", "4KiB", "--json")
    assert code == 1
    assert "it does not fit: --store-memory is 4096 bytes" in json.loads(out)["error"]
    assert "pass --store-memory " in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "needs drives"),
        ((*DRIVES, "--probe", "absent.json"), "absent.json cannot be read (No such file"),
        (("--probe", "absent.json"), "absent.json cannot be read (No such file"),
        (("--drives", "4 drives"), "drives must look like"),
        ((*DRIVES, "--gpu-memory", "-80GiB"), "--gpu-memory: a size must look like"),
        ((*DRIVES, "--host-memory", "80 bananas"), "--host-memory: a size must look like"),
        ((*DRIVES, "--steps", "9" * 400), "steps must be a number above 0 and below 2^63"),
        ((*DRIVES, "--store-memory", "9" * 19), "--store-memory: a size must be below 2^63 bytes"),
        ((*DRIVES, "--commit-every", "9" * 5000), "--commit-every must be a number"),
        ((*DRIVES, "--gpus", "2", "--cpu-ranks", "2"), "so cpu_ranks must be left out, got 2"),
        ((*DRIVES, "--network", "0"), "the rate 'network' must be above 0"),
        ((*DRIVES, "--nodes", "-1"), "nodes must be a number above 0"),
        ((*DRIVES, "--tokens", "many"), "--tokens must be a number such as 500k"),
        ((*DRIVES, "--tflops", "400"), "needs the tokens of a step"),
        (
            (*DRIVES, "--model-seconds", "nan"),
            "--model-seconds must be a finite number, 0 or more, got nan",
        ),
        ((*DRIVES, "--commit-every", "often"), "--commit-every must be a number"),
        ((*DRIVES, "--commit-every", "0"), "--commit-every must be a number of steps from 1"),
        (
            (*DRIVES, "--step-on", "cpu", "--device-memory", "1GiB"),
            "step_on='cpu' steps pages in host memory: device_memory must be 0",
        ),
        ((*DRIVES, "--page-bytes", "1"), "page_bytes must be at least 4096, got 1"),
        ((*DRIVES, "--step-on", "tpu"), "step_on must be 'cpu', a GPU such as 'cuda:0', or None"),
        ((*DRIVES, "--dtype", "int4"), "a dtype is one of bfloat16"),
        ((*DRIVES, "--algorithm", "sgd"), "has no algorithm 'sgd'"),
        ((*DRIVES, "--partition", "zero3"), "a partition is one of"),
        ((*DRIVES, "--buffers", "1"), "buffers must be at least 2"),
    ],
)
def test_nonsense_is_2(arguments: tuple[str, ...], message: str, small: Path) -> None:
    code, out, err = call("plan", small, *arguments)
    assert (code, out) == (2, "")
    assert message in err
    assert err.count("\n") == 1
    assert "Traceback" not in err


def test_a_config_without_hidden_size_is_2(tmp_path: Path) -> None:
    config = json.loads((CONFIGS / "llama-3.1-8b.json").read_text())
    del config["hidden_size"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    code, _, err = call("plan", tmp_path, *DRIVES)
    assert code == 2
    assert "'hidden_size' is missing in the config" in err


def test_a_probe_gives_rates_memory_and_directories(small: Path, tmp_path: Path) -> None:
    probe = probe_with(bandwidths=Bandwidths(RATE, RATE, RATE), path="/data/nvme")
    path = tmp_path / "machine.json"
    path.write_text(probe.to_json())
    calls = tmp_path / "calls.py"
    code, out, _ = call("plan", small, "--probe", path, "--emit-config", calls)
    assert code == 1  # The machine of this probe has 8 bytes.
    assert "How long the drives last is unknown: name them with --drives." in out
    assert '"/data/nvme"' in calls.read_text()
    code, _, err = call("plan", small, "--probe", path, "--host-memory", "1GiB")
    assert code == 2
    assert "the probe is of another machine: h has 8 B of memory" in err
    code, _, err = call("plan", small, "--probe", path, "--gpus", "1")
    assert code == 2
    assert "a machine without a GPU" in err
    path.write_text(PROBE.to_json().replace('"host"', '"hosts"'))
    code, _, err = call("plan", small, "--probe", path)
    assert code == 2
    assert "'machine.host' is missing" in err or "is not known" in err


def test_a_class_of_torch_on_pages(small: Path, tmp_path: Path) -> None:
    calls = tmp_path / "calls.py"
    chosen = ("--algorithm", "torch.optim.SGD", "--set", "momentum=0.9")
    code, out, _ = call("plan", small, *DRIVES, *chosen, "--emit-config", calls)
    assert (code, "torch.optim.SGD" in out) == (0, True)
    lines = calls.read_text().splitlines()
    assert lines[:3] == ["import tierstore", "import torch", ""]
    paged = "tierstore.Paged(model.named_parameters(), torch.optim.SGD, store=store, momentum=0.9)"
    assert lines[-1] == f"optimizer = {paged}"


def test_a_class_of_a_package(small: Path, tmp_path: Path) -> None:
    calls, page = tmp_path / "calls.py", tmp_path / "plan.html"
    chosen = ("--algorithm", "pytorch_optimizer.SOAP", "--set", "precondition_frequency=10")
    outputs = ("--emit-config", calls, "--html", page)
    code, out, _ = call("plan", small, *DRIVES, *chosen, *outputs)
    assert code == 0
    assert calls.read_text().splitlines()[:3] == [
        "import pytorch_optimizer",
        "import tierstore",
        "",
    ]
    step, wear, life = [
        line for line in out.splitlines() if line.startswith(("A step", "Each node", "The drives"))
    ]
    assert step.startswith("A step takes at least ")
    assert "without the computation of the optimizer, which is not known" in step
    assert wear.startswith("Each node writes at most ")
    assert life.endswith(" steps.")  # Without days.
    assert "Paging is free" not in out
    text = page.read_text()
    assert ">A step takes at least " in text
    assert "Paging is free" not in text
    code, _, err = call("plan", small, *DRIVES, "--algorithm", "absent_package.Lion")
    assert (code, "absent_package.Lion cannot be imported" in err) == (2, True)


def test_emitted_calls_make_what_was_planned(small: Path, tmp_path: Path) -> None:
    calls = tmp_path / "calls.py"
    options = ("--store-memory", "1MiB", "--buffers", "3", "--page-bytes", "8KiB")
    code, out, _ = call(
        *("plan", small, *DRIVES, *options, "--commit-every", "none", "--json"),
        *("--emit-config", calls, "--set", "momentum_dtype=int8", "--set", "master=remainder"),
        *("--set", "moments_dtype=bfloat16"),
    )
    assert code == 0
    text = calls.read_text()
    assert '["/nvme0/run", "/nvme1/run", "/nvme2/run", "/nvme3/run"]' in text
    directories = json.dumps([str(tmp_path / "run")])
    text = text.replace('["/nvme0/run", "/nvme1/run", "/nvme2/run", "/nvme3/run"]', directories)
    model = nn.ModuleDict(
        {"up": nn.Linear(32, 64, bias=False), "down": nn.Linear(64, 32, bias=False)}
    )
    names = {"model": model}
    exec(text, names)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    with names["store"] as store:
        names["optimizer"].step()
        stats = store.stats()
    rank = json.loads(out)["rank"]
    assert stats.state_bytes == rank["state_bytes"]
    assert stats.host_bytes_peak == rank["host_bytes"]
    assert stats.pages_in == {tier: count for tier, count in rank["pages"].items() if count}


@pytest.mark.parametrize(
    ("setting", "problem"),
    [
        ("momentum_dtype", "--set takes an argument of the optimizer and its value"),
        ("momentum_dtype=int4", "momentum_dtype must be one of None, torch.int8, torch.bfloat16,"),
        ("ns_batched=1", "ns_batched must be True or False, got '1'"),
        ("master=none ", "master must be one of None, 'remainder', '24bit', got 'none '"),
        ("lr=0.1", "option 'lr' does not affect a plan, expected master, ns_dtype,"),
        ("gather_memory=1x", "1x"),
    ],
)
def test_settings_of_the_optimizer_are_checked(small: Path, setting: str, problem: str) -> None:
    code, _, err = call("plan", small, *DRIVES, "--set", setting)
    assert code == 2
    assert problem in err


def test_a_setting_is_given_once_and_belongs_to_every_algorithm(small: Path) -> None:
    settings = ("--set", "moments_dtype=int8", "--set", "ns_dtype=auto")
    code, out, _ = call("plan", small, *DRIVES, "--algorithm", "adamw", *settings, "--json")
    assert code == 0
    found = json.loads(out)
    (adamw,) = (one for one in found["beside"] if one["algorithm"] == "adamw")
    assert adamw["step_seconds"] == found["step"]["seconds"]
    code, _, err = call("plan", small, *DRIVES, *settings, "--set", "ns_dtype=float32")
    assert code == 2
    assert "--set ns_dtype= is given twice" in err


def test_outputs_are_new_files(small: Path, tmp_path: Path) -> None:
    listing = small.read_bytes()
    new = tmp_path / "new"
    for paths in (
        ("--emit-config", small),
        ("--html", new, "--emit-config", new),
        ("--html", tmp_path / "absent" / "page.html"),
    ):
        code, out, err = call("plan", small, *DRIVES, *paths)
        assert (code, out) == (2, "")
        assert "name a new file" in err or "make it first" in err
    assert small.read_bytes() == listing
    assert os.listdir(tmp_path) == [small.name]


def test_directories_on_one_filesystem_share_its_space(small: Path, tmp_path: Path) -> None:
    probe = probe_with(bandwidths=Bandwidths(RATE, RATE, RATE), free_bytes=10**9)
    (first,) = probe.directories
    path = tmp_path / "probe.json"
    for filesystem, limit in ((first.filesystem, 10**9), (first.filesystem + 1, 2 * 10**9)):
        second = replace(first, path="/other", filesystem=filesystem)
        path.write_text(replace(probe, directories=(first, second)).to_json())
        _, out, _ = call("plan", small, "--probe", path, "--json")
        limits = {need["place"]: need["limit"] for need in json.loads(out)["needs"]}
        assert limits["NVMe"] == limit


def test_a_probe_and_drives_give_rates_and_endurance(small: Path, tmp_path: Path) -> None:
    drive = Drive("nvme0", "x", 40, 1, None)
    probe = probe_with(bandwidths=Bandwidths(RATE, RATE, RATE), drives=(drive,))
    path = tmp_path / "machine.json"
    path.write_text(probe.to_json().replace('"memory_bytes": 8', '"memory_bytes": 80000000000'))
    steps = []
    for used in ((), ("--used", "40"), ("--used", "0")):
        code, out, _ = call("plan", small, "--probe", path, *DRIVES, *used, "--json")
        assert code == 0
        steps.append(json.loads(out)["wear"]["steps"])
    assert steps[0] == steps[1] == pytest.approx(0.6 * steps[2])


def test_html_is_a_page(small: Path, tmp_path: Path) -> None:
    page = tmp_path / "plan.html"
    done = call_process("plan", small, *DRIVES, "--html", page)
    assert done.returncode == 0
    assert page.read_text().startswith("<!DOCTYPE html>")
