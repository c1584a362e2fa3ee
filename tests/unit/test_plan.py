"""Plans against a second derivation of every event, from sets of (row, head), and known figures."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
from hypothesis import given, settings

from tests.oracle import Oracle
from tests.strategies import scenarios
from usp_viz.plan import plan, simulate
from usp_viz.scenario import ITEMSIZE, Scenario
from usp_viz.trace import Event, canonical

Cells = frozenset[tuple[int, int]]
"""(row, head) pairs that a rank holds."""


def scenario_of(ulysses: int = 1, ring: int = 1, **parts: Any) -> Scenario:
    return Scenario.parse({"mesh": {"ulysses": ulysses, "ring": ring}, **parts})


# -- the same events a second time, element by element ---------------------------------------------


def spans(values: Iterable[int]) -> tuple[tuple[int, int], ...]:
    found = set(values)
    starts = sorted(value for value in found if value - 1 not in found)
    stops = sorted(value + 1 for value in found if value + 1 not in found)
    return tuple(zip(starts, stops, strict=True))


class Ranks:
    """What the contract says about ranks, rows and heads, for one scenario."""

    def __init__(self, s: Scenario) -> None:
        self.s, self.oracle = s, Oracle(s)
        self.u, self.r = s.mesh.ulysses, s.mesh.ring
        self.h, self.g = s.tensors.heads, s.kv_heads
        self.cell = s.tensors.batch * s.tensors.head_dim * ITEMSIZE[s.tensors.dtype]
        replicated, size = s.tokens.replicated, self.oracle.size
        self.query_copies = {
            *range(replicated.kv_prefix, self.oracle.start),
            *range(self.oracle.stop, size),
        }
        self.key_copies = self.query_copies | set(range(replicated.kv_prefix))
        self.matrices = [self.oracle.matrix(b) for b in range(s.tensors.batch)]
        attention = s.attention
        self.local = attention.skip_sequence_parallel and attention.skip_kv == "full"

    def rank(self, ring: int, ulysses: int) -> int:
        if self.s.mesh.order == "ulysses-inner":
            return ring * self.u + ulysses
        return ulysses * self.r + ring

    def shards(self) -> list[list[int]]:
        """S rows by position, as whole-order ids."""
        total, first = self.s.tokens.total, self.oracle.start
        rows = list(range(first, first + total))
        if self.s.tokens.layout == "contiguous":
            lengths = list(self.s.shards)
            return [rows[sum(lengths[:p]) :][: lengths[p]] for p in range(self.u * self.r)]
        rings: list[list[int]] = []
        for ring in range(self.r):
            if self.s.tokens.layout == "striped":
                rings.append(rows[ring :: self.r])
            else:
                chunk = total // (2 * self.r)
                late = 2 * self.r - 1 - ring
                rings.append(
                    rows[ring * chunk : (ring + 1) * chunk]
                    + rows[late * chunk : (late + 1) * chunk]
                )
        each = total // (self.u * self.r)
        return [rows[u * each : (u + 1) * each] for rows in rings for u in range(self.u)]

    def heads(self, ulysses: int) -> list[int]:
        """Query heads of a Ulysses index."""
        if self.local:
            return list(range(self.h))
        size, more = self.h // self.u, self.h % self.u
        start = ulysses * size + min(ulysses, more)
        return list(range(start, start + size + (ulysses < more)))

    def kv_heads(self, ulysses: int) -> list[int]:
        """Exactly those that its query heads read."""
        return sorted({head // (self.h // self.g) for head in self.heads(ulysses)})

    def seen(self, queries: set[int], keys: set[int]) -> tuple[int, set[int], set[int]]:
        """(pairs over batch rows, queries that see a key, keys that are seen)."""
        pairs, some_queries, some_keys = 0, set[int](), set[int]()
        for b, matrix in enumerate(self.matrices):
            for i in queries:
                if not self.oracle.valid(b, i):
                    continue
                found = [j for j in keys if matrix[i][j]]
                pairs += len(found)
                some_keys.update(found)
                some_queries.update([i] if found else [])
        return pairs, some_queries, some_keys


def expected(s: Scenario) -> list[Event]:
    """Every event of a scenario under the extended policy."""
    return [event for step in steps(Ranks(s)) for event in sorted(step, key=canonical)]


def steps(x: Ranks) -> Iterator[list[Event]]:
    number = 0
    places = [(r, u) for r in range(x.r) for u in range(x.u)]
    shards = dict(zip(places, x.shards(), strict=True))

    def event(
        stage: str, op: str, at: Any, to: Any, tensor: str, cells: Cells, **more: Any
    ) -> Event:
        src, dst = x.rank(*at), x.rank(*to)
        size = 0
        if src != dst:
            size = len(cells) * x.cell * (2 if tensor == "KV" else 1)
        heads = [head for _, head in cells]
        rows = spans(row for row, _ in cells)
        assert len(cells) == sum(b - a for a, b in rows) * (max(heads) - min(heads) + 1)
        return Event(
            number, stage, op, src, dst, tensor, rows, (min(heads), max(heads) + 1), size, **more
        )

    def cells(rows: Iterable[int], heads: Iterable[int]) -> Cells:
        heads = list(heads)
        return frozenset((row, head) for row in rows for head in heads)

    own_q = {at: cells({*shards[at], *x.query_copies}, range(x.h)) for at in places}
    all_keys = set(range(x.oracle.size))
    own_k = {
        at: cells(all_keys if x.local else {*shards[at], *x.key_copies}, range(x.g))
        for at in places
    }
    placed = [("Q", own_q), ("KV", own_k)]
    yield [
        event("shard", "place", at, at, tensor, held[at])
        for tensor, held in placed
        for at in places
        if held[at]
    ]
    number += 1
    swaps = x.u > 1 and not x.local
    if swaps:
        step: list[Event] = []
        for r, u in places:
            for v in range(x.u):
                for tensor, heads in (("Q", x.heads(v)), ("KV", x.kv_heads(v))):
                    moved = cells(shards[r, u], heads)
                    if moved:
                        step.append(
                            event("input all-to-all", "all_to_all", (r, u), (r, v), tensor, moved)
                        )
        yield step
        number += 1
    gathered = {r: {row for u in range(x.u) for row in shards[r, u]} for r in range(x.r)}

    def work(r: int, u: int, t: int) -> tuple[int, set[int], set[int]]:
        if x.local:
            return x.seen({row for row, _ in own_q[r, u]}, all_keys)
        keys = gathered[(r - t) % x.r] | (x.key_copies if t == 0 else set())
        return x.seen(gathered[r] | x.query_copies, keys)

    def kv(r: int, u: int, t: int) -> Cells:
        """What travels: arrived after t single hops."""
        return cells(gathered[(r - t) % x.r], x.kv_heads(u))

    distances = range(1) if x.local else range(x.r)
    works = {(r, u, t): work(r, u, t) for r, u in places for t in distances}
    active = [t for t in distances if x.local or any(works[r, u, t][0] for r, u in places)]
    hops = active if not active or active[0] == 0 else [0, *active]
    begun = set[tuple[int, int]]()
    for n, t in enumerate(hops):
        stage, merging = f"hop {t}", list[tuple[int, int]]()
        step = []
        if n + 1 < len(hops):
            for r, u in places:
                if kv(r, u, t):
                    to = ((r + hops[n + 1] - t) % x.r, u)
                    step.append(event(stage, "send", (r, u), to, "KV", kv(r, u, t)))
        for r, u in places:
            pairs, queries, keys = works[r, u, t]
            heads = x.heads(u)
            if pairs and heads:
                out = cells(queries, heads)
                more = {"keys": spans(keys), "pairs": pairs * len(heads)}
                step.append(event(stage, "attend", (r, u), (r, u), "O", out, **more))
                if (r, u) in begun:
                    merging.append((r, u))
                begun.add((r, u))
        yield step
        number += 1
        if merging:
            yield [
                event(stage, "merge", at, at, "O", cells(works[(*at, t)][1], x.heads(at[1])))
                for at in merging
            ]
            number += 1
    if swaps:
        yield [
            event("output all-to-all", "all_to_all", (r, u), (r, v), "O", moved)
            for r, u in places
            for v in range(x.u)
            if (moved := cells({*shards[r, v], *x.query_copies}, x.heads(u)))
        ]
        number += 1
    yield [event("output", "output", at, at, "O", own_q[at]) for at in places if own_q[at]]


@settings(max_examples=150, deadline=None)
@given(scenarios())
def test_a_plan_is_what_the_contract_says_event_by_event(scenario: Scenario) -> None:
    assert list(simulate(scenario).events()) == expected(scenario)


@settings(max_examples=50, deadline=None)
@given(scenarios(policies=("extended", "sglang", "unguarded")))
def test_each_step_comes_in_canonical_order_and_the_same_every_time(scenario: Scenario) -> None:
    trace = simulate(scenario)
    for number in range(trace.steps):
        events = trace.step(number)
        assert list(events) == sorted(events, key=canonical)
        assert events == trace.step(number)
        assert {(event.step, event.stage) for event in events} <= {(number, trace.stages[number])}


# -- known figures ---------------------------------------------------------------------------------


def pairs_per_rank(scenario: Scenario) -> list[int]:
    pairs = [0] * scenario.mesh.ranks
    for event in simulate(scenario).events():
        pairs[event.src] += event.pairs
    return pairs


@pytest.mark.parametrize(
    ("layout", "pairs"),
    [
        ("contiguous", [10, 26, 42, 58]),
        ("zigzag", [34, 34, 34, 34]),
        ("striped", [28, 32, 36, 40]),
    ],
)
def test_causal_pairs_of_four_ring_ranks(layout: str, pairs: list[int]) -> None:
    scenario = scenario_of(
        ring=4,
        tokens={"total": 16, "layout": layout},
        tensors={"heads": 1},
        attention={"causal": True},
    )
    assert pairs_per_rank(scenario) == pairs


@pytest.mark.parametrize(
    ("ulysses", "ring", "units"), [(8, 1, 3.5), (4, 2, 5), (2, 4, 8), (1, 8, 14)]
)
def test_bytes_of_eight_ranks(ulysses: int, ring: int, units: float) -> None:
    # In units of one rank's Q: all-to-alls move 4 x (U-1)/U of it, each hop 2 of them.
    scenario = scenario_of(
        ulysses,
        ring,
        tokens={"total": 64},
        tensors={"heads": 8, "head_dim": 16, "dtype": "bfloat16"},
    )
    unit = 64 // 8 * 8 * 16 * 2
    assert simulate(scenario).bytes_sent_per_rank == (int(units * unit),) * 8


def test_kv_heads_travel_unexpanded() -> None:
    wide = scenario_of(2, 2, tokens={"total": 16}, tensors={"heads": 8, "kv_heads": 8})
    narrow = scenario_of(2, 2, tokens={"total": 16}, tensors={"heads": 8, "kv_heads": 2})

    def kv_bytes(scenario: Scenario) -> int:
        return sum(event.bytes for event in simulate(scenario).events() if event.tensor == "KV")

    assert kv_bytes(wide) == 4 * kv_bytes(narrow)


def test_a_distance_at_which_nobody_works_is_skipped_and_kv_goes_two_positions_on() -> None:
    # A window of 5 over 4 ring positions of 4 rows: distances 0 and 1 forwards, 3 backwards.
    scenario = scenario_of(
        ring=4, tokens={"total": 16}, attention={"mask": {"window": {"left": 4, "right": 0}}}
    )
    assert [s for s in simulate(scenario).stages if s.startswith("hop")] == [
        "hop 0",
        "hop 1",
        "hop 1",
    ]
    scenario = scenario_of(
        ring=4, tokens={"total": 16}, attention={"mask": {"window": {"left": 1, "right": 1}}}
    )
    trace = simulate(scenario)
    assert trace.stages == ("shard", "hop 0", "hop 1", "hop 1", "hop 3", "hop 3", "output")
    jumps = [(e.src, e.dst) for e in trace.step(2) if e.op == "send"]
    assert jumps == [(0, 2), (1, 3), (2, 0), (3, 1)], "straight from distance 1 to distance 3"


def test_without_work_at_distance_0_kv_is_still_sent_from_there() -> None:
    mask = {"dense": {"density": 0.3, "seed": 0}}  # of 3 x 3 rows, row 2 sees row 0: no other pair
    scenario = scenario_of(ring=3, tokens={"total": 3}, attention={"mask": mask})
    trace = simulate(scenario)
    assert trace.stages == ("shard", "hop 0", "hop 2", "output")
    assert {event.op for event in trace.step(1)} == {"send"}
    assert [(e.src, e.rows, e.keys) for e in trace.step(2)] == [(2, ((2, 3),), ((0, 1),))]


def test_a_replicated_query_may_be_the_only_one_that_sees_anything() -> None:
    scenario = scenario_of(
        ring=2,
        tokens={"total": 4, "replicated": {"suffix": 1}},
        attention={"causal": True, "mask": {"dense": {"density": 0.0}}},
    )
    trace = simulate(scenario)
    assert trace.stages == ("shard", "hop 0", "hop 1", "hop 1", "output")
    attends = [(e.src, e.keys, e.pairs) for e in trace.events() if e.op == "attend"]
    # The suffix sees all rows and, at distance 0, the rank's own copy of itself.
    assert attends == [
        (0, ((0, 2), (4, 5)), 3 * 8),
        (1, ((2, 5),), 3 * 8),
        (0, ((2, 4),), 2 * 8),
        (1, ((0, 2),), 2 * 8),
    ]


def test_where_nobody_sees_anything_nothing_moves() -> None:
    scenario = scenario_of(ring=3, tokens={"total": 6}, attention={"mask": {"key": {"valid": [0]}}})
    assert simulate(scenario).stages == ("shard", "output")
    assert simulate(scenario).bytes_sent_per_rank == (0, 0, 0)


def test_a_rank_without_heads_gives_away_its_rows_and_gets_outputs_back() -> None:
    scenario = scenario_of(3, tokens={"total": 6}, tensors={"heads": 2})
    trace = simulate(scenario)
    idle = [(e.op, e.src, e.dst) for e in trace.events() if 2 in (e.src, e.dst)]
    assert idle == [
        ("place", 2, 2),
        ("place", 2, 2),
        *[("all_to_all", 2, dst) for dst in (0, 0, 1, 1)],
        *[("all_to_all", src, 2) for src in (0, 1)],
        ("output", 2, 2),
    ]


def test_a_rank_without_rows_still_works_for_others() -> None:
    scenario = scenario_of(2, tokens={"total": 5, "shards": [0, 5]}, tensors={"heads": 2})
    trace = simulate(scenario)
    assert {(e.op, e.tensor) for e in trace.events() if e.src == 0} == {
        ("attend", "O"),
        ("all_to_all", "O"),
    }
    assert pairs_per_rank(scenario) == [25, 25]


def test_ring_inner_only_renumbers_the_ranks() -> None:
    inner, outer = (
        Scenario.parse(
            {
                "mesh": {"ulysses": 2, "ring": 3, "order": order},
                "tokens": {"total": 11, "shards": [3, 0, 1, 2, 4, 1]},
                "attention": {"causal": True},
            }
        )
        for order in ("ulysses-inner", "ring-inner")
    )
    other = {ring * 2 + ulysses: ulysses * 3 + ring for ring in range(3) for ulysses in range(2)}
    renumbered = {
        dataclasses.replace(event, src=other[event.src], dst=other[event.dst])
        for event in simulate(inner).events()
    }
    assert renumbered == set(simulate(outer).events())


def test_skip_with_sharded_keys_communicates_as_usual() -> None:
    tokens = {"total": 16}
    usual = scenario_of(2, 2, tokens=tokens)
    misuse = scenario_of(
        2, 2, tokens=tokens, attention={"skip_sequence_parallel": True, "skip_kv": "sharded"}
    )
    assert simulate(misuse) == simulate(usual)
    local = scenario_of(2, 2, tokens=tokens, attention={"skip_sequence_parallel": True})
    assert simulate(local).stages == ("shard", "hop 0", "output")
    assert simulate(local).collectives == ()


# -- size ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["contiguous", "zigzag", "striped"])
def test_a_million_rows_on_1024_ranks_make_events_only_when_asked(
    layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[int] = []

    def counted(*values: Any) -> Event:
        event = Event(*values)
        made.append(event.step)
        return event

    monkeypatch.setattr("usp_viz.plan.Event", counted)
    scenario = scenario_of(
        32,
        32,
        tokens={"total": 2**20, "layout": layout},
        tensors={"heads": 32},
        attention={"causal": True},
    )
    program = plan(scenario)
    trace = program.trace
    assert trace.steps == 67 and not made
    assert len(program._blocks) <= 4 * 32, "hops are decided by a few blocks of each distance"
    attends = [event for event in trace.step(34) if event.op == "attend"]
    assert set(made) == {34}
    shared = {id(event.rows) for event in attends}
    assert len(shared) <= 32, "the ranks of a ring position share their spans"


def test_a_million_causal_pairs_add_up() -> None:
    total = 2**20
    scenario = scenario_of(
        2,
        32,
        tokens={"total": total, "layout": "zigzag"},
        tensors={"heads": 2},
        attention={"causal": True},
    )
    pairs = pairs_per_rank(scenario)
    assert sum(pairs) == 2 * total * (total + 1) // 2
    assert max(pairs) == min(pairs)
