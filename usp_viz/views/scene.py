"""The scene: everything a picture of a replay shows, as plain data and nothing drawn yet.

The player, the stand-alone page, the table and the text all read one `Scene`; it holds every event
of the trace exactly, so `Scene.table` gives them back. Row ids are whole-order ids. Its JSON is
compact (`usp_viz.views.packing`) and goes to the browser as text.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from usp_viz.frames import Frames, RankState, replay
from usp_viz.layout import Layout, Rows, Spans
from usp_viz.ledger import progress
from usp_viz.mask import Visibility
from usp_viz.mesh import Mesh
from usp_viz.plan import simulate
from usp_viz.scenario import ITEMSIZE
from usp_viz.trace import Difference, Event, Trace, spans_text
from usp_viz.views import narration
from usp_viz.views.packing import Table, pack, pack_cells, records, spans_from, unpack
from usp_viz.views.pattern import bins, pattern
from usp_viz.views.shapes import Shapes
from usp_viz.views.weights import Softmax, softmax

if TYPE_CHECKING:
    from usp_viz.ledger import Pairs
    from usp_viz.scenario import Policy, Scenario

SCENE_VERSION = 1
CHIPS = 2048
"""Beyond this many chips (rows x head groups, of Q and of KV) a chip stands for several rows."""
LANES = ("q", "kv", "arriving", "partial", "output")
"""What a rank can hold, in the order of `RankState`."""
WHOLE = 10_000
"""Shares of a softmax are whole numbers of this many."""
HEADS_BASE = 1 << 13
"""Heads [a, b) travel as one number, a · HEADS_BASE + b."""


@dataclass(frozen=True, slots=True)
class Shown:
    """One step of the picture.

    Attributes:
        trace: Where its events come from.
        number: Which step of that trace.
        ghost: It was not run: it is what would have followed a refusal.
    """

    trace: Trace
    number: int
    ghost: bool = False


@dataclass(frozen=True)
class Scene:
    """A replay, ready to be drawn. `data` is what the player loads."""

    data: dict[str, Any]

    def to_json_text(self) -> str:
        """Compact JSON, ASCII only."""
        return json.dumps(self.data, separators=(",", ":"))

    @property
    def steps(self) -> int:
        """How many steps there are."""
        return len(self.data["steps"])

    @cached_property
    def _spans(self) -> tuple[Spans, ...]:
        return tuple(spans_from(runs) for runs in self.data["spans"])

    def events(self, number: int) -> Iterator[Event]:
        """The events of one step, as the trace has them but for their order."""
        step = self.data["steps"][number]
        for group in step["events"]:
            tensor, odd = group["tensor"], unpack(group.get("odd", []))
            exceptions = dict(zip(odd[::2], odd[1::2], strict=True))
            columns = {
                k: group[k] for k in ("src", "dst", "rows", "heads", "keys", "pairs") if k in group
            }
            for n, record in enumerate(records(columns)):
                src, rows = record["src"], self._spans[record["rows"]]
                dst, heads = record.get("dst", src), divmod(record["heads"], HEADS_BASE)
                size = 0 if src == dst else self._bytes(tensor, rows, heads)
                yield Event(
                    step["number"],
                    step["stage"],
                    group["op"],
                    src,
                    dst,
                    tensor,
                    rows,
                    heads,
                    exceptions.get(n, size),
                    self._spans[record["keys"]] if "keys" in record else (),
                    record.get("pairs", 0),
                )

    def _bytes(self, tensor: str, rows: Spans, heads: tuple[int, int]) -> int:
        each = self.data["row_bytes"] * (2 if tensor == "KV" else 1)
        return sum(b - a for a, b in rows) * (heads[1] - heads[0]) * each

    def table(self, number: int) -> list[dict[str, str]]:
        """One row of text for each event of a step."""
        return [
            {
                "what": event.op.replace("_", "-"),
                "from": str(event.src),
                "to": str(event.dst),
                "tensor": event.tensor,
                "rows": spans_text(event.rows),
                "heads": _heads_text(event.heads),
                "bytes": f"{event.bytes:,}",
                "keys": spans_text(event.keys) if event.op == "attend" else "",
                "pairs": f"{event.pairs:,}" if event.op == "attend" else "",
            }
            for event in self.events(number)
        ]

    def text(self, number: int) -> str:
        """The step for readers without a picture: caption, then what every rank holds."""
        step = self.data["steps"][number]
        where = f"Step {number} of {self.steps - 1}: {step['title']}"
        lines = [where + (" (not run)" if step["ghost"] else ""), step["caption"]]
        lines += [step["why"]] if step["why"] else []
        for rank, lanes in enumerate(self._held(number)):
            held = [
                f"{_LANE_WORDS[lane]} {spans_text(self._spans[rows])} heads "
                f"{_heads_text(divmod(heads, HEADS_BASE))}"
                for lane, (rows, heads) in enumerate(lanes)
                if rows
            ]
            lines.append(f"rank {rank}: {'; '.join(held) or 'nothing'}")
        return "\n".join(lines)

    def _held(self, number: int) -> list[list[tuple[int, int]]]:
        """(rows, heads) by rank and lane at the end of a step."""
        held = [[(0, 0)] * len(LANES) for _ in self.data["mesh"]["at"]]
        for step in self.data["steps"][: number + 1]:
            for change in records(step["state"]):
                held[change["rank"]][change["lane"]] = (change["rows"], change["heads"])
        return held


_LANE_WORDS = ("Q", "K/V", "arriving K/V", "partial output", "output")


def scene(
    scenario: Scenario,
    trace: Trace,
    *,
    recorded: Trace | None = None,
    differences: Sequence[Difference] = (),
    refusal: str = "",
    beyond: Policy | None = None,
    pairs: Pairs | None = None,
) -> Scene:
    """Put a replay together.

    Args:
        scenario: What was asked.
        trace: What was predicted, for the scenario's own policy.
        recorded: What real ranks did, if they ran; this is what is then drawn.
        differences: Where the two part.
        refusal: The exception, word for word.
        beyond: After a refusal, go on with what this policy would do, marked as not run.
        pairs: The audited pair ledger of the run.
    """
    after = simulate(scenario.set({"policy": beyond})) if beyond else None
    shown = _shown(recorded or trace, after)
    refused = _stops(recorded or trace)
    order, visibility = Layout.of(scenario).order, Visibility.of(scenario)
    mesh = Mesh.of(scenario)
    spans = Table()
    for position in range(mesh.ranks):  # first, so that what ranks share has ascending numbers
        spans.add(_spans_of(Layout.of(scenario).shards[position]))
    borders = bins(visibility)
    complete = _complete(scenario, trace)
    hops = {step.trace.stages[step.number] for step in shown} - {"shard", "output"}
    weights = softmax(scenario, visibility) if len(hops) > 1 else None
    steps = _Steps(scenario, Shapes(visibility), spans, refusal, sum(complete), weights)
    data: dict[str, Any] = {
        "scene_version": SCENE_VERSION,
        "name": scenario.name,
        "title": scenario.title or scenario.name,
        "description": scenario.description,
        "mesh": {
            "ulysses": mesh.ulysses,
            "ring": mesh.ring,
            "at": [list(mesh.at(rank)) for rank in range(mesh.ranks)],
        },
        "heads": scenario.tensors.heads,
        "kv_heads": scenario.kv_heads,
        "batch": scenario.tensors.batch,
        "row_bytes": scenario.tensors.batch
        * scenario.tensors.head_dim
        * ITEMSIZE[scenario.tensors.dtype],
        "order": [order.kv_prefix, order.prefix, order.total, order.suffix],
        "documents": list(scenario.documents),
        **_chips(scenario),
        "ledger": {
            "borders": pack(borders),
            "cells": [pack_cells(row) for row in pattern(visibility, borders).tolist()],
            "pairs": pack(complete),
            "audit": None if pairs is None else pairs.to_json(),
        },
        "steps": list(steps.of(shown)),
        "beyond": beyond if any(step.ghost for step in shown) else None,
        "badge": _badge(mesh.ranks, recorded, differences, refused, any(s.ghost for s in shown)),
    }
    return Scene({**data, "spans": spans.to_json()})


def _shown(real: Trace, beyond: Trace | None) -> list[Shown]:
    shown = [Shown(real, number) for number in range(real.steps)]
    if beyond is None or not _stops(real):
        return shown
    return shown + [Shown(beyond, n, ghost=True) for n in range(real.steps - 1, beyond.steps)]


def what_follows(scenario: Scenario) -> Policy:
    """The policy that best shows what a refusal hides: behind the guard, unless that stops too."""
    behind = simulate(scenario.set({"policy": "unguarded"}))
    return "extended" if _stops(behind) and behind.steps <= 2 else "unguarded"


def _stops(trace: Trace) -> bool:
    """Whether it ends in a raise."""
    return trace.steps > 0 and any(event.op == "raise" for event in trace.step(trace.steps - 1))


def _complete(scenario: Scenario, trace: Trace) -> list[int]:
    """The pairs that each rank computes where every allowed one is: by the extended policy."""
    if scenario.policy != "extended":
        trace = simulate(scenario.set({"policy": "extended"}))
    return [sum(column) for column in zip(*progress(trace), strict=True)]


def _badge(
    ranks: int, recorded: Trace | None, differences: Sequence[Difference], refused: bool, more: bool
) -> dict[str, Any]:
    """What the picture rests on, and the step to look at when prediction and ranks part."""
    on = f"{ranks} real rank{'s' if ranks > 1 else ''}"
    if recorded is None:
        text = "predicted to be refused" if refused else "predicted, not run yet"
        return {"kind": "predicted", "text": text}
    if differences:
        first = differences[0]
        event = first.recorded or first.predicted
        at = [] if event is None else sorted({event.src, event.dst})
        return {"kind": "differs", "text": first.text, "step": first.step, "ranks": at}
    if refused:
        text = f"refused on {on}, as predicted" + ("; what follows was not run" if more else "")
        return {"kind": "refused", "text": text}
    return {"kind": "verified", "text": f"predicted = recorded on {on}"}


# -- chips -------------------------------------------------------------------------------------


def _chips(scenario: Scenario) -> dict[str, Any]:
    """The marks that stand for rows, and how many rows each stands for.

    ``chips`` lists (first row, rows, step, position it starts at or -1, document) of each, in the
    order in which a lane shows them.
    """
    layout = Layout.of(scenario)
    order = layout.order
    borders = list(accumulate(scenario.documents))
    budget = max(1, CHIPS // (2 * scenario.mesh.ulysses))
    copies = (range(order.start), range(order.stop, order.size))
    parts = [len(run) for rows in layout.shards for run in rows] + [len(run) for run in copies]
    size = max(1, -(-order.size // budget))
    while size < max(parts) and sum(-(-length // size) for length in parts) > budget:
        size += 1
    chips: list[int] = []
    document = 0
    pieces: list[tuple[int, Rows]] = [(-1, copies[:1]), *enumerate(layout.shards), (-1, copies[1:])]
    for position, rows in pieces:
        for run in rows:
            for start in range(0, len(run), size):
                chip = run[start : start + size]
                document = _document(borders, chip[0] - order.start) if position >= 0 else -1
                chips += (chip[0], len(chip), chip.step if len(chip) > 1 else 1, position, document)
    return {"chips": chips, "rows_per_chip": size}


def _document(borders: Sequence[int], row: int) -> int:
    from bisect import bisect_right

    return bisect_right(borders, row)


def _spans_of(rows: Rows) -> Spans:
    from usp_viz.layout import spans

    return spans(rows)


def _heads_text(heads: tuple[int, int]) -> str:
    return f"[{heads[0]}, {heads[1]})"


# -- steps -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Steps:
    """Makes the steps of a scene; spans they use are added to `spans`."""

    scenario: Scenario
    shapes: Shapes
    spans: Table
    refusal: str
    allowed: int
    weights: Softmax | None

    def of(self, shown: Sequence[Shown]) -> Iterator[dict[str, Any]]:
        frames: dict[int, Frames] = {}
        before: Sequence[RankState] = ()
        for n, step in enumerate(shown):
            made = frames.setdefault(id(step.trace), replay(step.trace))
            frame = made[step.number]
            ops = {event.op for event in frame.events}
            later = {s.trace.stages[s.number] for s in shown[n + 1 :]}
            later = {s for s in later if s.startswith("hop ") and s != frame.stage}
            caption = frame.narration
            if "raise" in ops:
                said = "" if step.ghost else self.refusal
                who = f"sglang {self.scenario.release}"
                caption = narration.raised(said, frame.stage, step.trace.ranks, who)
            ranks, pairs = step.trace.ranks, frame.pairs
            reason = narration.why(
                frame.stage, frame.events, ranks, len(later), pairs, self.allowed
            )
            yield {
                "number": step.number,
                "stage": frame.stage,
                "title": narration.title(frame.stage, frame.events),
                "caption": caption,
                "why": reason,
                "ghost": int(step.ghost),
                "events": list(self._groups(frame.events, frame.ranks)),
                "state": self._changes(before, frame.ranks),
            }
            before = frame.ranks

    def _groups(
        self, events: Iterable[Event], ranks: Sequence[RankState]
    ) -> Iterator[dict[str, Any]]:
        """Events by op and tensor, each group as packed columns."""
        groups: dict[tuple[str, str], list[Event]] = {}
        for event in events:
            groups.setdefault((event.op, event.tensor), []).append(event)
        for (op, tensor), group in groups.items():
            data: dict[str, Any] = {"op": op, "tensor": tensor}
            data["src"] = pack([event.src for event in group])
            if any(event.src != event.dst for event in group):
                data["dst"] = pack([event.dst for event in group])
            data["rows"] = pack([self.spans.add(event.rows) for event in group])
            data["heads"] = pack([_number(event.heads) for event in group])
            if op == "attend":
                data["keys"] = pack([self.spans.add(event.keys) for event in group])
                data["pairs"] = pack([event.pairs for event in group])
                shapes = [self.shapes.of(event) for event in group]
                if any(shapes):
                    data["shape"] = pack(shapes)
                if self.weights is not None:
                    held = [ranks[event.src].q for event in group]
                    shares = [
                        self.weights.share(event, q.rows if q else event.rows)
                        for event, q in zip(group, held, strict=True)
                    ]
                    data["share"] = pack([round(share * WHOLE) for share in shares])
            odd = [(n, event.bytes) for n, event in enumerate(group) if self._odd(event)]
            if odd:
                data["odd"] = [number for pair in odd for number in pair]
            yield data

    def _odd(self, event: Event) -> bool:
        """Whether its bytes are not what its rows and heads take."""
        tensors = self.scenario.tensors
        each = tensors.batch * tensors.head_dim * ITEMSIZE[tensors.dtype]
        each *= 2 if event.tensor == "KV" else 1
        size = sum(b - a for a, b in event.rows) * (event.heads[1] - event.heads[0]) * each
        return event.bytes != (0 if event.src == event.dst else size)

    def _changes(
        self, before: Sequence[RankState], after: Sequence[RankState]
    ) -> dict[str, list[int] | dict[str, list[int]]]:
        """What ranks hold that they did not hold a step ago, lane by lane."""
        changes: list[tuple[int, int, int, int]] = []
        for lane, name in enumerate(LANES):
            for rank, state in enumerate(after):
                was = getattr(before[rank], name) if before else None
                held = getattr(state, name)
                if held != was:
                    rows = self.spans.add(held.rows) if held else 0
                    changes.append((rank, lane, rows, _number(held.heads) if held else 0))
        names = ("rank", "lane", "rows", "heads")
        return {name: pack([c[n] for c in changes]) for n, name in enumerate(names)}


def _number(heads: tuple[int, int]) -> int:
    return heads[0] * HEADS_BASE + heads[1]
