"""Pictures of a plan as SVG text: memory, the lanes of a step, and curves.

Text stays text. Ink has the colour of the text around the picture, on a light or a dark page.
"""

from __future__ import annotations

import html
import io
import math
import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from tierstore.errors import PlanError
from tierstore.tools.plan.curves import Point
from tierstore.tools.plan.formula import StepTime
from tierstore.tools.plan.memory import Need
from tierstore.tools.plan.wording import seconds_text, short_text
from tierstore.units import format_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_WIDTH = 5.0
"""Inches, or 360 pixels: text is readable on a phone."""
_NEED_INCHES, _LINE = 1.05, 0.19
"""Height of a bar with title and axis, and of a line of its legend."""
_INK = "#0a0b0c"  # Becomes currentColor.
_RULE = "#8a8b8c"  # Grid and other faint lines; seen on white and on black.

# Colours of Okabe and Ito, which people with any colour vision can tell apart.
_ORANGE, _SKY, _GREEN, _YELLOW = "#e69f00", "#56b4e9", "#009e73", "#f0e442"
_BLUE, _VERMILLION, _PURPLE, _GREY = "#0072b2", "#d55e00", "#cc79a7", "#999999"
_MARKS = ("above the limit", "limit")
_PARTS = (_BLUE, _ORANGE, _GREEN, _PURPLE, _SKY, _VERMILLION, _YELLOW, _GREY)
_OF_LANE = {
    "model": _GREY,
    **dict.fromkeys(("read", "write", "commit"), _BLUE),
    **dict.fromkeys(("check", "seal"), _ORANGE),
    **dict.fromkeys(("copy in", "copy out"), _GREEN),
    **dict.fromkeys(("gather", "scatter", "spread"), _PURPLE),
    "compute": _VERMILLION,
}

_STYLE = {
    "svg.fonttype": "none",
    "svg.hashsalt": "tierstore",
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 9.0,
    "axes.titlesize": 9.0,
    "axes.titlelocation": "left",
    "legend.fontsize": 9.0,
    "legend.frameon": False,
    "legend.borderpad": 0.2,
    "legend.columnspacing": 1.0,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "grid.color": _RULE,
    "grid.alpha": 0.35,
    "grid.linewidth": 0.6,
    **dict.fromkeys(
        ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), _INK
    ),
}


def needs_picture(needs: Sequence[Need], label: str) -> str:
    """Return a stacked bar for each kind of memory, its limit marked.

    Args:
        needs: one for each bar.
        label: what the picture shows, for people who do not see it.
    """
    heights = [_NEED_INCHES + _LINE * math.ceil(_entries(need) / 2) for need in needs]
    height = sum(heights)

    def draw(figure: Figure) -> None:
        top = height
        for need, inches in zip(needs, heights, strict=True):
            axes = figure.add_axes((0.06, (top - 0.55) / height, 0.88, 0.3 / height))
            _draw_need(axes, need)
            top -= inches

    return _svg("memory", height, label, draw)


def _entries(need: Need) -> int:
    """Return the number of entries of a legend."""
    return len(need.parts) + (need.limit is not None) + (not need.fits)


def _draw_need(axes: Axes, need: Need) -> None:
    from matplotlib.ticker import MaxNLocator

    unit, scale = _unit_of(max(need.nbytes, need.limit or 0))
    left = 0.0
    for (part, nbytes), colour in zip(need.parts.items(), _PARTS, strict=False):
        axes.barh(0, nbytes / scale, left=left, color=colour, label=part)
        left += nbytes / scale
    if need.limit is not None:
        limit = need.limit / scale
        if not need.fits:
            over = axes.barh(0, left - limit, left=limit, color="none", label=_MARKS[0])
            over.patches[0].set(edgecolor=_INK, hatch="////", linewidth=0)
        axes.axvline(limit, color=_INK, linewidth=2, label=_MARKS[1])
    axes.set_title(need_text(need))
    axes.set_xlim(0, 1.02 * max(left, (need.limit or 0) / scale))
    axes.set_ylim(-0.5, 0.5)
    axes.set_yticks([])
    axes.spines["left"].set_visible(False)
    axes.xaxis.set_major_locator(MaxNLocator(6))
    axes.xaxis.set_major_formatter(f"{{x:g}} {unit}")
    handles, labels = axes.get_legend_handles_labels()
    order = sorted(range(len(labels)), key=lambda index: labels[index] in _MARKS)
    axes.legend(
        [handles[index] for index in order],
        [labels[index] for index in order],
        loc="upper left",
        bbox_to_anchor=(-0.05, -0.75),
        ncols=2,
    )


def need_text(need: Need) -> str:
    """Return the bytes that are needed, and the bytes that there are."""
    limit = "" if need.limit is None else f" of {format_bytes(need.limit)}"
    return f"{place_text(need)}: {format_bytes(need.nbytes)}{limit}"


def place_text(need: Need) -> str:
    """Return whose memory it is."""
    return {"GPU": "one GPU", "host": "host memory of a node", "NVMe": "drives of a node"}.get(
        need.place, need.place
    )


def _unit_of(nbytes: int) -> tuple[str, int]:
    power = min(4, max(0, (nbytes.bit_length() - 1) // 10))
    return ("B", "KiB", "MiB", "GiB", "TiB")[power], 1024**power


def step_picture(time: StepTime, label: str) -> str:
    """Return a bar for each lane of a step: the seconds that it works.

    Args:
        time: the step.
        label: what the picture shows, for people who do not see it.
    """

    def draw(figure: Figure) -> None:
        from matplotlib.ticker import MaxNLocator

        figure.set_layout_engine("constrained")
        axes = figure.subplots()
        unit, scale = ("seconds", 1) if time.seconds >= 1 else ("milliseconds", 1000)
        for row, (lane, busy_s) in enumerate(time.lanes.items()):
            axes.barh(row, busy_s, color=_OF_LANE[lane])
            where = axes.get_yaxis_transform()
            axes.text(1.02, row, seconds_text(busy_s), va="center", transform=where)
        axes.axvline(time.seconds, color=_INK, linewidth=2)
        axes.set_yticks(range(len(time.lanes)), list(time.lanes))
        axes.tick_params(axis="y", length=0)
        axes.set_ylim(len(time.lanes) - 0.5, -0.5)
        axes.set_xlim(0, 1.02 * max(time.seconds, *time.lanes.values()))
        axes.grid(axis="x")
        axes.set_title("how long each lane works, beside the step")
        axes.set_xlabel(unit)
        axes.xaxis.set_major_locator(MaxNLocator(6))
        axes.xaxis.set_major_formatter(lambda x, _: f"{scale * x:g}")

    return _svg("step", 0.8 + 0.19 * len(time.lanes), label, draw)


def model_picture(
    points: Sequence[Point],
    label: str,
    *,
    axis: str,
    own: tuple[float, float] | None,
    free: float | None,
) -> str:
    """Return the step against its tokens, or against seconds of forward and backward.

    Args:
        points: the curve.
        label: what the picture shows, for people who do not see it.
        axis: what x is.
        own: x of the job, and seconds of its step.
        free: x from which paging is free.
    """

    def draw(figure: Figure) -> None:
        axes = _draw_curve(figure, points, axis, own)
        axes.set_xscale("log")
        axes.set_yscale("log")
        if free:
            axes.axvline(free, color=_GREEN, linewidth=1.5, label="paging is free from here")
        _label_log(axes.xaxis, [point.x for point in points])
        _label_log(axes.yaxis, [point.step_s for point in points])
        figure.legend(loc="outside upper left", ncols=2)

    return _svg("tokens", 3.0, label, draw)


def drives_picture(
    points: Sequence[Point], label: str, *, axis: str, own: tuple[float, float]
) -> str:
    """Return the step against the number of drives; arguments as for ``model_picture``."""

    def draw(figure: Figure) -> None:
        from matplotlib.ticker import MaxNLocator

        axes = _draw_curve(figure, points, axis, own)
        axes.set_ylim(0, 1.1 * max(point.step_s for point in points))
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        figure.legend(loc="outside upper left", ncols=2)

    return _svg("drives", 2.9, label, draw)


def _draw_curve(
    figure: Figure, points: Sequence[Point], axis: str, own: tuple[float, float] | None
) -> Axes:
    figure.set_layout_engine("constrained")
    axes = figure.subplots()
    x = [point.x for point in points]
    axes.plot(x, [point.step_s for point in points], color=_BLUE, marker="o", ms=3, label="step")
    resident = [point.resident_s for point in points]
    axes.plot(x, resident, color=_ORANGE, linestyle="--", label="with all state in memory")
    if own is not None:
        axes.plot(*own, color=_VERMILLION, marker="D", ms=7, linestyle="", label="this job")
    axes.grid()
    axes.set_xlabel(axis)
    axes.set_ylabel("seconds of a step")
    return axes


def _label_log(axis: Any, values: Sequence[float]) -> None:
    """Label a logarithmic axis with 1, 2, 5, 10 and so on, or with powers of ten if it is long."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    short = max(values) < 300 * min(values)
    axis.set_major_locator(LogLocator(subs=(1, 2, 5) if short else (1,)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: short_text(value)))
    axis.set_minor_formatter(NullFormatter())


def _svg(name: str, height: float, label: str, draw: Callable[[Figure], None]) -> str:
    """Return a figure as an SVG element whose ids begin with a name."""
    try:
        from matplotlib import style
        from matplotlib.figure import Figure
    except ImportError as error:
        raise PlanError(
            "the page has pictures, which need matplotlib: pip install 'tierstore[plan]'"
        ) from error
    file = io.StringIO()
    with style.context(["default", _STYLE]):
        figure = Figure(figsize=(_WIDTH, height))
        draw(figure)
        nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        figure.savefig(file, format="svg", transparent=True, metadata=nothing)
    text = file.getvalue()
    text = text[text.index("<svg") :].replace(_INK, "currentColor")
    text = re.sub(r' (width|height)="[\d.]+pt"', "", text, count=2)
    text = re.sub(r'(\bid="|url\(#|href="#)', rf"\g<1>{name}-", text)
    return text.replace("<svg", f'<svg role="img" aria-label="{html.escape(label)}"', 1)
