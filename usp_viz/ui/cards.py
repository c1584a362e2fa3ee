"""What the page shows of one policy: four plain texts, none of which is ever taken for HTML."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import astuple, dataclass
from typing import TYPE_CHECKING, Any

from usp_viz.views.verdict import MARKS, gist, pairs_text, rank_bars, trace_text

if TYPE_CHECKING:
    from usp_viz.runtime.result import Run

BAR = 8
"""Characters of a rank's bar: three columns have to fit a small laptop."""


@dataclass(frozen=True, slots=True)
class Card:
    """One policy's column.

    Attributes:
        verdict: The outcome, with its mark.
        message: The exception word for word, why, and ways out; or how far off the outputs are.
        ranks: One bar of error a rank; without numbers, how each ended.
        evidence: Pair ledger, trace, warnings, time.
    """

    verdict: str = ""
    message: str = ""
    ranks: str = ""
    evidence: str = ""

    @staticmethod
    def of(run: Run) -> Card:
        """What a run showed."""
        bars = rank_bars(run.accuracy, BAR) if run.accuracy else _ends(run)
        return Card(
            _verdict(run.outcome),
            "\n".join([gist(run), *(_reasons(run.problem.to_json()) if run.problem else ())]),
            "\n".join(bars),
            "\n".join(_evidence(run)),
        )

    @staticmethod
    def of_error(result: Mapping[str, Any]) -> Card:
        """A result that did not get as far as the ranks."""
        error = result["error"]
        return Card(_verdict(result["outcome"]), f"{error['class']}: {error['message']}")

    @staticmethod
    def running() -> Card:
        """While the ranks are at it."""
        return Card("… running")

    def texts(self) -> tuple[str, ...]:
        """The four texts, in the order of the fields."""
        return astuple(self)


def _verdict(outcome: str) -> str:
    return f"{MARKS[outcome]} {outcome.upper()}"


def _reasons(error: Mapping[str, Any]) -> Iterator[str]:
    if error.get("because"):
        yield "\nBecause " + "; ".join(error["because"]) + "."
    for n, fix in enumerate(error.get("fixes", ())):
        yield ("\nWays out:\n" if not n else "") + f"{n + 1}. {fix['title']}"


def _ends(run: Run) -> Iterator[str]:
    """How each rank of a run without numbers ended."""
    if run.problem and run.problem.where:
        yield from map(str, run.problem.where)
    elif run.problem:
        yield from (f"rank {rank} raised it" for rank in run.problem.ranks)


def _evidence(run: Run) -> Iterator[str]:
    if run.pairs is not None:
        yield f"Pairs: {pairs_text(run.pairs)}."
    yield f"{'✓' if not run.differences else '✗'} Trace: {trace_text(run).rstrip('.')}."
    for _, text in run.warnings:
        yield f"Warning: {text}"
    wall, cold = run.timing["wall_ms"], run.timing.get("cold_start_ms")
    started = f", {cold:.0f} ms of it to start the ranks" if cold else ", ranks warm"
    yield f"Took {wall:.0f} ms{started}."
