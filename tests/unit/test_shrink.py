"""Smaller scenarios end as the large ones do; the rules are the oracle."""

from __future__ import annotations

from typing import Any

import pytest

from usp_viz import rules
from usp_viz.errors import InvalidScenario
from usp_viz.runtime.verify import check_limits
from usp_viz.scenario import POLICIES, Scenario
from usp_viz.ui.legal import resplit
from usp_viz.ui.shrink import shrink

MESH = {"ulysses": 8, "ring": 4}
LARGE: dict[str, dict[str, Any]] = {
    "plain": {"mesh": MESH, "tensors": {"heads": 64}, "tokens": {"total": 32_768}},
    "varlen": {
        "mesh": MESH,
        "tensors": {"heads": 24, "head_dim": 128, "dtype": "bfloat16"},
        "tokens": {"total": 4_000, "shards": [125 + (p % 3) for p in range(31)] + [95]},
    },
    "auto shards": {"mesh": MESH, "tokens": {"total": 75_601, "shards": "auto"}},
    "key mask": {
        "mesh": {"ulysses": 4, "ring": 8},
        "tensors": {"batch": 4, "heads": 40},
        "tokens": {"total": 32_768},
        "attention": {"mask": {"key": {"valid": [30_000, 20_000, 32_768, 1], "holes": [[5, 900]]}}},
    },
    "tail pad, served": {
        "mesh": {"ulysses": 4, "ring": 8},
        "tokens": {"total": 32_768},
        "attention": {"mask": {"tail_pad": {"start": 32_000}}},
    },
    "tail pad, batch": {
        "mesh": {"ulysses": 4, "ring": 8},
        "tensors": {"batch": 3},
        "tokens": {"total": 32_768},
        "attention": {"mask": {"tail_pad": {"start": 32_000}}},
    },
    "old layer": {
        "mesh": MESH,
        "tokens": {"total": 32_768},
        "attention": {"layer": "UlyssesAttention"},
    },
    "causal ring": {"mesh": MESH, "tokens": {"total": 65_536}, "attention": {"causal": True}},
    "heads do not divide": {
        "mesh": {"ulysses": 16, "ring": 2},
        "tensors": {"heads": 24, "kv_heads": 3},
        "tokens": {"total": 32_768},
    },
    "fewer KV heads than ranks": {
        "mesh": {"ulysses": 32, "ring": 1},
        "tensors": {"heads": 64, "kv_heads": 8},
        "tokens": {"total": 32_768},
    },
    "text": {
        "mesh": {"ulysses": 1, "ring": 32},
        "tokens": {"total": 32_768, "replicated": {"prefix": 512}},
        "release": "0.5.16",
    },
    "documents": {
        "mesh": MESH,
        "tokens": {"total": 32_768, "documents": [30_000, 0, 2_000, 768]},
    },
    "window": {
        "mesh": MESH,
        "tokens": {"total": 32_768},
        "attention": {
            "mask": [{"window": {"left": 4_096, "right": 0}}, {"prefix_lm": {"prefix": 99}}]
        },
    },
    "zigzag": {
        "mesh": {"ulysses": 2, "ring": 16},
        "tokens": {"total": 65_536, "layout": "zigzag"},
        "attention": {"causal": True},
    },
    "long": {"mesh": {"ulysses": 2, "ring": 2}, "tokens": {"total": 1_000_000}},
}


def fits(scenario: Scenario) -> bool:
    try:
        check_limits(scenario)
    except InvalidScenario:
        return False
    return True


def ends(scenario: Scenario) -> list[Any]:
    """How each policy's call ends, and which rows it is known to get wrong."""
    found = [rules.ending(scenario, policy=policy) for policy in POLICIES]
    doubts = [{w.id for w in rules.warnings(scenario, policy)} for policy in POLICIES]
    return [[end and (end.rule, end.cls) for end in found], doubts]


@pytest.mark.parametrize("name", LARGE)
def test_the_same_rules_before_and_after(name: str) -> None:
    large = Scenario.parse(LARGE[name])
    assert not fits(large)
    small = shrink(large, fits)
    assert small is not None
    s = small.scenario
    assert fits(s)
    assert ends(s) == ends(large)
    assert small.said
    # its shape
    assert (s.mesh.ulysses > 1, s.mesh.ring > 1) == (large.mesh.ulysses > 1, large.mesh.ring > 1)
    assert (s.tensors.batch > 1) == (large.tensors.batch > 1)
    assert (len(set(s.shards)) > 1) == (len(set(large.shards)) > 1)
    assert (s.kv_heads < s.tensors.heads) == (large.kv_heads < large.tensors.heads)
    assert [n > 0 for n in s.documents] == [n > 0 for n in large.documents]
    assert [type(m) for m in s.attention.mask] == [type(m) for m in large.attention.mask]
    kept = (large.tokens.layout, large.attention.causal, large.attention.layer, large.release)
    assert (s.tokens.layout, s.attention.causal, s.attention.layer, s.release) == kept
    # small: a picture of a handful of ranks
    assert s.mesh.ranks <= 8
    assert s.tokens.total <= 200


def test_what_fits_is_left_alone() -> None:
    scenario = Scenario.load("varlen-ring")
    small = shrink(scenario, fits)
    assert small is not None
    assert small.scenario is scenario
    assert not small.said


def test_nothing_is_invented_where_nothing_fits() -> None:
    assert shrink(Scenario.load("varlen-ring"), lambda scenario: False) is None


@pytest.mark.parametrize(
    ("lengths", "parts", "expected"),
    [
        ((15, 9, 11, 13), 2, (24, 24)),
        ((15, 9, 11, 13), 4, (15, 9, 11, 13)),
        ((4, 0), 4, (2, 2, 0, 0)),
        ((3,), 2, (1, 2)),
        ((5, 1, 0), 1, (6,)),
    ],
)
def test_shards_are_split_again_where_they_were_long(
    lengths: tuple[int, ...], parts: int, expected: tuple[int, ...]
) -> None:
    assert resplit(lengths, parts) == expected
