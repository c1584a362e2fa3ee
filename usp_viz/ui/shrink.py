"""From a scenario too large to run here to the smallest that meets the same rules.

"The same rules" is what `usp_viz.rules` says of it, for all policies: how the call ends, by which
rule, or which rows come back wrong. "Keeps its shape": a degree, a batch or a kind of row that was
there is still there, uneven shards stay uneven, and lengths keep their proportions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from usp_viz import rules
from usp_viz.errors import InvalidScenario
from usp_viz.scenario import (
    POLICIES,
    GapPad,
    KeyMask,
    MaskSpec,
    PrefixLM,
    Scenario,
    TailPad,
    Window,
)
from usp_viz.ui.legal import resplit

Fits = Callable[[Scenario], bool]
ROWS_PER_RANK = 6
"""Rows that a picture needs on each rank to show unevenness."""


@dataclass(frozen=True, slots=True)
class Shrunk:
    """A smaller scenario.

    Attributes:
        scenario: It.
        said: What was made smaller, a phrase each.
    """

    scenario: Scenario
    said: tuple[str, ...]


def shrink(scenario: Scenario, fits: Fits) -> Shrunk | None:
    """The smallest scenario that ends in the same way; None if none is found that fits.

    Args:
        scenario: What was asked for.
        fits: Whether a scenario can be run here. What fits is returned as it is.
    """
    if fits(scenario):
        return Shrunk(scenario, ())
    wanted = fate(scenario)
    for candidate in _candidates(scenario):
        if candidate.hash != scenario.hash and fits(candidate) and fate(candidate) == wanted:
            return Shrunk(candidate, tuple(_said(scenario, candidate)))
    return None


def fate(scenario: Scenario) -> tuple[Any, ...]:
    """What the rules say of a scenario under each policy."""
    found: list[Any] = []
    for policy in POLICIES:
        end = rules.ending(scenario, policy=policy)
        warned = {warning.id for warning in rules.warnings(scenario, policy)}
        found.append((end and (type(end), end.rule), frozenset(warned)))
    return tuple(found)


def _candidates(s: Scenario) -> Iterator[Scenario]:
    """Smaller ones, the smallest first: degrees, then batch and heads, then rows."""
    u, r = s.mesh.ulysses, s.mesh.ring
    meshes = [(a, b) for a in _down(u) for b in _down(r)]
    for ulysses, ring in sorted(meshes, key=lambda mesh: (mesh[0] * mesh[1], -mesh[0])):
        for batch in _few(s.tensors.batch):
            for heads, kv_heads in _heads(s, ulysses):
                for rows in _rows(s, ulysses, ring):
                    made = _made(s, ulysses, ring, batch, heads, kv_heads, rows)
                    if made is not None:
                        yield made


def _down(degree: int) -> list[int]:
    """Degrees to try: one stays one, more stays more."""
    return [1] if degree == 1 else [n for n in (2, 3, 4, 8, 16, degree) if n <= degree]


def _few(batch: int) -> list[int]:
    return sorted({min(batch, 2), batch})


def _heads(s: Scenario, ulysses: int) -> Iterator[tuple[int, int]]:
    """(H, G), with H % U, G % U and G < H as they were where that is possible."""
    h, g, u = s.tensors.heads, s.kv_heads, s.mesh.ulysses

    def kind(heads: int, kv_heads: int, degree: int) -> tuple[bool, ...]:
        uneven = heads % degree > 0, kv_heads % degree > 0
        return *uneven, kv_heads < heads, kv_heads == 1, kv_heads < degree

    wanted = kind(h, g, u)
    pairs = [(a, b) for a in (*range(1, min(h, 32) + 1), h) for b in range(1, a + 1) if a % b == 0]
    found = [pair for pair in pairs if pair[0] >= min(h, 2) and kind(*pair, ulysses) == wanted]
    yield from sorted(set(found))[:3]
    yield h, g


def _rows(s: Scenario, ulysses: int, ring: int) -> Iterator[int]:
    """Totals to try: few rows a rank, in the divisibility that the layout needs."""
    ranks, total = ulysses * ring, s.tokens.total
    rest = total % s.mesh.ranks
    for each in (ROWS_PER_RANK, 12, 24, 64):
        rows = ranks * each
        if s.tokens.shards == "auto" and rest:
            rows += max(1, rest * ranks // s.mesh.ranks)
        if rows < total:
            yield rows
    yield total


def _made(
    s: Scenario, ulysses: int, ring: int, batch: int, heads: int, kv_heads: int, rows: int
) -> Scenario | None:
    ratio = Fraction(rows, s.tokens.total)
    tokens, attention = s.tokens, s.attention
    sets: dict[str, Any] = {
        "mesh.ulysses": ulysses,
        "mesh.ring": ring,
        "tensors.batch": batch,
        "tensors.heads": heads,
        "tensors.head_dim": min(s.tensors.head_dim, 32),
        "tokens.total": rows,
        "expect": None,
    }
    if s.tensors.kv_heads is not None:
        sets["tensors.kv_heads"] = kv_heads
    if isinstance(tokens.shards, tuple):
        sets["tokens.shards"] = _scaled(resplit(tokens.shards, ulysses * ring), rows)
    if isinstance(attention.seq_lens, tuple):
        if attention.seq_lens == tokens.documents:
            sets["attention.seq_lens"] = _scaled(attention.seq_lens, rows)
        elif attention.seq_lens != s.shards:
            return None
        else:
            sets["attention.seq_lens"] = _scaled(resplit(s.shards, ulysses * ring), rows)
    if tokens.documents:
        sets["tokens.documents"] = _scaled(tokens.documents[:8], rows)
        if sets.get("attention.seq_lens") and attention.seq_lens == tokens.documents:
            sets["attention.seq_lens"] = sets["tokens.documents"]
    for name in ("prefix", "suffix", "kv_prefix"):
        length = getattr(tokens.replicated, name)
        if length:
            sets[f"tokens.replicated.{name}"] = _length(length, ratio)
    if attention.mask:
        sets["attention.mask"] = [_mask(m, ratio, rows, batch) for m in attention.mask]
    if s.run.timeout_s > 60:
        sets["run.timeout_s"] = 60.0
    try:
        return s.set(sets)
    except InvalidScenario:
        return None


def _length(length: int, ratio: Fraction) -> int:
    return max(1, round(length * ratio)) if length else 0


def _scaled(lengths: Sequence[int], total: int) -> list[int]:
    """In the same proportions, adding up to `total`; what differed still differs."""
    whole = sum(lengths) or 1
    result = [max(1, length * total // whole) if length else 0 for length in lengths]
    if len(set(lengths)) > 1 and len(set(result)) == 1 and result[0] > 1:
        result[0] += 1
        result[-1] -= 1
    spare = total - sum(result)
    for n in sorted(range(len(result)), key=lambda n: -lengths[n]):
        if spare == 0:
            break
        step = spare if spare > 0 else max(spare, 1 - result[n])
        if result[n]:
            result[n] += step
            spare -= step
    return result


def _mask(mask: MaskSpec, ratio: Fraction, rows: int, batch: int) -> dict[str, Any]:
    data = mask.model_dump(mode="json")
    if isinstance(mask, KeyMask):
        holes: list[list[int]] = []
        for a, b in sorted(mask.key.holes)[:4]:
            start = max(int(a * ratio), holes[-1][1] if holes else 0)
            holes.append([start, max(start + 1, int(b * ratio))])
        valid = [_part(n, ratio, rows) for n in mask.key.valid[:batch]]
        data["key"] = {"valid": valid, "holes": [h for h in holes if h[1] <= rows]}
    elif isinstance(mask, TailPad):
        data["tail_pad"]["start"] = _part(mask.tail_pad.start, ratio, rows)
    elif isinstance(mask, GapPad):
        start = int(mask.gap_pad.start * ratio)
        end = start + _length(mask.gap_pad.end - mask.gap_pad.start, ratio)
        data["gap_pad"] = {"start": start, "end": min(rows, end)}
    elif isinstance(mask, PrefixLM):
        data["prefix_lm"]["prefix"] = _part(mask.prefix_lm.prefix, ratio, rows)
    elif isinstance(mask, Window):
        sides = {"left": mask.window.left, "right": mask.window.right}
        data["window"] = {k: v and _length(v, ratio) for k, v in sides.items()}
    return data


def _part(length: int, ratio: Fraction, rows: int) -> int:
    """A length inside the rows: neither none nor all of them unless it was so."""
    whole = length * ratio == rows
    return rows if whole else min(max(0, rows - 1), _length(length, ratio))


def _said(before: Scenario, after: Scenario) -> Iterator[str]:
    pairs = (
        ("U", before.mesh.ulysses, after.mesh.ulysses),
        ("R", before.mesh.ring, after.mesh.ring),
        ("batch", before.tensors.batch, after.tensors.batch),
        ("heads", before.tensors.heads, after.tensors.heads),
        *(
            []
            if before.tensors.kv_heads is None
            else [("KV heads", before.kv_heads, after.kv_heads)]
        ),
        ("head dim", before.tensors.head_dim, after.tensors.head_dim),
        ("tokens", before.tokens.total, after.tokens.total),
        ("documents", len(before.documents), len(after.documents)),
    )
    for name, old, new in pairs:
        if old != new:
            yield f"{name} {old:,} → {new:,}"
