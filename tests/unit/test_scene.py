"""The scene: nothing of the trace is lost, and what is drawn is what the definitions say."""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from usp_viz import Scenario, simulate
from usp_viz.attention.inputs import make
from usp_viz.layout import Layout, Spans, merge_spans
from usp_viz.loading import bundled
from usp_viz.mask import Visibility
from usp_viz.trace import Difference, Event
from usp_viz.views.html import html
from usp_viz.views.packing import (
    pack,
    pack_cells,
    runs_of,
    spans_from,
    unpack,
    unpack_cells,
)
from usp_viz.views.scene import WHOLE, Scene, scene, what_follows

POLICIES = ("sglang", "unguarded", "extended")
BIG = {
    "policy": "extended",
    "mesh.ulysses": 8,
    "mesh.ring": 8,
    "tokens.total": 4096,
    "tensors.heads": 64,
}


def replay(name: str, sets: dict[str, Any] | None = None, **more: Any) -> Scene:
    scenario = Scenario.load(name, sets or {})
    return scene(scenario, simulate(scenario), **more)


def cells_of(found: Scene) -> np.ndarray[Any, Any]:
    rows = found.data["ledger"]["cells"]
    return np.array([unpack_cells(row, len(rows)) for row in rows])


# -- packing -----------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 5), max_size=40))
def test_columns_come_back(values: list[int]) -> None:
    assert unpack(json.loads(json.dumps(pack(values)))) == values


@given(st.lists(st.integers(0, 60), max_size=40))
def test_spans_come_back(rows: list[int]) -> None:
    spans = merge_spans((row, row + 1) for row in rows)
    assert spans_from(runs_of(spans)) == spans


@given(st.lists(st.integers(0, 2), max_size=80))
def test_cells_come_back(values: list[int]) -> None:
    assert unpack_cells(pack_cells(values), len(values)) == values


def test_stripes_and_progressions_are_short() -> None:
    stripe: Spans = tuple((row, row + 1) for row in range(3, 4000, 8))
    assert runs_of(stripe) == [3, 500, 8]
    assert pack(list(range(100))) == {"runs": [0, 100, 1]}


# -- against the trace --------------------------------------------------------------------------


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", bundled())
def test_every_event_comes_back(name: str, policy: str) -> None:
    scenario = Scenario.load(name, {"policy": policy})
    trace = simulate(scenario)
    found = Scene(json.loads(scene(scenario, trace).to_json_text()))
    assert found.steps == trace.steps
    for number in range(trace.steps):
        assert sorted(found.events(number), key=repr) == sorted(trace.step(number), key=repr)


@pytest.mark.parametrize("layout", ["contiguous", "zigzag", "striped"])
def test_many_ranks_fit_in_100_kB_and_lose_nothing(layout: str) -> None:
    scenario = Scenario.load("dense-2x2", BIG | {"tokens.layout": layout, "attention.causal": True})
    trace = simulate(scenario)
    found = scene(scenario, trace)
    assert len(found.to_json_text()) < 100_000
    assert len(html(found)) < 400_000
    number = trace.stages.index("hop 3")
    assert sorted(found.events(number), key=repr) == sorted(trace.step(number), key=repr)


def test_bytes_that_are_not_what_the_rows_take_come_back() -> None:
    scenario = Scenario.load("varlen-ring", {"policy": "extended"})
    trace = simulate(scenario)
    events = list(trace.events())
    n = next(n for n, event in enumerate(events) if event.op == "send")
    odd = Event(**{f: getattr(events[n], f) for f in Event.__slots__} | {"bytes": 7})
    recorded = trace.recorded(4, [*events[:n], odd, *events[n + 1 :]], trace.order)
    found = scene(scenario, trace, recorded=recorded)
    assert odd in list(found.events(odd.step))


# -- against the definitions --------------------------------------------------------------------


@pytest.mark.parametrize("name", bundled())
def test_ledger_pattern_is_the_definition_of_the_mask(name: str) -> None:
    scenario = Scenario.load(name)
    visibility = Visibility.of(scenario)
    size = visibility.order.size
    every = np.arange(size)
    votes = np.zeros((size, size), int)
    for row in range(scenario.tensors.batch):
        scored = visibility.is_valid(every, row) & (every >= visibility.order.kv_prefix)
        votes += visibility.allowed(every, every, row) & scored[:, None]
    wanted = np.where(votes == scenario.tensors.batch, 2, np.where(votes > 0, 1, 0))
    assert (cells_of(replay(name)) == wanted).all()


def test_coarse_ledger_tells_none_some_and_all() -> None:
    found = replay(
        "dense-2x2", {"policy": "extended", "tokens.total": 4096, "attention.causal": True}
    )
    cells = cells_of(found)
    assert cells.shape == (256, 256)
    assert (np.diag(cells) == 1).all()
    assert (cells[np.tril_indices(256, -1)] == 2).all()
    assert (cells[np.triu_indices(256, 1)] == 0).all()


@pytest.mark.parametrize("name", bundled())
def test_chips_hold_every_row_once_and_stay_inside_a_shard(name: str) -> None:
    scenario = Scenario.load(name)
    layout = Layout.of(scenario)
    owner = {
        row: position for position, rows in enumerate(layout.shards) for run in rows for row in run
    }
    flat = replay(name).data["chips"]
    held: list[int] = []
    for start, count, step, origin, _ in zip(*(flat[n::5] for n in range(5)), strict=True):
        rows = range(start, start + count * step, step)
        held += rows
        assert {owner.get(row, -1) for row in rows} == {origin}
    assert sorted(held) == list(range(layout.order.size))


def test_chips_stand_for_rows_when_there_would_be_too_many() -> None:
    data = replay("dense-2x2", BIG).data
    assert data["rows_per_chip"] == 32
    assert len(data["chips"]) // 5 * 2 * 8 <= 2048
    assert replay("dense-2x2").data["rows_per_chip"] == 1


@pytest.mark.parametrize("name", ["varlen-ring", "packed-documents", "dense-mask-ring"])
def test_shares_of_the_softmax_add_up_over_the_hops(name: str) -> None:
    found = replay(name, {"policy": "extended"})
    totals: dict[int, int] = {}
    for step in found.data["steps"]:
        for group in step["events"]:
            if group["op"] == "attend":
                for rank, share in zip(unpack(group["src"]), unpack(group["share"]), strict=True):
                    totals[rank] = totals.get(rank, 0) + share
    assert set(totals) == {0, 1, 2, 3}
    assert all(abs(total - WHOLE) <= 2 for total in totals.values())


def test_share_of_a_hop_is_what_plain_loops_find() -> None:
    sets = {"policy": "extended", "tensors.heads": 2, "tensors.head_dim": 4, "tokens.total": 8}
    scenario = Scenario.load("dense-2x2", sets)
    q, k = (make(scenario, name, np.arange(8))[0] for name in ("q", "k"))
    met = 0.0  # rank 0: queries [0, 4), head 0, the keys of its own ring position
    for row in range(4):
        weights = [math.exp(float(q[row, 0] @ k[key, 0]) / 2) for key in range(8)]
        met += sum(weights[:4]) / sum(weights) / 4
    hop = scene(scenario, simulate(scenario)).data["steps"][2]
    group = next(group for group in hop["events"] if group["op"] == "attend")
    assert unpack(group["share"])[0] == pytest.approx(met * WHOLE, abs=1)


# -- words -------------------------------------------------------------------------------------


def test_text_of_a_refusal_and_of_what_follows() -> None:
    message = "NotImplementedError: Varlen USPAttention does not support ring parallelism yet."
    found = replay("varlen-ring", beyond="unguarded", refusal=message)
    assert found.text(1) == (
        "Step 1 of 5: Refused\n"
        f"sglang 0132848349 refuses before anything is sent; all 4 ranks raise {message}\n"
        "rank 0: Q [0, 15) heads [0, 8); K/V [0, 15) heads [0, 8)\n"
        "rank 1: Q [15, 24) heads [0, 8); K/V [15, 24) heads [0, 8)\n"
        "rank 2: Q [24, 35) heads [0, 8); K/V [24, 35) heads [0, 8)\n"
        "rank 3: Q [35, 48) heads [0, 8); K/V [35, 48) heads [0, 8)"
    )
    assert [step["ghost"] for step in found.data["steps"]] == [0, 0, 1, 1, 1, 1]
    assert found.text(5).startswith("Step 5 of 5: Done (not run)\n")
    assert "9,216 pairs were computed and 18,432 are allowed: this output is wrong." in found.text(
        5
    )


def test_text_of_a_hop() -> None:
    assert replay("varlen-ring", {"policy": "extended"}).text(2).splitlines()[3:] == [
        "rank 0: Q [0, 24) heads [0, 4); K/V [0, 24) heads [0, 4); "
        "arriving K/V [24, 48) heads [0, 4); partial output [0, 24) heads [0, 4)",
        "rank 1: Q [0, 24) heads [4, 8); K/V [0, 24) heads [4, 8); "
        "arriving K/V [24, 48) heads [4, 8); partial output [0, 24) heads [4, 8)",
        "rank 2: Q [24, 48) heads [0, 4); K/V [24, 48) heads [0, 4); "
        "arriving K/V [0, 24) heads [0, 4); partial output [24, 48) heads [0, 4)",
        "rank 3: Q [24, 48) heads [4, 8); K/V [24, 48) heads [4, 8); "
        "arriving K/V [0, 24) heads [4, 8); partial output [24, 48) heads [4, 8)",
    ]


def test_table_of_a_hop() -> None:
    first, *_, last = replay("varlen-ring", {"policy": "extended"}).table(2)
    assert first == {
        "what": "send",
        "from": "0",
        "to": "2",
        "tensor": "KV",
        "rows": "[0, 24)",
        "heads": "[0, 4)",
        "bytes": f"{24 * 4 * 32 * 4 * 2:,}",  # rows, heads, head_dim, float32, K and V
        "keys": "",
        "pairs": "",
    }
    assert last["what"] == "attend" and last["pairs"] == f"{24 * 24 * 4:,}"


@pytest.mark.parametrize("name", bundled())
def test_every_step_has_a_title_and_one_sentence(name: str) -> None:
    for step in replay(name, beyond=what_follows(Scenario.load(name))).data["steps"]:
        assert step["title"]
        assert step["caption"].endswith(".")
        assert not step["why"] or step["why"].endswith(".")


def test_what_follows_a_refusal_is_behind_the_guard_unless_that_stops_too() -> None:
    assert what_follows(Scenario.load("varlen-ring")) == "unguarded"
    assert what_follows(Scenario.load("mask-ring")) == "extended"


def test_badge_says_what_the_picture_rests_on() -> None:
    scenario = Scenario.load("varlen-ring", {"policy": "extended"})
    trace = simulate(scenario)
    event = trace.step(3)[0]
    kinds = [
        scene(scenario, trace).data["badge"],
        scene(scenario, trace, recorded=trace).data["badge"],
        scene(
            scenario, trace, recorded=trace, differences=[Difference(3, event, None, "gone")]
        ).data["badge"],
        replay("varlen-ring").data["badge"],
        replay("varlen-ring", recorded=simulate(Scenario.load("varlen-ring"))).data["badge"],
    ]
    assert [badge["kind"] for badge in kinds] == [
        "predicted",
        "verified",
        "differs",
        "predicted",
        "refused",
    ]
    assert kinds[1]["text"] == "predicted = recorded on 4 real ranks"
    assert kinds[2] == {"kind": "differs", "text": "gone", "step": 3, "ranks": [0]}
    assert kinds[4]["text"] == "refused on 4 real ranks, as predicted"


# -- the file ----------------------------------------------------------------------------------


def test_page_runs_its_own_script_and_style_alone() -> None:
    page = html(replay("varlen-ring"))
    policy = re.search(r'Content-Security-Policy" content="([^"]+)"', page)
    assert policy and policy.group(1).startswith("default-src 'none';")
    for tag, text in re.findall(r"<(style|script)>(.*?)</\1>", page, re.S):
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"{tag}-src 'sha256-{digest}'" in policy.group(1)
    assert "unsafe" not in policy.group(1)
    assert "http://" not in page.replace("http://www.w3.org/2000/svg", "")
    assert "https://" not in page


def test_scene_and_page_load_no_heavy_package() -> None:
    probe = (
        "import sys; import usp_viz.views.html as h, usp_viz.views.scene as s;"
        "from usp_viz import Scenario, simulate; c = Scenario.load('varlen-ring');"
        "h.html(s.scene(c, simulate(c)));"
        "sys.exit(str({'torch', 'gradio', 'plotly'} & set(sys.modules)) if "
        "{'torch', 'gradio', 'plotly'} & set(sys.modules) else 0)"
    )
    ended = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
