"""Counter-based randomness: the same bits for the same (seed, counter) on any machine or rank.

A counter-based generator lets each rank make exactly its own rows, needs no torch, and does not
depend on how often anybody drew before. The mixer is splitmix64's finaliser (Steele, Lea, Flood,
OOPSLA 2014).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Bits = NDArray[np.uint64]

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def mix(counter: Bits) -> Bits:
    """splitmix64 of each counter; overflow wraps, as it should."""
    z = counter * _GOLDEN + _GOLDEN
    z ^= z >> np.uint64(30)
    z *= np.uint64(0xBF58476D1CE4E5B9)
    z ^= z >> np.uint64(27)
    z *= np.uint64(0x94D049BB133111EB)
    z ^= z >> np.uint64(31)
    return z


def stream(seed: int, number: int) -> np.uint64:
    """The key of an independent stream of `seed`."""
    key = mix(np.array([seed % 2**64], np.uint64)) + np.uint64(number)
    return np.uint64(mix(key)[0])
