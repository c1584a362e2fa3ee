"""Whose run the ranks are at, so that a visitor can cancel their own and nobody else's."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

KEPT = 1000
"""Tickets that were cancelled before their turn came, and may never be called."""


class Desk:
    """Tickets of runs: one is served at a time, any may be cancelled by who holds it."""

    def __init__(self, stop: Callable[[], None]) -> None:
        """A desk.

        Args:
            stop: Ends the run at hand, if there is one; for another thread to call.
        """
        self._stop = stop
        self._guard = threading.Lock()
        self._serving: str | None = None
        self._done = threading.Event()
        self._cancelled: dict[str, None] = {}

    @contextmanager
    def serve(self, ticket: str) -> Iterator[None]:
        """While the ranks work for this ticket."""
        with self._guard:
            self._serving = ticket
            self._done.clear()
        try:
            yield
        finally:
            with self._guard:
                self._serving = None
                self._cancelled.pop(ticket, None)
                self._done.set()

    def is_cancelled(self, ticket: str) -> bool:
        """Whether nothing more should be run for it."""
        with self._guard:
            return ticket in self._cancelled

    def cancel(self, ticket: str, patience: float = 0.0) -> bool:
        """End what is run for this ticket, or keep it from starting; returns whether it ran.

        A run that is about to start hears nothing yet, so it is told again until it has ended.

        Args:
            ticket: Whose run.
            patience: Seconds that the run at hand may still take. Ranks that are stopped have to
                be started again, which takes longer than most runs.
        """
        with self._guard:
            self._cancelled[ticket] = None
            while len(self._cancelled) > KEPT:
                del self._cancelled[next(iter(self._cancelled))]
        ran = False
        if self._is_serving(ticket):
            self._done.wait(patience)
        for _ in range(100):
            with self._guard:
                if self._serving != ticket:
                    return ran
                ran = True
                self._stop()
            if self._done.wait(0.1):
                return ran
        return ran

    def _is_serving(self, ticket: str) -> bool:
        with self._guard:
            return self._serving == ticket
