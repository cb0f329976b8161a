"""Folders of runs and checkpoints: what is listed, its age, and what removing it frees."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.support.toy import RANK, Toy
from tierstore.tools.inspect.folder import Listed, checkpoints_in

ROOT = Path(__file__).resolve().parents[3]

AS_ANOTHER_USER = """
import os, sys
from tierstore.tools.inspect.folder import checkpoints_in
os.chdir(sys.argv[1])
if os.geteuid() == 0:
    os.setuid(65534)
for one in checkpoints_in(__import__("pathlib").Path(".")):
    print(one.name, one.kind, one.nbytes, sep=", ")
"""


def by_name(folder: Path) -> dict[str, Listed]:
    return {one.name: one for one in checkpoints_in(folder)}


def test_newest_first(originals: Path, tmp_path: Path) -> None:
    for age_s, name in enumerate(("b", "c", "a")):
        shutil.copytree(originals / "published", tmp_path / name)
        os.utime(tmp_path / name, (1e9 - age_s, 1e9 - age_s))
    assert [one.name for one in checkpoints_in(tmp_path)] == ["b", "c", "a"]


def test_a_run_is_as_old_as_its_last_commit(run: Path) -> None:
    """Its directory changes once, when it is made."""
    os.utime(run / RANK / "commit-0000000003", (1e9, 1e9))
    found = by_name(run.parent)["run"]
    assert (found.kind, found.step, found.written_at, found.in_use_by) == ("run", 3, 1e9, None)
    toy = Toy(run, resume=True)
    assert by_name(run.parent)["run"].in_use_by is not None
    toy.store.close()


def test_removing_frees_files_that_have_no_name_elsewhere(originals: Path, tmp_path: Path) -> None:
    first, second = tmp_path / "step-3", tmp_path / "step-4"
    shutil.copytree(originals / "published", first)
    shutil.copytree(first, second, copy_function=os.link)
    (second / "own").write_bytes(b"x" * 5000)
    os.link(second / "own", second / "own too")
    found = by_name(tmp_path)
    assert (found["step-3"].freed_bytes, found["step-4"].freed_bytes) == (0, 5000)
    assert found["step-4"].nbytes == (found["step-3"].nbytes or 0) + 5000
    shutil.rmtree(first)
    one = by_name(tmp_path)["step-4"]
    assert one.freed_bytes == one.nbytes


def test_unfinished_ones(originals: Path, tmp_path: Path) -> None:
    shutil.copytree(originals / "published", tmp_path / ".step-5.tmp-01234567-89abcdef")
    (tmp_path / ".out.tmp-01234567").mkdir()
    shutil.copytree(originals / "plain", tmp_path / "saving")
    (tmp_path / "saving" / ".metadata").unlink()
    assert {name: one.kind for name, one in by_name(tmp_path).items()} == {
        ".step-5.tmp-01234567-89abcdef": "unfinished checkpoint",
        ".out.tmp-01234567": "unfinished conversion",
        "saving": "unfinished checkpoint",
    }


def test_a_part_of_a_striped_run_is_named_so(tmp_path: Path) -> None:
    toy = Toy([tmp_path / "a", tmp_path / "b"])
    toy.step()
    toy.store.close()
    kinds = {name: one.kind for name, one in by_name(tmp_path).items()}
    assert kinds == {"a": "run", "b": "part of a striped run"}


def test_files(tmp_path: Path) -> None:
    torch.save(torch.nn.Linear(2, 3).state_dict(), tmp_path / "ck-1.pt")
    (tmp_path / "notes.txt").touch()
    (tmp_path / "link.pt").symlink_to("ck-1.pt")
    found = by_name(tmp_path)
    assert [*found] == ["ck-1.pt"]
    assert found["ck-1.pt"].kind == "torch checkpoint"
    assert found["ck-1.pt"].freed_bytes == (tmp_path / "ck-1.pt").stat().st_size


@pytest.mark.long
def test_what_this_user_may_not_read_is_listed(originals: Path, tmp_path: Path) -> None:
    for name in ("good", "closed", "files"):
        shutil.copytree(originals / "published", tmp_path / name)
    shutil.copytree(originals / "run", tmp_path / "run")
    (tmp_path / "good").chmod(0o755)
    (tmp_path / "files").chmod(0o755)
    for path in (tmp_path / "good").rglob("*"):
        path.chmod(0o755 if path.is_dir() else 0o644)
    (tmp_path / "run").chmod(0o711)
    (tmp_path / "closed").chmod(0)
    tmp_path.chmod(0o755)
    command = [sys.executable, "-c", AS_ANOTHER_USER, str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    (tmp_path / "closed").chmod(0o700)
    lines = dict(line.split(", ", 1) for line in done.stdout.splitlines())
    nbytes = by_name(tmp_path)["good"].nbytes
    assert lines["good"] == f"checkpoint, {nbytes}"
    assert lines["closed"] == "not readable, None"
    if os.geteuid() == 0:
        assert lines["run"] == "not readable, None"
        assert lines["files"].startswith("not readable, ")


@pytest.mark.parametrize("gone", ["before", "while it is read"])
def test_one_that_is_removed_meanwhile_is_not_listed(
    gone: str, originals: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("kept", "removed"):
        shutil.copytree(originals / "published", tmp_path / name)
    call, name = (Path, "lstat") if gone == "before" else (os, "walk")
    original = getattr(call, name)

    def remove_first(*arguments: object, **options: object) -> object:
        if Path(str(arguments[0])).name == "removed":
            shutil.rmtree(tmp_path / "removed", ignore_errors=True)
        return original(*arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(call, name, remove_first)
        assert [one.name for one in checkpoints_in(tmp_path)] == ["kept"]
