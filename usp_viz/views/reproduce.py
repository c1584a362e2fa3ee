"""How to see it again: the shell command and the Python that run exactly this scenario.

Both give a scenario of the same hash. Prose (title, description) and expectations are left out:
they are no part of the question, and need no quoting then.
"""

from __future__ import annotations

import pprint
from functools import cache
from typing import Any

import yaml

from usp_viz.errors import InvalidScenario
from usp_viz.loading import bundled, parse_value
from usp_viz.scenario import Scenario
from usp_viz.views.verdict import set_flags

PROSE = ("title", "description", "expect")
MOST_CHANGES = 6
"""A scenario further than this from a bundled one is written out instead."""
FLAGS = {"policy": "--policy", "release": "--release", "engine": "--engine"}
END = "SCENARIO"


def command(scenario: Scenario) -> str:
    """A shell command, one line or with a here-document."""
    changes = _changes(scenario)
    if changes is not None:
        flags = [f"{FLAGS[key]} {changes[key]}" for key in FLAGS if key in changes]
        sets = {key: _written(value) for key, value in changes.items() if key not in FLAGS}
        return " ".join(filter(None, ["usp-viz run", scenario.name, *flags, set_flags(sets)]))
    return f"usp-viz run - <<'{END}'\n{as_yaml(scenario)}{END}"


def python(scenario: Scenario) -> str:
    """A script."""
    changes = _changes(scenario)
    if changes is None:
        data = pprint.pformat(_question(scenario), sort_dicts=False, width=88)
        made = f"Scenario.parse({data})"
    else:
        changes |= {"expect": None}
        made = f'Scenario.load("{scenario.name}", {pprint.pformat(changes, width=72)})'
    return (
        "from usp_viz import Scenario, run\n\n"
        f"scenario = {made}\n"
        "result = run(scenario)\n"
        "print(result.outcome, result.to_json())\n"
    )


def as_yaml(scenario: Scenario) -> str:
    """The question as a scenario file; no line of it can end a here-document."""
    return yaml.safe_dump(
        _question(scenario), sort_keys=False, default_flow_style=None, width=88, allow_unicode=True
    )


def _question(scenario: Scenario) -> dict[str, Any]:
    """What was written, without prose."""
    return {key: value for key, value in scenario.as_written().items() if key not in PROSE}


def _changes(scenario: Scenario) -> dict[str, Any] | None:
    """Dotted keys that differ from the bundled scenario of that name; None if none is near."""
    base = _dotted(scenario.name)
    if base is None:
        return None
    ours = scenario.dotted()
    changed = {
        key: ours.get(key)
        for key in ours.keys() | base.keys()
        if key.split(".")[0] not in PROSE and base.get(key) != ours.get(key)
    } | {"policy": scenario.policy}
    if len(changed) > MOST_CHANGES:
        return None
    ordered = {key: changed[key] for key in sorted(changed)}
    try:
        again = Scenario.load(scenario.name, ordered)
    except InvalidScenario:
        return None
    return ordered if again.hash == scenario.hash else None


@cache
def _dotted(name: str) -> dict[str, Any] | None:
    return Scenario.load(name).dotted() if name in bundled() else None


def _written(value: Any) -> Any:
    """A string that YAML would read as something else is quoted; the rest `set_flags` writes."""
    if isinstance(value, str) and parse_value(value) != value:
        return f'"{value}"'
    return value
