"""The memory of a conversion is bounded, whatever the size of the checkpoint."""

from __future__ import annotations

import json
import shutil
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from tests.support.published import ROOT

# Prints the most anonymous memory that was seen, and what there was before the conversion.
PROGRAM = """
import sys, threading
from pathlib import Path
from tierstore.tools.convert.convert import convert
def anonymous():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon")) * 1024
most = before = anonymous()
def look(phase, done, total):
    global most
    most = max(most, anonymous())
convert(sys.argv[1], sys.argv[2], to=sys.argv[3], memory=int(sys.argv[4]), on_progress=look)
print(before, max(most, anonymous()))
"""


# Makes a run with a state of this many bytes; one tensor is a quarter of the state.
MAKE_RUN = """
import sys
import torch
from torch import nn
import muon, tierstore
elements = int(sys.argv[2]) // 12
rows = {"wide": 2, **{f"layers.{i}": 64 for i in range(6)}}
columns = {name: elements // (4 if name == "wide" else 8) // n for name, n in rows.items()}
parameters = [(name, nn.Parameter(torch.randn(n, columns[name]))) for name, n in rows.items()]
for _, parameter in parameters:
    parameter.grad = parameter.detach()
with tierstore.TierStore(sys.argv[1]) as store:
    muon.Muon([{"params": parameters, "algorithm": "adamw"}], store=store).step()
"""


@pytest.mark.long
@pytest.mark.parametrize(
    ("nbytes", "formats"),
    [
        (2**28, ["dcp"]),
        pytest.param(
            2**33,
            ["dcp"],
            marks=[pytest.mark.long, pytest.mark.timeout(1800)],
        ),
    ],
)
def test_anonymous_memory(nbytes: int, formats: list[str], tmp_path: Path) -> None:
    memory = min(nbytes // 4, 256 * 2**20)
    # Half of it is one tensor with rows of many pieces. The file has holes, and takes no space.
    half = nbytes // 2
    header: dict[str, Any] = {}
    for index, (name, rows) in enumerate({"one": 2, "wide": 64}.items()):
        offsets = [index * half, (index + 1) * half]
        header[name] = {"dtype": "F32", "shape": [rows, half // 4 // rows], "data_offsets": offsets}
    text = json.dumps(header).encode()
    source = tmp_path / "in.safetensors"
    with open(source, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + nbytes)
    require_bounded(source, formats, memory)


@pytest.mark.parametrize(
    ("nbytes", "formats"),
    [
        (2**28, ["dcp", "tierstore"]),
        (2**33, ["tierstore"]),
    ],
)
@pytest.mark.long
@pytest.mark.timeout(1800)
def test_anonymous_memory_with_runs(nbytes: int, formats: list[str], tmp_path: Path) -> None:
    source = tmp_path / "run"
    arguments = [sys.executable, "-c", MAKE_RUN, str(source), str(nbytes)]
    subprocess.run(arguments, check=True, cwd=ROOT)
    require_bounded(source, formats, 256 * 2**20)


def require_bounded(source: Path, formats: list[str], memory: int) -> None:
    """Convert a source to one format after the other; remove each when it was read."""
    for to in formats:
        made = source.parent / ("out.pt" if to == "torch" else to)
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM, str(source), str(made), to, str(memory)],
            capture_output=True,
            text=True,
            cwd=ROOT,
        )
        assert done.returncode == 0, done.stderr
        before, most = map(int, done.stdout.split())
        assert most - before < memory + 2**20
        assert most < memory + 500e6
        if source.is_dir():
            shutil.rmtree(source)
        else:
            source.unlink()
        source = made


@pytest.mark.long
@pytest.mark.parametrize("kind", ["transposed", "gaps", "transposed with gaps", "dcp", "many"])
def test_anonymous_memory_with_other_orders(kind: str, tmp_path: Path) -> None:
    """Each reader thread has at most 8 MiB of the order in the file, beside the pieces."""
    source = tmp_path / "in.pt"
    if kind == "dcp":
        tensor = torch.randn(7168, 8777).t()
        dcp.save({"model": {"w": tensor}}, checkpoint_id=source, no_dist=True)
    elif kind == "many":
        tensor = torch.randn(1500, 1500).t()
        torch.save(
            {"w": tensor, **{f"w{n}": torch.randn(1500, 1500).t() for n in range(15)}}, source
        )
    else:
        tensor = torch.randn(7168, 8777) if kind == "transposed" else torch.randn(6000, 10000)
        tensor = tensor[:, ::2] if "gaps" in kind else tensor
        tensor = tensor.t() if "transposed" in kind else tensor
        torch.save({"w": tensor}, source)
    arguments = [str(source), str(tmp_path / "out.pt"), "torch", str(64 * 2**20)]
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *arguments], capture_output=True, text=True, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    before, most = map(int, done.stdout.split())
    assert most - before < (64 + 4 * 8 + 1) * 2**20
    found = torch.load(tmp_path / "out.pt", mmap=True)["model"]["w"]
    assert torch.equal(found, tensor)
