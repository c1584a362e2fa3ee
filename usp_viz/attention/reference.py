"""The judge: softmax attention in float64, one process, block by block, by the masks' definition.

It shares nothing with the path it judges but the inputs: no layout, interval, merge or torch.
"""

from __future__ import annotations

import numpy as np

from usp_viz.attention.inputs import TENSORS, Floats, make
from usp_viz.layout import ids
from usp_viz.mask import Visibility
from usp_viz.scenario import Scenario

BLOCK_CELLS = 4_000_000
"""Scores held at once, per head; bounds the memory, so that S = 16384 needs no S x S matrix."""


def reference(scenario: Scenario, visibility: Visibility | None = None) -> Floats:
    """The right output, float64 [B, W, H, D], W = all rows of the whole order.

    Rows that are no queries (kv_prefix) and padding queries are zeros; so are queries that see
    nothing. `visibility` replaces the scenario's own, to ask "what if".
    """
    see = visibility or Visibility.of(scenario)
    order = see.order
    every = ids((range(order.size),))
    q, k, v = (make(scenario, name, every).astype(np.float64) for name in TENSORS)
    group = scenario.tensors.heads // scenario.kv_heads
    scale = scenario.tensors.head_dim**-0.5
    out = np.zeros_like(q)
    queries = every[order.kv_prefix :]
    step = max(1, BLOCK_CELLS // order.size)
    for b in range(scenario.tensors.batch):
        scored = queries[see.is_valid(queries, b)]
        for start in range(0, len(scored), step):
            rows = scored[start : start + step]
            allowed = see.allowed(rows, every, b)
            hidden = None if allowed.all() else ~allowed
            for h in range(scenario.tensors.heads):
                scores = (q[b, rows, h] * scale) @ k[b, :, h // group].T
                if hidden is not None:
                    scores[hidden] = -np.inf
                top = scores.max(1, keepdims=True)
                top[np.isneginf(top)] = 0.0
                np.exp(scores - top, out=scores)
                total = scores.sum(1, keepdims=True)
                total[total == 0.0] = 1.0
                out[b, rows, h] = (scores @ v[b, :, h // group]) / total
    return out
