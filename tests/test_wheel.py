"""The wheels: they install without a compiler, and the first lines of the README work with them."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
NOBODY = 65534
PORTABLE = "--config-settings=cmake.define.TIERSTORE_PORTABLE=ON"  # As `make wheel` has it.

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


def interpreters() -> list[str]:
    """Return a Python of the version of these tests, and the later ones that are here.

    One of the system is preferred: any user can run it.
    """
    path = f"/usr/bin:{os.environ['PATH']}"
    names = [f"python3.{minor}" for minor in range(sys.version_info.minor, 15)]
    first, *later = [shutil.which(name, path=path) for name in names]
    needed = ["-c", "import ensurepip, venv"]
    works = [
        found
        for found in (first or sys.executable, *later)
        if found and not subprocess.run([found, *needed], capture_output=True).returncode
    ]
    assert works
    return works


def user_options(python: Path) -> dict[str, object]:
    """Return how to run a Python as an unprivileged user, if such a user can reach it."""
    if os.geteuid() != 0:
        return {}
    options: dict[str, object] = {"user": NOBODY, "group": NOBODY, "extra_groups": []}
    try:
        run(python, "-c", "", **options)
    except PermissionError:  # It is in the home of root.
        return {}
    return options


@pytest.fixture(scope="module")
def wheels(folder: Path) -> list[Path]:
    """The wheels of these Pythons, with a platform tag as auditwheel measures it.

    One of 3.12 is for all later ones.
    """
    tools = Path(sys.executable).parent
    environment = {**os.environ, "PATH": f"{tools}:{os.environ['PATH']}"}
    for number, interpreter in enumerate(interpreters()[:2]):
        run(interpreter, "-m", "venv", folder / f"builder-{number}")
        pip = [folder / f"builder-{number}/bin/python", "-m", "pip", "wheel", "-q", "--no-deps"]
        run(*pip, PORTABLE, "--wheel-dir", folder / "built", ROOT)
    for built in (folder / "built").glob("*.whl"):
        run(tools / "auditwheel", "repair", "--wheel-dir", folder / "dist", built, env=environment)
    return sorted((folder / "dist").glob("*.whl"))


@pytest.fixture(scope="module", params=interpreters(), ids=lambda path: Path(path).name)
def python(request: pytest.FixtureRequest, folder: Path, wheels: list[Path]) -> Path:
    """The Python of a new environment with the wheel, installed without a compiler in sight."""
    path = folder / f"venv-{request.param_index}"
    run(request.param, "-m", "venv", path)
    python = path / "bin/python"
    pip = [python, "-m", "pip", "install", "-q", "-c", ROOT / "constraints.txt"]
    environment = {**os.environ, "PATH": str(python.parent)}
    run(*pip, "torch==2.13.0", env=environment)
    wheel = wheels[min(request.param_index, len(wheels) - 1)]
    run(*pip, wheel, env=environment)
    return python


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_the_wheels_hold_both_packages_and_nothing_else(wheels: list[Path]) -> None:
    assert len(wheels) == min(2, len(interpreters()))
    for wheel in wheels:
        assert re.search(r"-(cp311-cp311|cp312-abi3)-manylinux_2_\d+_", wheel.name)
        names = run(sys.executable, "-m", "zipfile", "-l", wheel).splitlines()[1:]
        top = {line.split("/")[0] for line in names if "/" in line}
        assert {"tierstore", "muon"} <= top
        assert top <= {"tierstore", "muon", "tierstore.libs", "tierstore-0.2.0.dist-info"}
        of_x86 = ["_cpu_kernels", "_encodings"] if platform.machine() == "x86_64" else []
        modules = ["_native", *of_x86]
        for module in modules:
            assert len([line for line in names if re.search(rf"{module}\..*\.so ", line)]) == 1


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_the_readme_works_as_any_user(python: Path, folder: Path) -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    loop, load = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    work = folder / f"work-{python.parent.parent.name}"
    work.mkdir()
    program = AROUND + loop.replace("/nvme", str(work)).replace("% 1000", "% 4")
    program += textwrap.dedent("""
        assert store.committed.step == 4
        expected = {name: value.clone() for name, value in model.state_dict().items()}
        for parameter in model.parameters():
            torch.nn.init.zeros_(parameter)
    """)
    program += load.replace("/nvme", str(work)).replace("step-1000", "step-4")
    program += textwrap.dedent("""
        for name, value in state["model"].items():
            assert torch.equal(value, expected[name]), name
        if torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512"):
            import muon.kernels.cpu
            import tierstore.layout._encodings
        print("loaded")
    """)
    (work / "program.py").write_text(program, encoding="utf-8")
    options: dict[str, object] = {"cwd": work, "env": {"PATH": str(python.parent)}}
    if as_user := user_options(python):
        shutil.chown(work, NOBODY, NOBODY)
        options |= as_user
    assert run(python, "program.py", **options).splitlines()[-1] == "loaded"
    found = run(python.parent / "tierstore", "doctor", work, **options)
    assert "io_uring" in found or "libaio" in found
