"""The page as people meet it: a real server, real ranks, Chromium."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

import pytest
from playwright.sync_api import Browser, ConsoleMessage, Locator, Page

from tests.gloo.test_page import UI, Server, serving
from usp_viz.loading import bundled, parse_mapping
from usp_viz.scenario import Scenario

pytestmark = [pytest.mark.browser, pytest.mark.gloo]

Open = Callable[..., Page]
LONG = "name=long&mesh.ring=2&tensors.heads=4&tensors.head_dim=64&tokens.total=16384"
"""Takes many seconds on ranks."""
MARKUP = '<img src=x onerror="window.hit=1">${window.hit=2}<script>window.hit=3</script>'


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving(UI) as running:
        yield running


@pytest.fixture
def visit(chromium: Browser, server: Server) -> Iterator[Open]:
    """Open an address in a browser of its own; nothing may complain or leave this machine."""
    pages: list[Page] = []
    complaints: list[str] = []
    hosts: set[str] = set()

    def opened(query: str = "", url: str = "", **context: Any) -> Page:
        page = chromium.new_context(**context).new_page()
        pages.append(page)
        page.on("request", lambda request: hosts.add(urlsplit(request.url).hostname or ""))
        page.on("console", lambda m: complaints.append(m.text) if _complains(m) else None)
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.goto((url or server.url) + query)
        return page

    yield opened
    for page in pages:
        page.context.close()
    assert hosts <= {"127.0.0.1", ""}
    assert not complaints


def _complains(message: ConsoleMessage) -> bool:
    """Chromium asks a server for an icon before any page names its own."""
    return message.type == "error" and not message.location["url"].endswith("/favicon.ico")


def settled(page: Page) -> Page:
    """Drawn, answered, and run if it runs."""
    page.wait_for_function(
        "window.uspApp && !uspApp.busy && uspApp.player.state.status !== 'empty'", timeout=90_000
    )
    return page


def ended(page: Page) -> dict[str, str]:
    """The outcomes of the three policies, once all have run."""
    settled(page)
    page.wait_for_function("Object.keys(uspApp.state.outcomes).length === 3")
    return page.evaluate("uspApp.state.outcomes")


def written(page: Page) -> dict[str, Any]:
    """What the editor says."""
    return parse_mapping(page.get_by_label("The scenario as YAML").input_value(), "editor")


def until(page: Page, condition: str) -> None:
    page.wait_for_function(condition, timeout=90_000)


def says(page: Page, pattern: str) -> None:
    """Wait for what is said about the run."""
    page.locator(".uspage-status", has_text=re.compile(f"^({pattern})")).wait_for(timeout=90_000)


def control(page: Page, key: str) -> Locator:
    return page.locator(f'.uspage-controls [data-key="{key}"]')


def test_it_opens_on_a_refusal_and_has_run_it(visit: Open) -> None:
    page = visit()
    until(page, "window.uspApp && uspApp.player.state.status === 'paused'")
    assert ended(page) == {"sglang": "refused", "unguarded": "wrong", "extended": "verified"}
    assert page.evaluate("uspApp.player.state.step") == 0
    assert page.locator(".usp-badge").get_attribute("data-kind") == "refused"
    cards = page.locator(".uspv-card")
    assert "Varlen USPAttention does not support ring parallelism yet." in cards.nth(0).inner_text()
    assert page.title().startswith("Varlen meets ring")


def test_every_bundled_scenario_ends_as_its_file_expects(visit: Open) -> None:
    page = visit()
    ended(page)
    for name in bundled():
        page.locator(".uspage-pick").click()
        page.locator(f'.uspage-scenario[data-name="{name}"]').click()
        until(page, f"uspApp.state.seen.name === '{name}'")
        found, scenario = ended(page), Scenario.load(name)
        assert scenario.expect is not None
        assert found[scenario.policy] == scenario.expect.outcome, name
        assert found["extended"] == "verified", name
        predicted = page.evaluate("uspApp.state.seen.predicted")
        assert found == predicted, name


def test_controls_yaml_and_address_agree(visit: Open) -> None:
    page = visit("?scenario=dense-2x2")
    ended(page)
    control(page, "mesh.ring=4").click()
    until(page, "uspApp.state.seen.normal.mesh.ring === 4")
    assert written(page)["mesh"] == {"ulysses": 2, "ring": 4}
    assert "mesh.ring=4" in page.url
    control(page, "attention.causal").check()
    until(page, "uspApp.state.seen.normal.attention.causal")
    page.get_by_label("Add a mask").select_option("tail_pad")
    until(page, "uspApp.state.seen.normal.attention.mask !== 'none'")
    assert written(page)["attention"] == {"causal": True, "mask": {"tail_pad": {"start": 42}}}
    page.get_by_role("tab", name="YAML").click()
    editor = page.get_by_label("The scenario as YAML")
    editor.fill(editor.input_value().replace("total: 48", "total: 64"))
    until(page, "uspApp.state.seen.normal.tokens.total === 64")
    page.get_by_role("tab", name="Controls").click()
    assert control(page, "tokens.total").input_value() == "64"
    shown = page.evaluate("uspApp.state.seen.normal")
    settled(page.reload() and page)
    assert page.evaluate("uspApp.state.seen.normal") == shown
    page.go_back()
    until(page, "uspApp.state.seen.normal.tokens.total === 48")
    assert written(page)["tokens"]["total"] == 48
    page.go_forward()
    until(page, "uspApp.state.seen.normal.tokens.total === 64")


def test_a_step_and_a_policy_are_in_the_address(visit: Open) -> None:
    page = visit("?scenario=zigzag-causal&step=3&show=sglang")
    ended(page)
    assert page.evaluate("[uspApp.player.state.step, uspApp.state.show]") == [3, "sglang"]
    page.locator('.uspage-policies [data-policy="extended"]').click()
    page.locator(".usp-stage").press("ArrowRight")
    until(page, "location.search.includes('step=4') && location.search.includes('show=extended')")


def test_what_is_wrong_says_what_would_be_legal(visit: Open) -> None:
    page = visit("?scenario=dense-2x2")
    ended(page)
    control(page, "tokens.total").fill("47")
    control(page, "tokens.total").press("Enter")
    notice = page.locator(".uspage-notice")
    notice.get_by_text("47 % 4 = 3").wait_for()
    assert page.get_by_role("button", name="Run on ranks").is_disabled()
    notice.get_by_role("button", name="tokens.total: 44").click()
    until(page, "uspApp.state.seen.normal.tokens.total === 44 && !uspApp.state.error")
    page.get_by_role("tab", name="YAML").click()
    editor = page.get_by_label("The scenario as YAML")
    editor.fill("name: a\nmesh:\n  rong: 2\n")
    page.locator(".uspage-gutter .uspage-bad", has_text="3").wait_for()
    assert editor.input_value() == "name: a\nmesh:\n  rong: 2\n"
    notice.get_by_role("button", name="Undo").click()
    until(page, "!uspApp.state.error && uspApp.state.seen.normal.tokens.total === 44")
    page.get_by_role("tab", name="Controls").click()
    control(page, "mesh.ulysses=16").press("Enter")
    page.get_by_text("32 ranks; this server runs at most 16").wait_for()


def test_a_fix_is_applied_run_and_taken_back(visit: Open) -> None:
    page = visit()
    ended(page)
    page.get_by_role("button", name="Apply").first.click()
    until(page, "uspApp.state.seen.normal.mesh.ring === 1")
    assert ended(page)["sglang"] == "verified"
    assert written(page)["mesh"] == {"ulysses": 4, "ring": 1}
    assert page.locator(".uspv-before").is_visible()
    page.locator(".uspage-before").get_by_role("button", name="Undo").click()
    until(page, "uspApp.state.seen.normal.mesh.ring === 2")
    assert ended(page)["sglang"] == "refused"


def test_a_paste_finds_the_scenario(visit: Open) -> None:
    page = visit()
    ended(page)
    box = page.get_by_label("Paste an error text or a launch command")
    box.fill(
        "Traceback (most recent call last):\nNotImplementedError: USPAttention masked path "
        "supports ring parallelism only for batch-1 tail-pad metadata on the FA backend."
    )
    page.get_by_role("button", name="Find").click()
    until(page, "uspApp.state.seen.name === 'mask-ring'")
    assert ended(page)["sglang"] == "refused"
    box.fill("--num-gpus 64 --ulysses-degree 16 --ring-degree 4")
    box.press("Enter")
    page.get_by_text("U 16 → 2, R 4 → 2").wait_for()
    page.get_by_role("button", name="Uneven lengths").click()
    until(page, "uspApp.state.seen.normal.tokens.shards !== 'even'")
    assert ended(page)["sglang"] == "refused"


def test_changes_in_quick_succession_all_count(visit: Open) -> None:
    page = visit("?scenario=dense-2x2")
    ended(page)
    page.evaluate(
        """() => { for (const key of ['mesh.ulysses=4', 'mesh.ring=4', 'attention.causal'])
                 document.querySelector(`[data-key="${key}"]`).click(); }"""
    )
    until(page, "uspApp.state.seen.normal.mesh.ring === 4")
    assert written(page)["mesh"] == {"ulysses": 4, "ring": 4}
    assert written(page)["attention"] == {"causal": True}


def test_what_is_too_large_can_be_seen_and_shrunk(visit: Open) -> None:
    page = visit("?mesh.ulysses=8&mesh.ring=8&attention.layer=UlyssesAttention&tokens.total=2048")
    settled(page)
    assert page.evaluate("uspApp.player.state.chips") > 100
    page.get_by_role("button", name="Shrink it").click()
    until(page, "uspApp.state.seen.normal.mesh.ring === 2")
    assert ended(page)["sglang"] == "refused"


def test_by_keyboard_alone(visit: Open) -> None:
    page = visit()
    ended(page)

    def tab_to(selector: str) -> None:
        for _ in range(80):
            page.keyboard.press("Tab")
            if page.evaluate("s => document.activeElement.matches(s)", selector):
                return
        pytest.fail(f"{selector} is not reached by Tab")

    tab_to(".uspage-pick")
    page.keyboard.press("Enter")
    tab_to('[data-name="seven-tokens"]')
    page.keyboard.press("Enter")
    until(page, "uspApp.state.seen.name === 'seven-tokens'")
    ended(page)
    tab_to('[data-key="attention.causal"]')
    page.keyboard.press("Space")
    until(page, "uspApp.state.seen.normal.attention.causal")
    assert page.evaluate("document.activeElement.dataset.key") == "attention.causal"
    tab_to(".usp-stage")
    page.keyboard.press("End")
    until(page, "uspApp.player.state.step === uspApp.player.state.steps - 1")
    page.keyboard.press("Control+Enter")
    assert ended(page)["extended"] == "verified"


def test_presenter_mode_follows_a_clicker(visit: Open) -> None:
    page = visit("?scenario=dense-2x2&present=1")
    ended(page)
    assert not page.locator(".uspage-side").is_visible()
    assert not page.locator(".usp-bar").is_visible()
    for step, key in ((1, "PageDown"), (2, "PageDown"), (1, "PageUp")):
        page.keyboard.press(key)
        until(page, f"uspApp.player.state.step === {step}")
    page.get_by_role("button", name="Leave presenter mode").click()
    assert page.locator(".uspage-side").is_visible()
    until(page, "!location.search.includes('present')")


def test_hostile_text_is_text(visit: Open) -> None:
    title = MARKUP + "x" * 10_000
    page = visit(f"?title={quote(title[:4000])}&description={quote(MARKUP)}&mesh.ring=2")
    ended(page)
    assert page.locator(".uspage-title").text_content() == title[:4000]
    assert page.locator(".uspage-description").text_content() == MARKUP
    page.evaluate("t => uspApp.ask({text: uspApp.state.text, set: {title: t}})", title[:10_000])
    until(page, "uspApp.state.seen.title.length === 10000")
    page.get_by_role("tab", name="YAML").click()
    page.get_by_label("The scenario as YAML").fill(f"name: '{MARKUP}'\n{MARKUP}: 1\n")
    until(page, "uspApp.state.error")
    page.get_by_label("Paste an error text or a launch command").fill(f"--ring-degree {MARKUP}")
    page.get_by_role("button", name="Find").click()
    page.locator(".uspage-pasted", has_text="<img").wait_for()
    assert page.evaluate("window.hit") is None
    assert page.locator(".uspage img, .uspage script").count() == 0


def test_a_broken_address_still_shows_something(visit: Open) -> None:
    page = visit("?scenario=..%2F..%2Fetc%2Fpasswd&mesh.ring=*x&step=-1e9&tab=%00&show=__proto__")
    settled(page)
    page.locator(".uspage-pasted", has_text="no bundled scenario").wait_for()
    assert page.evaluate("uspApp.state.seen.name") == "varlen-ring"


def test_two_visitors_take_turns_and_cancel_only_their_own(visit: Open) -> None:
    first = visit("?" + LONG)
    says(first, "Running")
    second = visit("?scenario=dense-2x2")
    says(second, "Waiting|Next in line")
    assert first.evaluate("Object.keys(uspApp.state.outcomes)") == []
    first.get_by_role("button", name="Cancel").click()
    assert ended(second) == dict.fromkeys(("sglang", "unguarded", "extended"), "verified")
    assert first.locator(".uspage-status").text_content() == "Cancelled."
    assert first.evaluate("Object.keys(uspApp.state.outcomes)") == []
    assert second.evaluate("uspApp.state.seen.name") == "dense-2x2"


def test_a_replay_is_saved_as_one_file(visit: Open, tmp_path: Path) -> None:
    page = visit("?scenario=packed-documents")
    ended(page)
    with page.expect_download() as waiting:
        page.get_by_role("button", name="Save replay").click()
    saved = tmp_path / waiting.value.suggested_filename
    waiting.value.save_as(saved)
    assert saved.name == "packed-documents-extended.html"
    assert saved.stat().st_size < 400_000
    page.goto(saved.as_uri())
    assert page.evaluate("player.state.steps") > 3


@pytest.mark.parametrize("dark", [False, True])
def test_on_a_phone_the_player_comes_first(visit: Open, dark: bool) -> None:
    scheme = "dark" if dark else "light"
    page = visit(viewport={"width": 390, "height": 844}, color_scheme=scheme, has_touch=True)
    settled(page)
    assert page.evaluate("document.documentElement.scrollWidth") == 390
    assert page.locator(".usp").get_attribute("data-theme") == scheme
    assert not page.locator(".uspage-controls").is_visible()
    tops = [page.locator(s).bounding_box() for s in (".usp-stage", ".uspage-side")]
    assert tops[0] and tops[1] and tops[0]["y"] < tops[1]["y"]


def test_below_a_path(visit: Open) -> None:
    with serving([sys.executable, "-m", "tests.browser.mounted"]) as below:
        page = visit("?scenario=mask-ring", url=below.url)
        assert ended(page) == {"sglang": "refused", "unguarded": "crashed", "extended": "verified"}
        assert urlsplit(page.url).path == "/deep/below/"
