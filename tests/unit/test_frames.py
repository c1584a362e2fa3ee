"""Frames: what each rank holds at any step, told from events alone."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.strategies import scenarios
from usp_viz.frames import Frame, Held, narrate, replay
from usp_viz.layout import Layout, count, ids, spans_of
from usp_viz.mesh import Mesh, head_split, kv_heads_of
from usp_viz.plan import simulate
from usp_viz.scenario import Scenario
from usp_viz.trace import Event, Trace


def scenario_of(ulysses: int = 1, ring: int = 1, **parts: Any) -> Scenario:
    return Scenario.parse({"mesh": {"ulysses": ulysses, "ring": ring}, **parts})


def rows_of(held: Held | None) -> list[int]:
    return [row for a, b in held.rows for row in range(a, b)] if held else []


def is_local(s: Scenario) -> bool:
    return s.attention.skip_sequence_parallel and s.attention.skip_kv == "full"


# -- invariants ------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(scenarios(policies=("extended", "sglang", "unguarded")), st.randoms())
def test_a_frame_is_the_same_however_one_gets_there(scenario: Scenario, random: Any) -> None:
    trace = simulate(scenario)
    forwards = tuple(replay(trace))
    assert len(forwards) == len(replay(trace)) == trace.steps
    frames = replay(trace)
    for number in random.sample(range(trace.steps), trace.steps):
        assert frames[number] == forwards[number]
        assert replay(trace)[number - trace.steps] == forwards[number]
    assert frames[1:] == forwards[1:]


@settings(max_examples=80, deadline=None)
@given(scenarios())
def test_everyone_begins_and_ends_with_its_own_rows(scenario: Scenario) -> None:
    frames, layout, mesh = replay(simulate(scenario)), Layout.of(scenario), Mesh.of(scenario)
    first, last = frames[0], frames[-1]
    for rank in range(mesh.ranks):
        own = sorted(ids(layout.queries(mesh.position(rank))).tolist())
        assert rows_of(first.ranks[rank].q) == rows_of(last.ranks[rank].output) == own
        keys = sorted(ids(layout.keys(mesh.position(rank))).tolist())
        if not is_local(scenario):
            assert rows_of(first.ranks[rank].kv) == keys
        end = last.ranks[rank]
        assert (end.q, end.kv, end.arriving, end.partial) == (None, None, None, None)
        if own:
            assert end.output is not None and end.output.heads == (0, scenario.tensors.heads)
    assert last.pairs == sum(rank.pairs for rank in last.ranks) == frames.pairs


@settings(max_examples=80, deadline=None)
@given(scenarios())
def test_kv_goes_round_and_every_row_is_at_one_ring_position_at_a_time(scenario: Scenario) -> None:
    if is_local(scenario):
        return
    layout, mesh = Layout.of(scenario), Mesh.of(scenario)
    copies = set(ids(layout.order.replicated_keys).tolist())
    share = scenario.tensors.heads // scenario.kv_heads
    heads = [kv_heads_of(part, share) for part in head_split(scenario.tensors.heads, mesh.ulysses)]
    frames = replay(simulate(scenario))
    for frame in frames:
        if not frame.stage.startswith("hop"):
            continue
        distance = int(frame.stage[4:])
        for ulysses in range(mesh.ulysses):
            if not heads[ulysses]:
                continue
            held = Counter[int]()
            for ring in range(mesh.ring):
                kv = frame.ranks[mesh.rank(ring, ulysses)].kv
                rows = set(rows_of(kv)) - copies
                assert rows == set(ids(layout.gathered((ring - distance) % mesh.ring)).tolist())
                held.update(rows)
                if kv is not None and rows and mesh.ulysses > 1:
                    assert kv.heads == (heads[ulysses].start, heads[ulysses].stop)
            wanted = range(layout.order.start, layout.order.stop)
            assert held == Counter(wanted)


@settings(max_examples=60, deadline=None)
@given(scenarios())
def test_what_arrives_is_what_is_attended_next(scenario: Scenario) -> None:
    frames = tuple(replay(simulate(scenario)))
    for number, frame in enumerate(frames):
        sends = [event for event in frame.events if event.op == "send"]
        later = [f for f in frames[number:] if f.stage.startswith("hop") and f.stage != frame.stage]
        assert [rank for rank, state in enumerate(frame.ranks) if state.arriving] == sorted(
            event.dst for event in sends
        ) or not sends
        if sends:
            assert [state.arriving for state in frame.ranks] == [s.kv for s in later[0].ranks]


@settings(max_examples=60, deadline=None)
@given(scenarios())
def test_partial_outputs_grow_by_what_is_attended(scenario: Scenario) -> None:
    trace = simulate(scenario)
    pairs, rows = Counter[int](), dict[int, set[int]]()
    for frame in replay(trace):
        for event in frame.events:
            if event.op == "attend":
                pairs[event.src] += event.pairs
                seen = rows.setdefault(event.src, set())
                seen.update(row for a, b in event.rows for row in range(a, b))
        for rank, state in enumerate(frame.ranks):
            assert state.pairs == pairs[rank]
            if frame.stage.startswith("hop"):
                assert rows_of(state.partial) == sorted(rows.get(rank, ()))
        assert frame.pairs == sum(pairs.values())


def test_queries_after_the_swap_are_the_groups_rows_and_the_ranks_heads() -> None:
    s = scenario_of(
        2,
        2,
        tokens={"total": 8, "replicated": {"prefix": 1, "kv_prefix": 1}},
        tensors={"heads": 3},
    )
    frame = replay(simulate(s))[1]
    assert frame.stage == "input all-to-all"
    assert [(state.q, state.kv) for state in frame.ranks] == [
        (Held(((1, 6),), (0, 2)), Held(((0, 6),), (0, 2))),
        (Held(((1, 6),), (2, 3)), Held(((0, 6),), (2, 3))),
        (Held(((1, 2), (6, 10)), (0, 2)), Held(((0, 2), (6, 10)), (0, 2))),
        (Held(((1, 2), (6, 10)), (2, 3)), Held(((0, 2), (6, 10)), (2, 3))),
    ]


def test_a_refused_call_raises_and_keeps_what_it_had() -> None:
    frames = replay(simulate(Scenario.load("varlen-ring").set({"policy": "sglang"})))
    assert [state.raised for state in frames[0].ranks] == [False] * 4
    assert [state.raised for state in frames[1].ranks] == [True] * 4
    assert [state.q for state in frames[1].ranks] == [state.q for state in frames[0].ranks]


def test_a_trace_that_breaks_off_still_has_its_frames() -> None:
    whole = simulate(scenario_of(2, 2, tokens={"total": 8}))
    events = [event for event in whole.events() if event.step < 3]
    frames = replay(Trace.recorded(4, events, whole.order))
    assert tuple(frames) == tuple(_unforeseen(frame, whole) for frame in replay(whole)[:3])


def _unforeseen(frame: Frame, whole: Trace) -> Frame:
    """The frame as told by somebody who does not know the later stages."""
    import dataclasses

    known = [stage for stage in whole.stages[frame.step + 1 : 3] if stage.startswith("hop")]
    text = narrate(frame.stage, frame.events, whole.ranks, next(iter(known), None))
    return dataclasses.replace(frame, narration=text)


def test_moves_and_works() -> None:
    frame = replay(simulate(scenario_of(ring=2, tokens={"total": 4})))[1]
    assert [(event.src, event.dst) for event in frame.moves] == [(0, 1), (1, 0)]
    assert [event.op for event in frame.works] == ["attend", "attend"]


def test_no_such_frame() -> None:
    frames = replay(simulate(scenario_of(tokens={"total": 2})))
    with pytest.raises(IndexError):
        frames[len(frames)]
    with pytest.raises(IndexError):
        frames[-len(frames) - 1]


@pytest.mark.parametrize("layout", ["contiguous", "striped"])
def test_a_frame_in_the_middle_of_a_large_trace(layout: str) -> None:
    total, ring, ulysses = 2**18, 16, 16
    s = scenario_of(
        ulysses,
        ring,
        tokens={"total": total, "layout": layout},
        tensors={"heads": 16},
        attention={"causal": True},
    )
    trace = simulate(s)
    frame = replay(trace)[trace.steps // 2]
    distance = int(frame.stage[4:])
    mesh, rows = Mesh.of(s), Layout.of(s)
    for rank in (0, 100, 255):
        kv = frame.ranks[rank].kv
        assert kv is not None
        source = (mesh.at(rank)[0] - distance) % ring
        assert kv.rows == spans_of(ids(rows.gathered(source)))
        assert sum(b - a for a, b in kv.rows) == count(rows.gathered(source)) == total // ring


# -- narration -------------------------------------------------------------------------------------


@settings(max_examples=50, deadline=None)
@given(scenarios(policies=("extended", "sglang", "unguarded")))
def test_every_step_is_told_in_one_sentence(scenario: Scenario) -> None:
    for frame in replay(simulate(scenario)):
        text = frame.narration
        assert text[0].isupper() or text[0].isdigit()
        assert text.endswith(".") and text.count(".") == 1 and "\n" not in text


def test_hops_say_whose_keys_who_works_and_where_kv_goes() -> None:
    s = scenario_of(ring=3, tokens={"total": 6}, attention={"causal": True})
    told = [frame.narration for frame in replay(simulate(s)) if frame.stage.startswith("hop")]
    assert told[0] == (
        "Each rank attends to the keys it holds, while that KV already travels on for hop 1."
    )
    assert told[1] == (
        "2 of 3 ranks attend to the keys that started 1 ring position back, while that KV already "
        "travels on for hop 2; the other has nothing to see there."
    )
    assert "merge" in told[2] and "log-sum-exp" in told[2]
    assert told[3] == (
        "1 of 3 ranks attends to the keys that started 2 ring positions back; the others have "
        "nothing to see there."
    )


def test_a_hop_only_to_send_from_says_so() -> None:
    send = Event(1, "hop 0", "send", 0, 1, "KV", ((0, 1),), (0, 1), 8)
    assert narrate("hop 0", [send], 2, "hop 1") == (
        "Nobody may see anything of the keys at hand, while that KV already travels on for hop 1."
    )
