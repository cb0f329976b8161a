"""Make golden files of encoded states: ``python -m tests.support.make_golden_encoded DIRECTORY``.

A run and a checkpoint as this version writes them, and beside them the values, computed with numpy
alone. tests/golden/encoded-1 was made by version 0.1. After its release it is never made
again.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch

import tierstore
from tests.support.make_golden import IDS, PAGE_BYTES, unneeded_files

STEPS = 2
SHAPES = {"remainder": (7, 30), "24bit": (2, 300), "moments": (3, 300)}
ENCODINGS = {
    "remainder": {"master": "remainder"},
    "24bit": {"master": "24bit", "momentum": "int8_root"},
    "moments": {"first": "int8_root", "second": "uint8_root"},
}
STATES = {"remainder": ("momentum",), "24bit": ("momentum",), "moments": ("first", "second")}


def numbers(name: str, step: int, modulus: int) -> np.ndarray:
    """Return whole numbers from 0 to modulus - 1; every 256 columns of a row have the largest."""
    shape = SHAPES[name]
    found = (np.arange(np.prod(shape)) * 37 + 11 * step + len(name)).reshape(shape) % modulus
    found[:, ::256] = modulus - 1
    return found


def expected_states(step: int) -> dict[str, dict[str, np.ndarray]]:
    """Return the values after a step, as numbers that the encodings have exactly."""
    found = {}
    for name, encodings in ENCODINGS.items():
        # float32 with 24 significant bits; "24bit" keeps 16 bits.
        lower = 8 if encodings.get("master") == "24bit" else 0
        bits = 0x3F000000 + (numbers(name, step, 2**16) * 129 + 1 << lower) % 2**23
        values: dict[str, np.ndarray] = {"master": bits.astype(np.int32).view(np.float32)}
        if "master" not in encodings:
            values["master"] = (numbers(name, step, 97) / 8).astype(np.float32)
        for state in STATES[name]:
            if encodings.get(state) == "uint8_root":
                whole = numbers(name, step, 256).astype(np.float32)
            else:
                whole = (numbers(name, step, 255) - 127).astype(np.float32)
            values[state] = np.copysign((whole**2) ** 2, whole) * np.float32(2.0**-40)
        found[name] = values
    return found


class GoldenEncoded:
    """Parameters with encoded states, and steps that write the expected values."""

    def __init__(self, directory: Path, **options: Any) -> None:
        self.store = tierstore.TierStore(directory, page_bytes=PAGE_BYTES, **options)
        self.model = torch.nn.Module()
        for name, shape in SHAPES.items():
            dtype = torch.bfloat16 if "master" in ENCODINGS[name] else torch.float32
            self.model.register_parameter(name, torch.nn.Parameter(torch.zeros(shape, dtype=dtype)))
        parameters = [
            tierstore.pages.PagedParameter(
                name=name,
                tensor=self.model.get_parameter(name),
                states=dict.fromkeys(STATES[name], torch.float32),
                elementwise=True,
                encodings=ENCODINGS[name],
            )
            for name in SHAPES
        ]
        self.store.pages.attach(
            [tierstore.pages.PagedGroup(parameters=parameters, hyperparameters={"lr": 1})]
        )

    def step(self) -> None:
        expected = expected_states(self.store.step + 1)
        for parameter in self.model.parameters():
            parameter.grad = torch.ones_like(parameter)
        with self.store.pages.sweep() as pages:
            for shard in (shard for page in pages for shard in page.shards):
                for chunk in shard.chunks:
                    states = {"master": chunk.master_parts, **chunk.states}
                    for state, values in expected[shard.spec.name].items():
                        part = chunk.chunk.select(torch.from_numpy(values))
                        if isinstance(states[state], tierstore.pages.EncodedState):
                            states[state].write(part.clone())
                        else:
                            states[state].copy_(part)


def make(directory: Path) -> None:
    """Write ``run``, ``published`` and ``expected.json``."""
    with mock.patch("secrets.token_hex", lambda nbytes: IDS[: 2 * nbytes]):
        golden = GoldenEncoded(directory / "run")
        for _ in range(STEPS):
            golden.step()
            golden.store.commit()
        golden.store.checkpoint(directory / "published", golden.model)
        golden.store.close()
    for path in unneeded_files(directory / "run" / "rank-00000"):
        path.unlink()
    expected = {
        name: {state: values.ravel().tolist() for state, values in states.items()}
        for name, states in expected_states(STEPS).items()
    }
    (directory / "expected.json").write_text(json.dumps(expected))


if __name__ == "__main__":
    make(Path(sys.argv[1]))
