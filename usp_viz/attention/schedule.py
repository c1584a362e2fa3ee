"""What one rank needs to know before the first collective, decided from the scenario alone.

Every rank must make the same collective calls, so nothing here may look at a tensor: whether a hop
has work, who sends how many rows and heads, and how steps are numbered are all functions of the
scenario that every rank evaluates alike.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from usp_viz.layout import Layout, Rows, count
from usp_viz.mask import Visibility
from usp_viz.mesh import Mesh, head_split, kv_heads_of
from usp_viz.scenario import Scenario


@dataclass(frozen=True)
class Schedule:
    """One rank's view of a unified sequence-parallel attention.

    Attributes:
        mesh, layout, visibility: As the scenario means them.
        rank: Whose view this is.
        heads: H.
        kv_heads: G.
        local: No collectives: each rank holds all keys (`skip_sequence_parallel`).
    """

    mesh: Mesh
    layout: Layout
    visibility: Visibility
    rank: int
    heads: int
    kv_heads: int
    local: bool = False

    @staticmethod
    def of(scenario: Scenario, rank: int) -> Schedule:
        """The schedule of the `extended` policy."""
        attention = scenario.attention
        # A skip that leaves each rank with its own keys only cannot be right: the keys must travel.
        local = attention.skip_sequence_parallel and attention.skip_kv == "full"
        return Schedule(
            Mesh.of(scenario),
            Layout.of(scenario),
            Visibility.of(scenario),
            rank,
            scenario.tensors.heads,
            scenario.kv_heads,
            local,
        )

    @property
    def ring(self) -> int:
        """Ring index of this rank."""
        return self.mesh.at(self.rank)[0]

    @property
    def ulysses(self) -> int:
        """Ulysses index of this rank."""
        return self.mesh.at(self.rank)[1]

    @property
    def group(self) -> int:
        """Query heads that share a KV head."""
        return self.heads // self.kv_heads

    @cached_property
    def query_heads(self) -> tuple[range, ...]:
        """Query heads by Ulysses index."""
        if self.local:
            return (range(self.heads),) * self.mesh.ulysses
        return head_split(self.heads, self.mesh.ulysses)

    @cached_property
    def key_heads(self) -> tuple[range, ...]:
        """KV heads by Ulysses index: exactly those that its query heads read."""
        return tuple(kv_heads_of(heads, self.group) for heads in self.query_heads)

    def shard_rows(self, ring: int) -> tuple[int, ...]:
        """Sharded rows of each rank of a Ulysses group."""
        shards = self.layout.shards[ring * self.mesh.ulysses : (ring + 1) * self.mesh.ulysses]
        return tuple(count(rows) for rows in shards)

    @property
    def own_queries(self) -> Rows:
        """Rows of this rank's Q and output."""
        return self.layout.queries(self.mesh.position(self.rank))

    @property
    def own_keys(self) -> Rows:
        """Rows of this rank's K and V."""
        if self.local:
            return (range(self.layout.order.size),)
        return self.layout.keys(self.mesh.position(self.rank))

    def queries(self, ring: int) -> Rows:
        """Query rows attended at a ring position: [prefix | its U shards | suffix]."""
        if self.local:
            return self.own_queries
        order = self.layout.order
        prefix, suffix = range(order.kv_prefix, order.start), range(order.stop, order.size)
        runs = (prefix, *self.layout.gathered(ring), suffix)
        return tuple(run for run in runs if len(run))

    def replicated_keys(self) -> Rows:
        """Keys that every rank holds and nobody sends."""
        return self.layout.order.replicated_keys

    @cached_property
    def busy(self) -> tuple[tuple[bool, ...], ...]:
        """busy[distance][ring]: does this ring position have work at this hop distance?"""
        ring = self.mesh.ring
        if self.local:
            return ((True,) * ring,)
        return tuple(
            tuple(self._busy(here, (here - distance) % ring, distance) for here in range(ring))
            for distance in range(ring)
        )

    def _busy(self, here: int, source: int, distance: int) -> bool:
        keys = self.layout.gathered(source)
        if distance == 0:
            keys += self.replicated_keys()
        return self.visibility.block(self.queries(here), keys).pairs > 0

    @cached_property
    def active(self) -> tuple[int, ...]:
        """Hop distances at which anybody has work, ascending."""
        return tuple(distance for distance, row in enumerate(self.busy) if any(row))

    @cached_property
    def hops(self) -> tuple[Hop, ...]:
        """The hops in order. Distance 0 is there whenever something must be sent from it."""
        distances = self.active if self.active[:1] == (0,) else (0, *self.active)
        if not self.active:
            return ()
        step = 1 + (self.mesh.ulysses > 1 and not self.local)
        hops: list[Hop] = []
        worked = [False] * self.mesh.ring
        for n, distance in enumerate(distances):
            following = distances[n + 1] if n + 1 < len(distances) else None
            busy = self.busy[distance]
            merges = any(b and w for b, w in zip(busy, worked, strict=True))
            hops.append(
                Hop(
                    distance=distance,
                    shift=None if following is None else following - distance,
                    step=step,
                    busy=busy[self.ring],
                    merges=busy[self.ring] and worked[self.ring],
                )
            )
            step += 2 if merges else 1
            worked = [b or w for b, w in zip(busy, worked, strict=True)]
        return tuple(hops)

    @cached_property
    def output_step(self) -> int:
        """Step of the output all-to-all, or of the end where there is none."""
        first = 1 + (self.mesh.ulysses > 1 and not self.local)
        if not self.hops:
            return first
        return self.hops[-1].step + 1 + self._anyone_merges_last

    @property
    def _anyone_merges_last(self) -> bool:
        last = self.busy[self.hops[-1].distance]
        before = [self.busy[hop.distance] for hop in self.hops[:-1]]
        return any(busy and any(row[r] for row in before) for r, busy in enumerate(last))


@dataclass(frozen=True, slots=True)
class Hop:
    """One hop of the ring, as one rank sees it.

    Attributes:
        distance: KV attended here started this many ring positions back.
        shift: Ring positions the KV moves for the next hop; None after the last one.
        step: Step number of the attend; a merge takes the next.
        busy: This rank has work here.
        merges: This rank has work here and had some before.
    """

    distance: int
    shift: int | None
    step: int
    busy: bool
    merges: bool
