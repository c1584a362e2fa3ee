"""Which pairs of a rectangle a recorded attend computed, told from how many they were."""

from __future__ import annotations

from usp_viz.layout import ids, merge_spans
from usp_viz.mask import Visibility
from usp_viz.trace import Event

ALLOWED, FULL, TRIANGLE, UNKNOWN = range(4)
"""What the masks allow; every pair; key index <= query index within the call; none of these."""
_MOST = 2**21


def shape(visibility: Visibility, event: Event) -> int:
    """The shape of an attend's rectangle; `ALLOWED` unless its count says otherwise."""
    heads = event.heads[1] - event.heads[0]
    rows = sum(b - a for a, b in event.rows)
    keys = sum(b - a for a, b in event.keys)
    if not heads or rows * keys > _MOST:
        return ALLOWED
    queries = ids(tuple(range(a, b) for a, b in merge_spans(event.rows)))
    seen = ids(tuple(range(a, b) for a, b in merge_spans(event.keys)))
    allowed = 0
    for row, times in visibility.patterns:
        scored = visibility.allowed(queries, seen, row)
        scored &= visibility.is_valid(queries, row)[:, None]
        allowed += times * int(scored.sum())
    each = event.pairs / heads
    if each == allowed:
        return ALLOWED
    if each == visibility.batch * rows * keys:
        return FULL
    triangle = sum(min(n + 1, keys) for n in range(rows))
    return TRIANGLE if each == visibility.batch * triangle else UNKNOWN
