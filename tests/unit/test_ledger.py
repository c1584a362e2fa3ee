"""The pair ledger, against a count in plain Python and against mistakes made on purpose."""

from __future__ import annotations

import dataclasses
import pickle
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.oracle import Oracle
from tests.strategies import scenarios
from usp_viz.layout import Layout, ids
from usp_viz.ledger import Pairs, Piece, PieceMask, audit, progress
from usp_viz.mask import Visibility
from usp_viz.mesh import Mesh, head_split
from usp_viz.plan import simulate
from usp_viz.scenario import Scenario

Ranks = list[list[Piece]]


def scenario_of(ulysses: int = 1, ring: int = 1, **parts: Any) -> Scenario:
    return Scenario.parse({"mesh": {"ulysses": ulysses, "ring": ring}, **parts})


def row_ids(*rows: int) -> Any:
    return np.array(rows, np.int64)


def is_local(s: Scenario) -> bool:
    return s.attention.skip_sequence_parallel and s.attention.skip_kv == "full"


def right_pieces(s: Scenario) -> Ranks:
    """What ranks that do everything right would record, one piece a hop and batch row."""
    mesh, layout, visibility = Mesh.of(s), Layout.of(s), Visibility.of(s)
    order, ranks = layout.order, Ranks()
    share = s.tensors.heads // s.kv_heads
    for rank in range(mesh.ranks):
        ring, ulysses = mesh.at(rank)
        heads = head_split(s.tensors.heads, mesh.ulysses)[ulysses]
        queries = ids((*order.replicated_queries, *layout.gathered(ring)))
        sources = [(ring - t) % mesh.ring for t in range(mesh.ring)]
        blocks = [ids(layout.gathered(source)) for source in sources]
        blocks[0] = np.concatenate([blocks[0], ids(order.replicated_keys)])
        if is_local(s):
            heads = range(s.tensors.heads)
            queries = ids(layout.queries(mesh.position(rank)))
            blocks = [np.arange(order.size)]
        read = tuple(head // share for head in heads)
        ranks.append(
            [
                Piece(
                    (row,),
                    queries,
                    keys,
                    (heads.start, heads.stop),
                    read,
                    visibility.allowed(queries, keys, row),
                )
                for keys in blocks
                for row in range(s.tensors.batch)
                if heads
            ]
        )
    return ranks


def plain_count(s: Scenario, pieces: Sequence[Sequence[Piece]], groups: Sequence[int]) -> Pairs:
    """The definition, one pair at a time."""
    oracle, share = Oracle(s), s.tensors.heads // s.kv_heads
    right: Counter[Any] = Counter()
    wrong = set[Any]()
    copied = list(range(s.tokens.replicated.kv_prefix, oracle.start))
    copied += range(oracle.stop, oracle.size)
    slots = [(i, None) for i in range(oracle.start, oracle.stop)]
    slots += [(i, group) for group in sorted(set(groups)) for i in copied]
    for rank, some in enumerate(pieces):
        for p in some:
            for b in p.batch_rows:
                for x, i in enumerate(p.queries.tolist()):
                    slot = (i, groups[rank] if i in copied else None)
                    if slot not in slots or not oracle.valid(b, i):
                        continue
                    for y, j in enumerate(p.keys.tolist()):
                        if p.mask is not None:
                            seen = y <= x + p.mask[1] if isinstance(p.mask, tuple) else p.mask[x, y]
                            if not seen:
                                continue
                        j = j if 0 <= j < oracle.size else -1
                        for head in range(*p.heads):
                            pair = (b, slot, j, head)
                            if p.kv_heads[head - p.heads[0]] == head // share:
                                right[pair] += 1
                            else:
                                wrong.add(pair)
    allowed = {
        (b, (i, group), j, head)
        for b in range(s.tensors.batch)
        for i, group in slots
        if oracle.valid(b, i)
        for j in range(oracle.size)
        if oracle.allowed(b, i, j)
        for head in range(s.tensors.heads)
    }
    return Pairs(
        allowed=len(allowed),
        computed_once=sum(right[pair] == 1 for pair in allowed),
        missing=sum(right[pair] == 0 for pair in allowed),
        repeated=sum(right[pair] > 1 for pair in allowed),
        forbidden=len([pair for pair in right if pair not in allowed]) + len(wrong),
    )


def default_groups(s: Scenario) -> list[int]:
    mesh = Mesh.of(s)
    return [rank if is_local(s) else mesh.at(rank)[0] for rank in range(mesh.ranks)]


# -- right -----------------------------------------------------------------------------------------


@settings(max_examples=80, deadline=None)
@given(scenarios())
def test_doing_everything_right_is_exact(scenario: Scenario) -> None:
    found = audit(scenario, right_pieces(scenario))
    assert found is not None and found.exact
    assert found == Pairs(found.allowed, found.allowed, 0, 0, 0)


def test_the_sizes_of_known_counts() -> None:
    s = scenario_of(2, 2, tokens={"total": 48}, tensors={"batch": 2, "heads": 8})
    assert audit(s, right_pieces(s)) == Pairs(2 * 8 * 48 * 48, 2 * 8 * 48 * 48, 0, 0, 0)
    s = scenario_of(1, 4, tokens={"total": 16}, tensors={"heads": 3}, attention={"causal": True})
    assert audit(s, right_pieces(s)) == Pairs(3 * 136, 3 * 136, 0, 0, 0)


def test_a_replicated_query_counts_once_per_ring_position_or_per_rank_under_skip() -> None:
    tokens = {"total": 4, "replicated": {"prefix": 1}}
    s = scenario_of(2, 2, tokens=tokens, tensors={"heads": 2})
    found = audit(s, right_pieces(s))
    assert found is not None and found.allowed == 2 * (4 + 2) * 5 and found.exact
    s = scenario_of(
        2, 2, tokens=tokens, tensors={"heads": 2}, attention={"skip_sequence_parallel": True}
    )
    found = audit(s, right_pieces(s))
    assert found is not None and found.allowed == 2 * (4 + 4) * 5 and found.exact


def test_padding_queries_are_nobodys_business() -> None:
    s = scenario_of(
        tokens={"total": 4}, tensors={"heads": 1}, attention={"mask": {"tail_pad": {"start": 3}}}
    )
    keys = row_ids(0, 1, 2)
    scored = Piece((0,), row_ids(0, 1, 2), keys, (0, 1), (0,))
    every = Piece((0,), row_ids(0, 1, 2, 3), keys, (0, 1), (0,))
    assert audit(s, [[scored]]) == audit(s, [[every]]) == Pairs(9, 9, 0, 0, 0)
    padded_keys = dataclasses.replace(every, keys=row_ids(0, 1, 2, 3))
    assert audit(s, [[padded_keys]]) == Pairs(9, 9, 0, 0, 3)


# -- wrong -----------------------------------------------------------------------------------------

GQA = scenario_of(
    2, 2, tokens={"total": 8}, tensors={"heads": 4, "kv_heads": 2}, attention={"causal": True}
)


def changed(pieces: Ranks, rank: int, n: int, **values: Any) -> Ranks:
    some = [list(computed) for computed in pieces]
    some[rank][n] = dataclasses.replace(some[rank][n], **values)
    return some


def test_a_dropped_hop_is_missing() -> None:
    pieces = right_pieces(GQA)
    dropped = pieces[3].pop(1)
    number = int(np.asarray(dropped.mask).sum()) * 2
    assert number == 4 * 4 * 2
    found = audit(GQA, pieces)
    assert found == Pairs(36 * 4, 36 * 4 - number, number, 0, 0)


def test_a_hop_done_twice_is_repeated() -> None:
    pieces = right_pieces(GQA)
    pieces[0].append(pieces[0][0])
    assert audit(GQA, pieces) == Pairs(36 * 4, 36 * 4 - 20, 0, 20, 0)
    pieces[0].append(pieces[0][0])
    assert audit(GQA, pieces) == Pairs(36 * 4, 36 * 4 - 20, 0, 20, 0), "distinct pairs are counted"


def test_an_ignored_mask_is_forbidden() -> None:
    pieces = changed(right_pieces(GQA), 0, 0, mask=None)
    assert audit(GQA, pieces) == Pairs(36 * 4, 36 * 4, 0, 0, 6 * 2)


def test_a_key_read_through_the_wrong_kv_head_is_forbidden_and_the_right_one_missing() -> None:
    pieces = changed(right_pieces(GQA), 0, 0, kv_heads=(0, 1))
    assert audit(GQA, pieces) == Pairs(36 * 4, 36 * 4 - 10, 10, 0, 10)


def test_a_shard_shifted_by_one_is_seen() -> None:
    pieces = right_pieces(GQA)
    found = audit(GQA, changed(pieces, 2, 0, keys=pieces[2][0].keys - 1))
    assert found is not None and found.missing and not found.exact


def test_another_rows_batch_is_seen() -> None:
    s = scenario_of(tokens={"total": 3}, tensors={"heads": 1, "batch": 2})
    twice_the_first = [
        [dataclasses.replace(piece, batch_rows=(0,)) for piece in right_pieces(s)[0]]
    ]
    assert audit(s, twice_the_first) == Pairs(18, 0, 9, 9, 0)


def test_a_key_twice_in_one_call_is_repeated() -> None:
    s = scenario_of(tokens={"total": 2}, tensors={"heads": 1})
    twice = Piece((0,), row_ids(0, 1), row_ids(0, 1, 1), (0, 1), (0,))
    assert audit(s, [[twice]]) == Pairs(4, 2, 0, 2, 0)


def test_unknown_keys_are_forbidden_and_unknown_queries_ignored() -> None:
    s = scenario_of(tokens={"total": 2}, tensors={"heads": 1})
    strange = Piece((0,), row_ids(-1, 0, 1, 99), row_ids(0, 1, 77, -5), (0, 1), (0,))
    assert audit(s, [[strange]]) == Pairs(4, 4, 0, 0, 2)


def test_groups_say_who_shares_the_copies_of_replicated_queries() -> None:
    s = scenario_of(1, 2, tokens={"total": 2, "replicated": {"prefix": 1}}, tensors={"heads": 1})
    halves = [
        Piece((0,), row_ids(0, 1, 2), row_ids(0, 1, 2), (0, 1), (0,)),
        Piece((0,), row_ids(1, 2), row_ids(), (0, 1), (0,)),
    ]
    assert audit(s, [[piece] for piece in halves]) == Pairs(4 * 3, 9, 3, 0, 0)
    assert audit(s, [[piece] for piece in halves], groups=[0, 0]) == Pairs(9, 9, 0, 0, 0)


def test_ulysses_attention_of_a_release_attends_copies_together_on_all_ranks() -> None:
    tokens = {"total": 2, "replicated": {"prefix": 1}}
    s = scenario_of(
        1,
        2,
        tokens=tokens,
        tensors={"heads": 2},
        attention={"layer": "UlyssesAttention"},
        policy="unguarded",
    )
    rows = row_ids(1, 2, 0)
    by_head = [[Piece((0,), rows, rows, (head, head + 1), (head,))] for head in (0, 1)]
    assert audit(s, by_head) == Pairs(18, 18, 0, 0, 0)
    found = audit(s.set({"attention.layer": "USPAttention"}), by_head)
    assert found is not None and found.allowed == 2 * (2 + 2) * 3, "one copy a ring position"


@settings(max_examples=40, deadline=None)
@given(scenarios(policies=("sglang", "unguarded")))
def test_nothing_computed_is_all_missing_under_every_policy(scenario: Scenario) -> None:
    found = audit(scenario, [[] for _ in range(scenario.mesh.ranks)])
    assert found is not None and found == Pairs(found.allowed, 0, found.allowed, 0, 0)


# -- against the plain count -----------------------------------------------------------------------


@st.composite
def audits(draw: Any) -> tuple[Scenario, Ranks]:
    """A small scenario, and pieces that are right, wrong, or nonsense."""
    s = draw(scenarios(max_ranks=4, max_rows=6))
    pieces = right_pieces(s)
    size = Layout.of(s).order.size
    some_ids = st.lists(st.integers(-1, size), max_size=6)
    for _ in range(draw(st.integers(0, 3))):
        rank = draw(st.integers(0, len(pieces) - 1))
        if pieces[rank] and draw(st.booleans()):
            n = draw(st.integers(0, len(pieces[rank]) - 1))
            if draw(st.booleans()):
                pieces[rank].append(pieces[rank][n])
            else:
                del pieces[rank][n]
            continue
        first = draw(st.integers(0, s.tensors.heads - 1))
        heads = (first, draw(st.integers(first + 1, s.tensors.heads)))
        kv_heads = st.integers(-1, s.kv_heads - 1)
        queries, keys = row_ids(*draw(some_ids)), row_ids(*draw(some_ids))
        count = len(queries) * len(keys)
        matrix = np.array(draw(st.lists(st.booleans(), min_size=count, max_size=count)), np.bool_)
        mask: PieceMask = draw(
            st.sampled_from([None, ("causal", -1), ("causal", 0), ("causal", 2), "matrix"])
        )
        pieces[rank].append(
            Piece(
                tuple(draw(st.sets(st.integers(0, s.tensors.batch - 1), min_size=1))),
                queries,
                keys,
                heads,
                tuple(draw(kv_heads) for _ in range(*heads)),
                matrix.reshape(len(queries), len(keys)) if mask == "matrix" else mask,
            )
        )
    return s, pieces


@settings(max_examples=120, deadline=None)
@given(audits())
def test_any_pieces_are_counted_as_one_would_by_hand(case: tuple[Scenario, Ranks]) -> None:
    scenario, pieces = case
    found = audit(scenario, pieces)
    assert found == plain_count(scenario, pieces, default_groups(scenario))
    assert found.allowed == found.computed_once + found.missing + found.repeated


def test_many_blocks_count_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    s = Scenario.load("gqa-more-ranks")
    pieces = right_pieces(s)
    del pieces[1][0]
    whole = audit(s, pieces)
    monkeypatch.setattr("usp_viz.ledger._BLOCK", 1)
    assert audit(s, pieces) == whole


# -- the rest --------------------------------------------------------------------------------------


def test_beyond_the_limit_there_is_no_count() -> None:
    s = scenario_of(tokens={"total": 5}, tensors={"heads": 1})
    assert audit(s, right_pieces(s), limit=4) is None
    assert audit(s, right_pieces(s), limit=5) is not None
    assert audit(scenario_of(tokens={"total": 16_385}), [[]]) is None


def test_pieces_travel_between_processes() -> None:
    (piece,) = right_pieces(scenario_of(tokens={"total": 3}))[0]
    again = pickle.loads(pickle.dumps(piece))
    assert (again.queries == piece.queries).all() and again.kv_heads == piece.kv_heads


@settings(max_examples=50, deadline=None)
@given(scenarios())
def test_progress_of_a_plan_ends_at_all_allowed_pairs(scenario: Scenario) -> None:
    trace = simulate(scenario)
    table = progress(trace)
    assert len(table) == trace.steps and {len(row) for row in table} == {trace.ranks}
    found = audit(scenario, right_pieces(scenario))
    assert found is not None and sum(map(sum, table)) == found.allowed


def test_progress_by_step_and_rank() -> None:
    s = scenario_of(ring=2, tokens={"total": 4}, tensors={"heads": 1}, attention={"causal": True})
    # shard, hop 0 (each its own triangle), hop 1 (rank 1 sees rank 0's rows), merge, output
    assert progress(simulate(s)) == ((0, 0), (3, 3), (0, 4), (0, 0), (0, 0))


def test_json_of_a_count() -> None:
    assert Pairs(5, 2, 2, 1, 7).to_json() == {
        "allowed": 5,
        "computed_once": 2,
        "missing": 2,
        "repeated": 1,
        "forbidden": 7,
    }
    assert not Pairs(5, 5, 0, 0, 1).exact and not Pairs(5, 4, 1, 0, 0).exact
