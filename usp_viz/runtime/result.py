"""A run: the recorded trace, the outcome, and everything needed to believe it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from numpy.typing import NDArray

from usp_viz.errors import InvalidScenario, MissingRequirement
from usp_viz.ledger import Pairs
from usp_viz.runtime.accuracy import Accuracy
from usp_viz.scenario import Scenario
from usp_viz.trace import Difference, Trace

RESULT_VERSION = 1
Outcome = Literal["verified", "wrong", "refused", "invalid", "crashed", "timeout"]
EXIT_CODES: dict[str, int] = {
    "verified": 0,
    "wrong": 1,
    "invalid": 2,
    "refused": 3,
    "crashed": 5,
    "timeout": 5,
}


@dataclass(frozen=True, slots=True)
class Where:
    """How one rank of a failed run ended, and what it was doing."""

    rank: int
    status: str
    step: int | None
    stage: str
    op: str
    message: str

    def __str__(self) -> str:
        return f"rank {self.rank} {self.ending}"

    @property
    def ending(self) -> str:
        """How it ended, without saying who."""
        doing = f"in {self.op}, step {self.step} ({self.stage})" if self.op else "before any step"
        return f"{self.status} {doing}" + (f": {self.message}" if self.message else "")


@dataclass(frozen=True, slots=True)
class Problem:
    """Why a run did not end in numbers.

    Attributes:
        cls, message: The exception, word for word.
        ranks: Who raised it.
        rule: Id of the rule that refused; None for crashes.
        details: What the rule says: release, source, because, fixes.
        where: How each rank ended.
    """

    cls: str
    message: str
    ranks: tuple[int, ...]
    rule: str | None = None
    details: Mapping[str, Any] = field(default_factory=dict[str, Any])
    where: tuple[Where, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """The `error` object of a result."""
        data: dict[str, Any] = {"class": self.cls, "message": self.message, "rule": self.rule}
        data |= self.details
        data["ranks"] = list(self.ranks)
        if self.where:
            data["where"] = [asdict(where) for where in self.where]
        return data


@dataclass(frozen=True, slots=True, eq=False)
class Run:
    """One scenario under one policy, run on real ranks.

    Attributes:
        scenario: As asked, normalised by validation.
        outcome: verified, wrong, refused, crashed or timeout; see docs/formats.md.
        backend, device: What computed.
        accuracy, pairs: None unless every rank returned an output.
        problem: Why there is no output.
        trace: What the ranks recorded, as far as they got.
        differences: Where the trace departs from the prediction; empty when they agree.
        warnings: (id, text) of known silent traps.
        outs: Each rank's output [B, L, H, D].
        lanes: Each rank's (step, what, start, stop), in seconds from the first of all.
        peak_bytes: The most tensor bytes that each rank held at once; empty unless asked for.
        timing: wall_ms, attention_ms, cold_start_ms.
        versions: Of what ran.
    """

    scenario: Scenario
    outcome: Outcome
    backend: str
    device: str
    trace: Trace
    differences: tuple[Difference, ...]
    timing: Mapping[str, float | None]
    versions: Mapping[str, str]
    accuracy: Accuracy | None = None
    pairs: Pairs | None = None
    problem: Problem | None = None
    warnings: tuple[tuple[str, str], ...] = ()
    outs: Mapping[int, NDArray[Any]] = field(default_factory=dict[int, NDArray[Any]], repr=False)
    lanes: Mapping[int, tuple[tuple[int, str, float, float], ...]] = field(
        default_factory=dict[int, tuple[tuple[int, str, float, float], ...]], repr=False
    )
    peak_bytes: Mapping[int, int] = field(default_factory=dict[int, int], repr=False)

    @property
    def expectation_met(self) -> bool | None:
        """Whether the file's `expect` holds; None without one."""
        expect = self.scenario.expect
        if expect is None:
            return None
        rule = self.problem.rule if self.problem else None
        return self.outcome == expect.outcome and expect.error in (None, rule)

    @property
    def exit_code(self) -> int:
        """The process exit code this run alone asks for."""
        met = self.expectation_met
        return EXIT_CODES[self.outcome] if met is None else 0 if met else 1

    def to_json(self) -> dict[str, Any]:
        """The result object of docs/formats.md, as ``usp-viz schema result`` describes it."""
        s = self.scenario
        return plain(
            {
                "result_version": RESULT_VERSION,
                "scenario": s.normalised(),
                "scenario_hash": s.hash,
                "policy": s.policy,
                "release": s.release,
                "engine": s.engine,
                "backend": self.backend,
                "device": self.device,
                "world": s.mesh.ranks,
                "outcome": self.outcome,
                "error": self.problem.to_json() if self.problem else None,
                "warnings": [{"id": name, "text": text} for name, text in self.warnings],
                "accuracy": self._accuracy(),
                "pairs": self.pairs.to_json() if self.pairs else None,
                "trace": {
                    "events": sum(1 for _ in self.trace.events()),
                    "hash": self.trace.hash,
                    "matches_prediction": not self.differences,
                    "bytes_sent_per_rank": list(self.trace.bytes_sent_per_rank),
                    "collectives": list(self.trace.collectives),
                },
                "timing": dict(self.timing),
                "versions": dict(self.versions),
            }
        )

    def _accuracy(self) -> dict[str, Any] | None:
        found = self.accuracy
        if found is None:
            return None
        return {
            "max_abs": found.max_abs,
            "rel_l2": found.rel_l2,
            "tolerance": found.tolerance,
            "rows": found.rows,
            "wrong_rows": found.wrong_rows,
            "per_rank": [asdict(rank) for rank in found.per_rank],
        }


def invalid_json(error: InvalidScenario, scenario: Scenario | None = None) -> dict[str, Any]:
    """The result object of something that could not be run, even of a file that is no scenario."""
    return plain(
        {
            "result_version": RESULT_VERSION,
            "scenario": scenario.normalised() if scenario else None,
            "scenario_hash": scenario.hash if scenario else None,
            "outcome": "invalid",
            "error": error.as_json(),
            "warnings": [],
        }
    )


def missing_json(error: MissingRequirement, scenario: Scenario | None = None) -> dict[str, Any]:
    """The result object of something that needs what this machine lacks."""
    return failed_json(error, error.install, scenario) | {"outcome": "invalid"}


def failed_json(error: Exception, limit: str, scenario: Scenario | None) -> dict[str, Any]:
    """The result object of something that ended before it got to the ranks."""
    result = invalid_json(InvalidScenario("", None, limit), scenario)
    said = {"class": type(error).__name__, "message": str(error)}
    return result | {"outcome": "crashed", "error": result["error"] | said}


def plain(value: Any) -> Any:
    """JSON data in which NaN and the infinities are strings."""
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}  # type: ignore[reportUnknownVariableType]
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]  # type: ignore[reportUnknownVariableType]
    return value
