"""A run as the page shows it: the result of the contract, and everything its cards explain.

Plain data, small enough to send with every run; scripts draw it as text, never as markup.
"""

from __future__ import annotations

from typing import Any

from usp_viz import rules
from usp_viz.runtime.result import Run, plain
from usp_viz.runtime.verify import answer_of
from usp_viz.scenario import Scenario
from usp_viz.views import reproduce
from usp_viz.views.errormap import ErrorMap
from usp_viz.views.spent import Spent
from usp_viz.views.verdict import gist, headline, pairs_text, trace_text

DETAILS_VERSION = 1


def details(run: Run, behind: Run | None = None) -> dict[str, Any]:
    """Everything that the cards and tabs say about one run.

    Args:
        run: What happened.
        behind: The unguarded run of the same scenario, where it is known; else a refusal quotes
            the prediction.
    """
    return plain(
        {
            "details_version": DETAILS_VERSION,
            "title": run.scenario.title or run.scenario.name,
            "headline": headline(run.scenario),
            "gist": gist(run),
            "result": run.to_json(),
            "pairs_text": pairs_text(run.pairs) if run.pairs else None,
            "trace_text": trace_text(run),
            "rule": _rule(run, behind),
            "seen": seen(run) if run.scenario.policy == "unguarded" else None,
            "map": ErrorMap.of(run, answer_of(run.scenario)).to_json() if run.accuracy else None,
            "spent": Spent.of(run).to_json(),
            "reproduce": {
                "command": reproduce.command(run.scenario),
                "python": reproduce.python(run.scenario),
            },
        }
    )


def seen(behind: Run) -> str:
    """What the unguarded run showed, for the one who met the refusal."""
    found, problem = behind.accuracy, behind.problem
    if problem is not None:
        ended = "another refusal waits" if behind.outcome == "refused" else "it does not return"
        return f"Behind the guard {ended}: {problem.cls}: {problem.message}"
    assert found is not None
    if behind.outcome == "verified":
        return f"Behind the guard all {found.rows} rows come out right."
    return (
        f"Behind the guard {found.wrong_rows} of {found.rows} rows come out wrong, by up to "
        f"{found.max_abs:.2g}, and nothing says so."
    )


def foreseen(scenario: Scenario) -> str:
    """What the unguarded run is expected to show."""
    unguarded = scenario.set({"policy": "unguarded", "expect": None})
    end = rules.ending(unguarded, policy="unguarded")
    if end is not None:
        return f"Behind the guard waits {end.cls}: {end.message}"
    if rules.predict(unguarded) == "verified":
        return "Behind the guard the rows should come out right."
    said = (warning.text for warning in rules.warnings(unguarded, "unguarded"))
    return " ".join(["Behind the guard rows should come out wrong.", *said])


def _rule(run: Run, behind: Run | None) -> dict[str, Any] | None:
    """What is published about the rule that ended a run."""
    problem = run.problem
    if problem is None or problem.rule is None:
        return None
    rule = rules.about(problem.rule)
    text = None
    if rule.guard:
        text = seen(behind) if behind else foreseen(run.scenario)
    return {
        "id": rule.id,
        "severity": rule.severity,
        "reason": rule.reason,
        "who": rule.who,
        "before": rule.before,
        "prevent": rule.prevent,
        "guard": rule.guard,
        "behind": text,
        "behind_is_seen": behind is not None,
    }
