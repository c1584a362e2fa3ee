"""What a release of sglang refuses, crashes on, or silently gets wrong, without running it.

`refusal` explains a deliberate raise, `crash` any other end, `warnings` the rows that come back
wrong without a word, and `predict` sums them up as an outcome. The table is in
`usp_viz.rule_table`; what a call computes where nothing is raised, in `usp_viz.behaviour`.

>>> from usp_viz.scenario import Scenario
>>> found = refusal(Scenario.load("varlen-ring"))
>>> found.rule, found.source, found.because[0]
('usp-varlen-ring', 'layer.py:878', 'ring = 2 > 1')
>>> found.fixes[0].set
{'mesh.ring': 1, 'mesh.ulysses': 4}
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from usp_viz import behaviour
from usp_viz.calls import Call
from usp_viz.errors import InvalidScenario
from usp_viz.remedies import Fix
from usp_viz.rule_table import RULES, Rule
from usp_viz.scenario import Policy, Scenario

Prediction = Literal["verified", "wrong", "refused", "crashed"]


@dataclass(frozen=True)
class End:
    """A call that does not return.

    Attributes:
        entry: The rule that ends it.
        call: The call.
    """

    entry: Rule
    call: Call

    @property
    def rule(self) -> str:
        """Id of the rule."""
        return self.entry.id

    @property
    def cls(self) -> str:
        """Class of the exception."""
        return self.entry.cls

    @cached_property
    def messages(self) -> tuple[str | None, ...]:
        """By position; None where that rank does not raise."""
        return tuple(self.entry.text(self.call, position) for position in range(self.call.world))

    @property
    def message(self) -> str:
        """Word for word, of the first rank that raises."""
        return next(message for message in self.messages if message is not None)

    @property
    def because(self) -> tuple[str, ...]:
        """The facts of this scenario that make it so."""
        return tuple(self.entry.because(self.call))

    @property
    def source(self) -> str:
        """Where it is raised, e.g. ``layer.py:878``."""
        return self.entry.source(self.call.release)

    @cached_property
    def fixes(self) -> tuple[Fix, ...]:
        """Changes that make the scenario run, best first."""
        return tuple(_working(self.entry, self.call))

    def details(self) -> dict[str, Any]:
        """What a result's ``error`` says besides class, message, rule and ranks."""
        return {
            "release": self.call.release,
            "source": self.source,
            "because": list(self.because),
            "fixes": [fix.to_json() for fix in self.fixes],
        }


@dataclass(frozen=True)
class Refusal(End):
    """The same deliberate raise on every rank."""


@dataclass(frozen=True)
class Crash(End):
    """Any other end: a raise that nobody meant, or one on some ranks only."""


@dataclass(frozen=True, slots=True)
class Warning:
    """What a release does without a word: wrong rows, or a crash that it does not foresee.

    Attributes:
        id: Its name.
        text: What happens, in one sentence.
    """

    id: str
    text: str


def ending(
    scenario: Scenario, release: str | None = None, policy: Policy = "sglang"
) -> Refusal | Crash | None:
    """How the call ends if it does not return; None where it does.

    Args:
        scenario: What is asked for.
        release: Whose rules; by default the scenario's own.
        policy: ``extended`` refuses nothing.
    """
    if policy == "extended":
        return None
    call = Call(scenario, release or scenario.release, policy == "unguarded")
    rule = _first(call)
    if rule is None:
        return None
    everywhere = all(rule.raises(call, position) for position in range(call.world))
    return Refusal(rule, call) if rule.deliberate and everywhere else Crash(rule, call)


def refusal(
    scenario: Scenario, release: str | None = None, policy: Policy = "sglang"
) -> Refusal | None:
    """The refusal that the call meets, if any; arguments as for `ending`."""
    end = ending(scenario, release, policy)
    return end if isinstance(end, Refusal) else None


def crash(
    scenario: Scenario, release: str | None = None, policy: Policy = "sglang"
) -> Crash | None:
    """The crash that the call runs into, if any; arguments as for `ending`."""
    end = ending(scenario, release, policy)
    return end if isinstance(end, Crash) else None


def warnings(scenario: Scenario, policy: Policy, release: str | None = None) -> tuple[Warning, ...]:
    """Why the call gives wrong rows, or that it crashes."""
    end = ending(scenario, release, policy)
    if isinstance(end, Crash):
        return (Warning(end.rule, f"Crashes with {end.cls}: {end.message} ({end.entry.reason})"),)
    if policy == "extended" or end is not None:
        return ()
    call = Call(scenario, release or scenario.release, policy == "unguarded")
    if behaviour.is_right(call):
        return ()
    return tuple(Warning(name, text) for name, text in behaviour.doubts(call))


def predict(scenario: Scenario) -> Prediction:
    """The outcome of a scenario under its own policy and release."""
    end = ending(scenario, policy=scenario.policy)
    if end is not None:
        return "refused" if isinstance(end, Refusal) else "crashed"
    if scenario.policy == "extended":
        return "verified"
    call = Call(scenario, scenario.release, scenario.policy == "unguarded")
    return "verified" if behaviour.is_right(call) else "wrong"


def about(rule: str) -> Rule:
    """All that is known of a rule: reason, who meets it, what to check, how to prevent it.

    Raises:
        KeyError: There is no such rule.
    """
    found = next((entry for entry in RULES if entry.id == rule), None)
    if found is None:
        raise KeyError(f"no rule {rule!r}; there are {', '.join(sorted({r.id for r in RULES}))}")
    return found


def _first(call: Call) -> Rule | None:
    return next((rule for rule in RULES if rule.meets(call)), None)


def _working(rule: Rule, call: Call) -> Iterator[Fix]:
    """Of each kind of fix the first that gives a valid scenario which runs and is right."""
    known: list[Fix] = []
    for remedy in rule.fixes:
        for fix in remedy(call):
            new = fix.set and all(fix.id != old.id and fix.set != old.set for old in known)
            if new and _runs(call, fix):
                known.append(fix)
                yield fix


def _runs(call: Call, fix: Fix) -> bool:
    if fix.set.get("policy") == "extended":
        return True
    try:
        changed = call.scenario.set(fix.set)
    except InvalidScenario:
        return False
    again = Call(changed, fix.set.get("release", call.release), call.unguarded)
    return _first(again) is None and not behaviour.doubts(again)
