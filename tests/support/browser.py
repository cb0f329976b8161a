"""A headless browser, to measure pages as people see them."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")

# For each frame: what is wider than it, and the texts of pictures. A text that was cut reaches out
# of its picture; a size is in pixels of the screen.
_MEASURE = """
const found = [...document.querySelectorAll("iframe")].map(frame => {
  const page = frame.contentDocument, root = page.documentElement;
  const texts = [...page.querySelectorAll("svg")].map(svg => {
    const box = svg.getBoundingClientRect();
    return [...svg.querySelectorAll("text")].filter(text => text.textContent.trim()).map(text => {
      const { left, top, right, bottom } = text.getBoundingClientRect();
      return {
        text: text.textContent.trim(), left, top, right, bottom,
        size: parseFloat(getComputedStyle(text).fontSize) * svg.getScreenCTM().a,
        cut: left < box.left - 1 || right > box.right + 1
          || top < box.top - 1 || bottom > box.bottom + 1,
      };
    });
  });
  return { scroll: root.scrollWidth, client: root.clientWidth, title: page.title, texts };
});
document.getElementById("found").textContent = JSON.stringify(found);
"""


def measure(page: str, widths: Sequence[int], scratch: Path) -> list[dict[str, Any]]:
    """Return what a browser says of a page in frames of some widths in pixels.

    A window of a headless browser has a least width, and a frame has none.
    """
    frames = "".join(
        f'<iframe style="width:{width}px;height:900px;border:0" srcdoc="{html.escape(page)}">'
        "</iframe>"
        for width in widths
    )
    wrapper = scratch / "frames.html"
    wrapper.write_text(
        f'<!DOCTYPE html><meta charset="utf-8"><body>{frames}<pre id="found"></pre>'
        f"<script>onload = () => {{{_MEASURE}}}</script></body>",
        encoding="utf-8",
    )
    assert CHROMIUM is not None
    done = subprocess.run(
        [
            *(CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom"),
            *(f"--user-data-dir={scratch / 'profile'}", wrapper.as_uri()),
        ],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    match = re.search(r'<pre id="found">(.+?)</pre>', done.stdout, re.DOTALL)
    assert match is not None, done.stderr[-2000:]
    found: list[dict[str, Any]] = json.loads(html.unescape(match[1]))
    return found
