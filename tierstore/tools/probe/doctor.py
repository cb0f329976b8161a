"""Findings about a machine: parts that work for runs, and remedies. Measures no time."""

from __future__ import annotations

import enum
import importlib.metadata
import importlib.util
import os
import re
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from tierstore.errors import PlanError, TierstoreError
from tierstore.paging.buffers import HUGE_PAGE_BYTES, BufferPool
from tierstore.storage.select import choose_storage
from tierstore.tools.probe.calls import failed_calls
from tierstore.tools.probe.compute import machine
from tierstore.tools.probe.optimizers import load_optimizers
from tierstore.units import format_bytes

_NETWORK = re.compile(
    "nfs|cifs|smb|fuse(?!blk)|9p|lustre|gpfs|ceph|beegfs|gluster|afs|pvfs|weka|virtiofs|vboxsf"
)
_IN_MEMORY = ("tmpfs", "ramfs")
_CAP_IPC_LOCK = 14
_SMI_SECONDS_MAX = 20


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
    """Action for the user; None if there is nothing to do."""


def examine(directories: Sequence[Path]) -> list[Finding]:
    """Return what works here: packages, memory, GPU, then each directory.

    Compiles the kernels of optimizers for a GPU, and page-locks some memory. Writes small files to
    each directory, reads them back and removes them.

    Args:
        directories: existing directories that runs would use.
    """
    found = [*_packages(), *_memory(), *_gpu()]
    for directory in directories:
        found += _directory(directory)
    return found


def _packages() -> Iterator[Finding]:
    version = importlib.metadata.version("tierstore")
    yield Finding("packages", Health.GOOD, f"tierstore {version}, torch {torch.__version__}")
    spec = importlib.util.find_spec("muon")
    origin = Path(spec.origin) if spec is not None and spec.origin is not None else None
    # Another package in the same folder may have replaced the file.
    root = Path(__file__).parents[3]
    is_ours = origin == root / "muon/__init__.py" and "from muon.optimizer import Muon" in _text(
        origin
    )
    others = set(importlib.metadata.packages_distributions().get("muon", ())) - {"tierstore"}
    names = " ".join(sorted(others))
    again = f"pip uninstall {names}, then pip install --force-reinstall --no-deps tierstore"
    if not is_ours:
        yield Finding(
            "packages",
            Health.BAD,
            f"`import muon` finds {origin or 'nothing'}{f' of {names}' if others else ''}, and not "
            "the optimizer of tierstore",
            again if others else "rename that file, or start from another directory",
        )
    elif others:
        yield Finding(
            "packages",
            Health.SLOW,
            f"{names} also has a module muon: whichever is installed last replaces the other",
            again,
        )


def _memory() -> Iterator[Finding]:
    here = machine()
    limit = here.locked_memory_bytes
    if limit is None or limit >= here.memory_bytes or _may_lock_all():
        yield Finding("locked memory", Health.GOOD, "no limit")
    else:
        yield Finding(
            "locked memory",
            Health.SLOW,
            f"this user may lock {format_bytes(limit)}: larger buffers are not registered with "
            "io_uring, so that each transfer takes more time",
            "ulimit -l unlimited; in a container --ulimit memlock=-1, in a systemd unit "
            "LimitMEMLOCK=infinity",
        )
    if here.huge_pages in ("always", "madvise"):
        yield Finding("huge pages", Health.GOOD, here.huge_pages)
    else:
        yield Finding(
            "huge pages",
            Health.SLOW,
            f"{here.huge_pages or 'unknown'}: without them, direct I/O pins each 4 KiB of a buffer",
            "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled, as root",
        )


def _may_lock_all() -> bool:
    """Return whether the limit of locked memory does not hold for this process."""
    found = re.search(r"^CapEff:\s*([0-9a-f]+)$", _text(Path("/proc/self/status")), re.MULTILINE)
    # In a namespace of users the capability does not count.
    is_outermost = _text(Path("/proc/self/uid_map")).split() == ["0", "0", "4294967295"]
    return is_outermost and found is not None and bool(int(found[1], 16) >> _CAP_IPC_LOCK & 1)


def _gpu() -> Iterator[Finding]:
    if torch.cuda.is_available():
        count, name = torch.cuda.device_count(), torch.cuda.get_device_name()
        yield Finding("GPU", Health.GOOD, f"{count} x {name}, CUDA {torch.version.cuda}")
        yield _kernels(torch.device("cuda", 0))
        yield _page_locking(torch.device("cuda", 0))
        yield from _buses()
        return
    if not os.path.exists("/dev/nvidia0"):
        yield Finding("GPU", Health.GOOD, "none: steps are computed by the processor")
        return
    if torch.version.cuda is None:
        why = f"torch {torch.__version__} is built without CUDA"
        remedy = "install the torch build for the CUDA version that nvidia-smi shows"
    else:
        why = f"CUDA {torch.version.cuda} finds none"
        remedy = "look at CUDA_VISIBLE_DEVICES, and at the driver version that nvidia-smi shows"
    yield Finding(
        "GPU", Health.SLOW, f"this machine has one, and torch does not use it: {why}", remedy
    )


def _kernels(device: torch.device) -> Finding:
    """Try the kernels of the installed optimizers."""
    try:
        # Classes of other packages may have no such method.
        named = {
            name: getattr(one, "problem", lambda device: None)(device)
            for name, one in load_optimizers().items()
        }
    except PlanError as error:
        return Finding("kernels", Health.BAD, str(error), "mend what the message names")
    found = [f"{name}: {problem}" for name, problem in named.items() if problem is not None]
    if not found:
        return Finding("kernels", Health.GOOD, f"steps of {', '.join(named)} have them")
    return Finding(
        "kernels",
        Health.SLOW,
        f"steps take more passes over the memory of the GPU: {'; '.join(found)}",
        "install a C compiler (gcc, or name one in CC) and the Triton that this torch requires",
    )


def _page_locking(device: torch.device) -> Finding:
    if BufferPool(1, HUGE_PAGE_BYTES, page_locked=device).acquire().tensor.is_pinned():
        return Finding("page-locking", Health.GOOD, "the GPU copies page buffers by itself")
    return Finding(
        "page-locking",
        Health.SLOW,
        "CUDA does not page-lock page buffers: copies between host and GPU are slower, and do not "
        "overlap with steps",
        "look up the CUDA error in the warning above; the limit of locked memory may be too low",
    )


def _buses() -> Iterator[Finding]:
    """Look at the lanes of each GPU, where nvidia-smi shows them.

    The speed of a lane is not looked at: an idle GPU lowers it.
    """
    fields = "index,pcie.link.width.current,pcie.link.width.max"
    try:
        done = subprocess.run(
            ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=_SMI_SECONDS_MAX,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return
    for number, lanes, most in re.findall(r"^(\d+), (\d+), (\d+)$", done.stdout, re.MULTILINE):
        subject, is_full = f"bus of GPU {number}", int(lanes) >= int(most)
        yield Finding(
            subject,
            Health.GOOD if is_full else Health.SLOW,
            f"{lanes} of {most} lanes"
            + ("" if is_full else ": copies between host and GPU are slower in proportion"),
            None if is_full else "put the card into a slot with all lanes, and look at the BIOS",
        )


def _directory(path: Path) -> Iterator[Finding]:
    subject = str(path)
    try:
        if not path.is_dir():
            text, remedy = "not a directory", "make it, or name another one"
            yield Finding(subject, Health.BAD, text, remedy)
            return
        yield _filesystem_finding(path)
        storage, reasons = choose_storage(path)
        storage.close()
        failed = list(failed_calls(path))
    except (OSError, TierstoreError) as error:
        yield Finding(subject, Health.BAD, str(error), "mend what the message names")
        return
    for call in failed:
        health = Health.BAD if call.stops_runs else Health.SLOW
        yield Finding(subject, health, call.text, call.remedy)
    if any(call.stops_runs for call in failed):
        return
    direct = getattr(storage, "direct", False)
    how = "O_DIRECT" if direct else "no O_DIRECT: pages go through the page cache"
    if reasons or not direct:
        why = "; ".join(reasons) or "the filesystem refuses O_DIRECT"
        text, remedy = f"engine {storage.engine}, {how}: {why}", "mend what the reason names"
        yield Finding(subject, Health.SLOW, text, remedy)
    else:
        yield Finding(subject, Health.GOOD, f"engine {storage.engine}, {how}")


def _filesystem_finding(path: Path) -> Finding:
    subject, kind = str(path), _filesystem(path)
    if kind in _IN_MEMORY:
        return Finding(
            subject,
            Health.SLOW,
            f"{kind} keeps files in memory: runs take the memory that they should save, and are "
            "lost when the machine restarts",
            "name a directory on a disk",
        )
    if _NETWORK.match(kind):
        return Finding(
            subject,
            Health.SLOW,
            f"{kind} is a network filesystem: slower than a drive of this machine, and its locks "
            "may not keep other machines out of a run",
            "name a directory on a drive of this machine, and copy checkpoints",
        )
    free = os.statvfs(path)
    return Finding(
        subject, Health.GOOD, f"{kind}, {format_bytes(free.f_bavail * free.f_frsize)} free"
    )


def _filesystem(path: Path) -> str:
    """Return the type of the filesystem that a directory is on."""
    found, place = "unknown filesystem", Path()
    here = path.resolve()
    for line in _text(Path("/proc/self/mountinfo")).splitlines():
        before, _, after = line.partition(" - ")
        escaped = before.split()[4]
        mounted = Path(re.sub(r"\\(\d{3})", lambda octal: chr(int(octal[1], 8)), escaped))
        # The last one of several at one place hides the others.
        if here.is_relative_to(mounted) and len(mounted.parts) >= len(place.parts):
            found, place = after.split()[0], mounted
    return found


def _text(path: Path) -> str:
    """Return the content of a file; nothing if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
