"""What a rank computes: its query heads against one KV block after the other, merged by LSE."""

from __future__ import annotations

import math
import time
from itertools import pairwise

import torch
from torch import Tensor

from usp_viz.attention.comm import Recorder
from usp_viz.attention.pieces import BlockPiece
from usp_viz.attention.schedule import Hop
from usp_viz.kernels.block import block_attention
from usp_viz.kernels.merge import merge_


def head_runs(heads: range, group: int) -> list[tuple[slice, slice]]:
    """Cut query heads so that each run reads whole KV heads, or part of one.

    Within a run the H % G == 0 rule of the kernels holds, without copying a KV head. At most three
    runs: the rest of a shared KV head, whole ones, the beginning of another.

    Returns:
        (local query heads, local KV heads) of each run.
    """
    if not heads:
        return []
    first = heads.start // group
    borders = {heads.start, heads.stop}
    for border in (-(-heads.start // group) * group, heads.stop // group * group):
        if heads.start < border < heads.stop:
            borders.add(border)
    cuts = sorted(borders)
    return [
        (slice(a - heads.start, b - heads.start), slice(a // group - first, -(-b // group) - first))
        for a, b in pairwise(cuts)
    ]


class KernelAttention:
    """The real thing: block kernels, and accumulators in float32 (float64 for float64)."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder

    def begin(self, q: Tensor, heads: range, group: int) -> None:
        """Take the queries [B, Lq, h, D]."""
        self._q = q
        self._runs = head_runs(heads, group)
        self._acc: Tensor | None = None
        self._lse: Tensor | None = None

    def attend(
        self, step: int, stage: str, k: Tensor, v: Tensor, pieces: tuple[BlockPiece, ...]
    ) -> None:
        """Compute each piece and merge it into the accumulators."""
        self._recorder.entering(step, stage, "attend")
        start = time.perf_counter()
        for piece in pieces:
            mask = None
            if piece.mask is not None:
                mask = torch.from_numpy(piece.mask).to(self._q.device)
            for heads, kv_heads in self._runs:
                out, lse = block_attention(
                    self._q[piece.batch, piece.queries, heads],
                    k[piece.batch, piece.keys, kv_heads],
                    v[piece.batch, piece.keys, kv_heads],
                    causal=piece.causal,
                    mask=mask,
                )
                self._add(piece, heads, out, lse)
        self._recorder.lane(step, "attend", start, time.perf_counter())

    def _add(self, piece: BlockPiece, heads: slice, out: Tensor, lse: Tensor) -> None:
        wide = torch.float64 if out.dtype == torch.float64 else torch.float32
        if self._acc is None or self._lse is None:
            if out.shape == self._q.shape:  # the first piece is everything: adopt it
                self._acc, self._lse = out.to(wide), lse
                return
            self._acc = torch.zeros(self._q.shape, dtype=wide, device=out.device)
            self._lse = torch.full(self._q.shape[:3], -math.inf, dtype=wide, device=out.device)
        where = (piece.batch, piece.queries, heads)
        merge_(self._acc[where], self._lse[where], out, lse)

    def hop_done(self, hop: Hop) -> None:
        """Nothing is left to do: pieces merge as they are computed."""

    def output(self) -> Tensor:
        """[B, Lq, h, D] in q's dtype."""
        if self._acc is None:
            return torch.zeros_like(self._q)
        return self._acc.to(self._q.dtype)
