"""What the real sglang classes were seen to do, figure by figure, on our ranks.

The figures are for S = 48, H = 8, D = 32, float32. Their seed is unknown, so that rows are compared
exactly and errors by their size. "OK" is a verified run, a string a refusal or a crash with that
message, a pair (wrong rows, about how large the largest error is).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from tests.strategies import mappings
from tests.unit.test_rules import (
    BACKEND_18,
    MASK_4D,
    MASK_REPLICATED,
    MASK_RING_18,
    MASK_RING_22,
    TWO,
    ULYSSES_RING,
    UNKNOWN,
    VARLEN_MASK,
    VARLEN_RING,
)
from usp_viz import rules
from usp_viz.attention.reference import reference
from usp_viz.layout import Layout, ids
from usp_viz.mask import Visibility
from usp_viz.mesh import Mesh
from usp_viz.runtime.pool import RankPool
from usp_viz.runtime.result import Run
from usp_viz.runtime.verify import run
from usp_viz.scenario import Scenario

pytestmark = pytest.mark.gloo

OK = "verified"
GLOO = "Received data size doesn't match expected size"
M1, M2, M3, M4 = MASK_RING_22, VARLEN_RING, MASK_REPLICATED, ULYSSES_RING
MESHES = ("2x1", "4x1", "1x2", "2x2", "1x4")
Wanted = Any

UNEVEN = {2: [20, 28], 4: [15, 9, 11, 13]}
EMPTY = {2: [0, 48], 4: [15, 0, 20, 13]}
EVEN = {2: [24, 24], 4: [12, 12, 12, 12]}
KEY = {"attention.mask": {"key": {"valid": [43]}}}
HOLES = {
    "attention.mask": {"key": {"valid": [43, 30], "holes": [[5, 9]]}},
    "tensors.batch": 2,
}
TAIL = {"attention.mask": {"tail_pad": {"start": 43}}}
GAP = {"attention.mask": {"gap_pad": {"start": 10, "end": 15}}}
CAUSAL = {"attention.causal": True}
BATCH = {"tensors.batch": 2}
SKIP = {"attention.skip_sequence_parallel": True}
PREFIX = {"tokens.replicated.prefix": 7}
SUFFIX = {"tokens.replicated.suffix": 7}
KV_PREFIX = {"tokens.replicated.kv_prefix": 7}
ULYSSES = {"attention.layer": "UlyssesAttention"}
SAGE = {"attention.sglang_backend": "SAGE_ATTN"}
NAN = float("nan")

# name: (sets, what happens on 2x1, 4x1, 1x2, 2x2, 1x4); one expectation stands for the rest.
TABLE_23: dict[str, tuple[dict[str, Any], list[Wanted]]] = {
    "dense": ({}, [OK]),
    "dense, batch 2": (BATCH, [OK]),
    "dense, bf16": ({"tensors.dtype": "bfloat16"}, [OK]),
    "SDPA": ({"attention.sglang_backend": "TORCH_SDPA"}, [OK, OK, BACKEND_18]),
    "uneven shards": ({"tokens.shards": UNEVEN}, [OK, OK, M2]),
    "uneven, batch 2": ({"tokens.shards": UNEVEN} | BATCH, [OK, OK, M2]),
    "uneven, causal": ({"tokens.shards": UNEVEN} | CAUSAL, [OK, OK, M2]),
    "uneven, one empty": ({"tokens.shards": EMPTY}, [OK, OK, M2]),
    "documents as seq_lens": (
        {"tokens.documents": EVEN, "attention.seq_lens": EVEN},
        [(48, 1.58), (48, 2.06), M2],
    ),
    "seq_lens of wrong length": (
        {"attention.seq_lens": [10, 20, 18]},
        ["seq_lens must have length 2, got 3", "seq_lens must have length 4, got 3", M2],
    ),
    "seq_lens and mask": (KEY | {"attention.seq_lens": "always"}, [VARLEN_MASK]),
    "uneven without seq_lens": ({"tokens.shards": UNEVEN, "attention.seq_lens": "never"}, [GLOO]),
    "key mask": (KEY, [OK, OK, M1]),
    "key mask with holes, batch 2": (HOLES, [OK, OK, M1]),
    "mask and causal": (KEY | CAUSAL, [(42, 3.16), (42, 3.16), M1]),
    "mask and GQA": (
        KEY | {"tensors.kv_heads": 4},
        [
            "The size of tensor a (4) must match the size of tensor b (2) at non-singleton "
            "dimension 1",
            OK,
            M1,
        ],
    ),
    "tail metadata": (TAIL, [OK]),
    "tail metadata, batch 2": (TAIL | BATCH, [OK]),
    "tail metadata, causal": (TAIL | CAUSAL, [(42, 3.16), (42, 3.16), M1]),
    "gap metadata": (GAP, [OK, OK, (43, 1.44)]),
    "tail metadata, skipped": (TAIL | SKIP, [(43, 0.70)]),
    "4D mask": ({"attention.mask": {"dense": {}}}, [MASK_4D, MASK_4D, M1]),
    "prefix": (PREFIX, [OK]),
    "suffix": (SUFFIX, [OK]),
    "KV prefix": (KV_PREFIX, [OK]),
    "prefix and key mask": (PREFIX | KEY, [OK, OK, M3]),
    "suffix and key mask": (SUFFIX | KEY, [M3]),
    "KV prefix and key mask": (KV_PREFIX | KEY, [M3]),
    "two replicated modes": (PREFIX | SUFFIX, [TWO]),
    "prefix, causal": (PREFIX | CAUSAL, [OK, OK, (None, NAN)]),
    "suffix, causal": (SUFFIX | CAUSAL, [OK, OK, (None, NAN)]),
    "causal": (CAUSAL, [OK, OK, (23, 2.01), (23, 2.01), (33, 2.87)]),
    "GQA 4 of 8": ({"tensors.kv_heads": 4}, [OK]),
    "GQA 2 of 8": (
        {"tensors.kv_heads": 2},
        [OK, "h_global (2) must be divisible by world_size (4)", OK],
    ),
    "UlyssesAttention": (ULYSSES, [OK, OK, M4]),
    "UlyssesAttention, causal, prefix": (ULYSSES | SUFFIX | CAUSAL, [OK, OK, M4]),
    "UlyssesAttention, uneven": (ULYSSES | {"tokens.shards": UNEVEN}, [OK, OK, M4]),
    "skipped": (SKIP, [OK]),
    "skipped, sharded KV": (
        SKIP | {"attention.skip_kv": "sharded"},
        [(48, 1.45), (48, 1.89), (48, None)],
    ),
}


def scenario(mesh: str, sets: dict[str, Any], release: str, policy: str = "sglang") -> Scenario:
    ulysses, ring = map(int, mesh.split("x"))
    found: dict[str, Any] = {"mesh.ulysses": ulysses, "mesh.ring": ring}
    for key, value in sets.items():
        found[key] = value[ulysses * ring] if value in (UNEVEN, EMPTY, EVEN) else value
    return Scenario.parse({}).set(found | {"release": release, "policy": policy})


def cells(table: dict[str, tuple[dict[str, Any], list[Wanted]]]) -> Iterator[Any]:
    for name, (sets, wanted) in table.items():
        for n, mesh in enumerate(MESHES):
            expected = wanted[min(n, len(wanted) - 1)]
            yield pytest.param(sets, mesh, expected, id=f"{name}-{mesh}")


def holds(found: Run, wanted: Wanted) -> None:
    """Compare a run with what was seen."""
    s = found.scenario
    assert found.differences == (), found.differences[0].text
    assert found.outcome == rules.predict(s), (found.problem, found.accuracy)
    if isinstance(wanted, str) and wanted != OK:
        assert found.problem is not None
        assert wanted in found.problem.message
        assert (found.problem.message == wanted) == (wanted != GLOO)
        assert found.problem.ranks == tuple(range(s.mesh.ranks))
        assert found.outcome == ("crashed" if found.problem.cls == "RuntimeError" and (
            "tensor" in wanted or wanted == GLOO) else "refused")  # fmt: skip
        return
    assert found.accuracy is not None, found.problem
    if wanted == OK:
        assert found.outcome == "verified", found.accuracy
        assert found.warnings == ()
        assert found.pairs is None or found.pairs.exact
        return
    assert found.outcome == "wrong" and found.warnings
    rows, error = wanted
    assert rows is None or found.accuracy.wrong_rows == rows
    if error is NAN:
        assert np.isnan(found.accuracy.max_abs)
    elif error is not None:
        assert error / 2.5 < found.accuracy.max_abs < error * 2.5


@pytest.mark.parametrize(("sets", "mesh", "wanted"), list(cells(TABLE_23)))
def test_release_0_5_23(sets: dict[str, Any], mesh: str, wanted: Wanted, ranks: RankPool) -> None:
    holds(run(scenario(mesh, sets, "0.5.23"), pool=ranks), wanted)


# release, mesh, sets, what happens
OTHERS: list[tuple[str, str, dict[str, Any], Wanted]] = [
    ("0132848349", "2x2", TAIL | BATCH, MASK_RING_18),
    ("0.5.21", "1x2", TAIL | BATCH, MASK_RING_18),
    ("0132848349", "1x2", TAIL | CAUSAL, (42, 3.16)),
    ("0.5.18", "2x2", TAIL | CAUSAL, (42, 3.16)),
    ("0.5.18", "2x1", PREFIX | KEY, M3),
    ("0132848349", "2x1", PREFIX | KEY, M3),
    ("0.5.20", "2x1", PREFIX | KEY, OK),
    (
        "0.5.22",
        "1x1",
        {"tokens.documents": [24, 24], "attention.seq_lens": [24, 24]},
        (48, 1.58),
    ),
    ("0.5.23", "1x1", {"tokens.documents": [24, 24], "attention.seq_lens": [24, 24]}, OK),
    ("0.5.16", "2x1", {"tokens.shards": UNEVEN}, UNKNOWN),
    ("0.5.17", "1x2", {"tokens.shards": UNEVEN}, UNKNOWN),
    ("0.5.17", "2x2", KEY, "USPAttention masked path does not support ring parallelism yet."),
    ("0.5.16", "1x2", TAIL, "USPAttention masked path does not support ring parallelism yet."),
    ("0.5.16", "1x2", PREFIX, (62, 0.395)),
    ("0.5.17", "1x2", SUFFIX, (62, 0.395)),
    ("0.5.17", "2x1", PREFIX | KEY, (57, 0.48)),
    (
        "0.5.17",
        "2x2",
        PREFIX,
        "USPAttention replicated-prefix/suffix path does not support ring parallelism yet.",
    ),
    ("0.5.16", "1x2", ULYSSES, OK),
    ("0.5.16", "2x2", ULYSSES | SUFFIX, OK),
    ("0.5.17", "2x2", ULYSSES, M4),
]


@pytest.mark.parametrize("case", OTHERS, ids=lambda c: f"{c[0]}-{c[1]}-{'-'.join(c[2])}")
def test_where_other_releases_differ(
    case: tuple[str, str, dict[str, Any], Wanted], ranks: RankPool
) -> None:
    release, mesh, sets, wanted = case
    holds(run(scenario(mesh, sets, release), pool=ranks), wanted)


def test_replicated_rows_of_0_5_16_on_both_degrees(ranks: RankPool) -> None:
    found = run(scenario("2x2", PREFIX, "0.5.16"), pool=ranks)
    assert found.outcome == rules.predict(found.scenario) == "crashed"
    assert found.problem is not None
    assert (found.problem.rule, found.problem.ranks) == ("replicated-slice", (2, 3))
    assert "Expected size 0 but got size 4" in found.problem.message


DIM3 = "The size of tensor a ({}) must match the size of tensor b (48) at non-singleton dimension 3"
# name: (release, sets, what happens behind the guard on 1x2, 2x2, 1x4)
BEHIND: dict[str, tuple[str, dict[str, Any], list[Wanted]]] = {
    "USP seq_lens": (
        "0132848349",
        {"tokens.shards": UNEVEN},
        [(48, 1.58), (48, 1.49), (48, 2.06)],
    ),
    "UlyssesAttention, dense": ("0132848349", ULYSSES, [OK, OK, OK]),
    "UlyssesAttention, replicated": ("0.5.23", ULYSSES | PREFIX, [OK, OK, OK]),
    "UlyssesAttention, seq_lens": (
        "0.5.23",
        ULYSSES | {"tokens.shards": UNEVEN},
        [(48, 1.58), (48, 1.49), (48, 2.06)],
    ),
    "key mask": ("0132848349", KEY, [DIM3.format(24), DIM3.format(24), DIM3.format(12)]),
    "tail metadata, not on FA": ("0.5.23", TAIL | SAGE, [(43, 1.29), (43, 1.29), (43, 1.73)]),
    "tail metadata, batch 2": ("0132848349", TAIL | BATCH, [(86, 1.29), (86, 1.29), (86, 1.73)]),
    "tail metadata, 0.5.17": ("0.5.17", TAIL, [(43, 1.29), (43, 1.29), (43, 1.73)]),
}


@pytest.mark.parametrize("name", BEHIND)
@pytest.mark.parametrize("mesh", ["1x2", "2x2", "1x4"])
def test_behind_the_guards(name: str, mesh: str, ranks: RankPool) -> None:
    release, sets, wanted = BEHIND[name]
    expected = wanted[("1x2", "2x2", "1x4").index(mesh)]
    if release != "0.5.16":
        assert run(scenario(mesh, sets, release), pool=ranks).outcome == "refused"
    holds(run(scenario(mesh, sets, release, "unguarded"), pool=ranks), expected)


@pytest.mark.parametrize("mesh", ["1x2", "2x2", "1x4"])
@pytest.mark.parametrize("layer", ["USPAttention", "UlyssesAttention"])
def test_behind_the_varlen_guard_it_is_attention_over_the_own_group(
    mesh: str, layer: str, ranks: RankPool
) -> None:
    s = scenario(mesh, {"tokens.shards": UNEVEN, "attention.layer": layer}, "0.5.23", "unguarded")
    found = run(s, pool=ranks)
    groups = [sum(group) for group in np.split(np.array(s.shards), s.mesh.ring)]
    alone = reference(s, Visibility.of(s.set({"tokens.documents": [int(n) for n in groups]})))
    for rank, out in found.outs.items():
        rows = ids(Layout.of(s).queries(Mesh.of(s).position(rank)))
        assert np.abs(out - alone[:, rows]).max() < 1e-5


def test_sglang_numbers_ranks_by_position(ranks: RankPool) -> None:
    """`order` renumbers our ranks; sglang's are always Ulysses inner."""
    sets = {"mesh.order": "ring-inner"} | CAUSAL
    found = run(scenario("2x2", sets, "0.5.23"), pool=ranks)
    holds(found, (23, 2.01))
    assert found.accuracy is not None
    assert [rank.wrong_rows for rank in found.accuracy.per_rank] == [0, 0, 12, 11]


def test_first_ring_position_looks_perfect(ranks: RankPool) -> None:
    found = run(scenario("1x4", CAUSAL, "0132848349"), pool=ranks)
    assert found.accuracy is not None
    assert [rank.wrong_rows for rank in found.accuracy.per_rank] == [0, 11, 11, 11]
    assert found.pairs is not None
    assert found.pairs.missing > 0 and found.pairs.forbidden == 0


def test_text_counted_twice_is_in_the_ledger(ranks: RankPool) -> None:
    found = run(scenario("1x2", PREFIX, "0.5.16"), pool=ranks)
    assert found.pairs is not None
    # Each of 2 x (24 + 7) queries meets the 7 prefix keys twice, in 8 heads.
    assert found.pairs.repeated == 2 * 31 * 7 * 8
    assert found.pairs.missing == found.pairs.forbidden == 0


def test_padding_rows_of_the_ring_path_are_zero_and_of_the_other_are_not(ranks: RankPool) -> None:
    for mesh, zero in (("1x2", True), ("2x1", False)):
        found = run(scenario(mesh, TAIL, "0.5.23"), pool=ranks)
        padding = np.concatenate([found.outs[0], found.outs[1]], axis=1)[:, 43:]
        assert (padding == 0).all() == zero
        assert np.isfinite(padding).all()


@st.composite
def calls(draw: Any) -> Scenario:
    """Anything that a release can be asked; values that no wrong row can hide behind."""
    policies = ("sglang", "sglang", "unguarded")
    mapping = draw(
        mappings(max_ranks=4, dtypes=("float32", "float32", "float64"), policies=policies)
    )
    backends = ["FA", "FA", "FA", "TORCH_SDPA", "SAGE_ATTN"]
    mapping["attention"]["sglang_backend"] = draw(st.sampled_from(backends))
    if draw(st.integers(0, 5)) == 0:
        documents = mapping["tokens"]["documents"]
        lists = st.lists(st.integers(0, mapping["tokens"]["total"]), min_size=1, max_size=4)
        mapping["attention"]["seq_lens"] = draw(st.just(documents) if documents else lists)
    assume(mapping["tensors"]["values"] in ("normal", "constant", "ramp"))
    return Scenario.parse(mapping)


@settings(
    max_examples=150,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.filter_too_much],
)
@given(s=calls())
def test_check_is_run(s: Scenario, ranks: RankPool) -> None:
    """What is predicted without a rank is what the ranks do: outcome, message, every event."""
    found = run(s, pool=ranks)
    assert found.outcome == rules.predict(s), (found.problem, found.accuracy)
    assert found.differences == (), found.differences[0].text
    end = rules.ending(s, policy=s.policy)
    if end is not None:
        assert found.problem is not None and found.problem.rule == end.rule
        assert (found.problem.cls, found.problem.message) == (end.cls, end.message)
        assert found.problem.ranks == tuple(n for n, m in enumerate(end.messages) if m is not None)
    if found.outcome == "verified" and found.pairs is not None and s.tensors.values == "normal":
        assert found.pairs.missing == found.pairs.forbidden == 0
