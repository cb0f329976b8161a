"""Models from files: configs and listings are read; anything else is refused, and soon."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.model_configs import CONFIGS, LISTINGS, config_of
from tierstore.errors import PlanError
from tierstore.tools.plan.model_configs import parameters_of
from tierstore.tools.plan.model_files import FILE_BYTES_MAX, model_from_listing, read_model
from tierstore.tools.plan.models import Model, ModelParameter

PARAMETERS = (
    ModelParameter("up.weight", (8, 4), torch.bfloat16),
    ModelParameter("scale", (), torch.float32),
    ModelParameter("a.weight", (3,), torch.float32),
)
LISTING = {
    "up.weight": {"shape": [8, 4], "dtype": "bfloat16"},
    "scale": [],
    "a.weight": {"shape": [3]},
}


def test_a_config_is_read_from_its_directory_or_file(tmp_path: Path) -> None:
    shutil.copy(CONFIGS["qwen3-0.6b"], tmp_path / "config.json")
    expected = parameters_of(config_of("qwen3-0.6b"))
    assert read_model(tmp_path) == expected
    assert read_model(tmp_path / "config.json") == expected
    assert read_model(str(CONFIGS["qwen3-0.6b"])) == expected


def test_a_link_to_a_config_is_followed(tmp_path: Path) -> None:
    """A cache of downloads has links to files that are named by their checksums."""
    (tmp_path / "config.json").symlink_to(CONFIGS["gpt2-124m"])
    assert read_model(tmp_path).parameter_count == 124_439_808


def test_a_listing_keeps_its_order(tmp_path: Path) -> None:
    path = tmp_path / "model.json"
    path.write_text(json.dumps(LISTING))
    assert read_model(path) == Model(str(path), PARAMETERS)


@pytest.mark.parametrize("listing", [LISTING, json.dumps(LISTING)], ids=["value", "text"])
def test_a_listing_is_a_model(listing: Any) -> None:
    assert model_from_listing(listing).parameters == PARAMETERS


@pytest.mark.parametrize(
    ("listing", "message"),
    [
        ({}, "have 0 elements, expected 1 to 1e.15"),
        ({"a": 5}, "'a' with the shape 5, expected at most 16 sizes"),
        ({"a": [True]}, "'a' with the shape a list"),
        ({"a": [-1]}, "'a' with the shape a list"),
        ({"a": [1] * 17}, "'a' with the shape a list"),
        ({"a": {"dtype": "float32"}}, "'a' with the shape None"),
        ({"a": {"shape": [1], "dtype": "int8"}}, "'a' with the dtype 'int8', .* float16"),
        ({"a": {"shape": [1], "dtype": None}}, "'a' with the dtype None"),
        ({"a": [10**9, 10**9]}, r"have 1e\+18 elements"),
        ({"": [1]}, "has the name ''"),
        ({"a\nb": [1]}, r"has the name 'a\\nb'"),
        ({5: [1]}, "has the name 5"),
        ({str(number): [] for number in range(2**18 + 1)}, "has 262145 parameters"),
        ("[1]", "is a list, expected an object"),
        ("{", "is not JSON"),
        ('{"a": [1], "a": [1]}', "is not JSON with every key once"),
        ('{"a": ' * 100_000, "nested too deep"),
        ('{"\\ud800": [1]}', "has the name"),
        ("\ud800", "is not JSON"),
    ],
)
def test_a_wrong_listing_is_refused(listing: Any, message: str) -> None:
    with pytest.raises(PlanError, match=message) as caught:
        model_from_listing(listing)
    assert len(str(caught.value)) < 400


def test_a_config_without_its_type_is_refused_with_advice(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"hidden_size": 4096}')
    with pytest.raises(PlanError, match=r"config\.json has 'hidden_size' .* with its model_type"):
        read_model(tmp_path)


def test_an_error_names_the_file(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    with pytest.raises(PlanError, match=r"config\.json: 'model_type' of the config is 'bert'"):
        read_model(tmp_path)


def test_a_path_that_is_not_a_file_is_refused_without_waiting(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "folder").mkdir()
    for path in ("absent", "pipe", "loop", "folder", "a" * 300, "nul\0"):
        with pytest.raises(PlanError, match=r"cannot be read .*: name a config\.json"):
            read_model(tmp_path / path)
    with pytest.raises(PlanError, match="cannot be read"):
        read_model("/dev/zero")


def test_a_long_file_is_refused_unread(tmp_path: Path) -> None:
    with open(tmp_path / "config.json", "wb") as file:
        file.truncate(FILE_BYTES_MAX + 1)
    with pytest.raises(PlanError, match=r"has 16\.0 MiB, at most 16\.0 MiB are read"):
        read_model(tmp_path)


TEXTS = [
    *(path.read_bytes() for path in CONFIGS.values()),
    (LISTINGS / "gpt2-124m.json").read_bytes(),
]
TYPES = {config_of(name)["model_type"] for name in CONFIGS}


@settings(max_examples=300)
@given(
    st.sampled_from(TEXTS),
    st.lists(st.tuples(st.integers(0, 4000), st.binary(max_size=8), st.integers(0, 8)), max_size=4),
)
def test_any_bytes_are_a_model_or_one_error(
    tmp_path_factory: pytest.TempPathFactory,
    text: bytes,
    edits: list[tuple[int, bytes, int]],
) -> None:
    for place, inserted, removed in edits:
        place %= len(text)
        text = text[:place] + inserted + text[place + removed :]
    path = tmp_path_factory.getbasetemp() / "edited.json"
    path.write_bytes(text)
    try:
        found = read_model(path).name
    except PlanError as error:
        found = str(error)
    assert found in TYPES or found.startswith(str(path))
