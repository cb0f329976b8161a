"""``tierstore inspect``."""

from __future__ import annotations

import json
import os
import re
import shutil
import time
from pathlib import Path

import pytest
import torch

from tests.support.commands import call, call_on_terminal, call_process
from tests.support.originals import STEPS, flip, reseal
from tests.support.rank_pool import RankPool
from tests.support.toy import RANK, Spec, Toy


def test_inspect_a_run(run: Path) -> None:
    code, out, err = call("inspect", run)
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[0] == f"{run}: run, step 3"
    pace = r"(, at [\d.e+]+[kM]? steps per hour)?"
    assert re.fullmatch(rf"committed [\d.]+ (s|min|hours) ago{pace}", lines[1])
    assert re.fullmatch(r"run [0-9a-f]{32}, attempt [0-9a-f]{16}", lines[2])
    assert lines[3] == "1 rank, 3 pages of about 256.0 MiB"
    assert "group 2: lr=0.25" in lines
    assert "first 5x7 bfloat16 master float32, momentum bfloat16 210 B" in " ".join(out.split())
    assert "4 parameters: master 364 B, momentum 140 B, average 36 B" in lines


def test_inspect_as_json(run: Path, originals: Path) -> None:
    body = json.loads(call("inspect", run, "--json")[1])
    manifest = json.loads((run / RANK / "commit-0000000003").read_bytes().partition(b"\n")[2])
    for name in ("step", "run_id", "attempt", "world_size", "page_bytes", "hyperparameters"):
        assert body[name] == manifest[name]
    assert body["parameters"][0] == {
        "group": 0,
        "name": "first",
        "shape": [5, 7],
        "dtype": "bfloat16",
        "states": {"master": "float32", "momentum": "bfloat16"},
        "nbytes": 5 * 7 * 6,
    }
    files = [path for path in run.rglob("*") if path.is_file()]
    assert body["files"] == len(files)
    assert body["file_bytes"] == sum(path.stat().st_size for path in files)
    assert body["shared_files"] == 0
    published = json.loads(call("inspect", originals / "published", "--json")[1])
    assert published["parameters"] == body["parameters"]
    assert published["shared_files"] == published["pages"] == 3
    keys = {tensor["key"]: tensor for tensor in published["tensors"]}
    assert keys["model.buffer"] == {
        "key": "model.buffer",
        "shape": [5],
        "dtype": "float32",
        "chunks": 1,
        "nbytes": 20,
    }


def test_inspect_says_that_files_are_shared(originals: Path) -> None:
    for name in ("run", "published"):
        assert (
            "3 files (28.0 KiB) also belong to the run or a checkpoint"
            in call("inspect", originals / name)[1]
        )


def test_inspect_a_plain_checkpoint(originals: Path) -> None:
    _, out, _ = call("inspect", originals / "plain")
    lines = [" ".join(line.split()) for line in out.splitlines()]
    assert lines[0] == f"{originals}/plain: plain checkpoint"
    assert "weight 4x3 float32 1 48 B" in lines
    assert "count scalar int64 1 8 B" in lines
    assert lines[-1] == ".metadata names 3 tensors (70 B) and 1 other value"


def test_inspect_says_when_a_run_committed_and_how_fast(run: Path) -> None:
    now = time.time()
    for step, age_s in ((2, 960.0), (3, 600.0)):
        os.utime(run / RANK / f"commit-{step:010d}", (now - age_s, now - age_s))
    for path in run.glob(f"{RANK}/commit-*1"):
        path.unlink()
    assert "committed 10 min ago, at 10 steps per hour" in call("inspect", run)[1].splitlines()
    body = json.loads(call("inspect", run, "--json")[1])
    assert body["steps_per_hour"] == pytest.approx(10)
    assert body["committed_at"] == pytest.approx(now - 600)


def test_the_time_that_a_run_was_stopped_is_not_time_of_steps(tmp_path: Path) -> None:
    for steps in (1, 3):
        toy = Toy(tmp_path, resume=steps > 1)
        toy.store.restore()
        while toy.store.step < steps:
            toy.step()
            toy.store.synchronize()
            pace = json.loads(call("inspect", tmp_path, "--json")[1])["steps_per_hour"]
            assert (pace is None) == (toy.store.step < 3)
        toy.store.close()


def test_inspect_a_folder_of_checkpoints(originals: Path, tmp_path: Path) -> None:
    shutil.copytree(originals / "published", tmp_path / "step-3")
    shutil.copytree(DEEPSPEED, tmp_path / "deepspeed")
    (tmp_path / "notes").mkdir()
    for age_s, name in ((10, "step-3"), (0, "deepspeed")):
        os.utime(tmp_path / name, (1e9 - age_s, 1e9 - age_s))
    code, out, err = call("inspect", tmp_path)
    assert (code, err) == (0, "")
    rows = [re.split(r"  +", line.strip()) for line in out.splitlines()]
    assert [row[:3] for row in rows[1:]] == [
        ["deepspeed", "deepspeed checkpoint", "unknown"],
        ["step-3", "checkpoint", "3"],
    ]
    body = json.loads(call("inspect", tmp_path, "--json")[1])
    assert [one["marked_whole"] for one in body["checkpoints"]] == [None, True]
    sizes = [path.stat().st_size for path in (tmp_path / "deepspeed").rglob("*") if path.is_file()]
    assert body["checkpoints"][0]["freed_bytes"] == sum(sizes)


def test_inspect_what_convert_reads(tmp_path: Path) -> None:
    _, out, _ = call("inspect", DEEPSPEED)
    lines = [" ".join(line.split()) for line in out.splitlines()]
    assert lines[0] == f"{DEEPSPEED}: deepspeed checkpoint, step 3"
    assert any(line.startswith("group 1: betas=(0.8, 0.95)") for line in lines)
    states = "master float32, exp_avg float32, exp_avg_sq float32"
    assert f"1 embedding.weight 11x6 bfloat16 {states} 792 B" in lines
    assert "positions 9 float32 buffer float32 36 B" in lines
    assert lines[-2] == "What to type next:"
    assert lines[-1] == f"tierstore convert {DEEPSPEED} RUN --to tierstore --dry-run"
    model = torch.nn.Linear(3, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(3)).sum().backward()
    optimizer.step()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 7}
    torch.save(state, tmp_path / "ck.pt")
    _, out, _ = call("inspect", tmp_path / "ck.pt")
    lines = [" ".join(line.split()) for line in out.splitlines()]
    assert lines[0] == f"{tmp_path}/ck.pt: torch checkpoint"
    assert lines[1].startswith("1 file, ")
    assert [line for line in lines if "does not carry" in line and "'epoch'" in line]
    states = "weight float32, exp_avg float32, exp_avg_sq float32"
    assert f"0 weight 4x3 float32 {states} 144 B" in lines
    torch.save(model.state_dict(), tmp_path / "weights.pt")
    _, out, _ = call("inspect", tmp_path / "weights.pt")
    command = out.splitlines()[-1].split()
    assert command[:3] == ["tierstore", "convert", f"{tmp_path}/weights.pt"]
    assert call(*command[1:])[0] == 0


def test_inspect_names_the_checkpoints_beside_the_last_weights(tmp_path: Path) -> None:
    """The Trainer of transformers and save_model() write both into one directory."""
    trainer = DEEPSPEED.parents[2] / "huggingface/trainer-llama/checkpoint"
    shutil.copytree(trainer, tmp_path, dirs_exist_ok=True)
    shutil.copytree(trainer, tmp_path / "checkpoint-3")
    _, out, _ = call("inspect", tmp_path)
    assert "note: files of checkpoints in it count: inspect checkpoint-3" in out.splitlines()


def test_inspect_a_run_without_commit(tmp_path: Path) -> None:
    Toy(tmp_path).store.close()
    code, out, _ = call("inspect", tmp_path)
    assert code == 0
    assert "None" not in out
    assert f"{tmp_path}: run, no committed step" in out
    assert "note: nothing was committed yet" in out


def test_inspect_a_damaged_run_or_checkpoint(run: Path, originals: Path, tmp_path: Path) -> None:
    newest = f"{RANK}/commit-{STEPS:010d}"
    flip(run / newest, 200)
    code, out, _ = call("inspect", run)
    assert code == 0
    assert "run, step 2" in out
    assert f"note: {newest} is damaged: its checksum does not match its content" in out
    flip(run / RANK / f"commit-{STEPS - 1:010d}", 200)
    code, _, err = call("inspect", run)
    assert code == 1
    assert "is damaged: its checksum" in err
    plain = Path(shutil.copytree(originals / "plain", tmp_path / "plain"))
    (plain / ".metadata").write_bytes(b"cposix\nsystem\n(S'touch pwned'\ntR.")
    code, _, err = call("inspect", plain)
    assert code == 1
    assert "names posix.system" in err


def test_long_lists_are_shortened(tmp_path: Path) -> None:
    model: list[list[Spec]] = [[(f"p{n}", (2,), torch.float32, {}, True) for n in range(45)]]
    toy = Toy(tmp_path, model)
    toy.step()
    toy.store.close()
    _, out, _ = call("inspect", tmp_path)
    assert "p39" in out
    assert "p40" not in out
    assert "... 5 more; --json lists all" in out
    assert len(json.loads(call("inspect", tmp_path, "--json")[1])["parameters"]) == 45


DEEPSPEED = Path(__file__).parents[1] / "convert/fixtures/deepspeed/zero3-muon/checkpoint"
LONG = "model.layers.0.self_attention.query_projection.weight"


def leave_run_of(directory: Path, name: str) -> None:
    """Leave a run of one parameter behind."""
    toy = Toy(directory, [[(name, (3, 4), torch.float32, {"average": torch.float32}, False)]])
    toy.step()
    toy.store.close()


def test_a_narrow_terminal_folds_after_spaces_and_dots(tmp_path: Path) -> None:
    leave_run_of(tmp_path, LONG)
    done, shown = call_on_terminal("stdout", "inspect", tmp_path, columns=80)
    assert (done.returncode, done.stderr) == (0, "")
    lines = shown.splitlines()
    assert lines[-5:-1] == [
        "group  parameter                 shape  dtype    states                    bytes",
        "    0  model.layers.0.           3x4    float32  master float32, average    96 B",
        "       self_attention.                           float32",
        "       query_projection.weight",
    ]


def test_a_word_wider_than_the_terminal_is_not_folded(tmp_path: Path) -> None:
    name = "model." + "x" * 100
    leave_run_of(tmp_path, name)
    _, shown = call_on_terminal("stdout", "inspect", tmp_path, columns=80)
    assert "x" * 100 in shown


def test_wide_terminals_and_pipes_show_a_parameter_in_a_line(tmp_path: Path) -> None:
    leave_run_of(tmp_path, LONG)
    line = f"    0  {LONG}  3x4    float32  master float32, average float32   96 B"
    assert line in call_on_terminal("stdout", "inspect", tmp_path, columns=len(line))[1]
    assert line in call_process("inspect", tmp_path, environment={"COLUMNS": "40"}).stdout


# ------------------------------------------------------------------------- a missing rank


@pytest.mark.quick(3)
@pytest.mark.parametrize("absent", [["rank-00000"], ["rank-00001"], ["rank-00000", "rank-00002"]])
@pytest.mark.parametrize("emptied", [False, True])
def test_every_command_names_missing_ranks_in_one_sentence(
    absent: list[str], emptied: bool, pool: RankPool, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    pool.run(3, "tests.rank_programs.differing_calls:leave_run", run)
    for name in absent:
        shutil.rmtree(run / name)
        if emptied:  # As a disk that is not mounted.
            (run / name).mkdir()
    be, they = ("is", "it is") if len(absent) == 1 else ("are", "they are")
    names = ", ".join(absent)
    missing = (
        f"{be} missing, and the run has 3 ranks: if {they} on the disk of another machine, copy "
        "the folders of all ranks into one directory first"
    )
    code, out, _ = call("inspect", run)
    assert (code, out.count("note: ")) == (0, 1)
    assert f"note: {names} {missing}\n" in out
    assert json.loads(call("inspect", run, "--json")[1])["notes"] == [f"{names} {missing}"]
    code, out, _ = call("verify", run)
    assert (code, out.count("fault: ")) == (1, 1)
    assert f"fault: {names}: {missing}\n" in out
    assert "What to do: copy missing ranks into place." in out
    code, out, err = call("checkpoint", run, tmp_path / "out")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert f"{names} {missing}, or publish from the job, with store.checkpoint()" in err


def test_a_run_that_not_all_ranks_have_begun_misses_none(pool: RankPool, tmp_path: Path) -> None:
    """A job that ends while it opens the directory leaves an empty folder of a rank."""
    pool.run(2, "tests.rank_programs.differing_calls:leave_run", tmp_path)
    for path in tmp_path.glob("rank-*/*"):
        if path.parent.name == "rank-00001" or path.name != "run.json":
            path.unlink()
    code, out, _ = call("inspect", tmp_path)
    assert code == 0
    assert "note: nothing was committed yet\n" in out
    assert "missing" not in out


def test_hyperparameters_of_every_kind(run: Path) -> None:
    hyperparameters = [
        {"betas": {"$tuple": [0.9, 0.95]}, "name": "x" * 100, "lr": {"$float": "nan"}},
        *({}, {}),
    ]
    path = run / RANK / f"commit-{STEPS:010d}"
    reseal(path, "commit", lambda body: body.update(hyperparameters=hyperparameters))
    _, out, _ = call("inspect", run)
    assert f"group 0: betas=(0.9, 0.95), name={'x' * 57}..., lr=nan" in out
