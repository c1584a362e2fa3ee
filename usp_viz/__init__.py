"""See, run and check unified sequence parallelism: Ulysses all-to-all x ring KV rotation.

>>> from usp_viz import Scenario, check, simulate
>>> scenario = Scenario.load("varlen-ring")
>>> check(scenario.set({"policy": "sglang"}))["error"]["message"]
'Varlen USPAttention does not support ring parallelism yet.'
>>> simulate(scenario.set({"policy": "extended"})).bytes_sent_per_rank == (0,) * 4
False

`run(scenario)` runs it on real ranks and returns a `Run`. Importing any of them imports no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from usp_viz.checking import check
    from usp_viz.errors import InvalidScenario, MissingRequirement, RunCancelled, UspVizError
    from usp_viz.plan import simulate
    from usp_viz.runtime.result import Run
    from usp_viz.runtime.verify import run
    from usp_viz.scenario import Scenario
    from usp_viz.trace import Trace

_HOMES = {
    "InvalidScenario": "errors",
    "MissingRequirement": "errors",
    "Run": "runtime.result",
    "RunCancelled": "errors",
    "Scenario": "scenario",
    "Trace": "trace",
    "UspVizError": "errors",
    "check": "checking",
    "run": "runtime.verify",
    "simulate": "plan",
}

__all__ = [
    "InvalidScenario",
    "MissingRequirement",
    "Run",
    "RunCancelled",
    "Scenario",
    "Trace",
    "UspVizError",
    "check",
    "run",
    "simulate",
]


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used: the command line must start quickly."""
    from importlib import import_module

    if name in _HOMES:
        return getattr(import_module(f"usp_viz.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
