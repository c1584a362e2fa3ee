"""The judge: softmax attention in float64, one process, block by block, by the masks' definition.

It shares nothing with the path it judges but the inputs: no layout, interval, merge or torch.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from usp_viz.attention.inputs import TENSORS, Floats, make
from usp_viz.layout import Ids, Spans, ids
from usp_viz.mask import Visibility
from usp_viz.scenario import Scenario

BLOCK_CELLS = 4_000_000
"""Scores held at once; bounds the memory, so that S = 16384 needs no S x S matrix."""


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
    heads = np.arange(scenario.tensors.heads)
    step = max(1, BLOCK_CELLS // order.size)
    for batch_rows in _alike(see):
        scored = queries[see.is_valid(queries, int(batch_rows[0]))]
        b, h = (axis.ravel() for axis in np.meshgrid(batch_rows, heads, indexing="ij"))
        for start in range(0, len(scored), step):
            rows = scored[start : start + step]
            allowed = see.allowed(rows, every, int(batch_rows[0]))
            hidden = None if allowed.all() else ~allowed
            at_once = max(1, BLOCK_CELLS // (len(rows) * order.size))
            for n in range(0, len(b), at_once):
                i, j = b[n : n + at_once], h[n : n + at_once]
                keys, values = k[i, :, j // group], v[i, :, j // group]
                scores = (q[i[:, None], rows, j[:, None]] * scale) @ keys.swapaxes(1, 2)
                if hidden is not None:
                    scores[:, hidden] = -np.inf
                top = scores.max(2, keepdims=True)
                top[np.isneginf(top)] = 0.0
                np.exp(scores - top, out=scores)
                total = scores.sum(2, keepdims=True)
                total[total == 0.0] = 1.0
                out[i[:, None], rows, j[:, None]] = (scores @ values) / total
    return out


def _alike(see: Visibility) -> Iterator[Ids]:
    """Batch rows by padding, in which alone they differ."""
    groups: dict[Spans, list[int]] = {}
    for row in range(see.batch):
        groups.setdefault(see.valid_spans(row), []).append(row)
    for rows in groups.values():
        yield np.asarray(rows, np.int64)
