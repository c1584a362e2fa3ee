"""What each control offers for a scenario: legal values, and why another one is not.

A value that is only legal together with another change (the list of shards has to have an entry
for each rank) is offered with that change, and says so.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, pairwise
from typing import Any, get_args

from usp_viz.errors import InvalidScenario
from usp_viz.runtime.limits import limits
from usp_viz.scenario import (
    ENGINES,
    RELEASES,
    AttentionSpec,
    MeshSpec,
    RunSpec,
    Scenario,
    TensorSpec,
    TokenSpec,
)

Option = dict[str, Any]
DEGREES = (1, 2, 4, 8, 16)


def offers(scenario: Scenario) -> dict[str, list[Option]]:
    """Options by dotted key: ``value``, and ``set`` with ``note``, or ``why`` it is impossible."""
    s = scenario
    heads = s.tensors.heads
    return {
        "mesh.ulysses": list(_degrees(s, "mesh.ulysses", s.mesh.ulysses, s.mesh.ring)),
        "mesh.ring": list(_degrees(s, "mesh.ring", s.mesh.ring, s.mesh.ulysses)),
        "mesh.order": _words(s, "mesh.order", MeshSpec, "order"),
        "tensors.kv_heads": [
            option
            for g in _some([g for g in range(1, heads + 1) if heads % g == 0], s.kv_heads)
            for option in _tried(s, "tensors.kv_heads", g)
        ],
        "tensors.dtype": _words(s, "tensors.dtype", TensorSpec, "dtype"),
        "tensors.values": [
            option
            for word in ("normal", "constant", "ramp", "outlier")
            for option in _tried(s, "tensors.values", word)
        ],
        "tokens.shards": [
            *_tried(s, "tokens.shards", "even"),
            *_tried(s, "tokens.shards", "auto"),
            *_tried(s, "tokens.shards", list(s.shards)),
        ],
        "tokens.layout": _words(s, "tokens.layout", TokenSpec, "layout"),
        "attention.layer": _words(s, "attention.layer", AttentionSpec, "layer"),
        "attention.backend": _words(s, "attention.backend", AttentionSpec, "backend"),
        "attention.sglang_backend": _words(
            s, "attention.sglang_backend", AttentionSpec, "sglang_backend"
        ),
        "attention.skip_kv": _words(s, "attention.skip_kv", AttentionSpec, "skip_kv"),
        "attention.seq_lens": [
            option
            for word in ("auto", "always", "never")
            for option in _tried(s, "attention.seq_lens", word)
        ],
        "release": [{"value": release} for release in RELEASES],
        "engine": [{"value": e} if e == "builtin" else _missing(e) for e in ENGINES],
        "run.device": _words(s, "run.device", RunSpec, "device"),
    }


def resplit(lengths: Sequence[int], parts: int) -> tuple[int, ...]:
    """The same rows in another number of shards, long where they were long.

    >>> resplit((15, 9, 11, 13), 2), resplit((4, 0), 4)
    ((24, 24), (2, 2, 0, 0))
    """
    ends = (0, *accumulate(lengths))
    borders = []
    for n in range(parts + 1):
        whole, rest = divmod(n * len(lengths), parts)
        more = lengths[whole] * rest // parts if rest else 0
        borders.append(ends[whole] + more)
    return tuple(b - a for a, b in pairwise(borders))


def _missing(engine: str) -> Option:
    return {"value": engine, "why": "not installed on this server"}


def _words(s: Scenario, key: str, part: Any, field: str) -> list[Option]:
    words: tuple[Any, ...] = get_args(part.model_fields[field].annotation)
    return [option for word in words for option in _tried(s, key, word)]


def _some(values: list[int], current: int) -> Iterable[int]:
    """All while they are few, else the powers of two, the ends and the current one."""
    if len(values) <= 8:
        return values
    return [v for v in values if v & (v - 1) == 0 or v in (values[-1], current)]


def _degrees(s: Scenario, key: str, current: int, other: int) -> Iterator[Option]:
    cap = limits().max_ranks
    for n in sorted({*DEGREES, current}):
        if n * other > cap and n != current:
            why = f"{n} × {other} = {n * other} ranks; this server runs at most {cap}"
            yield {"value": n, "why": why}
        else:
            yield from _tried(s, key, n)


def _tried(s: Scenario, key: str, value: Any) -> Iterator[Option]:
    """One option: as it is, with even-handed shards, or with its reason why not."""
    try:
        s.set({key: value})
        yield {"value": value}
        return
    except InvalidScenario as error:
        problem = error
    for more, note in _companions(s, key, value):
        try:
            s.set({key: value, **more})
        except InvalidScenario:
            continue
        yield {"value": value, "set": {key: value, **more}, "note": note}
        return
    yield {"value": value, "why": str(problem)}


def _companions(s: Scenario, key: str, value: Any) -> Iterator[tuple[dict[str, Any], str]]:
    if key == "tokens.layout" and s.tokens.shards != "even":
        yield {"tokens.shards": "even"}, "also sets shards: even"
    elif key in ("mesh.ulysses", "mesh.ring"):
        if isinstance(s.tokens.shards, tuple):
            other = s.mesh.ring if key == "mesh.ulysses" else s.mesh.ulysses
            again = list(resplit(s.tokens.shards, value * other))
            yield {"tokens.shards": again}, f"the list of shards becomes {again}"
        yield {"tokens.shards": "auto"}, "also sets shards: auto"
        if s.tokens.layout != "contiguous":
            more = {"tokens.shards": "auto", "tokens.layout": "contiguous"}
            yield more, "also sets layout: contiguous, shards: auto"
