"""Rates of processor and GPU, and the identity of the machine."""

from __future__ import annotations

import platform
import re
import resource
import socket
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from tierstore.paging.buffers import BufferPool
from tierstore.run.checksums import block_checksum
from tierstore.tools.probe import container
from tierstore.tools.probe.optimizers import optimizer_rates
from tierstore.tools.probe.result import Compute, Machine, Rate
from tierstore.tools.probe.rounds import measured

_BYTES = 128 << 20  # More than most caches hold.
_SECONDS_MAX = 0.5


def machine() -> Machine:
    """Return the identity of this machine."""
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    model = re.search(r"^model name\s*: (.*)$", _text("/proc/cpuinfo"), re.MULTILINE)
    mode = re.search(r"\[(\w+)\]", _text("/sys/kernel/mm/transparent_hugepage/enabled"))
    return Machine(
        host=socket.gethostname(),
        cpu=model[1].strip() if model else platform.machine(),
        cores=container.cores(),
        threads=torch.get_num_threads(),
        memory_bytes=container.memory_bytes(),
        kernel=f"{platform.system()} {platform.release()}",
        torch=torch.__version__,
        gpu=torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        locked_memory_bytes=None if limit == resource.RLIM_INFINITY else limit,
        huge_pages=mode[1] if mode else None,
    )


def compute() -> Compute:
    """Measure all rates, on the GPU if there is one.

    Raises:
        PlanError: an optimizer that is installed cannot be loaded.
    """
    has_gpu = torch.cuda.is_available()
    gpu = torch.device("cuda") if has_gpu else None
    pool = BufferPool(2, _BYTES, page_locked=gpu)
    source, destination = pool.acquire(), pool.acquire()
    numbers = source.tensor.view(torch.float32).uniform_()
    rounded = destination.tensor.view(torch.bfloat16)[: numbers.numel()]
    to_device = from_device = None
    if has_gpu:
        on_device = source.tensor.cuda()
        to_device = _rate(partial(_copy_with_gpu, on_device, source.tensor))
        from_device = _rate(partial(_copy_with_gpu, destination.tensor, on_device))
    return Compute(
        copy=_rate(lambda: destination.tensor.copy_(source.tensor)),
        checksum=_rate(
            lambda: block_checksum(source.memory, run_id="probe", page=0, offset=0, step=0)
        ),
        rounding=_rate(lambda: rounded.copy_(numbers)),
        host_to_device=to_device,
        device_to_host=from_device,
        optimizers=optimizer_rates(torch.device("cuda" if has_gpu else "cpu")),
    )


def _copy_with_gpu(destination: torch.Tensor, source: torch.Tensor) -> None:
    destination.copy_(source, non_blocking=True)
    torch.cuda.synchronize()


def _rate(work: Callable[[], object]) -> Rate:
    """Return the bytes per second of work on _BYTES bytes."""
    work()

    def one_round() -> int:
        work()
        return _BYTES

    return measured(one_round, _SECONDS_MAX)


def _text(path: str) -> str:
    """Return the content of a file of the kernel, empty if it has none."""
    return Path(path).read_text() if Path(path).exists() else ""
