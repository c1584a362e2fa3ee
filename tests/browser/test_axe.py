"""axe-core on what people see, all of its rules: both sizes, both themes."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.resources import files
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, expect

from tests.browser.conftest import OpenFile
from usp_viz import Scenario, simulate
from usp_viz.bench.chromium import Served, serving
from usp_viz.views.html import html
from usp_viz.views.scene import scene, what_follows

pytestmark = [pytest.mark.browser, pytest.mark.gloo]

AXE = (files("axe_playwright_python") / "axe.min.js").read_text("utf-8")
SIZES = {"desk": (1280, 720), "phone": (390, 844)}
THEMES = ("light", "dark")
FIRST = "varlen-ring"
WORDS = ".uspage-top nav button:text-is('Words')"

GRADIOS = (
    # (rule, where): the icon beside the word in Gradio's footer.
    ("image-redundant-alt", 'img[alt="Settings"]'),
)


def violations(page: Page) -> list[tuple[str, str, str]]:
    """(rule, where, what is wrong) of everything that axe finds, but for what is Gradio's own."""
    page.evaluate(AXE)
    found: list[dict[str, Any]] = page.evaluate("async () => (await axe.run()).violations")
    assert page.evaluate("typeof axe.version") == "string"
    each = [
        (rule["id"], " ".join(map(str, node["target"])), node["failureSummary"])
        for rule in found
        for node in rule["nodes"]
    ]
    return [
        v for v in each if not any(v[0] == rule and v[1].startswith(at) for rule, at in GRADIOS)
    ]


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with serving() as running:
        yield running


@pytest.fixture(params=SIZES.values(), ids=SIZES)
def size(request: pytest.FixtureRequest) -> dict[str, int]:
    return {"width": request.param[0], "height": request.param[1]}


@pytest.fixture(params=THEMES)
def theme(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def page(chromium: Browser, server: Served, size: Any, theme: Any) -> Iterator[Page]:
    """The page on a refusal that has run."""
    with chromium.new_context(viewport=size, reduced_motion="reduce") as context:
        page = context.new_page()
        page.goto(f"{server.url}?scenario={FIRST}&__theme={theme}")
        page.wait_for_function(
            "window.uspApp && Object.keys(uspApp.state.outcomes).length === 3 && !uspApp.busy",
            timeout=90_000,
        )
        assert page.evaluate("document.body.classList.contains('dark')") is (theme == "dark")
        yield page


def test_the_page(page: Page) -> None:
    assert violations(page) == []
    page.locator(".uspage-side").evaluate("(side) => { side.open = true; }")
    page.locator('[data-tab="yaml"]').click()
    page.evaluate("uspApp.player.seek(4)")
    for folded in page.locator(".uspage-stagebox details, .uspage-verdicts details").all():
        folded.evaluate("(details) => { details.open = true; }")
    assert violations(page) == []


def test_the_tabs_below_the_verdicts(page: Page) -> None:
    for tab in page.locator(".uspv-more [role=tab]").all():
        tab.click()
        assert violations(page) == [], tab.inner_text()


def test_the_dialogs_and_an_invalid_scenario(page: Page) -> None:
    for opens, dialog in ((".uspage-pick", ".uspage-menu"), (WORDS, "[aria-label=Words]")):
        page.locator(opens).click()
        expect(page.locator(dialog)).to_be_visible()
        assert violations(page) == []
        page.keyboard.press("Escape")
        expect(page.locator(dialog)).not_to_be_visible()
    page.evaluate("uspApp.ask({ text: uspApp.state.text, set: { 'mesh.ring': 3 } })")
    page.locator(".uspage-notice").wait_for()
    assert violations(page) == []


def test_presenter_mode(page: Page) -> None:
    page.keyboard.press("p")
    expect(page.locator(".uspage-leave")).to_be_visible()
    assert violations(page) == []


def test_a_replay_on_its_own(open_file: OpenFile, size: Any, theme: Any) -> None:
    asked = Scenario.load(FIRST)
    replay = scene(asked, simulate(asked), refusal="refused", beyond=what_follows(asked))
    page = open_file(html(replay), viewport=size, color_scheme=theme, bypass_csp=True)
    assert page.evaluate("player.state.theme") == theme
    for step in (0, replay.steps - 2):
        page.evaluate("(step) => player.seek(step)", step)
        assert violations(page) == []
