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

from collections.abc import Iterator
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
    ids,
    index_below,
    indices_below,
    merge_spans,
    spans_of,
)

if TYPE_CHECKING:
    from usp_viz.scenario import Scenario

Bools = NDArray[np.bool_]
_FAR = 2**40
"""Beyond any row id: an unlimited side of a window."""


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
                np.clip(queries - order.start, 0, None), np.clip(keys - order.start, 0, None)
            )
        return result

    def is_valid(self, rows: Ids, batch_row: int) -> Bools:
        """bool [len(rows)]: not padding in this batch row. Replicated rows always are valid."""
        order = self.order
        result = (rows < order.start) | (rows >= order.stop)
        for start, stop in self.valid_spans(batch_row):
            result |= (rows >= start) & (rows < stop)
        return result

    def valid_spans(self, batch_row: int) -> Spans:
        """Spans of valid S rows."""
        return self.valid[batch_row % len(self.valid)] if self.valid else self._all_valid

    @cached_property
    def _all_valid(self) -> Spans:
        return ((self.order.start, self.order.stop),) if self.order.total else ()

    @property
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
        sharded = (queries >= order.start) & (queries < order.stop)
        lo = np.where(sharded, np.maximum(lo, queries - self.left), lo)
        hi = np.where(sharded, np.minimum(hi, queries + self.right + 1), hi)
        if self.prefix_lm is not None:
            reach = np.maximum(queries + 1, order.start + self.prefix_lm)
            hi = np.where(sharded, np.minimum(hi, reach), hi)
        if len(self.borders) > 2:
            borders = np.asarray(self.borders, np.int64)
            row = np.clip(queries - order.start, 0, order.total - 1)
            document = np.searchsorted(borders, row, side="right")
            lo = np.where(sharded, np.maximum(lo, order.start + borders[document - 1]), lo)
            hi = np.where(sharded, np.minimum(hi, order.start + borders[document]), hi)
        return lo, hi

    def replicated_until(self, queries: Ids) -> Ids:
        """int64 [L]: each query may see the replicated keys with an id below this."""
        size = np.full(len(queries), self.order.size, np.int64)
        return np.minimum(size, queries + 1) if self.causal else size

    # -- by block --------------------------------------------------------------------------------

    def block(self, queries: Rows, keys: Rows) -> Block:
        """Summarise a rectangle of local queries and keys (S rows and replicated rows alike)."""
        query_ids, key_ids = ids(queries), ids(keys)
        if not query_ids.size or not key_ids.size:
            return Block(BlockKind.EMPTY, 0, (), ())
        if self.unmasked:
            pairs = self.batch * query_ids.size * key_ids.size
            return Block(BlockKind.FULL, pairs, spans_of(query_ids), spans_of(key_ids))
        pairs, full, causal = 0, 0, 0
        seeing: list[Ids] = []
        seen: list[Ids] = []
        for row, times in self.patterns:
            scored = query_ids[self.is_valid(query_ids, row)]
            per_query, seen_keys = self._counts(scored, keys, key_ids, row)
            pairs += times * int(per_query.sum())
            full += times * query_ids.size * key_ids.size
            causal += times * _causal_pairs(query_ids, key_ids)
            seeing.append(scored[per_query > 0])
            seen.append(seen_keys)
        if not pairs:
            return Block(BlockKind.EMPTY, 0, (), ())
        kind = BlockKind.PARTIAL
        if pairs == full:
            kind = BlockKind.FULL
        elif self.causal and pairs == causal:
            kind = BlockKind.CAUSAL
        return Block(kind, pairs, spans_of(np.concatenate(seeing)), spans_of(np.concatenate(seen)))

    def _counts(self, queries: Ids, keys: Rows, key_ids: Ids, row: int) -> tuple[Ids, Ids]:
        """(keys that each query sees, int64 [Lq]; ids of the keys that are seen)."""
        if self.dense:
            matrix = self.allowed(queries, key_ids, row)
            return matrix.sum(1), key_ids[matrix.any(0)]
        lo, hi = self.interval(queries)
        until = self.replicated_until(queries)
        zero = np.zeros_like(until)
        total = np.zeros(len(queries), np.int64)
        seen: list[Ids] = []
        for run, sharded in self._visible_runs(keys, row):
            first, last = (lo, hi) if sharded else (zero, until)
            a, b = indices_below(run, first), indices_below(run, last)
            b = np.maximum(a, b)
            total += b - a
            depth = np.bincount(a, minlength=len(run) + 1) - np.bincount(b, minlength=len(run) + 1)
            covered = np.cumsum(depth)[: len(run)] > 0
            seen.append(np.arange(run.start, run.stop, run.step, dtype=np.int64)[covered])
        return total, np.concatenate(seen) if seen else np.empty(0, np.int64)

    def _visible_runs(self, keys: Rows, row: int) -> Iterator[tuple[range, bool]]:
        """Runs of valid keys, each wholly sharded (True) or wholly replicated (False)."""
        order = self.order
        parts = [(0, order.start, False), (order.stop, order.size, False)]
        parts += [(a, b, True) for a, b in self.valid_spans(row)]
        for run in keys:
            for start, stop, sharded in parts:
                piece = run[index_below(run, start) : index_below(run, stop)]
                if len(piece):
                    yield piece, sharded


def _causal_pairs(queries: Ids, keys: Ids) -> int:
    return int(np.searchsorted(np.sort(keys), queries, side="right").sum())


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
