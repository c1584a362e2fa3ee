"""What the page says about a run: errors by token and head, costs, how to see it again."""

from __future__ import annotations

import base64
import io
import json
import math
import shlex
import subprocess
import sys
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import usp_viz
from usp_viz import Scenario, simulate
from usp_viz.cli import main
from usp_viz.loading import bundled
from usp_viz.runtime.accuracy import own_rows, score
from usp_viz.runtime.result import Problem, Run
from usp_viz.runtime.verify import answer_of
from usp_viz.ui.details import details
from usp_viz.views import reproduce
from usp_viz.views.charts import CONFIG, figures, plot_json, tokens
from usp_viz.views.errormap import ErrorMap
from usp_viz.views.spent import Spent

SMALL: dict[str, Any] = {
    "name": "mine",
    "mesh": {"ulysses": 2, "ring": 2},
    "tensors": {"heads": 4, "head_dim": 8},
    "tokens": {"total": 16, "layout": "zigzag", "documents": [6, 10]},
    "policy": "extended",
}
LANES = dict.fromkeys(range(4), ((1, "pack", 0.0, 0.001), (2, "attend", 0.002, 0.005)))


def made(scenario: Scenario, errors: dict[tuple[int, int, int], float], **more: Any) -> Run:
    """A run whose outputs are off by `errors`, by (rank, place in its rows, head)."""
    answer = answer_of(scenario)
    outs = {r: answer.out[:, own_rows(scenario, r)] for r in range(scenario.mesh.ranks)}
    for (rank, place, head), error in errors.items():
        outs[rank][0, place, head, 3] += error
    found = score(scenario, answer, outs)
    return Run(
        scenario=scenario,
        outcome="wrong" if found.wrong_rows else "verified",
        backend="sdpa",
        device="cpu",
        trace=simulate(scenario),
        differences=(),
        timing={"wall_ms": 1.0, "attention_ms": 1.0, "cold_start_ms": None},
        versions={},
        accuracy=found,
        outs=outs,
        lanes=LANES,
        **more,
    )


def mapped(run: Run) -> dict[str, Any]:
    return ErrorMap.of(run, answer_of(run.scenario)).to_json()


def decoded(data: dict[str, Any]) -> np.ndarray[Any, Any]:
    return np.frombuffer(base64.b64decode(data["codes"]), np.uint8).reshape(-1, data["heads"])


def refused(scenario: Scenario) -> Run:
    from usp_viz import rules

    end = rules.refusal(scenario)
    assert end is not None
    ranks = tuple(range(scenario.mesh.ranks))
    problem = Problem(end.cls, end.message, ranks, end.rule, end.details())
    base = made(Scenario.parse(SMALL), {})
    return replace(
        base,
        scenario=scenario,
        outcome="refused",
        problem=problem,
        trace=simulate(scenario),
        accuracy=None,
        outs={},
        lanes={},
    )


# -- the error map -----------------------------------------------------------------------------


def test_an_error_shows_at_its_own_token_and_head_on_its_own_rank() -> None:
    run = made(Scenario.parse(SMALL), {(2, 1, 3): 0.5, (0, 0, 0): 2e-3})
    data = mapped(run)
    # Zigzag over R = 2: ring position 1 holds chunks 1 and 2 of 4, its first rank rows 4 to 7.
    assert data["largest"][0] == {"row": 5, "head": 3, "rank": 2, "value": pytest.approx(0.5)}
    assert data["largest"][1] == {"row": 0, "head": 0, "rank": 0, "value": pytest.approx(2e-3)}
    assert [b["rows"] for b in data["blocks"]] == [
        [[0, 4, 1]],
        [[12, 4, 1]],
        [[4, 4, 1]],
        [[8, 4, 1]],
    ]
    codes = decoded(data)
    wrong = np.argwhere(codes > data["limit"]).tolist()
    assert wrong == [[0, 0], [9, 3]]
    exponent = data["lowest"] + (codes[9, 3] - 1) / data["per_decade"]
    assert 0.5 <= 10**exponent * (1 + 1e-9) < 0.5 * 10**0.1001
    assert data["borders"] == [6]


def test_a_cell_is_on_the_right_side_of_the_tolerance_however_close() -> None:
    scenario = Scenario.parse(SMALL)
    limit = made(scenario, {}).accuracy.tolerance  # type: ignore[union-attr]
    run = made(scenario, {(0, 0, 0): limit * 0.999, (0, 1, 0): limit * 1.001})
    data = mapped(run)
    codes = decoded(data)
    assert codes[0, 0] <= data["limit"] < codes[1, 0]


def test_nan_is_the_largest_error_and_padding_is_none() -> None:
    masked = Scenario.parse(SMALL | {"attention": {"mask": {"tail_pad": {"start": 14}}}})
    data = mapped(made(masked, {(0, 2, 1): math.nan, (1, 3, 2): 1e9, (3, 0, 0): math.inf}))
    codes = decoded(data)
    assert codes[2, 1] == 255 and codes[12, 0] == 255
    assert not codes[6:8].any(), "rows 14 and 15 are padding, whatever stands there"
    assert [(e["rank"], e["row"]) for e in data["largest"][:2]] == [(0, 2), (3, 8)]
    json.dumps(details(made(masked, {(0, 2, 1): math.nan})), allow_nan=False)


def test_many_rows_share_a_column_that_shows_the_worst() -> None:
    big = Scenario.parse(
        SMALL | {"tokens": {"total": 8192}, "tensors": {"heads": 4, "head_dim": 8}}
    )
    run = made(Scenario.parse(SMALL), {})
    whole = ErrorMap.of(run, answer_of(run.scenario)).blocks[0]
    rows = np.arange(8192)
    errors = np.full((8192, 4), 1e-7)
    errors[4097, 2] = 1.0
    block = replace(whole, rows=rows, scored=np.ones(8192, np.bool_), errors=errors)
    data = ErrorMap((block,), 1e-5, (), (0, 8192)).to_json()
    size = data["rows_per_column"]
    assert size > 1 and big.tokens.total // size <= 12_288 // 4
    assert np.argwhere(decoded(data) > data["limit"]).tolist() == [[4097 // size, 2]]


# -- to see it again -----------------------------------------------------------------------------


WRITTEN = Scenario.parse(
    SMALL
    | {
        "title": "SCENARIO\nSCENARIO\n'; exit 7; $(exit 7) <b>${x}",
        "description": "# a: b\n---\n",
        "release": "0.5.23",
        "tensors": {"heads": 4, "head_dim": 8, "values": {"list": [float(n) for n in range(16)]}},
        "attention": {"mask": [{"window": {"left": 3, "right": None}}, {"tail_pad": {"start": 9}}]},
    }
)
CHANGED = Scenario.load(
    "varlen-ring", {"tokens.shards": "auto", "attention.mask": {"key": {"valid": [40]}}}
).set({"release": "0.5.23", "policy": "unguarded", "expect": None})
AGAIN = [
    *(Scenario.load(name).set({"policy": p}) for name in bundled() for p in ("sglang", "extended")),
    CHANGED,
    WRITTEN,
]


@pytest.mark.parametrize("scenario", AGAIN, ids=lambda s: f"{s.name}-{s.policy}")
def test_command_and_python_ask_the_same_question(
    scenario: Scenario, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    first, _, rest = reproduce.command(scenario).partition("\n")
    words = shlex.split(first.partition("<<")[0])
    assert words[:2] == ["usp-viz", "run"]
    written = io.TextIOWrapper(io.BytesIO(rest.rpartition("\n")[0].encode()))
    monkeypatch.setattr(sys, "stdin", written)
    main(["check", *words[2:], "--json"])
    assert json.loads(capsys.readouterr().out)["scenario_hash"] == scenario.hash

    asked: list[Scenario] = []

    class Ran:
        outcome = "verified"

        def to_json(self) -> dict[str, Any]:
            return {}

    monkeypatch.setattr(usp_viz, "run", lambda s: asked.append(s) or Ran(), raising=False)
    exec(reproduce.python(scenario), {})
    assert [s.hash for s in asked] == [scenario.hash]


def test_a_shell_reads_the_written_out_scenario_as_it_is() -> None:
    text = reproduce.command(WRITTEN)
    assert text.startswith("usp-viz run - <<'SCENARIO'\n")
    script = text.replace(
        "usp-viz run", f"{shlex.quote(sys.executable)} -m usp_viz check --json", 1
    )
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=False)
    assert json.loads(done.stdout)["scenario_hash"] == WRITTEN.hash


# -- refusals, costs, size -------------------------------------------------------------------------


def test_a_refusal_comes_with_its_reason_and_what_is_behind_it() -> None:
    scenario = Scenario.load("varlen-ring")
    found = details(refused(scenario))
    assert found["rule"]["id"] == "usp-varlen-ring" and found["rule"]["who"]
    assert "own Ulysses group only" in found["rule"]["behind"]
    assert found["rule"]["behind_is_seen"] is False
    unguarded = scenario.set({"policy": "unguarded", "expect": None})
    ran = replace(made(Scenario.parse(SMALL), {(1, 0, 0): 1.5}), scenario=unguarded)
    seen = details(refused(scenario), behind=ran)["rule"]
    assert seen["behind_is_seen"] is True
    assert seen["behind"].startswith("Behind the guard 1 of 16 rows come out wrong, by up to 1.5")


def test_what_is_no_guard_promises_nothing_behind_it() -> None:
    scenario = Scenario.load("packed-documents").set(
        {"policy": "sglang", "tokens.replicated.prefix": 3, "expect": None}
    )
    found = details(refused(scenario))["rule"]
    assert found["guard"] is False and found["behind"] is None


def test_costs_stand_beside_their_prediction() -> None:
    run = made(Scenario.parse(SMALL), {})
    spent = Spent.of(run).to_json()
    # One Ulysses peer gets half the heads of Q, K, V (4 rows x 2 heads x 8 x 4 B), one takes the
    # KV of the group's 8 rows a hop further, and half the rows' output goes back.
    each = 4 * 2 * 8 * 4
    assert spent["sent"]["predicted"] == [3 * each + 2 * 2 * each + each] * 4
    assert spent["measured"][0] == [0, 1, "copy", "pack", 0, 1000]
    assert spent["measured"][1] == [0, 2, "compute", "attend", 2000, 5000]
    busy = sum(b - a for _, _, kind, _, a, b in spent["predicted"] if kind == "compute")
    assert busy == pytest.approx(4 * 3000, abs=20), "the model's FLOP rate is this run's"


def test_details_stay_small() -> None:
    scenario = Scenario.load("varlen-ring").set({"policy": "extended", "expect": None})
    text = json.dumps(details(made(scenario, {(0, 0, 0): 1.0})), allow_nan=False)
    assert len(text) < 30_000


def test_charts_draw_every_lane_in_the_colours_of_the_theme() -> None:
    spent = Spent.of(made(Scenario.parse(SMALL), {}))
    for theme in ("light", "dark"):
        drawn = {name: json.loads(plot_json(f)) for name, f in figures(spent, theme).items()}
        assert set(drawn) == {"timeline", "bytes", "memory"}
        bars = {bar["name"]: bar for bar in drawn["timeline"]["data"]}
        computed = [
            length
            for length, part in zip(bars["computing"]["x"], bars["computing"]["y"][1], strict=True)
            if part == "measured"
        ]
        assert computed == pytest.approx([3.0] * 4)
        assert bars["computing"]["marker"]["color"] == tokens(theme)["c0"]
        assert drawn["bytes"]["layout"]["paper_bgcolor"] == tokens(theme)["panel"]
        assert drawn["bytes"]["config"] == CONFIG
    assert tokens("light")["ink"] != tokens("dark")["ink"]
    assert CONFIG["showSendToCloud"] is False and CONFIG["displaylogo"] is False
