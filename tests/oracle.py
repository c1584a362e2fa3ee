"""Who may see whom: the contract's sentences a second time, in plain Python and nothing else."""

from __future__ import annotations

from typing import Any

from usp_viz.scenario import Scenario

WORD = 2**64 - 1


def splitmix64(x: int) -> int:
    """The published generator's output for state `x` (Steele, Lea, Flood 2014), in plain ints."""
    z = (x * 0x9E3779B97F4A7C15 + 0x9E3779B97F4A7C15) & WORD
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & WORD
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & WORD
    return z ^ (z >> 31)


def dense_allows(seed: int, density: float, i: int, j: int) -> bool:
    key = splitmix64((splitmix64(seed) + 3) & WORD)
    return (splitmix64((i << 32 | j) ^ key) >> 11) < density * 2**53


def masks_of(s: Scenario) -> list[dict[str, Any]]:
    masks = s.normalised()["attention"]["mask"]
    return [] if masks == "none" else [masks] if isinstance(masks, dict) else masks


class Oracle:
    """The definition, with nothing of the package but the scenario."""

    def __init__(self, s: Scenario) -> None:
        self.s, self.masks = s, masks_of(s)
        replicated = s.tokens.replicated
        self.start = replicated.kv_prefix + replicated.prefix
        self.stop = self.start + s.tokens.total
        self.size = self.stop + replicated.suffix
        self.document: list[int] = []
        for number, length in enumerate(s.documents):
            self.document += [number] * length

    def row(self, i: int) -> int | None:
        """The S row of a whole-order id; None for replicated rows."""
        return i - self.start if self.start <= i < self.stop else None

    def valid(self, b: int, i: int) -> bool:
        row = self.row(i)
        if row is None:
            return True
        for mask in self.masks:
            if "key" in mask:
                valid = mask["key"]["valid"]
                if row >= valid[b if len(valid) > 1 else 0]:
                    return False
                if any(a <= row < z for a, z in mask["key"]["holes"]):
                    return False
            if "tail_pad" in mask and row >= mask["tail_pad"]["start"]:
                return False
            if "gap_pad" in mask and mask["gap_pad"]["start"] <= row < mask["gap_pad"]["end"]:
                return False
        return True

    def allowed(self, b: int, i: int, j: int) -> bool:
        if self.s.attention.causal and j > i:
            return False
        if not self.valid(b, j):
            return False
        q, k = self.row(i), self.row(j)
        if q is None or k is None:
            return True
        if self.document[q] != self.document[k]:
            return False
        for mask in self.masks:
            if "window" in mask:
                left, right = mask["window"]["left"], mask["window"]["right"]
                if left is not None and k < q - left:
                    return False
                if right is not None and k > q + right:
                    return False
            elif "prefix_lm" in mask and not (k <= q or k < mask["prefix_lm"]["prefix"]):
                return False
            elif "dense" in mask:
                dense = mask["dense"]
                if not dense_allows(dense["seed"], dense["density"], q, k):
                    return False
        return True

    def matrix(self, b: int) -> list[list[bool]]:
        return [[self.allowed(b, i, j) for j in range(self.size)] for i in range(self.size)]
