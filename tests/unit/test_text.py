"""Frames as text."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings

from tests.strategies import scenarios
from usp_viz.frames import replay
from usp_viz.plan import simulate
from usp_viz.scenario import Scenario
from usp_viz.views.text import (
    frames_text,
    heads_text,
    rows_text,
    shape_text,
    size_text,
    summary_text,
    text_of,
)


def scenario_of(ulysses: int = 1, ring: int = 1, **parts: Any) -> Scenario:
    return Scenario.parse({"mesh": {"ulysses": ulysses, "ring": ring}, **parts})


CAUSAL = scenario_of(
    2,
    2,
    tokens={"total": 16},
    tensors={"heads": 6, "kv_heads": 2},
    attention={"causal": True},
)


def test_a_hop_of_four_ranks() -> None:
    assert text_of(replay(simulate(CAUSAL)), 2, CAUSAL) == (
        """\
── step 2 of 6 · hop 0 ───────────────────────────────────────────────────────
Each rank attends to the keys it holds, while that KV already travels on for
hop 1.

                            Q              KV           KV arriving   partial O
  ring position 0  rank 0   [0, 8) h0-2    [0, 8) h0    [8, 16) h0    [0, 8) h0-2, 108 pairs
  ring position 0  rank 1   [0, 8) h3-5    [0, 8) h1    [8, 16) h1    [0, 8) h3-5, 108 pairs
  ring position 1  rank 2   [8, 16) h0-2   [8, 16) h0   [0, 8) h0     [8, 16) h0-2, 108 pairs
  ring position 1  rank 3   [8, 16) h3-5   [8, 16) h1   [0, 8) h1     [8, 16) h3-5, 108 pairs

moves
  rank 0 → 2   KV [0, 8) h0    2 KiB
  rank 1 → 3   KV [0, 8) h1    2 KiB
  rank 2 → 0   KV [8, 16) h0   2 KiB
  rank 3 → 1   KV [8, 16) h1   2 KiB

computes
  rank 0   rows [0, 8) × keys [0, 8), h0-2: 108 pairs
  rank 1   rows [0, 8) × keys [0, 8), h3-5: 108 pairs
  rank 2   rows [8, 16) × keys [8, 16), h0-2: 108 pairs
  rank 3   rows [8, 16) × keys [8, 16), h3-5: 108 pairs

pairs  ██████████░░░░░░░░░░  432 of 816 (53%)"""
    )


def test_a_summary() -> None:
    trace = simulate(CAUSAL)
    assert summary_text(trace, CAUSAL).splitlines()[1:] == [
        "16 rows · contiguous · B 1 · H 6 · G 2 · D 32 · float32 · causal",
        "",
        "step  0  shard              place (4 ranks)",
        "step  1  input all-to-all   all_to_all 10 KiB (4 ranks)",
        "step  2  hop 0              send 8 KiB (4 ranks), attend 432 pairs (4 ranks)",
        "step  3  hop 1              attend 384 pairs (2 ranks)",
        "step  4  hop 1              merge (2 ranks)",
        "step  5  output all-to-all  all_to_all 6 KiB (4 ranks)",
        "step  6  output             output (4 ranks)",
        "",
        "pairs  816",
        "sent   24 KiB; per rank 6 KiB",
        "calls  all_to_all_single, irecv, isend",
        f"hash   {trace.hash}",
    ]


def test_ranks_that_raise_are_marked() -> None:
    scenario = Scenario.load("varlen-ring").set({"policy": "sglang"})
    last = list(frames_text(simulate(scenario), scenario))[-1]
    assert last.count("RAISES") == scenario.mesh.ranks


@settings(max_examples=40, deadline=None)
@given(scenarios(policies=("extended", "sglang", "unguarded")))
def test_every_rank_and_every_move_has_a_line(scenario: Scenario) -> None:
    trace = simulate(scenario)
    heading, *frames = frames_text(trace, scenario)
    assert scenario.name in heading and len(frames) == trace.steps
    for frame, text in zip(replay(trace), frames, strict=True):
        lines = text.splitlines()
        assert frame.narration in " ".join(lines)
        assert not any(line != line.rstrip() for line in lines)
        for rank in range(trace.ranks):
            assert any(f"rank {rank}" in line for line in lines)
        links = {(event.src, event.dst) for event in frame.moves}
        if len(links) <= 24:
            for src, dst in links:
                assert any(line.startswith(f"  rank {src} → {dst} ") for line in lines)
    assert summary_text(trace, scenario).count("\nstep ") == trace.steps


def test_many_ranks_are_summed_up() -> None:
    scenario = scenario_of(
        8,
        32,
        tokens={"total": 8192, "layout": "striped"},
        attention={"causal": True},
    )
    for text in list(frames_text(simulate(scenario), scenario))[1:6]:
        assert len(text.splitlines()) < 25
    hop = text_of(replay(simulate(scenario)), 2, scenario)
    assert "256 transfers by 256 ranks, 64 KiB from each" in hop
    assert "KV arriving   256     256         1" in hop
    assert "256 of 256 ranks" in hop


@pytest.mark.parametrize(
    ("rows", "text"),
    [
        (((0, 12),), "[0, 12)"),
        (((0, 1), (2, 3), (4, 5)), "[0, 1) [2, 3) [4, 5)"),
        (tuple((n, n + 1) for n in range(0, 48, 4)), "0 4 8 … 44"),
        (((0, 1), (2, 3), (4, 5), (9, 10)), "[0, 1) [2, 3) [4, 5) +1"),
        (((0, 2), (4, 6), (8, 10), (12, 14)), "[0, 2) [4, 6) [8, 10) +1"),
        ((), ""),
    ],
)
def test_rows_for_people(rows: Any, text: str) -> None:
    assert rows_text(rows) == text


def test_heads_and_sizes_for_people() -> None:
    assert [heads_text(heads) for heads in ((0, 4), (5, 6))] == ["h0-3", "h5"]
    assert [size_text(n) for n in (0, 1023, 1024, 1536, 3 * 2**30, 5 * 2**40, 2**60)] == [
        "0 B",
        "1023 B",
        "1 KiB",
        "1.5 KiB",
        "3 GiB",
        "5 TiB",
        "1.049e+06 TiB",
    ]


def test_the_shape_names_what_is_special() -> None:
    scenario = scenario_of(
        tokens={"total": 4, "documents": [1, 3]},
        attention={"mask": [{"window": {"left": 1}}, {"tail_pad": {"start": 3}}]},
    )
    assert shape_text(scenario) == (
        "4 rows · contiguous · B 1 · H 8 · D 32 · float32 · 2 documents · window · tail_pad"
    )
