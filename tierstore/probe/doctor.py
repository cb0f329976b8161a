"""What works for runs on this machine, and how to mend what does not. Measures nothing."""

from __future__ import annotations

import enum
import importlib.metadata
import importlib.util
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from tierstore.errors import TierstoreError
from tierstore.probe.compute import machine
from tierstore.storage.select import choose_storage
from tierstore.units import format_bytes

_NETWORK = ("nfs", "cifs", "smb", "fuse", "9p", "lustre", "gpfs", "ceph", "beegfs", "glusterfs")
_IN_MEMORY = ("tmpfs", "ramfs")
_CAP_IPC_LOCK = 14


class Health(enum.Enum):
    """The meaning of a finding for runs."""

    GOOD = "good"
    SLOW = "slow"
    """Runs work, slower or with less safety than they could."""
    BAD = "bad"
    """Runs do not work."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at."""

    subject: str
    health: Health
    text: str
    remedy: str | None = None
    """What the user can do; None if nothing needs to be done."""


def examine(directories: Sequence[Path]) -> list[Finding]:
    """Return what works here: packages, memory, GPU, then each directory.

    Writes 4 KiB to each directory, reads them back and removes them.

    Args:
        directories: existing directories that runs would use.
    """
    found = [*_packages(), *_memory(), _gpu()]
    for directory in directories:
        found += _directory(directory)
    return found


def _packages() -> Iterator[Finding]:
    version = importlib.metadata.version("tierstore")
    yield Finding("packages", Health.GOOD, f"tierstore {version}, torch {torch.__version__}")
    spec = importlib.util.find_spec("muon")
    ours = Path(__file__).parents[2] / "muon" / "__init__.py"
    owners = set(importlib.metadata.packages_distributions().get("muon", ())) - {"tierstore"}
    if owners or spec is None or spec.origin is None or Path(spec.origin) != ours:
        origin = "nothing" if spec is None else spec.origin
        others = f" of {', '.join(sorted(owners))}" if owners else ""
        names = " ".join(sorted(owners)) or "muon"
        yield Finding(
            "packages",
            Health.BAD,
            f"`import muon` finds {origin}{others}, and not the optimizer of tierstore",
            f"pip uninstall {names}, then pip install --force-reinstall --no-deps tierstore",
        )


def _memory() -> Iterator[Finding]:
    here = machine()
    if here.locked_memory_bytes is None or _may_lock_all():
        yield Finding("locked memory", Health.GOOD, "no limit")
    else:
        yield Finding(
            "locked memory",
            Health.SLOW,
            f"this user may lock {format_bytes(here.locked_memory_bytes)}: larger buffers are not "
            "registered with io_uring, so that each transfer takes more time",
            "ulimit -l unlimited; in a container --ulimit memlock=-1, in a systemd unit "
            "LimitMEMLOCK=infinity",
        )
    if here.huge_pages in ("always", "madvise"):
        yield Finding("huge pages", Health.GOOD, here.huge_pages)
    else:
        yield Finding(
            "huge pages",
            Health.SLOW,
            f"{here.huge_pages or 'the kernel has none'}: direct I/O pins each 4 KiB of a buffer",
            "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled, as root",
        )


def _may_lock_all() -> bool:
    """Return whether the limit of locked memory does not hold for this process."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    capabilities = next(line for line in status.splitlines() if line.startswith("CapEff:"))
    return bool(int(capabilities.split()[1], 16) >> _CAP_IPC_LOCK & 1)


def _gpu() -> Finding:
    if torch.cuda.is_available():
        count, name = torch.cuda.device_count(), torch.cuda.get_device_name()
        return Finding("GPU", Health.GOOD, f"{count} x {name}, CUDA {torch.version.cuda}")
    if not os.path.exists("/dev/nvidia0"):
        return Finding("GPU", Health.GOOD, "none: steps are computed by the processor")
    build = torch.version.cuda
    why = f"torch {torch.__version__} is built " + (
        f"for CUDA {build}" if build else "without CUDA"
    )
    return Finding(
        "GPU",
        Health.SLOW,
        f"this machine has one, and torch does not use it: {why}",
        "install the torch build for the CUDA version that nvidia-smi shows",
    )


def _directory(path: Path) -> Iterator[Finding]:
    subject = str(path)
    if not path.is_dir():
        text, remedy = "not a directory", "make it, or name another one"
        yield Finding(subject, Health.BAD, text, remedy)
        return
    kind = _filesystem(path)
    if kind in _IN_MEMORY:
        yield Finding(
            subject,
            Health.SLOW,
            f"{kind} keeps files in memory: runs take the memory that they should save, and are "
            "lost when the machine restarts",
            "name a directory on a disk",
        )
    elif kind.startswith(_NETWORK):
        yield Finding(
            subject,
            Health.SLOW,
            f"{kind} is a network filesystem: slower than a drive of this machine, and its locks "
            "may not keep other machines out of a run",
            "name a directory on a drive of this machine, and copy checkpoints",
        )
    else:
        free = os.statvfs(path)
        text = f"{kind}, {format_bytes(free.f_bavail * free.f_frsize)} free"
        yield Finding(subject, Health.GOOD, text)
    try:
        storage, reasons = choose_storage(path)
    except TierstoreError as error:
        yield Finding(subject, Health.BAD, str(error), "mend what the message names")
        return
    storage.close()
    direct = getattr(storage, "direct", False)
    how = "O_DIRECT" if direct else "no O_DIRECT: pages go through the page cache"
    if reasons or not direct:
        why = "; ".join(reasons) or "the filesystem refuses O_DIRECT"
        text, remedy = f"engine {storage.engine}, {how}: {why}", "mend what the reason names"
        yield Finding(subject, Health.SLOW, text, remedy)
    else:
        yield Finding(subject, Health.GOOD, f"engine {storage.engine}, {how}")


def _filesystem(path: Path) -> str:
    """Return the type of the filesystem that a directory is on."""
    device = os.stat(path).st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    found = "unknown filesystem"
    with open("/proc/self/mountinfo", encoding="utf-8", errors="replace") as mounts:
        for line in mounts:
            before, _, after = line.partition(" - ")
            if before.split()[2] == number:
                found = after.split()[0]
    return found
