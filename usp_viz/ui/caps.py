"""What one visitor may ask of a prediction. Runs have caps of their own (`usp_viz.runtime.limits`).

The command line has none of these: there, the machine is the asker's own.
"""

from __future__ import annotations

from usp_viz.errors import InvalidScenario
from usp_viz.layout import Layout
from usp_viz.scenario import Dense, KeyMask, Scenario
from usp_viz.trace import Trace

MAX_RANKS = 1024
MAX_ROWS = 2**20
"""Rows of the whole order in all batch rows."""
MAX_DENSE_PAIRS = 10**8
"""Elements of dense masks that have to be looked at: about three seconds of one core."""
MAX_HOLES = 100_000
"""Holes of key masks, each looked at for every rank and ring position: a few seconds at most."""
MAX_EVENTS = 50_000
MAX_SPANS = 200_000
"""Events, and spans of rows in them, of a trace that is sent as JSON: some 30 MB."""


def check_prediction(scenario: Scenario) -> None:
    """Whether `check` and `simulate` may look at it; decided from the mesh and the sizes alone.

    Raises:
        InvalidScenario: Names the cap.
    """
    s, rows = scenario, scenario.tensors.batch * Layout.of(scenario).order.size
    dense = sum(isinstance(mask, Dense) for mask in s.attention.mask)
    paddings = max(
        (len(m.key.valid) for m in s.attention.mask if isinstance(m, KeyMask)), default=1
    )
    pairs = dense * paddings * s.tokens.total**2
    holes = sum(len(m.key.holes) for m in s.attention.mask if isinstance(m, KeyMask))
    _at_most("mesh", s.mesh.ranks, MAX_RANKS, "ranks")
    _at_most("tokens.total", rows, MAX_ROWS, "rows in all batch rows")
    _at_most("attention.mask", pairs, MAX_DENSE_PAIRS, "elements of dense masks")
    looks = holes * paddings * s.mesh.ring * s.mesh.ranks
    _at_most("attention.mask", looks, MAX_HOLES, "holes x ring positions x ranks")


def check_trace(scenario: Scenario, trace: Trace) -> None:
    """Whether a trace can be sent: by bounds first, then step by step, and no further than the cap.

    Raises:
        InvalidScenario: Names the cap.
    """
    _at_most("mesh", most_events(scenario), MAX_EVENTS, "events")
    if scenario.tokens.layout == "striped" and scenario.mesh.ring > 1:  # each row is a span
        _at_most("tokens.layout", 2 * scenario.tokens.total, MAX_SPANS, "spans of rows")
    _at_most("trace", trace.spans(MAX_SPANS), MAX_SPANS, "spans of rows")


def most_events(scenario: Scenario) -> int:
    """No fewer than its trace has."""
    mesh = scenario.mesh
    ends = 3  # two placed, one output
    swaps = 3 * mesh.ulysses if mesh.ulysses > 1 else 0  # Q and KV one way, O the other
    hops = 3 * mesh.ring  # send, attend, merge
    return mesh.ranks * (ends + swaps + hops)


def _at_most(key: str, value: int, cap: int, what: str) -> None:
    if value > cap:
        limit = (
            f"this server predicts with at most {cap:,} {what}; the command line has no such cap"
        )
        raise InvalidScenario(key, value, limit)
