"""The picture of memory with and without tierstore, against arithmetic on 8.03B parameters."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.support.bench_runs import run_benchmark

PARAMETERS = 8_030_261_248
BYTES = {"parameters": 2, "gradients": 2, "masters": 4, "Adam moments": 8}


@pytest.mark.long  # `tierstore fit` is a process that imports torch.
def test_picture(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    done = run_benchmark("memory_picture.py", "--json", str(path), "--pictures", str(tmp_path))
    assert done.returncode == 0, done.stderr
    without, gpu, host, nvme = json.loads(path.read_text())["columns"]
    assert [column["place"] for column in (gpu, host, nvme)] == ["GPU", "host memory", "NVMe"]
    for part, nbytes in BYTES.items():
        assert without["parts"][part] == pytest.approx(nbytes * PARAMETERS, rel=0.01)
    for part in ("masters", "Adam moments"):
        assert nvme["parts"][part] == without["parts"][part]
    assert host["parts"]["gradients"] == pytest.approx(2 * PARAMETERS, rel=0.03)
    assert sum(gpu["parts"].values()) < 24e9 < sum(without["parts"].values())
    picture = (tmp_path / "memory-8b.svg").read_text(encoding="utf-8")
    words = " ".join(ElementTree.fromstring(picture).itertext())
    for text in ("Without tierstore", "132 GB", "of 24 GB", "masters 32", "NVMe"):
        assert text in words
