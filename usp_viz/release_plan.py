"""The programs of the policies `sglang` and `unguarded`: what a release refuses, or computes.

A call that ends in a raise places its tensors and raises. Any other is planned from its
`Behaviour`, in ranges of places in the gathered tensors: what a kernel call attends is an interval
of key places for every query place, less keys that a mask hides. Rows that a release holds twice
are counted twice. sglang's rank numbers are positions, whatever the scenario's `order`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from usp_viz.behaviour import Behaviour, Part, of_call
from usp_viz.calls import Call
from usp_viz.layout import Ids, Layout, Rows, Spans, count, ids, spans_of
from usp_viz.mask import Block, BlockKind, Visibility
from usp_viz.mesh import Mesh
from usp_viz.plan import Maker, Plan, Tensors
from usp_viz.rules import Refusal, ending
from usp_viz.scenario import Scenario
from usp_viz.spans import union
from usp_viz.trace import Event


def release_plan(scenario: Scenario) -> Plan:
    """The program that the scenario's release runs, or what is left of it before it raises."""
    policy = scenario.policy
    mesh = Mesh(scenario.mesh.ulysses, scenario.mesh.ring)
    attention = scenario.attention
    all_keys = attention.skip_sequence_parallel and attention.skip_kv == "full"
    layout, visibility, tensors = Layout.of(scenario), Visibility.of(scenario), Tensors.of(scenario)
    end = ending(scenario, policy=policy)
    if end is not None:
        raising = tuple(n for n, message in enumerate(end.messages) if message is not None)
        stage = "guard" if isinstance(end, Refusal) else "crash"
        return _Raising(
            mesh, layout, visibility, tensors, all_keys=all_keys, raising=(stage, raising)
        )
    call = Call(scenario, scenario.release, policy == "unguarded")
    how = of_call(call)
    if how.exchange == "world":
        mesh, layout = Mesh(mesh.ranks, 1), replace(layout, ulysses=mesh.ranks)
    local = how.exchange == "none"
    return _Releasing(mesh, layout, visibility, tensors, local, all_keys, how=how, call=call)


@dataclass(frozen=True, eq=False, kw_only=True)
class _Raising(Plan):
    """Placement, and a raise on some or all ranks.

    Attributes:
        raising: The stage, and the ranks that raise in it.
    """

    raising: tuple[str, tuple[int, ...]]

    def _steps(self) -> Iterator[tuple[str, Maker]]:
        yield "shard", self._place
        yield self.raising[0], self._raise

    def _raise(self, step: int, stage: str) -> Iterator[Event]:
        for rank in self.raising[1]:
            yield Event(step, stage, "raise", rank, rank, "error", (), (0, 0), 0)


@dataclass(frozen=True, slots=True)
class _Kernel:
    """One kernel call: keys in their order, and how many of them come before the padding."""

    keys: Rows
    real: int


@dataclass(frozen=True, eq=False, kw_only=True)
class _Releasing(Plan):
    """What a release computes.

    Attributes:
        how: Its behaviour.
        call: The call's arguments.
    """

    how: Behaviour
    call: Call

    # -- who holds what ---------------------------------------------------------------------------

    @property
    def swapped_queries(self) -> tuple[Rows, ...]:
        """Rows of Q that the all-to-all moves; replicated ones, too, if taken for the shard's."""
        return self.own_queries if self.how.copies == "sharded" else self.layout.shards

    @property
    def swapped_keys(self) -> tuple[Rows, ...]:
        """The same for K and V."""
        return self.own_keys if self.how.copies == "sharded" else self.layout.shards

    @cached_property
    def queries(self) -> tuple[Rows, ...]:
        """Query rows of each place, as the release's tensors hold them."""
        parts: tuple[Part, ...] = tuple(p for p in self.how.parts if p != "kv_prefix")
        return tuple(self._arranged(place, parts) for place in self._places[::-1])

    @cached_property
    def travelling(self) -> tuple[Rows, ...]:
        """KV rows that each ring position brings to its ring."""
        parts: tuple[Part, ...] = self.how.parts if self.how.copies == "sharded" else ("rows",)
        return tuple(self._arranged(place, parts) for place in self._places[::-1])

    def _arranged(self, place: int, parts: tuple[Part, ...]) -> Rows:
        """These parts at a place: by rank where copies are taken for rows, else each part once."""
        order = self.layout.order
        runs = {
            "kv_prefix": (range(order.kv_prefix),),
            "prefix": (range(order.kv_prefix, order.start),),
            "suffix": (range(order.stop, order.size),),
        }
        size = 1 if self.local else self.mesh.ulysses
        positions = range(place * size, (place + 1) * size)
        groups = [[p] for p in positions] if self.how.copies == "sharded" else [list(positions)]
        found: list[range] = []
        for group in groups:
            for part in parts:
                if part == "rows":
                    found += [run for position in group for run in self.layout.shards[position]]
                else:
                    found += runs[part]
        return tuple(run for run in found if len(run))

    # -- who attends what, when -------------------------------------------------------------------

    @cached_property
    def hops(self) -> tuple[int, ...]:
        """KV travels one position a hop, whether or not anybody attends it."""
        return tuple(range(1 if self.how.ring == "none" else self.mesh.ring))

    def _kernels(self, place: int, distance: int) -> Iterator[_Kernel]:
        if self.local and self.all_keys:
            yield _whole(self.own_keys[place])
            return
        if self.how.ring == "none":
            yield _whole(self._arranged(place, self.how.parts))
            return
        if distance == 0 and self.how.copies == "apart":
            names: tuple[Part, ...] = tuple(part for part in self.how.parts if part != "rows")
            copies = self._arranged(place, names)
            if copies:
                yield _whole(copies)
        source = (place - distance) % self.mesh.ring
        keys = self.travelling[source]
        if self.how.ring == "earlier" and distance > place:
            return
        real = count(keys)
        if self.how.ring == "real" and self.how.span is not None:
            real = min(real, max(0, self.how.span[0] - source * real))
        yield _Kernel(keys, real)

    def _block(self, place: int, distance: int) -> Block:
        pairs = 0
        queries: list[Spans] = []
        keys: list[Spans] = []
        for kernel in self._kernels(place, distance):
            if self.how.mask == "pairs":
                found = self._unordered.block(self.queries[place], kernel.keys, self._spans)
                pairs += found.pairs
                queries.append(found.queries)
                keys.append(found.keys)
                continue
            for row, times in self.visibility.patterns:
                number, some_queries, some_keys = self._attended(place, kernel, row)
                pairs += times * number
                queries.append(some_queries)
                keys.append(some_keys)
        kind = BlockKind.PARTIAL if pairs else BlockKind.EMPTY
        return Block(kind, pairs, union(dict.fromkeys(queries)), union(dict.fromkeys(keys)))

    @cached_property
    def _unordered(self) -> Visibility:
        """The scenario's masks and documents, without its causal flag."""
        return replace(self.visibility, causal=False)

    def _attended(self, place: int, kernel: _Kernel, row: int) -> tuple[int, Spans, Spans]:
        """(pairs of scored queries, these queries, keys that they see), for one batch row."""
        queries = ids(self.queries[place])
        key_ids = ids(kernel.keys)
        index = np.flatnonzero(self.visibility.is_valid(queries, row))
        lo, hi = self._interval(place, index, len(queries), len(key_ids))
        hi = np.minimum(hi, kernel.real)
        visible = np.ones(len(key_ids), np.bool_)
        if self.how.mask == "keys":
            visible = self.visibility.is_valid(key_ids, row)
        elif self.how.mask == "span" and self.how.span is not None:
            visible[slice(*self.how.span)] = False
        below = np.concatenate(([0], np.cumsum(visible)))
        hi = np.maximum(lo, hi)
        seen = below[hi] - below[lo]
        depth = np.bincount(lo, minlength=len(visible) + 1)
        depth -= np.bincount(hi, minlength=len(visible) + 1)
        covered = visible & (np.cumsum(depth)[:-1] > 0)
        return (
            int(seen.sum()),
            self._some(self.queries[place], queries, index[seen > 0]),
            self._some(kernel.keys, key_ids, np.flatnonzero(covered)),
        )

    def _interval(self, place: int, index: Ids, queries: int, keys: int) -> tuple[Ids, Ids]:
        """Key places [lo, hi) that the query places in `index` may see, masks aside."""
        lo, hi = np.zeros_like(index), np.full_like(index, keys)
        if self.how.causal != "off":
            shift = keys - queries if self.how.causal == "last" else 0
            hi = np.minimum(np.maximum(index + 1 + shift, 0), keys)
        if self.how.documents:
            borders = np.concatenate(([0], np.cumsum(self.call.seq_lens(place))))
            document = np.searchsorted(borders, index, side="right")
            inside = document < len(borders)
            document = np.minimum(document, len(borders) - 1)
            lo = np.minimum(np.where(inside, borders[document - 1], borders[-1]), keys)
            hi = np.minimum(hi, np.where(inside, borders[document], keys))
        return lo, hi

    def _some(self, rows: Rows, row_ids: Ids, index: Ids) -> Spans:
        """Spans of the rows at these places."""
        return self._spans(rows) if len(index) == len(row_ids) else spans_of(row_ids[index])


def _whole(keys: Rows) -> _Kernel:
    return _Kernel(keys, count(keys))
