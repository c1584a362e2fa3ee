"""Which pairs of a rectangle an attend computed, told from how many they were."""

from __future__ import annotations

from dataclasses import dataclass, field

from usp_viz.layout import Rows, Spans
from usp_viz.mask import Visibility
from usp_viz.trace import Event
from usp_viz.views.packing import runs_of

ALLOWED, FULL, TRIANGLE, UNKNOWN = range(4)
"""What the masks allow; every pair; key index <= query index within the call; none of these."""


@dataclass(frozen=True, slots=True)
class Shapes:
    """Tells shapes; ranks that split heads share a rectangle, which is looked at once."""

    visibility: Visibility
    _allowed: dict[tuple[Spans, Spans], int] = field(default_factory=dict[tuple[Spans, Spans], int])

    def of(self, event: Event) -> int:
        """The shape of an attend, per head."""
        heads = event.heads[1] - event.heads[0]
        rectangle = event.rows, event.keys
        if rectangle not in self._allowed:
            block = self.visibility.block(_runs(event.rows), _runs(event.keys))
            self._allowed[rectangle] = block.pairs
        if event.pairs == heads * self._allowed[rectangle]:
            return ALLOWED
        rows, keys = _count(event.rows), _count(event.keys)
        batch = self.visibility.batch
        if event.pairs == heads * batch * rows * keys:
            return FULL
        triangle = sum(min(n + 1, keys) for n in range(rows))
        return TRIANGLE if event.pairs == heads * batch * triangle else UNKNOWN


def _runs(spans: Spans) -> Rows:
    flat = runs_of(spans)  # a stripe is one run, not a thousand
    starts, counts, steps = flat[::3], flat[1::3], flat[2::3]
    return tuple(range(a, a + n * d, d) for a, n, d in zip(starts, counts, steps, strict=True))


def _count(spans: Spans) -> int:
    return sum(stop - start for start, stop in spans)
