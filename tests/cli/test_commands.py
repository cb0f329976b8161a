"""The commands: exit codes through real processes, and what they print."""

from __future__ import annotations

import errno
import json
import os
import pty
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from typer.testing import CliRunner

import tierstore
from tests.support.originals import STEPS, TWIN, committed_pages, flip, reseal
from tests.support.toy import MODEL, RANK, Spec, Toy, resumed, unchanged
from tierstore.checkpoint import stopped_run
from tierstore.cli import app
from tierstore.inspection import verify

ROOT = Path(__file__).resolve().parents[2]
COMMANDS = ("inspect", "verify", "checkpoint")


def call(*arguments: object) -> tuple[int, str, str]:
    """Call a command in this process: its exit code, stdout and stderr."""
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout, result.stderr


def call_process(*arguments: object, **options: Any) -> subprocess.CompletedProcess[str]:
    """Call a command as a user does."""
    return subprocess.run(
        [sys.executable, "-m", "tierstore.cli", *map(str, arguments)],
        check=False,
        cwd=ROOT,
        text=True,
        **{"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options},
    )


# ------------------------------------------------------------------------- real processes


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
    assert f"{run}: run, step 3: 1 fault (6 files, 28.0 KiB checked)" in done.stdout
    assert "What to do: " in done.stdout


def test_a_wrong_path_is_2(tmp_path: Path) -> None:
    done = call_process("verify", tmp_path / "absent")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        f"tierstore: {tmp_path}/absent is no directory: No such file or directory. Name that of "
        "a run or a checkpoint\n"
    )


def test_a_run_in_use_is_2(tmp_path: Path) -> None:
    toy = Toy(tmp_path)
    toy.step()
    toy.store.synchronize()
    done = call_process("verify", tmp_path, "--json")
    assert done.returncode == 2
    assert f"in use by process {os.getpid()} on host" in json.loads(done.stdout)["error"]
    assert "in use by process" in done.stderr
    done = call_process("inspect", tmp_path)  # Reads what never changes.
    assert (done.returncode, done.stderr) == (0, "")
    assert f"in use by process {os.getpid()} on host" in done.stdout
    toy.store.close()


def test_a_run_is_published(run: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = call_process("checkpoint", run, out)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == (f"{out}: step 3, 28.0 KiB of pages linked, they take no further space\n")
    assert verify.verify(out).good
    state = {"model.first": torch.zeros(5, 7)}
    dcp.load(state, checkpoint_id=out, no_dist=True)
    assert torch.equal(state["model.first"], torch.full((5, 7), 1 - STEPS / 4))


def test_help_is_there_at_once() -> None:
    """torch alone takes seconds to import."""
    program = "import sys, tierstore.cli; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=False).returncode == 0


def test_whoever_closes_the_pipe_has_read_enough(run: Path) -> None:
    read, write = os.pipe()
    os.close(read)
    done = call_process("inspect", run, stdout=write)
    os.close(write)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_terminal_gets_a_bar(run: Path) -> None:
    ours, theirs = pty.openpty()
    done = call_process("verify", run, stderr=theirs)
    os.close(theirs)
    shown = b""
    while True:
        try:
            piece = os.read(ours, 1 << 16)
        except OSError:  # How Linux tells the end of a terminal.
            break
        if not piece:
            break
        shown += piece
    os.close(ours)
    assert done.returncode == 0
    assert b"checked" in shown
    assert b"KiB" in shown


# ---------------------------------------------------------------------------- wrong calls


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["verify"],
        ["verify", "a", "b"],
        ["verify", "a", "--all"],
        ["verify", "a", "--json", "--all"],
        ["inspect"],
        ["inspect", "--foo"],
        ["checkpoint", "a"],
        ["checkpoint", "a", "b", "c"],
        ["reticulate"],
        ["--foo"],
    ],
)
def test_wrong_arguments_are_2(arguments: list[str]) -> None:
    code, out, _ = call(*arguments)
    assert code == 2
    assert "--json" not in arguments or out == ""


@pytest.mark.parametrize("command", ["verify", "inspect"])
@pytest.mark.parametrize("as_json", [False, True])
def test_what_is_neither_is_2(command: str, as_json: bool, run: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "empty", tmp_path / "file", tmp_path / "absent", run / RANK):
        code, out, err = call(command, path, *(["--json"] if as_json else []))
        assert code == 2
        assert err.startswith(f"tierstore: {path} ")
        assert "Traceback" not in err
        assert (json.loads(out)["error"] if as_json else out) == (
            err.removeprefix("tierstore: ").rstrip("\n") if as_json else ""
        )


def test_checkpoints_that_cannot_be_published_are_2(run: Path, tmp_path: Path) -> None:
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "file").write_text("mine")
    for source, target in (
        (run, tmp_path / "taken"),
        (run, tmp_path / ".hidden"),
        (tmp_path / "absent", tmp_path / "out"),
        (tmp_path / "taken", tmp_path / "out"),
    ):
        code, out, err = call("checkpoint", source, target)
        assert (code, out) == (2, "")
        assert err.startswith("tierstore: ")
    assert not (tmp_path / "out").exists()
    resumed(run, STEPS, groups=[*MODEL, [TWIN]]).store.close()


def test_a_run_directory_may_hold_what_else_there_is(run: Path, tmp_path: Path) -> None:
    """As it may for all that the run itself does: a log, its checkpoints, an empty folder."""
    (run / "train.log").write_text("step 3\n")
    (run / "checkpoints").mkdir()
    code, out, err = call("checkpoint", run, run / "checkpoints" / "3")
    assert (code, err) == (0, "")
    assert f"{run}/checkpoints/3: step 3" in out
    assert call("checkpoint", run, tmp_path / "out")[0] == 0
    assert verify.verify(tmp_path / "out").good


def test_what_is_no_run_is_not_published(run: Path, originals: Path, tmp_path: Path) -> None:
    for source, why in (
        (originals / "published", "is a checkpoint already: name a run directory"),
        (run / RANK, "is what one rank has of a run: name the directory above it"),
    ):
        code, _, err = call("checkpoint", source, tmp_path / "out")
        assert code == 2
        assert err.startswith(f"tierstore: {source} {why}")
    assert not (tmp_path / "out").exists()


def test_an_empty_directory_of_a_further_rank_does_not_matter(run: Path, tmp_path: Path) -> None:
    """As a job of more ranks leaves it, which was refused."""
    (run / "rank-00001").mkdir()
    assert call("verify", run)[0] == 0
    assert call("checkpoint", run, tmp_path / "out")[0] == 0
    assert verify.verify(tmp_path / "out").good


def test_a_run_in_use_is_not_published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stopped_run, "LOCK_TIMEOUT_S", 0.1)
    toy = Toy(tmp_path / "run")
    toy.step()
    code, _, err = call("checkpoint", tmp_path / "run", tmp_path / "out")
    assert code == 2
    assert f"in use by process {os.getpid()}" in err
    toy.store.close()


def test_a_damaged_page_is_published_by_links_and_found(run: Path, tmp_path: Path) -> None:
    flip(run / committed_pages(run)[0], 600)
    assert call("checkpoint", run, tmp_path / "out")[0] == 0
    assert call("verify", tmp_path / "out")[0] == 1


def test_ctrl_c_is_130(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(verify, "verify", interrupted)
    code, out, err = call("verify", run)
    assert (code, out) == (130, "")
    assert "Traceback" not in err


def test_a_disk_that_fails_is_1(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(path: Any) -> list[str]:
        raise OSError(5, "Input/output error", path)

    monkeypatch.setattr(os, "listdir", failing)
    for command in ("verify", "inspect"):
        code, _, err = call(command, run)
        assert code == 1
        assert f"{run}: Input/output error (errno 5)" in err


# ------------------------------------------------------------------------ what is printed


def test_inspect_a_run(run: Path) -> None:
    code, out, err = call("inspect", run)
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[0] == f"{run}: run, step 3"
    assert re.fullmatch(r"run [0-9a-f]{32}, attempt [0-9a-f]{16}", lines[1])
    assert lines[2] == "1 rank, 3 pages of about 256.0 MiB"
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
            "3 of these files (28.0 KiB) have another name" in call("inspect", originals / name)[1]
        )


def test_inspect_a_plain_checkpoint(originals: Path) -> None:
    _, out, _ = call("inspect", originals / "plain")
    lines = [" ".join(line.split()) for line in out.splitlines()]
    assert lines[0] == f"{originals}/plain: plain checkpoint"
    assert "weight 4x3 float32 1 48 B" in lines
    assert "count scalar int64 1 8 B" in lines
    assert lines[-1] == ".metadata names 3 tensors (70 B) and 1 other value"


def test_inspect_a_run_without_commit(tmp_path: Path) -> None:
    Toy(tmp_path).store.close()
    code, out, _ = call("inspect", tmp_path)
    assert code == 0
    assert f"{tmp_path}: run, no committed step" in out
    assert "note: nothing was committed yet" in out


def test_inspect_what_is_damaged(run: Path, originals: Path, tmp_path: Path) -> None:
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


def test_names_that_would_move_the_cursor(tmp_path: Path) -> None:
    key = "a\x1b[2Jb\rc[red]d\N{RIGHT-TO-LEFT OVERRIDE}"
    dcp.save({key: torch.zeros(2)}, checkpoint_id=tmp_path, no_dist=True)
    shown = "a\\x1b[2Jb\\rc[red]d\\u202e"
    assert shown in call("inspect", tmp_path)[1]
    assert json.loads(call("inspect", tmp_path, "--json")[1])["tensors"][0]["key"] == key
    data = tmp_path / "__0_0.distcp"
    data.write_bytes(bytes(data.stat().st_size))
    assert f"fault: {shown}: " in call("verify", tmp_path)[1]


def test_hyperparameters_of_every_kind(run: Path) -> None:
    hyperparameters = [
        {"betas": {"$tuple": [0.9, 0.95]}, "name": "x" * 100, "lr": {"$float": "nan"}},
        *({}, {}),
    ]
    path = run / RANK / f"commit-{STEPS:010d}"
    reseal(path, "commit", lambda body: body.update(hyperparameters=hyperparameters))
    _, out, _ = call("inspect", run)
    assert f"group 0: betas=(0.9, 0.95), name={'x' * 57}..., lr={{'$float': 'nan'}}" in out


def test_version() -> None:
    assert call("--version") == (0, f"tierstore {tierstore.__version__}\n", "")


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help_and_a_section_of_the_docs(command: str) -> None:
    code, out, _ = call(command, "--help")
    assert code == 0
    assert "Options" in out
    assert f"\n## `tierstore {command} " in (ROOT / "docs/guide/commands.md").read_text()
    assert command in call("--help")[1]


def test_copies_are_told_from_links(
    tmp_path: Path, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    linked = os.link

    def refused(source: Any, target: Any, **options: Any) -> None:
        """As the system does between two filesystems."""
        if Path(source).parent != Path(target).parent:
            raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))
        linked(source, target, **options)

    monkeypatch.setattr(os, "link", refused)
    code, out, _ = call("checkpoint", run, tmp_path / "out", "--json")
    assert code == 0
    body = json.loads(out)
    assert (body["path"], body["step"]) == (str(tmp_path / "out"), STEPS)
    assert body["bytes_copied"] == body["bytes_total"] == 28 * 1024
    _, out, _ = call("checkpoint", run, tmp_path / "again")
    assert out == f"{tmp_path}/again: step 3, 28.0 KiB of pages copied\n"
    assert verify.verify(tmp_path / "out").good
