"""Who holds which rows. Row ids index the *whole order*: [kv_prefix | prefix | S rows | suffix].

A `Rows` value lists rows in the order in which a tensor holds them, as Python ranges: a contiguous
or zigzag shard is one or two ranges with step 1, a striped shard one range with step R.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from usp_viz.scenario import Scenario

Rows = tuple[range, ...]
Spans = tuple[tuple[int, int], ...]
Ids = NDArray[np.int64]


def count(rows: Rows) -> int:
    """How many rows."""
    return sum(len(run) for run in rows)


def ids(rows: Rows) -> Ids:
    """Row ids in tensor order, int64 [L]."""
    parts = [np.arange(run.start, run.stop, run.step, dtype=np.int64) for run in rows if len(run)]
    return np.concatenate(parts) if parts else np.empty(0, np.int64)


def index_below(run: range, bound: int) -> int:
    """How many items of an ascending range lie below `bound`."""
    return min(len(run), max(0, -((run.start - bound) // run.step)))


def indices_below(run: range, bounds: Ids) -> Ids:
    """`index_below` for many bounds at once."""
    return np.minimum(np.maximum(-((run.start - bounds) // run.step), 0), len(run))


def spans_of(row_ids: Any) -> Spans:
    """Sorted, maximal half-open spans that cover exactly these ids."""
    unique: Ids = np.unique(np.asarray(row_ids, dtype=np.int64))
    if not unique.size:
        return ()
    breaks = np.flatnonzero(np.diff(unique) > 1)
    starts = unique[np.concatenate(([0], breaks + 1))]
    stops = unique[np.concatenate((breaks, [unique.size - 1]))] + 1
    return tuple(zip(starts.tolist(), stops.tolist(), strict=True))


def spans(rows: Rows) -> Spans:
    """`spans_of` without making the ids, where every run has step 1."""
    if all(run.step == 1 or len(run) <= 1 for run in rows):
        return merge_spans((run.start, run.start + len(run)) for run in rows if len(run))
    return spans_of(ids(rows))


def merge_spans(parts: Iterable[tuple[int, int]]) -> Spans:
    """The union of half-open spans: sorted, disjoint, maximal."""
    merged: list[tuple[int, int]] = []
    for start, stop in sorted(parts):
        if stop <= start:
            continue
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(stop, merged[-1][1]))
        else:
            merged.append((start, stop))
    return tuple(merged)


@dataclass(frozen=True, slots=True)
class Order:
    """The whole order of rows: lengths of its four parts."""

    kv_prefix: int
    prefix: int
    total: int
    suffix: int

    @property
    def start(self) -> int:
        """Id of the first of the S rows."""
        return self.kv_prefix + self.prefix

    @property
    def stop(self) -> int:
        """One past the last of the S rows."""
        return self.start + self.total

    @property
    def size(self) -> int:
        """All rows."""
        return self.stop + self.suffix

    @property
    def replicated_queries(self) -> Rows:
        """Prefix and suffix rows: every rank has a copy of their Q."""
        return _present(range(self.kv_prefix, self.start), range(self.stop, self.size))

    @property
    def replicated_keys(self) -> Rows:
        """KV prefix, prefix and suffix rows: every rank has a copy of their K and V."""
        return _present(range(self.start), range(self.stop, self.size))


@dataclass(frozen=True, slots=True)
class Layout:
    """Rows by sequence position p = ring · U + ulysses."""

    order: Order
    ulysses: int
    shards: tuple[Rows, ...]

    @staticmethod
    def of(scenario: Scenario) -> Layout:
        """The layout that a scenario asks for; see its ``tokens``."""
        replicated, mesh = scenario.tokens.replicated, scenario.mesh
        total = scenario.tokens.total
        order = Order(replicated.kv_prefix, replicated.prefix, total, replicated.suffix)
        if scenario.tokens.layout == "contiguous":
            shards = _contiguous(order, scenario.shards)
        else:
            striped = scenario.tokens.layout == "striped"
            ring_rows = _striped(order, mesh.ring) if striped else _zigzag(order, mesh.ring)
            each = total // mesh.ranks
            shards = tuple(
                cut(rows, u * each, (u + 1) * each)
                for rows in ring_rows
                for u in range(mesh.ulysses)
            )
        return Layout(order, mesh.ulysses, shards)

    def gathered(self, ring: int) -> Rows:
        """The sharded rows of a whole Ulysses group, in the order the all-to-all leaves them."""
        group = self.shards[ring * self.ulysses : (ring + 1) * self.ulysses]
        return _joined(run for rows in group for run in rows)

    def queries(self, position: int) -> Rows:
        """Rows of a rank's Q and output: [prefix | shard | suffix]."""
        order = self.order
        prefix, suffix = range(order.kv_prefix, order.start), range(order.stop, order.size)
        return _present(prefix, *self.shards[position], suffix)

    def keys(self, position: int) -> Rows:
        """Rows of a rank's K and V: [kv_prefix | prefix | shard | suffix]."""
        order = self.order
        return _present(range(order.start), *self.shards[position], range(order.stop, order.size))


def cut(rows: Rows, start: int, stop: int) -> Rows:
    """Rows [start, stop) of a tensor that holds `rows`."""
    parts: list[range] = []
    at = 0
    for run in rows:
        part = run[max(0, start - at) : max(0, stop - at)]
        if len(part):
            parts.append(part)
        at += len(run)
    return tuple(parts)


def _present(*runs: range) -> Rows:
    return tuple(run for run in runs if len(run))


def _joined(runs: Iterable[range]) -> Rows:
    """Neighbouring runs that continue each other as one run."""
    joined: list[range] = []
    for run in runs:
        if not len(run):
            continue
        last = joined[-1] if joined else None
        if last is not None and run.step == last.step and run.start == last[-1] + last.step:
            joined[-1] = range(last.start, run[-1] + run.step, run.step)
        else:
            joined.append(run)
    return tuple(joined)


def _contiguous(order: Order, lengths: tuple[int, ...]) -> tuple[Rows, ...]:
    shards: list[Rows] = []
    start = order.start
    for length in lengths:
        shards.append(_present(range(start, start + length)))
        start += length
    return tuple(shards)


def _zigzag(order: Order, ring: int) -> list[Rows]:
    """Ring position r holds chunks r and 2R-1-r of 2R, so that causal work is even."""
    chunk = order.total // (2 * ring)
    starts = [order.start + c * chunk for c in range(2 * ring)]
    pairs = ((starts[r], starts[2 * ring - 1 - r]) for r in range(ring))
    return [_joined((range(a, a + chunk), range(b, b + chunk))) for a, b in pairs]


def _striped(order: Order, ring: int) -> list[Rows]:
    """Ring position r holds rows r, r + R, r + 2R, … (arXiv 2311.09431)."""
    return [_present(range(order.start + r, order.stop, ring)) for r in range(ring)]
