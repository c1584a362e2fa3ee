"""Events, their canonical form and hash, and the difference of two traces."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.strategies import scenarios
from usp_viz.layout import Order
from usp_viz.plan import simulate
from usp_viz.scenario import Scenario
from usp_viz.trace import OPS, TENSORS, Event, Trace, diff, spans_text

PLACE = Event(0, "shard", "place", 0, 0, "Q", ((0, 4),), (0, 8), 0)
SEND = Event(1, "hop 0", "send", 0, 1, "KV", ((0, 2), (3, 4)), (0, 8), 96)
ATTEND = Event(1, "hop 0", "attend", 1, 1, "O", ((0, 4),), (0, 8), 0, ((0, 2), (3, 4)), 12)
EVENTS = (PLACE, SEND, ATTEND)
LINES = (
    '{"step":0,"stage":"shard","op":"place","src":0,"dst":0,"tensor":"Q","rows":[[0,4]],'
    '"heads":[0,8],"bytes":0}',
    '{"step":1,"stage":"hop 0","op":"send","src":0,"dst":1,"tensor":"KV","rows":[[0,2],[3,4]],'
    '"heads":[0,8],"bytes":96}',
    '{"step":1,"stage":"hop 0","op":"attend","src":1,"dst":1,"tensor":"O","rows":[[0,4]],'
    '"heads":[0,8],"bytes":0,"keys":[[0,2],[3,4]],"pairs":12}',
)


def trace_of(*events: Event, ranks: int = 2) -> Trace:
    return Trace.recorded(ranks, events)


def changed(event: Event, **values: Any) -> Event:
    return dataclasses.replace(event, **values)


# -- canonical form --------------------------------------------------------------------------------


def test_the_canonical_line_of_an_event_is_the_published_one() -> None:
    assert tuple(event.line() for event in EVENTS) == LINES


def test_the_hash_is_sha256_over_the_lines() -> None:
    text = "".join(line + "\n" for line in LINES)
    assert trace_of(*EVENTS).hash == "sha256:" + hashlib.sha256(text.encode()).hexdigest()


@given(st.text(max_size=8))
def test_a_stage_is_escaped_as_json_escapes_it(stage: str) -> None:
    event = changed(SEND, stage=stage)
    text = json.dumps(event.to_json(), separators=(",", ":"), ensure_ascii=True)
    assert event.line() == text


@settings(max_examples=30, deadline=None)
@given(scenarios())
def test_json_text_and_json_say_the_same_and_both_come_back(scenario: Scenario) -> None:
    trace = simulate(scenario)
    data = trace.to_json()
    assert json.loads(trace.json_text()) == data
    again = Trace.from_json(json.loads(json.dumps(data)))
    assert tuple(again.events()) == tuple(trace.events())
    assert (again.stages, again.ranks, again.order) == (trace.stages, trace.ranks, trace.order)
    assert again == trace and hash(again) == hash(trace)


def test_the_json_of_a_trace() -> None:
    data = Trace.recorded(2, EVENTS, Order(1, 2, 8, 3)).to_json()
    assert list(data) == ["trace_version", "ranks", "order", "stages", "events", "hash"]
    assert data["trace_version"] == 1
    assert data["stages"] == ["shard", "hop 0"], "one for each step"
    assert data["order"] == {
        "kv_prefix": [0, 1],
        "prefix": [1, 3],
        "rows": [3, 11],
        "suffix": [11, 14],
    }
    assert data["events"] == [json.loads(line) for line in LINES]


def test_another_version_is_refused_with_what_to_do() -> None:
    data = trace_of(*EVENTS).to_json() | {"trace_version": 2}
    with pytest.raises(ValueError, match=r"trace_version: 2 .* reads version 1.*usp-viz simulate"):
        Trace.from_json(data)


def test_changed_events_are_found_out() -> None:
    data = trace_of(*EVENTS).to_json()
    data["events"][1]["bytes"] += 1
    with pytest.raises(ValueError, match="hash"):
        Trace.from_json(data)


# -- putting together ------------------------------------------------------------------------------


@given(st.permutations(EVENTS))
def test_recorded_events_may_come_in_any_order(events: list[Event]) -> None:
    assert tuple(trace_of(*events).events()) == EVENTS


def test_inside_a_step_op_goes_first_then_ranks_then_tensor() -> None:
    wanted = [
        Event(0, "s", op, src, dst, tensor, ((0, 1),), (0, 1), 0)
        for op in ("all_to_all", "send", "attend")
        for src in (0, 2)
        for dst in (1, 10)
        for tensor in ("Q", "KV", "O")
    ]
    assert list(trace_of(*reversed(wanted), ranks=11).step(0)) == wanted


def test_a_step_that_nobody_reached_is_empty() -> None:
    trace = trace_of(PLACE, changed(SEND, step=3))
    assert trace.stages == ("shard", "", "", "hop 0")
    assert [len(trace.step(n)) for n in range(4)] == [1, 0, 0, 1]


@pytest.mark.parametrize("number", [-1, 2])
def test_a_step_that_is_not_there(number: int) -> None:
    with pytest.raises(IndexError, match="steps 0 to 1"):
        trace_of(*EVENTS).step(number)


def test_bytes_links_and_collectives() -> None:
    swap = changed(SEND, op="all_to_all", step=2, src=1, dst=0, bytes=5)
    trace = trace_of(*EVENTS, swap, changed(swap, tensor="Q", bytes=7))
    assert trace.bytes_sent_per_rank == (96, 12)
    assert (trace.bytes_sent(0), trace.bytes_sent(1)) == (96, 12)
    assert trace.links == {(0, 1): 96, (1, 0): 12}
    assert trace.collectives == ("all_to_all_single", "irecv", "isend")
    assert trace_of(PLACE).collectives == ()
    assert trace_of(*EVENTS).collectives == ("irecv", "isend")


# -- difference ------------------------------------------------------------------------------------


def test_equal_traces_do_not_differ() -> None:
    assert diff(trace_of(*EVENTS), trace_of(*reversed(EVENTS))) == ()


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"bytes": 95}, "bytes 96 predicted, 95 recorded"),
        ({"rows": ((0, 3),)}, "rows [0, 2) [3, 4) predicted, [0, 3) recorded"),
        ({"heads": (0, 4)}, "heads [0, 8) predicted, [0, 4) recorded"),
        ({"stage": "hop 1"}, "stage hop 0 predicted, hop 1 recorded"),
    ],
)
def test_a_difference_says_what_where_and_both_values(values: dict[str, Any], text: str) -> None:
    (found,) = diff(trace_of(*EVENTS), trace_of(PLACE, changed(SEND, **values), ATTEND))
    assert found.text == f"Step 1 (hop 0): send of KV, rank 0 → 1: {text}."
    assert (found.step, found.predicted, found.recorded) == (1, SEND, changed(SEND, **values))


@pytest.mark.parametrize("values", [{"pairs": 11}, {"keys": ((0, 3),)}])
def test_what_was_attended_is_compared_too(values: dict[str, Any]) -> None:
    (found,) = diff(trace_of(*EVENTS), trace_of(PLACE, SEND, changed(ATTEND, **values)))
    assert next(iter(values)) in found.text


def test_missing_and_unexpected_events_are_told_apart() -> None:
    (missing,) = diff(trace_of(*EVENTS), trace_of(PLACE, ATTEND))
    assert missing.text.endswith("send of KV, rank 0 → 1 was predicted and did not happen.")
    (extra,) = diff(trace_of(PLACE, ATTEND), trace_of(*EVENTS))
    assert extra.text.endswith("send of KV, rank 0 → 1 happened and was not predicted.")


def test_an_event_recorded_twice_is_a_difference() -> None:
    (found,) = diff(trace_of(*EVENTS), trace_of(*EVENTS, SEND))
    assert found.predicted is None and found.recorded == SEND


def test_a_longer_and_a_shorter_trace_differ_in_the_steps_beyond() -> None:
    late = changed(SEND, step=2)
    assert [d.step for d in diff(trace_of(*EVENTS), trace_of(*EVENTS, late))] == [2]
    assert [d.step for d in diff(trace_of(*EVENTS, late), trace_of(*EVENTS))] == [2]


def test_another_number_of_ranks_is_the_first_difference() -> None:
    found = diff(trace_of(*EVENTS), trace_of(*EVENTS, ranks=4))
    assert found[0].text == "Predicted for 2 ranks, recorded from 4."


def test_the_earliest_come_first_and_not_more_than_asked_for() -> None:
    many = [changed(SEND, step=step, src=src) for step in range(5) for src in range(5)]
    found = diff(trace_of(*many), trace_of(), limit=7)
    assert [(d.step, d.predicted and d.predicted.src) for d in found] == [
        *[(0, src) for src in range(5)],
        (1, 0),
        (1, 1),
    ]


@settings(max_examples=60, deadline=None)
@given(scenarios(), st.data())
def test_one_changed_event_is_one_difference_in_its_step(scenario: Scenario, data: Any) -> None:
    trace = simulate(scenario)
    events = list(trace.events())
    place = data.draw(st.integers(0, len(events) - 1))
    values: dict[str, Any] = data.draw(
        st.sampled_from(
            [
                {"bytes": events[place].bytes + 1},
                {"rows": (*events[place].rows, (10**6, 10**6 + 1))},
                {"heads": (events[place].heads[0], events[place].heads[1] + 1)},
            ]
        )
    )
    events[place] = changed(events[place], **values)
    other = Trace.recorded(trace.ranks, events)
    (found,) = diff(trace, other)
    assert found.step == events[place].step and found.recorded == events[place]
    assert other.hash != trace.hash


# -- spans -----------------------------------------------------------------------------------------


def test_spans_for_people() -> None:
    assert spans_text(((0, 12), (24, 36))) == "[0, 12) [24, 36)"
    assert spans_text(tuple((n, n + 1) for n in range(0, 20, 2))) == (
        "[0, 1) [2, 3) [4, 5) [6, 7) [8, 9) [10, 11) and 4 more"
    )
    assert spans_text(()) == "none"


def test_the_vocabulary() -> None:
    assert OPS == ("place", "all_to_all", "send", "attend", "merge", "output", "raise")
    assert TENSORS == ("Q", "KV", "O", "error")
