"""Every command of docs/guide/emergencies.md, in its order, on a run that a program left behind."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import muon
import tierstore
from tests.support import training
from tests.support.toy import contents

PAGE = Path(__file__).resolve().parents[2] / "docs/guide/emergencies.md"


@pytest.mark.long
def test_every_command(tmp_path: Path) -> None:
    parameters = training.make_parameters(torch.float32)
    with tierstore.TierStore(tmp_path / "run") as store:
        optimizer = muon.Muon(training.make_groups(parameters), store=store)
        for step in range(1, 21):
            training.set_gradients(parameters, step)
            optimizer.step()
            if step % 10 == 0:
                store.checkpoint(tmp_path / f"checkpoints/step-{step}")
    run = contents(tmp_path / "run")
    blocks = re.findall(r"```bash\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert len(blocks) == 4
    programs = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    outputs = [
        subprocess.run(
            ["bash", "-euc", block],
            cwd=tmp_path,
            env={**os.environ, "PATH": programs},
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        for block in blocks
    ]
    assert "run: run, step 20" in outputs[0]
    assert not (tmp_path / "checkpoints/step-10").exists()
    assert "run: run, step 20: good" in outputs[2]
    assert "step-20: checkpoint, step 20: good" in outputs[2]
    assert "verified: every page was read" in outputs[3]
    rescued = torch.load(tmp_path / "rescued.pt", weights_only=True)
    for name, parameter in parameters.items():
        assert torch.equal(rescued["model"][name], parameter)
    after = contents(tmp_path / "run")
    pages = {name for name in run if re.search(r"/page-\d+\.[ab]$", name)}
    assert pages
    assert all(after[name] == run[name] for name in pages)
