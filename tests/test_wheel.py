"""The wheel: it installs without a compiler, and the first lines of the README work with it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import textwrap
import venv
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
NOBODY = 65534
PORTABLE = "-Ccmake.define.TIERSTORE_PORTABLE=ON"  # As `make wheel` has it.

# What the loop of the README takes from the program around it.
AROUND = """
import torch

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.GELU(), torch.nn.Linear(32, 1))
model.forward = lambda batch, plain=model.forward: plain(batch).square().mean()


def warmup_then_cosine(step):
    return 1.0


def batches_from(step):
    return torch.randn(4, 8, 16)
"""


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    """A folder that any user can enter, unlike pytest's."""
    path = Path(tempfile.mkdtemp(prefix="tierstore-wheel-"))
    path.chmod(0o755)
    yield path
    shutil.rmtree(path)


def run(*command: object, **options: object) -> str:
    done = subprocess.run(
        [str(each) for each in command],
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        **options,  # type: ignore[call-overload]
    )
    assert done.returncode == 0, done.stdout[-4000:]
    return str(done.stdout)


@pytest.fixture(scope="module")
def wheel(folder: Path) -> Path:
    """The wheel of this source for this Python, with a platform tag as auditwheel measures it."""
    tools = Path(sys.executable).parent
    environment = {**os.environ, "PATH": f"{tools}:{os.environ['PATH']}"}
    run(sys.executable, "-m", "build", "--outdir", folder / "built", PORTABLE, ROOT)
    (built,) = (folder / "built").glob("*.whl")
    run(tools / "auditwheel", "repair", "--wheel-dir", folder / "dist", built, env=environment)
    (repaired,) = (folder / "dist").glob("*.whl")
    return repaired


@pytest.fixture(scope="module")
def python(folder: Path, wheel: Path) -> Path:
    """The Python of a new environment with the wheel, installed without a compiler in sight."""
    venv.create(folder / "venv", with_pip=True)
    python = folder / "venv/bin/python"
    pip = [python, "-m", "pip", "install", "-q", "-c", ROOT / "constraints.txt"]
    environment = {**os.environ, "PATH": str(python.parent)}
    run(*pip, "torch==2.13.0", env=environment)
    run(*pip, wheel, env=environment)
    return python


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_the_wheel_holds_both_packages_and_nothing_else(wheel: Path) -> None:
    assert re.search(r"-manylinux_2_\d+_", wheel.name)
    names = run(sys.executable, "-m", "zipfile", "-l", wheel).splitlines()[1:]
    top = {line.split("/")[0] for line in names if "/" in line}
    assert {"tierstore", "muon"} <= top
    assert top <= {"tierstore", "muon", "tierstore.libs", "tierstore-0.1.0.dist-info"}
    engines = [line for line in names if re.search(r"_native\..*\.so ", line)]
    assert len(engines) == 1


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_the_readme_works_as_any_user(python: Path, folder: Path) -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    loop, load = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    work = folder / "work"
    work.mkdir()
    program = AROUND + loop.replace("/nvme", str(work)).replace("% 1000", "% 4")
    program += textwrap.dedent("""
        assert store.committed_step == 4
        expected = {name: value.clone() for name, value in model.state_dict().items()}
        for parameter in model.parameters():
            torch.nn.init.zeros_(parameter)
    """)
    program += load.replace("/nvme", str(work)).replace("step-1000", "step-4")
    program += textwrap.dedent("""
        for name, value in state["model"].items():
            assert torch.equal(value, expected[name]), name
        print("loaded")
    """)
    (work / "program.py").write_text(program, encoding="utf-8")
    options: dict[str, object] = {"cwd": work, "env": {"PATH": str(python.parent)}}
    if os.geteuid() == 0:
        shutil.chown(work, NOBODY, NOBODY)
        options |= {"user": NOBODY, "group": NOBODY, "extra_groups": []}
    assert run(python, "program.py", **options).splitlines()[-1] == "loaded"
    found = run(python.parent / "tierstore", "doctor", work, **options)
    assert "io_uring" in found or "libaio" in found
