"""What is in the clipboard, as a scenario."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from usp_viz import rules
from usp_viz.errors import InvalidScenario
from usp_viz.rule_table import RULES
from usp_viz.scenario import Scenario
from usp_viz.ui.paste import CASES, command_in, error_in, find, recognise
from usp_viz.ui.writing import dump

README = (Path(__file__).parents[2] / "README.md").read_text("utf-8")
"""Quotes the three refusals word for word."""
TRACEBACK = """\
[2026-08-28 10:00:00] Scheduler hit an exception: Traceback (most recent call last):
  File "/opt/sglang/multimodal_gen/runtime/layers/attention/layer.py", line 878, in forward
    raise NotImplementedError(
NotImplementedError: {}
[rank3]:[W828 10:00:01] destroy_process_group() was not called
"""
REFUSALS = {
    "usp-varlen-ring": "Varlen USPAttention does not support ring parallelism yet.",
    "usp-mask-ring": (
        "USPAttention masked path supports ring parallelism only for batch-1 tail-pad metadata on "
        "the FA backend."
    ),
    "ulysses-ring": (
        "UlyssesAttention's all-to-all spans the combined sequence parallel group and is not "
        "ring-aware; it would silently shuffle across ring ranks"
    ),
}


def outcome(text: str) -> tuple[str, str | None]:
    """(name, rule that ends it under the sglang policy) of the scenario found."""
    written = recognise(text).written
    assert written is not None
    scenario = Scenario.parse(written)
    end = rules.ending(scenario)
    return scenario.name, end and end.rule


@pytest.mark.parametrize("rule", REFUSALS)
def test_each_refusal_is_found_bare_wrapped_and_in_a_traceback(rule: str) -> None:
    text = REFUSALS[rule]
    assert text in README
    wrapped = text.replace(" ring", "\n    ring")
    for pasted in (text, wrapped, TRACEBACK.format(text), f"E   NotImplementedError: {text}"):
        assert outcome(pasted) == (rule.removeprefix("usp-"), rule)


def test_the_later_words_of_the_mask_refusal_are_known_too() -> None:
    texts = [text for rule in RULES if rule.id == "usp-mask-ring" for text in rule.texts.values()]
    assert len(texts) > 1
    assert {error_in(text) and error_in(text)[0] for text in texts} == {"usp-mask-ring"}  # type: ignore[index]


@pytest.mark.parametrize("rule", CASES)
def test_every_rule_with_a_case_is_met_by_it(rule: str) -> None:
    entry = next(entry for entry in RULES if entry.id == rule)
    gaps = {"heads": 6, "ulysses": 4, "world": 4, "given": 3}
    for text in entry.texts.values():
        said = text.format(**gaps) if "{" in text else text
        assert outcome(f"{entry.cls}: {said}")[1] == rule


@pytest.mark.parametrize(
    ("command", "degrees"),
    [
        ("sglang generate --num-gpus 8 --ulysses-degree 4 --ring-degree 2", (4, 2)),
        ("--num-gpus=8 --ulysses-degree=4 --ring-degree=2", (4, 2)),
        ("--ulysses_degree 2 \\\n  --ring_degree 4", (2, 4)),
        ("python -m x --num-gpus 8 --ring-degree 2", (4, 2)),
        ("--num-gpus 8 --ulysses-degree 2", (2, 4)),
        ("--num-gpus 8 --tp-size 2", (4, 1)),
        ("--sp-degree 4 --ring-degree 4", (1, 4)),
        ("--ring-degree 2", (1, 2)),
        ("--num-gpus '8' --ulysses-degree \"8\"", (8, 1)),
    ],
)
def test_degrees_of_a_launch_command(command: str, degrees: tuple[int, int]) -> None:
    launch = command_in(command)
    assert launch is not None
    assert (launch.ulysses, launch.ring) == degrees
    written = recognise(command).written
    assert written is not None
    assert (written["mesh"]["ulysses"], written["mesh"]["ring"]) == degrees
    assert rules.ending(Scenario.parse(written)) is None


def test_a_ring_offers_the_three_refusals_on_its_mesh() -> None:
    found = recognise("--ulysses-degree 4 --ring-degree 2")
    ends = [rules.ending(Scenario.parse(written)) for _, written in found.choices]
    assert [end and end.rule for end in ends] == list(REFUSALS)
    assert all(written["mesh"]["ring"] == 2 for _, written in found.choices)
    assert not recognise("--ulysses-degree 8 --ring-degree 1").choices


def test_command_and_error_together_are_one_scenario() -> None:
    text = "$ sglang serve --num-gpus 8 --ulysses-degree 4 --ring-degree 2\n"
    text += TRACEBACK.format(REFUSALS["usp-varlen-ring"])
    written = recognise(text).written
    assert written is not None
    assert written["mesh"] == {"ulysses": 4, "ring": 2}
    assert len(written["tokens"]["shards"]) == 8
    assert outcome(text)[1] == "usp-varlen-ring"


def test_what_is_too_large_is_shrunk_and_says_so() -> None:
    text = "--num-gpus 64 --ulysses-degree 16 --ring-degree 4 " + REFUSALS["usp-mask-ring"]
    found = recognise(text)
    assert found.written is not None
    assert found.written["mesh"] == {"ulysses": 2, "ring": 2}
    assert outcome(text)[1] == "usp-mask-ring"
    assert "U 16 → 2" in found.said[-1]
    assert "R 4 → 2" in found.said[-1]


def test_degrees_that_do_not_fit_the_gpus_are_said() -> None:
    found = recognise("--num-gpus 8 --ulysses-degree 4 --ring-degree 4")
    assert any("there are 8 ranks" in line for line in found.said)


def test_a_scenario_file_is_one() -> None:
    scenario = Scenario.load("dense-mask-ring")
    found = recognise(dump(scenario.as_written()))
    assert found.written == scenario.as_written()


@pytest.mark.parametrize(
    "text", ["hello", "<img onerror=alert(1)>", "${x}", "\0", "--help", "[" * 9999]
)
def test_anything_else_is_said_to_be_unknown(text: str) -> None:
    found = json.loads(find(text))
    assert found["text"] is None
    assert found["said"]
    assert not found["choices"]


@pytest.mark.parametrize(
    "flag", ["--ring-degree 0", "--ring-degree two", "--num-gpus 99999999", "--ring-degree"]
)
def test_a_flag_without_a_number_names_itself(flag: str) -> None:
    with pytest.raises(InvalidScenario) as caught:
        recognise(flag)
    assert caught.value.key == flag.split()[0]
    assert json.loads(find(flag))["text"] is None
