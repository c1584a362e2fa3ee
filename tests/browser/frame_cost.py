"""What a frame of the player costs: CPU time of the page's main thread, in Chromium.

``python -m tests.browser.frame_cost`` plays two meshes and prints a line for each. No test: a busy
machine drops frames, and the rest of its work shows in the numbers.
"""

from __future__ import annotations

import shutil
import statistics
import tempfile
from pathlib import Path
from typing import Any

from playwright.sync_api import Page, sync_playwright

from tests.browser.conftest import ARGUMENTS, NAMES
from usp_viz import Scenario, simulate
from usp_viz.views.html import html
from usp_viz.views.scene import scene

MESHES = (
    # U, R, S, H, milliseconds a frame that are allowed
    (2, 8, 256, 8, 8.0),
    (8, 8, 4096, 64, 12.0),
)
COUNT_FRAMES = """() => {
    window.frames = 0;
    const count = () => { window.frames++; requestAnimationFrame(count); };
    requestAnimationFrame(count);
}"""


def main() -> None:
    program = next(filter(None, map(shutil.which, NAMES)))
    with sync_playwright() as playwright, tempfile.TemporaryDirectory() as folder:
        browser = playwright.chromium.launch(executable_path=program, args=ARGUMENTS)
        for ulysses, ring, total, heads, allowed in MESHES:
            sets = {"policy": "extended", "mesh.ulysses": ulysses, "mesh.ring": ring}
            sets |= {"tokens.total": total, "tensors.heads": heads}
            scenario = Scenario.load("dense-2x2", sets)
            replay = scene(scenario, simulate(scenario))
            path = Path(folder) / "replay.html"
            path.write_text(html(replay), "utf-8")
            page = browser.new_page(viewport={"width": 1280, "height": 720})
            page.goto(path.as_uri())
            page.evaluate(COUNT_FRAMES)
            costs = [cost(page) for _ in range(3)]
            page.close()
            chips = len(replay.data["chips"]) // 5 * 2 * ulysses
            print(
                f"{ulysses * ring} ranks x {chips} chips: {statistics.median(costs):.1f} ms "
                f"a frame (at most {allowed:g}); scene {len(replay.to_json_text()):,} bytes"
            )
        browser.close()


def cost(page: Page) -> float:
    """Milliseconds of the main thread for each frame of one play to the end."""
    session = page.context.new_cdp_session(page)
    session.send("Performance.enable", {"timeDomain": "threadTicks"})

    def busy() -> float:
        metrics: list[dict[str, Any]] = session.send("Performance.getMetrics")["metrics"]
        return next(m["value"] for m in metrics if m["name"] == "TaskDuration")

    page.evaluate("() => { player.seek(0); player.setSpeed(4); }")
    frames, before = page.evaluate("window.frames"), busy()
    page.evaluate("player.play()")
    page.locator('.usp[data-state="ended"]').wait_for(timeout=120_000)
    return 1000 * (busy() - before) / (page.evaluate("window.frames") - frames)


if __name__ == "__main__":
    main()
