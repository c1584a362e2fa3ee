"""The verdicts in a real browser, fed with real runs: what they say, do and call back."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, expect

from tests.browser import verdicts_page
from usp_viz.runtime.pool import RankPool

pytestmark = [pytest.mark.browser, pytest.mark.gloo]

CONTRAST = """() => {
  const parse = (text) => {
    const cx = document.createElement('canvas').getContext('2d');
    cx.fillStyle = text; cx.fillRect(0, 0, 1, 1);
    return [...cx.getImageData(0, 0, 1, 1).data];
  };
  const light = (colour) => parse(colour).slice(0, 3).map((v) => v / 255)
    .map((v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4))
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const poor = [];
  for (const node of document.querySelectorAll('.uspv *')) {
    const own = [...node.childNodes].some((n) => n.nodeType === 3 && n.textContent.trim());
    if (!own || !node.checkVisibility() || node.closest('.uspv-hide')) continue;
    const back = (at) => getComputedStyle(at).backgroundColor;
    let ground = node;
    while (ground && parse(back(ground))[3] < 250) ground = ground.parentElement;
    const style = getComputedStyle(node), drawn = node instanceof SVGElement;
    const ink = drawn ? style.fill : style.color;
    const pair = [light(ink), light(back(ground))];
    const ratio = (Math.max(...pair) + 0.05) / (Math.min(...pair) + 0.05);
    if (ratio < 4.5) poor.push([node.className, node.textContent.slice(0, 40), ratio]);
  }
  return poor;
}"""
COLOURS = """() => {
  const seen = new Set(), map = document.querySelector('.uspv-map canvas');
  const copy = document.createElement("canvas");
  Object.assign(copy, {width: map.width, height: map.height});
  const cx = copy.getContext('2d', {willReadFrequently: true});
  cx.drawImage(map, 0, 0);
  const data = cx.getImageData(0, 0, copy.width, copy.height).data;
  for (let i = 0; i < data.length; i += 4) seen.add(data.slice(i, i + 3).join());
  return [...seen].sort().join(' ');
}"""
TABS = ("map", "timeline", "costs", "table", "reproduce", "json")


@pytest.fixture(scope="module")
def made() -> dict[str, Any]:
    with RankPool() as pool:
        return verdicts_page.cases(pool)


@pytest.fixture(scope="module")
def file(made: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("verdicts") / "page.html"
    path.write_text(verdicts_page.page(made), "utf-8")
    return path


@pytest.fixture
def page(chromium: Browser, file: Path) -> Iterator[Page]:
    """The page; nothing may be asked of the network, nothing may complain."""
    context = chromium.new_context(viewport={"width": 1280, "height": 720})
    page = context.new_page()
    complaints: list[str] = []
    page.on("console", lambda message: complaints.append(message.text))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("request", lambda request: complaints.append(request.url))
    page.goto(file.as_uri())
    yield page
    context.close()
    assert [c for c in complaints if not c.startswith(("file://", "data:"))] == []


def show(page: Page, name: str) -> None:
    page.evaluate("(name) => show(name)", name)
    page.locator('.uspv[data-state="done"]').wait_for()


def state(page: Page) -> dict[str, Any]:
    return page.evaluate("verdicts.state")


def calls(page: Page) -> list[Any]:
    return page.evaluate("calls")


def card(page: Page, policy: str) -> Any:
    return page.locator(f'.uspv > .uspv-rail > [data-policy="{policy}"]')


def test_a_refusal_word_for_word_with_reasons_and_what_was_seen(
    page: Page, made: dict[str, Any]
) -> None:
    show(page, "refused")
    error = made["refused"]["results"]["sglang"]["result"]["error"]
    refused = card(page, "sglang")
    expect(refused.locator("pre.uspv-said")).to_have_text(f"{error['class']}: {error['message']}")
    expect(refused.locator(".uspv-facts li")).to_have_text(error["because"])
    expect(refused).to_contain_text("layer.py:878")
    behind = refused.locator(".uspv-behind")
    expect(behind).to_contain_text("What we saw when we ran behind it")
    expect(behind).to_contain_text("48 of 48 rows come out wrong")
    refused.get_by_text("Who meets it, and how not to").click()
    expect(refused).to_contain_text("bucket lengths")


def test_a_fix_calls_back_whole(page: Page, made: dict[str, Any]) -> None:
    show(page, "refused")
    fixes = made["refused"]["results"]["sglang"]["result"]["error"]["fixes"]
    buttons = card(page, "sglang").locator("button.uspv-fix")
    expect(buttons).to_have_count(len(fixes))
    buttons.first.click()
    card(page, "sglang").locator("summary").first.click()
    buttons.last.click()
    assert calls(page) == [["fix", fixes[0]], ["fix", fixes[-1]]]


def test_before_stays_beside_after(page: Page) -> None:
    show(page, "refused")
    assert state(page)["before"] is False
    show(page, "refused")
    assert state(page)["before"] is False, "the same question has no before and after"
    card(page, "sglang").locator("button.uspv-fix").first.click()
    show(page, "fixed")
    assert state(page)["outcomes"] == dict.fromkeys(("sglang", "unguarded", "extended"), "verified")
    summary = page.locator(".uspv-before > summary")
    expect(summary).to_contain_text("Before “Ring off: --ulysses-degree 4 --ring-degree 1”")
    expect(summary).to_contain_text("sglang ⊘ refused")
    expect(summary).to_contain_text("mesh.ring 2 → 1")
    expect(card(page, "sglang")).to_contain_text("before: ⊘ refused")
    summary.click()
    old = page.locator(".uspv-before .uspv-card")
    expect(old).to_have_count(3)
    expect(old.first.locator("pre.uspv-said")).to_be_visible()


def test_wrong_and_verified_count_rows_and_share_a_scale(page: Page) -> None:
    show(page, "refused")
    expect(card(page, "unguarded")).to_contain_text("48 of 48 rows wrong")
    expect(card(page, "extended")).to_contain_text("48 rows, all within tolerance")
    words = card(page, "unguarded").locator(".uspv-word")
    expect(words).to_have_text(
        ["15 of 15 wrong", "9 of 9 wrong", "11 of 11 wrong", "13 of 13 wrong"]
    )
    lines = page.evaluate(
        "[...document.querySelectorAll('.uspv-bars')].map((b) => b.style.cssText)"
    )
    assert len(lines) == 2 and len(set(lines)) == 1
    widths = {
        policy: card(page, policy)
        .locator(".uspv-bars i")
        .evaluate_all("(bars) => bars.map((b) => parseFloat(b.style.width))")
        for policy in ("unguarded", "extended")
    }
    tolerance = float(lines[0].split(":")[1].strip("% ;"))
    assert max(widths["extended"]) < tolerance < min(widths["unguarded"])


def test_the_map_by_keyboard_reaches_every_cell_and_the_player(page: Page) -> None:
    show(page, "packed")
    chart = page.locator(".uspv-map")
    chart.focus()
    readout = page.locator(".uspv-readout")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowDown")
    assert state(page)["cell"] in ([0, 1], [1, 1])
    page.keyboard.press("End")
    expect(readout).to_contain_text("Rank 3, row 50, head 1, document 5: error about")
    page.keyboard.press("PageUp")
    expect(readout).to_contain_text("Rank 2, replicated row 0, head 1")
    page.keyboard.press("Enter")
    assert calls(page) == [["point", {"row": 0, "head": 1, "rank": 2}]]
    page.get_by_text("The map as a table").click()
    expect(page.locator(".uspv-panel details tbody tr")).to_have_count(4)


def test_nan_and_infinity_come_first_and_point_at_their_token(page: Page) -> None:
    show(page, "nan")
    worst = page.locator(".uspv-worst button")
    expect(worst.first).to_have_text("NaN row 15 · head 3 · rank 1")
    expect(worst.nth(1)).to_have_text("∞ row 34 · head 0 · rank 2")
    expect(card(page, "extended")).to_contain_text("max |Δ| NaN")
    worst.first.click()
    assert calls(page) == [["point", {"row": 15, "head": 3, "rank": 1}]]
    assert state(page)["cell"] == [15, 3]


@pytest.mark.parametrize(
    ("case", "word", "doing", "ranks"),
    [("crashed", "Crashed", "raised", 2), ("timeout", "Timed out", "send (hop 0)", 4)],
)
def test_who_was_where_when_nothing_came_back(
    page: Page, case: str, word: str, doing: str, ranks: int
) -> None:
    show(page, case)
    shown = page.locator(".uspv > .uspv-rail > article")
    expect(shown.locator(".uspv-verdict")).to_contain_text(word)
    rows = shown.locator("tbody tr")
    expect(rows).to_have_count(ranks)
    expect(rows.first).to_contain_text(doing)
    for tab in TABS:
        page.evaluate("(tab) => verdicts.openTab(tab)", tab)
        expect(page.get_by_role("tabpanel")).not_to_be_empty()


def test_no_text_becomes_markup_or_code(page: Page) -> None:
    show(page, "hostile")
    for tab in TABS:
        page.evaluate("(tab) => verdicts.openTab(tab)", tab)
    page.evaluate("(text) => verdicts.failed('extended', text)", verdicts_page.HOSTILE)
    assert page.evaluate("window.hacked") is None
    assert page.locator(".uspv img, .uspv script, .uspv b b").count() == 0
    expect(card(page, "sglang").locator("pre.uspv-said")).to_contain_text(verdicts_page.HOSTILE)
    expect(card(page, "extended")).to_contain_text(verdicts_page.HOSTILE)


def test_cards_fill_as_runs_end(page: Page, made: dict[str, Any]) -> None:
    case = made["refused"]
    page.evaluate("(s) => verdicts.begin(s, ['sglang', 'unguarded', 'extended'])", case["scenario"])
    page.evaluate("verdicts.waiting('You are second in the queue.')")
    expect(card(page, "sglang")).to_contain_text("You are second in the queue.")
    page.evaluate("(d) => verdicts.result('sglang', d)", json.dumps(case["results"]["sglang"]))
    assert state(page)["cards"] == {
        "sglang": "refused",
        "unguarded": "running",
        "extended": "waiting",
    }
    expect(card(page, "sglang")).to_contain_text("What to expect behind it")
    expect(page.get_by_role("status")).to_contain_text("Refused. NotImplementedError")
    page.evaluate("(d) => verdicts.result('unguarded', d)", case["results"]["unguarded"])
    expect(card(page, "sglang")).to_contain_text("What we saw when we ran behind it")
    page.evaluate("verdicts.failed('extended', 'The queue is full.')")
    expect(card(page, "extended")).to_contain_text("The queue is full.")
    assert state(page)["status"] == "done"
    card(page, "extended").get_by_role("button", name="Run again").click()
    assert calls(page) == [["again"]]
    page.evaluate("verdicts.clear()")
    assert state(page)["status"] == "idle" and not page.locator(".uspv-more").is_visible()


def test_everything_by_keyboard(page: Page) -> None:
    show(page, "refused")
    page.get_by_role("tab", name="Error map").focus()
    for wanted in TABS[1:]:
        page.keyboard.press("ArrowRight")
        assert state(page)["tab"] == wanted
    page.keyboard.press("Tab")
    expect(page.get_by_role("radio", name="behind the guard")).to_be_focused()
    page.keyboard.press("ArrowRight")
    assert state(page)["chosen"] == "extended"
    expect(page.get_by_role("radio", name="ring-aware")).to_be_focused()
    page.keyboard.press("Tab")
    expect(page.get_by_role("tabpanel")).to_be_focused()
    outline = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
    assert outline == "solid"
    page.locator("button.uspv-fix").first.focus()
    page.keyboard.press("Enter")
    assert calls(page)[0][0] == "fix"


def test_what_to_run_is_copied_as_it_is(page: Page, made: dict[str, Any]) -> None:
    page.evaluate(
        "Object.defineProperty(navigator, 'clipboard', "
        "{value: {writeText: async (text) => { window.copied = text; }}})"
    )
    show(page, "refused")
    found = made["refused"]["results"]["unguarded"]
    shown = card(page, "unguarded")
    for name, text in (
        ("Copy command", found["reproduce"]["command"]),
        ("Copy Python", found["reproduce"]["python"]),
    ):
        shown.get_by_role("button", name=name).click()
        assert page.evaluate("window.copied") == text
    shown.get_by_role("button", name="Copy JSON").click()
    assert json.loads(page.evaluate("window.copied")) == found["result"]


def test_memory_is_measured_when_asked_for(page: Page, made: dict[str, Any]) -> None:
    show(page, "refused")
    page.get_by_role("tab", name="Bytes & memory").click()
    panel = page.get_by_role("tabpanel")
    expect(panel).to_contain_text("measured = predicted, to the byte")
    panel.get_by_role("button", name="Run once more and measure").click()
    assert calls(page) == [["measure", "unguarded"]]
    show(page, "measured")
    expect(panel.locator('section:last-child [data-kind="measured"]')).to_have_count(4)
    expect(panel.get_by_role("button", name="Run once more and measure")).to_have_count(0)
    # The caller's Q, K and V alone: 15, 9, 11 and 13 rows x 3 x 8 heads x 32 x 4 bytes.
    found = made["measured"]["results"]["extended"]["spent"]["memory"]["measured"]
    assert all(n >= rows * 3 * 1024 for n, rows in zip(found, (15, 9, 11, 13), strict=True))
    plan = made["measured"]["results"]["extended"]["spent"]["memory"]["predicted"]
    # A message may still hold its buffer when the next tensor is made.
    assert all(0.95 < n / p < 1.5 for n, p in zip(found, plan, strict=True))


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_text_keeps_its_contrast_and_fits_a_phone(page: Page, theme: str) -> None:
    page.set_viewport_size({"width": 390, "height": 844})
    page.evaluate("(theme) => { document.documentElement.dataset.theme = theme; }", theme)
    for name in ("refused", "fixed", "crashed"):
        show(page, name)
        for tab in TABS:
            page.evaluate("(tab) => verdicts.openTab(tab)", tab)
            assert page.evaluate(CONTRAST) == []
            assert page.evaluate("document.documentElement.scrollWidth") <= 390


def test_a_map_is_drawn_in_the_colours_of_the_theme(page: Page) -> None:
    show(page, "refused")
    light = page.evaluate(COLOURS)
    page.evaluate("document.documentElement.dataset.theme = 'dark'")
    page.wait_for_function(f"(was) => ({COLOURS})() !== was", arg=light)
    assert len(light.split()) > 8
