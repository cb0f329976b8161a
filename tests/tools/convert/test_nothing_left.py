"""A conversion that fails, or is interrupted or killed, leaves no destination behind."""

from __future__ import annotations

import errno
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import tierstore
from tests.support.commands import call
from tests.support.conversions import no_trace, tree
from tests.support.originals import edit, entry_of
from tests.support.published import ROOT, tensors_in
from tierstore.errors import StorageError
from tierstore.tools.convert import convert as module
from tierstore.tools.convert import destination as destination_module
from tierstore.tools.convert.convert import convert
from tierstore.tools.convert.pipeline import Piece

FIXTURES = Path(__file__).parent / "fixtures"
SOURCES = ["run", "published", "plain"]
"""Of the fixture ``originals``."""
FOREIGN = [
    *("deepspeed/zero3-adamw/checkpoint", "universal/zero1-adamw", "universal/zero3-adamw"),
    "huggingface/accelerate-two-bin/checkpoint",
    "huggingface/fsdp-full/checkpoint",
    "huggingface/fsdp-sharded/checkpoint",
    "huggingface/fsdp-ranks/checkpoint",
    "torch_checkpointing/sharded/checkpoint",
]
"""Folders of FIXTURES."""


def original_of(kind: str, originals: Path) -> Path:
    return FIXTURES / kind if kind in FOREIGN else originals / kind


def files_of(source: Path) -> list[Path]:
    return sorted(path for path in source.rglob("*") if path.is_file() and path.name != "lock")


@pytest.mark.quick(1)
@pytest.mark.parametrize("kind", [*SOURCES, *FOREIGN])
def test_damaged_sources(kind: str, originals: Path, tmp_path: Path) -> None:
    mutate_source(original_of(kind, originals), tmp_path, count=25 if kind in SOURCES else 10)


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("kind", [*SOURCES, *FOREIGN])
def test_many_damaged_sources(kind: str, originals: Path, tmp_path: Path) -> None:
    mutate_source(original_of(kind, originals), tmp_path, count=200)


def arguments(source: Path, out: Path) -> tuple[object, ...]:
    return ("convert", source, out, "--to", "dcp", "--assume-model-order")


def mutate_source(original: Path, tmp_path: Path, count: int) -> None:
    """Convert a source with random faults: exit code 1 or 2 and a sentence, or an equal result."""
    assert call(*arguments(original, tmp_path / "expected"))[0] == 0
    expected = tensors_in(tmp_path / "expected")
    numbers = random.Random(str(original.parts[-2:]))
    for number in range(count):
        source = Path(shutil.copytree(original, tmp_path / f"source {number}"))
        path = numbers.choice(files_of(source))
        data = bytearray(path.read_bytes())
        if not data or numbers.random() < 0.2:
            path.write_bytes(data[: numbers.randrange(len(data) + 1)])
        else:
            for _ in range(numbers.choice([1, 1, 8])):
                data[numbers.randrange(len(data))] ^= 1 << numbers.randrange(8)
            path.write_bytes(data)
        out = tmp_path / "out"
        code, _, error = call(*arguments(source, out))
        if code == 0:  # A byte that means nothing.
            found = tensors_in(out)
            if path.name not in (".metadata", "metadata.pkl"):  # No checksum of names.
                assert found.keys() == expected.keys(), (number, path)
            assert contents(found) == contents(expected), (number, path)
            shutil.rmtree(out)
        else:
            assert code in (1, 2), (number, path, error)
            assert error.startswith("tierstore: "), (number, path, error)
        shutil.rmtree(source)
        assert set(os.listdir(tmp_path)) == {"expected"}, (number, path)


def contents(tensors: dict[str, torch.Tensor]) -> list[str]:
    return sorted(repr((tensor.shape, tensor.tolist())) for tensor in tensors.values())


def hostile(path: Path) -> None:
    class Command:
        def __reduce__(self) -> Any:
            return os.system, (f"touch {path.parent / 'executed'}",)

    import pickle

    (path / ".metadata").write_bytes(pickle.dumps(Command()))


def lead_outside(path: Path) -> None:
    edit(path, lambda m: setattr(entry_of(m, "weight"), "relative_path", "../../etc/passwd"))


def overlap(path: Path) -> None:
    def change(metadata: Any) -> None:
        chunks = metadata.state_dict_metadata["weight"].chunks
        chunks.append(chunks[0])

    edit(path, change)


def huge(path: Path) -> None:
    def change(metadata: Any) -> None:
        metadata.state_dict_metadata["weight"].size = torch.Size([2**60, 3])

    edit(path, change)


def link(path: Path) -> None:
    (data,) = path.glob("*.distcp")
    shutil.move(data, path.parent / "elsewhere")
    data.symlink_to(path.parent / "elsewhere")


@pytest.mark.parametrize("damage", [hostile, lead_outside, overlap, huge, link])
def test_hostile_sources(damage: Callable[[Path], None], plain: Path, tmp_path: Path) -> None:
    damage(plain)
    with no_trace(tmp_path):
        code, out, error = call("convert", plain, tmp_path / "out", "--to", "dcp")
    assert (code, out) == (1, "")
    assert error.count("\n") == 1


def test_destination_that_exists(plain: Path, run: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    convert(plain, out, to="dcp")
    with no_trace(tmp_path):
        code, _, error = call("convert", run, out, "--to", "dcp")
        assert (code, error) == (
            2,
            f"tierstore: {out} exists: name another one, or pass --force to replace it\n",
        )
    assert call("convert", run, out, "--to", "dcp", "--force")[0] == 0
    assert "model.first" in tensors_in(out)
    assert [name for name in os.listdir(tmp_path) if name.startswith(".")] == []


def test_only_checkpoints_are_replaced(plain: Path, tmp_path: Path) -> None:
    out = tmp_path / "mine"
    out.mkdir()
    (out / "thesis.tex").write_text("years of work")
    with no_trace(tmp_path):
        code, _, error = call("convert", plain, out, "--to", "dcp", "--force")
        assert (code, "it is not a checkpoint; name another" in error) == (2, True)
        for inner in (plain / "out", tmp_path):
            code, _, error = call("convert", plain, inner, "--to", "dcp", "--force")
            assert (code, "contains the source" in error) == (2, True)


def test_force_keeps_what_is_there_if_the_conversion_fails(plain: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    convert(plain, out, to="dcp")
    (data,) = plain.glob("*.distcp")
    data.write_bytes(data.read_bytes()[:-100])
    with no_trace(tmp_path), pytest.raises(tierstore.CorruptionError):
        convert(plain, out, to="dcp", force=True)


def test_full_disk_is_told_before_the_first_byte(
    plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        destination_module.os,
        "statvfs",
        lambda path: SimpleNamespace(f_blocks=1, f_bavail=3, f_frsize=1000),
    )
    monkeypatch.setattr(module, "temporary_directory", None)  # Is not called.
    with no_trace(tmp_path):
        code, _, error = call("convert", plain, tmp_path / "out", "--to", "dcp")
    assert code == 1
    assert "where 2.9 KiB are free failed" in error
    assert "No space left on device" in error


@pytest.mark.parametrize(
    "raised",
    [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt(), MemoryError()],
    ids=repr,
)
@pytest.mark.parametrize("to", ["dcp", "torch", "universal"])
def test_errors_while_writing(
    raised: BaseException, to: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error comes after the first piece, when a file is half written."""
    real = module._digests

    def digests(entries: Any, memory: int, put: Callable[[Piece], None], progress: Any) -> Any:
        def fail(piece: Piece) -> None:
            put(piece)
            raise raised

        return real(entries, memory, fail, progress)

    monkeypatch.setattr(module, "_digests", digests)
    expected = tierstore.StorageError if isinstance(raised, OSError) else type(raised)
    with no_trace(tmp_path), pytest.raises(expected):
        convert(FIXTURES / "universal/zero1-adamw", tmp_path / "out", to=to)


@contextmanager
def files_of_at_most(nbytes: int) -> Iterator[None]:
    """Have the kernel refuse longer files of this process."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@pytest.mark.quick(1)
@pytest.mark.parametrize("to", ["dcp", "torch", "safetensors"])
def test_the_error_of_a_write_ends_the_conversion(to: str, tmp_path: Path) -> None:
    """The limit is met far behind the first piece, while further ones are read."""
    torch.save({str(number): torch.randn(2**20) for number in range(24)}, tmp_path / "in.pt")
    with no_trace(tmp_path), files_of_at_most(50 * 2**20), pytest.raises(StorageError) as caught:
        convert(tmp_path / "in.pt", tmp_path / "out", to=to)
    assert caught.value.errno == errno.EFBIG


def test_a_write_that_was_lost_is_noticed(
    plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lose(directory: Path) -> None:
        data = directory / "__0_0.distcp"
        content = bytearray(data.read_bytes())
        content[content.index(torch.arange(12.0).numpy().tobytes()) + 5] ^= 1
        data.write_bytes(content)

    monkeypatch.setattr(module, "make_durable", lose)
    with no_trace(tmp_path):
        code, _, error = call("convert", plain, tmp_path / "out", "--to", "dcp")
    assert code == 1
    assert "master of 'weight' differs from the source" in error


PROGRAM = """
import sys
from tierstore.tools.convert.convert import convert
def stop(phase, done, total):
    if phase == "convert":
        print("writing", flush=True)
        sys.stdin.readline()
convert(sys.argv[1], sys.argv[2], to="dcp", on_progress=stop)
"""


@pytest.mark.long
@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_signals(sent: int, plain: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    before = tree(tmp_path)
    child = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(plain), str(out)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        cwd=ROOT,
    )
    try:
        assert child.stdout is not None
        assert child.stdout.readline() == b"writing\n"
        # A conversion in progress is left alone by another to the same destination.
        (temporary,) = tmp_path.glob(".out.tmp-*")
        child.send_signal(sent)
        child.wait()
    finally:
        child.kill()
        child.communicate()
    assert not out.exists()
    if sent == signal.SIGINT:
        assert tree(tmp_path) == before
    else:
        assert temporary.is_dir()
    convert(plain, out, to="dcp")
    assert sorted(os.listdir(tmp_path)) == ["out", "plain"]


def test_another_conversion_to_the_same_destination_is_left_alone(
    plain: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    make = destination_module.temporary_directory
    with make(out) as one, make(out) as other:
        assert one.is_dir()
        assert other.is_dir()
    assert os.listdir(tmp_path) == ["plain"]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((), "Missing argument"),
        (("SRC", "--to", "dcp"), "Missing argument 'SOURCE...'"),
        (("SRC", "out"), "Missing option"),
        (("SRC", "out", "--to", "zip"), "the format to write must be one of"),
        (("SRC", "out", "--to", "dcp", "--from", "zip"), "the format to read must be one of"),
        (("nowhere", "out", "--to", "dcp"), "nowhere does not exist"),
        (("EMPTY", "out", "--to", "dcp"), "is not recognized as any of"),
        (("SRC", "out", "--to", "dcp", "--memory", "much"), "--memory: a size must look like"),
        (("SRC", "out", "--to", "dcp", "--memory", "1MB"), "64.0 MiB of memory, got 976.6 KiB"),
        (("SRC", "out", "--to", "dcp", "--dtype", "int3"), "--dtype must be one of"),
        (("SRC", "out", "--to", "dcp", "--only", "all"), "only must be one of model"),
        (("SRC", "out", "--to", "dcp", "--include", "x*"), "a name that matches 'x*'"),
        (("SRC", "SRC", "out", "--to", "dcp"), "have the master of 'weight' twice"),
        (("SRC", "out", "--to", "dcp", "--momentum-convention", "x"), "momentum_convention must"),
    ],
)
def test_wrong_calls(
    arguments: tuple[str, ...], expected: str, plain: Path, tmp_path: Path
) -> None:
    (tmp_path / "empty").mkdir()
    places = {"SRC": str(plain), "out": str(tmp_path / "out"), "EMPTY": str(tmp_path / "empty")}
    with no_trace(tmp_path):
        code, _, error = call("convert", *(places.get(text, text) for text in arguments))
    assert code == 2
    assert expected in " ".join(error.replace("│", " ").split())


def test_a_run_in_use_is_refused(tmp_path: Path) -> None:
    from tests.support.toy import Toy

    toy = Toy(tmp_path / "run")
    toy.step()
    code, _, error = call("convert", tmp_path / "run", tmp_path / "out", "--to", "dcp")
    assert (code, "is in use by" in error) == (2, True)
    toy.store.close()
    assert call("convert", tmp_path / "run", tmp_path / "out", "--to", "dcp")[0] == 0
