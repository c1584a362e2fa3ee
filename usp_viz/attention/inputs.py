"""Q, K and V of a scenario, the same on every rank, mesh and machine.

Each element depends on the seed, its tensor and its own (batch row, row, head, channel) alone, so
that a rank makes its own rows and nothing else. Values are rounded to the scenario's dtype here,
once, for ranks and reference alike.
"""

from __future__ import annotations

from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from usp_viz.bits import mix, stream
from usp_viz.layout import Ids, Layout
from usp_viz.scenario import Scenario, ValueList

Floats = NDArray[Any]
Name = Literal["q", "k", "v"]
TENSORS: tuple[Name, ...] = get_args(Name)
OUTLIER = 100.0
_STREAMS = {"q": 0, "k": 1, "v": 2}


def make(scenario: Scenario, tensor: Name, rows: Ids) -> Floats:
    """[B, len(rows), H or G, D], rounded to the scenario's dtype.

    float64 for float64; else float32 that holds exactly what float32, float16 or bfloat16 can.
    """
    batch, dim = scenario.tensors.batch, scenario.tensors.head_dim
    heads = scenario.tensors.heads if tensor == "q" else scenario.kv_heads
    values = scenario.tensors.values
    order = Layout.of(scenario).order
    if tensor == "v" and values != "normal" and values != "outlier":
        if isinstance(values, ValueList):
            per_row = np.asarray(values.list, np.float64)[rows]
        else:
            per_row = np.ones(len(rows)) if values == "constant" else rows.astype(np.float64)
        return rounded(np.tile(per_row[None, :, None, None], (batch, 1, heads, dim)), scenario)
    data = _normal(scenario.run.seed, _STREAMS[tensor], rows, batch, heads, dim)
    if values == "outlier":
        if tensor == "v":
            data[:, rows == order.start + order.total // 2] *= OUTLIER
        elif tensor == "k":
            data[..., dim // 2] *= OUTLIER
    return rounded(data, scenario)


def rounded(data: Floats, scenario: Scenario) -> Floats:
    """To the nearest value of the scenario's dtype, ties to even; through float32, as torch."""
    dtype = scenario.tensors.dtype
    if dtype == "float64":
        return np.ascontiguousarray(data, np.float64)
    single = np.ascontiguousarray(data, np.float32)
    if dtype == "float32":
        return single
    if dtype == "float16":
        return single.astype(np.float16).astype(np.float32)
    bits = single.view(np.uint32)
    half = np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    return ((bits + half) & np.uint32(0xFFFF0000)).view(np.float32)


def _normal(seed: int, number: int, rows: Ids, batch: int, heads: int, dim: int) -> Floats:
    """N(0, 1) by Box and Muller from two counter-based uniforms, float64 [B, L, heads, D]."""
    b = np.arange(batch, dtype=np.uint64)[:, None, None, None] << np.uint64(46)
    r = rows.astype(np.uint64)[None, :, None, None] << np.uint64(22)
    h = np.arange(heads, dtype=np.uint64)[None, None, :, None] << np.uint64(10)
    counter = b | r | h | np.arange(dim, dtype=np.uint64)[None, None, None, :]
    one = (mix(counter ^ stream(seed, 16 + 2 * number)) >> np.uint64(11)).astype(np.float64)
    two = (mix(counter ^ stream(seed, 17 + 2 * number)) >> np.uint64(11)).astype(np.float64)
    radius = np.sqrt(-2.0 * np.log((one + 1.0) * 2.0**-53))
    return radius * np.cos((2.0 * np.pi * 2.0**-53) * two)
