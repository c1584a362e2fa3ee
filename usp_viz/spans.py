"""Spans of rows, put together many at a time.

A striped shard has as many spans as rows, so that what costs nothing elsewhere is the price of a
million-row plan: spans are chained rather than merged where they can be, and shared.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain, pairwise

from usp_viz.layout import Rows, Spans, merge_spans, spans


def union(parts: Iterable[Spans]) -> Spans:
    """`layout.merge_spans` of spans that are sorted and disjoint already: often a mere chain."""
    some = sorted((part for part in parts if part), key=lambda part: part[0])
    joined = chain.from_iterable(some)
    apart = all(a[-1][1] < b[0][0] for a, b in pairwise(some))
    return tuple(joined) if apart else merge_spans(joined)


class SpanMaker:
    """`layout.spans` for many rows of few stripes.

    A striped shard is as many spans as it has rows, and all ranks and hops share the stripes: each
    stripe's spans are made once, any stretch of it is a slice, and equal rows give the same tuple.
    """

    def __init__(self) -> None:
        self._stripes: dict[tuple[int, int], Spans] = {}
        self._made: dict[Rows, Spans] = {}

    def __call__(self, rows: Rows) -> Spans:
        if all(run.step == 1 for run in rows):
            return spans(rows)
        if rows not in self._made:
            self._made[rows] = self._make(rows)
        return self._made[rows]

    def _make(self, rows: Rows) -> Spans:
        stretches: dict[tuple[int, int], list[tuple[int, int]]] = {}
        whole: list[tuple[int, int]] = []
        for run in rows:
            if run.step == 1:
                whole.append((run.start, run.stop))
            else:
                index, first = divmod(run.start, run.step)
                stretches.setdefault((first, run.step), []).append((index, index + len(run)))
        parts: list[Spans] = [(span,) for span in merge_spans(whole)]
        for stripe, indices in stretches.items():
            merged = merge_spans(indices)
            table = self._stripe(stripe, merged[-1][1])
            parts += [table[a:b] for a, b in merged]
        return union(parts)

    def _stripe(self, stripe: tuple[int, int], length: int) -> Spans:
        """The single rows of a stripe; at least `length` of them."""
        table = self._stripes.get(stripe, ())
        if len(table) < length:
            first, step = stripe
            stop = first + step * (1 << (length - 1).bit_length())
            ends = range(first + 1, stop + 1, step)
            table = tuple(zip(range(first, stop, step), ends, strict=True))
            self._stripes[stripe] = table
        return table
