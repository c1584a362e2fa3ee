"""The page without a server: what is on it, and what its handlers say."""

from __future__ import annotations

import math
from typing import Any

import gradio as gr
import pytest

from usp_viz.errors import MissingRequirement
from usp_viz.plan import simulate
from usp_viz.runtime import verify
from usp_viz.runtime.accuracy import Accuracy, RankAccuracy
from usp_viz.runtime.result import Problem, Run, Where
from usp_viz.scenario import POLICIES, Scenario
from usp_viz.ui import page
from usp_viz.ui.cards import Card

MARKUP = '<img src=x onerror="alert(1)"> ${alert(2)} **bold**'


def a_run(scenario: Scenario, **changes: Any) -> Run:
    parts: dict[str, Any] = {
        "scenario": scenario,
        "outcome": "verified",
        "backend": "sdpa",
        "device": "cpu",
        "trace": simulate(scenario),
        "differences": (),
        "timing": {"wall_ms": 41.0, "attention_ms": 6.2, "cold_start_ms": None},
        "versions": {},
    }
    return Run(**parts | changes)


@pytest.fixture(scope="module")
def demo() -> gr.Blocks:
    return page.build()


# -- what is on it -----------------------------------------------------------------------------


def test_text_of_others_only_goes_where_it_stays_text(demo: gr.Blocks) -> None:
    """Whatever an event writes is shown by a component that knows no markup."""
    written = {type(block) for fn in demo.fns.values() for block in fn.outputs}
    plain = {gr.Textbox, gr.Code, gr.Slider}
    assert {kind.__name__ for kind in written - plain} == {"Api"}
    assert not [block for block in demo.blocks.values() if isinstance(block, gr.HTML)]


def test_only_the_endpoints_are_public(demo: gr.Blocks) -> None:
    public = {fn.api_name for fn in demo.fns.values() if fn.api_visibility != "private"}
    assert public == {"run", "check", "simulate", "scenarios", "schema"}


def test_whatever_needs_ranks_waits_in_one_queue(demo: gr.Blocks) -> None:
    groups = {fn.concurrency_id: [] for fn in demo.fns.values()}
    for fn in demo.fns.values():
        groups[fn.concurrency_id].append((fn.name, fn.concurrency_limit))
    assert sorted(groups["ranks"]) == [("_run", 1), ("run", 1)]


# -- the frames --------------------------------------------------------------------------------


def test_stepping_stays_inside_the_trace() -> None:
    last = simulate(Scenario.load("varlen-ring").set({"policy": "extended"})).steps - 1
    text = page.answers.bundled_text("varlen-ring")
    at = 0
    for _ in range(last + 3):
        at = page._next(text, "extended", at)
    assert at == last
    assert f"step {last} of {last}" in page._frame(text, "extended", last + 7)
    about, slider, frame = page._rewind(text, "extended")
    assert "Four ranks hold" in about
    assert (slider.maximum, slider.value) == (last, 0)
    assert f"step 0 of {last}" in frame


@pytest.mark.parametrize("text", ["mesh: {ring: 0}", "", "[", "/etc/passwd", "mesh: {ring: 4096}"])
def test_what_cannot_be_shown_is_said(text: str) -> None:
    about, slider, frame = page._rewind(text, "extended")
    assert about == frame == page._frame(text, "extended", 3)
    assert frame.startswith("Invalid: ")
    assert not slider.interactive
    assert page._next(text, "extended", 3) == 3


# -- the three columns -------------------------------------------------------------------------


def columns(state: list[str]) -> list[list[str]]:
    return [state[1 + 4 * n : 5 + 4 * n] for n in range(len(POLICIES))]


def test_each_column_is_filled_when_its_run_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def run(scenario: Scenario) -> Run:
        asked.append(scenario.policy)
        return a_run(scenario, accuracy=Accuracy(0, 0, 1, (RankAccuracy(0, 48, 0, 0.0),)))

    monkeypatch.setattr(verify, "run", run)
    states = page._run("name: mine\n")
    for n, policy in enumerate(POLICIES):
        before = next(states)
        assert asked == list(POLICIES[:n])
        assert policy in before[0]
        assert [bool(column[1]) for column in columns(before)] == [m < n for m in range(3)]
    (last,) = states
    assert all("VERIFIED" in column[0] for column in columns(last))
    assert last[0].startswith("mine on ")


def test_an_invalid_scenario_is_said_at_once() -> None:
    (state,) = page._run(f"name: '{MARKUP}'\n")
    assert state[0].startswith("Invalid: name: ")
    assert not any(map(any, columns(state)))


def test_what_is_missing_is_said_in_its_column(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(scenario: Scenario) -> Run:
        raise MissingRequirement("No GPU", "Use --set run.device=cpu")

    monkeypatch.setattr(verify, "run", run)
    *_, last = page._run("{}")
    assert all(
        c[:2] == ["! INVALID", "MissingRequirement: No GPU. Use --set run.device=cpu"]
        for c in columns(last)
    )


def test_a_refusal_word_for_word_and_its_ways_out() -> None:
    scenario = Scenario.load("varlen-ring")
    details = {
        "because": ["ring = 2 > 1", "world = 4 > 1"],
        "fixes": [{"id": "a", "title": "Ring off", "set": {}}],
    }
    problem = Problem("NotImplementedError", MARKUP, (0, 1), "rule", details)
    card = Card.of(a_run(scenario, outcome="refused", problem=problem))
    assert card.verdict == "⊘ REFUSED"
    assert card.message.startswith(f"NotImplementedError: {MARKUP}\n")
    assert "ring = 2 > 1; world = 4 > 1." in card.message
    assert "1. Ring off" in card.message
    assert card.ranks == "rank 0 raised it\nrank 1 raised it"


def test_a_crash_says_who_was_where() -> None:
    where = Where(3, "died", 2, "hop 0", "send", "exit code -9")
    problem = Problem("RankDied", "rank 3 died", (3,), where=(where,))
    card = Card.of(a_run(Scenario(), outcome="crashed", problem=problem))
    assert card.ranks == str(where)


def test_wrong_rows_have_bars_that_fit() -> None:
    ranks = (
        RankAccuracy(0, 12, 0, 1e-7),
        RankAccuracy(1, 12, 12, 3.0),
        RankAccuracy(2, 12, 12, math.nan),
        RankAccuracy(3, 12, 12, math.inf),
    )
    found = Accuracy(math.nan, 1.0, 1e-5, ranks)
    lines = Card.of(a_run(Scenario(), outcome="wrong", accuracy=found)).ranks.splitlines()
    assert [line.split()[1] for line in lines] == ["0", "1", "2", "3"]
    assert lines[0].count("█") == 0
    assert lines[1].count("█") == lines[3].count("█") == 8
    assert "NaN" in lines[2]
    assert max(map(len, lines)) <= 48
