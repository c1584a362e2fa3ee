"""The player in a real browser, from a file on disk: what it shows, says and answers to."""

from __future__ import annotations

import re
from typing import Any

import pytest
from playwright.sync_api import Page

from usp_viz import Scenario, simulate
from usp_viz.loading import bundled
from usp_viz.trace import Difference, Trace
from usp_viz.views.html import html
from usp_viz.views.scene import Scene, scene, what_follows

pytestmark = pytest.mark.browser
VARLEN = {"policy": "extended"}


def replay(name: str, sets: dict[str, Any] | None = None) -> Scene:
    scenario = Scenario.load(name, sets or {})
    return scene(scenario, simulate(scenario), beyond=what_follows(scenario))


def state(page: Page) -> dict[str, Any]:
    return page.evaluate("player.state")


def at_step(page: Page, step: int) -> None:
    page.locator(f'.usp[data-step="{step}"]').wait_for()


def ended(page: Page) -> None:
    page.locator('.usp[data-state="ended"]').wait_for()


@pytest.mark.parametrize("name", bundled())
def test_bundled_scenario_plays_to_the_end_from_disk(open_file: Any, name: str) -> None:
    replayed = replay(name)
    page = open_file(html(replayed))
    assert state(page)["status"] == "paused" and state(page)["step"] == 0
    page.evaluate("player.setSpeed(25)")
    page.keyboard.press("Space")
    ended(page)
    assert state(page)["step"] == replayed.steps - 1
    assert (
        page.locator(".usp-caption p").first.text_content() == replayed.data["steps"][-1]["caption"]
    )


@pytest.mark.parametrize("name", bundled())
def test_ledger_is_complete_where_the_extended_path_ends(open_file: Any, name: str) -> None:
    page = open_file(html(replay(name, {"policy": "extended"})))
    assert page.evaluate("player.ledger()")["done"] == 0
    page.keyboard.press("End")
    ended(page)
    ledger = page.evaluate("player.ledger()")
    assert ledger["done"] == ledger["allowed"] > 0
    assert ledger["forbidden"] == 0


def test_ledger_shows_what_the_guard_hides(open_file: Any) -> None:
    page = open_file(html(replay("varlen-ring")))
    page.keyboard.press("End")
    ended(page)
    # Two Ulysses groups of 24 rows each: every row meets the 24 keys of its own, of 48.
    assert page.evaluate("player.ledger()") == {
        "allowed": 48 * 48,
        "done": 2 * 24 * 24,
        "forbidden": 0,
    }
    assert state(page)["pairs"] == state(page)["allPairs"] / 2
    assert page.locator(".usp-ghost").text_content() == "not run: behind the guard"


@pytest.mark.parametrize("name", ["varlen-ring", "zigzag-causal", "dense-mask-ring"])
def test_text_and_table_say_what_python_says(open_file: Any, name: str) -> None:
    replayed = replay(name)
    page = open_file(html(replayed))
    for summary in page.locator("summary").all():
        summary.click()
    for number in range(replayed.steps):
        page.evaluate("step => player.seek(step)", number)
        at_step(page, number)
        assert page.locator("pre").text_content() == replayed.text(number)
        shown = [row.locator("td").all_text_contents() for row in page.locator("tbody tr").all()]
        assert shown == [list(row.values()) for row in replayed.table(number)]


def test_keys_step_jump_and_follow_a_token(open_file: Any) -> None:
    page = open_file(html(replay("varlen-ring", VARLEN)))
    stages = []
    for key in ("ArrowRight", "PageDown", "ArrowRight", "ArrowLeft", "PageUp", "Home", "m", "Home"):
        page.keyboard.press(key)
        stages.append((state(page)["step"], state(page)["title"]))
    assert stages == [
        (1, "Input all-to-all"),
        (2, "Hop 0 · attend"),
        (3, "Hop 1 · attend"),
        (2, "Hop 0 · attend"),
        (1, "Input all-to-all"),
        (0, "Shards"),
        (4, "Hop 1 · merge"),
        (0, "Shards"),
    ]
    for key, step in (("c", 1), ("c", 2), ("c", 5), ("Home", 0), ("h", 2), ("h", 3), ("End", 6)):
        page.keyboard.press(key)
        assert state(page)["step"] == step, key
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowDown")
    assert state(page)["token"] == 1
    assert "Row 1 · starts on rank 0" in page.locator(".usp-lines").inner_text()
    page.keyboard.press("Escape")
    assert state(page)["token"] is None
    page.keyboard.press("?")
    page.locator("dialog[open]").wait_for()
    page.keyboard.press("Escape")
    page.locator("dialog[open]").wait_for(state="detached")


def test_every_control_is_reached_by_tab(open_file: Any) -> None:
    page = open_file(html(replay("packed-documents")))
    reached: set[str] = set()
    for _ in range(40):
        page.keyboard.press("Tab")
        reached.add(
            page.evaluate(
                """() => {
                    const e = document.activeElement;
                    return e.dataset.do || e.getAttribute('aria-label') || e.tagName;
                }"""
            )
        )
    wanted = {"first", "back", "play", "next", "last", "collective", "hop", "help", "Step", "Speed"}
    assert wanted | {"Token, by row number", "Colour of the chips", "SUMMARY"} <= reached


def test_play_can_be_paused_and_a_focused_button_keeps_space(open_file: Any) -> None:
    page = open_file(html(replay("varlen-ring", VARLEN)))
    page.keyboard.press("Space")
    page.locator('.usp[data-state="playing"]').wait_for()
    page.keyboard.press("Space")
    page.locator('.usp[data-state="paused"]').wait_for()
    page.keyboard.press("Home")
    page.locator('button[data-do="next"]').focus()
    page.keyboard.press("Space")
    assert state(page)["step"] == 1


def test_nothing_glides_with_reduced_motion(open_file: Any) -> None:
    page = open_file(html(replay("varlen-ring", VARLEN)), reduced_motion="reduce")
    page.evaluate(
        """() => {
            window.between = 0; window.seen = [];
            const watch = () => {
                if (player.state.position % 1) window.between++;
                requestAnimationFrame(watch);
            };
            player.on('step', (step) => window.seen.push(step));
            watch(); player.setSpeed(20); player.play();
        }"""
    )
    ended(page)
    assert page.evaluate("window.between") == 0
    assert page.evaluate("window.seen") == [1, 2, 3, 4, 5, 6]


def luminance(colour: str) -> float:
    def linear(part: int) -> float:
        share = part / 255
        return share / 12.92 if share <= 0.04045 else ((share + 0.055) / 1.055) ** 2.4

    red, green, blue = (linear(int(colour[n : n + 2], 16)) for n in (1, 3, 5))
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: str, other: str) -> float:
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_text_and_marks_have_contrast_in_both_themes(open_file: Any, theme: str) -> None:
    page = open_file(html(replay("varlen-ring", VARLEN)), color_scheme=theme)
    assert state(page)["theme"] == theme

    def token(name: str) -> str:
        script = (
            "n => getComputedStyle(document.querySelector('.usp')).getPropertyValue('--usp-' + n)"
        )
        return page.evaluate(script, name).strip()

    grounds = [token("page"), token("panel")]
    assert (luminance(grounds[0]) < 0.1) == (theme == "dark")
    for ground in grounds:
        for name in ("ink", "muted", "accent", "ok", "warn", "bad"):
            assert contrast(token(name), ground) >= 4.5, name
        for name in ["edge", *(f"c{n}" for n in range(8))]:
            assert contrast(token(name), ground) >= 3, name
    assert contrast(token("on-accent"), token("accent")) >= 4.5
    other = "dark" if theme == "light" else "light"
    page.evaluate("mode => player.setTheme(mode)", other)
    assert state(page)["theme"] == other


@pytest.mark.parametrize("size", [(390, 844), (1280, 720), (1920, 1080)])
def test_page_never_scrolls_sideways(open_file: Any, size: tuple[int, int]) -> None:
    page = open_file(html(replay("varlen-ring")), viewport={"width": size[0], "height": size[1]})
    wide, room = page.evaluate("[document.documentElement.scrollWidth, innerWidth]")
    assert wide <= room


def test_hostile_text_is_text(open_file: Any) -> None:
    hostile = "<img src=x onerror='alert(1)'>${alert(2)}</script><script>alert(3)</script>" * 100
    scenario = Scenario.load("varlen-ring", {"title": hostile, "description": hostile})
    page = open_file(html(scene(scenario, simulate(scenario), refusal=hostile)))
    assert page.locator("h1").text_content() == hostile
    page.keyboard.press("End")
    ended(page)
    assert hostile in (page.locator(".usp-caption p").first.text_content() or "")
    assert page.locator("img").count() == 0


def test_pointing_at_a_chip_tells_of_its_row(open_file: Any) -> None:
    page = open_file(html(replay("varlen-ring", VARLEN)))
    page.evaluate("player.seek(3)")
    x, y = page.evaluate("player.at(2, 1, 17)")  # K/V of row 17 has come to rank 2
    page.mouse.move(x, y)
    tip = page.locator(".usp-tip").inner_text()
    assert "Row 17 · starts on rank 1" in tip
    assert "K/V on rank 2 heads [0, 4), rank 3 heads [4, 8)" in tip
    assert "way so far: rank 1 → ranks 0, 1 → ranks 2, 3" in tip
    assert "has met [0, 48)" in tip
    x, y = page.evaluate("player.pairAt(30, 2)")
    page.mouse.move(x, y)
    tip = page.locator(".usp-tip").inner_text()
    assert (
        "Query 30 × key 2: computed by rank 2 heads [0, 4) at hop 1, rank 3 heads [4, 8) at hop 1"
        in tip
    )
    page.mouse.move(0, 0)
    assert page.locator(".usp-tip").is_hidden()
    assert state(page)["token"] is None


def test_masked_pair_says_so(open_file: Any) -> None:
    page = open_file(html(replay("zigzag-causal")))
    x, y = page.evaluate("player.pairAt(2, 9)")
    page.mouse.move(x, y)
    assert "Query 2 × key 9: masked, not to be computed" in page.locator(".usp-tip").inner_text()


def test_badge_leads_to_the_first_difference(open_file: Any) -> None:
    scenario = Scenario.load("varlen-ring", VARLEN)
    trace = simulate(scenario)
    text = "Step 3 (hop 1): attend of O, rank 2 was predicted and did not happen."
    missed = next(event for event in trace.step(3) if event.src == 2)
    recorded = Trace.recorded(4, (e for e in trace.events() if e != missed), trace.order)
    found = [Difference(3, missed, None, text)]
    page = open_file(html(scene(scenario, trace, recorded=recorded, differences=found)))
    page.get_by_role("button", name=text).click()
    assert state(page)["step"] == 3
    page.keyboard.press("End")
    ended(page)
    ledger = page.evaluate("player.ledger()")
    assert (
        ledger["done"] == ledger["allowed"]
    )  # rank 3 did its heads: only half of them are missing
    assert state(page)["pairs"] < state(page)["allPairs"]


def test_badge_of_a_run_that_agrees(open_file: Any) -> None:
    scenario = Scenario.load("varlen-ring", VARLEN)
    trace = simulate(scenario)
    page = open_file(html(scene(scenario, trace, recorded=trace)))
    assert page.locator(".usp-badge").text_content() == "predicted = recorded on 4 real ranks"


def test_fork_gives_the_step_and_is_hidden_without_a_listener(open_file: Any) -> None:
    page = open_file(html(replay("varlen-ring", VARLEN)))
    assert page.locator('button[data-do="fork"]').is_hidden()
    page.evaluate(
        """() => {
            const text = document.getElementById('scene').textContent;
            const root = document.getElementById('player');
            player.destroy();
            window.player = USPPlayer(root, { onFork: (step) => { window.forked = step; } });
            player.load(text, 2);
        }"""
    )
    page.locator('button[data-do="fork"]').click()
    assert page.evaluate("window.forked") == 2


def test_large_mesh_says_that_chips_stand_for_ranges(open_file: Any) -> None:
    sets = {"policy": "extended", "mesh.ulysses": 8, "mesh.ring": 8, "tokens.total": 4096}
    page = open_file(html(replay("dense-2x2", sets | {"tensors.heads": 64})))
    said = page.locator(".usp-lines").inner_text()
    rows = re.search(r"Each chip stands for up to (\d+) rows", said)
    assert rows and int(rows.group(1)) == 32
    assert state(page)["chips"] * 2 * 8 <= 2048
