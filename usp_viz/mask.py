"""Who may see whom, by definition, by interval, and by block.

Three views of one thing, each for its reader:

* `Visibility.allowed` is the definition, element by element. The reference and the pair ledger use
  nothing else.
* `Visibility.interval` says the same as one interval of keys per query, which is what makes
  documents, causal order, windows and prefix-LM cheap: each of them is an interval, and intervals
  intersect.
* `Visibility.block` summarises a rectangle of queries and keys (empty, full, causal-diagonal or
  partial; how many pairs; which rows take part), from intervals alone unless a dense mask is there.

Ids are whole-order row ids (`usp_viz.layout`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from usp_viz.bits import mix, stream
from usp_viz.layout import (
    Ids,
    Order,
    Rows,
    Spans,
    count,
    cut,
    ids,
    index_below,
    indices_below,
    merge_spans,
    spans,
)

if TYPE_CHECKING:
    from usp_viz.scenario import Scenario

Bools = NDArray[np.bool_]
_FAR = 2**40
"""Beyond any row id: an unlimited side of a window."""
_TOGETHER = 2**20
"""Pairs of a dense mask looked at together."""


class BlockKind(str, Enum):
    """What a mask leaves of a rectangle of queries and keys."""

    EMPTY = "empty"
    FULL = "full"
    CAUSAL = "causal-diagonal"
    PARTIAL = "partial"


@dataclass(frozen=True, slots=True)
class Block:
    """A rectangle of queries x keys, over all batch rows.

    Attributes:
        kind: What is left of it.
        pairs: Allowed (scored query, key) pairs, summed over batch rows, for one head.
        queries: Spans of queries that see at least one of the keys, in any batch row.
        keys: Spans of keys that at least one of the queries sees.
    """

    kind: BlockKind
    pairs: int
    queries: Spans
    keys: Spans


@dataclass(frozen=True, slots=True)
class DenseMask:
    """Each (query row, key row) of the S x S rows allowed with probability `density`."""

    density: float
    seed: int

    def allowed(self, queries: Ids, keys: Ids) -> Bools:
        """bool [len(queries), len(keys)]; arguments count S rows from 0."""
        rows = queries.astype(np.uint64)[:, None] << np.uint64(32)
        bits = mix((rows | keys.astype(np.uint64)[None, :]) ^ stream(self.seed, 3))
        return (bits >> np.uint64(11)).astype(np.float64) < self.density * 2.0**53


@dataclass(frozen=True)
class Visibility:
    """The rules of a scenario: masks, documents and causal order ANDed.

    Attributes:
        order: Where the replicated rows are.
        batch: B.
        causal: Over the whole order.
        left, right: The narrowest window's sides.
        prefix_lm: Rows that everyone sees besides the earlier ones; None without a prefix-LM mask.
        borders: Document borders as S-row offsets, 0 … S; zero-length documents repeat a border.
        valid: Spans of valid S rows (whole-order ids), per batch row; one entry when all agree.
        dense: Dense masks.
    """

    order: Order
    batch: int
    causal: bool = False
    left: int = _FAR
    right: int = _FAR
    prefix_lm: int | None = None
    borders: tuple[int, ...] = ()
    valid: tuple[Spans, ...] = ()
    dense: tuple[DenseMask, ...] = ()

    @staticmethod
    def of(scenario: Scenario) -> Visibility:
        """The visibility that a scenario means (not what some release makes of it)."""
        from usp_viz.layout import Layout

        return visibility(Layout.of(scenario).order, scenario)

    # -- by definition ---------------------------------------------------------------------------

    def allowed(self, queries: Ids, keys: Ids, batch_row: int) -> Bools:
        """bool [len(queries), len(keys)]: may this query see this key?"""
        i, j = queries[:, None], keys[None, :]
        order = self.order
        query_sharded = (i >= order.start) & (i < order.stop)
        key_sharded = (j >= order.start) & (j < order.stop)
        result = np.ones((len(queries), len(keys)), np.bool_)
        if self.causal:
            result &= j <= i
        result &= ~key_sharded | self.is_valid(keys, batch_row)[None, :]
        both = query_sharded & key_sharded
        result &= ~both | ((j >= i - self.left) & (j <= i + self.right))
        if self.prefix_lm is not None:
            result &= ~both | (j <= i) | (j < order.start + self.prefix_lm)
        if len(self.borders) > 2:
            document = np.searchsorted(self.borders, np.arange(order.total), side="right")
            padded = np.zeros(order.size, np.int64)
            padded[order.start : order.stop] = document
            result &= ~both | (padded[queries][:, None] == padded[keys][None, :])
        for mask in self.dense:
            result &= ~both | mask.allowed(
                np.maximum(queries - order.start, 0), np.maximum(keys - order.start, 0)
            )
        return result

    def is_valid(self, rows: Ids, batch_row: int) -> Bools:
        """bool [len(rows)]: not padding in this batch row. Replicated rows always are valid."""
        order = self.order
        edges = np.asarray(self.valid_spans(batch_row), np.int64).ravel()
        inside = np.searchsorted(edges, rows, side="right") % 2 == 1  # behind an odd edge
        return inside | (rows < order.start) | (rows >= order.stop)

    def valid_spans(self, batch_row: int) -> Spans:
        """Spans of valid S rows."""
        return self.valid[batch_row % len(self.valid)] if self.valid else self._all_valid

    @cached_property
    def _all_valid(self) -> Spans:
        return ((self.order.start, self.order.stop),) if self.order.total else ()

    @cached_property
    def _borders(self) -> Ids:
        return np.asarray(self.borders, np.int64)

    @cached_property
    def patterns(self) -> tuple[tuple[int, int], ...]:
        """Batch rows that differ in padding, as (a batch row, how many are like it)."""
        seen: dict[Spans, list[int]] = {}
        for row in range(self.batch):
            seen.setdefault(self.valid_spans(row), []).append(row)
        return tuple((rows[0], len(rows)) for rows in seen.values())

    @property
    def unmasked(self) -> bool:
        """Everybody sees everybody."""
        return (
            not self.causal
            and self.left == self.right == _FAR
            and self.prefix_lm is None
            and len(self.borders) <= 2
            and not self.dense
            and all(spans == self._all_valid for spans in self.valid)
        )

    # -- by interval -----------------------------------------------------------------------------

    def interval(self, queries: Ids) -> tuple[Ids, Ids]:
        """(lo, hi), int64 [L]: each query may see the valid S rows in [lo, hi), dense masks aside.

        Empty intervals may come out with hi < lo.
        """
        order = self.order
        lo = np.full(len(queries), order.start, np.int64)
        hi = np.full(len(queries), order.stop, np.int64)
        if self.causal:
            hi = np.minimum(hi, queries + 1)
        everyone = lo, hi
        if self.left < _FAR:
            lo = np.maximum(lo, queries - self.left)
        if self.right < _FAR:
            hi = np.minimum(hi, queries + self.right + 1)
        if self.prefix_lm is not None:
            hi = np.minimum(hi, np.maximum(queries + 1, order.start + self.prefix_lm))
        if len(self.borders) > 2:
            borders = self._borders
            row = np.minimum(np.maximum(queries - order.start, 0), order.total - 1)
            document = np.searchsorted(borders, row, side="right")
            lo = np.maximum(lo, order.start + borders[document - 1])
            hi = np.minimum(hi, order.start + borders[document])
        sharded = (queries >= order.start) & (queries < order.stop)
        if sharded.all():
            return lo, hi
        return np.where(sharded, lo, everyone[0]), np.where(sharded, hi, everyone[1])

    def replicated_until(self, queries: Ids) -> Ids:
        """int64 [L]: each query may see the replicated keys with an id below this."""
        size = np.full(len(queries), self.order.size, np.int64)
        return np.minimum(size, queries + 1) if self.causal else size

    # -- by block --------------------------------------------------------------------------------

    def block(self, queries: Rows, keys: Rows, as_spans: Callable[[Rows], Spans] = spans) -> Block:
        """Summarise a rectangle of local queries and keys (S rows and replicated rows alike).

        Args:
            queries: Ascending runs.
            keys: Likewise.
            as_spans: Makes the block's spans; who needs many blocks may pass one that remembers.
        """
        pairs = 0
        seeing: list[range] = []
        seen: list[range] = []
        for row, times in self.patterns:
            key_parts = tuple(self._parts(keys, row))
            for query_part in self._parts(queries, row):
                for key_part in key_parts:
                    number, some_queries, some_keys = self._meet(query_part, key_part, row)
                    pairs += times * number
                    seeing += some_queries
                    seen += some_keys
        kind = self._kind(pairs, queries, keys)
        return Block(kind, pairs, as_spans(_distinct(seeing)), as_spans(_distinct(seen)))

    def _kind(self, pairs: int, queries: Rows, keys: Rows) -> BlockKind:
        if not pairs:
            return BlockKind.EMPTY
        if pairs == self.batch * count(queries) * count(keys):
            return BlockKind.FULL
        if self.causal and pairs == self.batch * _causal_pairs(queries, keys):
            return BlockKind.CAUSAL
        return BlockKind.PARTIAL

    def _parts(self, rows: Rows, row: int) -> Iterator[_Part]:
        """Runs cut where the replicated rows end, with what of them is no padding."""
        order = self.order
        borders = ((0, order.start), (order.start, order.stop), (order.stop, order.size))
        for run in rows:
            for start, stop in borders:
                piece = _between(run, start, stop)
                sharded = start == order.start and stop == order.stop
                spans = self.valid_spans(row) if sharded else ((start, stop),)
                valid = tuple(v for v in (_between(piece, a, b) for a, b in spans) if len(v))
                if valid:
                    yield _Part(piece, valid, sharded)

    def _meet(self, queries: _Part, keys: _Part, row: int) -> tuple[int, Rows, Rows]:
        """(allowed pairs, queries that see a key, keys that are seen), for one batch row.

        Along a run both ends of the queries' intervals ascend, so its two outer queries tell
        whether it sees all or nothing; only what lies between needs to look at each query.
        """
        if self.dense and queries.sharded and keys.sharded:
            return self._meet_dense(queries.valid, keys.valid, row)
        first, last = keys.run[0], keys.run[-1]
        lo, hi = self._ends(np.array((queries.run[0], queries.run[-1])), keys.sharded)
        if hi[1] <= first or lo[0] > last:
            return 0, (), ()
        if lo[1] <= first and hi[0] > last:
            return count(queries.valid) * count(keys.valid), queries.valid, keys.valid
        lo, hi = self._ends(ids(queries.valid), keys.sharded)
        a, b = _below(keys.valid, lo), _below(keys.valid, hi)
        sees = np.flatnonzero(b > a)
        if not sees.size:
            return 0, (), ()
        a, b = a[sees], b[sees]
        seeing = _stretches(queries.valid, sees, sees + 1)
        return int((b - a).sum()), seeing, _stretches(keys.valid, a, b)

    def _ends(self, queries: Ids, sharded_keys: bool) -> tuple[Ids, Ids]:
        if sharded_keys:
            return self.interval(queries)
        return np.zeros_like(queries), self.replicated_until(queries)

    def _meet_dense(self, queries: Rows, keys: Rows, row: int) -> tuple[int, Rows, Rows]:
        query_ids, key_ids = ids(queries), ids(keys)
        sees: list[Ids] = []
        seen = np.zeros(len(key_ids), np.bool_)
        step = max(1, _TOGETHER // len(key_ids))
        for start in range(0, len(query_ids), step):
            matrix = self.allowed(query_ids[start : start + step], key_ids, row)
            sees.append(matrix.sum(1))
            seen |= matrix.any(0)
        per_query = np.concatenate(sees)
        q, k = np.flatnonzero(per_query), np.flatnonzero(seen)
        pairs = int(per_query.sum())
        return pairs, _stretches(queries, q, q + 1), _stretches(keys, k, k + 1)


@dataclass(frozen=True, slots=True)
class _Part:
    """A run that is wholly sharded or wholly replicated, and what of it is no padding."""

    run: range
    valid: Rows
    sharded: bool


def _between(run: range, start: int, stop: int) -> range:
    """The items of an ascending range in [start, stop)."""
    return run[index_below(run, start) : index_below(run, stop)]


def _below(rows: Rows, bounds: Ids) -> Ids:
    """How many of these ascending rows lie below each bound."""
    if len(rows) == 1:
        return indices_below(rows[0], bounds)
    return np.searchsorted(ids(rows), bounds)


def _stretches(rows: Rows, starts: Ids, stops: Ids) -> Rows:
    """The rows at the union of the index ranges [start, stop); both ascend."""
    if not starts.size:
        return ()
    breaks = np.flatnonzero(starts[1:] > stops[:-1])
    firsts = starts[np.concatenate(([0], breaks + 1))].tolist()
    lasts = stops[np.concatenate((breaks, [stops.size - 1]))].tolist()
    pieces = zip(firsts, lasts, strict=True)
    if len(rows) == 1:
        return tuple(rows[0][a:b] for a, b in pieces)
    return tuple(run for a, b in pieces for run in cut(rows, a, b))


def _distinct(runs: list[range]) -> Rows:
    return tuple(dict.fromkeys(runs))


def _causal_pairs(queries: Rows, keys: Rows) -> int:
    pairs = 0
    for q in queries:
        for k in keys:
            if q[0] >= k[-1]:
                pairs += len(q) * len(k)
            elif q[-1] >= k[0]:
                pairs += int(indices_below(k, ids((q,)) + 1).sum())
    return pairs


def visibility(order: Order, scenario: Scenario) -> Visibility:
    """Gather a scenario's masks, documents and causal flag into one `Visibility`."""
    from usp_viz.scenario import Dense, GapPad, KeyMask, PrefixLM, TailPad, Window

    total, batch = scenario.tokens.total, scenario.tensors.batch
    left, right, prefix_lm = _FAR, _FAR, None
    dense: list[DenseMask] = []
    padding: list[list[tuple[int, int]]] = [[] for _ in range(batch)]
    for mask in scenario.attention.mask:
        if isinstance(mask, Window):
            sides = mask.window
            left = min(left, _FAR if sides.left is None else sides.left)
            right = min(right, _FAR if sides.right is None else sides.right)
        elif isinstance(mask, PrefixLM):
            width = mask.prefix_lm.prefix
            prefix_lm = width if prefix_lm is None else min(prefix_lm, width)
        elif isinstance(mask, Dense):
            dense.append(DenseMask(mask.dense.density, mask.dense.seed))
        else:
            for row in range(batch):
                if isinstance(mask, KeyMask):
                    lengths = mask.key.valid
                    padding[row] += [*mask.key.holes, (lengths[row % len(lengths)], total)]
                elif isinstance(mask, TailPad):
                    padding[row].append((mask.tail_pad.start, total))
                else:
                    assert isinstance(mask, GapPad)
                    padding[row].append((mask.gap_pad.start, mask.gap_pad.end))
    valid = tuple(_complement(merge_spans(gaps), order) for gaps in padding)
    if len(set(valid)) == 1:
        valid = () if valid[0] == ((order.start, order.stop),) else valid[:1]
    borders = (0, *np.cumsum(scenario.documents).tolist())
    return Visibility(
        order=order,
        batch=batch,
        causal=scenario.attention.causal,
        left=left,
        right=right,
        prefix_lm=prefix_lm,
        borders=borders if len(borders) > 2 else (),
        valid=valid,
        dense=tuple(dense),
    )


def _complement(gaps: Spans, order: Order) -> Spans:
    """S rows outside the gaps, as whole-order spans."""
    spans: list[tuple[int, int]] = []
    at = 0
    for start, stop in (*gaps, (order.total, order.total)):
        if start > at:
            spans.append((order.start + at, order.start + start))
        at = max(at, stop)
    return tuple(spans)
