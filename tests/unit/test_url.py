"""A scenario in an address: there and back, and nothing else."""

from __future__ import annotations

import json
from typing import Any
from urllib.parse import parse_qsl

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.strategies import scenarios
from usp_viz.errors import InvalidScenario
from usp_viz.loading import bundled, parse_mapping
from usp_viz.scenario import Scenario
from usp_viz.ui.url import decode, encode

AWKWARD = [
    "<img src=x onerror=alert(1)>",
    "${alert(1)}",
    "1e5",
    "no",
    "true",
    "~",
    " padded ",
    "a&b=c#d?e%20+f;g",
    "line\nbreak",
    "naïve 模型 🚀",
    '"quoted"',
    "[1, 2]",
    "x" * 10_000,
]


def bundled_mapping(name: str) -> dict[str, Any]:
    return parse_mapping(bundled()[name].read_text("utf-8"), name)


@pytest.mark.parametrize("name", bundled())
def test_a_bundled_scenario_is_its_name(name: str) -> None:
    written = bundled_mapping(name)
    assert encode(written) == f"scenario={name}"
    assert decode(f"?scenario={name}") == written


@pytest.mark.parametrize("name", bundled())
def test_what_differs_is_said_and_no_more(name: str) -> None:
    written = bundled_mapping(name)
    written["mesh"] = {**written["mesh"], "order": "ring-inner"}
    written.pop("expect")
    query = encode(written)
    assert dict(parse_qsl(query)) == {
        "scenario": name,
        "expect": "null",
        "mesh.order": "ring-inner",
    }
    assert decode(query) == written


@given(scenarios())
def test_every_scenario_survives(scenario: Scenario) -> None:
    written = scenario.as_written()
    found = decode("?" + encode(written) + "&step=3&show=sglang&present=1&tab=yaml&__theme=dark")
    assert found is not None
    assert Scenario.parse(found).normalised() == scenario.normalised()
    json.dumps(found, allow_nan=False)


@pytest.mark.parametrize("text", AWKWARD)
def test_awkward_text_stays_that_text(text: str) -> None:
    written = {"title": text, "description": text, "mesh": {"ring": 2}}
    query = encode(written)
    assert not set("<>\n &").intersection(query.replace("&", ""))
    assert decode(query) == written


@given(st.text(max_size=60))
def test_any_title_survives(text: str) -> None:
    if not text.isascii() and any(0xD800 <= ord(c) <= 0xDFFF for c in text):
        return
    assert decode(encode({"title": text, "mesh": {"ring": 2}})) == {
        "title": text,
        "mesh": {"ring": 2},
    }


@pytest.mark.parametrize(
    "query", ["", "?", "step=3&tab=yaml", "&&&", "utm_source=x", "%FF%FE", "="]
)
def test_an_address_without_a_scenario_holds_none(query: str) -> None:
    assert decode(query) is None


@pytest.mark.parametrize(
    "query",
    [
        "scenario=../../etc/passwd",
        "scenario=varlen-ring&mesh.=1",
        "scenario=varlen-ring&mesh..ring=1",
        "mesh=1&mesh.ring=2",
        "mesh.ring=!!python/object:os.system",
        "mesh.ring=*a",
        "mesh.ring=[" + "[" * 5000,
        "mesh.ring=" + "9" * 5000,
        "title=" + "x" * 300_000,
        "mesh.ring=[1",
    ],
)
def test_hostile_addresses_are_refused(query: str) -> None:
    with pytest.raises(InvalidScenario):
        decode(query)


@given(st.text(alphabet="abemshringtokens.=&?[]{}%!*:,0123456789\"'", max_size=80))
def test_any_address_is_read_or_refused(query: str) -> None:
    try:
        found = decode(query)
    except InvalidScenario:
        return
    assert found is None or isinstance(found, dict)
