"""Valid scenarios for property tests: small, and with every part of the format in play."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hypothesis import strategies as st

from usp_viz.scenario import RELEASES, Scenario

DTYPES = ("float64", "float32", "bfloat16", "float16")


@st.composite
def scenarios(
    draw: Any,
    *,
    max_ranks: int = 8,
    max_rows: int = 24,
    dtypes: Sequence[str] = DTYPES,
    policies: Sequence[str] = ("extended",),
    dense: bool = True,
) -> Scenario:
    """A valid scenario; shrinks towards one rank, one row and no mask."""
    mapping = draw(mappings(max_ranks, max_rows, dtypes, policies, dense))
    return Scenario.parse(mapping)


@st.composite
def mappings(
    draw: Any,
    max_ranks: int = 8,
    max_rows: int = 24,
    dtypes: Sequence[str] = DTYPES,
    policies: Sequence[str] = ("extended",),
    dense: bool = True,
) -> dict[str, Any]:
    """The same as plain data."""
    ulysses = draw(st.integers(1, max_ranks))
    ring = draw(st.integers(1, max_ranks // ulysses))
    batch = draw(st.integers(1, 3))
    tokens = draw(_tokens(ulysses * ring, ring, max_rows))
    total = tokens["total"]
    masks = draw(st.lists(_masks(total, batch, dense), max_size=3))
    return {
        "mesh": {
            "ulysses": ulysses,
            "ring": ring,
            "order": draw(st.sampled_from(["ulysses-inner", "ring-inner"])),
        },
        "tensors": draw(_tensors(batch, tokens, dtypes)),
        "tokens": tokens,
        "attention": {
            "layer": draw(st.sampled_from(["USPAttention", "UlyssesAttention"])),
            "causal": draw(st.booleans()),
            "mask": draw(_written(masks)),
            "skip_sequence_parallel": draw(st.sampled_from([False] * 7 + [True])),
            "skip_kv": draw(st.sampled_from(["full", "sharded"])),
            "seq_lens": draw(st.sampled_from(["auto", "always", "never"])),
        },
        "policy": draw(st.sampled_from(list(policies))),
        "release": draw(st.sampled_from(list(RELEASES))),
        "run": {"seed": draw(st.integers(0, 2**63 - 1))},
    }


@st.composite
def lengths(draw: Any, total: int, parts: int) -> list[int]:
    """`parts` lengths, zeros among them, that add up to `total`."""
    cuts = sorted(draw(st.lists(st.integers(0, total), min_size=parts - 1, max_size=parts - 1)))
    return [b - a for a, b in zip([0, *cuts], [*cuts, total], strict=True)]


@st.composite
def _tokens(draw: Any, ranks: int, ring: int, max_rows: int) -> dict[str, Any]:
    layout = draw(st.sampled_from(["contiguous"] * 3 + ["zigzag", "striped"]))
    shards: Any = "even"
    if layout == "contiguous":
        shards = draw(st.sampled_from(["even", "auto", "list"]))
    step = 2 * ranks if layout == "zigzag" else ranks if shards == "even" else 1
    total = step * draw(st.integers(1, max(1, max_rows // step)))
    if shards == "list":
        shards = draw(lengths(total, ranks))
    few = st.sampled_from([0, 0, 0, 1, 3])
    return {
        "total": total,
        "layout": layout,
        "shards": shards,
        "documents": draw(
            st.none() | st.integers(1, 5).flatmap(lambda parts: lengths(total, parts))
        ),
        "replicated": {name: draw(few) for name in ("prefix", "suffix", "kv_prefix")},
    }


@st.composite
def _tensors(draw: Any, batch: int, tokens: dict[str, Any], dtypes: Sequence[str]) -> Any:
    kv_heads = draw(st.integers(1, 4))
    rows = tokens["total"] + sum(tokens["replicated"].values())
    some = st.floats(-4, 4, width=16)
    values: Any = draw(st.sampled_from(["normal"] * 3 + ["constant", "ramp", "outlier", "list"]))
    if values == "list":
        values = {"list": draw(st.lists(some, min_size=rows, max_size=rows))}
    return {
        "batch": batch,
        "heads": kv_heads * draw(st.integers(1, 4)),
        "kv_heads": kv_heads,
        "head_dim": draw(st.sampled_from([1, 2, 4, 8])),
        "dtype": draw(st.sampled_from(list(dtypes))),
        "values": values,
    }


@st.composite
def _masks(draw: Any, total: int, batch: int, dense: bool) -> dict[str, Any]:
    kinds = ["key", "tail_pad", "gap_pad", "window", "prefix_lm"] + ["dense"] * dense
    place, side = st.integers(0, total), st.none() | st.integers(0, total + 1)
    match draw(st.sampled_from(kinds)):
        case "key":
            size = draw(st.sampled_from([1, batch]))
            key: dict[str, Any] = {"valid": draw(st.lists(place, min_size=size, max_size=size))}
            cuts = sorted(draw(st.sets(place, max_size=4)))
            if len(cuts) > 1:
                key["holes"] = [[a, b] for a, b in zip(cuts[::2], cuts[1::2], strict=False)]
            return {"key": key}
        case "tail_pad":
            return {"tail_pad": {"start": draw(place)}}
        case "gap_pad":
            start, end = sorted((draw(place), draw(place)))
            return {"gap_pad": {"start": start, "end": end}}
        case "window":
            return {"window": {"left": draw(side), "right": draw(side)}}
        case "prefix_lm":
            return {"prefix_lm": {"prefix": draw(place)}}
        case _:
            density = draw(st.sampled_from([0.0, 0.1, 0.5, 0.9, 1.0]))
            return {"dense": {"density": density, "seed": draw(st.integers(0, 99))}}


@st.composite
def _written(draw: Any, masks: list[dict[str, Any]]) -> Any:
    """Each of the ways in which the format lets one write this list."""
    if not masks:
        return draw(st.sampled_from(["none", None, []]))
    return masks[0] if len(masks) == 1 and draw(st.booleans()) else masks
