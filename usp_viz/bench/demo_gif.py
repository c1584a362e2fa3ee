"""The README's picture: ``python -m usp_viz.bench.demo_gif [OUT]`` films the page in Chromium.

The ring-aware path through ragged shards plays once; then its three verdicts come into view.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from PIL import Image

from usp_viz.bench.chromium import browsing, serving

if TYPE_CHECKING:
    from playwright.sync_api import Page

WIDTH, HEIGHT = 960, 640
ADDRESS = "?scenario=varlen-ring&show=extended"
READ, FLY, HOLD = 1700, 90, 3000
"""Milliseconds: to read a step, a picture of something that flies, the verdicts."""
PICTURES = 8
"""Of one step on its way to the next."""
COLOURS = 64

READY = """window.uspApp && !uspApp.busy && Object.keys(uspApp.state.outcomes).length === 3
    && uspApp.player.state.status === 'paused'"""
FILM = """
.uspage-side, .uspage-head, .uspage-top nav, .usp-bar, .usp details, .usp-about, footer
    { display: none !important; }
.uspage { padding: 12px 16px !important; max-width: none !important; }
.uspage .uspage-body { display: block !important; margin: 0 !important; }
.usp :has(> .usp-caption) { display: block !important; }
.usp .usp-caption, .usp .usp-caption * { max-width: none !important; }
::-webkit-scrollbar { display: none; }
"""
Frame = tuple[Image.Image, int]


def film(page: Page) -> Iterator[Frame]:
    """Pictures of the page, and for how many milliseconds each is seen."""

    def shot(milliseconds: int) -> Frame:
        png = page.screenshot(animations="disabled")
        return Image.open(io.BytesIO(png)).convert("RGB"), milliseconds

    steps = page.evaluate("uspApp.player.state.steps")
    for step in range(steps):
        page.evaluate("(at) => uspApp.player.seek(at)", step)
        yield shot(READ)
        for n in range(1, PICTURES) if step + 1 < steps else ():
            page.evaluate("(at) => uspApp.player.seek(at)", step + n / PICTURES)
            yield shot(FLY)
    end = page.evaluate(
        "document.querySelector('.uspage-verdicts').getBoundingClientRect().top + scrollY - 8"
    )
    for n in range(1, PICTURES):
        eased = (n / PICTURES) ** 2 * (3 - 2 * n / PICTURES)
        page.evaluate("(y) => scrollTo(0, y)", end * eased)
        yield shot(FLY)
    page.evaluate("(y) => scrollTo(0, y)", end)
    yield shot(HOLD)


def save(frames: list[Frame], out: Path) -> None:
    """Write a GIF that loops, in one palette."""
    pictures, times = zip(*frames, strict=True)
    sheet = Image.new("RGB", (WIDTH, HEIGHT * 3))
    for n, picture in enumerate((pictures[0], pictures[len(pictures) // 2], pictures[-1])):
        sheet.paste(picture, (0, n * HEIGHT))
    palette = sheet.quantize(COLOURS)
    plain: Any = Image.Dither.NONE
    first, *rest = (p.quantize(palette=palette, dither=plain) for p in pictures)
    first.save(out, save_all=True, append_images=rest, duration=times, loop=0, optimize=True)


def main(out: Path) -> None:
    """Film and save."""
    with serving() as server, browsing() as browser:
        page = browser.new_page(viewport={"width": WIDTH, "height": HEIGHT})
        page.goto(server.url + ADDRESS)
        page.wait_for_function(READY, timeout=120_000)
        page.add_style_tag(content=FILM)
        page.evaluate("new Promise((drawn) => requestAnimationFrame(() => setTimeout(drawn, 200)))")
        save(list(film(page)), out)
    print(f"{out}: {out.stat().st_size / 1e6:.2f} MB")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "assets/demo.gif"))
