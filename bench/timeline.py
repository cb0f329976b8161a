"""Timeline of a few training steps: computation, transfers and commits that overlap.

Without ``--trace`` a small model with its state on disk is profiled. With ``--trace`` a trace of
``torch.profiler`` from any run is drawn: a trace of all threads, as in docs/guide/tiers.md, with
``record_function("forward")`` and ``record_function("backward")`` around these.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from measuring import MIB, DirectoryOption, SmallOption, profile_threads, scratch_folder
from torch import nn
from torch.profiler import ProfilerActivity, record_function

import muon
import tierstore

# Kind -> lane and colour. Nested ranges come after the outer range and are drawn on top.
KINDS = {
    "forward": ("training thread", "#9ecae1"),
    "backward": ("training thread", "#4292c6"),
    "momentum": ("training thread", "#fdae6b"),
    "gather": ("training thread", "#bcbddc"),
    "newton_schulz": ("training thread", "#e6550d"),
    "scatter": ("training thread", "#dadaeb"),
    "apply": ("training thread", "#fdd0a2"),
    "adamw": ("training thread", "#756bb1"),
    "spread": ("training thread", "#fa9fb5"),
    "check": ("training thread", "#bdbdbd"),
    "checksums": ("training thread", "#737373"),
    "late checksums": ("late writes", "#737373"),
    "stall": ("training thread", "#de2d26"),
    "gloo:all_to_all": ("exchange", "#8c6bb1"),
    "gloo:broadcast": ("exchange", "#dd1c77"),
    "swap_in": ("swap_in", "#31a354"),
    "swap_out": ("swap_out", "#006d2c"),
    "commit": ("commit", "#8c510a"),
    "kernels": ("GPU: kernels", "#e6550d"),
    "HtoD": ("GPU: copies in", "#31a354"),
    "DtoH": ("GPU: copies out", "#006d2c"),
}

TRAINING = {kind for kind, (lane, _) in KINDS.items() if lane == "training thread"} - {"checksums"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Parameters of the profiled training."""

    width: int
    layers: int
    rows: int
    """Rows of the embedding, which AdamW steps; Muon steps the matrices."""
    batch: int
    page_bytes: int
    steps: int
    """Number of steps to draw."""


PLANS = {
    "small": Plan(width=32, layers=2, rows=4096, batch=16, page_bytes=MIB // 2, steps=2),
    "default": Plan(width=512, layers=2, rows=98304, batch=512, page_bytes=64 * MIB, steps=2),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """One range of the trace, in seconds."""

    kind: str
    start_s: float
    duration_s: float


def profile_training(directory: Path, plan: Plan, trace: Path) -> None:
    """Write the trace of consecutive training steps."""
    torch.manual_seed(0)
    layers: list[nn.Module] = [nn.Embedding(plan.rows, plan.width)]
    for _ in range(plan.layers):
        layers += [nn.Linear(plan.width, 4 * plan.width), nn.ReLU()]
        layers += [nn.Linear(4 * plan.width, plan.width)]
    model = nn.Sequential(*layers).bfloat16()
    tokens = torch.randint(plan.rows, (plan.batch,))
    with tierstore.TierStore(
        directory / "run", host_memory=8 * plan.page_bytes, page_bytes=plan.page_bytes, buffers=4
    ) as store:
        optimizer = muon.Muon(muon.param_groups(model), store=store)

        def train() -> None:
            with record_function("forward"):
                loss = model(tokens).square().mean()
            with record_function("backward"):
                loss.backward()
            optimizer.step()
            store.commit()
            optimizer.zero_grad()

        for _ in range(2):  # The first write of a file costs more.
            train()
        with profile_threads(ProfilerActivity.CPU) as profiled:
            for _ in range(plan.steps):
                train()
            store.synchronize()
    profiled.export_chrome_trace(str(trace))


def read_spans(trace: Path) -> list[Span]:
    """Return the ranges of a trace to draw.

    Raises:
        typer.BadParameter: the trace has no such ranges.
    """
    data = trace.read_bytes()
    events = json.loads(gzip.decompress(data) if trace.suffix == ".gz" else data)["traceEvents"]
    found = [
        (kind, event)
        for event in events
        if event.get("ph") == "X" and (kind := _kind_of(event)) in KINDS
    ]
    if not found:
        raise typer.BadParameter(f"{trace} has no ranges of tierstore or muon")
    # With a GPU, a separate thread computes checksums after pages are copied back.
    training = {event.get("tid") for kind, event in found if kind in TRAINING}
    return [
        Span(
            kind="late checksums"
            if kind == "checksums" and event.get("tid") not in training
            else kind,
            start_s=event["ts"] / 1e6,
            duration_s=event["dur"] / 1e6,
        )
        for kind, event in found
    ]


def _kind_of(event: dict[str, Any]) -> str:
    match event.get("cat"), event["name"].split():
        case "user_annotation", [name, *_]:
            return str(name.split("::")[-1])
        case "kernel", _:
            return "kernels"
        case "gpu_memcpy", [_, direction, *_]:
            return str(direction)
    return ""


def draw(spans: Mapping[str, Sequence[Span]], picture: Path) -> None:
    """Draw one lane for each thread, with time to the right.

    Args:
        spans: prefix of lanes, such as "rank 0: " -> ranges.
        picture: the file to write.
    """
    from matplotlib import pyplot

    lanes = list(
        dict.fromkeys(
            f"{prefix}{lane}"
            for prefix, ranges in spans.items()
            for kind, (lane, _) in KINDS.items()
            if any(span.kind == kind for span in ranges)
        )
    )
    everything = [span for ranges in spans.values() for span in ranges]
    began_s = min(span.start_s for span in everything)
    labels = set[str]()
    figure, axes = pyplot.subplots(figsize=(13, 1 + 0.4 * len(lanes)), layout="constrained")
    for kind, (lane, colour) in KINDS.items():
        for prefix, ranges in spans.items():
            bars = [(s.start_s - began_s, s.duration_s) for s in ranges if s.kind == kind]
            if bars:
                bottom = -lanes.index(f"{prefix}{lane}") - 0.4
                label = None if kind in labels else kind
                labels.add(kind)
                axes.broken_barh(bars, (bottom, 0.8), color=colour, label=label, linewidth=0)
    axes.set_yticks([-index for index in range(len(lanes))], lanes)
    axes.set_xlabel("seconds")
    axes.set_xlim(0, max(span.start_s + span.duration_s for span in everything) - began_s)
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside right center", frameon=False, handlelength=1)
    figure.savefig(picture, dpi=110)
    pyplot.close(figure)


def main(
    picture: Annotated[Path, typer.Option(help="The picture to write.")] = Path("timeline.png"),
    trace: Annotated[
        Path | None, typer.Option(help="A trace to draw, from export_chrome_trace().")
    ] = None,
    directory: DirectoryOption = Path("."),
    small: SmallOption = False,
) -> None:
    """Draw the timeline of a few training steps."""
    with scratch_folder(directory) as scratch:
        if trace is None:
            trace = scratch / "trace.json"
            profile_training(scratch, PLANS["small" if small else "default"], trace)
        draw({"": read_spans(trace)}, picture)


if __name__ == "__main__":
    typer.run(main)
