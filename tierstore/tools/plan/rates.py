"""Rates of a node and its ranks: measured by a probe, or assumed and marked as assumed."""

from __future__ import annotations

import bisect
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tierstore.errors import PlanError
from tierstore.tools.plan.drives import Drives
from tierstore.tools.plan.formula import DiskRates
from tierstore.tools.plan.job import Job
from tierstore.tools.plan.models import DTYPES
from tierstore.tools.probe.optimizers import OptimizerPlan, Work
from tierstore.tools.probe.result import OptimizerRate, Probe

# Without a probe. The plan names each one. They are low rather than high.
_PCIE = 25e9
_NETWORK = 25e9
_CHECKSUM = 8e9
_CORES = 16
_COMMIT_S = 0.01
_CPU_FLOPS, _CPU_MEMORY = 200e9, 20e9
_GPU_FLOPS, _GPU_MEMORY = 200e12, 1.5e12

_ASSUMED_NETWORK = f"the network at {_NETWORK / 1e9:g} GB/s for each rank"

_WIDE = 2
"""Matrices with a longer side of this many times the shorter one are measured apart."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Rates of a node, in bytes per second unless said otherwise."""

    disk: DiskRates | None
    """All drives of a node together; None without drives."""
    commit_s: float
    """Seconds from the last write of a step to its commit."""
    checksum: float
    """Checksum of pages by one thread."""
    to_device: float
    """Host to GPU, of one rank."""
    from_device: float
    network: float
    """Bytes that one rank sends to others, while it receives as many."""
    flops: float
    """Floating-point operations per second of one rank, where no rate was measured."""
    memory: float
    """Memory bandwidth where steps are computed, where no rate was measured."""
    cores: int = 1
    """Cores of a node, which decide the threads of a store."""
    drives: int = 1
    """Drives of a node, or directories of the probe."""
    cpu_ranks: int = 1
    """Ranks that share the processor on which ``measured`` was measured."""
    measured: Sequence[OptimizerRate] = ()
    assumed: Sequence[str] = field(default=(), compare=False)
    """Sentences on what was not measured."""

    def __post_init__(self) -> None:
        names = ("commit_s", "checksum", "to_device", "from_device", "network", "flops", "memory")
        for name in names:
            rate = getattr(self, name)
            if not 0 < rate < math.inf:
                raise PlanError(f"the rate {name!r} must be above 0 and finite, got {rate!r}")

    def seconds(self, works: Mapping[Work, int], optimizer: OptimizerPlan) -> float:
        """Return the time of some works of an optimizer, one after the other."""
        return sum(count * self._seconds_of(work, optimizer) for work, count in works.items())

    def _seconds_of(self, work: Work, optimizer: OptimizerPlan) -> float:
        """Return the time of one work, from measured works of the same name if there are any.

        The time of a work without floating-point operations lies on a straight line through the
        measured works of the fewest and the most bytes, so that the time of a call counts. Others
        take the measured operations per second of the nearest shapes: a straight line between the
        logarithms of the shorter sides, among wide matrices or among nearly square ones.

        Example: measured are 400 GFLOP/s for 256 x 1024 and 600 for 1024 x 4096. A matrix of
        512 x 2048 is taken to run at 490: halfway between the logarithms.
        """
        flops, nbytes = optimizer.operations(work)
        name, shape, dtype = work
        found = [one for one in self.measured if one.work == name and one.dtype == dtype]
        found = found or [one for one in self.measured if one.work == name]
        if found and not flops:
            times = {_operations(one, optimizer)[1]: one.seconds.median for one in found}
            (left, low), (right, high) = min(times.items()), max(times.items())
            slope = (high - low) / (right - left) if right > left else math.inf
            # Noise and caches may give a line that makes some works free.
            slope = min(max(0.0, slope), high / right)
            return self.cpu_ranks * (high + slope * (nbytes - right))
        kinds = {_kind(one.shape): one for one in found}
        alike = [one for one in found if _kind(one.shape) == _kind(shape)]
        if not alike and kinds:  # A batch, or matrices of another form.
            alike = [one for one in found if one.shape[0] == 1] or found
        if not alike:
            return max(flops / self.flops, nbytes / self.memory)
        points = sorted(
            (math.log(min(one.shape[1:])), _operations(one, optimizer)[0] / one.seconds.median)
            for one in alike
        )
        rate = _between(points, math.log(min(shape[1:])))
        return self.cpu_ranks * flops / rate


def _operations(one: OptimizerRate, optimizer: OptimizerPlan) -> tuple[float, float]:
    count, rows, columns = one.shape
    return optimizer.operations((one.work, (count, rows, columns), one.dtype))


def _kind(shape: Sequence[int]) -> tuple[bool, bool]:
    """Return whether a shape is a batch, and whether its matrices are wide."""
    return shape[0] > 1, max(shape[1:]) >= _WIDE * min(shape[1:])


def _between(points: Sequence[tuple[float, float]], x: float) -> float:
    """Interpolate linearly between points; beyond them, return the value of the nearest one."""
    at = bisect.bisect_left(points, (x, -math.inf))
    if at == 0 or at == len(points):
        return points[min(at, len(points) - 1)][1]
    (left, low), (right, high) = points[at - 1], points[at]
    share = (x - left) / (right - left) if right > left else 1.0
    return math.exp((1 - share) * math.log(low) + share * math.log(high))


def assumed_rates(
    drives: Drives | None,
    *,
    on_gpu: bool,
    flops: float | None = None,
    pcie: float | None = None,
    network: float | None = None,
) -> Rates:
    """Return rates from figures of data sheets.

    Reads and writes at the same time share the time of a drive: each gets half of its rate.

    Args:
        drives: the drives of a node.
        on_gpu: whether steps are computed on GPUs.
        flops: operations per second that a rank achieves; None: low ones.
        pcie: bytes per second between host and GPU; None: of PCIe 4.
        network: bytes per second of a rank; None: of 200 Gbit/s.
    """
    assumed = _assumed_computation(on_gpu, flops)
    assumed += [
        f"checksums at {_CHECKSUM / 1e9:g} GB/s of each core, {_CORES} or more cores in a node",
        f"commits in {_COMMIT_S * 1000:g} ms after the last write",
    ]
    if on_gpu and pcie is None:
        assumed.append(f"copies between host and GPU at {_PCIE / 1e9:g} GB/s")
    if network is None:
        assumed.append(_ASSUMED_NETWORK)
    return Rates(
        disk=None if drives is None else disk_rates(drives),
        commit_s=_COMMIT_S,
        checksum=_CHECKSUM,
        to_device=_PCIE if pcie is None else pcie,
        from_device=_PCIE if pcie is None else pcie,
        network=_NETWORK if network is None else network,
        flops=_flops(on_gpu) if flops is None else flops,
        memory=_memory(on_gpu),
        cores=_CORES,
        drives=1 if drives is None else drives.count,
        assumed=tuple(assumed),
    )


def rates_for(
    job: Job,
    probe: Probe | None,
    *,
    on_gpu: bool,
    pcie: float | None = None,
    network: float | None = None,
) -> Rates:
    """Return the rates of the machines of a job.

    Args:
        job: the job.
        probe: what was measured; None: figures of data sheets.
        on_gpu: whether pages are stepped on GPUs.
        pcie: as for measured_rates().
        network: as for measured_rates().

    Raises:
        PlanError: as measured_rates().
    """
    flops = job.flops if on_gpu or not job.on_gpu else None
    given: dict[str, Any] = {"on_gpu": on_gpu, "flops": flops, "pcie": pcie, "network": network}
    if probe is None:
        return assumed_rates(job.drives, **given)
    return measured_rates(probe, cpu_ranks=job.node_size, **given)


def _flops(on_gpu: bool) -> float:
    return _GPU_FLOPS if on_gpu else _CPU_FLOPS


def _memory(on_gpu: bool) -> float:
    return _GPU_MEMORY if on_gpu else _CPU_MEMORY


def _assumed_computation(on_gpu: bool, flops: float | None) -> list[str]:
    products = f"{_flops(on_gpu) / 1e12:g} TFLOP/s"
    if flops is not None:
        products = f"the {flops / 1e12:g} TFLOP/s of the model"
    memory = f"{'GPU' if on_gpu else 'CPU'} at {_memory(on_gpu) / 1e9:g} GB/s"
    return [f"matrix products of the optimizer at {products}", f"memory of the {memory}"]


def disk_rates(drives: Drives) -> DiskRates:
    """Return the rates of equal drives over which pages are striped."""
    read, write = drives.count * drives.read_rate, drives.count * drives.write_rate
    return DiskRates(read=read, write=write, mixed_read=read / 2, mixed_write=write / 2)


def measured_rates(
    probe: Probe,
    *,
    on_gpu: bool,
    cpu_ranks: int = 1,
    flops: float | None = None,
    pcie: float | None = None,
    network: float | None = None,
) -> Rates:
    """Return the rates of the machine that a probe measured.

    Args:
        probe: of one node, with a directory for each drive.
        on_gpu: whether steps are computed on GPUs.
        cpu_ranks: ranks that share the processor, if steps are computed there.
        flops: operations per second that a rank achieves, where no optimizer was measured.
        pcie: bytes per second between host and GPU; None: what was measured.
        network: bytes per second of a rank, which a probe does not measure.

    Raises:
        PlanError: the probe has no directory with direct I/O, no GPU though ``on_gpu``, or an
            impossible rate or shape.
    """
    compute = probe.compute
    if not probe.directories:
        raise PlanError("the probe has no directory: probe directories on the drives of the job")
    if on_gpu and (compute.host_to_device is None or compute.device_to_host is None):
        raise PlanError(
            f"the probe of {probe.machine.host} is of a machine without a GPU, and the job has "
            "GPUs: probe a machine of the job, or plan without a probe"
        )
    device = "cuda" if on_gpu else "cpu"
    measured = [one for one in compute.optimizers if one.device.startswith(device)]
    for one in measured:
        good = len(one.shape) == 3 and min(one.shape) >= 1 and one.seconds.median > 0
        if not good or one.dtype not in DTYPES:
            raise PlanError(
                f"the probe has the work {one.work!r} of shape {list(one.shape)}, dtype "
                f"{one.dtype!r} and {one.seconds.median:.6g} s, which cannot be: probe again"
            )
    assumed = [] if measured else _assumed_computation(on_gpu, flops)
    if network is None:
        assumed.append(_ASSUMED_NETWORK)
    to_device, from_device = compute.host_to_device, compute.device_to_host
    return Rates(
        disk=_probed_disk(probe),
        commit_s=max(one.commit_seconds.median for one in probe.directories),
        checksum=compute.checksum.median,
        to_device=pcie or (to_device.median if to_device else _PCIE),
        from_device=pcie or (from_device.median if from_device else _PCIE),
        network=_NETWORK if network is None else network,
        flops=_flops(on_gpu) if flops is None else flops,
        memory=_memory(on_gpu),
        cores=probe.machine.cores,
        drives=len(probe.directories),
        cpu_ranks=1 if on_gpu else cpu_ranks,
        measured=measured,
        assumed=tuple(assumed),
    )


def _probed_disk(probe: Probe) -> DiskRates:
    bandwidths = probe.together or probe.directories[0].bandwidths
    if bandwidths.read is None or bandwidths.mixed is None:
        raise PlanError(
            "the probe has no rate of reads, because a directory has no O_DIRECT: probe "
            "directories on the drives of the job, or plan with the figures of the drives"
        )
    mixed = bandwidths.mixed.median / 2  # The bytes of both directions count.
    return DiskRates(
        read=bandwidths.read.median,
        write=bandwidths.write.median,
        mixed_read=mixed,
        mixed_write=mixed,
    )
