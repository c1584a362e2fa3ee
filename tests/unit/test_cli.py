"""Exit codes, streams and flags of the command line, with stand-ins for the ranks."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from collections.abc import Callable
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest

from usp_viz.cli import main, worst
from usp_viz.errors import MissingRequirement, RunCancelled
from usp_viz.loading import bundled
from usp_viz.plan import simulate
from usp_viz.runtime import verify
from usp_viz.runtime.accuracy import Accuracy, RankAccuracy
from usp_viz.runtime.result import Problem, Run
from usp_viz.scenario import Scenario

Capture = pytest.CaptureFixture[str]


def pretend(scenario: Scenario, outcome: Any) -> Run:
    """A run that ended like this."""
    judged = outcome in ("verified", "wrong")
    wrong = 3 if outcome == "wrong" else 0
    rule = "usp-varlen-ring" if outcome == "refused" else None
    return Run(
        scenario=scenario,
        outcome=outcome,
        backend="sdpa",
        device="cpu",
        trace=simulate(scenario),
        differences=(),
        timing={"wall_ms": 5.0, "attention_ms": 1.0, "cold_start_ms": None},
        versions={},
        accuracy=Accuracy(0.5, 0.5, 1e-5, (RankAccuracy(0, 48, wrong, 0.5),)) if judged else None,
        problem=None if judged else Problem("NotImplementedError", "No.", (0,), rule),
    )


@pytest.fixture
def outcomes(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What each scenario's run comes to, by its name or policy; and what was asked to run."""
    table: dict[str, Any] = {}
    asked: list[Scenario] = []

    def run(scenario: Scenario, *_: Any, **__: Any) -> Run:
        asked.append(scenario)
        outcome = table.get(scenario.name) or table.get(scenario.policy) or "verified"
        if isinstance(outcome, BaseException):
            raise outcome
        return pretend(scenario, outcome)

    monkeypatch.setattr(verify, "run", run)
    table["asked"] = asked
    return table


@pytest.fixture
def file(tmp_path: Path) -> Callable[..., str]:
    """Write a scenario file; gives its path."""

    def write(name: str, text: str = "") -> str:
        (tmp_path / f"{name}.yaml").write_text(f"name: {name}\n{text}")
        return str(tmp_path / f"{name}.yaml")

    return write


# -- exit codes ----------------------------------------------------------------------------------

CODES = {"verified": 0, "wrong": 1, "refused": 3, "crashed": 5, "timeout": 5}


@pytest.mark.parametrize("outcome", CODES)
def test_one_run(outcome: str, outcomes: Any, file: Any, capsys: Capture) -> None:
    outcomes["one"] = outcome
    assert main(["run", file("one")]) == CODES[outcome]
    out, err = capsys.readouterr()
    assert outcome.upper() in out and err == ""
    assert main(["run", "--json", file("one")]) == CODES[outcome]
    out, err = capsys.readouterr()
    assert json.loads(out)["outcome"] == outcome and err == ""


def test_something_missing_is_4_and_says_the_line(
    outcomes: Any, file: Any, capsys: Capture
) -> None:
    outcomes["one"] = MissingRequirement("No GPU here", "pip install a-gpu")
    assert main(["run", file("one")]) == 4
    assert "missing: No GPU here. pip install a-gpu" in capsys.readouterr().err


@pytest.mark.parametrize("stop", [KeyboardInterrupt(), RunCancelled("stop")], ids=repr)
def test_interrupted_is_130(stop: Any, outcomes: Any, file: Any, capsys: Capture) -> None:
    outcomes["one"] = stop
    assert main(["run", file("one"), file("two")]) == 130
    assert capsys.readouterr() == ("", "usp-viz: interrupted\n")


def test_the_worst_of_several() -> None:
    order = [5, 4, 2, 1, 3, 0]
    for n, bad in enumerate(order):
        for rest in permutations(order[n:], min(3, len(order) - n)):
            assert worst([*rest, bad]) == worst([bad, *rest]) == bad
    assert worst([]) == 0


def test_several_files_each_have_a_say(outcomes: Any, file: Any, capsys: Capture) -> None:
    files = [file(name) for name in ("good", "wrong", "refused", "crashed", "missing")]
    outcomes |= {name: name for name in ("wrong", "refused", "crashed")}
    outcomes["missing"] = MissingRequirement("No GPU", "Buy one.")
    broken = file("broken", "mesh: {ring: two}")
    assert main(["run", *files, broken]) == 5
    assert main(["run", *(f for f in files if "crashed" not in f), broken]) == 4
    assert main(["run", files[0], files[1], files[2], broken]) == 2
    assert main(["run", files[2], files[1], files[0]]) == 1
    assert main(["run", files[0], files[2]]) == 3
    assert main(["run", files[0]]) == 0
    capsys.readouterr()
    main(["run", "--json", *files[:4], broken])
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["outcome"] for line in lines] == [
        "verified",
        "wrong",
        "refused",
        "crashed",
        "invalid",
    ]


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["frobnicate"],
        ["run"],
        ["check"],
        ["simulate"],
        ["simulate", "dense-2x2", "varlen-ring"],
        ["run", "dense-2x2", "--bogus"],
        ["run", "dense-2x2", "--set"],
        ["run", "dense-2x2", "--policy"],
        ["schema", "nothing"],
        ["ui", "--port", "many"],
    ],
    ids=str,
)
def test_bad_usage_is_2_in_one_line(arguments: list[str], capsys: Capture) -> None:
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    out, err = capsys.readouterr()
    assert stop.value.code == 2 and out == ""
    assert err.startswith("usp-viz: ") and err.count("\n") == 1 and "--help" in err


@pytest.mark.parametrize(
    ("arguments", "key"),
    [
        (["--policy", "sgl"], "policy"),
        (["--release", "9.9"], "release"),
        (["--set", "mesh.rng=2"], "mesh.rng"),
        (["--set", "mesh.ring"], "--set"),
        (["--set", "tokens.shards=[1,"], "--set tokens.shards"),
    ],
    ids=str,
)
@pytest.mark.parametrize("command", ["run", "check", "simulate"])
def test_flags_that_make_no_scenario_are_2(
    command: str, arguments: list[str], key: str, outcomes: Any, capsys: Capture
) -> None:
    assert main([command, "dense-2x2", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1
    assert f"invalid: {key}: " in err
    assert not outcomes["asked"]


# -- what is asked -------------------------------------------------------------------------------


def test_flags_change_the_scenario(outcomes: Any) -> None:
    flags = ["--policy", "sglang", "--release", "0.5.20", "--engine", "yunchang"]
    main(["run", "varlen-ring", *flags, "--set", "mesh.ring=1", "--set", "tokens.shards=auto"])
    (asked,) = outcomes["asked"]
    assert (asked.policy, asked.release, asked.engine) == ("sglang", "0.5.20", "yunchang")
    assert (asked.mesh.ring, asked.tokens.shards) == (1, "auto")


def test_a_set_may_mend_what_a_file_has_wrong(outcomes: Any, file: Any) -> None:
    broken = file("broken", "mesh: {ring: 2}\ntokens: {total: 7}")
    assert main(["run", broken]) == 2
    assert main(["run", broken, "--set", "tokens.shards=auto"]) == 0


def test_all_policies_give_three_lines(outcomes: Any, capsys: Capture) -> None:
    outcomes |= {"sglang": "refused", "unguarded": "wrong"}
    assert main(["run", "varlen-ring", "--policy", "all", "--json"]) == 1
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["policy"] for line in lines] == ["sglang", "unguarded", "extended"]
    assert [line["outcome"] for line in lines] == ["refused", "wrong", "verified"]
    assert len({line["scenario_hash"] for line in lines}) == 3


EXPECTING = "policy: sglang\nexpect: {outcome: refused, error: usp-varlen-ring}\n"


def test_expectations_decide_the_code(outcomes: Any, file: Any, capsys: Capture) -> None:
    path = file("one", EXPECTING)
    outcomes["one"] = "refused"
    assert main(["run", path]) == 0
    assert capsys.readouterr().err == ""
    outcomes["one"] = "verified"
    assert main(["run", path]) == 1
    assert "expected usp-varlen-ring, got verified" in capsys.readouterr().err
    outcomes["one"] = "refused"
    other = file("one", EXPECTING.replace("usp-varlen-ring", "usp-mask-ring"))
    assert main(["run", other]) == 1


@pytest.mark.parametrize(
    ("flags", "code"),
    [
        (["--policy", "extended"], 3),
        (["--release", "0.5.23"], 3),
        (["--set", "policy=unguarded"], 3),
        (["--set", "mesh.ulysses=2"], 3),
        (["--policy", "all"], 3),
        (["--policy", "sglang"], 0),  # what the file says anyway
        (["--release", "0132848349"], 0),
        (["--set", "title=Another"], 0),
        (["--set", "expect={outcome: wrong}"], 1),  # asked for just now
        (["--policy", "extended", "--set", "expect={outcome: refused}"], 0),
        (["--set", "expect=null"], 3),
    ],
    ids=str,
)
def test_expect_binds_the_file_s_own_question_only(
    flags: list[str], code: int, outcomes: Any, file: Any
) -> None:
    outcomes["one"] = "refused"
    assert main(["run", file("one", EXPECTING), *flags]) == code


def test_standard_input_is_read_once(
    outcomes: Any, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    text = b"name: piped\npolicy: sglang\nexpect: {outcome: verified}"
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text)))
    assert main(["run", "-", "--set", "mesh.ring=2"]) == 0
    (asked,) = outcomes["asked"]
    assert (asked.name, asked.mesh.ring, asked.expect) == ("piped", 2, None)


# -- what is printed -----------------------------------------------------------------------------


def test_json_of_what_is_no_scenario(outcomes: Any, file: Any, capsys: Capture) -> None:
    assert main(["run", "--json", file("broken", "mesh: [")]) == 2
    out, err = capsys.readouterr()
    result = json.loads(out)
    assert result["outcome"] == "invalid" and result["scenario"] is None
    assert result["scenario_hash"] is None
    error = result["error"]
    assert error["class"] == "InvalidScenario" and "not YAML or JSON" in error["message"]
    assert err.count("\n") == 1

    assert main(["run", "--json", file("broken", "tokens: {total: 7}\nmesh: {ring: 2}")]) == 2
    error = json.loads(capsys.readouterr().out)["error"]
    assert (error["key"], error["value"], error["nearest"]) == ("tokens.total", 7, [6, 8])
    assert "S % P == 0" in error["limit"]


def test_over_a_cap_is_invalid_before_any_rank(
    monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    def started(*_: Any, **__: Any) -> None:
        raise AssertionError("a pool was asked to run")

    monkeypatch.setattr("usp_viz.runtime.pool.RankPool.run", started)
    sets = ["--set", "mesh.ring=32", "--set", "mesh.ulysses=32", "--set", "tokens.total=1048576"]
    assert main(["run", "dense-2x2", "--json", *sets]) == 2
    result = json.loads(capsys.readouterr().out)
    assert "USP_VIZ_MAX_RANKS" in result["error"]["limit"]
    assert result["scenario"]["mesh"]["ring"] == 32
    assert main(["check", "dense-2x2", "--policy", "extended", *sets]) == 0, "asking is no run"


def test_check_predicts(capsys: Capture) -> None:
    assert main(["check", "varlen-ring", "--json"]) == 3
    found = json.loads(capsys.readouterr().out)
    assert found["predicted"] == "refused"
    assert found["error"]["message"] == "Varlen USPAttention does not support ring parallelism yet."
    assert set(found) == {
        "result_version",
        "scenario_hash",
        "policy",
        "release",
        "predicted",
        "error",
        "warnings",
    }
    assert main(["check", "varlen-ring", "--policy", "extended"]) == 0
    assert main(["check", "causal-ring"]) == 0, "silently wrong is a warning"
    assert "warning" in capsys.readouterr().out
    assert main(["check", "dense-2x2", "varlen-ring"]) == 3
    assert main(["check", "dense-2x2", "varlen-ring", "nowhere"]) == 2
    capsys.readouterr()
    assert main(["check", "nowhere", "--json"]) == 2
    assert json.loads(capsys.readouterr().out)["predicted"] == "invalid"
    assert main(["check", "varlen-ring", "--policy", "all", "--json"]) == 3
    assert len(capsys.readouterr().out.splitlines()) == 3


def test_simulate_prints_the_trace(capsys: Capture) -> None:
    assert main(["simulate", "seven-tokens", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    trace = simulate(Scenario.load("seven-tokens"))
    assert printed == json.loads(json.dumps(trace.to_json()))
    assert main(["simulate", "seven-tokens", "--frames"]) == 0
    frames = capsys.readouterr().out
    assert main(["simulate", "seven-tokens"]) == 0
    assert 0 < len(capsys.readouterr().out) < len(frames)


def test_listings(capsys: Capture) -> None:
    assert main(["scenarios"]) == 0
    listed = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in listed] == list(bundled())
    assert main(["scenarios", "--json"]) == 0
    assert [s["name"] for s in json.loads(capsys.readouterr().out)] == list(bundled())
    for which in ("scenario", "trace", "result"):
        assert main(["schema", which]) == 0
        assert "$schema" in json.loads(capsys.readouterr().out)


def test_colour_is_for_terminals_that_want_it(
    outcomes: Any, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    def printed() -> str:
        main(["run", "dense-2x2"])
        return capsys.readouterr().out

    monkeypatch.delenv("NO_COLOR", raising=False)
    plain = printed()
    assert "\x1b" not in plain, "a pipe"
    monkeypatch.setattr(type(sys.stdout), "isatty", lambda _: True, raising=False)
    coloured = printed()
    assert "\x1b[32m" in coloured
    monkeypatch.setenv("NO_COLOR", "1")
    assert printed() == plain
    monkeypatch.setenv("NO_COLOR", "")
    assert printed() == coloured, "an empty value does not count"


# -- as a program --------------------------------------------------------------------------------


def program(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "usp_viz", *arguments]
    return subprocess.run(command, capture_output=True, text=True, **options)


def test_help_tells_the_exit_codes() -> None:
    ended = program("--help")
    assert ended.returncode == 0 and ended.stderr == ""
    for word in ("run", "check", "simulate", "scenarios", "schema", "doctor", "ui", "Exit codes"):
        assert word in ended.stdout


def test_a_reader_that_goes_away_is_no_error() -> None:
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w") as gone:
        ended = subprocess.run(
            [sys.executable, "-m", "usp_viz", "simulate", "dense-2x2", "--frames"],
            stdout=gone,
            stderr=subprocess.PIPE,
            text=True,
        )
    assert (ended.returncode, ended.stderr) == (0, "")


def test_names_that_no_terminal_should_see_raw() -> None:
    ended = program("check", "no\nsuch\x1b[2Jfile")
    assert ended.returncode == 2
    assert ended.stderr.count("\n") == 1 and "\x1b" not in ended.stderr


def test_undecodable_names_and_ascii_terminals() -> None:
    environment = os.environ | {"PYTHONIOENCODING": "ascii", "LC_ALL": "C"}
    command = [sys.executable, "-m", "usp_viz", "check", b"\xff\xfe.yaml"]
    ended = subprocess.run(command, capture_output=True, env=environment)
    assert ended.returncode == 2 and ended.stderr.count(b"\n") == 1
    for arguments in (["run", "--json", "nowhere"], ["check", "varlen-ring"], ["scenarios"]):
        ended = subprocess.run(
            [sys.executable, "-m", "usp_viz", *arguments], capture_output=True, env=environment
        )
        assert b"Traceback" not in ended.stderr, arguments
    assert b"UlyssesAttention meets ring: the third refusal" in ended.stdout
