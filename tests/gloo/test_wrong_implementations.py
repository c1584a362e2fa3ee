"""Wrong implementations on real ranks: each must be seen, and by the checks that can see it.

Three checks judge a run independently: `accuracy` (numbers against the reference), `ledger` (each
allowed pair once) and `trace` (what was recorded against what was predicted). What no number shows
must be seen by one of the other two.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from usp_viz.runtime.pool import Job, RankPool
from usp_viz.runtime.result import Run
from usp_viz.runtime.verify import judge
from usp_viz.scenario import Scenario
from usp_viz.views.verdict import run_text

pytestmark = pytest.mark.gloo


def run_wrong(ranks: RankPool, s: Scenario, mistake: str) -> Run:
    job = Job("tests.gloo.wrong_probes:run", {"scenario": s.normalised(), "mistake": mistake})
    report = ranks.run(job, world=s.mesh.ranks, timeout_s=s.run.timeout_s)
    return judge(s, report)


def seen_by(found: Run) -> set[str]:
    assert found.accuracy is not None and found.pairs is not None, found.problem
    checks = {
        "accuracy": found.accuracy.wrong_rows > 0,
        "ledger": not found.pairs.exact,
        "trace": found.differences != (),
    }
    assert found.outcome == ("wrong" if checks["accuracy"] else "verified")
    assert found.to_json()["trace"]["matches_prediction"] == (not checks["trace"])
    return {name for name, sees in checks.items() if sees}


def scenario(ulysses: int, ring: int, **parts: Any) -> Scenario:
    tensors = {"heads": 4, "head_dim": 8, "batch": 2} | parts.pop("tensors", {})
    mesh = {"ulysses": ulysses, "ring": ring, **parts.pop("mesh", {})}
    tokens = {"total": 16} | parts.pop("tokens", {})
    return Scenario.parse({"mesh": mesh, "tensors": tensors, "tokens": tokens, **parts})


DENSE = {"attention": {"mask": {"dense": {"density": 0.15, "seed": 4}}}}
CAUSAL = {"attention": {"causal": True}}
ALL = {"accuracy", "ledger", "trace"}
NUMBERS = {"accuracy"}
UNSEEN_IN_NUMBERS = {"ledger", "trace"}

WRONG: list[tuple[str, Scenario, set[str]]] = [
    # the softmax: every pair is there, the weights are wrong
    ("dead_rows_weigh_one", scenario(1, 2, **DENSE), NUMBERS),
    ("dead_rows_weigh_one", scenario(2, 2, **DENSE), NUMBERS),
    ("lse_in_base_two", scenario(1, 2), NUMBERS),
    ("lse_in_base_two", scenario(2, 2, tensors={"dtype": "bfloat16"}), NUMBERS),
    ("no_lse", scenario(1, 2, **CAUSAL), NUMBERS),
    ("scores_not_scaled", scenario(1, 1), NUMBERS),
    ("merge_weights_swapped", scenario(1, 2), NUMBERS),
    ("merge_weights_swapped", scenario(1, 4, tensors={"dtype": "float64"}), NUMBERS),
    ("outputs_added_up", scenario(1, 2), NUMBERS),
    ("lse_not_carried_on", scenario(1, 4), NUMBERS),
    ("nan_in_one_row", scenario(1, 2), NUMBERS),
    # the ring
    ("last_hop_dropped", scenario(1, 2), ALL),
    ("last_hop_dropped", scenario(2, 2), ALL),
    ("last_hop_dropped", scenario(1, 4, tensors={"values": "constant"}), UNSEEN_IN_NUMBERS),
    ("ring_turned_round", scenario(1, 4), {"trace"}),
    ("kv_travels_in_float64", scenario(1, 4), {"trace"}),
    ("v_of_the_hop_before", scenario(1, 4), {"accuracy", "ledger"}),
    ("v_of_the_hop_before", scenario(1, 4, tensors={"values": "constant"}), {"ledger"}),
    (
        "replicated_keys_at_every_hop",
        scenario(1, 4, tokens={"replicated": {"prefix": 3}}),
        ALL,
    ),
    (
        "replicated_keys_at_every_hop",
        scenario(2, 2, tokens={"replicated": {"kv_prefix": 2}}),
        ALL,
    ),
    # who holds what
    ("inputs_shifted_by_one", scenario(1, 2), NUMBERS),
    ("shards_shifted_by_one", scenario(2, 2), {"accuracy", "trace"}),
    ("keys_of_another_position", scenario(2, 2), {"trace"}),
    ("keys_of_another_position", scenario(2, 2, **CAUSAL), ALL),
    ("rank_order_ignored", scenario(2, 2, mesh={"order": "ring-inner"}), {"accuracy", "trace"}),
    ("all_to_all_over_the_ring_group", scenario(2, 2, **CAUSAL), ALL),
    # heads and batch rows
    ("kv_heads_swapped", scenario(2, 1), {"accuracy", "ledger"}),
    ("kv_heads_swapped", scenario(2, 2), {"accuracy", "ledger"}),
    ("batch_rows_mixed", scenario(1, 2), {"accuracy", "ledger"}),
    ("output_heads_swapped", scenario(2, 1), NUMBERS),
    # who may see whom
    ("causal_off_by_one", scenario(1, 2, **CAUSAL), ALL),
    ("causal_off_by_one", scenario(2, 2, tensors={"values": "constant"}, **CAUSAL), ALL),
    ("causal_by_local_index", scenario(1, 2, **CAUSAL), ALL),
    (
        "padding_ignored",
        scenario(2, 2, attention={"mask": {"key": {"valid": [13, 9]}}}),
        ALL,
    ),
    ("documents_ignored", scenario(2, 2, tokens={"documents": [5, 11]}), ALL),
    ("window_one_wider", scenario(1, 4, attention={"mask": {"window": {"left": 2}}}), ALL),
    ("dense_mask_transposed", scenario(1, 2, **DENSE), ALL),
]


@pytest.mark.parametrize(
    ("mistake", "s", "checks"), WRONG, ids=[f"{n}-{w[0]}" for n, w in enumerate(WRONG)]
)
def test_a_mistake_is_seen(ranks: RankPool, mistake: str, s: Scenario, checks: set[str]) -> None:
    assert seen_by(run_wrong(ranks, s, "none")) == set(), "without it nothing is wrong"
    found = run_wrong(ranks, s, mistake)
    assert seen_by(found) == checks, (found.accuracy, found.pairs, found.differences[:1])
    assert seen_by(run_wrong(ranks, s, "none")) == set(), "nor after it"


def test_nan_is_wrong_where_it_counts_and_nowhere_else(ranks: RankPool) -> None:
    found = run_wrong(ranks, scenario(1, 2), "nan_in_one_row")
    assert found.accuracy is not None
    assert (found.outcome, found.accuracy.wrong_rows) == ("wrong", 2)
    assert found.to_json()["accuracy"]["max_abs"] == "NaN"
    padding = {"attention": {"mask": {"gap_pad": {"start": 0, "end": 1}}}}
    assert run_wrong(ranks, scenario(1, 1, **padding), "nan_in_one_row").outcome == "verified"


@pytest.mark.parametrize(
    ("mistake", "outcomes"),
    [
        ("groups_swapped", {"wrong", "crashed"}),
        ("one_rank_skips_a_collective", {"timeout", "crashed", "wrong"}),
        ("one_rank_counts_wrong", {"crashed", "timeout"}),
        ("one_rank_raises", {"crashed"}),
        ("one_rank_is_killed", {"crashed"}),
    ],
)
def test_ranks_that_part_ways(ranks: RankPool, mistake: str, outcomes: set[str]) -> None:
    s = scenario(2, 2, run={"timeout_s": 2})
    found = run_wrong(ranks, s, mistake)
    assert found.outcome in outcomes
    assert found.exit_code in (1, 5)
    if found.outcome in ("crashed", "timeout"):
        assert found.problem is not None
        assert len(found.problem.where) == 4
        assert found.differences, "the trace ends early"
        assert found.trace.steps >= 1, "what was recorded until then is kept"
    assert run_wrong(ranks, s, "none").outcome == "verified", "the next run works"


@pytest.mark.parametrize(
    ("mistake", "message"),
    [
        ("shards_of_other_sizes", "rank 0 returned an output of shape (2, 5, 4, 8); its rows"),
        ("heads_of_its_own_only", "rank 0 returned an output of shape (2, 8, 2, 8); its rows"),
        ("no_output_at_all", "rank 0 returned nothing; its rows of Q need (2, 8, 4, 8)"),
        ("not_even_a_result", "rank 0 returned nothing; its rows of Q need (2, 8, 4, 8)"),
    ],
)
def test_what_cannot_be_compared_is_not_verified(
    ranks: RankPool, mistake: str, message: str
) -> None:
    found = run_wrong(ranks, scenario(2, 2 if "shards" in mistake else 1), mistake)
    assert found.problem is not None
    assert (found.outcome, found.problem.cls) == ("crashed", "WrongShape")
    assert message in found.problem.message
    assert found.exit_code == 5 and message in run_text(found)
    json.dumps(found.to_json(), allow_nan=False)


def test_a_trace_that_departs_is_said_loudly(ranks: RankPool) -> None:
    found = run_wrong(ranks, scenario(1, 4), "ring_turned_round")
    assert found.outcome == "verified"
    text = run_text(found)
    assert "departs from the prediction: Step 1 (hop 0): send of KV, rank 0 → 1" in text
    assert "predicted = recorded" not in text


def test_one_sided_exception_names_the_rank_and_is_no_refusal(ranks: RankPool) -> None:
    found = run_wrong(ranks, scenario(2, 2, run={"timeout_s": 5}), "one_rank_raises")
    assert found.problem is not None
    assert (found.outcome, found.problem.cls) == ("crashed", "ValueError")
    assert (found.problem.message, found.problem.ranks) == ("not on my rank", (1,))
