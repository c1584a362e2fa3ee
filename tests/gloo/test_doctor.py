"""The doctor's findings, on this machine and on machines that lack something."""

from __future__ import annotations

import json
import sys
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import pytest

from usp_viz import cli
from usp_viz.errors import MissingRequirement
from usp_viz.runtime import doctor
from usp_viz.runtime.doctor import Finding, examine
from usp_viz.runtime.pool import RankPool

pytestmark = pytest.mark.gloo


def by_name(findings: list[Finding]) -> dict[str, Finding]:
    return {finding.name: finding for finding in findings}


def refuse(self: RankPool, *args: Any, **options: Any) -> Any:
    raise MissingRequirement("The rank processes need the module torch", "pip install torch")


@pytest.fixture
def no_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RankPool, "run", refuse)


def test_this_machine_is_fine(capsys: pytest.CaptureFixture[str]) -> None:
    before = "torch" in sys.modules
    assert cli.main(["doctor", "--json"]) == 0
    assert ("torch" in sys.modules) is before
    found = {finding["name"]: finding for finding in json.loads(capsys.readouterr().out)}
    assert found["torch"]["text"] == version("torch")
    assert "verified" in found["ranks (gloo)"]["text"]
    assert found["engine builtin"]["ok"]
    assert all(finding["ok"] for finding in found.values() if finding["needed"])


def test_what_is_missing_says_how_to_get_it(
    no_ranks: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def absent(package: str) -> str:
        raise PackageNotFoundError(package)

    monkeypatch.setattr(doctor, "version", absent)
    monkeypatch.setattr(doctor.shutil, "which", lambda name: None)
    found = by_name(examine())
    for name in ("torch", "gradio", "flash-attn", "triton"):
        assert not found[name].ok
        assert "pip install" in found[name].text
    assert "apt-get install chromium" in found["chromium"].text
    assert "pip install torch" in found["ranks (gloo)"].text
    assert found["torch"].needed and found["ranks (gloo)"].needed
    assert not found["flash-attn"].needed


def test_exit_code_when_something_needed_is_missing(no_ranks: None) -> None:
    assert cli.main(["doctor"]) == 4


def test_caps_that_make_no_sense(no_ranks: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("USP_VIZ_MAX_RANKS", "many")
    caps = by_name(examine())["caps"]
    assert not caps.ok
    assert "USP_VIZ_MAX_RANKS" in caps.text


def test_a_cap_below_two_ranks_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("USP_VIZ_MAX_RANKS", "1")
    ranks = by_name(examine())["ranks (gloo)"]
    assert not ranks.ok
    assert "USP_VIZ_MAX_RANKS" in ranks.text


def test_caps_in_force_are_shown(no_ranks: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("USP_VIZ_MAX_RANKS", "7")
    monkeypatch.setenv("USP_VIZ_MAX_TOKENS", "1234")
    text = by_name(examine())["caps"].text
    assert "7 ranks" in text
    assert "1,234 rows" in text
