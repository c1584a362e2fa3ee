"""What happens on the ranks, step by step: the one language of plan, recorder and pictures.

A trace is predicted (`usp_viz.plan`) or recorded from real ranks (`Trace.recorded`); `diff` says
where the two part. Events are ranges of rows and heads, never tensors, and a predicted trace makes
them only when a step is asked for. Row ids are whole-order ids (`usp_viz.layout`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain, zip_longest
from json.encoder import encode_basestring_ascii as quoted
from typing import Any

from usp_viz.layout import Order, Spans

TRACE_VERSION = 1
OPS = ("place", "all_to_all", "send", "attend", "merge", "output", "raise")
"""Every op, in the order in which a step lists them."""
TENSORS = ("Q", "KV", "O", "error")
"""Every tensor, likewise; KV is K and V together."""
COLLECTIVES = {"all_to_all": ("all_to_all_single",), "send": ("irecv", "isend")}
"""The torch.distributed calls behind an op that communicates."""

_OP_RANK = {op: n for n, op in enumerate(OPS)}
_TENSOR_RANK = {tensor: n for n, tensor in enumerate(TENSORS)}


@dataclass(frozen=True, slots=True)
class Event:
    """One thing that happens to some rows of one tensor, on one rank or between two.

    Attributes:
        step: Counts from 0, the same on all ranks.
        stage: ``shard``, ``input all-to-all``, ``hop 1``, ``output all-to-all``, ``output`` …
        op: One of `OPS`.
        src, dst: Real ranks; equal where nothing travels.
        tensor: One of `TENSORS`.
        rows: Sorted, disjoint, maximal half-open spans.
        heads: [a, b): query heads for Q and O, KV heads for KV.
        bytes: What travels from `src` to `dst`, over all batch rows; 0 where nothing does.
        keys: Attend only: keys seen by at least one of `rows`.
        pairs: Attend only: allowed (query, key) pairs, summed over batch rows and query heads.
    """

    step: int
    stage: str
    op: str
    src: int
    dst: int
    tensor: str
    rows: Spans
    heads: tuple[int, int]
    bytes: int
    keys: Spans = ()
    pairs: int = 0

    def to_json(self) -> dict[str, Any]:
        """As plain data; `keys` and `pairs` only where the op is attend."""
        data: dict[str, Any] = {
            "step": self.step,
            "stage": self.stage,
            "op": self.op,
            "src": self.src,
            "dst": self.dst,
            "tensor": self.tensor,
            "rows": [list(span) for span in self.rows],
            "heads": list(self.heads),
            "bytes": self.bytes,
        }
        if self.op == "attend":
            data |= {"keys": [list(span) for span in self.keys], "pairs": self.pairs}
        return data

    def line(self) -> str:
        """`to_json` as canonical JSON: this key order, no spaces, ASCII."""
        extra = ""
        if self.op == "attend":
            extra = f',"keys":{_spans_text(self.keys)},"pairs":{self.pairs}'
        return (
            f'{{"step":{self.step},"stage":{quoted(self.stage)},"op":{quoted(self.op)},'
            f'"src":{self.src},"dst":{self.dst},"tensor":{quoted(self.tensor)},'
            f'"rows":{_spans_text(self.rows)},"heads":[{self.heads[0]},{self.heads[1]}],'
            f'"bytes":{self.bytes}{extra}}}'
        )

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> Event:
        """The inverse of `to_json`."""
        return Event(
            **{name: data[name] for name in ("step", "stage", "op", "src", "dst", "tensor")},
            rows=_spans_from(data["rows"]),
            heads=(data["heads"][0], data["heads"][1]),
            bytes=data["bytes"],
            keys=_spans_from(data.get("keys", ())),
            pairs=data.get("pairs", 0),
        )


def canonical(event: Event) -> tuple[int, int, int, int]:
    """Sort key of the events of one step."""
    return (
        _OP_RANK.get(event.op, len(OPS)),
        event.src,
        event.dst,
        _TENSOR_RANK.get(event.tensor, len(TENSORS)),
    )


@dataclass(frozen=True, eq=False)
class Trace:
    """All events of one scenario on `ranks` ranks.

    Attributes:
        ranks: P.
        stages: The stage of each step.
        make: Makes the events of one step, in canonical order.
        order: Where the replicated rows lie, when known.
    """

    ranks: int
    stages: tuple[str, ...]
    make: Callable[[int], tuple[Event, ...]] = field(repr=False)
    order: Order | None = None

    @staticmethod
    def recorded(ranks: int, events: Iterable[Event], order: Order | None = None) -> Trace:
        """Put the events of all ranks together: by step, and canonically inside a step."""
        steps: list[list[Event]] = []
        for event in events:
            while len(steps) <= event.step:
                steps.append([])
            steps[event.step].append(event)
        made = tuple(tuple(sorted(step, key=canonical)) for step in steps)
        stages = tuple(step[0].stage if step else "" for step in made)
        return Trace(ranks, stages, made.__getitem__, order)

    @property
    def steps(self) -> int:
        """How many steps there are."""
        return len(self.stages)

    def step(self, number: int) -> tuple[Event, ...]:
        """The events of one step, 0 … `steps` - 1.

        Raises:
            IndexError: There is no such step.
        """
        if not 0 <= number < self.steps:
            raise IndexError(f"step {number}: the trace has steps 0 to {self.steps - 1}")
        return self.make(number)

    def events(self) -> Iterator[Event]:
        """All events, in order."""
        return chain.from_iterable(self.step(number) for number in range(self.steps))

    @cached_property
    def hash(self) -> str:
        """``sha256:…`` over the events' canonical JSON, one a line."""
        return _hash(event.line() for event in self.events())

    def spans(self, most: int) -> int:
        """How many spans of rows its events list; counting stops beyond `most`."""
        found = 0
        for event in self.events():
            found += len(event.rows) + len(event.keys)
            if found > most:
                break
        return found

    @cached_property
    def bytes_sent_per_rank(self) -> tuple[int, ...]:
        """What each rank sends to other ranks, bytes."""
        sent = [0] * self.ranks
        for event in self.events():
            sent[event.src] += event.bytes
        return tuple(sent)

    def bytes_sent(self, rank: int) -> int:
        """What one rank sends to other ranks, bytes."""
        return self.bytes_sent_per_rank[rank]

    @cached_property
    def links(self) -> dict[tuple[int, int], int]:
        """Bytes from rank to rank, for every pair of ranks between which something travels."""
        links: dict[tuple[int, int], int] = {}
        for event in self.events():
            if event.bytes:
                link = (event.src, event.dst)
                links[link] = links.get(link, 0) + event.bytes
        return links

    @cached_property
    def collectives(self) -> tuple[str, ...]:
        """Names of the torch.distributed calls used, sorted."""
        used = {event.op for event in self.events()}
        return tuple(sorted(name for op in used for name in COLLECTIVES.get(op, ())))

    def __eq__(self, other: object) -> bool:
        """The same events on as many ranks."""
        if not isinstance(other, Trace):
            return NotImplemented
        return self.ranks == other.ranks and self.hash == other.hash

    def __hash__(self) -> int:
        return int(self.hash[-15:], 16)

    def to_json(self) -> dict[str, Any]:
        """As plain data: what ``usp-viz simulate --json`` prints."""
        return {
            **self._header(),
            "events": [event.to_json() for event in self.events()],
            "hash": self.hash,
        }

    def json_text(self) -> str:
        """`to_json` as text in one pass over the events, for traces that are long."""
        import json

        lines = [event.line() for event in self.events()]
        header = json.dumps(self._header(), separators=(",", ":"))
        return f'{header[:-1]},"events":[{",".join(lines)}],"hash":"{_hash(lines)}"}}'

    def _header(self) -> dict[str, Any]:
        header: dict[str, Any] = {"trace_version": TRACE_VERSION, "ranks": self.ranks}
        if self.order is not None:
            order = self.order
            header["order"] = {
                "kv_prefix": [0, order.kv_prefix],
                "prefix": [order.kv_prefix, order.start],
                "rows": [order.start, order.stop],
                "suffix": [order.stop, order.size],
            }
        return header | {"stages": list(self.stages)}

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> Trace:
        """The inverse of `to_json`.

        Raises:
            ValueError: Another trace_version, or events that do not have the hash they claim.
        """
        if data.get("trace_version") != TRACE_VERSION:
            raise ValueError(
                f"trace_version: {data.get('trace_version')!r} — this program reads version "
                f"{TRACE_VERSION}; make the trace again with `usp-viz simulate`"
            )
        order = None
        if "order" in data:
            spans = data["order"]
            lengths = [spans[n][1] - spans[n][0] for n in ("kv_prefix", "prefix", "rows", "suffix")]
            order = Order(*lengths)
        trace = Trace.recorded(data["ranks"], map(Event.from_json, data["events"]), order)
        if trace.hash != data.get("hash", trace.hash):
            raise ValueError(
                f"hash: {data['hash']!r} — the events have {trace.hash}; they were changed after "
                "the trace was written, so make it again"
            )
        return trace


@dataclass(frozen=True, slots=True)
class Difference:
    """One place where what was recorded is not what was predicted."""

    step: int
    predicted: Event | None
    recorded: Event | None
    text: str


def diff(predicted: Trace, recorded: Trace, limit: int = 20) -> tuple[Difference, ...]:
    """Compare event by event; the first `limit` differences, earliest first."""
    found: list[Difference] = []
    if predicted.ranks != recorded.ranks:
        text = f"Predicted for {predicted.ranks} ranks, recorded from {recorded.ranks}."
        found.append(Difference(0, None, None, text))
    for number in range(max(predicted.steps, recorded.steps)):
        if len(found) >= limit:
            break
        found += _step_differences(number, _step(predicted, number), _step(recorded, number))
    return tuple(found[:limit])


def _step(trace: Trace, number: int) -> tuple[Event, ...]:
    return trace.step(number) if number < trace.steps else ()


def _step_differences(
    number: int, predicted: Sequence[Event], recorded: Sequence[Event]
) -> Iterator[Difference]:
    if tuple(predicted) == tuple(recorded):
        return
    both = (_by_place(predicted), _by_place(recorded))
    for key in sorted({**both[0], **both[1]}):
        for wanted, got in zip_longest(both[0].get(key, ()), both[1].get(key, ())):
            if wanted != got:
                yield Difference(number, wanted, got, _sentence(number, wanted, got))


def _by_place(events: Sequence[Event]) -> dict[tuple[int, int, int, int], list[Event]]:
    places: dict[tuple[int, int, int, int], list[Event]] = {}
    for event in events:
        places.setdefault(canonical(event), []).append(event)
    return places


def _sentence(number: int, wanted: Event | None, got: Event | None) -> str:
    event = wanted or got
    assert event is not None
    where = f"Step {number} ({event.stage}): {describe(event)}"
    if got is None:
        return f"{where} was predicted and did not happen."
    if wanted is None:
        return f"{where} happened and was not predicted."
    parts = [
        f"{name} {_value(wanted, name)} predicted, {_value(got, name)} recorded"
        for name in ("stage", "rows", "heads", "bytes", "keys", "pairs")
        if getattr(wanted, name) != getattr(got, name)
    ]
    return f"{where}: {'; '.join(parts)}."


def describe(event: Event) -> str:
    """An event's place in a few words: ``send of KV, rank 0 → 1``."""
    ranks = f"rank {event.src}" + (f" → {event.dst}" if event.dst != event.src else "")
    return f"{event.op} of {event.tensor}, {ranks}"


def spans_text(spans: Spans, limit: int = 6) -> str:
    """Rows for people: ``[0, 12) [24, 36)``, with the rest counted beyond `limit` spans."""
    shown = " ".join(f"[{a}, {b})" for a, b in spans[:limit])
    rest = len(spans) - limit
    return f"{shown} and {rest} more" if rest > 0 else shown or "none"


def _value(event: Event, name: str) -> str:
    if name == "heads":
        return spans_text((event.heads,))
    if name in ("rows", "keys"):
        return spans_text(event.rows if name == "rows" else event.keys)
    return str(getattr(event, name))


def _spans_text(spans: Spans) -> str:
    return "[" + ",".join([f"[{a},{b}]" for a, b in spans]) + "]"


def _spans_from(data: Iterable[Sequence[int]]) -> Spans:
    return tuple((span[0], span[1]) for span in data)


def _hash(lines: Iterable[str]) -> str:
    digest = hashlib.sha256()
    for line in lines:
        digest.update(line.encode())
        digest.update(b"\n")
    return "sha256:" + digest.hexdigest()
