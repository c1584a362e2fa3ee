"""Unified sequence-parallel attention, forward: Ulysses all-to-all x ring KV rotation.

Source: USP, arXiv 2405.07719; Ulysses, arXiv 2309.14509; ring, arXiv 2310.01889. Shapes: local Q
[B, L, H, D], local K and V [B, Lk, G, D]; rows as `Schedule.own_queries` and `own_keys` list them.
The same code moves real tensors and, to record what really moves, tensors of ids.
"""

from __future__ import annotations

import time
from typing import Protocol

import torch
from torch import Tensor

from usp_viz.attention.comm import Comm, Shift
from usp_viz.attention.pieces import BlockPiece, block_pieces
from usp_viz.attention.schedule import Hop, Schedule
from usp_viz.layout import Rows, count

INPUT = "input all-to-all"
OUTPUT = "output all-to-all"


class LocalAttention(Protocol):
    """What a rank does with a block: compute it, or note who saw whom."""

    def begin(self, q: Tensor, heads: range, group: int) -> None:
        """Take the queries [B, Lq, h, D] of `heads`, H / G = `group`."""
        ...

    def attend(
        self, step: int, stage: str, k: Tensor, v: Tensor, pieces: tuple[BlockPiece, ...]
    ) -> None:
        """Attend to a block of keys [B, Lk, g, D] and merge."""
        ...

    def hop_done(self, hop: Hop) -> None:
        """All blocks of this hop have been attended."""
        ...

    def output(self) -> Tensor:
        """[B, Lq, h, D]; zeros where nothing was attended."""
        ...


def usp_attention(
    q: Tensor, k: Tensor, v: Tensor, schedule: Schedule, comm: Comm, local: LocalAttention
) -> Tensor:
    """This rank's output [B, L, H, D] for its rows of Q.

    Args:
        q: [B, L, H, D], rows [prefix | shard | suffix].
        k: [B, Lk, G, D], rows [kv_prefix | prefix | shard | suffix]; all rows under a local
            schedule.
        v: As k.
        schedule: Decides everything that ranks must agree on.
        comm: Collectives.
        local: Computes, or records.
    """
    if schedule.local:
        return _local_only(q, k, v, schedule, local)
    q, replicated, kv = _scatter_heads(q, k, v, schedule, comm)
    heads = schedule.query_heads[schedule.ulysses]
    local.begin(q, heads, schedule.group)
    _ring(replicated, kv, schedule, comm, local)
    return _gather_heads(local.output(), schedule, comm)


def _local_only(
    q: Tensor, k: Tensor, v: Tensor, schedule: Schedule, local: LocalAttention
) -> Tensor:
    local.begin(q, range(schedule.heads), schedule.group)
    for hop in schedule.hops:
        pieces = block_pieces(schedule.visibility, schedule.own_queries, schedule.own_keys)
        local.attend(hop.step, f"hop {hop.distance}", k, v, pieces)
        local.hop_done(hop)
    return local.output()


def _scatter_heads(
    q: Tensor, k: Tensor, v: Tensor, schedule: Schedule, comm: Comm
) -> tuple[Tensor, tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Ulysses, first half: from my rows of all heads to all rows of my heads.

    Returns:
        Q [B, prefix + Lr + suffix, h, D]; my heads of the replicated (K, V); my heads of the
        gathered (K, V) [B, Lr, g, D].
    """
    order, me = schedule.layout.order, schedule.ulysses
    batch, dim = q.shape[0], q.shape[-1]
    rows = count(schedule.own_queries) - count(order.replicated_queries)
    prefix = order.start - order.kv_prefix
    shard_q = q[:, prefix : prefix + rows]
    shard_k, shard_v = (t[:, order.start : order.start + rows] for t in (k, v))
    heads, kv_heads = schedule.query_heads, schedule.key_heads
    mine, kv_mine = _slice(heads[me]), _slice(kv_heads[me])
    if schedule.mesh.ulysses > 1:
        send, sent = _pack(shard_q, shard_k, shard_v, schedule, comm)
        h, g = len(heads[me]), len(kv_heads[me])
        counts = [n * batch * (h + 2 * g) * dim for n in schedule.shard_rows(schedule.ring)]
        received, _ = comm.all_to_all(1, INPUT, send, sent, counts)
        # Rows lead, so that the senders' parts lie one behind the other as gathered rows.
        gathered = received.view(sum(schedule.shard_rows(schedule.ring)), batch, h + 2 * g, dim)
        shard_q, shard_k, shard_v = gathered.transpose(0, 1).split([h, g, g], dim=2)
    if order.replicated_queries:
        shard_q = torch.cat([q[:, :prefix, mine], shard_q, q[:, prefix + rows :, mine]], dim=1)
    replicated_k, replicated_v = (
        torch.cat([t[:, : order.start, kv_mine], t[:, order.start + rows :, kv_mine]], dim=1)
        for t in (k, v)
    )
    return shard_q, (replicated_k, replicated_v), (shard_k, shard_v)


def _pack(
    q: Tensor, k: Tensor, v: Tensor, schedule: Schedule, comm: Comm
) -> tuple[Tensor, list[int]]:
    """For each receiver its heads of Q, K and V side by side, [L, B, h + 2g, D], rows first."""
    start = time.perf_counter()
    batch, rows, _, dim = q.shape
    widths = [
        len(heads) + 2 * len(kv_heads)
        for heads, kv_heads in zip(schedule.query_heads, schedule.key_heads, strict=True)
    ]
    counts = [rows * batch * width * dim for width in widths]
    packed = q.new_empty(sum(counts))
    for part, width, heads, kv_heads in zip(
        packed.split(counts), widths, schedule.query_heads, schedule.key_heads, strict=True
    ):
        view = part.view(rows, batch, width, dim).transpose(0, 1)
        h, g = len(heads), len(kv_heads)
        view[:, :, :h] = q[:, :, _slice(heads)]
        view[:, :, h : h + g] = k[:, :, _slice(kv_heads)]
        view[:, :, h + g :] = v[:, :, _slice(kv_heads)]
    comm.recorder.lane(1, "pack", start, time.perf_counter())
    return packed, counts


def _ring(
    replicated: tuple[Tensor, Tensor],
    kv: tuple[Tensor, Tensor],
    schedule: Schedule,
    comm: Comm,
    local: LocalAttention,
) -> None:
    """Attend to every KV block that has work for somebody, while the next one travels.

    The KV in use and the KV arriving are the two halves of a double buffer; each holds K and V
    together, so that one message moves both.
    """
    travels = any(hop.shift for hop in schedule.hops)
    buffers = _DoubleBuffer(kv, schedule) if travels else None
    queries = schedule.queries(schedule.ring)
    for hop in schedule.hops:
        stage, source = f"hop {hop.distance}", (schedule.ring - hop.distance) % schedule.mesh.ring
        shift: Shift | None = None
        if buffers is not None and hop.shift:
            arriving = buffers.arriving((source - hop.shift) % schedule.mesh.ring)
            shift = comm.post_shift(hop.step, stage, hop.shift, buffers.current, arriving)
        if hop.busy:
            if hop.distance == 0 and schedule.replicated_keys():
                pieces = block_pieces(schedule.visibility, queries, schedule.replicated_keys())
                local.attend(hop.step, stage, *replicated, pieces)
            block = kv if buffers is None else buffers.views(source)
            rows: Rows = schedule.layout.gathered(source)
            local.attend(hop.step, stage, *block, block_pieces(schedule.visibility, queries, rows))
        local.hop_done(hop)
        if shift is not None and buffers is not None:
            shift.wait()
            buffers.swap()


class _DoubleBuffer:
    """Two flat buffers for KV, each large enough for any ring position's block."""

    def __init__(self, kv: tuple[Tensor, Tensor], schedule: Schedule) -> None:
        k, v = kv
        self._batch, _, self._heads, self._dim = k.shape
        self._rows = [count(schedule.layout.gathered(ring)) for ring in range(schedule.mesh.ring)]
        size = 2 * max(self._rows) * self._batch * self._heads * self._dim
        self._halves = [k.new_empty(size), k.new_empty(size)]
        self._at = schedule.ring
        own = self._shape(0, self._at)
        own[0].copy_(k)
        own[1].copy_(v)

    def _flat(self, half: int, source: int) -> Tensor:
        size = 2 * self._rows[source] * self._batch * self._heads * self._dim
        return self._halves[half][:size]

    def _shape(self, half: int, source: int) -> Tensor:
        shape = (2, self._batch, self._rows[source], self._heads, self._dim)
        return self._flat(half, source).view(shape)

    @property
    def current(self) -> Tensor:
        """The block in use, flat."""
        return self._flat(0, self._at)

    def arriving(self, source: int) -> Tensor:
        """Room for the block of another ring position, flat."""
        self._next = source
        return self._flat(1, source)

    def views(self, source: int) -> tuple[Tensor, Tensor]:
        """K and V [B, L, g, D] of the block in use."""
        both = self._shape(0, source)
        return both[0], both[1]

    def swap(self) -> None:
        """What arrived is now in use."""
        self._halves.reverse()
        self._at = self._next


def _gather_heads(out: Tensor, schedule: Schedule, comm: Comm) -> Tensor:
    """Ulysses, second half: from all rows of my heads to my rows of all heads."""
    if schedule.mesh.ulysses == 1:
        return out
    order, step = schedule.layout.order, schedule.output_step
    batch, _, h, dim = out.shape
    prefix, suffix = order.start - order.kv_prefix, order.suffix
    lengths = schedule.shard_rows(schedule.ring)
    send = out.transpose(0, 1)
    if prefix + suffix:  # each receiver also gets my heads of the replicated rows
        head, *shards, tail = send.split([prefix, *lengths, suffix])
        send = torch.cat([part for shard in shards for part in (head, shard, tail)])
    sent = [(prefix + rows + suffix) * batch * h * dim for rows in lengths]
    mine = prefix + lengths[schedule.ulysses] + suffix
    counts = [mine * batch * len(heads) * dim for heads in schedule.query_heads]
    _, parts = comm.all_to_all(step, OUTPUT, send.contiguous().view(-1), sent, counts)
    start = time.perf_counter()
    result = out.new_empty(batch, mine, schedule.heads, dim)
    for heads, part in zip(schedule.query_heads, parts, strict=True):
        result[:, :, _slice(heads)] = part.view(mine, batch, len(heads), dim).transpose(0, 1)
    comm.recorder.lane(step, "unpack", start, time.perf_counter())
    return result


def _slice(heads: range) -> slice:
    return slice(heads.start, heads.stop)
