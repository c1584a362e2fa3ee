"""Record what really moves: run the communication code once on tensors that hold their own names.

Each element of the int64 inputs says which tensor, batch row, row and head it is. Whatever arrives
anywhere therefore tells where it came from, and the "attention" of this pass only notes which
queries met which keys. Nothing here knows a plan.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from usp_viz.attention.comm import Received
from usp_viz.attention.local import head_runs
from usp_viz.attention.pieces import BlockPiece
from usp_viz.attention.schedule import Hop
from usp_viz.layout import Ids, Rows, ids, merge_spans, spans_of
from usp_viz.ledger import Piece
from usp_viz.trace import Event

Q, K, V, OUT = range(4)
_ROW_BITS, _HEAD_BITS, _BATCH_BITS = 24, 12, 12
_LABELS = (("Q", Q, Q), ("KV", K, V), ("O", OUT, OUT))


def names(kind: int, batch: int, rows: Rows, heads: int, device: Any = "cpu") -> Tensor:
    """int64 [B, L, heads, 1], each element naming itself."""
    b = torch.arange(batch, device=device)[:, None, None, None]
    r = torch.from_numpy(ids(rows)).to(device)[None, :, None, None]
    h = torch.arange(heads, device=device)[None, None, :, None]
    return (((kind << _BATCH_BITS | b) << _ROW_BITS | r) << _HEAD_BITS) | h


@dataclass(frozen=True, slots=True)
class Names:
    """Decoded elements; arrays of one shape."""

    kind: Ids
    batch: Ids
    row: Ids
    head: Ids

    @staticmethod
    def of(tensor: Tensor) -> Names:
        """What the elements of a tensor say they are."""
        x: NDArray[np.int64] = tensor.cpu().numpy()
        return Names(
            x >> (_BATCH_BITS + _ROW_BITS + _HEAD_BITS),
            x >> (_ROW_BITS + _HEAD_BITS) & (1 << _BATCH_BITS) - 1,
            x >> _HEAD_BITS & (1 << _ROW_BITS) - 1,
            x & (1 << _HEAD_BITS) - 1,
        )

    def pick(self, index: Any) -> Names:
        """The same part of each array."""
        return Names(self.kind[index], self.batch[index], self.row[index], self.head[index])


class IdRecorder:
    """Turns what arrives into events.

    Args:
        rank: This rank.
        element_bytes: D times the item size: what one (batch row, row, head) really weighs.
        emit: Told at once of every stage entered and every event, so that a crash leaves a trace.
    """

    def __init__(self, rank: int, element_bytes: int, emit: Callable[[Any], None]) -> None:
        self.rank = rank
        self.events: list[Event] = []
        self.pieces: list[tuple[int, Piece]] = []
        self._element_bytes = element_bytes
        self._emit = emit

    def entering(self, step: int, stage: str, op: str) -> None:
        """Tell where this rank is."""
        self._emit(("at", step, stage, op))

    def lane(self, step: int, what: str, start: float, stop: float) -> None:
        """Ids take no time worth noting."""

    def received(self, event: Received) -> None:
        """Note each tensor in what arrived; nothing is sent from a rank to itself."""
        for found in self._tensors(event.payload, event.step, event.stage, event.op, event.src):
            self.add(found if event.src != event.dst else replace(found, bytes=0))

    def held(self, step: int, stage: str, op: str, *tensors: Tensor) -> None:
        """Note what this rank itself holds."""
        flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
        for found in self._tensors(flat, step, stage, op, self.rank):
            self.add(replace(found, bytes=0))

    def add(self, *events: Event) -> None:
        """Note events, and tell the caller."""
        self.events += events
        self._emit(("events", events))

    def _tensors(self, payload: Tensor, step: int, stage: str, op: str, src: int) -> list[Event]:
        found = Names.of(payload.reshape(-1))
        events: list[Event] = []
        for label, first, last in _LABELS:
            part = found.pick((found.kind >= first) & (found.kind <= last))
            if not part.row.size:
                continue
            heads = (int(part.head.min()), int(part.head.max()) + 1)
            size = part.row.size * self._element_bytes
            rows = spans_of(part.row)
            events.append(Event(step, stage, op, src, self.rank, label, rows, heads, size))
        return events


class IdAttention:
    """In place of attention: who met whom, and an output that carries the queries' names."""

    def __init__(self, recorder: IdRecorder) -> None:
        self._recorder = recorder
        self._worked = False
        self._hop: list[Piece] = []
        self._stage = ""

    def begin(self, q: Tensor, heads: range, group: int) -> None:
        """Take the queries' names [B, Lq, h, 1]."""
        self._q = q
        self._names = Names.of(q[..., 0])
        self._runs = head_runs(heads, group)

    def attend(
        self, step: int, stage: str, k: Tensor, v: Tensor, pieces: tuple[BlockPiece, ...]
    ) -> None:
        """Note the (query, key) pairs of each piece by what the tensors say they hold."""
        self._recorder.entering(step, stage, "attend")
        self._stage = stage
        keys, values = Names.of(k[..., 0]), Names.of(v[..., 0])
        for piece in pieces:
            for heads, kv_heads in self._runs:
                queries = self._names.pick((piece.batch, piece.queries, heads))
                block = (piece.batch, piece.keys, kv_heads)
                self._hop += _met(queries, keys.pick(block), values.pick(block), piece)

    def hop_done(self, hop: Hop) -> None:
        """Sum the hop up in an attend event, and a merge event where there was work before."""
        pieces, self._hop = self._hop, []
        if not pieces:
            return
        self._recorder.pieces += [(hop.step, piece) for piece in pieces]
        rank, stage = self._recorder.rank, self._stage
        seen = [_extent(piece) for piece in pieces]
        rows = merge_spans(span for found in seen for span in spans_of(found[0]))
        keys = merge_spans(span for found in seen for span in spans_of(found[1]))
        heads = (min(p.heads[0] for p in pieces), max(p.heads[1] for p in pieces))
        pairs = sum(found[2] for found in seen)
        event = Event(hop.step, stage, "attend", rank, rank, "O", rows, heads, 0, keys, pairs)
        self._recorder.add(event)
        if self._worked:
            merge = replace(event, step=hop.step + 1, op="merge", keys=(), pairs=0)
            self._recorder.add(merge)
        self._worked = True

    def output(self) -> Tensor:
        """The queries' names, as outputs."""
        return self._q + ((OUT - Q) << (_BATCH_BITS + _ROW_BITS + _HEAD_BITS))


def _met(queries: Names, keys: Names, values: Names, piece: BlockPiece) -> list[Piece]:
    """One `Piece` where all batch rows and heads hold the same rows, else one for each."""
    mask = ("causal", 0) if piece.causal else piece.mask
    share = queries.head.shape[2] // keys.head.shape[2]
    wrong = _disagree(keys, values)
    if not wrong and _uniform(queries) and _uniform(keys):
        heads = queries.head[0, 0]
        read = np.repeat(keys.head[0, 0], share)
        batch = tuple(queries.batch[:, 0, 0].tolist())
        if (np.diff(heads) == 1).all() and (keys.batch[:, 0, 0] == batch).all():
            span = (int(heads[0]), int(heads[-1]) + 1)
            row_ids = queries.row[0, :, 0].copy(), keys.row[0, :, 0].copy()
            return [Piece(batch, *row_ids, span, tuple(read.tolist()), mask)]
    pieces: list[Piece] = []
    for b in range(queries.row.shape[0]):
        for h in range(queries.row.shape[2]):
            head = int(queries.head[b, 0, h])
            seen = keys.row[b, :, h // share]
            foreign = wrong or (keys.batch[b, :, h // share] != queries.batch[b, 0, h]).any()
            read = -1 if foreign else int(keys.head[b, 0, h // share])
            batch = (int(queries.batch[b, 0, h]),)
            row_ids = queries.row[b, :, h].copy(), seen.copy()
            pieces.append(Piece(batch, *row_ids, (head, head + 1), (read,), mask))
    return pieces


def _uniform(found: Names) -> bool:
    return bool(
        (found.row == found.row[:1, :, :1]).all()
        and (found.head == found.head[:1, :1, :]).all()
        and (found.batch == found.batch[:, :1, :1]).all()
    )


def _disagree(keys: Names, values: Names) -> bool:
    """K and V of different rows, or tensors that are neither."""
    return bool(
        (keys.kind != K).any()
        or (values.kind != V).any()
        or (keys.row != values.row).any()
        or (keys.head != values.head).any()
        or (keys.batch != values.batch).any()
    )


def _extent(piece: Piece) -> tuple[Ids, Ids, int]:
    """(queries that saw something, keys that were seen, pairs over batch rows and heads)."""
    times = len(piece.batch_rows) * (piece.heads[1] - piece.heads[0])
    queries, keys = piece.queries, piece.keys
    if piece.mask is None:
        return queries, keys, times * queries.size * keys.size
    if isinstance(piece.mask, tuple):
        seen = np.minimum(np.arange(1, queries.size + 1), keys.size)
        return queries, keys[: queries.size], times * int(seen.sum())
    mask = piece.mask
    return queries[mask.any(1)], keys[mask.any(0)], times * int(mask.sum())
