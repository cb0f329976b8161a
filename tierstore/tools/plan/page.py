"""The page of a plan: one HTML file with text, tables and pictures, which loads nothing."""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Iterator, Sequence

from tierstore.tools.plan.curves import Curves, curves, tokens_of
from tierstore.tools.plan.pictures import (
    drives_picture,
    model_picture,
    need_text,
    needs_picture,
    place_text,
    step_picture,
)
from tierstore.tools.plan.plan import FREE, Plan
from tierstore.tools.plan.wording import days_text, seconds_text, short_text
from tierstore.units import format_bytes

_MODEL = "forward and backward"

_STYLE = """
:root { color-scheme: light dark; --back: #fff; --ink: #1a1a1a; --faint: #5c5c5c; --rule: #d0d0d0;
  --good: #00694d; --bad: #a83c00; }
@media (prefers-color-scheme: dark) { :root { --back: #16181b; --ink: #e8e8e8; --faint: #a9adb2;
  --rule: #44484d; --good: #3fcf9f; --bad: #ff9257; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--back); color: var(--ink);
  font: 16px/1.5 system-ui, sans-serif; overflow-wrap: anywhere; }
main { max-width: 76rem; margin: 0 auto; padding: 1rem; }
h1 { font-size: 1.6rem; line-height: 1.25; margin: 0.5rem 0; }
h2 { font-size: 1.25rem; line-height: 1.3; margin: 0 0 0.5rem; }
h2.good { color: var(--good); }
h2.bad { color: var(--bad); }
section { border-top: 1px solid var(--rule); padding: 1.25rem 0; }
.columns { display: grid; gap: 1rem 2.5rem; align-items: start;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 26rem), 1fr)); }
.columns > * { min-width: 0; }
p { margin: 0 0 0.75rem; max-width: 42rem; }
header p { max-width: none; }
ul { margin: 0; padding-left: 1.25rem; }
.table { overflow-x: auto; margin-bottom: 1rem; }
table { border-collapse: collapse; font-size: 0.9rem; overflow-wrap: normal; }
th, td { text-align: left; padding: 0.2rem 1.25rem 0.2rem 0; vertical-align: top; }
thead th { color: var(--faint); font-weight: normal; border-bottom: 1px solid var(--rule);
  vertical-align: bottom; white-space: nowrap; }
th + th, td { text-align: right; }
td { white-space: nowrap; font-variant-numeric: tabular-nums; }
tbody th { font-weight: normal; min-width: 9rem; }
tr.own > * { font-weight: bold; }
tr.part th { padding-left: 1.25rem; }
@media (max-width: 30rem) {
  table { font-size: 0.82rem; }
  th, td { padding-right: 0.6rem; }
  thead th { white-space: normal; }
  tbody th { min-width: 5rem; }
}
figure { margin: 0 0 1rem; max-width: 560px; }
figcaption { color: var(--faint); font-size: 0.9rem; }
svg { display: block; width: 100%; height: auto; }
"""


def html_of(found: Plan) -> str:
    """Return a plan as an HTML document, the same for equal plans.

    Raises:
        PlanError: matplotlib is not installed.
    """
    name = found.model.name
    job = found.job
    title = _text(f"Plan for {name}")
    about = (
        f"{short_text(found.model.parameter_count)} parameters, optimizer {found.algorithm}, "
        f"{job.describe()}, {job.partition if job.world_size > 1 else 'one rank'}"
    )
    if found.is_timed:
        drawn = curves(found)
        steps = [_step(found, drawn), _free(found, drawn)]
    else:
        steps = [_transfers(found)]
    body = "\n".join(
        [
            f"<header><h1>{title}</h1>{_paragraph(about)}</header>",
            _drives(found),
            _memory(found),
            *steps,
            _beside(found),
            _assumed(found),
        ]
    )
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{title}</title>\n<style>{_STYLE}</style>\n</head>\n"
        f"<body>\n<main>\n{body}\n</main>\n</body>\n</html>\n"
    )


# --------------------------------------------------------------------------------- sections


def _drives(found: Plan) -> str:
    job, wear = found.job, found.wear
    if wear is None:
        text = "The wear of the drives is unknown, because the job does not name them."
        return _section("The life of the drives is unknown", _paragraph(text))
    steps = found.steps_allowed
    share = f"{100 * job.endurance:g}% of their rated life"
    if steps is None:
        heading = "The life of the drives is unknown"
        text = "The endurance of the drives is unknown: name it, as in 1DWPD or 7PBW."
    elif math.isinf(steps):
        heading, text = "The drives last for ever", "The run writes nothing to them."
    else:
        lasting = days_text(found.days) if found.is_timed else f"{steps:,.0f} steps"
        heading = f"The drives last {lasting}"
        text = f"{share} is used after {steps:,.0f} steps."
        if job.wear:
            text += f" {100 * job.wear:g}% is used already."
    if not found.lasts:
        heading = "The drives are worn out before the run ends"
        if found.is_timed:
            heading = f"The drives are worn out after {days_text(found.days)}, before the run ends"
        text += (
            f" The run has {job.steps:,} steps. Write less (a larger commit_every, more pages in "
            "memory), or take more drives or drives with more endurance."
        )
    most = "" if found.is_timed else "at most "
    written = f"{most}{format_bytes(round(wear.bytes_per_day))} a day"
    rows = [
        ("written to the drives of a node", written),
        ("drive writes per day", f"{most}{wear.drive_writes_per_day:.3g}"),
    ]
    if job.drives is not None:
        rows.append(("drives of a node", str(job.drives.count)))
        rows.append(("capacity of one drive", format_bytes(job.drives.capacity)))
        if job.drives.endurance is not None:
            endurance = format_bytes(round(job.drives.endurance))
            rows.append(("rated endurance of one drive", f"{endurance} written"))
    good = None if steps is None else found.lasts
    return _section(heading, _paragraph(text), _table((), rows), good=good)


def _memory(found: Plan) -> str:
    if found.fits:
        known = all(need.limit is not None for need in found.needs)
        heading = "The job fits" if known else "The job fits in the memory that is known"
        text = "Each kind of memory is large enough" + (
            "." if known else ", or its size is unknown."
        )
    else:
        short = [place_text(need) for need in found.needs if not need.fits]
        heading = f"The job does not fit: {', '.join(short)}"
        text = "`tierstore fit` finds settings with which it fits, or the nearest machine."
    if found.job.activation_bytes is None:
        text += " Activations are left out, because the job does not say how large they are."
    rows, classes = [], []
    for need in found.needs:
        limit = "unknown" if need.limit is None else format_bytes(need.limit)
        rows.append((place_text(need), format_bytes(need.nbytes), limit))
        rows += [(part, format_bytes(nbytes), "") for part, nbytes in need.parts.items()]
        classes += ["own", *("part" for _ in need.parts)]
    caption = f"Needed: {'; '.join(map(need_text, found.needs))}."
    return _section(
        heading,
        _paragraph(text) + _table(("memory", "needed", "there is"), rows, classes),
        _figure(needs_picture(found.needs, caption), caption),
        good=found.fits,
    )


def _step(found: Plan, drawn: Curves) -> str:
    time = found.time
    longest = found.busy[found.bottleneck]
    share = _share(time.seconds, time.resident_s)
    text = (
        f"Paging and commits are {share} of the step, {seconds_text(max(0.0, time.exposed_s))}. "
        f"With all state in memory, a step takes {seconds_text(time.resident_s)}. "
        f"The bottleneck is {found.bottleneck}, which works {seconds_text(longest)}."
    )
    if found.model_s is None:
        text += " Forward and backward are left out, because the job does not say their time."
    busy = [(name, seconds_text(value)) for name, value in found.busy.items() if value]
    words = _paragraph(text) + _table(("resource", "works"), busy)
    pictures = ""
    if time.lanes:
        works = ", ".join(f"{name} {seconds}" for name, seconds in busy)
        caption = f"One step of the slowest rank, {seconds_text(time.seconds)}: {works}."
        pictures += _figure(step_picture(time, caption), caption)
    if found.changes:
        rows = [
            (
                one.change,
                seconds_text(one.step_s),
                seconds_text(max(0.0, time.seconds - one.step_s)),
                days_text(one.days),
            )
            for one in sorted(found.changes, key=lambda one: one.step_s)
        ]
        words += _table(("change", "step", "gain", "drives last"), rows)
    if drawn.by_drives:
        drives = found.job.drives
        own = drives.count if drives else 1
        last = drawn.by_drives[-1]
        many = f"{last.x:.0f} drives in each node" if drives else f"drives {last.x:.0f} x as fast"
        now = f"with {own}" if drives else "now"
        caption = (
            f"With {many}, a step takes {seconds_text(last.step_s)}, and {now} it takes "
            f"{seconds_text(time.seconds)}."
        )
        picture = drives_picture(
            drawn.by_drives,
            caption,
            axis="drives in each node"
            if drives
            else "rates of the drives, in multiples of today's",
            own=(own, time.seconds),
        )
        pictures += _figure(picture, caption)
    return _section(f"A step takes {seconds_text(time.seconds)}", words, pictures)


def _transfers(found: Plan) -> str:
    text = "The computation of the optimizer is left out: no probe measures it."
    busy = [(name, seconds_text(value)) for name, value in found.busy.items() if value]
    heading = f"A step takes at least {seconds_text(found.time.seconds)}"
    return _section(heading, _paragraph(text) + _table(("resource", "works"), busy))


def _free(found: Plan, drawn: Curves) -> str:
    free_s, tokens = found.free_model_s, found.free_tokens
    percent = f"{100 * FREE:g}%"
    if free_s is None:
        heading = "Paging is never free"
        text = "The drives or the commits are too slow beside any number of tokens."
    elif free_s == 0:
        heading = "Paging is free"
        text = f"Paging and commits add at most {percent} to any step."
    else:
        beside = f"{seconds_text(free_s)} of {_MODEL}"
        of = beside if tokens is None else f"{short_text(tokens)} tokens a step"
        heading = f"Paging is free from {of}"
        text = f"Paging and commits add at most {percent} to steps with {beside} or more."
    own = None
    if found.model_s:
        x = tokens_of(found, found.model_s) if drawn.in_tokens else found.model_s
        own = x or 0.0, found.time.seconds
        text += f" A step of this job has {_amount(own[0], drawn)}."
    first, last = drawn.by_model[0], drawn.by_model[-1]
    caption = (
        f"Paging and commits are {_share(first.step_s, first.resident_s)} of a step with "
        f"{_amount(first.x, drawn)}, and {_share(last.step_s, last.resident_s)} with "
        f"{_amount(last.x, drawn)}."
    )
    picture = model_picture(
        drawn.by_model,
        caption,
        axis="tokens of a step" if drawn.in_tokens else f"seconds of {_MODEL}",
        own=own,
        free=tokens if drawn.in_tokens else free_s,
    )
    return _section(heading, _paragraph(text), _figure(picture, caption))


def _amount(x: float, drawn: Curves) -> str:
    """Return x of the first curve with its unit."""
    return f"{short_text(x)} tokens" if drawn.in_tokens else f"{seconds_text(x)} of {_MODEL}"


def _share(step_s: float, resident_s: float) -> str:
    """Return the share of a step that paging and commits are."""
    return f"{100 * max(0.0, 1 - resident_s / step_s) if step_s else 0:.3g}%"


def _beside(found: Plan) -> str:
    rows = [
        (
            one.algorithm,
            seconds_text(one.step_s),
            format_bytes(one.state_bytes),
            format_bytes(round(one.written_bytes)),
            days_text(one.days),
        )
        for one in found.beside
    ]
    head = ("algorithm", "step", "state", "written in a step", "drives last")
    classes = ["own" if one.algorithm == found.algorithm else "" for one in found.beside]
    return _section("Algorithms beside each other", _table(head, rows, classes))


def _assumed(found: Plan) -> str:
    items = "".join(f"<li>{_text(text)}</li>" for text in found.rates.assumed)
    block = f"<ul>{items}</ul>" if items else _paragraph("Every rate was measured by a probe.")
    return _section("Assumed", block)


# ------------------------------------------------------------------------------------- HTML


def _text(text: str) -> str:
    """Return a text for HTML: a name may hold anything."""
    return html.escape(
        "".join(one if one.isprintable() else "\N{REPLACEMENT CHARACTER}" for one in text)
    )


def _paragraph(text: str) -> str:
    return f"<p>{_text(text)}</p>"


def _section(heading: str, *blocks: str, good: bool | None = None) -> str:
    kind = "" if good is None else f' class="{"good" if good else "bad"}"'
    columns = "".join(f"<div>{block}</div>" for block in blocks)
    return f'<section><h2{kind}>{_text(heading)}</h2><div class="columns">{columns}</div></section>'


def _figure(picture: str, caption: str) -> str:
    return f"<figure>{picture}<figcaption>{_text(caption)}</figcaption></figure>"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]], classes: Sequence[str] = ()) -> str:
    """Return a table whose first column names its rows, in a box of its own that scrolls."""

    def lines() -> Iterator[str]:
        if head:
            yield "<thead><tr>" + "".join(f'<th scope="col">{_text(one)}</th>' for one in head)
            yield "</tr></thead>"
        yield "<tbody>"
        for number, (first, *cells) in enumerate(rows):
            kind = f' class="{classes[number]}"' if classes and classes[number] else ""
            yield f'<tr{kind}><th scope="row">{_text(first)}</th>'
            yield "".join(f"<td>{_text(cell)}</td>" for cell in cells) + "</tr>"
        yield "</tbody>"

    return f'<div class="table"><table>{"".join(lines())}</table></div>'
