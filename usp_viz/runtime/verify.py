"""From a scenario to a verdict: run it on ranks, judge outputs, ledger and trace independently."""

from __future__ import annotations

import platform
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from numpy.typing import NDArray

from usp_viz import rules
from usp_viz.engines.base import RankResult
from usp_viz.errors import InvalidScenario, MissingRequirement, RunCancelled
from usp_viz.layout import Layout
from usp_viz.ledger import Piece, audit
from usp_viz.plan import simulate
from usp_viz.runtime.accuracy import Accuracy, Answer, own_rows, score
from usp_viz.runtime.limits import limits
from usp_viz.runtime.pool import RankPool, default_pool
from usp_viz.runtime.report import Job, RankReport, RunReport
from usp_viz.runtime.result import Outcome, Problem, Run, Where
from usp_viz.scenario import Scenario
from usp_viz.trace import Event, Trace, diff

DELIBERATE = ("NotImplementedError", "ValueError", "AssertionError", "NotExpressible")
"""Classes that a library raises on purpose; a known rule can add a RuntimeError."""

OnEvent = Callable[[Event], None]


def run(
    scenario: Scenario,
    engine: str | None = None,
    *,
    pool: RankPool | None = None,
    on_event: OnEvent | None = None,
    memory: bool = False,
) -> Run:
    """Run a scenario on real ranks and judge it.

    Args:
        scenario: What to run, with its own policy and release.
        engine: Overrides the scenario's engine.
        pool: Warm ranks; by default those of this process.
        on_event: Told of each recorded event as it arrives, in no particular order among ranks.
        memory: Count tensor bytes on each rank, too; its times are then longer than they need be.

    Raises:
        InvalidScenario: Over a cap of this machine.
        MissingRequirement: A GPU or a package is missing.
        RunCancelled: `RankPool.cancel` was called.
    """
    if engine is not None:
        scenario = scenario.set({"engine": engine})
    begun = time.perf_counter()
    check_limits(scenario)
    report = (pool or default_pool()).run(
        job(scenario, memory),
        world=scenario.mesh.ranks,
        timeout_s=scenario.run.timeout_s,
        device=scenario.run.device,
        on_message=_listener(on_event) if on_event else None,
    )
    if any(rank.status == "cancelled" for rank in report.ranks):
        raise RunCancelled("the run was cancelled; the next one starts on fresh ranks")
    return judge(scenario, report, begun)


def judge(scenario: Scenario, report: RunReport, begun: float | None = None) -> Run:
    """Turn what the ranks reported into a `Run`.

    Args:
        scenario: What they ran.
        report: What became of each rank; values are `RankResult`.
        begun: `time.perf_counter()` when the caller asked; wall time counts from there.
    """
    begun = time.perf_counter() - report.wall_ms / 1e3 if begun is None else begun
    results = {r.rank: r.value for r in report.ranks if isinstance(r.value, RankResult)}
    trace = Trace.recorded(scenario.mesh.ranks, _events(report), Layout.of(scenario).order)
    accuracy, pairs = None, None
    outs = {rank: result.out for rank, result in results.items() if result.out is not None}
    problem = _misshapen(scenario, outs) if report.ok else None
    outcome: Outcome = "crashed"
    if report.ok and problem is None:
        accuracy = score(scenario, answer_of(scenario), outs)
        pairs = audit(scenario, [_pieces(results[rank]) for rank in sorted(results)])
        outcome = "wrong" if accuracy.wrong_rows else "verified"
    elif problem is None:
        outs = {}
        outcome, problem = _failure(scenario, report)
    any_result = next(iter(results.values()), None)
    return Run(
        scenario=scenario,
        outcome=outcome,
        backend=any_result.backend if any_result else scenario.attention.backend,
        device=any_result.device if any_result else scenario.run.device,
        trace=trace,
        differences=diff(simulate(scenario), trace),
        timing=_timing(results, report, begun),
        versions=_versions() | (any_result.versions if any_result else {}),
        accuracy=accuracy,
        pairs=pairs,
        problem=problem,
        warnings=tuple((w.id, w.text) for w in rules.warnings(scenario, scenario.policy)),
        outs=outs,
        lanes=_lanes(results),
        peak_bytes={
            rank: result.peak_bytes
            for rank, result in results.items()
            if result.peak_bytes is not None
        },
    )


def check_limits(scenario: Scenario) -> None:
    """Whether this machine may run it, decided before any memory is taken.

    Raises:
        InvalidScenario: Names the cap and the environment variable that moves it.
    """
    cap, s = limits(), scenario
    size, ranks, seconds = Layout.of(s).order.size, s.mesh.ranks, s.run.timeout_s
    rows = s.tensors.batch * size
    pairs = rows * size * s.tensors.heads
    elements = rows * s.tensors.head_dim * (s.tensors.heads + 2 * s.kv_heads)
    tokens = ("tokens.total", s.tokens.total)
    checks = (
        ("mesh", f"U·R = {ranks}", ranks, cap.max_ranks, "ranks", "RANKS"),
        ("run.timeout_s", seconds, seconds, cap.max_seconds, "seconds", "SECONDS"),
        (*tokens, rows, cap.max_tokens, "rows in all batch rows", "TOKENS"),
        (*tokens, pairs, cap.max_pairs, "(query, key, head) triples", "PAIRS"),
        (*tokens, elements, cap.max_elements, "elements of Q, K and V", "ELEMENTS"),
    )
    for key, value, amount, most, what, name in checks:
        if amount > most:
            asked = "" if amount == value else f", and this needs {amount:,}"
            limit = f"a run has at most {most:,} {what} (USP_VIZ_MAX_{name}){asked}"
            power = 2 if name == "PAIRS" else 1
            fitting = int(s.tokens.total * (most / amount) ** (1 / power))
            nearest = [max(1, fitting)] if key == "tokens.total" else [most]
            raise InvalidScenario(key, value, f"{limit}; simulate takes more", nearest)


def job(scenario: Scenario, memory: bool = False) -> Job:
    """What the ranks are to do, whoever starts them.

    Raises:
        MissingRequirement: The engine, or what it needs for this scenario, is not installed.
    """
    if scenario.engine != "builtin":
        raise MissingRequirement(
            f"engine: {scenario.engine} is not installed", "Use engine: builtin, which always is."
        )
    engine: Any = import_module(f"usp_viz.engines.{scenario.engine}")
    missing = engine.missing(scenario)
    if missing:
        raise MissingRequirement(*missing)
    return Job(engine.ENTRY, {"scenario": scenario.normalised(), "memory": memory})


def _listener(on_event: OnEvent) -> Callable[[int, Any], None]:
    def hear(rank: int, message: Any) -> None:
        if message[0] == "events":
            for event in message[1]:
                on_event(event)

    return hear


# -- judging -----------------------------------------------------------------------------------


def _events(report: RunReport) -> Iterable[Event]:
    """What each rank brought back, or told before it fell."""
    for rank in report.ranks:
        if isinstance(rank.value, RankResult):
            yield from _weighed(rank.value)
        else:
            for message in rank.messages:
                if message[0] == "events":
                    yield from message[1]


def _weighed(result: RankResult) -> Iterable[Event]:
    """Events of the id pass, with the bytes that the real pass moved.

    One collective may carry several tensors: its bytes are shared out by what the ids say each of
    them weighs, so that the sum stays what really moved.
    """
    arrived: dict[tuple[int, int], int] = {}
    for step, src, size in result.arrived:
        arrived[step, src] = arrived.get((step, src), 0) + size
    said: dict[tuple[int, int], int] = {}
    for event in result.events:
        said[event.step, event.src] = said.get((event.step, event.src), 0) + event.bytes
    for event in result.events:
        place = event.step, event.src
        if event.bytes and said[place] != arrived.get(place):
            size = event.bytes * arrived.get(place, 0) // said[place]
            yield Event(**{**_fields(event), "bytes": size})
        else:
            yield event


def _fields(event: Event) -> dict[str, Any]:
    return {name: getattr(event, name) for name in Event.__dataclass_fields__}


def _pieces(result: RankResult) -> list[Piece]:
    return [piece for _, piece in result.pieces]


def _failure(scenario: Scenario, report: RunReport) -> tuple[Outcome, Problem]:
    where = tuple(_where(rank) for rank in report.ranks)
    first = report.first_failure
    if first is None:
        limit = scenario.run.timeout_s
        text = f"{sum(w.status == 'hung' for w in where)} ranks had not ended after {limit:g} s"
        hung = tuple(w.rank for w in where if w.status == "hung")
        return "timeout", Problem("TimeoutError", text, hung, where=where)
    if first.failure is None:
        text = f"rank {first.rank} died with exit code {first.exit}"
        return "crashed", Problem("RankDied", text, (first.rank,), where=where)
    name, message = first.failure.name, first.failure.message
    alike = [
        rank.rank
        for rank in report.ranks
        if rank.failure and (rank.failure.name, rank.failure.message) == (name, message)
    ]
    end = rules.ending(scenario, policy=scenario.policy)
    if end is not None and _as_foretold(end, report):
        ranks = tuple(rank.rank for rank in report.ranks if rank.failure)
        if isinstance(end, rules.Refusal):
            return "refused", Problem(end.cls, end.message, ranks, end.rule, end.details())
        return "crashed", Problem(end.cls, end.message, ranks, end.rule, end.details(), where)
    if len(alike) == len(report.ranks) and name in DELIBERATE:
        source = {"source": first.failure.source}
        return "refused", Problem(name, message, tuple(alike), details=source)
    return "crashed", Problem(name, message, tuple(alike), where=where)


def _as_foretold(end: rules.Refusal | rules.Crash, report: RunReport) -> bool:
    """Whether each rank raised what the rules say of it; messages may name the rank."""
    return all(
        (rank.failure and (rank.failure.name, rank.failure.message))
        == (message and (end.cls, message))
        for rank, message in zip(report.ranks, end.messages, strict=True)
    )


def _misshapen(scenario: Scenario, outs: Mapping[int, NDArray[Any]]) -> Problem | None:
    """The first output that is not there, or not of the shape that its rank's rows ask for."""
    s = scenario.tensors
    for rank in range(scenario.mesh.ranks):
        wanted = (s.batch, len(own_rows(scenario, rank)), s.heads, s.head_dim)
        out = outs.get(rank)
        if out is None or out.shape != wanted:
            found = "nothing" if out is None else f"an output of shape {out.shape}"
            text = f"rank {rank} returned {found}; its rows of Q need {wanted}, [B, L, H, D]"
            return Problem("WrongShape", text, (rank,))
    return None


def _where(rank: RankReport) -> Where:
    at = next((m for m in reversed(rank.messages) if m[0] == "at"), None)
    step, stage, op = at[1:] if at else (None, "", "")
    message = f"{rank.failure.name}: {rank.failure.message}" if rank.failure else ""
    if rank.status == "died":
        message = f"exit code {rank.exit}"
    return Where(rank.rank, rank.status, step, stage, op, message)


def _timing(
    results: Mapping[int, RankResult], report: RunReport, begun: float
) -> dict[str, float | None]:
    return {
        "wall_ms": round((time.perf_counter() - begun) * 1e3, 3),
        "attention_ms": round(max((r.attention_ms for r in results.values()), default=0.0), 3),
        "cold_start_ms": report.cold_start_ms and round(report.cold_start_ms, 3),
    }


def _lanes(
    results: Mapping[int, RankResult],
) -> dict[int, tuple[tuple[int, str, float, float], ...]]:
    """Lanes of all ranks on one clock; CLOCK_MONOTONIC is the same for all processes of a host."""
    zero = min((lane[2] for r in results.values() for lane in r.lanes), default=0.0)
    return {
        rank: tuple((step, what, a - zero, b - zero) for step, what, a, b in result.lanes)
        for rank, result in results.items()
    }


@lru_cache(maxsize=1)
def _versions() -> dict[str, str]:
    try:
        own = version("usp-viz")
    except PackageNotFoundError:
        own = "source"
    return {"usp_viz": own, "python": platform.python_version(), "numpy": version("numpy")}


class _Answers:
    """The last few references: three policies of one scenario share theirs."""

    KEPT_BYTES = 256_000_000

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: OrderedDict[tuple[Any, ...], Answer] = OrderedDict()

    def __call__(self, scenario: Scenario) -> Answer:
        key = Answer.key(scenario)
        with self._lock:
            if key not in self._kept:
                self._kept[key] = Answer.of(scenario)
            self._kept.move_to_end(key)
            while sum(a.out.nbytes for a in self._kept.values()) > self.KEPT_BYTES:
                if len(self._kept) == 1:
                    break
                self._kept.popitem(last=False)
            return self._kept[key]


answer_of = _Answers()
"""The reference of a scenario, from the last few if it is among them."""

__all__ = ["Accuracy", "Run", "answer_of", "check_limits", "job", "judge", "run"]
