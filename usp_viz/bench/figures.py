"""What a bench says: figures beside their goals."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Figure:
    """One measured figure beside its goal.

    Attributes:
        name: What was measured.
        value: Median.
        unit: ms, s, x (a ratio) …
        goal: As in ``<= 50``; empty where the figure only serves another.
        runs: How many runs the median is over.
        note: Spread, or what it is made of.
    """

    name: str
    value: float
    unit: str
    goal: str
    runs: int
    note: str = ""

    @property
    def met(self) -> bool:
        """Whether the goal is reached."""
        if not self.goal:
            return True
        sign, bound = self.goal.split()
        return self.value >= float(bound) if sign == ">=" else self.value <= float(bound)


@dataclass(frozen=True, slots=True)
class BenchReport:
    """All figures of one bench."""

    figures: tuple[Figure, ...]

    def to_json(self) -> dict[str, Any]:
        """As plain data."""
        return {"figures": [asdict(f) | {"met": f.met} for f in self.figures]}

    def text(self) -> str:
        """A table for a terminal."""
        width = max(len(f.name) for f in self.figures)
        return "\n".join(
            f"{'✓' if f.met else '✗'} {f.name:<{width}}  {f.value:>10.4g} {f.unit:<3} "
            + "; ".join(filter(None, (f.goal and f"goal {f.goal}", f"{f.runs} runs", f.note)))
            for f in self.figures
        )


def progress(text: str) -> None:
    """Say on stderr what is being measured."""
    print(f"bench: {text} …", file=sys.stderr, flush=True)


def median(name: str, values: Sequence[float], unit: str, goal: str) -> Figure:
    """The median of several runs, with their spread."""
    spread = f"{min(values):.4g} … {max(values):.4g}"
    return Figure(name, statistics.median(values), unit, goal, len(values), spread)
