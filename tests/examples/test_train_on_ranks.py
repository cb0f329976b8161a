"""The examples for several ranks, run as their readers run them: by torchrun."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.process_tree import kill_tree

pytestmark = pytest.mark.long

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
SIZES = ["--layers", "2", "--width", "64", "--batch", "4", "--context", "32"]
STEPS = 12
TIMEOUT_S = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """The output of a run."""

    resumed_after: int
    losses: dict[int, float]
    validation_loss: float
    digest: str


def train(program: str, ranks: int, *arguments: str) -> Run:
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    with subprocess.Popen(
        [sys.executable, *launcher, str(EXAMPLES / program), *SIZES, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"},
    ) as process:
        try:
            printed, complained = process.communicate(timeout=TIMEOUT_S)
        except BaseException:
            kill_tree(process.pid)
            raise
    assert process.returncode == 0, complained
    resumed = re.search(r"^resumed after step (\d+)$", printed, re.MULTILINE)
    losses = re.findall(r"^step (\d+)  loss ([\d.]+)$", printed, re.MULTILINE)
    final = re.search(r"^validation loss ([\d.]+) nats", printed, re.MULTILINE)
    digest = re.search(r"^parameters sha256 ([0-9a-f]{64})$", printed, re.MULTILINE)
    assert final is not None
    assert digest is not None
    return Run(
        resumed_after=int(resumed[1]) if resumed else 0,
        losses={int(step): float(loss) for step, loss in losses},
        validation_loss=float(final[1]),
        digest=digest[1],
    )


@pytest.fixture(scope="module", params=["train_ddp.py", "train_fsdp2.py"])
def program(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def on_two(program: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Run]:
    """Return the directory of a run on two ranks, and what it printed."""
    directory = tmp_path_factory.mktemp("on-two") / "run"
    new = ("--directory", str(directory), "--steps", str(STEPS), "--checkpoint-every", "0")
    return directory, train(program, 2, *new)


def test_loss_goes_down(on_two: tuple[Path, Run]) -> None:
    _, run = on_two
    assert sorted(run.losses) == list(range(1, STEPS + 1))
    assert run.losses[1] > 5.5  # About log(256): it knew nothing.
    assert run.validation_loss < run.losses[1] - 0.3


def test_other_ranks_see_the_same_text(
    program: str, on_two: tuple[Path, Run], tmp_path: Path
) -> None:
    new = ("--directory", str(tmp_path / "run"), "--steps", str(STEPS), "--checkpoint-every", "0")
    alone = train(program, 1, *new)
    _, run = on_two
    assert alone.losses == pytest.approx(run.losses, abs=0.01)
    assert alone.validation_loss == pytest.approx(run.validation_loss, abs=0.01)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_resumed(program: str, on_two: tuple[Path, Run], tmp_path: Path, ranks: int) -> None:
    directory, run = on_two
    copy = shutil.copytree(directory, tmp_path / "run")
    resume = ("--directory", str(copy), "--resume", "--batch", str(2 * ranks))
    again = train(program, ranks, *resume, "--checkpoint-every", "0", "--steps", str(STEPS))
    assert again.resumed_after == STEPS
    assert again.digest == run.digest
    if ranks == 2:
        assert again.validation_loss == run.validation_loss
    longer = train(program, ranks, *resume, "--checkpoint-every", "0", "--steps", str(STEPS + 2))
    assert list(longer.losses) == [STEPS + 1, STEPS + 2]
    assert longer.digest != run.digest


@pytest.fixture(scope="module")
def published(program: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Run]:
    """Return a checkpoint that a run on two ranks left, and what the run printed."""
    directory = tmp_path_factory.mktemp("published") / "run"
    run = train(program, 2, "--directory", str(directory), "--steps", "4")
    return directory.with_name("run-checkpoints") / "step-4", run


@pytest.mark.parametrize("ranks", [1, 3])
def test_begun_from_a_checkpoint_on_other_ranks(
    program: str, published: tuple[Path, Run], tmp_path: Path, ranks: int
) -> None:
    checkpoint, run = published
    new = ("--directory", str(tmp_path / "run"), "--batch", str(2 * ranks))
    begun = train(program, ranks, *new, "--from-checkpoint", str(checkpoint), "--steps", "4")
    assert begun.resumed_after == 4
    assert begun.digest == run.digest  # Its parameters are those that were published.
