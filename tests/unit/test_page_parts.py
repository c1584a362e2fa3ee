"""The page without a server: what is on it, and what its handlers say."""

from __future__ import annotations

import json
import re
import threading
from pathlib import Path
from typing import Any

import gradio as gr
import pytest

from usp_viz.loading import bundled, parse_mapping
from usp_viz.plan import simulate
from usp_viz.runtime import verify
from usp_viz.runtime.limits import limits
from usp_viz.runtime.result import Run
from usp_viz.scenario import POLICIES, Scenario
from usp_viz.ui import front, page
from usp_viz.ui.catalog import GROUPS, catalog
from usp_viz.ui.desk import Desk
from usp_viz.ui.legal import DEGREES, offers
from usp_viz.ui.look import answer, look

MARKUP = '<img src=x onerror="alert(1)"> ${alert(2)} </script>'
PAD = "    - {{tail_pad: {{start: {}}}}}\n"
BAD_PAD = "attention.mask[1].tail_pad.start"
ASSETS = Path(page.__file__).parents[2] / "assets"


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


def test_text_of_others_never_becomes_markup(demo: gr.Blocks) -> None:
    """The one component holds no value; its script is ours alone and makes no markup of text."""
    shown = [block for block in demo.blocks.values() if isinstance(block, gr.HTML)]
    assert len(shown) == 1
    assert not shown[0].value
    assert "${" not in shown[0].html_template
    for name in front.SCRIPTS:
        source = (ASSETS / name).read_text("utf-8")
        found = re.findall(
            r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|new Function", source
        )
        assert not found, name


def test_what_is_put_into_the_script_stays_data() -> None:
    made = front.script([{"group": MARKUP, "scenarios": []}])
    assert MARKUP not in made
    literal = made[made.index("USPApp(element") :]
    assert not {"<", "${"} & {literal[n : n + k] for n in range(len(literal)) for k in (1, 2)}
    assert json.loads(literal[literal.index("{") : literal.rindex("}") + 1])["catalog"]


def test_only_the_endpoints_are_public(demo: gr.Blocks) -> None:
    public = {fn.api_name for fn in demo.fns.values() if fn.api_visibility != "private"}
    assert public == {"run", "check", "simulate", "scenarios", "schema"}


def test_whatever_needs_ranks_waits_in_one_queue(demo: gr.Blocks) -> None:
    found = [(fn.name, fn.concurrency_limit) for fn in demo.fns.values() if _ranks(fn)]
    assert sorted(found) == [("run", 1), ("stream", 1)]


def _ranks(fn: Any) -> bool:
    return fn.concurrency_id == "ranks"


def test_every_bundled_scenario_has_a_place_and_a_promise() -> None:
    named = [name for group in GROUPS.values() for name in group]
    assert sorted(named) == sorted(bundled())
    assert [group["group"] for group in catalog()] == list(GROUPS)
    assert all(promise for group in GROUPS.values() for promise in group.values())


# -- looking at a scenario -----------------------------------------------------------------------


@pytest.mark.parametrize("name", bundled())
def test_a_bundled_scenario_is_shown_as_it_is_written(name: str) -> None:
    found = answer({"name": name})
    assert found["text"] == bundled()[name].read_text("utf-8")
    assert found["error"] is None
    assert found["address"] == f"scenario={name}"
    assert answer({"address": found["address"]})["text"] == found["text"]
    scene = json.loads(found["scene"])
    assert found["show"] == Scenario.load(name).policy
    assert scene["title"] == found["title"]


def test_a_change_keeps_the_rest_and_drops_what_was_expected_of_the_file() -> None:
    found = answer({"name": "varlen-ring", "set": {"mesh.ring": 1, "mesh.ulysses": 4}})
    before = parse_mapping(answer({"name": "varlen-ring"})["text"], "a")
    after = parse_mapping(found["text"], "b")
    assert after["mesh"] == {"ulysses": 4, "ring": 1}
    assert {k: v for k, v in before.items() if k not in ("mesh", "expect")} == {
        k: v for k, v in after.items() if k != "mesh"
    }


@pytest.mark.parametrize(
    ("text", "line", "key"),
    [
        ("name: a\nmesh:\n  ulysses: 2\n  ring: 0\n", 4, "mesh.ring"),
        ("name: a\nmesh: {ulysses: 2, rong: 1}\n", 2, "mesh.rong"),
        (f"name: a\nattention:\n  mask:\n{PAD.format(3)}{PAD.format(99)}", 5, BAD_PAD),
        ("name: a\nmesh: [\n", 3, ""),
        ("name: a\nname: b\n", None, ""),
        ("name: a\ntitle: *x\n", 2, ""),
    ],
)
def test_an_error_names_its_line(text: str, line: int | None, key: str) -> None:
    found = answer({"text": text})
    assert found["error"]["line"] == line
    assert found["error"]["key"] == key
    assert found["text"] == text


@pytest.mark.parametrize(
    "asked",
    [
        None,
        3,
        "x",
        {},
        {"text": 3},
        {"text": None, "set": [1]},
        {"name": "../x"},
        {"address": "?mesh=1&%%%=2&mesh.ring"},
        {"text": "{}", "set": {"": 1}},
        {"text": "{}", "set": {"mesh": {"a": {}}}},
    ],
)
def test_any_question_is_answered(asked: Any) -> None:
    found = json.loads(look(asked))
    assert "text" in found or found["outcome"] == "invalid"


@pytest.mark.parametrize("name", bundled())
def test_what_is_offered_is_legal_and_what_is_not_says_why(name: str) -> None:
    scenario = Scenario.load(name)
    for key, options in offers(scenario).items():
        for option in options:
            if "why" in option:
                assert option["why"]
            else:
                made = scenario.set(option.get("set", {key: option["value"]}))
                assert made.dotted().get(key, option["value"]) == option["value"]
                assert made.mesh.ranks <= max(limits().max_ranks, scenario.mesh.ranks)


def test_degrees_beyond_this_server_are_shown_with_the_reason() -> None:
    found = {o["value"]: o for o in offers(Scenario.load("dense-2x2"))["mesh.ulysses"]}
    assert "32 ranks" in found[16]["why"]
    assert set(found) <= set(DEGREES)


# -- the three policies ------------------------------------------------------------------------


def test_each_policy_is_told_as_its_run_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def run(scenario: Scenario) -> dict[str, Any]:
        asked.append(scenario.policy)
        return {"kind": "result"}

    monkeypatch.setattr(page, "_ran", run)
    told = page.tell(Desk(lambda: None), "name: mine\n", "t")
    for n, policy in enumerate(POLICIES):
        assert next(told) == {"kind": "began", "policy": policy}
        assert asked == list(POLICIES[:n])
        assert next(told) == {"kind": "result", "policy": policy}
    assert list(told) == [{"kind": "done"}]


def test_an_invalid_scenario_is_said_at_once() -> None:
    (told,) = page.tell(Desk(lambda: None), "name: '<b>'\n", "t")
    assert told["kind"] == "invalid"
    assert told["text"].startswith("name: ")


def test_what_a_run_lacks_is_said_under_its_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    from usp_viz.errors import MissingRequirement

    def run(scenario: Scenario) -> Run:
        raise MissingRequirement("No GPU", "Use --set run.device=cpu")

    monkeypatch.setattr(verify, "run", run)
    told = list(page.tell(Desk(lambda: None), "{}", "t"))
    assert [t["policy"] for t in told if t["kind"] == "failed"] == list(POLICIES)
    assert told[1]["text"] == "MissingRequirement: No GPU. Use --set run.device=cpu"


# -- cancelling ----------------------------------------------------------------------------------


def test_a_ticket_cancels_its_own_run_and_no_other() -> None:
    stopped: list[str] = []
    running, ended = threading.Event(), threading.Event()
    desk = Desk(lambda: (stopped.append("stop"), ended.set()))

    def work() -> None:
        with desk.serve("mine"):
            running.set()
            assert ended.wait(60)

    worker = threading.Thread(target=work)
    worker.start()
    assert running.wait(60)
    assert not desk.cancel("another")
    assert not stopped
    assert desk.cancel("mine")
    worker.join(60)
    assert stopped
    assert desk.is_cancelled("another")


def test_a_run_that_its_visitor_left_may_end_by_itself() -> None:
    desk = Desk(lambda: pytest.fail("its ranks were stopped"))
    running, leave = threading.Event(), threading.Event()

    def work() -> None:
        with desk.serve("mine"):
            running.set()
            assert leave.wait(60)

    worker = threading.Thread(target=work)
    worker.start()
    assert running.wait(60)
    left = threading.Thread(target=lambda: desk.cancel("mine", patience=60))
    left.start()
    while not desk.is_cancelled("mine"):
        pass
    leave.set()
    worker.join(60)
    left.join(60)
    assert not left.is_alive()


def test_what_was_cancelled_before_its_turn_does_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page, "_ran", lambda scenario: pytest.fail("it ran"))
    desk = Desk(lambda: None)
    desk.cancel("t")
    assert list(page.tell(desk, "{}", "t")) == [{"kind": "cancelled"}]
