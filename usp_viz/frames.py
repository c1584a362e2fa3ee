"""A frame for any step: what each rank holds, what moved, how far the pairs are, and why.

Frames are worked out from a trace alone, predicted or recorded, so a picture never knows more than
the events say. A frame shows the ranks at the end of its step; KV that arrives during a step is
shown apart, and is what the rank attends in the next hop.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import overload

from usp_viz.layout import Rows, Spans, spans
from usp_viz.spans import union
from usp_viz.trace import Event, Trace

Heads = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Held:
    """A rectangle of rows x heads that a rank holds."""

    rows: Spans
    heads: Heads


@dataclass(frozen=True, slots=True)
class RankState:
    """What one rank holds, by lane; None is nothing.

    Attributes:
        q: Queries.
        kv: Keys and values to attend, of KV heads.
        arriving: Keys and values for the next hop.
        partial: Rows with a partial output (a running softmax over the keys met so far).
        pairs: (query, key) pairs that went into it.
        output: Finished output.
        raised: The rank has raised.
    """

    q: Held | None = None
    kv: Held | None = None
    arriving: Held | None = None
    partial: Held | None = None
    pairs: int = 0
    output: Held | None = None
    raised: bool = False


@dataclass(frozen=True, slots=True)
class Frame:
    """One step.

    Attributes:
        step: Which.
        stage: Its stage.
        ranks: State of each rank at the end of the step.
        events: What happened in it.
        pairs: Pairs computed by all ranks, up to and including this step.
        narration: What happens and why, in one sentence.
    """

    step: int
    stage: str
    ranks: tuple[RankState, ...]
    events: tuple[Event, ...]
    pairs: int
    narration: str

    @property
    def moves(self) -> tuple[Event, ...]:
        """Events that cross from one rank to another."""
        return tuple(event for event in self.events if event.src != event.dst)

    @property
    def works(self) -> tuple[Event, ...]:
        """Events that compute."""
        return tuple(event for event in self.events if event.op in ("attend", "merge"))


def replay(trace: Trace) -> Frames:
    """The frames of a trace."""
    return Frames(trace)


@dataclass(frozen=True, eq=False)
class Frames(Sequence[Frame]):
    """One frame a step. States are kept, so that going back and forth costs nothing again."""

    trace: Trace
    _states: list[_State] = field(default_factory=lambda: list[_State](), repr=False)
    _together: _Union = field(default_factory=lambda: _Union(), repr=False)

    def __len__(self) -> int:
        return self.trace.steps

    @overload
    def __getitem__(self, index: int) -> Frame: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Frame, ...]: ...
    def __getitem__(self, index: int | slice) -> Frame | tuple[Frame, ...]:
        """The frame of one step, counted from the end if negative."""
        if isinstance(index, slice):
            return tuple(self[number] for number in range(*index.indices(len(self))))
        number = index + len(self) if index < 0 else index
        events = self.trace.step(number)
        while len(self._states) < number:
            self._advance(self.trace.step(len(self._states)))
        if len(self._states) == number:
            self._advance(events)
        state = self._states[number]
        return Frame(
            number, state.stage, state.ranks, events, state.pairs, self._narrate(number, events)
        )

    def __iter__(self) -> Iterator[Frame]:
        return (self[number] for number in range(len(self)))

    @property
    def pairs(self) -> int:
        """Pairs computed in the whole trace."""
        return self[-1].pairs if len(self) else 0

    def _advance(self, events: tuple[Event, ...]) -> None:
        number = len(self._states)
        ranks = tuple(RankState() for _ in range(self.trace.ranks))
        before = self._states[-1] if self._states else _State("", ranks, False, 0)
        state = before.after(self.trace, self.trace.stages[number], events, self._together)
        self._states.append(state)

    def _narrate(self, number: int, events: Sequence[Event]) -> str:
        stages = self.trace.stages
        stage = stages[number]
        later = (s for s in stages[number + 1 :] if s.startswith("hop ") and s != stage)
        return narrate(stage, events, self.trace.ranks, next(later, None))


@dataclass(frozen=True, slots=True)
class _State:
    """All ranks at the end of a step.

    Attributes:
        stage: The step's stage.
        ranks: What each rank holds.
        rotating: KV is on its way to the next hop.
        pairs: Computed so far, by all.
    """

    stage: str
    ranks: tuple[RankState, ...]
    rotating: bool
    pairs: int

    def after(self, trace: Trace, stage: str, events: Sequence[Event], together: _Union) -> _State:
        ranks = list(self.ranks)
        rotating = self.rotating
        if stage != self.stage and rotating:
            ranks = [RankState(r.q, r.arriving, None, r.partial, r.pairs) for r in ranks]
            rotating = False
        swaps = [event for event in events if event.op == "all_to_all"]
        if swaps:
            _swap(ranks, trace, swaps, together)
        if any(event.op == "output" for event in events):
            ranks = [RankState(pairs=rank.pairs) for rank in ranks]
        for event in events:
            held = Held(event.rows, event.heads)
            rank = ranks[event.dst]
            if event.op == "place":
                ranks[event.dst] = (
                    replace(rank, q=held) if event.tensor == "Q" else replace(rank, kv=held)
                )
            elif event.op == "send":
                ranks[event.dst] = RankState(rank.q, rank.kv, held, rank.partial, rank.pairs)
                rotating = True
            elif event.op == "attend":
                if rank.partial is not None:
                    held = Held(together(rank.partial.rows, held.rows), held.heads)
                pairs = rank.pairs + event.pairs
                ranks[event.dst] = RankState(rank.q, rank.kv, rank.arriving, held, pairs)
            elif event.op == "output":
                ranks[event.dst] = replace(rank, output=held)
            elif event.op == "raise":
                ranks[event.dst] = replace(rank, raised=True)
        pairs = self.pairs + sum(event.pairs for event in events)
        return _State(stage, tuple(ranks), rotating, pairs)


def _swap(ranks: list[RankState], trace: Trace, events: Sequence[Event], together: _Union) -> None:
    """An all-to-all: what each rank had is gone, and it holds what it was given."""
    order = trace.order
    copies: dict[str, Rows] = {"Q": (), "KV": (), "O": ()}
    if order is not None:
        copies |= {"Q": order.replicated_queries, "KV": order.replicated_keys}
    for tensor, replicated in copies.items():
        copied = spans(replicated)
        given: dict[int, list[Event]] = {}
        for event in events:
            if event.tensor == tensor:
                given.setdefault(event.src, [])
                given.setdefault(event.dst, []).append(event)
        for rank, received in given.items():
            held = None
            if received:
                rows = together(*(event.rows for event in received), copied)
                first = min(event.heads[0] for event in received)
                held = Held(rows, (first, max(event.heads[1] for event in received)))
            state = ranks[rank]
            if tensor == "Q":
                ranks[rank] = replace(state, q=held)
            elif tensor == "KV":
                ranks[rank] = replace(state, kv=held)
            else:
                ranks[rank] = RankState(output=held, pairs=state.pairs)


class _Union:
    """Union of spans, worked out once for the same tuples: ranks and hops share them."""

    def __init__(self) -> None:
        # The parts are kept beside their union, so that an id never comes to mean another tuple.
        self._known: dict[tuple[int, ...], tuple[tuple[Spans, ...], Spans]] = {}

    def __call__(self, *parts: Spans) -> Spans:
        some = {id(part): part for part in parts if part}
        if len(some) <= 1:
            return next(iter(some.values()), ())
        key = tuple(some)
        if key not in self._known:
            largest = max(some.values(), key=len)
            inside = all(map(set(largest).issuperset, some.values()))
            self._known[key] = (tuple(some.values()), largest if inside else union(some.values()))
        return self._known[key][1]


def narrate(stage: str, events: Sequence[Event], ranks: int, next_hop: str | None = None) -> str:
    """What happens in a step and why, in one plain sentence.

    Args:
        stage: The step's stage.
        events: Its events.
        ranks: P.
        next_hop: Stage of the hop after this one, if there is one.
    """
    ops = {event.op for event in events}
    busy = {event.src for event in events if event.op == "attend"}
    if "raise" in ops:
        return "The layer refuses before anything is sent: every rank raises, and nothing moves."
    if "place" in ops:
        return (
            "Each rank starts with the queries, keys and values of its own rows, for all heads."
            if ranks > 1
            else "The one rank starts with the queries, keys and values of all rows."
        )
    if "output" in ops:
        return "Each rank now has the finished output of the rows it started with."
    if stage == "input all-to-all":
        return (
            "Each Ulysses group swaps sequence for heads: a rank gives away its rows of the other "
            "ranks' heads and gets the whole group's rows of its own heads."
        )
    if stage == "output all-to-all":
        return (
            "Each Ulysses group swaps heads back for sequence: a rank returns to the others their "
            "rows of its heads and gets all heads of its own rows."
        )
    if "merge" in ops:
        return (
            "Ranks that had a partial output merge the new one into it, weighted by log-sum-exp, "
            "so that the softmax over all keys met so far is exact."
        )
    travels = ""
    if "send" in ops:
        travels = ", while that KV already travels on" + (f" for {next_hop}" if next_hop else "")
    return _hop_sentence(stage, len(busy), ranks, travels)


def _hop_sentence(stage: str, busy: int, ranks: int, travels: str) -> str:
    distance = stage.removeprefix("hop ")
    back = f"the keys that started {distance} ring position{'s' * (distance != '1')} back"
    if not busy:
        keys = "the keys at hand" if distance == "0" else back
        return f"Nobody may see anything of {keys}{travels}."
    if busy == ranks:
        return f"Each rank attends to {'the keys it holds' if distance == '0' else back}{travels}."
    verb, own = ("attends", "the keys it holds") if busy == 1 else ("attend", "the keys they hold")
    return (
        f"{busy} of {ranks} ranks {verb} to {own if distance == '0' else back}{travels}; "
        f"the other{'s have' if ranks - busy > 1 else ' has'} nothing to see there."
    )
