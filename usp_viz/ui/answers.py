"""The endpoints' answers: a scenario in, the JSON of the contract out, whatever comes in.

Every answer is a result, a check or a trace, if only a result that says why there is none; no
endpoint raises, opens a path or loads code. A scenario comes as an object, as YAML or JSON text, or
as a bundled name.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from usp_viz.errors import InvalidScenario, MissingRequirement, RunCancelled
from usp_viz.loading import bundled, parse_mapping
from usp_viz.runtime.result import failed_json, invalid_json, missing_json
from usp_viz.scenario import POLICIES, Scenario
from usp_viz.scenario_errors import closest
from usp_viz.ui.caps import check_prediction, check_trace

Json = dict[str, Any]
Written = str | Json
"""A scenario as it arrives."""

T = TypeVar("T")

log = logging.getLogger(__name__)


class InternalError(Exception):
    """A mistake of ours, which its log tells about."""


def read(written: Any) -> Scenario:
    """The scenario that was sent.

    Raises:
        InvalidScenario: It is none.
    """
    if isinstance(written, Mapping):
        try:
            written = json.dumps(written)  # the text reader bounds size, depth and numbers
        except (RecursionError, TypeError, ValueError):
            raise InvalidScenario("", None, "scenario: nested too deeply, or not JSON") from None
    if not isinstance(written, str):
        limit = "an object, YAML or JSON text, or the name of a bundled scenario"
        raise InvalidScenario("scenario", written, limit)
    if written.strip() in bundled():
        written = bundled_text(written.strip())
    elif re.fullmatch(r"[^\n:{}]{1,200}", written):
        limit = "neither the name of a bundled scenario nor YAML; no path is opened here"
        raise InvalidScenario("scenario", written, limit, closest(written, list(bundled())))
    return Scenario.parse(parse_mapping(written, "scenario"))


def bundled_text(name: str) -> str:
    """A bundled scenario as it is written."""
    return bundled()[name].read_text("utf-8")


def variants(scenario: Scenario, policy: str | None) -> list[Scenario]:
    """The scenario under the policies that are asked for; an `expect` binds its own policy only.

    Raises:
        InvalidScenario: There is no such policy.
    """
    if policy is None:
        return [scenario]
    if policy == "all":
        return [scenario.set({"policy": p, "expect": None}) for p in POLICIES]
    asked = scenario.set({"policy": policy})
    return [asked if asked.hash == scenario.hash else asked.set({"expect": None})]


def run(scenario: Written, policy: str | None = None) -> Json | list[Json]:
    """Run a scenario on real ranks and judge the output.

    Args:
        scenario: An object, YAML or JSON text, or the name of a bundled scenario.
        policy: sglang, unguarded or extended instead of the scenario's own; or all, for a list.
    """
    asked = guarded(lambda: variants(read(scenario), policy))
    answers = [asked] if isinstance(asked, dict) else [run_one(each) for each in asked]
    return answers if policy == "all" else answers[0]


def run_one(scenario: Scenario) -> Json:
    """The result of one scenario under its own policy."""
    from usp_viz.runtime.verify import run as run_on_ranks

    return guarded(lambda: run_on_ranks(scenario).to_json(), scenario)


def check(scenario: Written) -> Json:
    """Predict what a release does with a scenario, without running anything.

    Args:
        scenario: An object, YAML or JSON text, or the name of a bundled scenario.
    """
    from usp_viz.checking import check as predict

    def answer() -> Json:
        asked = read(scenario)
        check_prediction(asked)
        return predict(asked)

    found = guarded(answer)
    return found if "predicted" in found else found | {"predicted": found["outcome"]}


def simulate(scenario: Written) -> Json:
    """Predict what moves where, step by step: the trace.

    Args:
        scenario: An object, YAML or JSON text, or the name of a bundled scenario.
    """
    from usp_viz.plan import simulate as predict

    def answer() -> Json:
        asked = read(scenario)
        check_prediction(asked)
        trace = predict(asked)
        check_trace(asked, trace)
        return trace.to_json()

    return guarded(answer)


def scenarios() -> list[Json]:
    """The bundled scenarios, normalised."""
    return [read(name).normalised() for name in bundled()]


def schema(which: str = "scenario") -> Json:
    """The JSON Schema of a format.

    Args:
        which: scenario, trace or result.
    """
    from usp_viz.schemas import schemas

    def answer() -> Json:
        known = schemas()
        if not isinstance(which, str) or which not in known:
            raise InvalidScenario("which", which, f"one of {', '.join(known)}")
        return known[which]

    return guarded(answer)


def guarded(answer: Callable[[], T], asked: Scenario | None = None) -> T | Json:
    """`answer()`, or the result of what kept it from answering; no traceback leaves the server.

    Args:
        answer: What to do.
        asked: The scenario it is about, where that is known.
    """
    try:
        return answer()
    except InvalidScenario as error:
        return invalid_json(error, asked)
    except MissingRequirement as error:
        return missing_json(error, asked)
    except RunCancelled as error:
        return failed_json(error, "run it again", asked)
    except Exception:
        log.exception("An answer failed")
        return failed_json(InternalError("The server failed; its log says why."), "", asked)
