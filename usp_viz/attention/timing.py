"""The log of a real pass: when each rank did what, and how many bytes really left it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from usp_viz.attention.comm import Received


class TimeRecorder:
    """Keeps lanes and byte counts; looks into no payload.

    Args:
        emit: Told at once of every stage entered, so that a hang leaves a trace.
    """

    def __init__(self, emit: Callable[[Any], None]) -> None:
        self.lanes: list[tuple[int, str, float, float]] = []
        self.arrived: list[tuple[int, int, int]] = []
        self._emit = emit

    def entering(self, step: int, stage: str, op: str) -> None:
        """Tell where this rank is."""
        self._emit(("at", step, stage, op))

    def received(self, event: Received) -> None:
        """Note (step, src, bytes)."""
        size = event.payload.numel() * event.payload.element_size()
        self.arrived.append((event.step, event.src, size))

    def lane(self, step: int, what: str, start: float, stop: float) -> None:
        """Note what the time went into."""
        self.lanes.append((step, what, start, stop))
