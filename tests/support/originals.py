"""A run and checkpoints to damage, and what verify() says of them then."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
import xxhash
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata

from tests.support.toy import MODEL, RANK, Spec, Toy, unchanged
from tierstore.tools.inspect.verify import Report, verify

TWIN: Spec = ("twin", (5, 7), torch.bfloat16, {"momentum": torch.bfloat16}, False)
STEPS = 3


def save_plain(path: Path) -> None:
    state = {
        "weight": torch.arange(12.0).view(4, 3),
        "half": torch.arange(7).to(torch.float16),
        "count": torch.tensor(3),
        "object": {"lr": (0.5, [1, 2, 3])},
    }
    dcp.save(state, checkpoint_id=path, no_dist=True)


def check(path: Path) -> Report:
    with unchanged(path):
        report = verify(path)
    assert report.good == (not report.faults)
    return report


def flip(path: Path, position: int, mask: int = 4) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= mask
    path.write_bytes(data)


def places(report: Report) -> set[str]:
    return {fault.place for fault in report.faults}


def text(report: Report) -> str:
    return "\n".join(f"{fault.place}: {fault.what}" for fault in report.faults)


def reseal(path: Path, kind: str, change: Callable[[dict[str, Any]], None]) -> None:
    """Change a sealed file and give it the right checksum again."""
    body = json.loads(path.read_bytes().partition(b"\n")[2])
    change(body)
    data = json.dumps(body).encode()
    path.write_bytes(f"tierstore {kind} 1 {xxhash.xxh3_128_hexdigest(data)}\n".encode() + data)


def reseal_layout(manifest: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    """Change the layout that a manifest of a run or a checkpoint names; return its file."""
    digest = json.loads(manifest.read_bytes().partition(b"\n")[2])["layout"]
    is_published = manifest.suffix == ".commit"
    path = manifest.with_suffix(".layout") if is_published else manifest.parent / f"layout-{digest}"
    body = json.loads(path.read_bytes().partition(b"\n")[2])
    change(body)
    data = json.dumps(body).encode()
    digest = xxhash.xxh3_128_hexdigest(data)
    path = path if is_published else path.with_name(f"layout-{digest}")
    path.write_bytes(f"tierstore layout 1 {digest}\n".encode() + data)
    reseal(manifest, "commit", lambda body: body.update(layout=digest))
    return path


def edit(path: Path, change: Callable[[Metadata], Any]) -> None:
    """Change what the ``.metadata`` of a checkpoint says."""
    metadata: Metadata = pickle.loads((path / ".metadata").read_bytes())
    change(metadata)
    (path / ".metadata").write_bytes(pickle.dumps(metadata))


def entry_of(metadata: Metadata, key: str) -> _StorageInfo:
    """Return where ``.metadata`` says that a value is which has one place."""
    (entry,) = (info for index, info in metadata.storage_data.items() if index.fqn == key)
    assert isinstance(entry, _StorageInfo)
    return entry


def committed_pages(run: Path, step: int = STEPS, rank: str = RANK) -> list[str]:
    manifest = (run / rank / f"commit-{step:010d}").read_bytes().partition(b"\n")[2]
    pages = json.loads(manifest)["pages"]
    return [f"{rank}/page-{number:06d}.{slot}" for number, (slot, *_) in enumerate(pages)]


def make_originals(root: Path) -> Path:
    """A run, a checkpoint of it, and one that tierstore has nothing to do with."""
    toy = Toy(root / "run", [*MODEL, [TWIN]])
    for _ in range(STEPS):
        toy.step()
    model = torch.nn.Module()
    for name, parameter in toy.parameters.items():
        model.register_parameter(name, parameter)
    model.register_buffer("buffer", torch.arange(5.0))
    toy.store.checkpoint(root / "published", model=model)
    toy.store.close()
    save_plain(root / "plain")
    return root
