"""Checkpoints that Trainer 5.23 and accelerate 1.15 wrote, from tests/tools/convert/fixtures."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import tierstore
from tests.support.continuation import differences
from tests.support.conversions import no_trace
from tests.support.deepspeed_truth import assert_is_truth, truth_of
from tests.support.huggingface_files import converted, sources_of
from tests.support.published import tensors_in
from tierstore.tools.convert.convert import convert
from tierstore.tools.convert.torch_names import match_distinct

FIXTURES = Path(__file__).parent / "fixtures" / "huggingface"
NAMES = sorted(path.name for path in FIXTURES.iterdir())
WITHOUT_ORDER = [name for name in NAMES if len(sources_of(FIXTURES / name)) > 1]


@pytest.fixture
def copied(tmp_path: Path) -> Callable[[str], Path]:
    """Copy a fixture, which a test then changes."""

    def copy(name: str) -> Path:
        return Path(shutil.copytree(FIXTURES / name, tmp_path / "copy" / name))

    return copy


def refused(sources: Any, tmp_path: Path, kind: type[Exception], match: str) -> None:
    with no_trace(tmp_path), pytest.raises(kind, match=match):
        convert(sources, tmp_path / "out", to="dcp", assume_model_order=True)


@pytest.mark.parametrize("name", NAMES)
def test_every_tensor_is_carried(name: str, tmp_path: Path) -> None:
    conversion, tensors = converted(FIXTURES / name, tmp_path / "out", "dcp")
    assert_is_truth(tensors, FIXTURES / name)
    assert {key for key in tensors if key.startswith("model.")} >= {
        key for key in truth_of(FIXTURES / name) if key.startswith("model.")
    }
    assert {float(tensors[key]) for key in tensors if key.endswith(".step")} == {3.0}
    assert conversion.step == (3 if name.startswith("trainer") else None)


@pytest.mark.parametrize(
    ("name", "to"),
    [
        *(("trainer-llama", to) for to in ("torch", "tierstore", "universal")),
        *(("accelerate-two", "torch"), ("fsdp-full", "torch"), ("fsdp-sharded", "tierstore")),
    ],
)
def test_every_tensor_is_in_other_formats(name: str, to: str, tmp_path: Path) -> None:
    _, tensors = converted(FIXTURES / name, tmp_path / "out", to)
    assert_is_truth(tensors, FIXTURES / name)


@pytest.mark.parametrize("name", ["trainer-llama", "accelerate-two-bin", "fsdp-sharded"])
def test_weights_are_in_safetensors(name: str, tmp_path: Path) -> None:
    convert(FIXTURES / name / "checkpoint", tmp_path / "out", to="safetensors", only="model")
    found = load_file(tmp_path / "out" / "model.safetensors")
    expected = {
        key.removeprefix("model."): value
        for key, value in truth_of(FIXTURES / name).items()
        if key.startswith("model.")
    }
    assert all(torch.equal(found[key], value) for key, value in expected.items())


@pytest.mark.quick(3)
@pytest.mark.parametrize("name", NAMES)
def test_the_next_update_equals_the_source(name: str, tmp_path: Path) -> None:
    converted(FIXTURES / name, tmp_path / "out", "dcp")
    found = differences(tmp_path / "out", FIXTURES / name)
    assert max({**found["adamw"], **found["muon"]}.values()) < 1e-5
    without = differences(tmp_path / "out", FIXTURES / name, momentum=False)
    assert min({**without["adamw"], **without["muon"]}.values()) > 0.05


def test_what_is_not_carried_is_named(tmp_path: Path) -> None:
    for name, files in (
        ("trainer-llama", ("scheduler.pt", "trainer_state.json")),
        ("accelerate-two", ("scheduler.bin", "custom_checkpoint_0.pkl", "custom_checkpoint_1.pkl")),
    ):
        lost = convert(
            sources_of(FIXTURES / name),
            tmp_path / "o",
            to="dcp",
            dry_run=True,
            assume_model_order=True,
        ).lost
        assert len(lost) == len(files)
        assert all(any(file in sentence for sentence in lost) for file in files)


# ---------------------------------------------------------------------- names of parameters


@pytest.mark.parametrize("name", WITHOUT_ORDER)
def test_an_order_that_no_file_tells_is_not_guessed(name: str, tmp_path: Path) -> None:
    refused(
        FIXTURES / name / "checkpoint",
        tmp_path,
        tierstore.CheckpointError,
        r"no source tells the order of the parameters in the model.*torch\.save",
    )


def test_wrong_orders_are_refused(copied: Callable[[str], Path], tmp_path: Path) -> None:
    folder = copied("trainer-llama")
    names = torch.load(folder / "names.pt", weights_only=True)
    items = list(names.items())
    for wrong, match in (
        (dict(items[1:]), "fit no tensors"),
        ({"other": items[0][1], **dict(items)}, "has no such tensor"),
        ({**dict(items), items[0][0]: torch.empty(3, device="meta")}, r"of shape \[3\]"),
        (dict(items[2:] + items[:2]), "fit no tensors"),
    ):
        torch.save(wrong, folder / "names.pt")
        refused(sources_of(folder), tmp_path, tierstore.CheckpointError, match)


def test_an_order_is_the_only_use_of_a_file_of_names(tmp_path: Path) -> None:
    folder = FIXTURES / "trainer-llama"
    conversion = convert(
        [folder / "checkpoint" / "optimizer.pt", *sources_of(folder)[1:]],
        tmp_path / "out",
        to="dcp",
        assume_model_order=True,
    )
    assert {entry.state for entry in conversion.entries} == {"exp_avg", "exp_avg_sq"}


def test_weights_and_optimizer_as_files_and_a_full_file_as_order(tmp_path: Path) -> None:
    """Without names.pt, a file of torch.save tells the order."""
    folder = FIXTURES / "trainer-llama"
    order = torch.load(folder / "names.pt", weights_only=True)
    weights = load_file(folder / "checkpoint" / "model.safetensors")
    torch.save({name: weights[name] for name in order}, tmp_path / "model.pt")
    optimizer = folder / "checkpoint" / "optimizer.pt"
    convert([tmp_path / "model.pt", optimizer], tmp_path / "out", to="dcp", assume_model_order=True)
    assert_is_truth(tensors_in(tmp_path / "out"), folder)
    shutil.rmtree(tmp_path / "out")
    sources = [folder / "checkpoint" / "model.safetensors", optimizer, folder / "names.pt"]
    convert(sources, tmp_path / "out", to="dcp", assume_model_order=True)
    assert_is_truth(tensors_in(tmp_path / "out"), folder)


def test_shapes_that_occur_once_need_no_order(tmp_path: Path) -> None:
    weights = {"b": torch.randn(3, 2), "a": torch.randn(2)}
    parameters = [torch.nn.Parameter(weights[name].clone()) for name in ("b", "a")]
    optimizer = torch.optim.AdamW(parameters)
    sum(p.square().sum() for p in parameters).backward()  # type: ignore[union-attr]
    optimizer.step()
    source = tmp_path / "source"
    source.mkdir()
    save_file(weights, source / "model.safetensors")
    torch.save(optimizer.state_dict(), source / "optimizer.bin")
    convert(source, tmp_path / "out", to="dcp")
    found = tensors_in(tmp_path / "out")
    for name, parameter in zip(("b", "a"), parameters, strict=True):
        state = optimizer.state[parameter]["exp_avg"]
        assert torch.equal(found[f"optimizer.state.{name}.exp_avg"], state)


@pytest.mark.parametrize(
    ("groups", "tensors"),
    [
        ([[(2,), (2,)]], [("a", (2,)), ("b", (2,))]),
        ([[(2,)]], [("a", (2,)), ("b", (2,))]),
        ([[(2,)], [(2,)]], [("a", (2,))]),
        ([[(3,)]], [("a", (2,))]),
        ([[None]], [("a", (2,))]),
    ],
)
def test_shapes_that_leave_a_choice_are_refused(groups: Any, tensors: Any) -> None:
    with pytest.raises(tierstore.CheckpointError, match="have no names"):
        match_distinct(groups, tensors)


# ------------------------------------------------------------------------------- directories


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("rank0-of-8-optimizer.pt", "of FSDP on XLA"),
        ("optimizer.pt_0", "SageMaker"),
        ("adapter_model.safetensors", "PEFT"),
    ],
)
def test_other_files_are_refused_by_name(
    name: str, words: str, copied: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = copied("trainer-llama")
    shutil.copy(folder / "checkpoint" / "optimizer.pt", folder / "checkpoint" / name)
    refused(sources_of(folder), tmp_path, tierstore.CheckpointError, words)


def test_files_of_all_ranks_are_needed(copied: Callable[[str], Path], tmp_path: Path) -> None:
    checkpoint = copied("fsdp-ranks") / "checkpoint"
    (checkpoint / "optimizer_0_rank1.bin").unlink()
    refused(checkpoint, tmp_path, tierstore.CorruptionError, r"exp_avg'.* are in no chunk")


def test_models_with_equal_names_are_refused(copied: Callable[[str], Path], tmp_path: Path) -> None:
    folder = copied("accelerate-two")
    shutil.copy(folder / "checkpoint/model.safetensors", folder / "checkpoint/model_1.safetensors")
    refused(sources_of(folder), tmp_path, tierstore.CheckpointError, "several models with tensors")
    files = [folder / "checkpoint" / name for name in ("model.safetensors", "optimizer.bin")]
    names = torch.load(folder / "names.pt", weights_only=True)
    first = {name: shape for name, shape in names.items() if not name.startswith("other_")}
    torch.save(first, folder / "first.pt")
    sources = [*files, folder / "first.pt"]
    convert(sources, tmp_path / "out", to="dcp", assume_model_order=True)
    found = tensors_in(tmp_path / "out")
    truth = truth_of(folder)
    assert all(torch.equal(found[key], truth[key]) for key in truth if "other_" not in key)


def test_weights_of_fsdp_go_before_those_beside_them(
    copied: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = copied("fsdp-full")
    save_file({"up.weight": torch.zeros(7, 6)}, folder / "checkpoint" / "model.safetensors")
    conversion = convert(folder / "checkpoint", tmp_path / "out", to="dcp")
    assert_is_truth(tensors_in(tmp_path / "out"), folder)
    assert conversion.notes == [
        "weights are read from 'pytorch_model_fsdp.bin', and not from 'model.safetensors' beside it"
    ]


def test_several_files_of_torch_save_with_an_index(
    copied: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = copied("accelerate-two-bin")
    checkpoint = folder / "checkpoint"
    weights = torch.load(checkpoint / "pytorch_model.bin", weights_only=True)
    (checkpoint / "pytorch_model_1.bin").unlink()
    (checkpoint / "optimizer_1.bin").unlink()
    (checkpoint / "pytorch_model.bin").unlink()
    index = {}
    for number, members in enumerate((list(weights)[:3], list(weights)[3:])):
        name = f"pytorch_model-{number + 1:05d}-of-00002.bin"
        torch.save({key: weights[key] for key in members}, checkpoint / name)
        index |= dict.fromkeys(members, name)
    path = checkpoint / "pytorch_model.bin.index.json"
    path.write_text(json.dumps({"weight_map": dict(sorted(index.items()))}))
    convert(checkpoint, tmp_path / "out", to="dcp", assume_model_order=True)
    truth = truth_of(folder)
    found = tensors_in(tmp_path / "out")
    assert all(torch.equal(found[key], truth[key]) for key in truth if "other_" not in key)
    path.write_text(json.dumps({"weight_map": {**index, "more": name}}))
    shutil.rmtree(tmp_path / "out")
    refused(checkpoint, tmp_path, tierstore.CorruptionError, "names other tensors")


@pytest.mark.parametrize(
    ("name", "file", "content"),
    [
        ("trainer-llama", "trainer_state.json", b'{"global_step": -3}'),
        ("trainer-llama", "trainer_state.json", b"{"),
        ("trainer-llama", "optimizer.pt", b"PK"),
        ("trainer-gpt2-sharded", "model.safetensors.index.json", b'{"weight_map": {"a": 3}}'),
    ],
)
def test_damage_is_refused(
    name: str, file: str, content: bytes, copied: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = copied(name)
    (folder / "checkpoint" / file).write_bytes(content)
    refused(sources_of(folder), tmp_path, tierstore.CorruptionError, file)


@pytest.mark.parametrize("file", ["pytorch_model.bin", "optimizer_1.bin"])
def test_links_are_not_followed(file: str, copied: Callable[[str], Path], tmp_path: Path) -> None:
    checkpoint = copied("accelerate-two-bin") / "checkpoint"
    (checkpoint / file).rename(tmp_path / "elsewhere")
    (checkpoint / file).symlink_to(tmp_path / "elsewhere")
    refused(checkpoint, tmp_path, tierstore.CorruptionError, file)


def test_folders_that_are_links_are_not_followed(
    copied: Callable[[str], Path], tmp_path: Path
) -> None:
    checkpoint = copied("fsdp-sharded") / "checkpoint"
    (checkpoint / "optimizer_0").rename(tmp_path / "elsewhere")
    (checkpoint / "optimizer_0").symlink_to(tmp_path / "elsewhere")
    refused(checkpoint, tmp_path, tierstore.CorruptionError, "is a link")
