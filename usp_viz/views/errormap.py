"""Where the outputs are wrong: the error of every token and head, rank by rank.

A map has a column for each row of each rank's output, in the order in which the rank holds it, and
a cell for each query head: the largest |error| over batch rows and head_dim. Ranks stand in
sequence order, so that with contiguous shards the columns are the sequence. Errors are kept to a
tenth of a decade, as one byte a cell; on which side of the tolerance they lie stays exact.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from usp_viz.layout import Layout
from usp_viz.mask import Visibility
from usp_viz.mesh import Mesh
from usp_viz.runtime.accuracy import Answer, own_rows
from usp_viz.runtime.result import Run

LOWEST, PER_DECADE = -18, 10
"""Code c stands for errors up to 10 ** (LOWEST + (c - 1) / PER_DECADE)."""
UNSCORED, ZERO, MOST, NOT_FINITE = 0, 1, 254, 255
CELLS = 12_288
"""Beyond this many cells a column stands for several rows, and shows the worst of them."""
COLUMNS = 96
"""At least so many columns, however many heads there are."""
LARGEST = 8

Codes = NDArray[np.uint8]


@dataclass(frozen=True, slots=True, eq=False)
class Block:
    """One rank's columns.

    Attributes:
        rank: Whose they are.
        rows: Row ids, int64 [L], in tensor order.
        scored: bool [L]: not padding in every batch row.
        errors: float64 [L, H]; NaN and infinities stay.
    """

    rank: int
    rows: NDArray[np.int64]
    scored: NDArray[np.bool_]
    errors: NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class ErrorMap:
    """Errors of a run that returned outputs.

    Attributes:
        blocks: One a rank, in sequence order.
        tolerance: What an error may be.
        borders: Row ids with which documents begin, but the first; an empty one repeats a border.
        sequence: Row ids [start, stop) of the S rows; all others are replicated.
    """

    blocks: tuple[Block, ...]
    tolerance: float
    borders: tuple[int, ...]
    sequence: tuple[int, int]

    @staticmethod
    def of(run: Run, answer: Answer) -> ErrorMap:
        """The map of a run whose ranks all returned outputs.

        Raises:
            ValueError: The run has no outputs to compare.
        """
        if run.accuracy is None:
            raise ValueError(f"outcome {run.outcome}: a map needs the output of every rank")
        order, mesh = Layout.of(run.scenario).order, Mesh.of(run.scenario)
        ranks = sorted(run.outs, key=mesh.position)
        ends = np.cumsum(run.scenario.documents)[:-1] + order.start
        return ErrorMap(
            tuple(_block(run, answer, rank) for rank in ranks),
            run.accuracy.tolerance,
            tuple(int(end) for end in ends if end < order.stop),
            (order.start, order.stop),
        )

    def largest(self, count: int = LARGEST) -> list[dict[str, Any]]:
        """The worst cells, worst first: row, head, rank, value. What is no number comes first."""
        found: list[tuple[float, int, int, int, float]] = []
        for block in self.blocks:
            rows = np.flatnonzero(block.scored)
            if not rows.size:
                continue
            flat = block.errors[rows].ravel()
            order = np.where(np.isfinite(flat), flat, np.inf)
            heads = block.errors.shape[1]
            for at in np.argsort(-order, kind="stable")[:count].tolist():
                row, head = divmod(at, heads)
                place = (int(block.rows[rows[row]]), head, block.rank)
                found.append((-float(order[at]), *place, float(flat[at])))
        found.sort(key=lambda item: item[:4])
        return [
            {"row": row, "head": head, "rank": rank, "value": value}
            for _, row, head, rank, value in found[:count]
        ]

    def to_json(self) -> dict[str, Any]:
        """What the page draws; ``codes`` is base64, column after column, a byte a head."""
        heads = self.blocks[0].errors.shape[1] if self.blocks else 0
        total = sum(len(block.rows) for block in self.blocks)
        most = max(COLUMNS, CELLS // max(heads, 1))
        size = max(1, -(-total // most))
        limit = int(_codes(np.asarray([self.tolerance]), np.inf)[0])
        coded = [_binned(block, size, self.tolerance, limit) for block in self.blocks]
        text = base64.b64encode(b"".join(codes.tobytes() for codes in coded)).decode()
        return {
            "heads": heads,
            "tolerance": self.tolerance,
            "lowest": LOWEST,
            "per_decade": PER_DECADE,
            "limit": limit,
            "rows_per_column": size,
            "blocks": [
                {"rank": block.rank, "columns": len(codes), "rows": list(_runs(block.rows))}
                for block, codes in zip(self.blocks, coded, strict=True)
            ],
            "borders": list(self.borders),
            "sequence": list(self.sequence),
            "codes": text,
            "largest": self.largest(),
        }


def _block(run: Run, answer: Answer, rank: int) -> Block:
    rows, visibility = own_rows(run.scenario, rank), Visibility.of(run.scenario)
    out = run.outs[rank]
    errors = np.zeros((len(rows), out.shape[2]))
    scored = np.zeros(len(rows), np.bool_)
    for b in range(out.shape[0]):
        valid = visibility.is_valid(rows, b)
        delta = np.abs(out[b].astype(np.float64) - answer.out[b, rows])
        here = delta.max(axis=2, initial=0.0)
        here[~valid] = 0.0
        errors = np.maximum(errors, here)  # NaN wins
        scored |= valid
    return Block(rank, rows, scored, errors)


def _codes(errors: NDArray[np.float64], tolerance: float, limit: int = NOT_FINITE) -> Codes:
    """A byte an error, rounded up; never to the wrong side of the tolerance."""
    finite = np.isfinite(errors)
    safe = np.where(finite & (errors > 0), errors, 10.0**LOWEST)
    codes = np.ceil((np.log10(safe) - LOWEST) * PER_DECADE - 1e-9) + ZERO
    codes = np.where(errors > tolerance, np.maximum(codes, limit + 1), codes)
    return np.where(finite, np.clip(codes, ZERO, MOST), NOT_FINITE).astype(np.uint8)


def _binned(block: Block, size: int, tolerance: float, limit: int) -> Codes:
    """uint8 [columns, H]: the worst of `size` neighbouring rows."""
    codes = _codes(block.errors, tolerance, limit)
    codes[~block.scored] = UNSCORED
    if size == 1 or not len(codes):
        return codes
    return np.maximum.reduceat(codes, np.arange(0, len(codes), size), axis=0)


def _runs(rows: NDArray[np.int64]) -> Iterator[list[int]]:
    """Row ids as [start, how many, step], in their order."""
    at = 0
    while at < len(rows):
        step = int(rows[at + 1] - rows[at]) if at + 1 < len(rows) else 1
        stop = at + 1
        while stop < len(rows) and rows[stop] - rows[stop - 1] == step:
            stop += 1
        yield [int(rows[at]), stop - at, step]
        at = stop
