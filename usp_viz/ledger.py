"""The pair ledger: every allowed (query, key) pair is computed exactly once, forbidden ones never.

The recorder says what each rank computed, as rectangles of row ids (`Piece`); the ledger counts
them against `Visibility.allowed`, the definition, element by element. A pair is (scored query row,
key row) for one batch row and one query head. A replicated query counts once per ring position
(its U ranks compute it together, by heads), or once per rank where ranks do not talk.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import NDArray

from usp_viz.behaviour import behaviour
from usp_viz.layout import Ids, Layout, ids
from usp_viz.mask import Visibility
from usp_viz.mesh import Mesh

if TYPE_CHECKING:
    from usp_viz.scenario import Scenario
    from usp_viz.trace import Trace

Bools = NDArray[np.bool_]
PieceMask = tuple[Literal["causal"], int] | Bools | None
MAX_TOKENS = 16_384
"""Beyond this many rows the S x S count takes minutes, and `audit` does not try."""
_BLOCK = 2**20
"""Pairs looked at together: keeps memory at a few MiB."""


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """One local attention call: which queries saw which keys.

    Attributes:
        batch_rows: The batch rows it ran for.
        queries: Row ids, int64 [Lq], as the tensor held them; ids outside the order are ignored.
        keys: Row ids, int64 [Lk]; ids outside the order count as forbidden.
        heads: Query heads [a, b).
        kv_heads: The KV head that each of these query heads really read; b - a numbers.
        mask: None (all Lq x Lk pairs); ``("causal", offset)``, where the query at index i saw the
            keys at indices j <= i + offset; or bool [Lq, Lk].
    """

    batch_rows: tuple[int, ...]
    queries: Ids
    keys: Ids
    heads: tuple[int, int]
    kv_heads: tuple[int, ...]
    mask: PieceMask = None


@dataclass(frozen=True, slots=True)
class Pairs:
    """Counts of distinct pairs. ``allowed == computed_once + missing + repeated``, always.

    Attributes:
        allowed: What the scenario means to be computed.
        computed_once: Allowed and computed once, through the right KV head.
        missing: Allowed and not computed.
        repeated: Allowed and computed more than once.
        forbidden: Computed and not allowed, or read through the wrong KV head.
    """

    allowed: int
    computed_once: int
    missing: int
    repeated: int
    forbidden: int

    @property
    def exact(self) -> bool:
        """Every allowed pair once, no other."""
        return self.computed_once == self.allowed and not self.forbidden

    def to_json(self) -> dict[str, int]:
        """The `pairs` object of a result."""
        return asdict(self)


def audit(
    scenario: Scenario,
    pieces: Sequence[Sequence[Piece]],
    groups: Sequence[int] | None = None,
    limit: int = MAX_TOKENS,
) -> Pairs | None:
    """Count what the ranks computed against what the scenario allows.

    Args:
        scenario: What was asked for.
        pieces: What each rank computed.
        groups: For each rank, which copy of the replicated queries it works on. By default, the
            copy of the ranks that attend it together: a Ulysses group, all ranks (the release's
            UlyssesAttention), or the rank alone where nobody communicates.
        limit: Give up above this many rows.

    Returns:
        The counts; None above `limit`.

    Time is about (distinct programs of heads and batch rows) x W² element operations.
    """
    order = Layout.of(scenario).order
    if order.size > limit:
        return None
    visibility = Visibility.of(scenario)
    slots = _Slots.of(visibility, groups or _default_groups(scenario))
    rectangles = [
        rectangle
        for rank, computed in enumerate(pieces)
        for piece in computed
        for rectangle in slots.rectangles(rank, piece)
    ]
    programs = _programs(scenario, visibility, rectangles)
    totals = np.zeros(5, np.int64)
    step = max(1, _BLOCK // (order.size + 1))
    for start in range(0, len(slots.query), step):
        block = slice(start, min(start + step, len(slots.query)))
        totals += _count_block(visibility, slots, rectangles, programs, block)
    return Pairs(*totals.tolist())


def _default_groups(scenario: Scenario) -> tuple[int, ...]:
    """Ranks that attend a replicated query together, by heads, share a group."""
    mesh, ranks = Mesh.of(scenario), range(scenario.mesh.ranks)
    if scenario.policy != "extended":
        exchange = behaviour(scenario, scenario.policy).exchange
        size = {"none": 1, "ulysses": mesh.ulysses, "world": mesh.ranks}[exchange]
        return tuple(rank // size for rank in ranks)
    attention = scenario.attention
    if attention.skip_sequence_parallel and attention.skip_kv == "full":
        return tuple(ranks)
    return tuple(mesh.at(rank)[0] for rank in ranks)


def progress(trace: Trace) -> tuple[tuple[int, ...], ...]:
    """Pairs computed, [steps][ranks], according to a trace."""
    table: list[tuple[int, ...]] = []
    for number in range(trace.steps):
        row = [0] * trace.ranks
        for event in trace.step(number):
            row[event.src] += event.pairs
        table.append(tuple(row))
    return tuple(table)


# -- rectangles over query slots ---------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class _Rectangle:
    """A piece over distinct slots in ascending order and distinct keys."""

    piece: Piece
    slots: Ids
    keys: Ids
    query_index: Ids
    key_index: Ids

    def hits(self, part: slice) -> tuple[Ids, Bools | Literal[True]]:
        """(slots, which of their keys were seen) of the rectangle's rows in `part`."""
        mask = self.piece.mask
        rows = self.query_index[part]
        if mask is None:
            return self.slots[part], True
        if isinstance(mask, tuple):
            return self.slots[part], self.key_index[None, :] <= rows[:, None] + mask[1]
        return self.slots[part], mask[rows][:, self.key_index]


@dataclass(frozen=True, slots=True, eq=False)
class _Slots:
    """Rows of the count: each sharded query once, each replicated query once per group.

    Attributes:
        query: The row id of each slot, int64.
        group: For each rank, its group, counted from 0.
        lookup: int64 [groups, W]: the slot of a row id; -1 for rows that are nobody's query.
    """

    query: Ids
    group: tuple[int, ...]
    lookup: Ids

    @staticmethod
    def of(visibility: Visibility, groups: Sequence[int]) -> _Slots:
        order = visibility.order
        names = {name: n for n, name in enumerate(sorted(set(groups)))}
        replicated = ids(order.replicated_queries)
        sharded = np.arange(order.start, order.stop, dtype=np.int64)
        query = np.concatenate([sharded, *[replicated for _ in names]])
        lookup = np.full((len(names), order.size), -1, np.int64)
        lookup[:, sharded] = np.arange(order.total)
        for n in range(len(names)):
            first = order.total + n * len(replicated)
            lookup[n, replicated] = np.arange(first, first + len(replicated))
        return _Slots(query, tuple(names[name] for name in groups), lookup)

    def rectangles(self, rank: int, piece: Piece) -> Iterator[_Rectangle]:
        """Split a piece where it holds a row twice; leave out what is nobody's query."""
        lookup = self.lookup[self.group[rank]]
        size = len(lookup)
        known = np.flatnonzero((piece.queries >= 0) & (piece.queries < size))
        slots = lookup[piece.queries[known]]
        known, slots = known[slots >= 0], slots[slots >= 0]
        strange = (piece.keys < 0) | (piece.keys >= size)
        keys = np.where(strange, size, piece.keys)  # one more column, which nobody may see
        key_index = np.arange(len(keys), dtype=np.int64)
        for q in _distinct(slots):
            for k in _distinct(keys):
                yield _Rectangle(piece, slots[q], keys[k], known[q], key_index[k])


def _distinct(values: Ids) -> Iterator[Ids]:
    """Indices of the values, ascending by value, in as few sets without repeats as it takes."""
    order = np.argsort(values, kind="stable").astype(np.int64)
    if not order.size:
        return
    ascending = values[order]
    first = np.concatenate(([True], ascending[1:] != ascending[:-1]))
    nth = np.arange(len(order)) - np.maximum.accumulate(np.where(first, np.arange(len(order)), 0))
    for n in range(int(nth.max()) + 1):
        yield order[nth == n]


# -- counting ----------------------------------------------------------------------------------

_Program = tuple[tuple[int, bool], ...]
"""Which rectangles some heads and batch rows went through, and whether by the right KV head."""


def _programs(
    scenario: Scenario, visibility: Visibility, rectangles: Sequence[_Rectangle]
) -> dict[int, Counter[_Program]]:
    """For each padding pattern (by its first batch row), its programs and how often each ran."""
    group = scenario.tensors.heads // scenario.kv_heads
    pattern_of: dict[tuple[tuple[int, int], ...], int] = {}
    by_rows: Counter[tuple[int, tuple[int, ...]]] = Counter()
    for row in range(visibility.batch):
        pattern = pattern_of.setdefault(visibility.valid_spans(row), row)
        ran = tuple(n for n, r in enumerate(rectangles) if row in r.piece.batch_rows)
        by_rows[pattern, ran] += 1
    same = _same(rectangles)
    programs: dict[int, Counter[_Program]] = {}
    for (pattern, ran), times in by_rows.items():
        counter = programs.setdefault(pattern, Counter())
        for head in range(scenario.tensors.heads):
            program: list[tuple[int, bool]] = []
            for n in ran:
                piece = rectangles[n].piece
                if piece.heads[0] <= head < piece.heads[1]:
                    read = piece.kv_heads[head - piece.heads[0]]
                    program.append((same[n], read == head // group))
            counter[tuple(sorted(program))] += times
    return programs


def _same(rectangles: Sequence[_Rectangle]) -> list[int]:
    """For each rectangle the first that covers the same pairs: ranks that split heads share one."""
    first: dict[tuple[bytes, ...], int] = {}
    result: list[int] = []
    for n, r in enumerate(rectangles):
        mask = r.piece.mask
        parts = [r.slots, r.keys]
        if mask is not None:
            parts += [r.query_index, r.key_index]
        key = tuple(_digest(part) for part in parts)
        what = _digest(mask) if isinstance(mask, np.ndarray) else repr(mask).encode()
        result.append(first.setdefault((what, *key), n))
    return result


def _digest(array: NDArray[np.generic]) -> bytes:
    return hashlib.blake2b(np.ascontiguousarray(array).data).digest()


def _count_block(
    visibility: Visibility,
    slots: _Slots,
    rectangles: Sequence[_Rectangle],
    programs: dict[int, Counter[_Program]],
    block: slice,
) -> Ids:
    """The five counts for one block of slots, int64 [5]."""
    queries = slots.query[block]
    size = visibility.order.size
    totals = np.zeros(5, np.int64)
    for pattern, counter in programs.items():
        scored = visibility.is_valid(queries, pattern)
        allowed = np.zeros((len(queries), size + 1), np.bool_)
        allowed[:, :size] = visibility.allowed(queries, np.arange(size), pattern)
        allowed &= scored[:, None]
        wanted = int(allowed.sum())
        for program, times in counter.items():
            right = [rectangles[n] for n, good in program if good]
            wrong = [rectangles[n] for n, good in program if not good]
            computed = _computed(right, block, allowed.shape)
            computed[~scored] = 0
            once = int((allowed & (computed == 1)).sum())
            missing = int((allowed & (computed == 0)).sum())
            forbidden = int((~allowed & (computed > 0)).sum())
            if wrong:
                forbidden += int((_computed(wrong, block, allowed.shape)[scored] > 0).sum())
            counts = (wanted, once, missing, wanted - once - missing, forbidden)
            totals += times * np.array(counts, np.int64)
    return totals


def _computed(
    rectangles: Sequence[_Rectangle], block: slice, shape: tuple[int, int]
) -> NDArray[np.unsignedinteger]:
    """How often each pair of the block was computed."""
    computed = np.zeros(shape, np.min_scalar_type(len(rectangles)))
    for rectangle in rectangles:
        a, b = np.searchsorted(rectangle.slots, (block.start, block.stop)).tolist()
        if a < b:
            rows, hits = rectangle.hits(slice(a, b))
            computed[_grid(rows - block.start, rectangle.keys)] += hits
    return computed


def _grid(rows: Ids, columns: Ids) -> tuple[slice | Ids, slice | Ids]:
    """Index of a rectangle; slices where that is possible, which is many times faster."""
    r, c = _progression(rows), _progression(columns)
    if isinstance(r, slice) or isinstance(c, slice):
        return r, c
    return r[:, None], c


def _progression(values: Ids) -> slice | Ids:
    step = int(values[1] - values[0]) if len(values) > 1 else 1
    if bool((np.diff(values) == step).all()):
        return slice(int(values[0]), int(values[-1]) + 1, step)
    return values
