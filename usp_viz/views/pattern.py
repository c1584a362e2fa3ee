"""Who may see whom, at the resolution of a picture."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from usp_viz.mask import Visibility

NONE, SOME, ALL = 0, 1, 2
MAX_BINS = 256
MAX_DENSE_BINS = 192
_SAMPLES = 16
"""Rows looked at in a bin that holds more; the ends of what they see move evenly between them."""


def bins(visibility: Visibility) -> list[int]:
    """Borders of the ledger's rows and columns: one row each while they are few."""
    limit = MAX_DENSE_BINS if visibility.dense else MAX_BINS
    size = visibility.order.size
    count = min(size, limit)
    return [n * size // count for n in range(count + 1)]


def pattern(visibility: Visibility, borders: list[int]) -> NDArray[np.int8]:
    """int8 [bins, bins]: `NONE`, `SOME` or `ALL` of the pairs are allowed and scored.

    All batch rows count: a pair that only some of them allow is `SOME`.
    """
    keys = _sampled(borders)
    key_bin = np.searchsorted(borders, keys, side="right") - 1
    per_bin = np.bincount(key_bin, minlength=len(borders) - 1)
    starts = np.concatenate(([0], np.cumsum(per_bin)[:-1]))
    result = np.zeros((len(borders) - 1, len(borders) - 1), np.int8)
    for n in range(len(borders) - 1):
        queries = keys[key_bin == n]
        queries = queries[queries >= visibility.order.kv_prefix]  # the kv_prefix asks nothing
        if not queries.size:
            continue
        some = np.zeros(len(keys), np.bool_)
        every = np.ones(len(keys), np.bool_)
        for row, _ in visibility.patterns:
            allowed = visibility.allowed(queries, keys, row)
            allowed &= visibility.is_valid(queries, row)[:, None]
            some |= allowed.any(0)
            every &= allowed.all(0)
        has_some = np.logical_or.reduceat(some, starts)
        has_all = np.logical_and.reduceat(every, starts)
        result[n] = np.where(has_all, ALL, np.where(has_some, SOME, NONE))
    return result


def _sampled(borders: list[int]) -> NDArray[np.int64]:
    parts: list[NDArray[np.int64]] = []
    for start, stop in pairwise(borders):
        count = min(stop - start, _SAMPLES)
        parts.append(np.unique(np.linspace(start, stop - 1, count).astype(np.int64)))
    return np.concatenate(parts)
