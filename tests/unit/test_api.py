"""The endpoints' answers to whatever may be sent: JSON that says what is wrong, and no more."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from usp_viz import checking, plan
from usp_viz.errors import RunCancelled
from usp_viz.loading import bundled
from usp_viz.runtime import verify
from usp_viz.scenario import POLICIES, Scenario
from usp_viz.schemas import schemas
from usp_viz.ui import answers, caps

ASKING = {"run": answers.run, "check": answers.check, "simulate": answers.simulate}


def nested(depth: int) -> Any:
    value: Any = {}
    for _ in range(depth):
        value = {"mesh": value}
    return value


HOSTILE: dict[str, Any] = {
    "a path": "/etc/passwd",
    "a path as YAML": "/etc/passwd: 1",
    "a relative path": "../x",
    "a path to a bundled file": "assets/scenarios/varlen-ring.yaml",
    "a bundled name with its suffix": "varlen-ring.yaml",
    "standard input": "-",
    "a URL": "http://127.0.0.1/x.yaml",
    "a file object": {"path": "/etc/passwd", "meta": {"_type": "gradio.FileData"}},
    "code as engine": {"engine": "os:system"},
    "code as engine in YAML": "engine: os:system",
    "a YAML tag": "!!python/object/apply:os.system ['true']",
    "a YAML bomb": "a: &a [x, x]\nb: &b [*a, *a]\nc: [*b, *b]",
    "10 MB of text": "x" * 10_000_000,
    "10 MB of YAML": "name: " + "x" * 10_000_000,
    "10 MB in an object": {"title": "x" * 10_000_000},
    "NaN": {"run": {"timeout_s": math.nan}},
    "NaN in JSON": '{"run": {"timeout_s": NaN}}',
    "infinity in a list": {"tensors": {"values": {"list": [math.inf]}}},
    "a huge number": {"tokens": {"total": 10**400}},
    "a huge number in YAML": "tokens: {total: 1" + "0" * 5000 + "}",
    "an exponent bomb": "tokens: {total: 1e999999999}",
    "deep nesting": nested(100_000),
    "some nesting": nested(60),
    "deep nesting in JSON": '{"a":' * 100_000 + "1" + "}" * 100_000,
    "deep nesting in YAML": "a: " + "[" * 5_000 + "]" * 5_000,
    "nothing": None,
    "empty text": "",
    "spaces": "  \n ",
    "a number": 7,
    "a list": [{"mesh": {"ring": 2}}],
    "a list in JSON": "[1, 2]",
    "binary": "\x00\x01",
    "a lone surrogate": "\ud800",
    "not JSON at all": {"mesh": object()},
    "keys that are no words": {1: 2},
    "a repeated key": "mesh: {ring: 2}\nmesh: {ring: 1}",
    "not a sum": {"tokens": {"shards": [1, 2]}, "mesh": {"ring": 2}},
    "too many ranks for anybody": {"mesh": {"ring": 10**6}},
}


@pytest.mark.parametrize("ask", ASKING.values(), ids=ASKING)
@pytest.mark.parametrize("sent", HOSTILE.values(), ids=HOSTILE)
def test_hostile_input_is_invalid(ask: Any, sent: Any) -> None:
    answer = ask(sent)
    assert answer["outcome"] == "invalid"
    assert answer["error"]["class"] == "InvalidScenario"
    assert len(json.dumps(answer, allow_nan=False).encode("utf-8")) < 10_000
    assert Draft202012Validator(schemas()["result"]).is_valid(answer)


def test_no_file_is_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even one that would be a valid scenario, nor one named like a bundled scenario."""
    monkeypatch.chdir(tmp_path)
    for name in ("mine.yaml", "mine", "dense-2x2"):
        (tmp_path / name).write_text("name: opened\n", "utf-8")
        assert Scenario.load(f"./{name}").name == "opened"
    for sent in ("mine.yaml", "mine", "./mine", str(tmp_path / "mine.yaml")):
        assert answers.check(sent)["outcome"] == "invalid"
    assert answers.read("dense-2x2").name == "dense-2x2"


def test_a_near_miss_is_told_the_name() -> None:
    error = answers.check("varlen-rin")["error"]
    assert "varlen-ring" in error["nearest"]


def test_every_form_of_a_scenario_is_the_same_scenario() -> None:
    text = answers.bundled_text("varlen-ring")
    scenario = Scenario.load("varlen-ring")
    forms = ["varlen-ring", " varlen-ring\n", text, json.dumps(scenario.as_written())]
    for form in [*forms, scenario.normalised()]:
        assert answers.read(form).hash == scenario.hash
        assert answers.read(form).expect == scenario.expect


# -- answers that are no errors ----------------------------------------------------------------


@pytest.mark.parametrize("name", bundled())
def test_check_answers_as_the_library_does(name: str) -> None:
    assert answers.check(name) == checking.check(Scenario.load(name))


@pytest.mark.parametrize("name", bundled())
def test_simulate_answers_as_the_library_does(name: str) -> None:
    assert answers.simulate(name) == plan.simulate(Scenario.load(name)).to_json()


def test_scenarios_are_the_bundled_ones() -> None:
    listed = answers.scenarios()
    assert [scenario["name"] for scenario in listed] == list(bundled())
    assert all(Draft202012Validator(schemas()["scenario"]).is_valid(s) for s in listed)


def test_schema_by_name() -> None:
    assert answers.schema() == schemas()["scenario"]
    assert answers.schema("trace") == schemas()["trace"]
    assert answers.schema("/etc/passwd")["outcome"] == "invalid"
    assert answers.schema(None)["outcome"] == "invalid"  # pyright: ignore[reportArgumentType]
    assert answers.schema([])["outcome"] == "invalid"  # pyright: ignore[reportArgumentType]


# -- policies ----------------------------------------------------------------------------------


def test_all_policies_without_the_files_expectation() -> None:
    scenario = Scenario.load("varlen-ring")
    asked = answers.variants(scenario, "all")
    assert [s.policy for s in asked] == list(POLICIES)
    assert [s.expect for s in asked] == [None] * len(POLICIES)


def test_one_policy_keeps_the_expectation_only_if_it_is_the_files_own() -> None:
    scenario = Scenario.load("varlen-ring")
    assert scenario.expect is not None
    assert answers.variants(scenario, None) == [scenario]
    assert answers.variants(scenario, scenario.policy) == [scenario]
    (other,) = answers.variants(scenario, "extended")
    assert (other.policy, other.expect) == ("extended", None)


@pytest.mark.parametrize("policy", ["strict", "", 3, ["all"], {"a": 1}])
def test_unknown_policy_is_invalid(policy: Any) -> None:
    answer = answers.run("dense-2x2", policy)
    assert isinstance(answer, dict)
    assert (answer["outcome"], answer["error"]["key"]) == ("invalid", "policy")


def test_all_policies_give_a_list_even_of_nothing() -> None:
    (answer,) = answers.run("/etc/passwd", "all")
    assert answer["outcome"] == "invalid"


# -- what cannot be run ------------------------------------------------------------------------


def test_an_engine_that_is_not_there() -> None:
    answer = answers.run({"engine": "sglang"})
    assert isinstance(answer, dict)
    assert answer["outcome"] == "invalid"
    assert answer["error"]["class"] == "MissingRequirement"
    assert "sglang" in answer["error"]["message"]
    assert Draft202012Validator(schemas()["result"]).is_valid(answer)


@pytest.mark.parametrize(
    ("sent", "cap"),
    [
        ({"mesh": {"ring": 17}, "tokens": {"total": 17}}, "USP_VIZ_MAX_RANKS"),
        ({"tokens": {"total": 65_537}}, "USP_VIZ_MAX_TOKENS"),
        ({"run": {"timeout_s": 601.0}}, "USP_VIZ_MAX_SECONDS"),
    ],
)
def test_over_a_cap_of_run(sent: Any, cap: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANKS", "TOKENS", "SECONDS"):
        monkeypatch.delenv(f"USP_VIZ_MAX_{name}", raising=False)
    answer = answers.run(sent)
    assert isinstance(answer, dict)
    assert answer["outcome"] == "invalid"
    assert cap in answer["error"]["message"]
    assert answer["scenario"]["engine"] == "builtin"


@pytest.mark.parametrize(
    ("error", "cls"), [(RuntimeError("a secret"), "InternalError"), (RunCancelled("x"),) * 2]
)
def test_what_fails_inside_stays_inside(
    error: Exception, cls: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(scenario: Scenario) -> Any:
        raise error

    monkeypatch.setattr(verify, "run", fail)
    answer = answers.run("dense-2x2")
    assert isinstance(answer, dict)
    assert answer["outcome"] == "crashed"
    assert "secret" not in json.dumps(answer)
    assert ("secret" in caplog.text) is isinstance(cls, str)
    assert Draft202012Validator(schemas()["result"]).is_valid(answer)


# -- caps of predictions -----------------------------------------------------------------------

BIG: dict[str, Any] = {
    "ranks": {"mesh": {"ring": 1025}, "tokens": {"total": 1025}},
    "rows": {"tokens": {"total": 2**20 + 1}},
    "rows in the batch": {"tensors": {"batch": 2}, "tokens": {"total": 2**20}},
    "rows with copies": {"tokens": {"total": 2**20, "replicated": {"prefix": 1}}},
    "dense mask": {"tokens": {"total": 10_001}, "attention": {"mask": {"dense": {}}}},
}
BIG_TRACES: dict[str, Any] = {
    "events": {"mesh": {"ring": 256}, "tokens": {"total": 256}},
    "stripes": {"mesh": {"ring": 2}, "tokens": {"total": 2**20, "layout": "striped"}},
    "spans": {"mesh": {"ring": 16}, "tokens": {"total": 2**14, "layout": "striped"}},
}


@pytest.mark.parametrize("sent", BIG.values(), ids=BIG)
@pytest.mark.parametrize("ask", [answers.check, answers.simulate])
def test_over_a_cap_of_predictions(ask: Any, sent: Any) -> None:
    Scenario.parse(sent)
    answer = ask(sent)
    assert answer["outcome"] == "invalid"
    assert "at most" in answer["error"]["message"]


@pytest.mark.parametrize("sent", BIG_TRACES.values(), ids=BIG_TRACES)
def test_over_a_cap_of_traces(sent: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Refused without a trace in memory; the same scenario can be checked."""
    from usp_viz.trace import Trace

    monkeypatch.setattr(Trace, "to_json", None)
    answer = answers.simulate(sent)
    assert answer["outcome"] == "invalid"
    assert "at most" in answer["error"]["message"]
    assert "outcome" not in answers.check(sent)


def test_the_bound_on_events_is_one() -> None:
    """No scenario has more events than the bound that is looked at before they are made."""
    for ulysses, ring in ((1, 1), (1, 4), (4, 1), (2, 3), (3, 2), (8, 8)):
        ranks = ulysses * ring
        mapping = {
            "mesh": {"ulysses": ulysses, "ring": ring},
            "tensors": {"heads": 8},
            "tokens": {"total": 6 * ranks, "replicated": {"prefix": 1, "kv_prefix": 1}},
        }
        scenario = Scenario.parse(mapping)
        events = sum(1 for _ in plan.simulate(scenario).events())
        assert events <= caps.most_events(scenario) < 3 * events
