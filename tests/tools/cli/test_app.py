"""The command line as a whole: help, version, exit codes, terminals and pipes."""

from __future__ import annotations

import itertools
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import typer.main

import tierstore
from tests.support.commands import call, call_on_terminal, call_process
from tests.support.originals import committed_pages
from tests.support.toy import RANK
from tierstore.tools.cli import app
from tierstore.tools.inspect import verify

ROOT = Path(__file__).resolve().parents[3]
COMMANDS = sorted(typer.main.get_group(app).commands)


def test_version() -> None:
    assert call("--version") == (0, f"tierstore {tierstore.__version__}\n", "")
    done = call_process("--version")
    assert (done.returncode, done.stdout) == (0, f"tierstore {tierstore.__version__}\n")


@pytest.mark.parametrize("arguments", [[], ["inspect"], ["verify"], ["checkpoint"]])
def test_a_short_option_asks_for_help(arguments: list[str]) -> None:
    done = call_process(*arguments, "-h")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(" ".join(["Usage: tierstore", *arguments]))
    assert done.stdout == call_process(*arguments, "--help").stdout


def test_commands_are_completed() -> None:
    words = {"COMP_WORDS": "tierstore ver", "COMP_CWORD": "1"}
    done = call_process(environment={"_TIERSTORE_COMPLETE": "complete_bash", **words})
    assert (done.returncode, done.stdout, done.stderr) == (0, "verify\n", "")


def test_completion_is_installed_for_the_command(tmp_path: Path) -> None:
    """For the shell that it is called from."""
    call = ('"$@"; exit $?', "--install-completion")  # Otherwise bash becomes the program.
    assert run_in_shell(*call, HOME=str(tmp_path))[0] == 0
    (script,) = (tmp_path / ".bash_completions").iterdir()
    assert script.read_text().rstrip().endswith(" tierstore")
    assert str(script) in (tmp_path / ".bashrc").read_text()
    (tmp_path / "file").touch()
    code, _, error = run_in_shell(*call, HOME=str(tmp_path / "file"))
    assert code == 2
    assert f"tierstore: {tmp_path}/file cannot be written: " in error


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help_and_a_section_of_the_docs(command: str) -> None:
    code, out, _ = call(command, "--help")
    assert code == 0
    assert "Options" in out
    assert f"\n## `tierstore {command} " in (ROOT / "docs/reference/commands.md").read_text()
    assert command in call("--help")[1]


def test_help_does_not_import_torch() -> None:
    """torch alone takes seconds to import."""
    program = "import sys, tierstore.tools.cli; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=False).returncode == 0


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ("inspect absent", "absent does not exist"),
        ("verify absent", "absent does not exist"),
        ("checkpoint absent out", "absent does not exist"),
        ("convert absent out --to dcp", "absent does not exist"),
        ("convert . out --to dcp --memory much", "must look like '16GiB'"),
        ("probe . --page-bytes much", "must look like '16GiB'"),
        ("plan absent", "a plan needs drives, such as"),
        ("fit absent --drives 4x3.84TB@7/5GB/s --tokens many", "--tokens must be a number such as"),
        ("fit absent --tokens 1M --drives 2x", "drives must look like"),
        ("fit absent --tokens 1M --drives 1x2TB@7/5GB/s", "absent cannot be read"),
        ("fit absent --largest --tokens 1M --drives 1x2TB@7/5GB/s", "is not a known family"),
        ("fit qwen3 --tokens 1M --drives 1x2TB@7/5GB/s", "is a family of models: name one of"),
        ("plan absent --drives 1x2TB@7/5GB/s", "absent cannot be read"),
    ],
)
def test_wrong_paths_and_sizes_are_told_before_torch_is_imported(
    arguments: str, error: str
) -> None:
    program = (
        "import sys\n"
        "from tierstore.tools.cli import app\n"
        "try: app()\n"
        "except SystemExit as end: sys.exit(3 if 'torch' in sys.modules else end.code)"
    )
    command = [sys.executable, "-c", program, *arguments.split()]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 2, done.stderr
    assert error in done.stderr


def test_help_names_arguments_as_documentation_does() -> None:
    _, out, _ = call("convert", "--help")
    assert re.match(r"Usage: \w+ convert \[OPTIONS\] SOURCE... DESTINATION\n", out)
    assert "  --memory TEXT  " in out
    for command in COMMANDS:
        assert not re.search(r"[{}<>]", call(command, "--help")[1])
    assert "..." not in call("--help")[1].partition("Commands:")[2]


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["verify"],
        ["verify", "a", "b"],
        ["verify", "a", "--all"],
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
    assert (code, out) == (2, "")


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["verify", "--json", "--nope", "."], "No such option: --nope"),
        (["verify", "a", "--json", "--all"], "No such option: --all"),
        (["verify", "--json"], "Missing argument 'PATH'"),
        (["inspect", "--json"], "Missing argument 'PATH'"),
        (["checkpoint", "a", "--json"], "Missing argument 'OUT'"),
        (["inspect", "", "--json"], "an argument is empty, name a path"),
        (["checkpoint", "a", "", "--json"], "an argument is empty, name a path"),
        (["inspect", "a", "b", "--json"], "unexpected extra argument"),
        (["reticulate", "--json"], "No such command 'reticulate'"),
        (["--json", "verify", "a"], "No such option: --json"),
    ],
)
def test_wrong_arguments_are_json_on_request(arguments: list[str], error: str) -> None:
    done = call_process(*arguments)
    assert done.returncode == 2
    body = json.loads(done.stdout)
    assert list(body) == ["error"]
    assert error in body["error"]
    assert "Usage: " in done.stderr
    assert body["error"] in done.stderr


def test_an_argument_named_as_the_option_asks_for_no_json() -> None:
    assert call("inspect", "--", "--json", "a")[:2] == (2, "")


@pytest.mark.parametrize("as_json", [False, True])
def test_a_fault_of_the_program_keeps_its_traceback(
    as_json: bool, run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def failing(*_: Any) -> None:
        raise MemoryError("no memory")

    monkeypatch.setattr(verify, "verify", failing)
    with pytest.raises(MemoryError):
        app(["verify", str(run), *(["--json"] if as_json else [])])
    out = capsys.readouterr().out
    assert out == ('{"error": "MemoryError: no memory"}\n' if as_json else "")


@pytest.mark.parametrize("command", ["verify", "inspect"])
@pytest.mark.parametrize("as_json", [False, True])
def test_a_path_that_is_neither_run_nor_checkpoint_is_2(
    command: str, as_json: bool, run: Path, tmp_path: Path
) -> None:
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


# ------------------------------------------------------------------------------- the output

# An interpreter that ends writes what is left of the output, a forked process does not.
PROGRAM = [sys.executable, "-m", "tierstore.tools"]


def run_in_shell(call: str, *arguments: object, **environment: str) -> tuple[int, str, str]:
    """Run a program as a shell line does, in which "$@" is the program and its arguments."""
    done = subprocess.run(
        ["bash", "-c", call, "bash", *PROGRAM, *map(str, arguments)],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ["--version"],
        ["--help"],
        ["inspect", "-h"],
        *(  # torch is imported three times.
            pytest.param(arguments, marks=pytest.mark.long)
            for arguments in (["inspect"], ["inspect", "--json"])
        ),
    ],
)
def test_an_output_that_cannot_be_written_is_2(arguments: list[str], run: Path) -> None:
    given = [*arguments, run]
    full = "tierstore: stdout cannot be written: No space left on device (errno 28)\n"
    assert run_in_shell('"$@" >/dev/full', *given) == (2, "", full)
    assert run_in_shell('"$@" >&-', *given) == (2, "", "tierstore: stdout is closed\n")
    assert run_in_shell('"$@" >/dev/full 2>/dev/full', *given) == (2, "", "")


def test_a_checkpoint_is_not_published_if_its_output_is_closed(run: Path, tmp_path: Path) -> None:
    assert run_in_shell('"$@" >&-', "checkpoint", run, tmp_path / "out")[0] == 2
    assert not (tmp_path / "out").exists()


@pytest.mark.long
@pytest.mark.parametrize("redirection", ["2>/dev/full", "2>&-", "2>&- >&-"])
def test_errors_keep_their_code_if_no_one_can_read_them(redirection: str, run: Path) -> None:
    for arguments in (["verify", run / "absent"], ["verify", "--all"], ["inspect"]):
        assert run_in_shell(f'"$@" {redirection}', *arguments)[0] == 2


@pytest.mark.long
def test_a_closed_stderr_leaves_the_report(run: Path) -> None:
    code, out, _ = run_in_shell('"$@" 2>&-', "verify", run)
    assert (code, "run, step 3: good" in out) == (0, True)


@pytest.mark.quick(1)
@pytest.mark.parametrize("arguments", [["--version"], ["--help"], ["inspect"], ["inspect", "-h"]])
def test_a_closed_pipe_is_not_an_error(arguments: list[str], run: Path) -> None:
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(
        [*PROGRAM, *arguments, str(run)],
        cwd=ROOT,
        stdout=write,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    os.close(write)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.long
def test_faults_are_1_if_the_pipe_is_closed(run: Path) -> None:
    (run / committed_pages(run)[0]).unlink()
    assert run_in_shell('set -o pipefail; "$@" | true', "verify", run)[::2] == (1, "")


def test_a_terminal_shows_a_progress_bar(run: Path) -> None:
    done, shown = call_on_terminal("stderr", "verify", run)
    assert done.returncode == 0
    assert "check" in shown
    assert "iB/s" in shown
    assert "0:00:00 left" in shown
    assert "of 1" not in shown


def test_a_terminal_shows_prose_folded_after_spaces(tmp_path: Path) -> None:
    model = torch.nn.Linear(3, 4)
    optimizer = torch.optim.AdamW(model.parameters()).state_dict()
    torch.save({"model": model.state_dict(), "optimizer": optimizer}, tmp_path / "ck.pt")
    shown = call("inspect", tmp_path / "ck.pt")[1]
    piped = [line for line in shown.splitlines() if line.startswith("note:")]
    _, shown = call_on_terminal("stdout", "inspect", tmp_path / "ck.pt", columns=60)
    first, *rest = shown.partition("note:")[2].splitlines()
    lines = [f"note:{first}", *itertools.takewhile(lambda line: line.startswith("  "), rest)]
    assert len(lines) > 1
    assert all(len(line) <= 60 for line in lines)
    assert [" ".join(line.strip() for line in lines)] == piped
    _, shown = call_on_terminal("stderr", "inspect", "an absent run", columns=40)
    assert shown == ("tierstore: an absent run does not exist:\n  name a run or a checkpoint\n")


def test_several_passes_are_numbered(run: Path, plain: Path, tmp_path: Path) -> None:
    """A checkpoint of stock PyTorch has no checksums, so nothing is checked before."""
    _, shown = call_on_terminal("stderr", "convert", run, tmp_path / "dcp", "--to", "dcp")
    found = dict.fromkeys(re.findall(r"\d of \d, \w+", shown))
    assert [*found] == ["1 of 3, check", "2 of 3, convert", "3 of 3, verify"]
    arguments = (plain, tmp_path / "copy.pt", "--to", "torch")
    _, shown = call_on_terminal("stderr", "convert", *arguments)
    found = dict.fromkeys(re.findall(r"\d of \d, \w+", shown))
    assert [*found] == ["1 of 2, convert", "2 of 2, verify"]


@pytest.mark.long
def test_names_that_the_encoding_lacks_are_escaped(tmp_path: Path) -> None:
    dcp.save({"gr\u00f6\u00dfe": torch.zeros(2)}, checkpoint_id=tmp_path, no_dist=True)
    code, out, err = run_in_shell('"$@"', "inspect", tmp_path, PYTHONIOENCODING="ascii")
    assert (code, err) == (0, "")
    assert "gr\\xf6\\xdfe  2" in out


def test_names_with_terminal_codes_are_escaped(tmp_path: Path) -> None:
    key = "a\x1b[2Jb\rc[red]d\N{RIGHT-TO-LEFT OVERRIDE}"
    dcp.save({key: torch.zeros(2)}, checkpoint_id=tmp_path, no_dist=True)
    shown = "a\\x1b[2Jb\\rc[red]d\\u202e"
    assert shown in call("inspect", tmp_path)[1]
    assert json.loads(call("inspect", tmp_path, "--json")[1])["tensors"][0]["key"] == key
    data = tmp_path / "__0_0.distcp"
    data.write_bytes(bytes(data.stat().st_size))
    assert f"fault: {shown}: " in call("verify", tmp_path)[1]
