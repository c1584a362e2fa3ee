"""A page with nothing on it but the verdicts, made of real runs.

``python -m tests.browser.verdicts_page OUT.html`` writes one; open it with ``?case=refused#dark``.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from usp_viz.runtime.accuracy import score
from usp_viz.runtime.pool import RankPool, default_pool
from usp_viz.runtime.report import RankReport, RunReport
from usp_viz.runtime.result import Run
from usp_viz.runtime.verify import answer_of, judge, run
from usp_viz.scenario import POLICIES, Scenario
from usp_viz.ui.details import details
from usp_viz.views.html import asset

HOSTILE = "<img src=x onerror='window.hacked=1'>${window.hacked=2}</script><b>{{title}}"

PAGE = """<!doctype html>
<html lang="en" data-theme="light"><head><meta charset="utf-8"><title>Verdicts</title>
<meta name="viewport" content="width=device-width, initial-scale=1"><link rel="icon" href="data:,">
<style>%(style)s
html { background: var(--usp-page); font-size: clamp(14px, .5vw + 8px, 30px); }
body { margin: 0; color: var(--usp-ink); font: 1rem/1.5 var(--usp-font); }
main { padding: 1rem clamp(.75rem, 2vw, 2rem); } h1 { font-size: 1.2rem; margin: 0 0 .8rem; }
</style></head><body><main><h1>Verdicts</h1><div id="root"></div></main>
<script type="application/json" id="cases">%(cases)s</script>
<script>%(script)s</script>
<script>
const cases = JSON.parse(document.getElementById('cases').textContent);
window.calls = [];
window.verdicts = USPVerdicts(document.getElementById('root'), {
  onApplyFix: (fix) => calls.push(['fix', fix]), onPoint: (point) => calls.push(['point', point]),
  onRunAgain: () => calls.push(['again']), onMeasure: (policy) => calls.push(['measure', policy]),
});
window.show = (name) => {
  const { scenario, results } = cases[name];
  verdicts.begin(scenario, Object.keys(results));
  for (const [policy, found] of Object.entries(results)) verdicts.result(policy, found);
};
if (location.hash === '#dark') document.documentElement.dataset.theme = 'dark';
const asked = new URLSearchParams(location.search).get('case');
if (asked) show(asked);
</script></body></html>
"""


def three(scenario: Scenario, pool: RankPool) -> dict[str, Run]:
    """The scenario under its policies."""
    return {
        policy: run(scenario.set({"policy": policy, "expect": None}), pool=pool)
        for policy in POLICIES
    }


def hung(scenario: Scenario) -> Run:
    """What becomes of a report in which two ranks never end."""
    ranks = tuple(
        RankReport(rank, "hung" if rank % 2 else "cancelled", messages=[("at", 2, "hop 0", "send")])
        for rank in range(scenario.mesh.ranks)
    )
    return judge(scenario, RunReport(ranks, 1000.0), None)


def spoilt(good: Run) -> Run:
    """The run, had rank 1's first row come out as NaN and rank 2's last as infinite."""
    outs = {rank: np.array(out) for rank, out in good.outs.items()}
    outs[1][0, 0, 3, :] = np.nan
    outs[2][0, -1, 0, 5] = np.inf
    found = score(good.scenario, answer_of(good.scenario), outs)
    return replace(good, outcome="wrong", outs=outs, accuracy=found)


def cases(pool: RankPool) -> dict[str, Any]:
    """By name: what `begin` gets, and details by policy."""
    ring = Scenario.load("varlen-ring")
    base = three(ring, pool)
    packed = Scenario.load("packed-documents").set({"tokens.replicated.prefix": 3})
    hostile = ring.set({"title": HOSTILE, "description": HOSTILE})
    evil = {policy: details(r) for policy, r in base.items()}
    for found in evil.values():
        found["title"] = found["gist"] = HOSTILE
        found["result"]["warnings"] = [{"id": HOSTILE, "text": HOSTILE}]
    evil["sglang"]["result"]["error"] |= {
        "message": HOSTILE,
        "because": [HOSTILE],
        "source": HOSTILE,
        "fixes": [{"id": HOSTILE, "title": HOSTILE, "set": {HOSTILE: HOSTILE}}],
    }
    evil["sglang"]["rule"] |= {"behind": HOSTILE, "reason": HOSTILE, "who": HOSTILE}
    evil["sglang"]["reproduce"]["command"] = HOSTILE
    runs = {
        "refused": (ring, base),
        "fixed": (ring, three(ring.set({"mesh.ring": 1, "mesh.ulysses": 4}), pool)),
        "packed": (packed, three(packed, pool)),
        "crashed": (ring, {"sglang": run(Scenario.parse(CRASH), pool=pool)}),
        "timeout": (ring, {"extended": hung(ring.set({"policy": "extended", "expect": None}))}),
        "nan": (ring, {"extended": spoilt(base["extended"])}),
        "measured": (ring, {"extended": run(base["extended"].scenario, pool=pool, memory=True)}),
    }
    made = {
        name: {
            "scenario": scenario.normalised(),
            "results": {policy: details(each) for policy, each in found.items()},
        }
        for name, (scenario, found) in runs.items()
    }
    return made | {"hostile": {"scenario": hostile.normalised(), "results": evil}}


CRASH = {
    "name": "varlen-gqa",
    "mesh": {"ulysses": 2, "ring": 1},
    "tensors": {"heads": 8, "kv_heads": 4},
    "tokens": {"total": 24, "shards": [10, 14]},
    "policy": "sglang",
}


def page(made: dict[str, Any]) -> str:
    """The whole page."""
    return PAGE % {
        "style": asset("theme.css") + asset("verdicts.css"),
        "script": asset("verdicts.js"),
        "cases": json.dumps(made).replace("<", "\\u003c"),
    }


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(page(cases(default_pool())), "utf-8")
    default_pool().close()
