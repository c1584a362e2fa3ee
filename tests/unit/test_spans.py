"""Spans put together, against sets of rows."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from usp_viz.layout import Spans
from usp_viz.spans import SpanMaker, union


def spans_of(rows: Iterable[int]) -> Spans:
    found = set(rows)
    starts = sorted(row for row in found if row - 1 not in found)
    stops = sorted(row + 1 for row in found if row + 1 not in found)
    return tuple(zip(starts, stops, strict=True))


@given(st.lists(st.sets(st.integers(0, 30)), max_size=4))
def test_union_of_spans_is_the_union_of_sets(sets: list[set[int]]) -> None:
    assert union(map(spans_of, sets)) == spans_of(set().union(*sets))


@st.composite
def some_rows(draw: Any) -> tuple[range, ...]:
    runs = [
        range(start, start + step * length, step)
        for start, step, length in draw(
            st.lists(
                st.tuples(st.integers(0, 40), st.integers(1, 5), st.integers(1, 9)), max_size=4
            )
        )
    ]
    return tuple(runs)


@given(st.lists(some_rows(), max_size=4))
def test_spans_of_stripes_are_those_of_their_rows(many: list[tuple[range, ...]]) -> None:
    as_spans = SpanMaker()  # one for all: what it remembers must not leak from rows to rows
    for rows in many:
        assert as_spans(rows) == spans_of(row for run in rows for row in run)


def test_equal_stripes_give_the_same_tuple() -> None:
    as_spans = SpanMaker()
    assert as_spans((range(3, 50, 4),)) is as_spans((range(3, 51, 4),))
