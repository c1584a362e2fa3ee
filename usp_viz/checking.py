"""Predict what a release does with a scenario, without running anything."""

from __future__ import annotations

from typing import Any

from usp_viz import rules
from usp_viz.scenario import Scenario

RESULT_VERSION = 1


def check(scenario: Scenario) -> dict[str, Any]:
    """The prediction of `scenario` under its own policy and release; see docs/formats.md.

    Returns:
        ``predicted`` (an outcome), ``error`` (the refusal with its rule, reasons and fixes, or
        None), and ``warnings`` about rows that come back silently wrong.
    """
    refusal = rules.refusal(scenario, policy=scenario.policy)
    error = None
    if refusal is not None:
        error = {"class": refusal.cls, "message": refusal.message, "rule": refusal.rule}
        error |= refusal.details() | {"ranks": list(range(scenario.mesh.ranks))}
    return {
        "result_version": RESULT_VERSION,
        "scenario_hash": scenario.hash,
        "policy": scenario.policy,
        "release": scenario.release,
        "predicted": rules.predict(scenario),
        "error": error,
        "warnings": [
            {"id": warning.id, "text": warning.text}
            for warning in rules.warnings(scenario, scenario.policy)
        ],
    }
