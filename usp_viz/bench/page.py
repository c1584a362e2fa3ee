"""``usp-viz bench page``: how fast the page is in a real Chromium, on this machine.

Times of the browser are taken inside it. CPU time of a frame is that of a stand-alone replay's main
thread while it plays to its end at 4x, divided by the frames that were drawn.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from usp_viz.bench.chromium import Served, browsing, serving
from usp_viz.bench.figures import BenchReport, Figure, median, progress
from usp_viz.plan import simulate
from usp_viz.scenario import Scenario
from usp_viz.views.html import html
from usp_viz.views.scene import Scene, scene

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

SMALL = "varlen-ring"
MIDDLE = (4, 4, 128, 4)
LARGE = (8, 8, 4096, 64)
"""U, R, S, H: 16 ranks with 1024 chips, 64 ranks with 2048."""
SIZE: Any = {"width": 1280, "height": 720}

USABLE = "window.uspApp && uspApp.player.state.status === 'paused'"
SETTLED = f"{USABLE} && !uspApp.busy"

FIRST_FRAME = """async (text) => {
    const start = performance.now();
    await uspApp.ask({ text, show: 'extended' }, { step: 0 });
    if (uspApp.state.error || uspApp.player.state.status !== 'paused') throw new Error('not drawn');
    await new Promise((drawn) => requestAnimationFrame(() => setTimeout(drawn)));
    return performance.now() - start;
}"""
THREE_VERDICTS = """() => new Promise((ended, failed) => {
    const root = document.querySelector('.uspage'), start = performance.now();
    const seen = new MutationObserver(() => {
        if (root.dataset.run === 'running') return;
        seen.disconnect();
        if (root.dataset.run === 'done') ended(performance.now() - start);
        else failed(new Error(document.querySelector('.uspage-status').textContent));
    });
    seen.observe(root, { attributes: true, attributeFilter: ['data-run'] });
    document.querySelector('.uspage-run').click();
})"""
COUNT_FRAMES = """() => {
    window.frames = 0;
    const count = () => { window.frames++; requestAnimationFrame(count); };
    requestAnimationFrame(count);
}"""
SCRUB = """async () => {
    const slider = document.querySelector('.usp input[type=range]');
    for (let at = 0; at <= Number(slider.max); at++) {
        slider.value = at;
        slider.dispatchEvent(new Event('input', { bubbles: true }));
        slider.dispatchEvent(new Event('change', { bubbles: true }));
        await new Promise(requestAnimationFrame);
    }
    await new Promise((later) => setTimeout(later, 500));  // the address follows with a delay
    return uspApp.player.state.step;
}"""


def bench_page(quick: bool = False) -> BenchReport:
    """Measure everything; `quick` measures each once.

    Raises:
        MissingRequirement: Neither playwright nor Chromium can be had.
    """
    runs = 1 if quick else 5
    with browsing() as browser, serving() as server:
        figures = [
            *_opening(browser, server, runs),
            *_on_one_page(browser, server, runs),
            *_standing_alone(browser, runs),
            _count("libtorch in the server's process, after runs", server.maps("libtorch")),
        ]
    return BenchReport(tuple(figures))


def meshed(ulysses: int, ring: int, total: int, heads: int, **sets: Any) -> Scenario:
    """An even dense scenario under the ring-aware policy."""
    changes = {"policy": "extended", "expect": None, "mesh.ulysses": ulysses, "mesh.ring": ring}
    changes |= {"tokens.total": total, "tensors.heads": heads}
    return Scenario.load("dense-2x2", changes | sets)


def drawn(mesh: tuple[int, int, int, int]) -> Scene:
    """Its replay, as predicted."""
    scenario = meshed(*mesh)
    return scene(scenario, simulate(scenario))


def chips(replay: Scene) -> int:
    """Rows (or ranges of rows), times head groups, of Q and of KV."""
    return len(replay.data["chips"]) // 5 * 2 * replay.data["mesh"]["ulysses"]


def frame_cost(page: Page, player: str) -> float:
    """Milliseconds of the main thread for each frame of one play to the end.

    Args:
        page: Where a replay is loaded, and `COUNT_FRAMES` was evaluated.
        player: The expression that is its player.
    """
    session = page.context.new_cdp_session(page)
    session.send("Performance.enable", {"timeDomain": "threadTicks"})

    def busy() -> float:
        metrics: list[dict[str, Any]] = session.send("Performance.getMetrics")["metrics"]
        return next(m["value"] for m in metrics if m["name"] == "TaskDuration")

    page.evaluate(f"() => {{ {player}.seek(0); {player}.setSpeed(4); }}")
    frames, before = page.evaluate("window.frames"), busy()
    page.evaluate(f"{player}.play()")
    page.locator('.usp[data-state="ended"]').wait_for(timeout=120_000)
    return 1000 * (busy() - before) / (page.evaluate("window.frames") - frames)


# -- parts -------------------------------------------------------------------------------------


def _count(name: str, value: int, note: str = "") -> Figure:
    return Figure(name, value, "", "<= 0", 1, note)


def _opening(browser: Browser, server: Served, runs: int) -> Iterator[Figure]:
    """Each time in a context of its own, so with an empty cache."""
    seconds: list[float] = []
    for n in range(runs + 1):
        progress(f"opening the page, {n} of {runs}")
        context = browser.new_context(viewport=SIZE)
        page, start = context.new_page(), time.perf_counter()
        page.goto(server.url)
        page.wait_for_function(USABLE, timeout=60_000)
        if n:  # the first warms the server
            seconds.append(time.perf_counter() - start)
        page.wait_for_function(SETTLED, timeout=120_000)
        context.close()
    yield median("page usable, warm server, empty cache", seconds, "s", "<= 3")


def _on_one_page(browser: Browser, server: Served, runs: int) -> Iterator[Figure]:
    context = browser.new_context(viewport=SIZE)
    page = context.new_page()
    page.goto(f"{server.url}?scenario={SMALL}")
    page.wait_for_function(SETTLED, timeout=120_000)

    progress("three verdicts")
    walls = [float(page.evaluate(THREE_VERDICTS)) for _ in range(2 * runs + 1)][1:]
    yield median(f"three verdicts of {SMALL}, warm ranks", walls, "ms", "<= 500")

    progress("first frame")
    first = [_first_frame(page, n) for n in range(2 * runs + 1)][1:]
    asked = f"scenario to first frame, {_size(drawn(MIDDLE))}"
    yield median(asked, first, "ms", "<= 250")

    progress("scrubbing")
    requests: list[str] = []
    page.on("request", lambda request: requests.append(request.url))
    last = page.evaluate(SCRUB)
    yield _count("server calls while scrubbing", len(requests), f"over steps 0 to {last}")
    context.close()


def _first_frame(page: Page, seed: int) -> float:
    """Of a scenario that the server has not seen yet."""
    scenario = meshed(*MIDDLE, **{"run.seed": seed})
    return float(page.evaluate(FIRST_FRAME, _text(scenario)))


def _standing_alone(browser: Browser, runs: int) -> Iterator[Figure]:
    """The replay without a server: what a frame costs, and what is sent."""
    with TemporaryDirectory() as folder:
        for mesh, goal in ((MIDDLE, "<= 8"), (LARGE, "<= 12")):
            replay, path = drawn(mesh), Path(folder) / "replay.html"
            size = _size(replay)
            progress(f"frames of {size}")
            path.write_text(html(replay), "utf-8")
            page = browser.new_page(viewport=SIZE)
            page.goto(path.as_uri())
            page.evaluate(COUNT_FRAMES)
            costs = [frame_cost(page, "player") for _ in range(1 if runs == 1 else 3)]
            page.close()
            yield median(f"CPU a frame, {size}", costs, "ms", goal)
            sent = len(replay.to_json_text()) / 1000
            yield Figure(f"trace payload, {size}", sent, "kB", "<= 100", 1)
            whole = path.stat().st_size / 1000
            yield Figure(f"stand-alone HTML, {size}", whole, "kB", "<= 400", 1)


def _size(replay: Scene) -> str:
    return f"{len(replay.data['mesh']['at'])} ranks, {chips(replay)} chips"


def _text(scenario: Scenario) -> str:
    import yaml

    return yaml.safe_dump(scenario.normalised())
