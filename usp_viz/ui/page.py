"""The page: choose a scenario, run it under the three policies, step through what moves.

The text field holds the scenario; whatever is chosen is written into it, and whatever it says is
what runs. Every handler answers in plain text.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import gradio as gr
from gradio.events import api

from usp_viz.errors import InvalidScenario
from usp_viz.frames import replay
from usp_viz.loading import bundled
from usp_viz.plan import simulate
from usp_viz.scenario import POLICIES, Policy, Scenario
from usp_viz.ui import answers
from usp_viz.ui.caps import check_prediction, check_trace
from usp_viz.ui.cards import Card
from usp_viz.views.text import text_of

FIRST = "varlen-ring"
MAX_QUEUE = 32
PRIVATE: dict[str, Any] = {"api_visibility": "private"}
ON_RANKS: dict[str, Any] = {"concurrency_id": "ranks", "concurrency_limit": 1}
"""What needs the rank processes waits in one queue, which tells each visitor their place."""
LIVE: dict[str, Any] = {
    "trigger_mode": "always_last",
    "concurrency_limit": 4,
    "show_progress": "hidden",
} | PRIVATE

INTRO = """# USP Viz
Unified sequence parallelism (Ulysses × ring attention) on real ranks: what moves where, whether the
output is right, and why sglang refuses. Choose a scenario and press **Run**."""
POLICY_TEXT: dict[Policy, str] = {
    "sglang": "### sglang\nRefuses where that release refuses.",
    "unguarded": "### unguarded\nRuns the path behind the guard.",
    "extended": "### extended\nRuns all of it, ring-aware.",
}
IDLE = "Press Run. The first run also starts the ranks, which takes a few seconds."


def build() -> gr.Blocks:
    """The page and its endpoints; nothing is served yet."""
    with gr.Blocks(title="USP Viz", fill_width=True, analytics_enabled=False) as demo:
        gr.Markdown(INTRO)
        written, about = _scenario_fields()
        run = gr.Button("Run", variant="primary", elem_id="run")
        status = gr.Textbox(IDLE, label="Status", lines=1, max_lines=4, elem_id="status")
        with gr.Row(elem_id="policies"):
            cards = [text for policy in POLICIES for text in _card_fields(policy)]
        _frame_fields(written, about)
        run.click(_run, written, [status, *cards], show_progress_on=status, **ON_RANKS, **PRIVATE)
        _endpoints()
    demo.queue(max_size=MAX_QUEUE, default_concurrency_limit=4)
    return demo


def _endpoints() -> None:
    api(answers.run, api_name="run", **ON_RANKS)
    api(answers.check, api_name="check")
    api(answers.simulate, api_name="simulate")
    api(answers.scenarios, api_name="scenarios")
    api(answers.schema, api_name="schema")


# -- the scenario ------------------------------------------------------------------------------


def _scenario_fields() -> tuple[gr.Textbox, gr.Textbox]:
    """The scenario as text, and what it says of itself."""
    names = [(answers.read(name).title or name, name) for name in bundled()]
    with gr.Row():
        with gr.Column(min_width=320):
            choice = gr.Dropdown(names, value=FIRST, label="Scenario", filterable=False)
            about = gr.Textbox(label="What it shows", lines=4, interactive=False)
        with gr.Column(min_width=320):
            written = gr.Textbox(
                answers.bundled_text(FIRST),
                label="The scenario, to edit (YAML or JSON)",
                lines=8,
                max_lines=20,
                elem_id="written",
                elem_classes="mono",
            )
    choice.change(answers.bundled_text, choice, written, show_progress="hidden", **PRIVATE)
    return written, about


# -- the three policies ------------------------------------------------------------------------


def _card_fields(policy: Policy) -> list[gr.Textbox]:
    def field(label: str, name: str, lines: int) -> gr.Textbox:
        return gr.Textbox(
            label=label,
            lines=lines,
            max_lines=24,
            interactive=False,
            elem_id=f"{policy}-{name}",
            elem_classes=["mono", name],
        )

    with gr.Column(min_width=320):
        gr.Markdown(POLICY_TEXT[policy])
        return [
            field("Verdict", "verdict", 1),
            field("What it says", "message", 3),
            field("Rank by rank", "ranks", 4),
            field("Evidence", "evidence", 4),
        ]


def _run(written: str) -> Iterator[list[str]]:
    """Fill the three columns, each as soon as its run ends."""
    cards = dict.fromkeys(POLICIES, Card())

    def state(status: str) -> list[str]:
        return [status, *(text for card in cards.values() for text in card.texts())]

    try:
        scenarios = answers.variants(answers.read(written), "all")
    except InvalidScenario as error:
        yield state(f"Invalid: {error}")
        return
    for scenario in scenarios:
        cards[scenario.policy] = Card.running()
        yield state(f"Running {scenario.policy} on {_ranks(scenario)} …")
        cards[scenario.policy] = _card(scenario)
    verdicts = ", ".join(f"{policy} {card.verdict}" for policy, card in cards.items())
    yield state(f"{scenarios[0].name} on {_ranks(scenarios[0])}: {verdicts}")


def _card(scenario: Scenario) -> Card:
    from usp_viz.runtime.verify import run

    ran = answers.guarded(lambda: run(scenario), scenario)
    return Card.of_error(ran) if isinstance(ran, dict) else Card.of(ran)


def _ranks(scenario: Scenario) -> str:
    mesh = scenario.mesh
    return f"U{mesh.ulysses} × R{mesh.ring} = {mesh.ranks} rank{'s' if mesh.ranks > 1 else ''}"


# -- the frames --------------------------------------------------------------------------------


def _frame_fields(written: gr.Textbox, about: gr.Textbox) -> None:
    gr.Markdown("## Step by step\nWhat moves between the ranks, as predicted; no rank is started.")
    film = _Film(answers.bundled_text(FIRST), "extended")
    about.value = film.about
    with gr.Row(elem_id="steps"):
        policy = gr.Dropdown(list(POLICIES), value="extended", label="Policy", min_width=160)
        step = gr.Slider(0, film.last, value=0, step=1, label="Step", min_width=320, scale=4)
        back = gr.Button("◀ Previous", min_width=120)
        forth = gr.Button("Next ▶", min_width=120)
    frame = gr.Code(
        film.frame(0),
        label="Frame",
        interactive=False,
        show_line_numbers=False,
        elem_id="frame",
    )

    shown = [written, policy]
    gr.on([written.change, policy.change], _rewind, shown, [about, step, frame], **LIVE)
    step.change(_frame, [*shown, step], frame, **LIVE)
    back.click(lambda at: max(0, at - 1), step, step, **LIVE)
    forth.click(_next, [*shown, step], step, **LIVE)


class _Film:
    """What the text field's scenario says of itself, and its predicted frames.

    Raises:
        InvalidScenario: It is no scenario, or over a cap.
    """

    def __init__(self, written: str, policy: str) -> None:
        (self._scenario,) = answers.variants(answers.read(written), policy)
        check_prediction(self._scenario)
        self._trace = simulate(self._scenario)
        check_trace(self._scenario, self._trace)

    @property
    def about(self) -> str:
        return self._scenario.description or self._scenario.title

    @property
    def last(self) -> int:
        return self._trace.steps - 1

    def frame(self, step: int) -> str:
        return text_of(replay(self._trace), min(step, self.last), self._scenario)


def _rewind(written: str, policy: str) -> tuple[str, gr.Slider, str]:
    try:
        film = _Film(written, policy)
    except InvalidScenario as error:
        said = f"Invalid: {error}"
        return said, gr.Slider(maximum=1, value=0, interactive=False), said
    return film.about, gr.Slider(maximum=film.last, value=0, interactive=True), film.frame(0)


def _frame(written: str, policy: str, step: int) -> str:
    try:
        return _Film(written, policy).frame(step)
    except InvalidScenario as error:
        return f"Invalid: {error}"


def _next(written: str, policy: str, step: int) -> int:
    try:
        return min(step + 1, _Film(written, policy).last)
    except InvalidScenario:
        return step
