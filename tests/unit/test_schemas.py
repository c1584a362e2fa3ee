"""The published schemas, held against an independent validator and against the program itself."""

from __future__ import annotations

import copy
import json
import math
from typing import Any

import pytest
from hypothesis import given, settings
from jsonschema import Draft202012Validator

from tests.strategies import scenarios
from usp_viz.errors import InvalidScenario
from usp_viz.ledger import Pairs
from usp_viz.loading import bundled, parse_mapping
from usp_viz.plan import simulate
from usp_viz.runtime.accuracy import Accuracy, RankAccuracy
from usp_viz.runtime.result import Problem, Run, Where, invalid_json
from usp_viz.scenario import Scenario
from usp_viz.schemas import FOLDER, files, schemas


def strict(schema: Any) -> Any:
    """`schema` with every key forbidden that it does not describe."""
    if isinstance(schema, list):
        return [strict(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {key: strict(value) for key, value in schema.items()}
    if "properties" in schema:
        closed["additionalProperties"] = False
    return closed


def accepts(name: str, value: Any) -> bool:
    return Draft202012Validator(schemas()[name]).is_valid(value)


@pytest.mark.parametrize("path", files(), ids=lambda path: path.name)
def test_checked_in_copy_is_current(path: Any) -> None:
    """After a change of a format: python -m usp_viz.schemas."""
    assert path.read_text("utf-8") == files()[path]


def test_there_are_no_other_copies() -> None:
    assert {path.name for path in FOLDER.iterdir()} == {path.name for path in files()}


@pytest.mark.parametrize("name", schemas())
def test_is_a_schema(name: str) -> None:
    Draft202012Validator.check_schema(schemas()[name])


@pytest.mark.parametrize("name", bundled())
def test_bundled_scenario_is_valid(name: str) -> None:
    written = parse_mapping(bundled()[name].read_text("utf-8"))
    scenario = Scenario.parse(written)
    assert accepts("scenario", written)
    assert accepts("scenario", scenario.normalised())
    assert accepts("scenario", scenario.as_written())


@given(scenarios(policies=("extended", "sglang", "unguarded")))
@settings(max_examples=50)
def test_schema_accepts_what_the_program_accepts(scenario: Scenario) -> None:
    assert accepts("scenario", scenario.normalised())
    assert accepts("scenario", scenario.as_written())


BAD: dict[str, dict[str, Any]] = {
    "unknown key": {"mash": {}},
    "unknown inner key": {"mesh": {"rings": 2}},
    "version": {"schema_version": 2},
    "name is no slug": {"name": "No Slug"},
    "name is a path": {"name": "../x"},
    "bool for an int": {"mesh": {"ring": True}},
    "text for an int": {"mesh": {"ring": "2"}},
    "fraction for an int": {"mesh": {"ring": 1.5}},
    "zero ranks": {"mesh": {"ulysses": 0}},
    "absurd ranks": {"mesh": {"ulysses": 10**9}},
    "absurd tokens": {"tokens": {"total": 10**12}},
    "no tokens": {"tokens": {"total": 0}},
    "order": {"mesh": {"order": "inner"}},
    "dtype": {"tensors": {"dtype": "int8"}},
    "values word": {"tensors": {"values": "zeros"}},
    "values are text": {"tensors": {"values": {"list": ["a"]}}},
    "int for a bool": {"attention": {"causal": 1}},
    "negative shard": {"tokens": {"shards": [49, -1]}},
    "shards word": {"tokens": {"shards": "uneven"}},
    "no documents": {"tokens": {"documents": []}},
    "mask word": {"attention": {"mask": "causal"}},
    "unknown mask": {"attention": {"mask": {"keys": {"valid": [1]}}}},
    "two masks in one": {"attention": {"mask": {"window": {}, "prefix_lm": {"prefix": 1}}}},
    "mask without its key": {"attention": {"mask": {"tail_pad": {}}}},
    "hole with one end": {"attention": {"mask": {"key": {"valid": [9], "holes": [[1]]}}}},
    "density": {"attention": {"mask": {"dense": {"density": 2}}}},
    "layer": {"attention": {"layer": "Attention"}},
    "policy": {"policy": "strict"},
    "release": {"release": "0.5.0"},
    "release is a number": {"release": 132848349},
    "engine is code": {"engine": "os:system"},
    "fault": {"fault": "drop-hop"},
    "no time": {"run": {"timeout_s": 0}},
    "seed": {"run": {"seed": -1}},
    "device": {"run": {"device": "tpu"}},
    "expect without outcome": {"expect": {"error": "usp-varlen-ring"}},
    "part is a list": {"mesh": [2, 2]},
    "part is null": {"tokens": None},
}


@pytest.mark.parametrize("written", BAD.values(), ids=BAD)
def test_schema_and_program_refuse_alike(written: dict[str, Any]) -> None:
    assert not accepts("scenario", written)
    with pytest.raises(InvalidScenario):
        Scenario.parse(written)


@pytest.mark.parametrize("name", bundled())
def test_trace_is_described(name: str) -> None:
    trace = simulate(Scenario.load(name)).to_json()
    validator = Draft202012Validator(strict(schemas()["trace"]))
    assert [error.message for error in validator.iter_errors(trace)] == []


def test_trace_schema_refuses_what_is_no_trace() -> None:
    trace = simulate(Scenario()).to_json()
    assert accepts("trace", trace)
    for key in ("events", "hash", "stages", "ranks", "trace_version"):
        assert not accepts("trace", {k: v for k, v in trace.items() if k != key})
    broken = copy.deepcopy(trace)
    broken["events"][0]["op"] = "teleport"
    assert not accepts("trace", broken)


# -- results -----------------------------------------------------------------------------------


def a_run(**changes: Any) -> Run:
    scenario = Scenario()
    parts: dict[str, Any] = {
        "scenario": scenario,
        "outcome": "verified",
        "backend": "sdpa",
        "device": "cpu",
        "trace": simulate(scenario),
        "differences": (),
        "timing": {"wall_ms": 41.0, "attention_ms": 6.2, "cold_start_ms": None},
        "versions": {"usp_viz": "source", "python": "3.11.7"},
        "accuracy": Accuracy(1e-7, 1e-7, 1e-5, (RankAccuracy(0, 48, 0, 1e-7),)),
        "pairs": Pairs(8, 8, 0, 0, 0),
        "warnings": (("causal-ring", "silently wrong"),),
    }
    return Run(**parts | changes)


DETAILS = {
    "release": "0132848349",
    "source": "layer.py:878",
    "because": ["ring = 2 > 1"],
    "fixes": [{"id": "ring-1", "title": "Ring degree 1", "set": {"mesh.ring": 1}}],
}
RESULTS = {
    "verified": a_run(),
    "wrong": a_run(
        outcome="wrong",
        accuracy=Accuracy(math.nan, math.inf, 1e-5, (RankAccuracy(0, 48, 48, math.nan),)),
        pairs=None,
    ),
    "refused": a_run(
        outcome="refused",
        accuracy=None,
        pairs=None,
        problem=Problem("NotImplementedError", "no", (0,), "usp-varlen-ring", DETAILS),
    ),
    "crashed": a_run(
        outcome="crashed",
        accuracy=None,
        pairs=None,
        problem=Problem(
            "RankDied", "gone", (0,), where=(Where(0, "died", None, "", "", "exit code -9"),)
        ),
    ),
}


@pytest.mark.parametrize("run", RESULTS.values(), ids=RESULTS)
def test_result_is_described(run: Run) -> None:
    text = json.dumps(run.to_json(), allow_nan=False)
    assert_described(json.loads(text))


def test_invalid_results_are_described() -> None:
    with pytest.raises(InvalidScenario) as caught:
        Scenario.parse({"mesh": {"ring": 0}})
    assert_described(invalid_json(caught.value))
    assert_described(invalid_json(caught.value, Scenario()))


def test_result_schema_refuses_what_is_no_result() -> None:
    result = RESULTS["refused"].to_json()
    for key in result:
        assert not accepts("result", {k: v for k, v in result.items() if k != key}), key
    assert not accepts("result", result | {"outcome": "fine"})
    assert not accepts("result", result | {"outcome": "invalid"})
    assert not accepts("result", result | {"error": {"class": "NotImplementedError"}})


def test_result_may_grow() -> None:
    """Adding is free: who reads results must not trip over a new key."""
    assert accepts("result", RESULTS["verified"].to_json() | {"new": 1})


def assert_described(result: dict[str, Any]) -> None:
    validator = Draft202012Validator(strict(schemas()["result"]))
    assert [error.message for error in validator.iter_errors(result)] == []
    if result["scenario"] is not None:
        assert accepts("scenario", result["scenario"])
