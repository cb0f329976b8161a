"""Make the golden files: ``python -m tests.support.make_golden DIRECTORY``.

They are a run and a checkpoint as this version writes them, with ids that are the same each
time, and beside them what they hold, computed with numpy alone. tests/golden/version-1 was
made by version 0.1. After its release it is never made again: later versions have to read it.
"""

from __future__ import annotations

import json
import re
import sys
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch

import tierstore

STEPS = 3
PAGE_BYTES = 4096
IDS = "0123456789abcdef" * 2

# name -> (shape, dtype, states, elementwise), one dict for each param group. "embedding" is cut
# at rows over several pages, "long" within a row.
_F32 = torch.float32
Spec = tuple[tuple[int, ...], torch.dtype, dict[str, torch.dtype], bool]
GROUPS: list[dict[str, Spec]] = [
    {
        "weight": ((12, 10), torch.bfloat16, {"momentum": torch.bfloat16}, False),
        "norm": ((20,), _F32, {"momentum": _F32}, True),
        "gate": ((3, 4), torch.float16, {}, False),
    },
    {
        "embedding": ((11, 6, 5), torch.bfloat16, {"first": _F32, "second": _F32}, True),
        "long": ((2, 300), _F32, {"first": _F32}, True),
        "scalar": ((), _F32, {"first": _F32}, True),
        "empty": ((0, 4), torch.bfloat16, {"first": torch.bfloat16}, True),
        "precise": ((2, 3), torch.float64, {"second": torch.float64}, True),
    },
    {"still": ((5,), _F32, {"first": _F32}, False)},
]
SPECS = {name: spec for group in GROUPS for name, spec in group.items()}
HYPERPARAMETERS: list[dict[str, Any]] = [
    {"lr": 0.25, "nesterov": True, "coefficients": (3.4445, -4.775, 2.0315)},
    {"lr": 0.5, "betas": (0.9, 0.95), "eps": 1e-8, "limit": float("inf"), "seed": 2**500 + 1},
    {"lr": 0.125, "name": "still", "none": None, "nested": {"warmup": [1, {"a": 2}]}},
]
EXTRA = {
    "random": torch.arange(5, dtype=torch.uint8),
    "half": torch.tensor([[1.5, -2.0]], dtype=torch.bfloat16),
    "array": np.arange(6, dtype=">i4").reshape(2, 3),
    "number": np.float64(0.1),
    "milestones": Counter({7: 2, 30: 1}),
    "ordered": OrderedDict([("b", 1), ("a", [None, b"\0\xff", "\u00e9"])]),
    "where": {("epoch", 2): (3, 0), torch.float32: -0.0, "$tuple": "no tag"},
}


def initial(name: str, dtype: Any = np.float64) -> np.ndarray:
    """Return the initial value of a parameter: numbers that all dtypes represent exactly."""
    shape = SPECS[name][0]
    count = np.arange(np.prod(shape, dtype=int)) * 7 + len(name)
    return ((count % 97 - 48) / 8).reshape(shape).astype(dtype)


def gradient(name: str, step: int) -> np.ndarray | None:
    """The gradient of a step, or None where there is none."""
    if name == "still" and step == STEPS:
        return None
    shape = SPECS[name][0]
    count = np.arange(np.prod(shape, dtype=int)) * 5 + 3 * step + len(name)
    return ((count % 31 - 15) / 4).reshape(shape)


def expected_states() -> dict[str, dict[str, np.ndarray]]:
    """Return the final states: sums of gradients, which no rounding changes."""
    expected = {}
    for group, options in zip(GROUPS, HYPERPARAMETERS, strict=True):
        for name, (shape, _, states, _) in group.items():
            gradients = [gradient(name, step) for step in range(1, STEPS + 1)]
            total = sum((g for g in gradients if g is not None), np.zeros(shape))
            expected[name] = {"master": initial(name) - options["lr"] * total}
            for number, state in enumerate(states, start=1):
                expected[name][state] = number * total
    return expected


class Value:
    """An object whose state is a value."""

    def __init__(self, value: Any = None) -> None:
        self.value = value

    def state_dict(self) -> Any:
        return self.value

    def load_state_dict(self, state: Any) -> None:
        self.value = state


class Golden:
    """The model, and an optimizer whose states are sums of gradients."""

    def __init__(self, directory: Path, **options: Any) -> None:
        self.store = tierstore.TierStore(directory, page_bytes=PAGE_BYTES, **options)
        self.model = torch.nn.Module()
        self.groups = []
        for group, hyperparameters in zip(GROUPS, HYPERPARAMETERS, strict=True):
            members = []
            for name, (_, dtype, states, elementwise) in group.items():
                parameter = torch.nn.Parameter(torch.from_numpy(initial(name)).to(dtype))
                self.model.register_parameter(name, parameter)
                members.append(
                    tierstore.pages.PagedParameter(
                        name=name, tensor=parameter, states=states, elementwise=elementwise
                    )
                )
            self.groups.append(
                tierstore.pages.PagedGroup(
                    parameters=members, hyperparameters=dict(hyperparameters)
                )
            )
        self.model.register_parameter("tied", self.model.get_parameter("weight"))
        self.model.register_buffer("buffer", torch.arange(3))
        self.store.pages.attach(self.groups)
        self.store.pages.scalars.update({name: {"step": 0.0} for name in GROUPS[1]})

    def commit(self, states: Mapping[str, Any]) -> None:
        """Commit the last step with these states of what is registered."""
        self.store.register(**{name: Value(state) for name, state in states.items()})
        self.store.commit()

    def restore(self, names: Iterable[str], checkpoint: Path | None = None) -> dict[str, Any]:
        """Restore the last step, and return the states of these names."""
        registered = {name: Value() for name in names}
        self.store.register(**registered)
        assert self.store.restore(checkpoint) == STEPS
        return {name: given.value for name, given in registered.items()}

    def step(self) -> None:
        step = self.store.step + 1
        for name in SPECS:
            values = gradient(name, step)
            parameter = self.model.get_parameter(name)
            parameter.grad = None if values is None else torch.from_numpy(values).to(parameter)
        with self.store.pages.sweep() as pages:
            for page in pages:
                lr = self.groups[page.group].hyperparameters["lr"]
                for chunk in (chunk for shard in page.shards for chunk in shard.chunks):
                    if chunk.grad is not None:
                        chunk.master.sub_(lr * chunk.grad)
                        for number, state in enumerate(chunk.states.values(), start=1):
                            state.add_(number * chunk.grad)
        for scalars in self.store.pages.scalars.values():
            scalars["step"] = float(step)


def make(directory: Path) -> None:
    """Write ``run``, ``published`` and ``expected.json``."""
    with mock.patch("secrets.token_hex", lambda nbytes: IDS[: 2 * nbytes]):
        golden = Golden(directory / "run")
        for step in range(1, STEPS + 1):
            golden.step()
            golden.commit({"position": step})
        golden.store.register(position=None)
        golden.commit(EXTRA)  # The same step again.
        golden.store.checkpoint(directory / "published", golden.model)
        golden.store.close()
    for path in unneeded_files(directory / "run" / "rank-00000"):
        path.unlink()
    expected = {
        name: {state: values.ravel().tolist() for state, values in states.items()}
        for name, states in expected_states().items()
    }
    (directory / "expected.json").write_text(json.dumps(expected))


def unneeded_files(folder: Path) -> Iterator[Path]:
    """Yield what a restart does without: the lock, the clean mark, and slots in no commit."""
    newest = max(path.name for path in folder.glob("commit-*"))
    pages = json.loads((folder / newest).read_bytes().partition(b"\n")[2])["pages"]
    needed = {f"page-{number:06d}.{slot}" for number, (slot, *_) in enumerate(pages)}
    for path in folder.iterdir():
        if path.name not in needed and not re.match(r"commit-|layout-|run\.json", path.name):
            yield path


if __name__ == "__main__":
    make(Path(sys.argv[1]))
