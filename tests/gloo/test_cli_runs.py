"""The command line on real ranks: the same promises, kept end to end."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from usp_viz.cli import main
from usp_viz.loading import bundled
from usp_viz.runtime import verify
from usp_viz.runtime.pool import RankPool

pytestmark = pytest.mark.gloo

Capture = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def _warm(ranks: RankPool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands of this process share the warm pool."""
    monkeypatch.setattr(verify, "default_pool", lambda: ranks)


def test_every_bundled_scenario_gives_what_it_expects(capsys: Capture) -> None:
    assert main(["run", *bundled()]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert out.count(" rank") > len(bundled())


def test_three_policies_of_one_scenario(capsys: Capture) -> None:
    assert main(["run", "varlen-ring", "--policy", "all", "--json"]) == 1
    results = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    by_policy = {result["policy"]: result for result in results}
    assert list(by_policy) == ["sglang", "unguarded", "extended"]
    refused, wrong, right = by_policy.values()
    assert refused["outcome"] == "refused" and refused["accuracy"] is None
    assert refused["error"]["class"] == "NotImplementedError"
    assert refused["error"]["message"] == (
        "Varlen USPAttention does not support ring parallelism yet."
    )
    assert refused["error"]["ranks"] == [0, 1, 2, 3]
    assert wrong["outcome"] == "wrong" and wrong["accuracy"]["wrong_rows"] == 48
    assert right["outcome"] == "verified" and right["error"] is None
    assert right["pairs"]["computed_once"] == right["pairs"]["allowed"] == 48 * 48 * 8
    assert all(result["trace"]["matches_prediction"] for result in results)


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["dense-2x2"], 0),
        (["varlen-ring", "--policy", "extended"], 0),
        (["varlen-ring", "--policy", "unguarded"], 1),
        (["varlen-ring", "--set", "run.seed=1"], 3),
        (["varlen-ring", "dense-2x2"], 0),
        (["dense-2x2", "--set", "tokens.total=7"], 2),
        (["dense-2x2", "nowhere", "--set", "policy=unguarded"], 2),
        (["dense-2x2", "--engine", "yunchang"], 4),
        (["dense-2x2", "--set", "attention.backend=flash"], 4),
    ],
    ids=str,
)
def test_exit_codes(arguments: list[str], code: int) -> None:
    assert main(["run", *arguments]) == code


def test_a_result_has_the_shape_of_the_contract(capsys: Capture) -> None:
    main(["run", "dense-2x2", "--json"])
    result = json.loads(capsys.readouterr().out)
    shape: dict[str, Any] = {
        "result_version": int,
        "scenario": dict,
        "scenario_hash": str,
        "policy": str,
        "release": str,
        "engine": str,
        "backend": str,
        "device": str,
        "world": int,
        "outcome": str,
        "error": type(None),
        "warnings": list,
        "accuracy": dict,
        "pairs": dict,
        "trace": dict,
        "timing": dict,
        "versions": dict,
    }
    assert {key: type(value) for key, value in result.items()} == shape
    assert (result["backend"], result["device"], result["world"]) == ("sdpa", "cpu", 4)
    accuracy = result["accuracy"]
    assert accuracy["rows"] == sum(rank["rows"] for rank in accuracy["per_rank"]) == 48
    assert accuracy["max_abs"] == max(rank["max_abs"] for rank in accuracy["per_rank"])
    assert set(result["pairs"]) == {"allowed", "computed_once", "missing", "repeated", "forbidden"}
    assert set(result["timing"]) == {"wall_ms", "attention_ms", "cold_start_ms"}
    assert {"usp_viz", "torch", "python"} <= set(result["versions"])


def test_a_program_of_its_own_runs_and_leaves_nothing_on_stderr() -> None:
    """From a pipe to JSON on stdout, the parent without torch."""
    probe = (
        "import sys; from usp_viz.cli import main; code = main(sys.argv[1:]); "
        "sys.exit('torch' if 'torch' in sys.modules else code)"
    )
    scenario = "mesh: {ring: 2}\ntensors: {heads: 2, head_dim: 8}\ntokens: {total: 8}\n"
    ended = subprocess.run(
        [sys.executable, "-c", probe, "run", "--json", "-"],
        input=scenario,
        capture_output=True,
        text=True,
        env=os.environ | {"NO_COLOR": "1"},
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stderr == ""
    assert json.loads(ended.stdout)["outcome"] == "verified"
