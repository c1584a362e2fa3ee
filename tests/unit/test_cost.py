"""Bytes, FLOPs, memory and time of plans, against hand-made figures and bounds."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.strategies import scenarios
from usp_viz.cost import Machine, Timeline, cost, peak_bytes, timeline
from usp_viz.plan import plan, simulate
from usp_viz.scenario import Scenario
from usp_viz.trace import Event, Trace


def scenario_of(ulysses: int = 1, ring: int = 1, **parts: Any) -> Scenario:
    return Scenario.parse({"mesh": {"ulysses": ulysses, "ring": ring}, **parts})


# -- bytes and FLOPs -------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(scenarios(policies=("extended", "sglang", "unguarded")))
def test_what_is_sent_is_received_and_adds_up_by_link(scenario: Scenario) -> None:
    found, trace = cost(scenario), simulate(scenario)
    assert tuple(rank.sent for rank in found.ranks) == trace.bytes_sent_per_rank
    for rank in found.ranks:
        assert rank.sent == sum(n for (src, _), n in found.links.items() if src == rank.rank)
        assert rank.received == sum(n for (_, dst), n in found.links.items() if dst == rank.rank)
        assert rank.flops == 4 * scenario.tensors.head_dim * rank.pairs
        assert rank.memory.peak >= rank.memory.inputs + rank.memory.output
    assert all(src != dst and n > 0 for (src, dst), n in found.links.items())
    assert peak_bytes(plan(scenario)) == tuple(rank.memory.peak for rank in found.ranks)


def test_a_ring_of_four_links_neighbours_and_a_ulysses_group_everyone() -> None:
    ring = cost(scenario_of(1, 4, tokens={"total": 16}, tensors={"heads": 4, "head_dim": 8}))
    assert ring.links == {(r, (r + 1) % 4): 3 * 2 * 4 * 4 * 8 * 4 for r in range(4)}
    ulysses = cost(scenario_of(4, 1, tokens={"total": 16}, tensors={"heads": 4, "head_dim": 8}))
    block = 4 * 1 * 8 * 4  # rows x heads x D x bytes, for Q, K, V and O
    assert ulysses.links == {(a, b): 4 * block for a in range(4) for b in range(4) if a != b}


@pytest.mark.parametrize(
    ("layout", "imbalance"), [("contiguous", 58 / 34), ("zigzag", 1), ("striped", 40 / 34)]
)
def test_imbalance_is_the_busiest_over_the_mean(layout: str, imbalance: float) -> None:
    s = scenario_of(1, 4, tokens={"total": 16, "layout": layout}, attention={"causal": True})
    assert cost(s).imbalance == pytest.approx(imbalance)


def test_no_work_is_balanced() -> None:
    s = scenario_of(ring=2, tokens={"total": 4}, attention={"mask": {"key": {"valid": [0]}}})
    assert cost(s).imbalance == 1.0


def test_flops_of_one_rank() -> None:
    s = scenario_of(tokens={"total": 10}, tensors={"batch": 3, "heads": 2, "head_dim": 16})
    (rank,) = cost(s).ranks
    assert rank.flops == 3 * 2 * (2 * 10 * 10 * 16) * 2  # two products of 2·S·S·D for each head


# -- memory ----------------------------------------------------------------------------------------


def parts_of(s: Scenario, rank: int = 0) -> dict[str, int]:
    memory = cost(s).ranks[rank].memory
    return {name: getattr(memory, name) for name in (*memory.__slots__, "peak")}


UNIT = 8 * 8 * 4 * 2  # 8 rows x 8 heads x D 4 x 2 bytes: one rank's Q


def test_memory_of_a_ring() -> None:
    s = scenario_of(
        1, 4, tokens={"total": 32}, tensors={"heads": 8, "head_dim": 4, "dtype": "bfloat16"}
    )
    lse = 8 * 8 * 4
    assert parts_of(s) == {
        "inputs": 3 * UNIT,
        "input_send": 0,
        "input_received": 0,
        "buffers": 4 * UNIT,  # K and V, twice
        "accumulators": 2 * UNIT + lse,  # float32 for bfloat16
        "block": UNIT + lse,
        "output_send": 0,
        "output_received": 0,
        "output": UNIT,
        "peak": 3 * UNIT + 4 * UNIT + 2 * UNIT + lse + UNIT + lse,
    }


def test_memory_of_ulysses_with_shared_kv_heads_and_uneven_shards() -> None:
    s = scenario_of(
        2,
        1,
        tokens={"total": 6, "shards": [2, 4]},
        tensors={"heads": 4, "kv_heads": 2, "head_dim": 4, "dtype": "float32"},
    )
    cell = 4 * 4
    assert parts_of(s, 1) == {
        "inputs": 4 * (4 + 2 * 2) * cell,
        "input_send": 4 * (4 + 2 * 2) * cell,
        "input_received": 6 * (2 + 2 * 1) * cell,
        "buffers": 0,
        "accumulators": 6 * 2 * (cell + 4),
        "block": 6 * 2 * (cell + 4),
        "output_send": 6 * 2 * cell,
        "output_received": 4 * 4 * cell,
        "output": 4 * 4 * cell,
        # When outputs go back: inputs, accumulators, what is sent, what came, the output.
        "peak": 4 * 8 * cell + 6 * 2 * (cell + 4) + (6 * 2 + 4 * 4 + 4 * 4) * cell,
    }


def test_float64_accumulates_in_float64_and_the_batch_counts() -> None:
    one, three = (
        parts_of(
            scenario_of(
                1, 2, tokens={"total": 4}, tensors={"batch": n, "heads": 1, "dtype": "float64"}
            )
        )
        for n in (1, 3)
    )
    assert one["accumulators"] == 2 * (32 * 8 + 8)
    assert three == {name: 3 * size for name, size in one.items()}


def test_a_local_rank_holds_all_keys_and_needs_no_staging() -> None:
    s = scenario_of(
        2,
        2,
        tokens={"total": 16},
        tensors={"heads": 2, "head_dim": 1},
        attention={"skip_sequence_parallel": True},
    )
    memory = parts_of(s)
    assert memory["inputs"] == (4 * 2 + 2 * 16 * 2) * 4
    assert memory["input_send"] == memory["buffers"] == memory["output_send"] == 0


# -- time ------------------------------------------------------------------------------------------

MACHINE = Machine(latency_s=1.0, bytes_per_s=10.0, flops_per_s=8.0)


def attend(step: int, rank: int, pairs: int) -> Event:
    row: Any = ((0, 1),)
    return Event(step, f"hop {step}", "attend", rank, rank, "O", row, (0, 1), 0, row, pairs)


def send(step: int, src: int, dst: int, size: int) -> Event:
    return Event(step, f"hop {step}", "send", src, dst, "KV", ((0, 1),), (0, 1), size)


def lanes(found: Timeline) -> set[tuple[int, str, float, float]]:
    return {(s.rank, s.lane, s.start, s.stop) for s in found.segments}


RING = Trace.recorded(
    2,
    # A pair is 4·D = 4 FLOPs: half a second. Messages take 1 + 40/10 = 5 and 1 + 10/10 = 2 seconds.
    [
        send(0, 0, 1, 40),
        send(0, 1, 0, 10),
        attend(0, 0, 6),
        attend(0, 1, 12),
        attend(1, 0, 2),
        attend(1, 1, 4),
    ],
)


def test_a_hop_whose_kv_travels_while_it_is_computed() -> None:
    found = timeline(RING, 1, MACHINE, overlap=True)
    assert lanes(found) == {
        (0, "send", 0, 5),
        (1, "send", 0, 2),
        (0, "compute", 0, 3),
        (0, "wait", 3, 5),  # its own message is not out
        (1, "compute", 0, 6),  # KV is there at 5, before it is done
        (0, "compute", 5, 6),
        (1, "compute", 6, 8),
    }
    assert found.makespan == 8
    assert found.total("compute") == (4, 8) and found.total("wait") == (2, 0)
    assert found.total("send") == (5, 2)


def test_a_hop_that_computes_first_and_sends_then() -> None:
    found = timeline(RING, 1, MACHINE, overlap=False)
    assert lanes(found) == {
        (0, "compute", 0, 3),
        (1, "compute", 0, 6),
        (0, "send", 6, 11),  # the receiver is not ready before 6
        (1, "send", 6, 8),
        (0, "wait", 3, 11),
        (1, "wait", 6, 11),
        (0, "compute", 11, 12),
        (1, "compute", 11, 13),
    }


def test_an_all_to_all_starts_together_and_ends_with_the_last_message() -> None:
    def swap(src: int, dst: int, tensor: str, size: int) -> Event:
        return Event(1, "input all-to-all", "all_to_all", src, dst, tensor, ((0, 1),), (0, 1), size)

    events = [
        attend(0, 0, 4),
        swap(0, 0, "Q", 0),
        swap(0, 1, "Q", 10),
        swap(0, 1, "KV", 20),
        swap(1, 0, "Q", 10),
    ]
    found = timeline(Trace.recorded(3, events), 1, MACHINE)
    assert lanes(found) == {
        (0, "compute", 0, 2),
        (1, "wait", 0, 2),
        (0, "send", 2, 6),  # Q and KV are one message: 1 + 30/10
        (1, "send", 2, 4),
        (1, "wait", 4, 6),
    }


def test_segments_say_which_step_they_belong_to() -> None:
    trace = simulate(scenario_of(2, 2, tokens={"total": 8}))
    for segment in timeline(trace, 32, MACHINE).segments:
        assert trace.stages[segment.step] == segment.stage


@settings(max_examples=60, deadline=None)
@given(scenarios(), st.floats(0, 1e-3), st.floats(1e3, 1e9), st.floats(1e3, 1e9))
def test_bounds_of_the_makespan(
    scenario: Scenario, latency: float, bandwidth: float, speed: float
) -> None:
    trace, dim = simulate(scenario), scenario.tensors.head_dim
    machine = Machine(latency, bandwidth, speed)
    hidden, shown = (timeline(trace, dim, machine, overlap) for overlap in (True, False))
    assert hidden.makespan <= shown.makespan * (1 + 1e-12)
    busiest = max(rank.flops for rank in cost(scenario).ranks) / speed
    assert hidden.makespan >= busiest * (1 - 1e-12)
    for found in (hidden, shown):
        by_rank: dict[int, list[tuple[float, float]]] = {}
        for segment in found.segments:
            assert 0 <= segment.start < segment.stop <= found.makespan
            if segment.lane != "send" or "all-to-all" in segment.stage:
                by_rank.setdefault(segment.rank, []).append((segment.start, segment.stop))
        for own in by_rank.values():
            own.sort()
            assert all(a[1] <= b[0] for a, b in pairwise(own))


def test_one_rank_only_computes() -> None:
    found = timeline(simulate(scenario_of(tokens={"total": 4}, tensors={"heads": 1})), 32, MACHINE)
    assert lanes(found) == {(0, "compute", 0, 16 * 4 * 32 / 8)}
