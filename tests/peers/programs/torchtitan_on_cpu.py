"""Run a program of torchtitan 0.2 on a CPU: what needs a GPU in its Trainer is left out.

Usage: torchtitan_on_cpu.py PROGRAM ARGUMENTS...
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from unittest import mock

import torch
from torch.distributed.fsdp import FSDPModule

# Its kernels for experts need triton. It asks torch for the device when it is imported.
sys.modules["torchtitan.models.moe.kernels"] = mock.MagicMock()
with mock.patch.object(torch._utils, "_get_available_device_type", return_value="cpu"):
    from torchtitan.components import metrics
    from torchtitan.distributed import utils


divide = FSDPModule.set_gradient_divide_factor


class Monitor:
    """Memory of a device that has none."""

    device_name = "cpu"

    def get_peak_stats(self) -> metrics.DeviceMemStats:
        return metrics.DeviceMemStats(0.0, 0.0, 0.0, 0.0, 0, 0)

    def reset_peak_stats(self) -> None:
        pass


metrics.build_device_memory_monitor = Monitor
# gloo has no sum that is multiplied before.
FSDPModule.set_gradient_divide_factor = lambda module, factor: (
    divide(module, factor),
    module.set_force_sum_reduction_for_comms(True),
)
utils.set_pg_timeouts = lambda timeout, parallel_dims: None  # Its barrier names a GPU.

program, *arguments = sys.argv[1:]
sys.argv = [program, *arguments]
sys.path.insert(0, str(Path(program).parent))
runpy.run_path(program, run_name="__main__")
