"""A verdict as text: what came out, why, and the way out."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from usp_viz.scenario import Scenario

if TYPE_CHECKING:
    from usp_viz.ledger import Pairs
    from usp_viz.runtime.accuracy import Accuracy
    from usp_viz.runtime.result import Problem, Run

MARKS = {
    "verified": "✓",
    "wrong": "✗",
    "refused": "⊘",
    "invalid": "!",
    "crashed": "✹",
    "timeout": "⏱",
}
BAR = 24


def headline(scenario: Scenario) -> str:
    """One line: which scenario, on what mesh, by what policy."""
    mesh = scenario.mesh
    policy = scenario.policy
    if policy != "extended":
        policy = f"{policy} {scenario.release}"
    return (
        f"{scenario.name} · {policy} · U{mesh.ulysses} × R{mesh.ring} = {mesh.ranks} "
        f"rank{'s' if mesh.ranks > 1 else ''}"
    )


def run_text(run: Run, source: str | None = None) -> str:
    """The whole verdict of a run, for a terminal.

    Args:
        run: What happened.
        source: How the scenario was named on the command line, for commands to copy.
    """
    lines = [headline(run.scenario), f"{MARKS[run.outcome]} {run.outcome.upper()}  {gist(run)}"]
    lines += [f"  {line}" for line in _body(run, source or run.scenario.name)]
    return "\n".join(lines)


def error_text(error: Mapping[str, Any], source: str) -> Iterator[str]:
    """What a refusal says for itself, and what to do; `error` as in a result or a check."""
    if error.get("rule"):
        yield f"rule      {error['rule']}  ({error.get('source', '')}, {error.get('release', '')})"
    for n, fact in enumerate(error.get("because", ())):
        yield f"{'because' if not n else '':9} {fact}"
    for n, fix in enumerate(error.get("fixes", ())):
        yield f"{'ways out' if not n else '':9} {n + 1}. {fix['title']}"
        file = "FILE" if source == "-" else shlex.quote(source)
        yield f"{'':12} usp-viz run {file} {set_flags(fix['set'])}"


def set_flags(sets: Mapping[str, Any]) -> str:
    """Dotted keys as ``--set`` flags for a shell."""
    import json

    def text(value: Any) -> str:
        return value if isinstance(value, str) else json.dumps(value, separators=(",", ":"))

    return " ".join(f"--set {shlex.quote(f'{key}={text(value)}')}" for key, value in sets.items())


def number(value: float) -> str:
    """A small number for people: two digits, NaN in words."""
    return f"{value:.1e}" if math.isfinite(value) else "NaN" if math.isnan(value) else "∞"


def gist(run: Run) -> str:
    """What came of it, in one line: the exception word for word, or how far off the outputs are."""
    if run.problem is not None:
        return f"{run.problem.cls}: {run.problem.message}"
    assert run.accuracy is not None
    found = run.accuracy
    if run.outcome == "verified":
        return (
            f"largest error {number(found.max_abs)} ≤ {number(found.tolerance)} "
            f"over {found.rows} rows"
        )
    return (
        f"{found.wrong_rows} of {found.rows} rows are wrong; largest error "
        f"{number(found.max_abs)}, tolerance {number(found.tolerance)}"
    )


def _body(run: Run, source: str) -> Iterator[str]:
    if run.problem is not None:
        yield from error_text(run.problem.to_json(), source)
        yield from _afterwords(run, source)
        yield from where_text(run.problem)
    for _, text in run.warnings:
        yield f"warning   {text}"
    if run.accuracy is not None:
        yield from rank_bars(run.accuracy)
    if run.pairs is not None:
        yield f"pairs     {pairs_text(run.pairs)}"
    yield f"trace     {trace_text(run)}"
    timing = run.timing
    cold = timing.get("cold_start_ms")
    yield (
        f"time      {timing['wall_ms']:.0f} ms"
        + (f", of which {cold:.0f} ms to start the ranks" if cold else ", ranks warm")
        + (
            f"; attention {timing['attention_ms']:.1f} ms ({run.backend}, {run.device})"
            if run.accuracy
            else ""
        )
    )
    if run.expectation_met:
        yield "expected  this is what the file says it should give"


def _afterwords(run: Run, source: str) -> Iterator[str]:
    """What a refusal leaves open."""
    policy = run.scenario.policy
    if run.outcome != "refused":
        return
    if policy == "unguarded":
        yield "note      unguarded skips the three ring guards only; this check stands beside them"
    elif policy == "sglang" and source != "-":
        command = f"usp-viz run {shlex.quote(source)} --policy all"
        yield f"behind it {command} shows what it saves you from"


def where_text(problem: Problem) -> Iterator[str]:
    """How each rank ended; ranks that ended alike share a line."""
    alike: dict[str, list[int]] = {}
    for where in problem.where:
        alike.setdefault(where.ending, []).append(where.rank)
    for ending, ranks in alike.items():
        names = ", ".join(map(str, ranks))
        yield f"{'':9} rank{'s' if len(ranks) > 1 else ''} {names} {ending}"


def rank_bars(found: Accuracy, width: int = BAR) -> Iterator[str]:
    """One bar a rank, on a log scale from a thousandth of the tolerance to the worst error."""
    errors = [r.max_abs for r in found.per_rank if math.isfinite(r.max_abs)]
    low, high = found.tolerance / 1e3, max([*errors, found.tolerance])
    for rank in found.per_rank:
        if math.isnan(rank.max_abs):
            bar = "NaN"
        else:
            error = min(max(rank.max_abs, low), high)
            share = math.log(error / low) / math.log(high / low)
            bar = ("█" if rank.wrong_rows else "▒") * round(share * width)
        verdict = f"{rank.wrong_rows} of {rank.rows} wrong" if rank.wrong_rows else "right"
        if not rank.rows:
            verdict = "no scored rows"
        yield f"rank {rank.rank:<4} {bar:<{width}} {number(rank.max_abs):>8}  {verdict}"


def pairs_text(pairs: Pairs) -> str:
    """What the pair ledger counted, in one sentence."""
    if pairs.exact:
        return f"all {pairs.allowed:,} allowed (query, key) pairs computed once, no other"
    return (
        f"{pairs.computed_once:,} of {pairs.allowed:,} allowed pairs computed once, "
        f"{pairs.missing:,} missing, {pairs.repeated:,} repeated, {pairs.forbidden:,} forbidden"
    )


def trace_text(run: Run) -> str:
    """Whether the ranks did what was predicted, in one sentence."""
    events = sum(1 for _ in run.trace.events())
    if not run.differences:
        return f"predicted = recorded on {run.trace.ranks} real ranks ({events} events)"
    return f"{events} events; departs from the prediction: {run.differences[0].text}"
