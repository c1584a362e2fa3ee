"""Frames as text: for the command line, screen readers and tests."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

from usp_viz.frames import Frame, Frames, Heads, Held, RankState, replay
from usp_viz.layout import Spans
from usp_viz.mesh import Mesh
from usp_viz.trace import Event, Trace
from usp_viz.views.verdict import headline

if TYPE_CHECKING:
    from usp_viz.scenario import Scenario

EACH = 16
"""Up to so many ranks, each has a line; beyond, lanes are summed up."""
LINES = 24
"""Up to so many transfers are listed."""
WIDTH = 78
BAR = 20

LANES: tuple[tuple[str, Callable[[RankState], Held | None]], ...] = (
    ("Q", lambda rank: rank.q),
    ("KV", lambda rank: rank.kv),
    ("KV arriving", lambda rank: rank.arriving),
    ("partial O", lambda rank: rank.partial),
    ("finished O", lambda rank: rank.output),
)


def frames_text(trace: Trace, scenario: Scenario) -> Iterator[str]:
    """Every step of a trace: a heading, then one text for each frame."""
    frames, mesh = replay(trace), Mesh.of(scenario)
    yield headline(scenario) + "\n" + shape_text(scenario) + "\n"
    for frame in frames:
        yield frame_text(frame, mesh, frames.pairs, trace.steps) + "\n"


def text_of(frames: Frames, number: int, scenario: Scenario) -> str:
    """One step of frames that are being looked at."""
    return frame_text(frames[number], Mesh.of(scenario), frames.pairs, len(frames))


def summary_text(trace: Trace, scenario: Scenario) -> str:
    """A trace in one line a step, and what is sent in all."""
    lines = [headline(scenario), shape_text(scenario), ""]
    stages = max(map(len, trace.stages), default=0)
    for number, stage in enumerate(trace.stages):
        lines.append(f"step {number:>2}  {stage:<{stages}}  {_gist(trace.step(number))}")
    sent = trace.bytes_sent_per_rank
    lines += [
        "",
        f"pairs  {sum(event.pairs for event in trace.events()):,}",
        f"sent   {size_text(sum(sent))}; per rank {_range_text(map(size_text, _ends(sent)))}",
        f"calls  {', '.join(trace.collectives) or 'none'}",
        f"hash   {trace.hash}",
    ]
    return "\n".join(lines)


def frame_text(frame: Frame, mesh: Mesh, pairs: int, steps: int) -> str:
    """One frame.

    Args:
        frame: The frame.
        mesh: Where its ranks sit.
        pairs: Pairs of the whole trace.
        steps: Steps of the whole trace.
    """
    title = f"── step {frame.step} of {steps - 1} · {frame.stage} "
    lines = [title + "─" * (WIDTH - len(title)), *_wrapped(frame.narration), ""]
    lines += _ranks(frame, mesh) if mesh.ranks <= EACH else _lanes(frame)
    lines += _moves(frame.moves)
    lines += _works([event for event in frame.events if event.op == "attend"], mesh.ranks)
    if pairs:
        lines += ["", f"pairs  {_bar(frame.pairs, pairs)}"]
    return "\n".join(lines)


def shape_text(scenario: Scenario) -> str:
    """The tensors and tokens of a scenario in one line."""
    tensors, tokens, attention = scenario.tensors, scenario.tokens, scenario.attention
    facts = [
        f"{tokens.total} rows",
        tokens.layout,
        f"B {tensors.batch}",
        f"H {tensors.heads}",
        *([f"G {scenario.kv_heads}"] if scenario.kv_heads != tensors.heads else []),
        f"D {tensors.head_dim}",
        tensors.dtype,
        *(["causal"] if attention.causal else []),
        *([f"{len(tokens.documents)} documents"] if tokens.documents else []),
        *(next(iter(type(mask).model_fields)) for mask in attention.mask),
    ]
    return " · ".join(facts)


# -- values ---------------------------------------------------------------------------------------


def rows_text(rows: Spans, limit: int = 3) -> str:
    """Row spans, short: ``[0, 12)``, ``0 4 8 … 44`` for stripes, at most `limit` spans."""
    if len(rows) > limit:
        steps = {b[0] - a[0] for a, b in pairwise(rows)}
        if len(steps) == 1 and all(b - a == 1 for a, b in rows):
            return f"{rows[0][0]} {rows[1][0]} {rows[2][0]} … {rows[-1][0]}"
    shown = " ".join(f"[{a}, {b})" for a, b in rows[:limit])
    return f"{shown} +{len(rows) - limit}" if len(rows) > limit else shown


def heads_text(heads: Heads) -> str:
    """Heads, short: ``h0-3`` are heads 0, 1, 2 and 3."""
    first, last = heads[0], heads[1] - 1
    return f"h{first}" if first == last else f"h{first}-{last}"


def size_text(count: int) -> str:
    """A number of bytes for people."""
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.4g} {unit}"
        size /= 1024
    return f"{size:.4g} TiB"


def _held_text(held: Held | None) -> str:
    return f"{rows_text(held.rows)} {heads_text(held.heads)}" if held else "·"


def _bar(part: int, whole: int) -> str:
    filled = BAR * part // whole
    return f"{'█' * filled}{'░' * (BAR - filled)}  {part:,} of {whole:,} ({part / whole:.0%})"


def _wrapped(text: str) -> list[str]:
    import textwrap

    return textwrap.wrap(text, WIDTH, break_on_hyphens=False)


def _ends(values: Iterable[int]) -> tuple[int, int]:
    some = tuple(values)
    return min(some), max(some)


def _range_text(ends: Iterable[str]) -> str:
    first, last = ends
    return first if first == last else f"{first} to {last}"


# -- parts of a frame -----------------------------------------------------------------------------


def _ranks(frame: Frame, mesh: Mesh) -> Iterator[str]:
    """A line for each rank, by ring position: what it holds in each lane that anybody uses."""
    lanes = [(name, lane) for name, lane in LANES if any(lane(rank) for rank in frame.ranks)]
    table = [["", *(name for name, _ in lanes)]]
    for ring in range(mesh.ring):
        for rank in mesh.ulysses_group(ring):
            state = frame.ranks[rank]
            name = f"ring position {ring}  rank {rank}" + (" RAISES" if state.raised else "")
            cells = [name, *(_held_text(lane(state)) for _, lane in lanes)]
            if state.partial is not None:
                cells[1 + [name for name, _ in lanes].index("partial O")] += (
                    f", {state.pairs:,} pairs"
                )
            table.append(cells)
    yield from _aligned(table)


def _aligned(table: Sequence[Sequence[str]]) -> Iterator[str]:
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for row in table:
        cells = zip(row, widths, strict=True)
        yield "  " + "   ".join(f"{cell:<{width}}" for cell, width in cells).rstrip()


def _lanes(frame: Frame) -> Iterator[str]:
    """A line for each lane: how many ranks hold how much."""
    sizes: dict[int, int] = {}  # ranks share their spans: add each up once
    table = [["lane", "ranks", "rows each", "heads each", "for example"]]
    for name, lane in LANES:
        holding = [(n, h) for n, rank in enumerate(frame.ranks) if (h := lane(rank)) is not None]
        if not holding:
            continue
        for _, held in holding:
            if id(held.rows) not in sizes:
                sizes[id(held.rows)] = sum(b - a for a, b in held.rows)
        rows = _ends(sizes[id(held.rows)] for _, held in holding)
        heads = _ends(held.heads[1] - held.heads[0] for _, held in holding)
        example = f"rank {holding[0][0]}: {_held_text(holding[0][1])}"
        table.append(
            [
                name,
                f"{len(holding):,}",
                _range_text(f"{n:,}" for n in rows),
                _range_text(map(str, heads)),
                example,
            ]
        )
    yield from _aligned(table)
    raised = sum(rank.raised for rank in frame.ranks)
    if raised:
        yield f"  {raised} ranks raise"


def _moves(events: Sequence[Event]) -> Iterator[str]:
    """Arrows: who sends what to whom."""
    links: dict[tuple[int, int], list[Event]] = {}
    for event in events:
        links.setdefault((event.src, event.dst), []).append(event)
    if not links:
        return
    yield from ("", "moves")
    if len(links) > LINES:
        sent: dict[int, int] = {}
        for event in events:
            sent[event.src] = sent.get(event.src, 0) + event.bytes
        each = _range_text(map(size_text, _ends(sent.values())))
        (src, dst), first = next(iter(links.items()))
        yield f"  {len(links):,} transfers by {len(sent):,} ranks, {each} from each"
        yield f"  for example rank {src} → {dst}: {', '.join(map(_moved_text, first))}"
        return
    yield from _aligned(
        [
            [
                f"rank {src} → {dst}",
                ", ".join(map(_moved_text, some)),
                size_text(sum(event.bytes for event in some)),
            ]
            for (src, dst), some in links.items()
        ]
    )


def _moved_text(event: Event) -> str:
    return f"{event.tensor} {rows_text(event.rows)} {heads_text(event.heads)}"


def _works(attends: Sequence[Event], ranks: int) -> Iterator[str]:
    """What is attended."""
    if not attends:
        return
    yield from ("", "computes")
    if ranks > EACH:
        busiest = max(attends, key=lambda event: event.pairs)
        pairs = sum(event.pairs for event in attends)
        average = f"{pairs // ranks:,} on average"
        yield f"  {pairs:,} pairs on {len(attends):,} of {ranks:,} ranks, {average}"
        yield f"  the busiest is rank {busiest.src}: {_attended_text(busiest)}"
        return
    yield from _aligned([[f"rank {event.src}", _attended_text(event)] for event in attends])


def _attended_text(event: Event) -> str:
    return (
        f"rows {rows_text(event.rows)} × keys {rows_text(event.keys)}, {heads_text(event.heads)}: "
        f"{event.pairs:,} pairs"
    )


def _gist(events: Sequence[Event]) -> str:
    """A step in a few words: how much of which op."""
    parts: list[str] = []
    for op in dict.fromkeys(event.op for event in events):
        some = [event for event in events if event.op == op]
        sent = sum(event.bytes for event in some)
        pairs = sum(event.pairs for event in some)
        ranks = len({event.src for event in some})
        amount = f" {size_text(sent)}" if sent else f" {pairs:,} pairs" if pairs else ""
        parts.append(f"{op}{amount} ({ranks:,} rank{'s' * (ranks != 1)})")
    return ", ".join(parts)
