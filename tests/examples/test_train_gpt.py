"""The larger example as a reader runs it: whole, killed, interrupted, resumed, started twice."""

from __future__ import annotations

import os
import pty
import re
import resource
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.forked_programs import run_program

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "train_gpt.py"
STEPS = 40
# A line is printed every second step of 40, the first long before the last step.
KILL_AFTER_STEP = 6


def arguments_of(directory: Path, *arguments: str) -> list[str]:
    """Return the arguments of a run small enough for a test."""
    sizes = ["--layers", "2", "--width", "64", "--batch", "2", "--context", "32"]
    run = ["--steps", str(STEPS), "--threads", "1", "--directory", str(directory)]
    return [*sizes, *run, *arguments]


def run(directory: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the example to its end."""
    return run_program(EXAMPLE, *arguments_of(directory, *arguments))


def stop(directory: Path, number: signal.Signals) -> tuple[int, str]:
    """Start the example, and send it a signal when it says that KILL_AFTER_STEP is done.

    Returns the exit status and the error output.
    """
    command = [sys.executable, str(EXAMPLE), *arguments_of(directory)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith(f"step {KILL_AFTER_STEP} "):
                process.send_signal(number)
                break
        else:
            pytest.fail(f"the run ended before it printed step {KILL_AFTER_STEP}")
        _, complaint = process.communicate()
    return process.returncode, complaint


def command_in(output: str, pattern: str) -> list[str]:
    """Return the command that a line of the output names, as a list of arguments."""
    match = re.search(pattern, output, re.MULTILINE)
    assert match is not None, output
    return shlex.split(match[1], comments=True)


def columns_of_plot(output: str) -> list[int]:
    """Return the column of each mark in the plot of the loss, in order."""
    lines = re.findall(r"^ *\d+\.\d\d \|(.*)$", output, re.MULTILINE)
    return sorted(mark.start() for line in lines for mark in re.finditer(r"\*", line))


def digest(output: str) -> str:
    """Return the SHA-256 that a run prints at its end."""
    match = re.search(r"^parameters sha256 ([0-9a-f]{64})$", output, re.MULTILINE)
    assert match is not None, output
    return match[1]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Return the directory and the output of a run that nothing interrupted."""
    directory = tmp_path_factory.mktemp("finished") / "run"
    result = run(directory)
    assert result.returncode == 0, result.stderr
    return directory, result.stdout


@pytest.mark.long
def test_killed_and_resumed_run_ends_in_the_same_bits(
    finished: tuple[Path, str], tmp_path: Path
) -> None:
    status, _ = stop(tmp_path / "run", signal.SIGKILL)
    assert status == -signal.SIGKILL
    result = run(tmp_path / "run", "--resume")
    assert result.returncode == 0, result.stderr
    resumed = re.search(r"^resumed after step (\d+)$", result.stdout, re.MULTILINE)
    assert resumed is not None
    # A kill finds the step that was printed, or the one before it.
    assert KILL_AFTER_STEP - 1 <= int(resumed[1]) < STEPS
    assert digest(result.stdout) == digest(finished[1])
    assert columns_of_plot(result.stdout) == list(range(STEPS))


@pytest.mark.long
def test_ctrl_c_says_how_to_resume(finished: tuple[Path, str], tmp_path: Path) -> None:
    status, complaint = stop(tmp_path / "run", signal.SIGINT)
    assert status == 130
    assert "Traceback" not in complaint
    command = command_in(complaint, "^Stopped. To resume: (.*)$")
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    assert re.search(r"^resumed after step \d+$", result.stdout, re.MULTILINE)
    assert digest(result.stdout) == digest(finished[1])


@pytest.mark.long
def test_the_end_shows_the_loss_and_names_commands_that_exist(finished: tuple[Path, str]) -> None:
    directory, output = finished
    assert columns_of_plot(output) == list(range(STEPS))  # One step is one column here.
    inspect = command_in(output, "^  (.*tierstore inspect .*)$")
    assert inspect[1:] == ["inspect", str(directory)]
    assert Path(inspect[0]).is_file()
    again = command_in(output, "^  (.*train_gpt.py .*)$")
    assert again[1:] == [str(EXAMPLE), *arguments_of(directory), "--overwrite"]


@pytest.mark.long
def test_a_terminal_gets_a_progress_bar_instead_of_lines(tmp_path: Path) -> None:
    main, terminal = pty.openpty()
    command = [sys.executable, str(EXAMPLE), *arguments_of(tmp_path / "run")]
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "80"}
    with subprocess.Popen(command, stdout=terminal, stderr=terminal, env=environment) as process:
        os.close(terminal)
        shown = b""
        try:
            while part := os.read(main, 4096):
                shown += part
        except OSError:  # Linux reports the end of a terminal as EIO.
            pass
    os.close(main)
    text = re.sub(r"\x1b\[[\d;?]*[a-zA-Z]", "", shown.decode()).replace("\r\n", "\n")
    assert process.returncode == 0, text
    assert f"{STEPS}/{STEPS} loss " in text
    assert re.search(r" [\d,]+ tokens/s +[\d:]+ left", text)
    assert f"step {KILL_AFTER_STEP} " not in text
    digest(text)


@pytest.mark.long
def test_another_seed_ends_in_other_bits(finished: tuple[Path, str], tmp_path: Path) -> None:
    result = run(tmp_path / "run", "--seed", "1")
    assert digest(result.stdout) != digest(finished[1])


@pytest.mark.quick(1)
def test_starting_over_a_committed_run_is_refused(finished: tuple[Path, str]) -> None:
    directory, output = finished
    result = run(directory)
    assert result.returncode == 2
    assert "--resume" in result.stderr
    assert "--overwrite" in result.stderr
    assert "Traceback" not in result.stderr
    # The refused start changed nothing: the run is still there, at its end.
    again = run(directory, "--resume")
    assert f"resumed after step {STEPS}" in again.stdout
    assert digest(again.stdout) == digest(output)


@pytest.mark.long
@pytest.mark.timeout(1800)  # The machine may be busy; the time of the processor counts.
def test_the_default_run_learns_in_less_than_three_minutes_of_two_cores(tmp_path: Path) -> None:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    # Two threads would count the time that one waits for the other on a busy machine.
    command = [sys.executable, str(EXAMPLE), "--directory", str(tmp_path / "run"), "--threads", "1"]
    result = subprocess.run(command, capture_output=True, text=True)
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert result.returncode == 0, result.stderr
    final = re.search(r"^validation loss ([\d.]+) nats per byte", result.stdout, re.MULTILINE)
    assert final is not None
    assert float(final[1]) < 1.9
    seconds = used.ru_utime + used.ru_stime - before.ru_utime - before.ru_stime
    assert seconds < 2 * 3 * 60
