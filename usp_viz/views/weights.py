"""How much of each rank's softmax falls on the keys of each hop: what log-sum-exp weighs by.

Worked out from the scenario's own Q and K by the definition of the masks, in float64, with numpy.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from usp_viz.attention.inputs import make
from usp_viz.layout import Ids, Spans, ids
from usp_viz.mask import Visibility
from usp_viz.scenario import Scenario
from usp_viz.trace import Event

MAX_CELLS = 4_000_000
"""Above this many (batch row, head, query, key) cells pictures weigh hops by their pairs."""


class Softmax:
    """The whole softmax of a small scenario, float64 [B, H, W, W]; zeros where nothing is seen."""

    def __init__(self, scenario: Scenario, visibility: Visibility) -> None:
        size = visibility.order.size
        every = ids((range(size),))
        q = make(scenario, "q", every).astype(np.float64).transpose(0, 2, 1, 3)
        k = make(scenario, "k", every).astype(np.float64).transpose(0, 2, 1, 3)
        k = np.repeat(k, scenario.tensors.heads // scenario.kv_heads, axis=1)
        scores = q @ k.swapaxes(2, 3) * scenario.tensors.head_dim**-0.5
        for row in range(scenario.tensors.batch):
            allowed = visibility.allowed(every, every, row)
            allowed &= visibility.is_valid(every, row)[:, None]
            scores[row][:, ~allowed] = -np.inf
        top = scores.max(-1, keepdims=True)
        top[np.isneginf(top)] = 0.0
        weights = np.exp(scores - top)
        total = weights.sum(-1, keepdims=True)
        self.weights: NDArray[np.float64] = weights / np.where(total == 0.0, 1.0, total)

    def share(self, event: Event, queries: Spans) -> float:
        """What an attend's keys have of the softmax of a rank's `queries`, 0 … 1, on average."""
        own = self.weights[:, event.heads[0] : event.heads[1]]
        scored = int((own[:, :, _ids(queries)].sum(-1) > 0).sum())
        met = own[:, :, _ids(event.rows)][..., _ids(event.keys)]
        return float(met.sum()) / scored if scored else 0.0


def softmax(scenario: Scenario, visibility: Visibility) -> Softmax | None:
    """The softmax, or None where it would be large."""
    size = visibility.order.size
    cells = scenario.tensors.batch * scenario.tensors.heads * size * size
    return Softmax(scenario, visibility) if cells <= MAX_CELLS else None


def _ids(spans: Spans) -> Ids:
    def runs() -> Iterator[range]:
        for start, stop in spans:
            yield range(start, stop)

    return ids(tuple(runs()))
