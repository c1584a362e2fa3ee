"""Ranks on the R x U mesh: who is where, and who talks to whom.

Position p = ring_index · U + ulysses_index is the place in *sequence* order and never changes;
`order` only renumbers the ranks that sit there. Source: USP, arXiv 2405.07719 §3.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from usp_viz.scenario import Scenario


@dataclass(frozen=True, slots=True)
class Mesh:
    """U x R ranks. `ulysses` and `ring` are degrees; coordinates are (ring, ulysses)."""

    ulysses: int
    ring: int
    order: Literal["ulysses-inner", "ring-inner"] = "ulysses-inner"

    @staticmethod
    def of(scenario: Scenario) -> Mesh:
        """The mesh that a scenario asks for; sglang numbers its ranks by position, always."""
        order = scenario.mesh.order if scenario.policy == "extended" else "ulysses-inner"
        return Mesh(scenario.mesh.ulysses, scenario.mesh.ring, order)

    @property
    def ranks(self) -> int:
        """P = U·R."""
        return self.ulysses * self.ring

    def rank(self, ring: int, ulysses: int) -> int:
        """The rank at (ring, ulysses)."""
        if self.order == "ulysses-inner":
            return ring * self.ulysses + ulysses
        return ulysses * self.ring + ring

    def at(self, rank: int) -> tuple[int, int]:
        """(ring, ulysses) of a rank."""
        if self.order == "ulysses-inner":
            return divmod(rank, self.ulysses)
        ulysses, ring = divmod(rank, self.ring)
        return ring, ulysses

    def position(self, rank: int) -> int:
        """Place in sequence order, whatever the rank order."""
        ring, ulysses = self.at(rank)
        return ring * self.ulysses + ulysses

    def ulysses_group(self, ring: int) -> tuple[int, ...]:
        """The U ranks that swap heads for sequence, by Ulysses index."""
        return tuple(self.rank(ring, u) for u in range(self.ulysses))

    def ring_group(self, ulysses: int) -> tuple[int, ...]:
        """The R ranks that pass KV around, by ring index."""
        return tuple(self.rank(r, ulysses) for r in range(self.ring))

    def groups(self) -> tuple[tuple[int, ...], ...]:
        """Every process group, Ulysses groups first."""
        return tuple(self.ulysses_group(r) for r in range(self.ring)) + tuple(
            self.ring_group(u) for u in range(self.ulysses)
        )


def head_split(heads: int, parts: int) -> tuple[range, ...]:
    """Query heads of each Ulysses index: contiguous, as even as possible, larger parts first."""
    size, extra = divmod(heads, parts)
    starts = [u * size + min(u, extra) for u in range(parts + 1)]
    return tuple(range(a, b) for a, b in pairwise(starts))


def kv_heads_of(query_heads: range, group: int) -> range:
    """The KV heads that these query heads read, with `group` = H / G query heads to each."""
    if not query_heads:
        return range(0, 0)
    return range(query_heads.start // group, -(-query_heads.stop // group))


def topology(mesh: Mesh, sent: Sequence[tuple[int, int, int]] = ()) -> Any:
    """Groups and links as a `networkx.DiGraph`.

    Nodes are ranks with ``ring`` and ``ulysses``; edges carry ``kind`` (``ulysses``: both ways in
    a Ulysses group; ``ring``: to the next ring position) and ``bytes`` added up from `sent`, which
    lists (src, dst, bytes).
    """
    import networkx

    digraph: Any = networkx.DiGraph  # its stubs leave the types of nodes open
    graph = digraph()
    for rank in range(mesh.ranks):
        ring, ulysses = mesh.at(rank)
        graph.add_node(rank, ring=ring, ulysses=ulysses)
    for ring in range(mesh.ring):
        group = mesh.ulysses_group(ring)
        graph.add_edges_from(
            ((a, b) for a in group for b in group if a != b), kind="ulysses", bytes=0
        )
    if mesh.ring > 1:
        for ulysses in range(mesh.ulysses):
            group = mesh.ring_group(ulysses)
            following = (*group[1:], group[0])
            graph.add_edges_from(zip(group, following, strict=True), kind="ring", bytes=0)
    for src, dst, count in sent:
        if not graph.has_edge(src, dst):  # a shift over skipped hops
            graph.add_edge(src, dst, kind="ring", bytes=0)
        graph.edges[src, dst]["bytes"] += count
    return graph
