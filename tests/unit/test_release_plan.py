"""Plans of the policies sglang and unguarded, against `usp_viz.seen`, pair by pair."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.strategies import lengths, scenarios
from usp_viz.calls import Call
from usp_viz.layout import spans_of
from usp_viz.mask import Visibility
from usp_viz.plan import simulate
from usp_viz.rules import ending
from usp_viz.scenario import RELEASES, Scenario
from usp_viz.seen import Seen
from usp_viz.trace import Trace

HEADS = 12


@st.composite
def sayable(draw: Any) -> Scenario:
    """Scenarios of which many get through: one difficulty or two at a time."""
    ulysses, ring = draw(st.sampled_from([(1, 1), (2, 1), (1, 2), (2, 2), (1, 3), (4, 1), (2, 3)]))
    ranks = ulysses * ring
    total = 2 * ranks * draw(st.integers(1, 3))
    layout = draw(st.sampled_from(["contiguous"] * 3 + ["striped", "zigzag"]))
    uneven = layout == "contiguous" and draw(st.booleans())
    pads = [
        {"key": {"valid": [max(1, total - 3)], "holes": [[0, 1]]}},
        {"tail_pad": {"start": max(0, total - 3)}},
        {"gap_pad": {"start": 1, "end": 2}},
        {"window": {"left": 2}},
    ]
    replicated = [{}, {"prefix": 2}, {"suffix": 3}, {"kv_prefix": 2}]
    return Scenario.parse(
        {
            "mesh": {"ulysses": ulysses, "ring": ring},
            "tensors": {
                "batch": draw(st.integers(1, 2)),
                "heads": HEADS,
                "kv_heads": draw(st.sampled_from([12, 12, 4])),
                "head_dim": 2,
            },
            "tokens": {
                "total": total,
                "layout": layout,
                "shards": draw(lengths(total, ranks)) if uneven else "even",
                "replicated": draw(st.sampled_from([{}, *replicated])),
            },
            "attention": {
                "layer": draw(st.sampled_from(["USPAttention"] * 2 + ["UlyssesAttention"])),
                "causal": draw(st.booleans()),
                "mask": draw(st.sampled_from(["none", "none", *pads])),
                "skip_sequence_parallel": draw(st.sampled_from([False] * 5 + [True])),
                "skip_kv": draw(st.sampled_from(["full", "sharded"])),
                "sglang_backend": draw(st.sampled_from(["FA", "FA", "TORCH_SDPA"])),
            },
            "policy": draw(st.sampled_from(["sglang", "unguarded"])),
            "release": draw(st.sampled_from(RELEASES)),
        }
    )


def attended(trace: Trace) -> dict[tuple[int, str], tuple[Any, ...]]:
    events = [event for event in trace.events() if event.op == "attend"]
    return {(e.src, e.stage): (e.pairs, e.rows, e.keys) for e in events}


def seen(scenario: Scenario) -> dict[tuple[int, str], tuple[Any, ...]]:
    """The same from the matrices of every kernel call."""
    call = Call(scenario, scenario.release, scenario.policy == "unguarded")
    found, meant = Seen.of(call), Visibility.of(scenario)
    pairs: Counter[tuple[int, int]] = Counter()
    queries: dict[tuple[int, int], set[int]] = {}
    keys: dict[tuple[int, int], set[int]] = {}
    for place in found.places:
        ids = found.queries(place)
        for kernel in found.calls(place):
            for row in range(scenario.tensors.batch):
                hits = found.allowed(place, kernel, row) & meant.is_valid(ids, row)[:, None]
                at = (place, kernel.distance)
                pairs[at] += int(hits.sum())
                queries.setdefault(at, set()).update(ids[hits.any(1)].tolist())
                keys.setdefault(at, set()).update(kernel.keys[hits.any(0)].tolist())
    together = scenario.mesh.ranks // len(found.places)
    return {
        (rank, f"hop {distance}"): (
            number * HEADS // together,
            spans_of(sorted(queries[place, distance])),
            spans_of(sorted(keys[place, distance])),
        )
        for (place, distance), number in pairs.items()
        if number
        for rank in range(place * together, (place + 1) * together)
    }


@settings(max_examples=200, deadline=None)
@given(sayable())
def test_what_a_release_attends(scenario: Scenario) -> None:
    if ending(scenario, policy=scenario.policy) is None:
        assert attended(simulate(scenario)) == seen(scenario)


@settings(max_examples=60, deadline=None)
@given(scenarios(policies=("sglang", "unguarded")))
def test_a_call_that_ends_is_placed_and_raises_on_the_ranks_that_raise(scenario: Scenario) -> None:
    end = ending(scenario, policy=scenario.policy)
    trace = simulate(scenario)
    assert {event.op for event in trace.step(0)} <= {"place"}
    if end is None:
        assert trace.stages[-1] == "output"
        return
    raising = [rank for rank, message in enumerate(end.messages) if message is not None]
    assert [(e.op, e.src, e.dst, e.tensor, e.rows, e.bytes) for e in trace.step(1)] == [
        ("raise", rank, rank, "error", (), 0) for rank in raising
    ]
    assert trace.steps == 2 and not any(trace.bytes_sent_per_rank)


@pytest.mark.parametrize("name", ["varlen-ring", "mask-ring", "ulysses-ring"])
def test_the_three_refusals_raise_everywhere(name: str) -> None:
    trace = simulate(Scenario.load(name).set({"policy": "sglang"}))
    assert trace.stages == ("shard", "guard")
    assert [event.src for event in trace.step(1)] == list(range(trace.ranks))


def test_behind_the_varlen_guard_each_row_sees_its_own_ulysses_group_only() -> None:
    scenario = Scenario.load("varlen-ring").set({"policy": "unguarded", "mesh.ulysses": 2})
    trace = simulate(scenario)
    assert "hop 1" not in trace.stages and trace.collectives == ("all_to_all_single",)
    first = sum(scenario.shards[:2])
    wanted = {0: ((0, first),), 1: ((0, first),), 2: ((first, 48),), 3: ((first, 48),)}
    assert {e.src: e.keys for e in trace.events() if e.op == "attend"} == wanted


def test_ulysses_attention_spans_all_ranks_and_uses_no_ring() -> None:
    scenario = Scenario.load("ulysses-ring").set({"policy": "unguarded"})
    trace = simulate(scenario)
    assert trace.stages == ("shard", "input all-to-all", "hop 0", "output all-to-all", "output")
    pairs = {(e.src, e.dst) for e in trace.step(1)}
    assert pairs == {(a, b) for a in range(trace.ranks) for b in range(trace.ranks)}


def test_rank_numbers_are_positions_whatever_the_order() -> None:
    parts = {"tokens": {"total": 12}, "policy": "sglang"}
    inner, outer = (
        simulate(Scenario.parse({"mesh": {"ulysses": 2, "ring": 2, "order": order}, **parts}))
        for order in ("ulysses-inner", "ring-inner")
    )
    assert inner == outer
