"""Who holds which rows, against tables written out by hand and against brute force."""

from __future__ import annotations

from itertools import chain, pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.strategies import scenarios
from usp_viz.layout import (
    Layout,
    Order,
    count,
    cut,
    ids,
    index_below,
    indices_below,
    merge_spans,
    spans,
    spans_of,
)
from usp_viz.scenario import Scenario


def layout_of(ulysses: int, ring: int, **tokens: Any) -> Layout:
    mesh = {"ulysses": ulysses, "ring": ring}
    return Layout.of(Scenario.parse({"mesh": mesh, "tokens": tokens}))


def shards_of(layout: Layout) -> list[list[int]]:
    return [ids(rows).tolist() for rows in layout.shards]


def test_contiguous_rows_by_position() -> None:
    layout = layout_of(2, 2, total=8)
    assert shards_of(layout) == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert [ids(layout.gathered(r)).tolist() for r in (0, 1)] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert layout.gathered(0) == (range(0, 4),), "neighbouring shards are one run"


def test_zigzag_gives_each_ring_position_an_early_and_a_late_chunk() -> None:
    layout = layout_of(2, 2, total=16, layout="zigzag")
    # Chunks of 4: ring 0 has chunks 0 and 3, ring 1 has 1 and 2; Ulysses splits what they have.
    assert shards_of(layout) == [
        [0, 1, 2, 3],
        [12, 13, 14, 15],
        [4, 5, 6, 7],
        [8, 9, 10, 11],
    ]


def test_zigzag_on_a_pure_ring() -> None:
    assert shards_of(layout_of(1, 4, total=16, layout="zigzag")) == [
        [0, 1, 14, 15],
        [2, 3, 12, 13],
        [4, 5, 10, 11],
        [6, 7, 8, 9],
    ]


def test_zigzag_where_a_ulysses_border_cuts_a_chunk() -> None:
    # U4 R2, S 16: ring 0 holds [0..3, 12..15] in 4 parts of 2, ring 1 [4..11].
    assert shards_of(layout_of(4, 2, total=16, layout="zigzag")) == [
        [0, 1],
        [2, 3],
        [12, 13],
        [14, 15],
        [4, 5],
        [6, 7],
        [8, 9],
        [10, 11],
    ]


def test_striped_rows_go_round_the_ring() -> None:
    # Row i to ring position i % R; its two Ulysses ranks split rows 0, 2, 4, … in halves.
    assert shards_of(layout_of(2, 2, total=8, layout="striped")) == [
        [0, 2],
        [4, 6],
        [1, 3],
        [5, 7],
    ]
    assert shards_of(layout_of(1, 3, total=6, layout="striped")) == [[0, 3], [1, 4], [2, 5]]


def test_uneven_shards_with_empty_ones() -> None:
    layout = layout_of(2, 2, total=7, shards=[0, 4, 0, 3])
    assert shards_of(layout) == [[], [0, 1, 2, 3], [], [4, 5, 6]]
    assert layout.shards[0] == ()
    assert layout.gathered(1) == (range(4, 7),)


def test_replicated_rows_surround_the_shards() -> None:
    replicated = {"prefix": 2, "suffix": 1, "kv_prefix": 3}
    layout = layout_of(1, 2, total=4, replicated=replicated)
    order = layout.order
    # Whole order: kv_prefix 0-2, prefix 3-4, S rows 5-8, suffix 9.
    assert (order.start, order.stop, order.size) == (5, 9, 10)
    assert ids(layout.queries(0)).tolist() == [3, 4, 5, 6, 9]
    assert ids(layout.queries(1)).tolist() == [3, 4, 7, 8, 9]
    assert ids(layout.keys(0)).tolist() == [0, 1, 2, 3, 4, 5, 6, 9]
    assert ids(layout.keys(1)).tolist() == [0, 1, 2, 3, 4, 7, 8, 9]
    assert ids(order.replicated_queries).tolist() == [3, 4, 9]
    assert ids(order.replicated_keys).tolist() == [0, 1, 2, 3, 4, 9]


@settings(max_examples=100, deadline=None)
@given(scenarios(max_ranks=12, max_rows=60))
def test_every_row_lies_on_exactly_one_position(s: Scenario) -> None:
    layout = Layout.of(s)
    order = layout.order
    held = [ids(rows).tolist() for rows in layout.shards]
    assert sorted(chain.from_iterable(held)) == list(range(order.start, order.stop))
    assert [len(rows) for rows in held] == list(s.shards)
    assert order.size == s.tokens.total + sum(s.tokens.replicated.model_dump().values())
    for ring in range(s.mesh.ring):
        group = held[ring * s.mesh.ulysses : (ring + 1) * s.mesh.ulysses]
        gathered = layout.gathered(ring)
        assert ids(gathered).tolist() == list(chain.from_iterable(group))
        assert all(len(run) for run in gathered)
        assert ids(gathered).tolist() == sorted(ids(gathered).tolist()), "the mask relies on it"


@settings(max_examples=100, deadline=None)
@given(scenarios(max_ranks=8, max_rows=64))
def test_layouts_by_their_definition(s: Scenario) -> None:
    """Which ring position a row belongs to, row by row, as the contract says it."""
    layout, ring = Layout.of(s), s.mesh.ring
    for i in range(s.tokens.total):
        if s.tokens.layout == "zigzag":
            chunk = i // (s.tokens.total // (2 * ring))
            place = min(chunk, 2 * ring - 1 - chunk)
        elif s.tokens.layout == "striped":
            place = i % ring
        else:
            before = np.cumsum(s.shards)
            place = int(np.searchsorted(before, i, side="right")) // s.mesh.ulysses
        assert layout.order.start + i in ids(layout.gathered(place))


# -- rows, ids and spans -------------------------------------------------------------------------

RUNS = st.builds(
    lambda start, length, step: range(start, start + length * step, step),
    st.integers(0, 50),
    st.integers(0, 12),
    st.integers(1, 5),
)


@given(RUNS, st.integers(-5, 120))
def test_index_below_counts(run: range, bound: int) -> None:
    expected = sum(item < bound for item in run)
    assert index_below(run, bound) == expected
    assert indices_below(run, np.array([bound, bound])).tolist() == [expected] * 2


@given(st.lists(RUNS, max_size=4), st.integers(0, 50), st.integers(0, 50))
def test_cut_is_a_slice_of_the_tensor(runs: list[range], start: int, stop: int) -> None:
    rows = tuple(runs)
    everything = ids(rows).tolist()
    assert count(rows) == len(everything)
    assert ids(cut(rows, start, stop)).tolist() == everything[start:stop]


@given(st.lists(RUNS, max_size=4))
def test_spans_cover_the_same_rows_and_are_maximal(runs: list[range]) -> None:
    rows = tuple(runs)
    expected = sorted(set(chain.from_iterable(runs)))
    for found in (spans(rows), spans_of(ids(rows))):
        assert [i for a, b in found for i in range(a, b)] == expected
        assert all(b < c for (_, b), (c, _) in pairwise(found))


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), max_size=6))
def test_merge_spans_is_their_union(parts: list[tuple[int, int]]) -> None:
    merged = merge_spans(parts)
    expected = sorted({i for a, b in parts for i in range(a, b)})
    assert [i for a, b in merged for i in range(a, b)] == expected
    assert all(a < b for a, b in merged)
    assert all(b < c for (_, b), (c, _) in pairwise(merged))


def test_spans_of_nothing() -> None:
    assert spans(()) == spans_of([]) == merge_spans([]) == ()
    assert ids(()).dtype == np.int64


@pytest.mark.parametrize("layout", ["contiguous", "striped", "zigzag"])
def test_a_million_rows_stay_ranges(layout: str) -> None:
    big = layout_of(32, 32, total=2**20, layout=layout)
    assert sum(len(rows) for rows in big.shards) <= 2 * 1024
    assert Order(0, 0, 2**20, 0) == big.order
