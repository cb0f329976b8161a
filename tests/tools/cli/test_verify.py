"""``tierstore verify``."""

from __future__ import annotations

import json
import os
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp

from tests.support.commands import call, call_process
from tests.support.originals import STEPS, committed_pages, flip
from tests.support.toy import Toy, unchanged


def test_good_is_0(run: Path) -> None:
    with unchanged(run):
        done = call_process("verify", run, "--json")
    assert (done.returncode, done.stderr) == (0, "")
    body = json.loads(done.stdout)
    assert (body["good"], body["kind"], body["step"], body["faults"]) == (True, "run", STEPS, [])
    assert (body["path"], body["notes"]) == (str(run), [])


def test_a_flipped_bit_is_1(run: Path) -> None:
    page = committed_pages(run)[0]
    flip(run / page, 600)
    with unchanged(run):
        done = call_process("verify", run)
    assert (done.returncode, done.stderr) == (1, "")
    assert f"fault: {page}: the 4096 bytes at offset 0 are not those written in step 3" in (
        done.stdout
    )
    assert f"{run}: run, step 3: 1 fault (7 files, 28.0 KiB checked)" in done.stdout
    assert "What to do: " in done.stdout


def test_a_wrong_path_is_2(tmp_path: Path) -> None:
    done = call_process("verify", tmp_path / "absent")
    assert (done.returncode, done.stdout) == (2, "")
    assert (
        done.stderr == f"tierstore: {tmp_path}/absent does not exist: name a run or a checkpoint\n"
    )


def test_a_run_in_use_is_2(tmp_path: Path) -> None:
    toy = Toy(tmp_path)
    toy.step()
    toy.store.synchronize()
    done = call_process("verify", tmp_path, "--json")
    assert done.returncode == 2
    assert f"in use by process {os.getpid()} on host" in json.loads(done.stdout)["error"]
    assert "in use by process" in done.stderr
    done = call_process("inspect", tmp_path)  # Reads files that never change.
    assert (done.returncode, done.stderr) == (0, "")
    assert f"in use by process {os.getpid()} on host" in done.stdout
    toy.store.close()


def test_many_faults_are_shortened(tmp_path: Path) -> None:
    state = {f"key{number}": torch.arange(100.0) for number in range(30)}
    dcp.save(state, checkpoint_id=tmp_path, no_dist=True)
    data = tmp_path / "__0_0.distcp"
    data.write_bytes(bytes(data.stat().st_size))
    code, out, _ = call("verify", tmp_path)
    assert code == 1
    assert out.count("fault: ") == 20
    assert "... 10 more; --json lists all" in out
    assert "plain checkpoint: 30 faults" in out
    assert len(json.loads(call("verify", tmp_path, "--json")[1])["faults"]) == 30
