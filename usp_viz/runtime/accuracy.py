"""How far the ranks' outputs are from the float64 reference."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from usp_viz.attention.inputs import make
from usp_viz.attention.reference import reference
from usp_viz.layout import Layout, ids
from usp_viz.mask import Visibility
from usp_viz.mesh import Mesh
from usp_viz.scenario import Scenario

EPSILON = {"float64": 2.0**-53, "float32": 2.0**-24, "float16": 2.0**-24, "bfloat16": 2.0**-24}
"""Rounding of one score, which is computed in float32 at least."""
TOLERANCE = {"float64": 1e-12, "float32": 1e-5, "float16": 5e-3, "bfloat16": 2.5e-2}
"""c of docs/formats.md: |error| <= c · max(1, max |V|)."""


@dataclass(frozen=True, slots=True)
class RankAccuracy:
    """One rank's scored rows."""

    rank: int
    rows: int
    wrong_rows: int
    max_abs: float


@dataclass(frozen=True, slots=True)
class Accuracy:
    """Errors over all scored rows; NaN in a scored row makes `max_abs` NaN and the row wrong."""

    max_abs: float
    rel_l2: float
    tolerance: float
    per_rank: tuple[RankAccuracy, ...]

    @property
    def rows(self) -> int:
        """Scored rows on all ranks: a row counts once per batch row, a replicated one per copy."""
        return sum(rank.rows for rank in self.per_rank)

    @property
    def wrong_rows(self) -> int:
        """Scored rows with an element beyond the tolerance."""
        return sum(rank.wrong_rows for rank in self.per_rank)


@dataclass(frozen=True, slots=True)
class Answer:
    """The reference of a scenario: what policy, mesh and release cannot change.

    Attributes:
        out: float64 [B, W, H, D] over the whole order.
        largest_value: max |V|.
        largest_score: What no |score| exceeds.
    """

    out: NDArray[np.float64]
    largest_value: float
    largest_score: float

    @staticmethod
    def of(scenario: Scenario) -> Answer:
        """Compute it."""
        every = ids((range(Layout.of(scenario).order.size),))
        q, k = (np.linalg.norm(make(scenario, name, every), axis=-1).max() for name in ("q", "k"))
        return Answer(
            reference(scenario),
            float(np.abs(make(scenario, "v", every)).max()),
            float(q * k) * scenario.tensors.head_dim**-0.5,
        )

    def tolerance(self, dtype: str) -> float:
        """What |error| may be.

        A score of size s is off by s·ε, and the weights of the softmax with it: where that is more
        than the dtype's own c (outliers in float32), it is what a right implementation shows.
        """
        c = max(TOLERANCE[dtype], 2 * EPSILON[dtype] * self.largest_score)
        return c * max(1.0, self.largest_value)

    @staticmethod
    def key(scenario: Scenario) -> tuple[Any, ...]:
        """Scenarios with equal keys have equal answers."""
        s = scenario
        return (
            *(s.tensors.batch, s.tensors.heads, s.kv_heads, s.tensors.head_dim, s.tensors.dtype),
            *(s.tensors.values, s.tokens.total, s.documents, s.tokens.replicated),
            *(s.attention.causal, s.attention.mask, s.run.seed),
        )


def own_rows(scenario: Scenario, rank: int) -> NDArray[np.int64]:
    """Row ids of a rank's output, in tensor order."""
    return ids(Layout.of(scenario).queries(Mesh.of(scenario).position(rank)))


def score(scenario: Scenario, answer: Answer, outs: Mapping[int, NDArray[Any]]) -> Accuracy:
    """Compare each rank's output [B, L, H, D] with the reference, scored rows only."""
    visibility = Visibility.of(scenario)
    tolerance = answer.tolerance(scenario.tensors.dtype)
    ranks: list[RankAccuracy] = []
    error_square, reference_square = 0.0, 0.0
    for rank, out in sorted(outs.items()):
        rows = own_rows(scenario, rank)
        scored, wrong, worst = 0, 0, 0.0
        for b in range(scenario.tensors.batch):
            valid = visibility.is_valid(rows, b)
            right = answer.out[b, rows[valid]]
            error = out[b, valid].astype(np.float64) - right
            per_row = np.abs(error).max(axis=(1, 2)) if len(right) else np.zeros(0)
            scored += len(right)
            wrong += int((~(per_row <= tolerance)).sum())
            worst = float(np.maximum(worst, per_row.max())) if len(right) else worst
            error_square += float((error**2).sum())
            reference_square += float((right**2).sum())
        ranks.append(RankAccuracy(rank, scored, wrong, worst))
    worst_of_all = float(np.max([rank.max_abs for rank in ranks], initial=0.0))
    relative = float(np.sqrt(error_square / reference_square)) if reference_square else error_square
    return Accuracy(worst_of_all, relative, tolerance, tuple(ranks))
