"""Conversions that users of other tools reported as failing.

| report | answered by |
|---|---|
| pytorch#126047: what torch_save_to_dcp wrote does not load under FSDP | here |
| pytorch#171706: convert a part of a checkpoint | here |
| accelerate#2772: the merge tool merges models, no optimizers | here |
| Megatron-LM#3912: `.metadata` without mcore_data | test_megatron.py: test_other_layouts_of_torch_dist |
| AReaL#1468: flattened_range is not supported | test_megatron.py: test_states_of_no_parameter_are_refused |
| radixark/Megatron-LM#66: unequal parts of layers and experts | test_megatron.py: test_chunks_of_several_ranks |
| Megatron-Bridge#1211, Megatron-LM#7473: weights of fsdp_dtensor alone | test_megatron.py: test_weights_alone |
| DeepSpeed#6691: resumes as if from scratch, and says nothing | test_safetensors.py: test_weights_begin_a_run, tests/checkpoint/test_begin_refused.py |
| DeepSpeed#1062, ms-swift#5685, llama.cpp#7428: memory of the size of the checkpoint | test_memory.py |
"""  # noqa: E501

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from tests.support.published import (
    Ours,
    Reference,
    assert_equal,
    read_with_stock,
    save_with_dcp,
    tensors_in,
)
from tierstore.tools.convert.convert import convert


@pytest.mark.long
def test_a_file_of_torch_save_loads_under_fsdp(tmp_path: Path) -> None:
    reference = Reference(named=True).train(1, 2)
    state = {
        "model": reference.model.state_dict(),
        "optimizers": [optimizer.state_dict() for optimizer in reference.optimizers],
    }
    torch.save(state, tmp_path / "in.pt")
    convert(tmp_path / "in.pt", tmp_path / "converted", to="dcp")
    save_with_dcp(reference, tmp_path / "stock", flat=True, prefix=True)
    options = {"flat": True, "model": "layers", "steps": [3, 4], "sharded": True}
    jobs: list[tuple[str, str, dict[str, Any]]] = [
        (name, "load", {**options, "path": str(tmp_path / name)}) for name in ("converted", "stock")
    ]
    found = read_with_stock(jobs, tmp_path / "scratch", ranks=2)
    assert_equal(found["converted"]["after"], found["stock"]["after"])


def test_a_part_of_a_checkpoint_with_its_optimizer(tmp_path: Path) -> None:
    reference = Reference().train(1, 2)
    save_with_dcp(reference, tmp_path / "stock", flat=False, prefix=True)
    options: dict[str, Any] = {"include": ["hidden.*", "norm.*"], "exclude": ["*.bias"]}
    convert(tmp_path / "stock", tmp_path / "part", to="dcp", **options)
    names = ("hidden.weight", "norm.weight")
    expected = {
        key: tensor
        for key, tensor in tensors_in(tmp_path / "stock").items()
        if any(f".{name}." in f"{key}." for name in names)
    }
    found = tensors_in(tmp_path / "part")
    assert_equal({key: t for key, t in found.items() if "param_groups" not in key}, expected)
    convert(tmp_path / "part", tmp_path / "part.pt", to="torch")
    loaded = torch.load(tmp_path / "part.pt")
    assert loaded["model"].keys() == set(names)
    groups = loaded["optimizer"]["param_groups"]
    assert [group["param_names"] for group in groups] == [["hidden.weight"], ["norm.weight"]]


def test_a_model_and_its_optimizer_of_two_directories(tmp_path: Path) -> None:
    """As FSDP's plugin of accelerate saves them: pytorch_model_fsdp_0/ and optimizer_0/."""
    reference = Reference().train(1, 2)
    state = {
        "model": {"model": reference.model.state_dict()},
        "optimizer": {"optimizer": reference.optimizer_state(flat=False)},
    }
    for name, part in state.items():
        dcp.save(part, checkpoint_id=tmp_path / name, no_dist=True)
    sources = [tmp_path / name for name in state]
    conversion = convert(sources, tmp_path / "run", to="tierstore")
    assert conversion.step is None
    ours = Ours(tmp_path / "run", resume=True)
    assert ours.optimizer.restore() == 2
    ours.model.load_state_dict({"mean": reference.model.state_dict()["mean"]}, strict=False)
    ours.train(3).store.close()
    assert_equal(dict(ours.model.state_dict()), reference.train(3).model_state())
