"""The bundled scenarios as the page offers them: in groups, each with a promise of one line."""

from __future__ import annotations

from usp_viz.loading import bundled
from usp_viz.ui import answers

GROUPS: dict[str, dict[str, str]] = {
    "Start here": {
        "dense-2x2": "See a row travel to another rank and come back whole.",
        "seven-tokens": "The smallest uneven case, small enough to count by hand.",
        "gqa-more-ranks": "Fewer KV heads than ranks: who is sent which head.",
    },
    "The three refusals": {
        "varlen-ring": "Uneven shards on a ring: what the refusal saves you from.",
        "mask-ring": "A padding mask on a ring, and the one form that is let through.",
        "ulysses-ring": "The old layer on a ring: its message says one thing, its code another.",
    },
    "Silent traps": {
        "causal-ring": "Nothing is refused, half of the rows are wrong, rank 0 looks perfect.",
        "text-counted-twice": "A replicated prompt that every query weighs twice.",
        "all-padding-hop": "A hop that holds nothing but padding must weigh nothing.",
    },
    "Layouts and masks": {
        "zigzag-causal": "Causal work shared out evenly, by an early and a late chunk each.",
        "packed-documents": "Five documents in one sequence, none of which sees another.",
        "dense-mask-ring": "Any mask, any batch, any ring: all that is refused, at once.",
        "empty-rank": "A rank without a single row still has work to do.",
    },
}


def catalog() -> list[dict[str, object]]:
    """Groups of scenarios: name, title and promise of each, and what mesh it runs on."""
    known = {name for group in GROUPS.values() for name in group}
    more = {name: "" for name in bundled() if name not in known}
    return [
        {"group": title, "scenarios": [_entry(name, promise) for name, promise in group.items()]}
        for title, group in {**GROUPS, **({"More": more} if more else {})}.items()
    ]


def _entry(name: str, promise: str) -> dict[str, str]:
    scenario = answers.read(name)
    mesh = f"U{scenario.mesh.ulysses} × R{scenario.mesh.ring}"
    return {"name": name, "title": scenario.title, "promise": promise, "mesh": mesh}
