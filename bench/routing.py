"""Routing of common models: the share of their parameters that each rule decides.

40 models of four libraries are built from their default configurations on the meta device, without
weights, and routed by one call of muon.param_groups.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import os
import re
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
import typer
from measuring import JsonOption, SmallOption, write_report
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import nn

import muon

ABSENT = """\
not measured: not installed: {}. With a torchvision of the same build as torch (both for CPUs, or
both for one release of CUDA):

    pip install -c constraints.txt -e '.[models]'"""

RULES = ("matrix", "embedding", "head", "vector", "table", "input", "kernel", "router")


def _transformers(name: str) -> nn.Module:
    model_class: Any = getattr(importlib.import_module("transformers"), name)
    model: nn.Module = model_class(model_class.config_class())
    return model


def _timm(name: str) -> nn.Module:
    model: nn.Module = importlib.import_module("timm").create_model(name, pretrained=False)
    return model


def _torchvision(name: str) -> nn.Module:
    options = {"weights_backbone": None} if "rcnn" in name else {}
    models = importlib.import_module("torchvision.models")
    model: nn.Module = models.get_model(name, weights=None, **options)
    return model


def _diffusers(name: str) -> nn.Module:
    model: nn.Module = getattr(importlib.import_module("diffusers"), name)()
    return model


LIBRARIES: dict[str, tuple[Callable[[str], nn.Module], tuple[str, ...]]] = {
    "transformers": (
        _transformers,
        (
            "GPT2LMHeadModel",
            "LlamaForCausalLM",
            "Gemma3ForCausalLM",
            "MixtralForCausalLM",
            "Qwen3MoeForCausalLM",
            "DeepseekV3ForCausalLM",
            "GptOssForCausalLM",
            "MambaForCausalLM",
            "BertForPreTraining",
            "RobertaForSequenceClassification",
            "ModernBertForTokenClassification",
            "T5ForConditionalGeneration",
            "BartForSequenceClassification",
            "WhisperForConditionalGeneration",
            "Wav2Vec2ForCTC",
            "CLIPModel",
            "DetrForObjectDetection",
        ),
    ),
    "timm": (
        _timm,
        (
            "vit_base_patch16_224",
            "deit_base_distilled_patch16_224",
            "swin_tiny_patch4_window7_224",
            "mixer_b16_224",
            "resnet50",
            "convnext_tiny",
            "efficientnet_b0",
            "maxvit_tiny_tf_224",
        ),
    ),
    "torchvision": (
        _torchvision,
        (
            "resnet18",
            "vgg16",
            "mobilenet_v3_large",
            "densenet121",
            "inception_v3",
            "vit_b_16",
            "swin_v2_t",
            "fasterrcnn_resnet50_fpn",
        ),
    ),
    "diffusers": (
        _diffusers,
        (
            "UNet2DConditionModel",
            "AutoencoderKL",
            "DiTTransformer2DModel",
            "PixArtTransformer2DModel",
            "SD3Transformer2DModel",
            "FluxTransformer2DModel",
            "WanTransformer3DModel",
        ),
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One model. Counts are of elements, by rule."""

    library: str
    model: str
    elements: int
    elements_by_rule: dict[str, int]
    names_by_rule: dict[str, list[str]]
    """Names with shapes. Names that differ in numbers only are one, with the shape of the first."""


def route(library: str, name: str, build: Callable[[str], nn.Module]) -> Row:
    """Build a model without weights and route its parameters."""
    with torch.device("meta"):
        model = build(name)
    groups = muon.param_groups(model)
    by_rule: Counter[str] = Counter()
    names: dict[str, dict[str, tuple[int, ...]]] = {}
    for group in groups:
        for parameter_name, parameter in group["params"]:
            rule = groups.rules[parameter_name]
            by_rule[rule] += parameter.numel()
            short = re.sub(r"(?<=\.)\d+(?=\.)|(?<=layer)\d+|(?<=layer_)\d+", "*", parameter_name)
            names.setdefault(rule, {}).setdefault(short, tuple(parameter.shape))
    return Row(
        library=library,
        model=name,
        elements=by_rule.total(),
        elements_by_rule=dict(by_rule),
        names_by_rule={
            rule: [f"{short} {shape}" for short, shape in shapes.items()]
            for rule, shapes in names.items()
        },
    )


def show(rows: list[Row]) -> None:
    """Print the share of each rule in the elements of each model, in percent."""
    table = Table(title="elements by rule, %; matrix: Muon, all others: AdamW")
    for column in ("model", "library", "elements"):
        table.add_column(column)
    for rule in RULES:
        table.add_column(rule, justify="right")
    for row in rows:
        shares = [100 * row.elements_by_rule.get(rule, 0) / row.elements for rule in RULES]
        texts = [
            "" if share == 0 else f"{share:.2g}" if share < 1 else f"{share:.1f}"
            for share in shares
        ]
        table.add_row(row.model, row.library, f"{row.elements / 1e6:,.1f}M", *texts)
    Console(width=150).print(table)


def main(small: SmallOption = False, json: JsonOption = None) -> None:
    """Route 40 models of transformers, timm, torchvision and diffusers."""
    absent = [name for name in LIBRARIES if importlib.util.find_spec(name) is None]
    if absent:
        print(ABSENT.format(", ".join(absent)))
        return
    os.environ["HF_HUB_OFFLINE"] = "1"
    warnings.simplefilter("ignore")  # Of the libraries, about default configurations.
    logging.getLogger("muon").setLevel(logging.ERROR)  # The table shows the kernels.
    chosen = [
        (library, name, build)
        for library, (build, names) in LIBRARIES.items()
        for name in (names[:1] if small else names)
    ]
    rows = [route(*model) for model in track(chosen, transient=True, console=Console(stderr=True))]
    show(rows)
    versions = {name: importlib.import_module(name).__version__ for name in LIBRARIES}
    write_report(json, versions=versions, rows=[asdict(row) for row in rows])


if __name__ == "__main__":
    typer.run(main)
