from __future__ import annotations

import ctypes
import errno
import fcntl
import logging
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any, NoReturn

import pytest

from tests.support.held import Held
from tierstore.errors import RunDirectoryError
from tierstore.storage import open_storage
from tierstore.units import SECTOR_BYTES

WITHOUT_MODULES = """
import logging, sys
from pathlib import Path
for name in sys.argv[3:]:
    sys.modules[name] = None
logging.basicConfig(format="%(levelname)s %(message)s", level=logging.INFO)
from tierstore.storage import open_storage
from tierstore.units import SECTOR_BYTES
storage = open_storage(Path(sys.argv[1]), sys.argv[2])
print(storage.engine)
storage.close()
"""


@pytest.fixture
def native() -> Any:
    """The native extension; skips the test if io_uring does not work."""
    extension = pytest.importorskip(
        "tierstore.storage._native", reason="installed without liburing"
    )
    try:
        extension.UringEngine(1, 4096)
    except OSError as error:
        pytest.skip(f"the kernel refuses io_uring: {error}")
    return extension


@pytest.fixture
def libaio() -> None:
    """Skip the test if libaio is absent or forbidden, but not if the engine fails."""
    try:
        from tierstore.storage.libaio import LibaioEngine

        LibaioEngine(1, SECTOR_BYTES).close()
    except (ImportError, OSError) as error:
        pytest.skip(f"libaio is not here: {error}")


def open_without(directory: Path, engine: str, *modules: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", WITHOUT_MODULES, str(directory), engine, *modules],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def raising(error: int) -> Callable[..., NoReturn]:
    def raise_error(*_: object, **__: object) -> NoReturn:
        raise OSError(error, os.strerror(error))

    return raise_error


def test_auto_takes_io_uring_where_it_works(
    native: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "tierstore"), closing(open_storage(tmp_path)) as storage:
        assert storage.engine == "io_uring"
        assert storage.list() == []
    assert [record.levelname for record in caplog.records] == ["INFO"]
    assert "engine io_uring" in caplog.text
    assert str(tmp_path) in caplog.text


def test_auto_takes_libaio_without_the_extension(libaio: None, tmp_path: Path) -> None:
    done = open_without(tmp_path, "auto", "tierstore.storage._native")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "libaio\n"
    assert "WARNING" in done.stderr
    assert "tierstore.storage._native is not built" in done.stderr


def test_auto_falls_back_without_both(tmp_path: Path) -> None:
    done = open_without(tmp_path, "auto", "tierstore.storage._native", "libaio")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "aiofiles\n"
    assert "tierstore.storage._native is not built" in done.stderr
    assert "libaio cannot be loaded" in done.stderr


@pytest.mark.parametrize(
    ("engine", "module", "reason"),
    [
        ("io_uring", "tierstore.storage._native", "tierstore.storage._native is not built"),
        ("libaio", "libaio", "libaio cannot be loaded"),
    ],
)
def test_engine_by_name_without_its_module_is_an_error(
    tmp_path: Path, engine: str, module: str, reason: str
) -> None:
    done = open_without(tmp_path, engine, module)
    assert done.returncode != 0
    assert f"RunDirectoryError: engine '{engine}' does not work" in done.stderr
    assert reason in done.stderr


def test_missing_system_library_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def load(name: str, *_: Any, **__: Any) -> NoReturn:
        raise OSError(f"{name}: cannot open shared object file: No such file or directory")

    monkeypatch.delitem(sys.modules, "tierstore.storage.libaio", raising=False)
    for module in [name for name in sys.modules if name.split(".")[0] == "libaio"]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setattr(ctypes, "CDLL", load)
    with pytest.raises(RunDirectoryError, match=r"libaio\.so\.1: cannot open.*install"):
        open_storage(tmp_path, "libaio")


@pytest.mark.parametrize("error", [errno.EPERM, errno.ENOSYS, errno.ENOMEM])
def test_auto_falls_back_where_the_kernel_forbids_io_uring(
    native: Any,
    libaio: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    error: int,
) -> None:
    from tierstore.storage import uring

    monkeypatch.setattr(uring, "UringEngine", raising(error))
    with closing(open_storage(tmp_path)) as storage:
        assert storage.engine == "libaio"
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert f"the kernel refuses io_uring: {os.strerror(error)}" in caplog.text
    with pytest.raises(RunDirectoryError, match=f"errno {error}"):
        open_storage(tmp_path, "io_uring")


@pytest.mark.parametrize("error", [errno.EAGAIN, errno.EPERM, errno.ENOSYS])
def test_auto_falls_back_where_the_kernel_forbids_both(
    native: Any,
    libaio: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    error: int,
) -> None:
    from libaio import AIOContext

    from tierstore.storage import uring

    monkeypatch.setattr(uring, "UringEngine", raising(errno.EPERM))
    monkeypatch.setattr(AIOContext, "__init__", raising(error))
    before = Held()
    with closing(open_storage(tmp_path, "auto")) as storage:
        assert storage.engine == "aiofiles"
    before.assert_nothing_new()
    assert f"the kernel refuses libaio: {os.strerror(error)}" in caplog.text
    # EAGAIN: all contexts that the system allows are in use. The limit can be raised.
    assert ("aio-max-nr" in caplog.text) == (error == errno.EAGAIN)


def test_auto_falls_back_where_direct_io_is_refused(
    native: Any,
    libaio: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    real_open = os.open

    def open_without_direct(path: Any, flags: int, *rest: Any, **named: Any) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real_open(path, flags, *rest, **named)

    monkeypatch.setattr(os, "open", open_without_direct)
    with closing(open_storage(tmp_path)) as storage:
        assert storage.engine == "aiofiles"
        assert storage.list() == []  # The failed probe left no file.
    assert "O_DIRECT is refused" in caplog.text
    for engine in ("io_uring", "libaio"):
        with pytest.raises(RunDirectoryError, match="O_DIRECT is refused"):
            open_storage(tmp_path, engine)


@pytest.mark.parametrize("engine", ["auto", "aiofiles"])
@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EACCES, errno.EROFS])
def test_error_of_the_directory_does_not_fall_back(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    engine: str,
    error: int,
) -> None:
    monkeypatch.setattr(os, "posix_fallocate", raising(error))
    with pytest.raises(RunDirectoryError, match=os.strerror(error)):
        open_storage(tmp_path, engine)
    assert caplog.records == []
    assert os.listdir(tmp_path) == []


def test_file_in_place_of_the_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for directory in (tmp_path / "file", tmp_path / "file" / "run"):
        with pytest.raises(RunDirectoryError, match="Not a directory"):
            open_storage(directory)


def test_probes_of_killed_processes_are_removed(tmp_path: Path) -> None:
    others = ["probe-0123456789abcdef.tmp.old", "probe-0123456789ABCDEF.tmp", "probe-12.tmp"]
    for name in ("probe-0123456789abcdef.tmp", *others):
        (tmp_path / name).write_bytes(b"x")
    with closing(open_storage(tmp_path, "aiofiles")) as storage:
        assert storage.list() == sorted(others)


def test_probe_of_a_running_process_is_not_removed(tmp_path: Path) -> None:
    probe = tmp_path / "probe-0123456789abcdef.tmp"
    probe.touch()
    directory = os.open(tmp_path, os.O_RDONLY)
    try:
        fcntl.flock(directory, fcntl.LOCK_SH)  # As a probe does.
        with closing(open_storage(tmp_path, "aiofiles")):
            assert probe.exists()
    finally:
        os.close(directory)


def test_running_probe_survives_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real_fallocate = os.posix_fallocate

    def open_another_first(*arguments: Any) -> None:
        monkeypatch.undo()
        open_storage(tmp_path, "aiofiles").close()
        real_fallocate(*arguments)

    monkeypatch.setattr(os, "posix_fallocate", open_another_first)
    with closing(open_storage(tmp_path, "aiofiles")) as storage:
        assert storage.list() == []


def test_unknown_engine_lists_the_choices(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="'auto', 'io_uring', 'libaio', 'aiofiles', got 'floppy'"):
        open_storage(tmp_path / "run", "floppy")
    assert not (tmp_path / "run").exists()
