"""What a release of sglang computes, on our collectives and kernels.

The skeleton is ours (one packed all-to-all, KV shifted along the ring, one all-to-all back), who
sees whom is the release's: triangles by place instead of by row, masks ignored, copies counted
repeatedly. `Program` decides; here tensors move.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from usp_viz.attention.comm import Comm, Shift
from usp_viz.attention.local import KernelAttention
from usp_viz.attention.pieces import BlockPiece
from usp_viz.attention.program import KEY_PARTS, QUERY_PARTS, Program
from usp_viz.attention.usp import INPUT, OUTPUT, LocalAttention
from usp_viz.behaviour import Part
from usp_viz.layout import Ids, ids


class NarrowAttention(KernelAttention):
    """Merges in float32, even for float64, as sglang's ring does."""

    def _add(self, piece: BlockPiece, heads: slice, out: Tensor, lse: Tensor) -> None:
        super()._add(piece, heads, out.float(), lse.float())


def sglang_attention(
    q: Tensor, k: Tensor, v: Tensor, program: Program, comm: Comm, local: LocalAttention, real: bool
) -> Tensor:
    """This rank's output [B, L, H, D], as the release gives it.

    Args:
        q: [B, L, H, D], rows [prefix | shard | suffix].
        k: [B, Lk, G, D], rows [kv_prefix | prefix | shard | suffix], or all rows.
        v: As k.
        program: Decides everything that ranks must agree on.
        comm: Collectives on `program.mesh`.
        local: Computes, or records.
        real: Whether the tensors hold numbers; padding queries are then computed, too, and rows
            get the values that a release gives to queries that see nothing.
    """
    q_all, kv_moving, kv_all = _arrange(q, k, v, program, comm)
    local.begin(q_all, program.query_heads[program.me], program.call.heads // program.call.kv_heads)
    _attend(kv_moving, kv_all, program, comm, local, real)
    out = local.output()
    if real:
        _fill_blind(out, kv_all[1], program)
    return _give_back(out, program, comm)


def _parts(tensor: Tensor, names: tuple[Part, ...], program: Program) -> dict[Part, Tensor]:
    """A rank's rows by part."""
    lengths = [len(program.part_rows(part, program.rank)) for part in names]
    return dict(zip(names, tensor.split(lengths, dim=1), strict=True))


def _arrange(
    q: Tensor, k: Tensor, v: Tensor, program: Program, comm: Comm
) -> tuple[Tensor, tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Swap heads for sequence, and put rows in the release's order.

    Returns:
        Q of all attended queries, my heads; (K, V) of the rows that travel; (K, V) of all keys of
        a call without a ring, and of the copies alone with one.
    """
    if program.all_keys:
        queries = _parts(q, QUERY_PARTS, program)
        q_all = _join([queries[p] for p in program.how.parts if p in QUERY_PARTS])
        return q_all, (k, v), (k, v)
    tensors = [
        _parts(tensor, names, program)
        for tensor, names in ((q, QUERY_PARTS), (k, KEY_PARTS), (v, KEY_PARTS))
    ]
    gathered = _swap(tensors, program, comm)
    heads, kv_heads = program.query_heads[program.me], program.key_heads[program.me]
    results: list[Tensor] = []
    for own, rows, mine in zip(tensors, gathered, (heads, kv_heads, kv_heads), strict=True):
        if program.how.copies == "sharded":
            results.append(rows)
            continue
        cut = slice(mine.start, mine.stop)
        ringed = program.how.ring != "none" and own is not tensors[0]
        results.append(
            _join(
                [
                    rows if part == "rows" else own[part][:, :, cut]
                    for part in program.how.parts
                    if part in own and not (ringed and part == "rows")
                ]
            )
        )
    return results[0], (gathered[1], gathered[2]), (results[1], results[2])


def _join(tensors: list[Tensor]) -> Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors, dim=1)


def _swap(
    tensors: list[dict[Part, Tensor]], program: Program, comm: Comm
) -> tuple[Tensor, Tensor, Tensor]:
    """The input all-to-all: moving rows of my group, my heads; rows by position."""
    how = program.how
    moving = [
        _join([own[part] for part in how.parts if part in own and part in program.moving(names)])
        for own, names in zip(tensors, (QUERY_PARTS, KEY_PARTS, KEY_PARTS), strict=True)
    ]
    if not program.swaps:
        return moving[0], moving[1], moving[2]
    group = program.group(program.ring)
    batch, dim = moving[0].shape[0], moving[0].shape[-1]
    by_index = [
        (heads, kv_heads, kv_heads)
        for heads, kv_heads in zip(program.query_heads, program.key_heads, strict=True)
    ]
    sent = [
        torch.cat(
            [
                tensor[:, :, heads.start : heads.stop].reshape(-1)
                for tensor, heads in zip(moving, all_heads, strict=True)
            ]
        )
        for all_heads in by_index
    ]
    shapes = [
        [
            (batch, program.length(program.moving(names), position), len(heads), dim)
            for names, heads in zip(
                (QUERY_PARTS, KEY_PARTS, KEY_PARTS), by_index[program.me], strict=True
            )
        ]
        for position in group
    ]
    counts = [sum(math.prod(shape) for shape in three) for three in shapes]
    _, parts = comm.all_to_all(1, INPUT, torch.cat(sent), [len(part) for part in sent], counts)
    found: list[list[Tensor]] = [[], [], []]
    for part, three in zip(parts, shapes, strict=True):
        pieces = part.split([math.prod(shape) for shape in three])
        for into, piece, shape in zip(found, pieces, three, strict=True):
            into.append(piece.view(shape))
    return _join(found[0]), _join(found[1]), _join(found[2])


def _attend(
    moving: tuple[Tensor, Tensor],
    every: tuple[Tensor, Tensor],
    program: Program,
    comm: Comm,
    local: LocalAttention,
    real: bool,
) -> None:
    """All kernel calls, hop by hop; the next block is on its way while one is attended."""
    ring, size = program.ring, program.mesh.ring
    place = program.rank if program.alone else ring
    block = torch.stack(moving) if len(program.distances) > 1 else None
    for hop in program.hops:
        stage = f"hop {hop.distance}"
        shift: Shift | None = None
        arriving = block
        if block is not None and hop.shift:
            source = (ring - hop.distance - 1) % size
            rows = len(program.gathered(source, KEY_PARTS))
            arriving = block.new_empty(2, block.shape[1], rows, *block.shape[3:])
            shift = comm.post_shift(hop.step, stage, 1, block.view(-1), arriving.view(-1))
        for keys in program.kernels(place, hop.distance):
            k, v = every if block is None or keys.copies else (block[0], block[1])
            pieces = tuple(program.pieces(place, keys, padding=real))
            if pieces:
                local.attend(hop.step, stage, k, v, pieces)
        local.hop_done(hop)
        if shift is not None:
            shift.wait()
            block = arriving


def _fill_blind(out: Tensor, v: Tensor, program: Program) -> None:
    """Values of queries that see nothing, and of those that the release sets to zero."""
    how, place = program.how, program.rank if program.alone else program.ring
    if how.ring == "real" and how.span is not None:
        out[:, max(0, how.span[0] - place * out.shape[1]) :] = 0
    if how.unseen not in ("mean", "nan"):
        return
    share = program.call.heads // program.call.kv_heads
    for row in range(out.shape[0]):
        blind = torch.from_numpy(program.blind(place, row)).to(out.device)
        if how.unseen == "nan":
            out[row, blind] = math.nan
        elif blind.any():
            wide = v[row].to(torch.float64 if v.dtype == torch.float64 else torch.float32)
            mean = wide.mean(0).repeat_interleave(share, 0)[: out.shape[2]]
            out[row, blind] = mean.to(out.dtype)


def _give_back(out: Tensor, program: Program, comm: Comm) -> Tensor:
    """Swap sequence for heads, and return this rank's rows as [prefix | shard | suffix]."""
    if not program.swaps:
        rows = program.attended(program.ring, QUERY_PARTS)
        return _in_order(out, rows, ids(program.own_queries))
    group, heads = program.group(program.ring), program.query_heads
    attended = program.attended(program.ring, QUERY_PARTS)
    wanted = [ids(program.layout.queries(position)) for position in group]
    blocks: list[Tensor] = []
    at = 0
    for position, rows in zip(group, wanted, strict=True):
        here = out
        held = attended
        if program.how.copies == "sharded":  # each rank gets its own copies back
            length = program.length(program.moving(QUERY_PARTS), position)
            here, held = out[:, at : at + length], attended[at : at + length]
            at += length
        blocks.append(_in_order(here, held, rows).reshape(-1))
    batch, dim = out.shape[0], out.shape[-1]
    mine = len(wanted[program.me])
    counts = [batch * mine * len(part) * dim for part in heads]
    sent = [len(block) for block in blocks]
    _, parts = comm.all_to_all(program.output_step, OUTPUT, torch.cat(blocks), sent, counts)
    shaped = [
        part.view(batch, mine, len(each), dim) for part, each in zip(parts, heads, strict=True)
    ]
    return torch.cat(shaped, dim=2)


def _in_order(tensor: Tensor, rows: Ids, wanted: Ids) -> Tensor:
    """The rows `wanted` of a tensor that holds `rows`."""
    order = np.argsort(rows, kind="stable")
    places = order[np.searchsorted(rows[order], wanted)]
    if (np.diff(places) == 1).all():
        first = int(places[0]) if places.size else 0
        return tensor[:, first : first + places.size]
    return tensor[:, torch.from_numpy(places).to(tensor.device)]
