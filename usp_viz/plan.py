"""Each rank's program, predicted from the scenario alone: what `usp_viz.trace` calls a trace.

The executor never reads a plan, and a plan never asks the executor: when a recorded trace equals
the predicted one, two independent programs agree. Steps are made when asked for, and whatever all
ranks of a ring position share (their rows, their blocks) is worked out once.

The schedule (USP, arXiv 2405.07719): Ulysses groups swap sequence for heads; then KV travels round
the rings, one *hop* for each distance at which anybody has an allowed pair; then heads go back for
sequence. Replicated keys never travel: each rank attends its own copy at distance 0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import TYPE_CHECKING

from usp_viz.layout import Layout, Rows, Spans, count
from usp_viz.mask import Block, Visibility
from usp_viz.mesh import Mesh, head_split, kv_heads_of
from usp_viz.scenario import ITEMSIZE
from usp_viz.spans import SpanMaker
from usp_viz.trace import Event, Trace

if TYPE_CHECKING:
    from usp_viz.scenario import Scenario

Heads = tuple[int, int]
Maker = Callable[[int, str], Iterator[Event]]
"""Makes one step's events from its number and stage, in canonical order."""


def simulate(scenario: Scenario) -> Trace:
    """The predicted trace of a scenario."""
    return plan(scenario).trace


def plan(scenario: Scenario) -> Plan:
    """The program that a scenario's policy gives every rank."""
    if scenario.policy != "extended":
        from usp_viz.release_plan import release_plan

        return release_plan(scenario)
    attention = scenario.attention
    # A skip that leaves each rank with its own keys only cannot be right: the keys must travel.
    local = attention.skip_sequence_parallel and attention.skip_kv == "full"
    return Plan(
        mesh=Mesh.of(scenario),
        layout=Layout.of(scenario),
        visibility=Visibility.of(scenario),
        tensors=Tensors.of(scenario),
        local=local,
        all_keys=local,
    )


@dataclass(frozen=True, slots=True)
class Tensors:
    """Shapes: B, H, G, D, and bytes of an element."""

    batch: int
    heads: int
    kv_heads: int
    head_dim: int
    itemsize: int

    @staticmethod
    def of(scenario: Scenario) -> Tensors:
        """The shapes of a scenario."""
        tensors = scenario.tensors
        itemsize = ITEMSIZE[tensors.dtype]
        return Tensors(tensors.batch, tensors.heads, scenario.kv_heads, tensors.head_dim, itemsize)

    @property
    def row_bytes(self) -> int:
        """One row of one head in one tensor, over all batch rows."""
        return self.batch * self.head_dim * self.itemsize


@dataclass(frozen=True, eq=False)
class Plan:
    """The program of all ranks, as the `extended` policy runs it.

    Ranks that attend the same rows together are at one *place*: a ring position, or the rank's own
    position where nobody communicates.

    Attributes:
        mesh, layout, visibility: Who is where, holds what, and may see whom.
        tensors: Shapes.
        local: Nobody communicates.
        all_keys: Every rank holds all keys from the start.
    """

    mesh: Mesh
    layout: Layout
    visibility: Visibility
    tensors: Tensors
    local: bool = False
    all_keys: bool = False
    _blocks: dict[tuple[int, int], Block] = field(
        default_factory=dict[tuple[int, int], Block], repr=False
    )
    _spans: SpanMaker = field(default_factory=SpanMaker, repr=False)

    @cached_property
    def trace(self) -> Trace:
        """The events, made step by step."""
        steps = tuple(self._steps())

        def make(number: int) -> tuple[Event, ...]:
            stage, maker = steps[number]
            return tuple(maker(number, stage))

        stages = tuple(stage for stage, _ in steps)
        return Trace(self.mesh.ranks, stages, make, self.layout.order)

    def _steps(self) -> Iterator[tuple[str, Maker]]:
        yield "shard", self._place
        if self.swaps:
            yield "input all-to-all", self._gather_sequence
        for n, distance in enumerate(self.hops):
            following = self.hops[n + 1] if n + 1 < len(self.hops) else None
            stage = f"hop {distance}"
            yield stage, partial(self._hop, distance, following)
            if any(self.merges(place, distance) for place in self._places):
                yield stage, partial(self._merge, distance)
        if self.swaps:
            yield "output all-to-all", self._gather_heads
        yield "output", self._output

    @property
    def swaps(self) -> bool:
        """Whether there are all-to-alls."""
        return self.mesh.ulysses > 1 and not self.local

    # -- who holds what ---------------------------------------------------------------------------

    @cached_property
    def own_queries(self) -> tuple[Rows, ...]:
        """Rows of Q and of the output, by position."""
        return tuple(self.layout.queries(position) for position in range(self.mesh.ranks))

    @cached_property
    def own_keys(self) -> tuple[Rows, ...]:
        """Rows of K and V, by position."""
        if self.all_keys:
            return ((range(self.layout.order.size),),) * self.mesh.ranks
        return tuple(self.layout.keys(position) for position in range(self.mesh.ranks))

    @property
    def swapped_queries(self) -> tuple[Rows, ...]:
        """Of them, by position, those that an all-to-all moves."""
        return self.layout.shards

    @property
    def swapped_keys(self) -> tuple[Rows, ...]:
        """The same for K and V."""
        return self.layout.shards

    @cached_property
    def queries(self) -> tuple[Rows, ...]:
        """Query rows attended at each place."""
        if self.local:
            return self.own_queries
        copies = self.layout.order.replicated_queries
        return tuple(copies + self.layout.gathered(ring) for ring in range(self.mesh.ring))

    @cached_property
    def travelling(self) -> tuple[Rows, ...]:
        """KV rows that each ring position brings to its ring."""
        return tuple(self.layout.gathered(ring) for ring in range(self.mesh.ring))

    def keys(self, place: int, distance: int) -> Rows:
        """Key rows met at a place, `distance` hops from where they started."""
        if self.local:
            return self.own_keys[place]
        rows = self.travelling[(place - distance) % self.mesh.ring]
        return self.layout.order.replicated_keys + rows if distance == 0 else rows

    # -- who attends what, when ------------------------------------------------------------------

    @property
    def _places(self) -> range:
        """Places that differ in what they attend; the last is the likeliest to see anything."""
        return range(self.mesh.ranks if self.local else self.mesh.ring)[::-1]

    def place(self, rank: int) -> int:
        """Where a rank attends: its ring position, or its own position when nobody communicates."""
        return self.mesh.position(rank) if self.local else self.mesh.at(rank)[0]

    def block(self, place: int, distance: int) -> Block:
        """What the mask leaves of these queries and keys."""
        if (place, distance) not in self._blocks:
            self._blocks[place, distance] = self._block(place, distance)
        return self._blocks[place, distance]

    def _block(self, place: int, distance: int) -> Block:
        queries, keys = self.queries[place], self.keys(place, distance)
        return self.visibility.block(queries, keys, self._spans)

    def works(self, place: int, distance: int) -> bool:
        """Whether there is anything to attend."""
        return self.block(place, distance).pairs > 0

    def merges(self, place: int, distance: int) -> bool:
        """Whether a place works at this distance, and has worked before."""
        earlier = self.hops[: self.hops.index(distance)]
        return self.works(place, distance) and any(self.works(place, d) for d in earlier)

    @cached_property
    def hops(self) -> tuple[int, ...]:
        """Distances, ascending: those at which anybody works, and 0 to send from."""
        if self.local:
            return (0,)
        ring = range(self.mesh.ring)
        active = [d for d in ring if any(self.works(place, d) for place in self._places)]
        return tuple(active if not active or active[0] == 0 else [0, *active])

    # -- heads ------------------------------------------------------------------------------------

    @cached_property
    def query_heads(self) -> tuple[range, ...]:
        """Query heads of each Ulysses index, while it attends."""
        if self.local:
            return (range(self.tensors.heads),) * self.mesh.ulysses
        return head_split(self.tensors.heads, self.mesh.ulysses)

    @cached_property
    def key_heads(self) -> tuple[range, ...]:
        """KV heads of each Ulysses index, while it attends."""
        group = self.tensors.heads // self.tensors.kv_heads
        return tuple(kv_heads_of(heads, group) for heads in self.query_heads)

    def _attending(self) -> Iterator[tuple[int, int, range]]:
        """(rank, place, query heads) of the ranks that have heads, by rank."""
        for rank in range(self.mesh.ranks):
            heads = self.query_heads[self.mesh.at(rank)[1]]
            if heads:
                yield rank, self.place(rank), heads

    # -- events -----------------------------------------------------------------------------------

    def _place(self, step: int, stage: str) -> Iterator[Event]:
        for rank in range(self.mesh.ranks):
            position = self.mesh.position(rank)
            for tensor, rows, heads in (
                ("Q", self._query_spans[position], self.tensors.heads),
                ("KV", self._key_spans[position], self.tensors.kv_heads),
            ):
                if rows:
                    yield Event(step, stage, "place", rank, rank, tensor, rows, (0, heads), 0)

    def _gather_sequence(self, step: int, stage: str) -> Iterator[Event]:
        row_bytes = self.tensors.row_bytes
        parts = (
            ("Q", _counted(self.swapped_queries, self._spans), self.query_heads, row_bytes),
            ("KV", _counted(self.swapped_keys, self._spans), self.key_heads, 2 * row_bytes),
        )
        for src, dst in self._swaps():
            position, ulysses = self.mesh.position(src), self.mesh.at(dst)[1]
            for tensor, swapped, all_heads, each in parts:
                (rows, length), heads = swapped[position], all_heads[ulysses]
                if rows and heads:
                    size = 0 if src == dst else length * len(heads) * each
                    yield Event(
                        step, stage, "all_to_all", src, dst, tensor, rows, _pair(heads), size
                    )

    def _gather_heads(self, step: int, stage: str) -> Iterator[Event]:
        returned = _counted(self.own_queries, self._spans)
        for src, dst in self._swaps():
            rows, length = returned[self.mesh.position(dst)]
            heads = self.query_heads[self.mesh.at(src)[1]]
            if rows and heads:
                size = 0 if src == dst else length * len(heads) * self.tensors.row_bytes
                yield Event(step, stage, "all_to_all", src, dst, "O", rows, _pair(heads), size)

    def _swaps(self) -> Iterator[tuple[int, int]]:
        """(src, dst) inside Ulysses groups."""
        for src in range(self.mesh.ranks):
            for dst in self.mesh.ulysses_group(self.mesh.at(src)[0]):
                yield src, dst

    def _hop(self, distance: int, following: int | None, step: int, stage: str) -> Iterator[Event]:
        if following is not None:
            yield from self._send(distance, following, step, stage)
        for rank, place, heads in self._attending():
            block = self.block(place, distance)
            if block.pairs:
                yield Event(
                    step,
                    stage,
                    "attend",
                    rank,
                    rank,
                    "O",
                    block.queries,
                    _pair(heads),
                    0,
                    block.keys,
                    block.pairs * len(heads),
                )

    def _send(self, distance: int, following: int, step: int, stage: str) -> Iterator[Event]:
        ring, row_bytes = self.mesh.ring, 2 * self.tensors.row_bytes
        for rank in range(self.mesh.ranks):
            place, ulysses = self.mesh.at(rank)
            source = (place - distance) % ring
            (rows, length), heads = self._travelling[source], self.key_heads[ulysses]
            if heads and rows:
                dst = self.mesh.rank((source + following) % ring, ulysses)
                size = length * len(heads) * row_bytes
                yield Event(step, stage, "send", rank, dst, "KV", rows, _pair(heads), size)

    def _merge(self, distance: int, step: int, stage: str) -> Iterator[Event]:
        for rank, place, heads in self._attending():
            if self.merges(place, distance):
                rows = self.block(place, distance).queries
                yield Event(step, stage, "merge", rank, rank, "O", rows, _pair(heads), 0)

    def _output(self, step: int, stage: str) -> Iterator[Event]:
        for rank in range(self.mesh.ranks):
            rows, heads = self._query_spans[self.mesh.position(rank)], (0, self.tensors.heads)
            if rows:
                yield Event(step, stage, "output", rank, rank, "O", rows, heads, 0)

    @cached_property
    def _query_spans(self) -> tuple[Spans, ...]:
        return tuple(self._spans(rows) for rows in self.own_queries)

    @cached_property
    def _key_spans(self) -> tuple[Spans, ...]:
        return tuple(self._spans(rows) for rows in self.own_keys)

    @cached_property
    def _travelling(self) -> tuple[tuple[Spans, int], ...]:
        return _counted(self.travelling, self._spans)


def _counted(
    rows_of: tuple[Rows, ...], as_spans: Callable[[Rows], Spans]
) -> tuple[tuple[Spans, int], ...]:
    """(spans, how many rows) of each; rows that are held twice count twice."""
    return tuple((as_spans(rows), count(rows)) for rows in rows_of)


def _pair(heads: range) -> Heads:
    return heads.start, heads.stop
