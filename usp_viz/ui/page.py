"""The page: a frame that the browser fills, and the endpoints behind it.

The markup is static, and the script that fills it (`assets/app.js`) gets its answers as JSON text:
`look` says everything about one scenario at once, `stream` runs its three policies on ranks and
tells of each as it ends, waiting in the same queue as the public endpoints.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import gradio as gr
from gradio.events import api

from usp_viz.errors import InvalidScenario
from usp_viz.runtime.pool import default_pool
from usp_viz.scenario import POLICIES, Scenario
from usp_viz.ui import answers
from usp_viz.ui.catalog import catalog
from usp_viz.ui.desk import Desk
from usp_viz.ui.front import script
from usp_viz.ui.look import look
from usp_viz.ui.paste import find
from usp_viz.views.html import html
from usp_viz.views.scene import Scene, scene, what_follows

MAX_QUEUE = 32
PATIENCE_S = 3.0
"""How long a run goes on whose visitor has turned to something else."""
ON_RANKS: dict[str, Any] = {"concurrency_id": "ranks", "concurrency_limit": 1}
"""What needs the rank processes waits in one queue, which tells each visitor their place."""


def build(desk: Desk | None = None) -> gr.Blocks:
    """The page and its endpoints; nothing is served yet."""
    desk = desk or Desk(lambda: default_pool().cancel())

    def cancel(ticket: Any) -> bool:
        return desk.cancel(str(ticket))

    def leave(ticket: Any) -> bool:
        return desk.cancel(str(ticket), PATIENCE_S)

    with gr.Blocks(title="USP Viz", fill_width=True, analytics_enabled=False) as demo:
        gr.HTML(
            "",
            html_template='<div class="uspage-mount">USP Viz needs JavaScript.</div>',
            js_on_load=script(catalog()),
            apply_default_css=False,
            server_functions=[look, find, export, cancel, leave],
            elem_id="usp-viz",
        )
        api(_stream(desk), api_name="stream", api_visibility="private", **ON_RANKS)
        _endpoints()
    demo.queue(max_size=MAX_QUEUE, default_concurrency_limit=4)
    return demo


def _endpoints() -> None:
    api(answers.run, api_name="run", **ON_RANKS)
    api(answers.check, api_name="check")
    api(answers.simulate, api_name="simulate")
    api(answers.scenarios, api_name="scenarios")
    api(answers.schema, api_name="schema")


def export(drawn: Any) -> str:
    """The stand-alone page of a scene that the browser sends back; nothing is kept."""
    return html(Scene(json.loads(str(drawn))))


# -- the three policies ------------------------------------------------------------------------


def _stream(desk: Desk) -> Callable[[str, str], Iterator[str]]:
    def stream(written: str, ticket: str) -> Iterator[str]:
        for n, told in enumerate(tell(desk, written, str(ticket))):
            yield json.dumps({"n": n, **told}, separators=(",", ":"))

    return stream


def tell(desk: Desk, written: Any, ticket: str) -> Iterator[dict[str, Any]]:
    """What happens as the three policies run: ``began``, then ``result`` or ``failed``, each.

    Args:
        desk: Where the ticket can be cancelled.
        written: The scenario's text.
        ticket: Whose run it is.
    """
    try:
        scenarios = answers.variants(answers.read(written), "all")
    except InvalidScenario as error:
        yield {"kind": "invalid", "text": str(error)}
        return
    for scenario in scenarios:
        if desk.is_cancelled(ticket):
            yield {"kind": "cancelled"}
            return
        yield {"kind": "began", "policy": scenario.policy}
        with desk.serve(ticket):
            told = answers.guarded(lambda each=scenario: _ran(each), scenario)
        if "kind" not in told:
            error = told["error"]
            told = {"kind": "failed", "text": f"{error['class']}: {error['message']}"}
        yield {**told, "policy": scenario.policy}
    yield {"kind": "done"}


def _ran(scenario: Scenario) -> dict[str, Any]:
    from usp_viz.runtime.verify import run
    from usp_viz.ui.details import details

    ran = run(scenario)
    problem = ran.problem
    drawn = scene(
        scenario,
        _predicted(scenario),
        recorded=ran.trace,
        differences=ran.differences,
        refusal=f"{problem.cls}: {problem.message}" if problem else "",
        beyond=what_follows(scenario) if ran.outcome == "refused" else None,
        pairs=ran.pairs,
    )
    return {
        "kind": "result",
        "outcome": ran.outcome,
        "details": details(ran),
        "scene": drawn.to_json_text(),
    }


def _predicted(scenario: Scenario) -> Any:
    from usp_viz.plan import simulate

    return simulate(scenario)


__all__ = ["POLICIES", "build", "tell"]
