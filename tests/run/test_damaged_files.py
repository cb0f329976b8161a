"""Small files of a run that a disk or a program has damaged: any length, any nesting, any bytes.

Every call that reads them works with what is whole, or raises an error of tierstore.
"""

from __future__ import annotations

import contextlib
import errno
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import xxhash

import tierstore
from tests.support.commands import call
from tests.support.isolated_process import allow_more_memory, apart
from tests.support.kept import commit_with
from tests.support.originals import STEPS, TWIN, reseal, reseal_layout
from tests.support.toy import MODEL, RANK, Toy, make_run
from tierstore.tools.inspect.summary import summarize
from tierstore.tools.inspect.verify import verify

COMMIT = f"commit-{STEPS:010d}"
GROUPS = [*MODEL, [TWIN]]
TIB = 2**40
KINDS = {"run.json": "run", COMMIT: "commit", "striping.json": "striping"}


def resume(run: Path) -> int:
    """The step that a restart finds, after which it can train."""
    toy = Toy(run, GROUPS, resume=True)
    with contextlib.closing(toy.store):
        step = toy.store.restore()
        toy.step()
        toy.store.synchronize()
    return step


def publish(run: Path) -> int:
    """The exit code of ``tierstore checkpoint``."""
    shutil.rmtree(run.parent / "out", ignore_errors=True)
    return call("checkpoint", run, run.parent / "out")[0]


def check(run: Path) -> bool:
    return verify(run).good


READERS: dict[str, Callable[[Path], Any]] = {
    "verify": check,
    "inspect": summarize,
    "checkpoint": publish,
    "resume": resume,
}


# -------------------------------------------------------------------------------- any length


def resume_in_little_memory(run: Path) -> int:
    allow_more_memory(192 << 20)  # Stacks of threads are part of it.
    return resume(run)


def make_huge(path: Path) -> None:
    """Give a file a length that no memory holds, and no data behind what it has."""
    path.touch()
    os.truncate(path, TIB)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("run.json", f"{RANK}/run.json has 1.0 TiB: no file of its kind has more than 1.0 GiB"),
        ("striping.json", f"{RANK}/striping.json has 1.0 TiB"),
        ("layout", STEPS),
        ("dirty", "was stopped while overwriting a commit"),
        ("clean", STEPS),
        (COMMIT, STEPS - 1),
    ],
)
def test_a_huge_file_of_a_run_is_refused_unread(name: str, expected: str | int, run: Path) -> None:
    """A restart goes on without it where it can."""
    path = run / RANK / name
    make_huge(next((run / RANK).glob("layout-*")) if name == "layout" else path)
    outcome = apart(resume_in_little_memory, run)
    if isinstance(expected, int):
        assert outcome.value == expected, outcome
    else:
        assert outcome.typed, outcome
        assert expected in outcome.error


def test_a_huge_mark_of_a_reshard_is_refused_unread(run: Path) -> None:
    (run / "resharded").mkdir()
    make_huge(run / "resharded/tierstore.json")
    outcome = apart(resume_in_little_memory, run)
    assert outcome.typed, outcome
    assert "resharded/tierstore.json has 1.0 TiB" in outcome.error


def test_a_huge_marker_is_not_removed_by_retention(tmp_path: Path) -> None:
    toy = Toy(tmp_path / "run")
    with contextlib.closing(toy.store):
        for name in ("a", "b", "c"):
            toy.step()
            toy.store.checkpoint(tmp_path / name, keep_last=1).wait()
            make_huge(tmp_path / name / "tierstore.json")
    assert all((tmp_path / name).exists() for name in ("a", "b", "c"))


def test_a_state_that_no_restart_would_read_is_refused_before_the_commit(tmp_path: Path) -> None:
    toy = Toy(tmp_path)
    with contextlib.closing(toy.store):
        toy.step()
        with pytest.raises(ValueError, match=r"registered\['kept'\]\['state'\] with 64\.0 MiB"):
            commit_with(toy.store, "x" * (64 << 20))
        commit_with(toy.store, "x")


# ----------------------------------------------------------------- a disk that does not answer


@pytest.mark.parametrize("begun", [True, False])
def test_an_error_while_looking_for_a_striping_names_the_file(begun: bool, tmp_path: Path) -> None:
    if begun:
        make_run(tmp_path)

    def strike(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(path: Any, *arguments: Any, **options: Any) -> Any:
            if os.fsdecode(path if isinstance(path, os.PathLike | str) else "").endswith(
                "striping.json"
            ):
                raise OSError(errno.EIO, os.strerror(errno.EIO), os.fspath(path))
            return real(path, *arguments, **options)

        return call

    with contextlib.ExitStack() as stack:
        for name in ("stat", "lstat", "open"):
            stack.enter_context(mock.patch(f"os.{name}", strike(getattr(os, name))))
        with pytest.raises(tierstore.StorageError, match=r"striping\.json") as caught:
            Toy(tmp_path, resume=begun)
    assert caught.value.errno == errno.EIO
    Toy(tmp_path, resume=begun).store.close()


# ------------------------------------------------------------------------------- any nesting


def seal(kind: str, text: bytes) -> bytes:
    return f"tierstore {kind} 1 {xxhash.xxh3_128_hexdigest(text)}\n".encode() + text


NESTED = b'{"overwriting":' + b"[" * 100_000
TWICE = b'{"committed":"commit-0000000003","committed":"commit-0000000003"}'


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("text", [NESTED, NESTED + b"]" * 100_000 + b"}", TWICE, b"[" * 100_000])
def test_json_that_is_nested_too_deep_or_has_a_key_twice_is_damage(
    text: bytes, reader: str, run: Path
) -> None:
    read = READERS[reader]
    for name in ("dirty", "clean", *KINDS):
        path = run / RANK / name
        before = path.read_bytes() if path.exists() else None
        path.write_bytes(seal(KINDS[name], text) if name in KINDS else text)
        copy = shutil.copytree(run, run.parent / "copy")
        with contextlib.suppress(tierstore.TierstoreError):
            found = read(copy)
            if reader == "verify":  # The mark of a clean end is nothing that it depends on.
                assert found == (name == "clean")
            if reader == "resume":
                assert found == (STEPS - 1 if name == COMMIT else STEPS)
        shutil.rmtree(copy)
        path.unlink() if before is None else path.write_bytes(before)


# --------------------------------------------------------------------------------- any bytes

MANIFESTS: list[Callable[[dict[str, Any]], None]] = [
    lambda body: body["pages"].pop(),
    lambda body: body["pages"].append(body["pages"][0]),
    lambda body: body["pages"].clear(),
    lambda body: body["pages"].__setitem__(0, None),
    lambda body: body["pages"][0].__setitem__(2, "00" * 8),
    lambda body: body["pages"][0].append("surplus"),
    lambda body: body.update(dropped=["first"]),
    lambda body: body["scalars"]["groups"].pop(),
    lambda body: body.update(extra={"$dict": [["a", 1], ["a", 2]]}),
    lambda body: body.update(step=2**62),
]


def enlarge(body: dict[str, Any]) -> None:
    """Give a parameter one chunk that no record holds, in fewer bytes than any state has."""
    group, shards = body["pages"][0]
    position, _ = shards[0]
    body["groups"][group][position]["shape"] = [2**40]
    shards[0][1] = [[[0], [2**40]]]


LAYOUTS: list[Callable[[dict[str, Any]], None]] = [
    enlarge,
    lambda body: body["groups"][0][1].update(name=body["groups"][0][0]["name"]),
    lambda body: body["groups"].append(body["groups"][0]),
    lambda body: body["groups"][1].append(body["groups"][0][0]),
    lambda body: body["pages"].append(body["pages"][0]),
    lambda body: body["pages"][0][1].append(body["pages"][0][1][0]),
    lambda body: body["pages"].pop(),
]


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize(
    ("of_layout", "number"),
    [*((False, n) for n in range(len(MANIFESTS))), *((True, n) for n in range(len(LAYOUTS)))],
)
def test_a_hostile_commit_is_a_typed_error(
    of_layout: bool, number: int, reader: str, run: Path
) -> None:
    path = run / RANK / COMMIT
    if of_layout:
        reseal_layout(path, LAYOUTS[number])
    else:
        reseal(path, "commit", MANIFESTS[number])
    with contextlib.suppress(tierstore.TierstoreError):
        found = READERS[reader](run)
        assert reader == "inspect" or found != (True if reader == "verify" else STEPS)


def mutations(data: bytes, random_: random.Random) -> dict[str, bytes]:
    """Name -> content that a disk or a program may leave in the place of a file."""
    position = random_.randrange(max(1, len(data)))
    return {
        "empty": b"",
        "cut": data[:position],
        "zeros": bytes(len(data)),
        "longer": data + bytes(4096),
        "twice": data * 2,
        "zeros from somewhere": data[:position] + bytes(len(data) - position),
        "other bytes": data[:position] + random_.randbytes(8) + data[position + 8 :],
        "nested": data[:position] + b"[" * 50_000,
        "not UTF-8": b'"\xff' + data,
        "a long number": data[:position] + b"9" * 10_000 + data[position:],
    }


@pytest.mark.quick(5)
@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("name", ["run.json", COMMIT, "layout", "clean", "dirty", "striping.json"])
def test_mutated_files_are_read_or_refused_by_a_typed_error(
    name: str, reader: str, run: Path, tmp_path: Path
) -> None:
    path = next((run / RANK).glob("layout-*")) if name == "layout" else run / RANK / name
    whole = path.read_bytes() if path.exists() else b'{"overwriting":"commit-0000000003"}'
    for what, data in mutations(whole, random.Random(f"{name} {reader}")).items():
        copy = shutil.copytree(run, tmp_path / "copy")
        (copy / RANK / path.name).write_bytes(data)
        os.truncate(copy / RANK / path.name, len(data))
        with contextlib.suppress(tierstore.TierstoreError):
            found = READERS[reader](copy)
            assert reader != "resume" or found in (STEPS - 1, STEPS), what
        shutil.rmtree(copy)


def test_a_run_of_this_model_is_resumed(tmp_path: Path) -> None:
    """The readers above work with a run that is whole."""
    make_run(tmp_path / "run")
    assert check(tmp_path / "run")
    assert publish(tmp_path / "run") == 0
