"""Cut a masked block into pieces that a kernel computes without a mask wherever structure allows.

Documents, padding and replicated rows become slices, causal order a full rectangle and a triangle,
windows tiles with a small mask; only a dense mask stays a matrix. Coordinates are places in the
local tensors.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from usp_viz.layout import Ids, Rows, ids, index_below, indices_below
from usp_viz.mask import Bools, Visibility

TILE = 256
"""Query rows of one masked tile: small, so that its mask is; large enough for the kernel."""
SCATTERED = 256
"""Pairs of runs beyond which padding is too scattered for slices, and becomes a mask."""


@dataclass(frozen=True, slots=True)
class BlockPiece:
    """A part of a block that one kernel call computes.

    Attributes:
        batch: Batch rows.
        queries, keys: Places in the local tensors.
        causal: Top-left triangle.
        mask: bool [queries, keys]; None when everything is allowed.
    """

    batch: slice
    queries: slice
    keys: slice
    causal: bool = False
    mask: Bools | None = None


def block_pieces(visibility: Visibility, queries: Rows, keys: Rows) -> tuple[BlockPiece, ...]:
    """Pieces that cover each allowed (scored query, key) pair of a block exactly once."""
    return tuple(
        piece
        for batch in _alike(visibility)
        for piece in _batch_pieces(visibility, batch, queries, keys)
    )


def _batch_pieces(
    visibility: Visibility, batch: slice, queries: Rows, keys: Rows
) -> Iterator[BlockPiece]:
    q_runs = list(_valid_runs(visibility, queries, batch.start))
    k_runs = list(_valid_runs(visibility, keys, batch.start))
    if len(q_runs) * len(k_runs) > SCATTERED:
        yield from _scattered_pieces(visibility, batch, ids(queries), ids(keys))
        return
    for q_run in q_runs:
        for k_run in k_runs:
            yield from _run_pieces(visibility, batch, q_run, k_run)


def _alike(visibility: Visibility) -> Iterator[slice]:
    """Slices of batch rows with the same padding."""
    start = 0
    for row in range(1, visibility.batch + 1):
        alike = row < visibility.batch and (
            visibility.valid_spans(row) == visibility.valid_spans(start)
        )
        if not alike:
            yield slice(start, row)
            start = row


def _valid_runs(visibility: Visibility, rows: Rows, batch_row: int) -> Iterator[tuple[int, range]]:
    """(place in the tensor, run) of rows that are no padding, wholly sharded or replicated each."""
    order = visibility.order
    spans = ((0, order.start), *visibility.valid_spans(batch_row), (order.stop, order.size))
    at = 0
    for run in rows:
        for start, stop in spans:
            a, b = index_below(run, start), index_below(run, stop)
            if b > a:
                yield at + a, run[a:b]
        at += len(run)


def _run_pieces(
    visibility: Visibility, batch: slice, query: tuple[int, range], key: tuple[int, range]
) -> Iterator[BlockPiece]:
    (q_at, q_run), (k_at, k_run) = query, key
    order = visibility.order
    q_ids = ids((q_run,))
    sharded = order.start <= k_run.start < order.stop
    if sharded:
        lo, hi = visibility.interval(q_ids)
    else:
        lo, hi = np.zeros_like(q_ids), visibility.replicated_until(q_ids)
    first = indices_below(k_run, lo)
    last = np.maximum(first, indices_below(k_run, hi))
    if visibility.dense and sharded and order.start <= q_run.start < order.stop:
        yield from _dense_pieces(visibility, batch, query, key)
        return
    for piece in _interval_pieces(first, last):
        yield BlockPiece(
            batch,
            slice(q_at + piece.queries.start, q_at + piece.queries.stop),
            slice(k_at + piece.keys.start, k_at + piece.keys.stop),
            piece.causal,
            piece.mask,
        )


def _scattered_pieces(
    visibility: Visibility, batch: slice, queries: Ids, keys: Ids
) -> Iterator[BlockPiece]:
    """Tiles of query rows, each with the mask of all keys between its first and its last."""
    for top in range(0, len(queries), TILE):
        rows = queries[top : top + TILE]
        mask = visibility.allowed(rows, keys, batch.start)
        mask &= visibility.is_valid(rows, batch.start)[:, None]
        seen = np.flatnonzero(mask.any(0))
        if seen.size:
            where = slice(int(seen[0]), int(seen[-1]) + 1)
            mask = mask[:, where]
            whole = None if mask.all() else np.ascontiguousarray(mask)
            yield BlockPiece(batch, slice(top, top + len(rows)), where, mask=whole)


def _dense_pieces(
    visibility: Visibility, batch: slice, query: tuple[int, range], key: tuple[int, range]
) -> Iterator[BlockPiece]:
    (q_at, q_run), (k_at, k_run) = query, key
    mask = visibility.allowed(ids((q_run,)), ids((k_run,)), batch.start)
    if mask.any():
        q, k = slice(q_at, q_at + len(q_run)), slice(k_at, k_at + len(k_run))
        yield BlockPiece(batch, q, k, mask=None if mask.all() else mask)


def _interval_pieces(first: Ids, last: Ids) -> Iterator[BlockPiece]:
    """Pieces for query rows that each see keys [first, last); both never decrease, or by tile."""
    whole = slice(0, 1)
    rows = np.flatnonzero(last > first)
    if not rows.size:
        return
    for start, stop, slope in _segments(rows, first, last):
        a, b = int(first[start]), int(last[start])
        if slope == "flat":
            yield BlockPiece(whole, slice(start, stop), slice(a, b))
        elif slope == "causal":
            # Row 0 sees keys up to b - 1, each next row one more: a rectangle, then a triangle.
            if b - 1 > a:
                yield BlockPiece(whole, slice(start, stop), slice(a, b - 1))
            keys = slice(b - 1, int(last[stop - 1]))
            yield BlockPiece(whole, slice(start, stop), keys, causal=True)
        else:
            yield from _tiles(start, stop, first, last)


def _segments(rows: Ids, first: Ids, last: Ids) -> Iterator[tuple[int, int, str]]:
    """Runs of query rows with one shape: (start, stop, "flat" | "causal" | "band")."""
    da, db = np.diff(first[rows]), np.diff(last[rows])
    step = np.where(da == 0, np.where(db == 0, 0, np.where(db == 1, 1, 2)), 2)
    step[np.diff(rows) > 1] = 3
    ends = np.append(np.flatnonzero(np.diff(step)) + 1, step.size)
    at = 0
    while at < rows.size:
        row = int(rows[at])
        length = int(ends[np.searchsorted(ends, at, side="right")]) - at if at < step.size else 0
        shape = ("flat", "causal", "band", "apart")[step[at]] if length else "apart"
        if shape == "apart" or (shape == "band" and length == 1):  # one jump: a document's border
            yield row, row + 1, "flat"
            at += 1
        else:
            yield row, row + length + 1, shape
            at += length + 1


def _tiles(start: int, stop: int, first: Ids, last: Ids) -> Iterator[BlockPiece]:
    """A band in tiles of `TILE` query rows, each with the mask of its own narrow range of keys."""
    for top in range(start, stop, TILE):
        bottom = min(stop, top + TILE)
        a, b = int(first[top:bottom].min()), int(last[top:bottom].max())
        keys = np.arange(a, b)
        mask = (keys >= first[top:bottom, None]) & (keys < last[top:bottom, None])
        whole = None if mask.all() else mask
        yield BlockPiece(slice(0, 1), slice(top, bottom), slice(a, b), mask=whole)
