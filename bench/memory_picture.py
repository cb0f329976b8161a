"""Memory of Llama 3.1 8B under AdamW on one GPU of 24 GB, with and without tierstore, as a picture.

``tierstore fit`` gives the plan with the least memory; nothing is measured. Without tierstore the
GPU holds the same parameters and activations, all gradients, and all optimizer state.
"""

from __future__ import annotations

import io
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from measuring import JsonOption, write_report
from planning import FITS, fitted
from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from matplotlib.axes import Axes

ARGUMENTS = f"{FITS['8B, one card, AdamW']} --checkpoints 0"
"""Arguments of ``tierstore fit``."""

GB = 1e9

# Colours of Okabe and Ito, in the order of the pictures of `tierstore plan`.
COLOURS = {
    "parameters": "#0072b2",
    "gradients": "#e69f00",
    "masters": "#009e73",
    "Adam moments": "#cc79a7",
    "activations": "#56b4e9",
    "pages": "#d55e00",
    "program": "#999999",
    "second copy": "none",
}
INK = "#0a0b0c"  # Becomes currentColor.
LABELS = {"Adam moments": "Adam\nmoments", "second copy": "second copy\nfor commits"}
"""Parts in two lines of text."""
OUTLINE: dict[str, Any] = {"edgecolor": INK, "hatch": "///", "linewidth": 0.6}
TITLE = "Llama 3.1 8B with AdamW on one GPU of 24 GB: GB in each place, planned"
STYLE = {
    "svg.fonttype": "none",
    "svg.hashsalt": "tierstore",
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 10.5,
    "text.color": INK,
    "hatch.linewidth": 0.8,
}
PAGE = """
<style>
  svg { color: #1a1a1a }
  #page { fill: #ffffff }
  @media (prefers-color-scheme: dark) { svg { color: #e6edf3 } #page { fill: #0d1117 } }
</style>
<rect id="page" width="100%" height="100%"/>
"""
"""The picture brings its own background, because a page cannot set the colour of its text."""

MASTER_SHARE = 1 / 3
"""Of the state under AdamW: a master and two moments, each in float32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """Memory of one place."""

    place: str
    parts: Mapping[str, float]
    """Part of COLOURS -> bytes."""
    limit: float
    """Bytes of this memory."""

    @property
    def nbytes(self) -> float:
        """All parts together."""
        return sum(self.parts.values())


def plan_with_least_memory(answer: Mapping[str, Any]) -> dict[str, Any]:
    """Return the plan that takes the least memory of those that ``tierstore fit`` found."""
    titles = {one["title"]: one for one in answer["plans"]}
    chosen = titles.get("least memory", answer["plans"][0])
    assert chosen["lossless"]
    plan: dict[str, Any] = chosen["plan"]
    return plan


def columns_with(plan: Mapping[str, Any]) -> list[Column]:
    """Return the columns of a plan: GPU, host memory, NVMe.

    Copies of parameters in transit, 2% of the copies on the host, count as gradients.
    """
    needs = {need["place"]: need for need in plan["needs"]}
    gpu, host, nvme = (dict(needs[place]["parts"]) for place in ("GPU", "host", "NVMe"))
    state = nvme.pop("pages of the run")
    columns = [
        Column(
            place="GPU",
            parts={
                "parameters": gpu.pop("parameters"),
                "gradients": gpu.pop("gradients"),
                "activations": gpu.pop("activations") + gpu.pop("logits", 0),
                "pages": gpu.pop("pages on the device", 0),
                "program": gpu.pop("context of CUDA"),
            },
            limit=needs["GPU"]["limit"],
        ),
        Column(
            place="host memory",
            parts={
                "gradients": host.pop("copies of gradients and parameters"),
                "pages": host.pop("buffers of pages", 0) + host.pop("pages that rest there", 0),
                "program": host.pop("the program"),
            },
            limit=needs["host"]["limit"],
        ),
        Column(
            place="NVMe",
            parts={
                "masters": MASTER_SHARE * state,
                "Adam moments": (1 - MASTER_SHARE) * state,
                "second copy": nvme.pop("their second slots"),
            },
            limit=needs["NVMe"]["limit"],
        ),
    ]
    left_out = {**gpu, **host, **nvme}
    assert not left_out, f"the picture lacks {', '.join(left_out)}"
    return columns


def column_without(plan: Mapping[str, Any]) -> Column:
    """Return the GPU without tierstore: mixed precision with float32 masters, all in its memory."""
    (gpu,) = (need for need in plan["needs"] if need["place"] == "GPU")
    parameters = gpu["parts"]["parameters"]
    state = plan["rank"]["state_bytes"]
    return Column(
        place="GPU",
        parts={
            "parameters": parameters,
            "gradients": parameters,
            "masters": MASTER_SHARE * state,
            "Adam moments": (1 - MASTER_SHARE) * state,
            "activations": gpu["parts"]["activations"] + gpu["parts"].get("logits", 0),
            "program": gpu["parts"]["context of CUDA"],
        },
        limit=gpu["limit"],
    )


def draw(columns: Sequence[Column]) -> str:
    """Return the picture as SVG text: the first column without tierstore, the others with it."""
    from matplotlib import style
    from matplotlib.figure import Figure

    file = io.StringIO()
    with style.context(["default", STYLE]):
        figure = Figure(figsize=(7, 5))
        axes = figure.add_axes((0.01, 0.01, 0.98, 0.98))
        axes.set_axis_off()
        top = max(column.nbytes for column in columns) / GB
        axes.set(xlim=(0, len(columns)), ylim=(-0.22 * top, 1.24 * top))
        axes.text(0.05, 1.2 * top, TITLE, va="center", size=11.5)
        for title, start, end in (
            ("Without tierstore", 0.05, 0.95),
            ("With tierstore", 1.05, len(columns) - 0.05),
        ):
            axes.text(start, 1.1 * top, title, va="center", weight="bold", size=11.5)
            axes.plot((start, end), (1.06 * top, 1.06 * top), color=INK, linewidth=1)
        for position, column in enumerate(columns):
            draw_column(axes, position + 0.07, column, gap=0.062 * top)
        nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        figure.savefig(file, format="svg", transparent=True, metadata=nothing)
    text = file.getvalue()
    text = text[text.index("<svg") :].replace(INK, "currentColor")
    text = text.replace("<svg", f'<svg role="img" aria-label="{TITLE}"', 1)
    return re.sub(r"(<svg[^>]*>)", rf"\1{PAGE}", text, count=1)


def draw_column(axes: Axes, left: float, column: Column, *, gap: float) -> None:
    """Draw a stacked bar in an outline of the size of its memory, and label each part.

    Args:
        axes: where to draw.
        left: x of the bar.
        column: the bar.
        gap: least distance of the lines of text.
    """
    right = left + 0.22
    bottom, text = 0.0, -gap
    for part, nbytes in column.parts.items():
        size = nbytes / GB
        if not size:
            continue
        axes.bar(
            *(left, size, right - left, bottom),
            align="edge",
            color=COLOURS[part],
            **(OUTLINE if COLOURS[part] == "none" else {}),
        )
        middle = bottom + size / 2
        text = max(middle, text + gap)
        axes.plot((right, right + 0.06), (middle, text), color=INK, linewidth=0.6)
        words = LABELS.get(part, part)
        axes.text(right + 0.08, text, f"{words} {size:.{size < 9.95:d}f}", va="center")
        bottom += size
    limit = column.limit / GB
    if limit < axes.get_ylim()[1]:
        x, y = (left - 0.03, right + 0.03), (0, limit)
        axes.plot((x[0], x[0], x[1], x[1], x[0]), (*y, *y[::-1], 0), color=INK, linewidth=1.4)
    fits = bottom <= limit
    axes.text(left, -gap, column.place, va="center")
    colour = INK if fits else COLOURS["pages"]
    axes.text(left, -2 * gap, f"{bottom:.0f} GB", va="center", weight="bold", color=colour)
    axes.text(left, -3 * gap, f"of {limit:,.0f} GB", va="center", color=colour)


def report(columns: Sequence[Column]) -> Table:
    """Return the columns as a table."""
    table = Table(title="Llama 3.1 8B under AdamW, GB")
    for heading in ("", "place", *COLOURS, "together", "of"):
        table.add_column(heading, justify="right" if heading else "left")
    for position, column in enumerate(columns):
        table.add_row(
            "with" if position else "without",
            column.place,
            *(f"{column.parts.get(part, 0) / GB:.1f}" for part in COLOURS),
            f"{column.nbytes / GB:.1f}",
            f"{column.limit / GB:.0f}",
        )
    return table


def main(
    pictures: Annotated[
        Path | None, typer.Option(help="Folder for memory-8b.svg; docs/guide has the one in use.")
    ] = None,
    json_path: JsonOption = None,
) -> None:
    """Print what lies where, and draw it."""
    answer, _ = fitted(ARGUMENTS)
    plan = plan_with_least_memory(answer)
    columns = [column_without(plan), *columns_with(plan)]
    Console(width=140).print(report(columns))
    if pictures is not None:
        (pictures / "memory-8b.svg").write_text(draw(columns), encoding="utf-8")
    write_report(
        json_path,
        arguments=ARGUMENTS,
        columns=[{"place": column.place, "parts": dict(column.parts)} for column in columns],
    )


if __name__ == "__main__":
    typer.run(main)
