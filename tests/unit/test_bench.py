"""What a bench says, and what it says when it cannot measure."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from usp_viz.bench.figures import BenchReport, Figure, median
from usp_viz.bench.page import LARGE, MIDDLE, chips, drawn
from usp_viz.cli import main


@pytest.mark.parametrize(
    ("value", "goal", "met"),
    [
        (3, "<= 3", True),
        (3.1, "<= 3", False),
        (50, ">= 50", True),
        (49, ">= 50", False),
        (9, "", True),
    ],
)
def test_a_figure_meets_its_goal(value: float, goal: str, met: bool) -> None:
    assert Figure("f", value, "s", goal, 1).met is met


def test_one_slow_run_does_not_move_a_median() -> None:
    report = BenchReport((median("opening", [1, 900, 2], "s", "<= 3"),))
    (figure,) = report.to_json()["figures"]
    assert figure["value"] == 2 and figure["met"] and figure["runs"] == 3
    assert report.text().startswith("✓ opening") and "1 … 900" in report.text()


def test_replays_have_the_size_that_the_goals_are_for() -> None:
    for mesh, ranks, count in ((MIDDLE, 16, 1024), (LARGE, 64, 2048)):
        replay = drawn(mesh)
        assert len(replay.data["mesh"]["at"]) == ranks and chips(replay) == count


def test_without_chromium_it_says_how_to_get_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert main(["bench", "page", "--quick"]) == 4
    said = capsys.readouterr()
    assert not said.out and "Chromium" in said.err and "apt-get install chromium" in said.err


def test_without_playwright_it_says_how_to_get_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "playwright.sync_api", None)
    assert main(["bench", "page", "--quick"]) == 4
    assert "pip install 'playwright" in capsys.readouterr().err
