"""What is asked of the ranks, and what became of each of them."""

from __future__ import annotations

import traceback
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from usp_viz.errors import MissingRequirement

PLAIN = (str, int, float, bool, type(None))

Status = Literal["ok", "raised", "died", "hung", "cancelled"]


@dataclass(frozen=True, slots=True)
class Job:
    """A function that every rank calls as ``function(context, payload)``.

    Attributes:
        entry: ``package.module:function``, inside ``usp_viz`` or a module the pool preloads.
        payload: Plain data and numpy arrays; no torch, nothing from ``__main__``.
    """

    entry: str
    payload: Any = None


@dataclass(frozen=True, slots=True)
class Failure:
    """An exception, as text: the object itself never leaves its process.

    Attributes:
        name: Its class, e.g. ``NotImplementedError``.
        bases: Names of all the classes it is an instance of, its own first.
        message: ``str`` of it, word for word.
        source: Where it was raised, e.g. ``layer.py:878``.
        traceback: The whole traceback.
        details: Its attributes that are plain values.
    """

    name: str
    bases: tuple[str, ...]
    message: str
    source: str
    traceback: str
    details: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        """Describe `error`, whatever its own methods do."""
        try:
            message = str(error)
        except Exception as broken:
            message = f"(its message cannot be printed: {type(broken).__name__})"
        try:
            text = "".join(traceback.format_exception(error))
        except Exception:
            text = f"{type(error).__name__}: {message}\n"
        frames = traceback.extract_tb(error.__traceback__)
        return cls(
            name=type(error).__name__,
            bases=tuple(base.__name__ for base in type(error).__mro__[:-1]),
            message=message,
            source=f"{Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else "",
            traceback=text,
            details={
                name: value for name, value in vars(error).items() if isinstance(value, PLAIN)
            },
        )


@dataclass(frozen=True, slots=True)
class RankReport:
    """One rank's part in a run.

    Attributes:
        rank: Its number.
        status: ``ok`` returned · ``raised`` · ``died`` by itself · ``hung`` still busy when the
            run ended, and killed · ``cancelled`` still busy when somebody stopped the run.
        value: What the function returned, if ``ok``.
        failure: What it raised, if ``raised``.
        exit: Exit code of the process if it has ended, negative for a signal (-9: SIGKILL).
        messages: What it emitted, in order; kept whatever happened to it.
        pid: Process id.
        at_ms: When it ended, in ms after the job was sent.
    """

    rank: int
    status: Status
    value: Any = None
    failure: Failure | None = None
    exit: int | None = None
    messages: Sequence[Any] = ()
    pid: int | None = None
    at_ms: float = 0.0

    @property
    def last_message(self) -> Any:
        """How far it came: the last message, or None."""
        return self.messages[-1] if self.messages else None


@dataclass(frozen=True, slots=True)
class RunReport:
    """One run on all ranks.

    Attributes:
        ranks: One report a rank, by rank.
        wall_ms: From sending the job to the last report.
        cold_start_ms: What starting the ranks took before that; None when they stood ready.
    """

    ranks: tuple[RankReport, ...]
    wall_ms: float
    cold_start_ms: float | None = None

    @property
    def ok(self) -> bool:
        """Whether every rank returned."""
        return all(report.status == "ok" for report in self.ranks)

    @property
    def first_failure(self) -> RankReport | None:
        """The likely cause: the rank that died first or, if none did, the one that raised first.

        Deaths come first because peers notice closed connections, and raise, before the death
        itself is known.
        """
        failed = [report for report in self.ranks if report.status in ("died", "raised")]
        return min(failed, key=lambda report: (report.status, report.at_ms), default=None)


def raise_what_is_missing(reports: Iterable[RankReport]) -> None:
    """Raise here the `MissingRequirement` that kept a rank from joining its world, if one did."""
    for report in reports:
        if report.failure and report.failure.name == MissingRequirement.__name__:
            raise MissingRequirement(**report.failure.details)
