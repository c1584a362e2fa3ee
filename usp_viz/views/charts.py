"""What a run cost, as plotly figures in the page's own colours.

`figures` gives the timeline, the bytes and the memory of a `Spent`; `plot_json` turns one into the
text that a plotly component takes, with the config that keeps it on this machine.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, Literal

from usp_viz.views.html import asset
from usp_viz.views.spent import Lane, Spent

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

Theme = Literal["light", "dark"]
CONFIG = {"displaylogo": False, "displayModeBar": False, "responsive": True}
CONFIG |= {"showSendToCloud": False, "showEditInChartStudio": False}
KINDS = {
    "compute": ("computing", "c0", ""),
    "send": ("all-to-all, sending", "c1", "/"),
    "copy": ("packing, unpacking", "c2", "x"),
    "wait": ("waiting", "c7", "."),
}
"""By kind of lane: its label, colour token and pattern, so that colour never speaks alone."""


def figures(spent: Spent, theme: Theme = "light") -> dict[str, Figure]:
    """``timeline``, ``bytes`` and ``memory``, those for which there is something to show."""
    found: dict[str, Figure] = {}
    if spent.measured:
        found["timeline"] = timeline(spent, theme)
    if spent.sent_predicted:
        found["bytes"] = by_rank(
            "Bytes sent to other ranks", spent.sent, spent.sent_predicted, theme
        )
    if spent.memory_predicted:
        found["memory"] = by_rank(
            "Peak memory of tensors, bytes", spent.memory, spent.memory_predicted, theme
        )
    return found


def plot_json(figure: Figure) -> str:
    """Data, layout and config as JSON."""
    return json.dumps(json.loads(figure.to_json() or "{}") | {"config": CONFIG})


def timeline(spent: Spent, theme: Theme) -> Figure:
    """Two rows a rank: as measured, and below it as predicted; milliseconds."""
    from plotly.graph_objects import Bar, Figure

    look = tokens(theme)
    figure = Figure(layout=_layout(theme, "When each rank did what, ms"))
    parts = (("measured", spent.measured), ("predicted", spent.predicted))
    for kind, (label, colour, pattern) in KINDS.items():
        lanes = [(part, lane) for part, of_all in parts for lane in of_all if lane.kind == kind]
        if not lanes:
            continue
        figure.add_trace(
            Bar(
                name=label,
                orientation="h",
                y=[[f"rank {lane.rank}" for _, lane in lanes], [part for part, _ in lanes]],
                base=[lane.start * 1e3 for _, lane in lanes],
                x=[(lane.stop - lane.start) * 1e3 for _, lane in lanes],
                text=[_tip(lane, spent.stages) for _, lane in lanes],
                textposition="none",
                hovertemplate="%{text}<extra></extra>",
                width=[_width(part, lane, spent.stages) for part, lane in lanes],
                marker={
                    "color": look[colour],
                    "pattern": _pattern(pattern, look["panel"], look[colour]),
                },
            )
        )
    figure.update_layout(barmode="overlay", height=122 + 44 * len(spent.sent_predicted))
    return figure


def by_rank(title: str, measured: Sequence[int], predicted: Sequence[int], theme: Theme) -> Figure:
    """Measured beside predicted, a pair of bars a rank."""
    from plotly.graph_objects import Bar, Figure

    look = tokens(theme)
    ranks = [f"rank {rank}" for rank in range(len(predicted))]
    figure = Figure(layout=_layout(theme, title))
    if measured:
        marker: dict[str, Any] = {"color": look["c0"]}
        figure.add_trace(
            Bar(name="measured", y=ranks, x=list(measured), orientation="h", marker=marker)
        )
    marker = {
        "color": look["panel"],
        "line": {"color": look["c0"], "width": 2},
        "pattern": _pattern("/", look["c0"], look["panel"]),
    }
    figure.add_trace(
        Bar(name="predicted", y=ranks, x=list(predicted), orientation="h", marker=marker)
    )
    figure.update_layout(height=122 + 36 * len(ranks))
    return figure


@cache
def tokens(theme: Theme) -> Mapping[str, str]:
    """The page's design tokens by name, e.g. ``ink`` and ``c0``."""
    found = re.search(rf'\[data-theme="{theme}"\][^{{]*\{{([^}}]*)\}}', asset("theme.css"))
    assert found is not None
    return dict(re.findall(r"--usp-([\w-]+):\s*(#\w+)", found[1]))


def _tip(lane: Lane, stages: Sequence[str]) -> str:
    stage = stages[lane.step] if lane.step < len(stages) else f"step {lane.step}"
    return f"rank {lane.rank} · {lane.what} · {stage} · {(lane.stop - lane.start) * 1e3:.2g} ms"


def _width(part: str, lane: Lane, stages: Sequence[str]) -> float:
    """Thin where a rank waits, or where a block travels while it computes."""
    travels = part == "predicted" and lane.kind == "send" and stages[lane.step].startswith("hop")
    return 0.3 if travels or lane.kind == "wait" else 0.8


def _pattern(shape: str, ink: str, ground: str) -> dict[str, Any]:
    return {"shape": shape, "fgcolor": ink, "bgcolor": ground, "size": 6, "solidity": 0.25}


def _layout(theme: Theme, title: str) -> dict[str, Any]:
    look = tokens(theme)
    axis = {
        "gridcolor": look["line"],
        "linecolor": look["edge"],
        "zeroline": False,
        "automargin": True,
    }
    return {
        "template": "none",
        "title": {"text": title, "font": {"size": 14}, "x": 0, "xanchor": "left", "xref": "paper"}
        | {"y": 1, "yanchor": "top", "yref": "container", "pad": {"t": 10}},
        "font": {"color": look["ink"], "family": "system-ui, sans-serif", "size": 13},
        "paper_bgcolor": look["panel"],
        "plot_bgcolor": look["panel"],
        "hoverlabel": {"bgcolor": look["panel"], "font": {"color": look["ink"]}},
        "legend": {"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0, "xanchor": "left"},
        "margin": {"l": 8, "r": 8, "t": 68, "b": 8},
        "bargap": 0.25,
        "xaxis": axis,
        "yaxis": axis | {"autorange": "reversed", "showgrid": False},
    }
