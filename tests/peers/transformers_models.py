"""Models as transformers makes them, on the meta device.

``python -m tests.peers.transformers_models`` writes the listings anew that tests without
transformers compare with.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from tests.support.model_configs import LISTINGS, small_configs

# Model types that transformers does not know, and the one whose code such models use.
_SAME_AS = {"kimi_k2": "deepseek_v3"}


def model_of(config: Mapping[str, Any]) -> nn.Module:
    """Return the model that transformers makes of a config."""
    from transformers import AutoConfig, AutoModelForCausalLM

    values = dict(config)
    model_type = values.pop("model_type")
    made = AutoConfig.for_model(_SAME_AS.get(model_type, model_type), **values)
    with torch.device("meta"):
        model: nn.Module = AutoModelForCausalLM.from_config(made)
    return model


def named_parameters(config: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the parameters of the model that transformers makes, as a listing."""
    return {
        name: {"shape": list(parameter.shape), "dtype": str(parameter.dtype).removeprefix("torch.")}
        for name, parameter in model_of(config).named_parameters()
    }


def main() -> None:
    """Write a listing for each config of few layers, with a line for each parameter."""
    for name, config in small_configs().items():
        lines = (
            f"{json.dumps(key)}: {json.dumps(value)}"
            for key, value in named_parameters(config).items()
        )
        text = "{\n" + ",\n".join(lines) + "\n}\n"
        (LISTINGS / f"{name}.json").write_text(text)


if __name__ == "__main__":
    main()
