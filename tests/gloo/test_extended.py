"""The extended policy on real ranks: right, exactly once, and as predicted, for everything."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings

from tests.oracle import Oracle
from tests.strategies import scenarios
from usp_viz.layout import Layout, ids
from usp_viz.loading import bundled
from usp_viz.mesh import Mesh
from usp_viz.plan import simulate
from usp_viz.runtime.pool import RankPool
from usp_viz.runtime.result import Run
from usp_viz.runtime.verify import run
from usp_viz.scenario import Scenario

pytestmark = pytest.mark.gloo


def verified(ranks: RankPool, s: Scenario) -> Run:
    """Run it, and look at everything that must hold of every scenario."""
    found = run(s, pool=ranks)
    assert found.outcome == "verified", (s.dotted(), found.problem, found.accuracy)
    assert found.problem is None and found.accuracy is not None and found.pairs is not None
    assert found.differences == (), (s.dotted(), found.differences[0].text)
    assert found.trace.hash == simulate(s).hash
    assert found.pairs.exact
    assert found.pairs.allowed == allowed_pairs(s)
    assert found.accuracy.rows == scored_rows(s)
    assert_padding_is_zero(s, found)
    return found


def is_local(s: Scenario) -> bool:
    return s.attention.skip_sequence_parallel and s.attention.skip_kv == "full"


def rows_of(s: Scenario, rank: int) -> list[int]:
    return ids(Layout.of(s).queries(Mesh.of(s).position(rank))).tolist()


def allowed_pairs(s: Scenario) -> int:
    """By the contract: sharded queries once, replicated ones once for each ring position."""
    oracle, total = Oracle(s), 0
    copies = s.mesh.ranks if is_local(s) else s.mesh.ring
    for b in range(s.tensors.batch):
        for i in range(s.tokens.replicated.kv_prefix, oracle.size):
            if oracle.valid(b, i):
                seen = sum(oracle.allowed(b, i, j) for j in range(oracle.size))
                total += seen * (copies if oracle.row(i) is None else 1)
    return total * s.tensors.heads


def scored_rows(s: Scenario) -> int:
    oracle = Oracle(s)
    return sum(
        oracle.valid(b, i)
        for b in range(s.tensors.batch)
        for rank in range(s.mesh.ranks)
        for i in rows_of(s, rank)
    )


def assert_padding_is_zero(s: Scenario, found: Run) -> None:
    oracle = Oracle(s)
    assert sorted(found.outs) == list(range(s.mesh.ranks))
    for rank, out in found.outs.items():
        rows = rows_of(s, rank)
        assert out.shape == (s.tensors.batch, len(rows), s.tensors.heads, s.tensors.head_dim)
        for b in range(s.tensors.batch):
            padding = [n for n, row in enumerate(rows) if not oracle.valid(b, row)]
            assert not out[b, padding].any()


def scenario(
    ulysses: int = 1, ring: int = 1, order: str = "ulysses-inner", **parts: Any
) -> Scenario:
    small = {"heads": 4, "head_dim": 8} | parts.pop("tensors", {})
    mesh = {"ulysses": ulysses, "ring": ring, "order": order}
    return Scenario.parse({"mesh": mesh, "tensors": small, **parts})


MESHES = [(1, 1), (2, 1), (1, 2), (2, 2), (4, 1), (1, 4), (2, 4), (4, 2)]


@pytest.mark.parametrize("layout", ["contiguous", "zigzag", "striped"])
@pytest.mark.parametrize("order", ["ulysses-inner", "ring-inner"])
@pytest.mark.parametrize(("ulysses", "ring"), MESHES)
def test_every_mesh_order_and_layout(
    ranks: RankPool, ulysses: int, ring: int, order: str, layout: str
) -> None:
    s = scenario(
        ulysses,
        ring,
        order,
        tensors={"kv_heads": 2},
        tokens={"total": 6 * ulysses * ring, "layout": layout},
        attention={"causal": True},
    )
    causal, dense = verified(ranks, s), verified(ranks, s.set({"attention.causal": False}))
    assert causal.trace.hash != dense.trace.hash or ulysses * ring == 1


MASKS: dict[str, Any] = {
    "key": {"key": {"valid": [20], "holes": [[3, 5], [9, 17]]}},
    "tail_pad": {"tail_pad": {"start": 13}},
    "gap_pad": {"gap_pad": {"start": 5, "end": 14}},
    "window": {"window": {"left": 4, "right": 2}},
    "left window": {"window": {"left": 7}},
    "prefix_lm": {"prefix_lm": {"prefix": 7}},
    "dense": {"dense": {"density": 0.3, "seed": 5}},
    "nothing": {"dense": {"density": 0.0}},
    "all padding": {"tail_pad": {"start": 0}},
}


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("mask", MASKS)
def test_every_mask_alone_and_with_causal(ranks: RankPool, mask: str, causal: bool) -> None:
    attention = {"mask": MASKS[mask], "causal": causal}
    found = verified(ranks, scenario(2, 2, tokens={"total": 24}, attention=attention))
    if mask in ("nothing", "all padding"):
        assert found.pairs is not None and found.pairs.allowed == 0
        assert not any(out.any() for out in found.outs.values())
        sends = [e for e in found.trace.events() if e.op == "send"]
        assert not sends, "nobody needs any KV, so none travels"


def test_masks_of_every_kind_at_once(ranks: RankPool) -> None:
    masks = [
        {"key": {"valid": [24, 11, 0], "holes": [[2, 4]]}},
        {"gap_pad": {"start": 7, "end": 9}},
        {"window": {"left": 15, "right": 6}},
        {"prefix_lm": {"prefix": 12}},
        {"dense": {"density": 0.8, "seed": 2}},
    ]
    s = scenario(
        2,
        2,
        tensors={"batch": 3, "kv_heads": 2},
        tokens={
            "total": 24,
            "shards": [5, 0, 12, 7],
            "documents": [9, 0, 15],
            "replicated": {"prefix": 2, "suffix": 1, "kv_prefix": 3},
        },
        attention={"mask": masks},
    )
    for dtype in ("float64", "float32", "bfloat16", "float16"):
        verified(ranks, s.set({"tensors.dtype": dtype}))
    verified(ranks, s.set({"attention.causal": True, "mesh.order": "ring-inner"}))


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16", "float16"])
@pytest.mark.parametrize("values", ["normal", "constant", "ramp", "outlier"])
def test_every_dtype_and_value(ranks: RankPool, dtype: str, values: str) -> None:
    tensors = {"dtype": dtype, "values": values, "head_dim": 32, "kv_heads": 2}
    found = verified(ranks, scenario(2, 2, tensors=tensors, tokens={"total": 40}))
    if values == "constant":
        assert all(np.abs(out - 1).max() < 5e-3 for out in found.outs.values())


@pytest.mark.parametrize(
    "shards", [[24, 0, 0, 0], [0, 0, 0, 24], [0, 12, 0, 12], [7, 0, 16, 1], [1, 2, 3, 18]], ids=str
)
@pytest.mark.parametrize(("ulysses", "ring"), [(4, 1), (2, 2), (1, 4)])
def test_uneven_shards_and_empty_ranks(
    ranks: RankPool, ulysses: int, ring: int, shards: list[int]
) -> None:
    tokens = {"total": 24, "shards": shards}
    s = scenario(ulysses, ring, tokens=tokens, tensors={"batch": 2})
    verified(ranks, s)
    verified(ranks, s.set({"attention.causal": True, "tokens.documents": [10, 0, 14]}))


@pytest.mark.parametrize("total", [1, 2, 3, 7])
def test_fewer_tokens_than_ranks(ranks: RankPool, total: int) -> None:
    for ulysses, ring in ((2, 4), (4, 2), (1, 4), (4, 1)):
        tokens = {"total": total, "shards": "auto"}
        verified(ranks, scenario(ulysses, ring, tokens=tokens, attention={"causal": True}))


@pytest.mark.parametrize(
    ("ulysses", "heads", "kv_heads"),
    [
        (4, 8, 2),  # U > G: two ranks read one KV head
        (4, 8, 1),  # all read one
        (4, 12, 6),  # G % U != 0
        (4, 6, 3),  # nor H % U
        (4, 2, 2),  # H < U: two ranks have no head at all
        (4, 1, 1),
        (2, 3, 1),
        (2, 15, 5),  # query heads that begin and end inside a KV group
    ],
)
def test_heads_that_do_not_divide(ranks: RankPool, ulysses: int, heads: int, kv_heads: int) -> None:
    for ring in (1, 2):
        tensors = {"heads": heads, "kv_heads": kv_heads, "batch": 2}
        s = scenario(ulysses, ring, tensors=tensors, tokens={"total": 16, "shards": "auto"})
        verified(ranks, s)
        verified(ranks, s.set({"attention.causal": True, "tokens.replicated.prefix": 2}))


@pytest.mark.parametrize(
    "replicated",
    [{"prefix": 3}, {"suffix": 2}, {"kv_prefix": 4}, {"prefix": 2, "suffix": 3, "kv_prefix": 1}],
    ids=str,
)
def test_replicated_rows_count_once(ranks: RankPool, replicated: dict[str, int]) -> None:
    for ulysses, ring in ((4, 1), (2, 2), (1, 4)):
        for causal in (False, True):
            tokens = {"total": 9, "shards": "auto", "replicated": replicated}
            verified(ranks, scenario(ulysses, ring, tokens=tokens, attention={"causal": causal}))
    # Replicated rows alone have work: every S key is padding.
    tokens = {"total": 8, "replicated": replicated}
    attention = {"mask": {"tail_pad": {"start": 0}}}
    verified(ranks, scenario(2, 2, tokens=tokens, attention=attention))


@pytest.mark.parametrize("skip_kv", ["full", "sharded"])
def test_skipping_sequence_parallelism(ranks: RankPool, skip_kv: str) -> None:
    attention = {"skip_sequence_parallel": True, "skip_kv": skip_kv, "causal": True}
    tokens = {"total": 13, "shards": "auto", "replicated": {"prefix": 2, "kv_prefix": 1}}
    found = verified(ranks, scenario(2, 2, tokens=tokens, attention=attention))
    assert (sum(found.trace.bytes_sent_per_rank) == 0) == (skip_kv == "full")


def test_hops_that_nobody_needs_are_skipped(ranks: RankPool) -> None:
    """A window over the neighbour's rows: of a ring of four, KV makes one hop of three."""
    attention = {"mask": {"window": {"left": 3, "right": 0}}}
    found = verified(ranks, scenario(1, 4, tokens={"total": 16}, attention=attention))
    assert [s for s in found.trace.stages if s.startswith("hop")] == ["hop 0", "hop 1", "hop 1"]
    far = {"tokens.documents": None, "attention.mask": {"dense": {"density": 0.02, "seed": 9}}}
    verified(ranks, scenario(1, 4, tokens={"total": 16}).set(far))


def test_bytes_are_what_the_method_needs(ranks: RankPool) -> None:
    """By hand: U 2, R 2, S 24, B 2, H 4, G 2, D 8, float32."""
    tensors = {"batch": 2, "heads": 4, "kv_heads": 2, "head_dim": 8}
    found = verified(ranks, scenario(2, 2, tensors=tensors, tokens={"total": 24}))
    row = 2 * 8 * 4  # one row of one head: B · D · 4 bytes
    into = 6 * (2 + 2 * 1) * row  # my 6 rows: the other's 2 query heads, and 1 KV head twice
    around = 12 * 2 * 1 * row  # one hop: 12 rows of K and V of 1 KV head
    out = 6 * 2 * row  # the other's 6 rows of my 2 query heads
    assert found.trace.bytes_sent_per_rank == (into + around + out,) * 4
    assert found.trace.collectives == ("all_to_all_single", "irecv", "isend")


def test_the_same_seed_gives_the_same_bytes(ranks: RankPool) -> None:
    s = Scenario.load("dense-mask-ring")
    first, second = (verified(ranks, s) for _ in range(2))
    for rank in range(4):
        assert first.outs[rank].tobytes() == second.outs[rank].tobytes()
    other = verified(ranks, s.set({"run.seed": 1}))
    assert other.outs[0].tobytes() != first.outs[0].tobytes()
    assert other.trace.hash == first.trace.hash


def test_rank_order_moves_rows_and_changes_no_number(ranks: RankPool) -> None:
    inner = verified(ranks, scenario(2, 4, tokens={"total": 24}))
    outer = verified(ranks, scenario(2, 4, "ring-inner", tokens={"total": 24}))
    for rank in range(8):
        ring, ulysses = rank // 2, rank % 2
        assert np.array_equal(inner.outs[rank], outer.outs[ulysses * 4 + ring])


def test_each_event_is_told_as_it_happens(ranks: RankPool) -> None:
    told: list[Any] = []
    found = run(scenario(2, 2, tokens={"total": 8}), pool=ranks, on_event=told.append)
    assert sorted(told, key=repr) == sorted(found.trace.events(), key=repr)


@pytest.mark.parametrize("name", sorted(bundled()))
def test_bundled_scenarios(ranks: RankPool, name: str) -> None:
    verified(ranks, Scenario.load(name).set({"policy": "extended", "expect": None}))


@settings(
    max_examples=120,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
@given(s=scenarios(max_ranks=4, max_rows=20))
def test_any_scenario(ranks: RankPool, s: Scenario) -> None:
    verified(ranks, s)


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(s=scenarios(max_ranks=8, max_rows=32))
def test_any_scenario_on_more_ranks(ranks: RankPool, s: Scenario) -> None:
    verified(ranks, s)
