"""The sources of a case that Trainer or accelerate wrote, and all tensors of a destination."""

from __future__ import annotations

from pathlib import Path

import torch

from tests.support.published import tensors_in
from tierstore.tools.convert.convert import Conversion, convert


def sources_of(folder: Path) -> list[Path]:
    """Return the checkpoint, and the file of names where no file of it tells an order."""
    checkpoint = folder / "checkpoint"
    needs_names = any(checkpoint.glob("*.safetensors"))
    return [checkpoint, folder / "names.pt"] if needs_names else [checkpoint]


def converted(
    folder: Path, out: Path, to: str, *, names: bool = True
) -> tuple[Conversion, dict[str, torch.Tensor]]:
    """Convert a case; return what was carried, under the keys of DCP.

    Files of torch.save are read with torch.load, all others through a conversion to DCP.

    Args:
        folder: of the case.
        out: the destination.
        to: its format.
        names: whether to name also the file of names, where no other one tells an order.
    """
    sources = sources_of(folder) if names else [folder / "checkpoint"]
    conversion = convert(sources, out, to=to, assume_model_order=True)
    if to == "dcp":
        return conversion, tensors_in(out)
    if to != "torch":
        again = out.with_name(f"{out.name}-dcp")
        convert(out, again, to="dcp")
        return conversion, tensors_in(again)
    value = torch.load(out, weights_only=True)
    tensors = {f"model.{key}": tensor for key, tensor in value["model"].items()}
    for group in value["optimizer"]["param_groups"]:
        for parameter, number in zip(group["param_names"], group["params"], strict=True):
            for key, state in value["optimizer"]["state"][number].items():
                tensors[f"optimizer.state.{parameter}.{key}"] = state
    return conversion, tensors
