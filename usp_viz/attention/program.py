"""What the ranks of a sglang call agree on before the first collective: rows, order, who sees whom.

A `Behaviour` says in words how a release attends; here the words become row ids and kernel pieces.
sglang's ranks are in position order, so rank and position are one number.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np

from usp_viz.attention.pieces import BlockPiece
from usp_viz.attention.schedule import Hop
from usp_viz.behaviour import Behaviour, Part, of_call
from usp_viz.calls import Call
from usp_viz.layout import Ids, Layout, Rows, ids
from usp_viz.mask import Bools, Visibility, visibility
from usp_viz.mesh import Mesh, head_split, kv_heads_of

QUERY_PARTS: tuple[Part, ...] = ("prefix", "rows", "suffix")
KEY_PARTS: tuple[Part, ...] = ("kv_prefix", "prefix", "rows", "suffix")


@dataclass(frozen=True)
class Keys:
    """The keys of one kernel call.

    Attributes:
        rows: Row ids, int64 [Lk].
        real: How many of them come before the ring's padding.
        copies: Replicated rows beside a ring; they do not travel.
    """

    rows: Ids
    real: int
    copies: bool = False


@dataclass(frozen=True)
class Program:
    """One rank's part in a call that returns.

    Attributes:
        call: What the layer is told.
        how: What the release makes of it.
        rank: This rank, which is also its position.
    """

    call: Call
    how: Behaviour
    rank: int

    @staticmethod
    def of(call: Call, rank: int) -> Program:
        """The program of a call that returns."""
        return Program(call, of_call(call), rank)

    # -- who is where, and holds what -------------------------------------------------------------

    @cached_property
    def mesh(self) -> Mesh:
        """The mesh as the exchange sees it: one Ulysses group of all ranks for ``world``."""
        if self.how.exchange == "world":
            return Mesh(self.call.world, 1)
        return Mesh(self.call.ulysses, self.call.ring)

    @cached_property
    def layout(self) -> Layout:
        """Rows by position."""
        return Layout.of(self.call.scenario)

    @property
    def alone(self) -> bool:
        """Nobody communicates."""
        return self.how.exchange == "none"

    @property
    def swaps(self) -> bool:
        """Whether there are all-to-alls."""
        return not self.alone and self.mesh.ulysses > 1

    @property
    def all_keys(self) -> bool:
        """Whether each rank holds all keys from the start."""
        return self.call.skip and self.call.scenario.attention.skip_kv == "full"

    @property
    def own_queries(self) -> Rows:
        """Rows of this rank's Q and output."""
        return self.layout.queries(self.rank)

    @property
    def own_keys(self) -> Rows:
        """Rows of this rank's K and V."""
        if self.all_keys:
            return (range(self.layout.order.size),)
        return self.layout.keys(self.rank)

    @cached_property
    def ring(self) -> int:
        """Ring index."""
        return self.mesh.at(self.rank)[0]

    def group(self, ring: int) -> tuple[int, ...]:
        """Positions that attend together."""
        return (self.rank,) if self.alone else self.mesh.ulysses_group(ring)

    @cached_property
    def query_heads(self) -> tuple[range, ...]:
        """Query heads by index in the group."""
        parts = 1 if self.alone else self.mesh.ulysses
        return head_split(self.call.heads, parts)

    @cached_property
    def key_heads(self) -> tuple[range, ...]:
        """KV heads by index in the group."""
        share = self.call.heads // self.call.kv_heads
        return tuple(kv_heads_of(heads, share) for heads in self.query_heads)

    @property
    def me(self) -> int:
        """Index in the group."""
        return 0 if self.alone else self.mesh.at(self.rank)[1]

    def part_rows(self, part: Part, position: int) -> Ids:
        """Row ids of a part at a position."""
        order = self.layout.order
        if part == "rows":
            return ids(self.layout.shards[position])
        spans = {
            "kv_prefix": range(order.kv_prefix),
            "prefix": range(order.kv_prefix, order.start),
            "suffix": range(order.stop, order.size),
        }
        return ids((spans[part],))

    def moving(self, parts: tuple[Part, ...]) -> tuple[Part, ...]:
        """Of these parts, those that the all-to-all and the ring move."""
        return parts if self.how.copies == "sharded" else ("rows",)

    def length(self, parts: tuple[Part, ...], position: int) -> int:
        """How many rows these parts are at a position."""
        return sum(len(self.part_rows(part, position)) for part in parts)

    # -- the order in which rows are attended -----------------------------------------------------

    def gathered(self, ring: int, parts: tuple[Part, ...]) -> Ids:
        """Row ids of a group's moving rows, in the order of the gathered tensor."""
        moving: list[Part] = [part for part in self.how.parts if part in self.moving(parts)]
        found = [self.part_rows(part, at) for at in self.group(ring) for part in moving]
        return np.concatenate(found) if found else np.empty(0, np.int64)

    def attended(self, ring: int, parts: tuple[Part, ...]) -> Ids:
        """Row ids as a call without ring sees them: copies in their place among the gathered."""
        rows = self.gathered(ring, parts)
        if self.how.copies == "sharded":
            return rows
        found = [
            rows if part == "rows" else self.part_rows(part, self.rank)
            for part in self.how.parts
            if part in parts
        ]
        return np.concatenate(found)

    @property
    def distances(self) -> range:
        """Hop distances; KV travels one position a hop, whether or not anybody attends it."""
        return range(1 if self.how.ring == "none" else self.mesh.ring)

    def kernels(self, ring: int, distance: int) -> Iterator[Keys]:
        """The kernel calls at a ring index and hop distance: the copies first, if apart."""
        if self.how.ring == "none":
            rows = ids(self.own_keys) if self.all_keys else self.attended(ring, KEY_PARTS)
            yield Keys(rows, len(rows))
            return
        if distance == 0 and self.how.copies == "apart":
            names: list[Part] = [part for part in self.how.parts if part != "rows"]
            copies = np.concatenate([self.part_rows(part, self.rank) for part in names])
            if copies.size:
                yield Keys(copies, len(copies), copies=True)
        if self.how.ring == "earlier" and distance > ring:
            return
        source = (ring - distance) % self.mesh.ring
        rows = self.gathered(source, KEY_PARTS)
        real = len(rows)
        if self.how.ring == "real" and self.how.span is not None:
            real = min(real, max(0, self.how.span[0] - source * real))
        yield Keys(rows, real)

    # -- who sees whom ----------------------------------------------------------------------------

    @cached_property
    def masks(self) -> Visibility:
        """The scenario's masks, without its causal flag."""
        return visibility(self.layout.order, self.call.scenario.set({"attention.causal": False}))

    def pieces(self, ring: int, keys: Keys, padding: bool) -> Iterator[BlockPiece]:
        """What a kernel call computes; queries that are padding take part only if asked for."""
        queries = self.attended(ring, QUERY_PARTS)
        for start, stop in _alike(self.masks):
            batch = slice(start, stop)
            scored = self.masks.is_valid(queries, start)
            rows = _runs(np.ones_like(scored) if padding else scored)
            if self.how.mask == "pairs":
                allowed = self.masks.allowed(queries, keys.rows, start)
                if padding:
                    allowed |= self.blind(ring, start)[:, None] & (self.how.unseen == "all")
                for a, b in rows:
                    if allowed[a:b].any():
                        whole = slice(0, len(keys.rows))
                        yield BlockPiece(batch, slice(a, b), whole, mask=allowed[a:b])
                continue
            seen = self._seen_keys(keys, start)
            if padding and self.how.unseen == "all" and not seen.any():
                seen = np.ones_like(seen)
            for a, b in rows:
                for c, d in _runs(seen):
                    for piece in self._triangle((a, b), (c, d), len(queries), len(keys.rows)):
                        yield BlockPiece(batch, *piece)

    def _seen_keys(self, keys: Keys, batch_row: int) -> Bools:
        """Keys that a mask leaves."""
        seen = np.arange(len(keys.rows)) < keys.real
        if self.how.mask == "keys":
            seen &= self.masks.is_valid(keys.rows, batch_row)
        elif self.how.mask == "span" and self.how.span is not None:
            seen[slice(*self.how.span)] = False
        return seen

    def _triangle(
        self, rows: tuple[int, int], keys: tuple[int, int], queries: int, total: int
    ) -> Iterator[tuple[slice, slice, bool]]:
        """(queries, keys, causal) of the pairs among these places that the layer allows."""
        if self.how.documents:
            bounds = np.cumsum([0, *self.call.seq_lens(self.rank)]).tolist()
            blocks = [
                (max(rows[0], a), min(rows[1], b), max(keys[0], a), min(keys[1], b))
                for a, b in pairwise(bounds)
            ]
        else:
            blocks = [(*rows, *keys)]
        shift = total - queries if self.how.causal == "last" else 0
        for a, b, c, d in blocks:
            if self.how.causal == "off":
                cuts = [(slice(a, b), slice(c, d), False)]
            else:
                cuts = _causal_cuts((a, b), (c, d), shift)
            for q, k, causal in cuts:
                if q.start < q.stop and k.start < k.stop:
                    yield q, k, causal

    def blind(self, ring: int, batch_row: int) -> Bools:
        """Queries that see nothing of the keys that travel, or of all where none does."""
        queries = self.attended(ring, QUERY_PARTS)
        *_, keys = self.kernels(ring, 0)  # a ring cuts every hop alike
        if self.how.mask == "pairs":
            return np.logical_not(self.masks.allowed(queries, keys.rows, batch_row).any(1))
        blind = np.ones(len(queries), np.bool_)
        for run in _runs(self._seen_keys(keys, batch_row)):
            cuts = self._triangle((0, len(queries)), run, len(queries), len(keys.rows))
            for seeing, _, _ in cuts:
                blind[seeing] = False
        return blind

    def works(self, ring: int, distance: int) -> bool:
        """Whether any scored query sees anything there."""
        return any(
            True
            for keys in self.kernels(ring, distance)
            for _ in self.pieces(ring, keys, padding=False)
        )

    @cached_property
    def hops(self) -> tuple[Hop, ...]:
        """The hops, with step numbers that are the same on every rank."""
        rings = range(self.call.world if self.alone else self.mesh.ring)
        step, hops = 1 + self.swaps, list[Hop]()
        worked = dict.fromkeys(rings, False)
        for distance in self.distances:
            busy = {ring: self._at(ring).works(ring, distance) for ring in rings}
            here = self.rank if self.alone else self.ring
            last = distance == self.distances[-1]
            merges = busy[here] and worked[here]
            hops.append(Hop(distance, None if last else 1, step, busy[here], merges))
            step += 2 if any(busy[r] and worked[r] for r in rings) else 1
            worked = {ring: worked[ring] or busy[ring] for ring in rings}
        return tuple(hops)

    def _at(self, ring: int) -> Program:
        return Program(self.call, self.how, ring) if self.alone else self

    @property
    def output_step(self) -> int:
        """Step of the output all-to-all, or of the end where there is none."""
        last = self.hops[-1]
        rings = range(self.call.world if self.alone else self.mesh.ring)
        merged = len(self.distances) > 1 and any(
            self.works(ring, last.distance)
            and any(self.works(ring, distance) for distance in self.distances[:-1])
            for ring in rings
        )
        return last.step + 1 + merged


def _alike(masks: Visibility) -> Iterator[tuple[int, int]]:
    """Runs of batch rows with the same padding."""
    borders = [
        row for row in range(1, masks.batch) if masks.valid_spans(row) != masks.valid_spans(row - 1)
    ]
    yield from zip([0, *borders], [*borders, masks.batch], strict=True)


def _runs(flags: Bools) -> list[tuple[int, int]]:
    """Half-open runs of True."""
    padded = np.concatenate(([False], flags, [False]))
    edges = np.flatnonzero(padded[1:] != padded[:-1]).tolist()
    return list(zip(edges[::2], edges[1::2], strict=True))


def _causal_cuts(
    rows: tuple[int, int], keys: tuple[int, int], shift: int
) -> list[tuple[slice, slice, bool]]:
    """Pairs with key <= query + shift: a rectangle and a triangle that grows, then a rectangle."""
    (a, b), (c, d) = rows, keys
    grow, full = min(b, max(a, c - shift)), min(b, max(a, d - shift))
    return [
        (slice(grow, full), slice(c, grow + shift), False),
        (slice(grow, full), slice(grow + shift, full + shift), True),
        (slice(full, b), slice(c, d), False),
    ]
