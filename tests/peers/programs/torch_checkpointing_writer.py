"""torch_checkpointing saves a model and its optimizer, and says what they are.

    python torch_checkpointing_writer.py CASES RANK RANKS PORT

``CASES`` is a JSON file, a list of dicts with the fields of ``Case``. Each case writes below its
``directory`` what huggingface_writer.py does.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_writer import STEPS, Net, Recorder, optimizers_of, train


@dataclass(kw_only=True)
class Case:
    """One checkpoint to write."""

    directory: str
    safe: bool = False
    """True if the model is in files of safetensors."""
    described: bool = True
    """True if metadata.pkl is written."""


class OnCpu:
    """Stands for torch in the module that gathers metadata, which asks for tensors on CUDA."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def tensor(self, *values: Any, device: str, **options: Any) -> torch.Tensor:
        """Return a tensor on the CPU."""
        return torch.tensor(*values, **options)


def run(case: Case, ranks: int) -> None:
    """Write one case."""
    from torch.distributed.checkpoint.state_dict import get_state_dict
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Shard
    from torch_checkpointing import CheckpointManager, ItemSpec, SyncCheckpointSaverConfig
    from torch_checkpointing.checkpoint_layout import LayoutInfo, SafetensorsSerialization
    from torch_checkpointing.default_resharder import DefaultResharder
    from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

    model = Net()
    if ranks > 1:
        # One matrix is cut along its columns.
        other = model.get_submodule("again").weight
        fully_shard(
            model,
            mesh=init_device_mesh("cpu", (ranks,)),
            shard_placement_fn=lambda parameter: Shard(1) if parameter is other else None,
        )
    optimizers = optimizers_of([model])
    recorder = Recorder(case.directory, [model])
    for _ in range(STEPS):
        train([model], optimizers)
    states = dict(zip(("model", "optimizer"), get_state_dict(model, optimizers), strict=True))
    resharder = DefaultResharder() if case.described else None
    layout = LayoutInfo("model_{rank}.safetensors", SafetensorsSerialization())
    items = {
        "model": ItemSpec(resharder=resharder, layout=layout if case.safe else None),
        "optimizer": ItemSpec(resharder=resharder),
    }
    config = CheckpointManager.Config(
        items=items,
        save=SyncCheckpointSaverConfig(),
        storage_config=LocalFileSystemStorageConfig(use_direct_io=False),
    )
    manager = CheckpointManager(config)
    payload = {**states, "step": STEPS, "train_state": {"seen": torch.tensor(7)}}
    manager.save(str(recorder.folder / "checkpoint"), payload)
    manager.close()
    recorder.states(optimizers)
    train([model], optimizers, step=False)
    recorder.gradients()
    optimizers[0].step()
    recorder.masters()


def main() -> None:
    """Run all cases on one rank."""
    path, rank, ranks, port = sys.argv[1:]
    torch.set_num_threads(1)
    if int(ranks) > 1:
        os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        torch.distributed.init_process_group("gloo")
        from torch_checkpointing import metadata_manager

        metadata_manager.torch = OnCpu()
        torch.Tensor.cuda = lambda tensor: tensor  # type: ignore[method-assign,assignment]
    for fields in json.loads(Path(path).read_text()):
        case = Case(**fields)
        print(f"case {case.directory}", flush=True)
        torch.manual_seed(0)
        run(case, int(ranks))


if __name__ == "__main__":
    main()
