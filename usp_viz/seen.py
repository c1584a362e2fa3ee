"""Who sees whom under a `Behaviour`: its words turned into row ids and pairs, call by call.

A *place* is where ranks attend the same rows together: a position where nobody communicates, a ring
index where Ulysses groups swap heads, one for all in UlyssesAttention. Rows are whole-order ids in
the order in which sglang's tensors hold them, repeated where it counts them repeatedly.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from usp_viz.behaviour import Behaviour, Part, of_call
from usp_viz.calls import Call
from usp_viz.layout import Ids, Layout, ids
from usp_viz.mask import Bools, Visibility, visibility
from usp_viz.scenario import ValueList


@dataclass(frozen=True, eq=False)
class KernelCall:
    """One kernel call at a place.

    Attributes:
        distance: Hop distance of its keys.
        keys: Row ids, int64 [Lk].
        first: Place of the first key in the gathered tensor.
        real: Keys from this index on are padding to the ring; Lk where there is none.
        sharded: Whether these keys travel the ring.
    """

    distance: int
    keys: Ids
    first: int = 0
    real: int = 2**40
    sharded: bool = True


@dataclass(frozen=True, eq=False)
class Seen:
    """What a call attends."""

    call: Call
    how: Behaviour

    @staticmethod
    def of(call: Call) -> Seen:
        """What a call that returns attends."""
        return Seen(call, of_call(call))

    @cached_property
    def layout(self) -> Layout:
        """Who holds what."""
        return Layout.of(self.call.scenario)

    @cached_property
    def masks(self) -> Visibility:
        """The scenario's masks and documents, without its causal flag."""
        return visibility(self.layout.order, self.call.scenario.set({"attention.causal": False}))

    @property
    def places(self) -> range:
        """All places."""
        count = {"none": self.call.world, "ulysses": self.call.ring, "world": 1}
        return range(count[self.how.exchange])

    def positions(self, place: int) -> range:
        """The positions that attend together at a place."""
        size = self.call.world // len(self.places)
        return range(place * size, (place + 1) * size)

    def part(self, name: Part, positions: range) -> Ids:
        """Rows of one part of the order, as held at these positions."""
        order = self.layout.order
        bounds = {
            "kv_prefix": (0, order.kv_prefix),
            "prefix": (order.kv_prefix, order.start),
            "suffix": (order.stop, order.size),
        }
        if name != "rows":
            return np.arange(*bounds[name], dtype=np.int64)
        return np.concatenate([ids(self.layout.shards[position]) for position in positions])

    def _arranged(self, positions: range, names: tuple[Part, ...]) -> Ids:
        if self.how.copies == "sharded":
            pieces = [self.part(n, range(p, p + 1)) for p in positions for n in names]
        else:
            pieces = [self.part(name, positions) for name in names]
        return np.concatenate(pieces) if pieces else np.empty(0, np.int64)

    def queries(self, place: int) -> Ids:
        """Query rows at a place, in sglang's order."""
        names: tuple[Part, ...] = tuple(name for name in self.how.parts if name != "kv_prefix")
        return self._arranged(self.positions(place), names)

    def calls(self, place: int) -> Iterator[KernelCall]:
        """The kernel calls at a place, in order of distance."""
        attention = self.call.scenario.attention
        if self.how.exchange == "none" and self.call.skip and attention.skip_kv == "full":
            yield KernelCall(0, np.arange(self.layout.order.size, dtype=np.int64))
        elif self.how.ring == "none":
            yield KernelCall(0, self._arranged(self.positions(place), self.how.parts))
        else:
            yield from self._hops(place)

    def _hops(self, place: int) -> Iterator[KernelCall]:
        ring = self.call.ring
        if self.how.copies == "apart":
            names: tuple[Part, ...] = tuple(name for name in self.how.parts if name != "rows")
            copies = self._arranged(range(0), names)
            if copies.size:
                yield KernelCall(0, copies, sharded=False)
        for distance in range(ring):
            source = (place - distance) % ring
            if self.how.ring == "earlier" and distance > place:
                continue
            whole = self.how.copies == "sharded"
            keys = self._arranged(self.positions(source), self.how.parts if whole else ("rows",))
            first, real = source * len(keys), len(keys)
            if self.how.ring == "real" and self.how.span is not None:
                real = min(max(self.how.span[0] - first, 0), len(keys))
                if not real:
                    continue
            yield KernelCall(distance, keys, first, real)

    def allowed(self, place: int, call: KernelCall, batch_row: int) -> Bools:
        """bool [Lq, Lk]: which pairs a kernel call computes, blind rows aside."""
        queries, keys = self.queries(place), call.keys
        i = np.arange(len(queries), dtype=np.int64)[:, None]
        j = np.arange(len(keys), dtype=np.int64)[None, :]
        result = np.ones((len(queries), len(keys)), np.bool_)
        if self.how.causal != "off":
            shift = len(keys) - len(queries) if self.how.causal == "last" else 0
            result &= j <= i + shift
        if self.how.documents:
            result &= self._same_document(place, len(queries), len(keys))
        if self.how.mask == "keys":
            result &= self.masks.is_valid(keys, batch_row)[None, :]
        elif self.how.mask == "pairs":
            result &= self.masks.allowed(queries, keys, batch_row)
        elif self.how.mask == "span" and self.how.span is not None:
            result &= (j < self.how.span[0]) | (j >= self.how.span[1])
        return result & (j < call.real)

    def _same_document(self, place: int, queries: int, keys: int) -> Bools:
        """A query sees the keys at the places of its own document."""
        lengths = self.call.seq_lens(place)
        document = np.repeat(np.arange(len(lengths)), lengths)
        padded = np.full(max(keys, queries), -1)
        padded[: len(document)] = document
        return padded[:queries, None] == padded[None, :keys]

    def blind(self, place: int, batch_row: int) -> Bools:
        """bool [Lq]: queries that see nothing in the calls that are merged first."""
        result = np.ones(len(self.queries(place)), np.bool_)
        for call in self.calls(place):
            if call.sharded:
                result &= ~self.allowed(place, call, batch_row).any(1)
        return result

    def zeroed(self, place: int) -> Bools:
        """bool [Lq]: queries whose output is set to zero."""
        queries = np.arange(len(self.queries(place)), dtype=np.int64)
        if self.how.ring != "real" or self.how.span is None:
            return np.zeros(len(queries), np.bool_)
        return queries + place * len(queries) >= self.how.span[0]


def agrees(call: Call) -> bool:
    """Whether every scored row sees what the scenario means it to see, alike often."""
    seen, meant = Seen.of(call), Visibility.of(call.scenario)
    return all(
        _place_agrees(seen, meant, place, row) for place in seen.places for row, _ in meant.patterns
    )


def _place_agrees(seen: Seen, meant: Visibility, place: int, row: int) -> bool:
    size = meant.order.size
    queries = seen.queries(place)
    scored = meant.is_valid(queries, row)
    by_key = np.zeros((size, len(queries)), np.int64)
    for call in seen.calls(place):
        np.add.at(by_key, call.keys, np.transpose(seen.allowed(place, call, row)))
    blind = seen.blind(place, row)
    if seen.how.unseen == "nan" and (blind & scored).any():
        return False
    if seen.how.unseen in ("mean", "all"):
        for call in seen.calls(place):
            np.add.at(by_key, call.keys, np.repeat(blind[None, :], len(call.keys), 0))
    counts: Ids = np.transpose(by_key)
    counts[seen.zeroed(place)] = 0
    wanted = meant.allowed(queries, np.arange(size), row).astype(np.int64)
    counts, wanted = counts[scored], wanted[scored]
    alike = (counts == wanted * counts.max(1, initial=0)[:, None]).all(1)
    alike &= (counts > 0).any(1) == (wanted > 0).any(1)
    values = _values(seen.call, size)
    if values is not None:
        flat = _one_value(counts, values)
        alike |= np.isfinite(flat) & (flat == _one_value(wanted, values))
    if seen.how.narrow and seen.call.scenario.tensors.dtype == "float64":
        alike &= (
            False
            if values is None
            else np.isfinite(_one_value(wanted, values)) | (~(wanted > 0).any(1))
        )
    return bool(alike.all())


def _values(call: Call, size: int) -> NDArray[np.float64] | None:
    """What V holds by row, where it is the same in every head and channel."""
    values = call.scenario.tensors.values
    if isinstance(values, ValueList):
        return np.asarray(values.list, np.float64)
    if values == "constant":
        return np.ones(size)
    return np.arange(size, dtype=np.float64) if values == "ramp" else None


def _one_value(counts: NDArray[np.int64], values: NDArray[np.float64]) -> NDArray[np.float64]:
    """The one value that all keys of a row hold; NaN where they differ or there are none."""
    low = np.where(counts > 0, values, np.inf).min(1, initial=np.inf)
    high = np.where(counts > 0, values, -np.inf).max(1, initial=-np.inf)
    return np.where(low == high, low, np.nan)
