"""What the page asks the server: everything about one scenario, at once, as one JSON text.

A scenario arrives as text, as a bundled name, as an address or as text with dotted changes, and may
be wrong: then the answer says what is wrong, at which line, and what would be legal, and keeps what
was written. Nothing here starts a rank.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from usp_viz.checking import check
from usp_viz.errors import InvalidScenario
from usp_viz.loading import parse_mapping, set_dotted
from usp_viz.mask import Visibility
from usp_viz.plan import simulate
from usp_viz.runtime.verify import check_limits
from usp_viz.scenario import POLICIES, Policy, Scenario
from usp_viz.ui import answers, url
from usp_viz.ui.caps import check_prediction, check_trace
from usp_viz.ui.legal import offers
from usp_viz.ui.writing import dump, line_of
from usp_viz.views.pattern import pattern
from usp_viz.views.scene import scene, what_follows

Json = dict[str, Any]
FIRST = "varlen-ring"
THUMBNAIL = 48
"""Cells on a side of the mask's picture."""
MAX_SCENE_RANKS = 256


def look(asked: Any) -> str:
    """Everything about a scenario; see `answer`."""
    found = answers.guarded(lambda: answer(asked if isinstance(asked, Mapping) else {}))
    return json.dumps(found, separators=(",", ":"))


def answer(asked: Mapping[str, Any]) -> Json:
    """The scenario as text and normalised, what is legal, its prediction and its picture.

    Args:
        asked: ``name``, ``address`` or ``text``; ``set``: dotted changes to it; ``show``: the
            policy that the picture is of.
    """
    text, written = "", None
    try:
        text, written = _written(asked)
        sets = asked.get("set")
        if isinstance(sets, Mapping) and sets:
            written = set_dotted(written, {str(key): value for key, value in sets.items()})
            written.pop("expect", None)  # it spoke of the file before it was changed
            text = dump(written)
        scenario = Scenario.parse(written)
        return {"text": text, **_about(scenario, written, asked.get("show"))}
    except InvalidScenario as error:
        if not text and written is None:
            text = str(asked.get("text") or "")
        return {"text": text, "error": problem(error, text)}


def problem(error: InvalidScenario, text: str) -> Json:
    """An error as the page shows it: what, where in the text, and what could stand there."""
    return {**error.as_json(), "line": line_of(text, error)}


def _written(asked: Mapping[str, Any]) -> tuple[str, Json]:
    """The scenario's text and what it says.

    Raises:
        InvalidScenario: It is no mapping.
    """
    name = asked.get("name")
    if isinstance(name, str):
        text = answers.bundled_text(name) if name in answers.bundled() else ""
        return text, parse_mapping(text, name)
    address = asked.get("address")
    if isinstance(address, str):
        found = url.decode(address)
        if found is None:
            return _written({"name": FIRST})
        same = found.get("name")
        if isinstance(same, str) and same in answers.bundled():
            text = answers.bundled_text(same)
            if parse_mapping(text) == found:
                return text, found
        return dump(found), found
    text = str(asked.get("text") or "")
    return text, parse_mapping(text, "scenario")


def _about(scenario: Scenario, written: Mapping[str, Any], show: Any) -> Json:
    policy: Policy = show if show in POLICIES else scenario.policy
    about: Json = {
        "name": scenario.name,
        "title": scenario.title or scenario.name,
        "description": scenario.description,
        "hash": scenario.hash,
        "normal": scenario.normalised(),
        "shards": list(scenario.shards),
        "address": url.encode(written),
        "offers": offers(scenario),
        "show": policy,
        "error": None,
        "limit": _said(lambda: check_limits(scenario)),
    }
    try:
        check_prediction(scenario)
        checks = [check(scenario.set({"policy": p, "expect": None})) for p in POLICIES]
        about["predicted"] = {c["policy"]: c["predicted"] for c in checks}
        about["warnings"] = {c["policy"]: c["warnings"] for c in checks}
        about["mask"] = thumbnail(scenario)
        about["scene"] = predicted(scenario, policy)
    except InvalidScenario as error:
        about["scene"] = None
        about["unseen"] = str(error)
    return about


def _said(fits: Any) -> str | None:
    try:
        fits()
    except InvalidScenario as error:
        return str(error)
    return None


def predicted(scenario: Scenario, policy: Policy) -> str:
    """The scene of what a policy would do.

    Raises:
        InvalidScenario: Over a cap.
    """
    if scenario.mesh.ranks > MAX_SCENE_RANKS:
        limit = f"the picture shows at most {MAX_SCENE_RANKS} ranks; check and simulate take more"
        raise InvalidScenario("mesh", scenario.mesh.ranks, limit)
    asked = scenario.set({"policy": policy, "expect": None})
    trace = simulate(asked)
    check_trace(asked, trace)
    found = check(asked)["error"]
    refusal = f"{found['class']}: {found['message']}" if found else ""
    beyond = what_follows(asked) if found else None
    return scene(asked, trace, refusal=refusal, beyond=beyond).to_json_text()


def thumbnail(scenario: Scenario) -> Json:
    """Who may see whom, as a few cells: rows of the digits of `pattern`."""
    visibility = Visibility.of(scenario)
    size = visibility.order.size
    count = min(size, THUMBNAIL)
    borders = [n * size // count for n in range(count + 1)]
    cells = pattern(visibility, borders).tolist()
    return {"size": count, "cells": ["".join(map(str, row)) for row in cells]}
