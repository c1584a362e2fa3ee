"""Pieces of a masked block: every allowed pair in exactly one, and few of them."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.oracle import Oracle
from tests.strategies import scenarios
from usp_viz.attention import pieces as module
from usp_viz.attention.local import head_runs
from usp_viz.attention.pieces import BlockPiece, block_pieces
from usp_viz.layout import Layout, ids
from usp_viz.mask import Visibility
from usp_viz.mesh import head_split, kv_heads_of
from usp_viz.scenario import Scenario


def pairs_of(piece: BlockPiece) -> list[tuple[int, int, int]]:
    """(batch row, place of the query, place of the key) that a kernel computes for a piece."""
    lq = piece.queries.stop - piece.queries.start
    lk = piece.keys.stop - piece.keys.start
    assert lq > 0 and lk > 0 and piece.batch.stop > piece.batch.start
    assert not (piece.causal and piece.mask is not None)
    allowed = np.ones((lq, lk), bool) if piece.mask is None else piece.mask
    assert allowed.shape == (lq, lk) and allowed.dtype == bool and allowed.any()
    if piece.causal:
        allowed = np.tri(lq, lk, dtype=bool)
    return [
        (b, piece.queries.start + i, piece.keys.start + j)
        for b in range(piece.batch.start, piece.batch.stop)
        for i, j in np.argwhere(allowed).tolist()
    ]


def covers_each_allowed_pair_once(s: Scenario) -> None:
    oracle, visibility, layout = Oracle(s), Visibility.of(s), Layout.of(s)
    places = [layout.gathered(r) for r in range(s.mesh.ring)]
    everything = (range(layout.order.size),)
    for queries in [*places, layout.queries(0), everything]:
        for keys in [*places, layout.order.replicated_keys, everything]:
            q, k = ids(queries).tolist(), ids(keys).tolist()
            found = Counter(
                (b, q[i], k[j])
                for piece in block_pieces(visibility, queries, keys)
                for b, i, j in pairs_of(piece)
            )
            expected = {
                (b, i, j)
                for b in range(s.tensors.batch)
                for i in q
                for j in k
                if oracle.valid(b, i) and oracle.allowed(b, i, j)
            }
            assert set(found) == expected
            assert not found or max(found.values()) == 1


@pytest.mark.parametrize(("tile", "scattered"), [(1, 256), (3, 256), (256, 256), (3, 0)])
def test_each_allowed_pair_lies_in_exactly_one_piece(tile: int, scattered: int) -> None:
    @settings(max_examples=60, deadline=None)
    @given(scenarios(max_ranks=6, max_rows=24))
    def check(s: Scenario) -> None:
        covers_each_allowed_pair_once(s)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "TILE", tile)
        patch.setattr(module, "SCATTERED", scattered)
        check()


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("length", [1, 2, 3, 5])
@pytest.mark.parametrize("layout", ["contiguous", "striped", "zigzag"])
def test_documents_that_leave_gaps_between_the_rows(layout: str, length: int, causal: bool) -> None:
    """Striped rows of short documents: some queries find no key of theirs in a block."""
    documents = [*[length] * (40 // length), 40 % length]
    tokens = {"total": 40, "layout": layout, "documents": documents}
    parts = {"mesh": {"ring": 4}, "tokens": tokens, "attention": {"causal": causal}}
    covers_each_allowed_pair_once(Scenario.parse(parts))


S = 4096


@pytest.mark.parametrize(
    ("parts", "most"),
    [
        ({}, 1),
        ({"attention": {"causal": True}}, 1),
        ({"attention": {"mask": {"prefix_lm": {"prefix": 700}}}}, 3),
        ({"attention": {"mask": {"key": {"valid": [3000], "holes": [[10, 20]]}}}}, 4),
        (  # scattered padding: tiles, not a call for every two gaps
            {
                "attention": {
                    "mask": {
                        "key": {"valid": [S], "holes": [[2 * i, 2 * i + 1] for i in range(2000)]}
                    }
                }
            },
            4,
        ),
        ({"attention": {"mask": {"gap_pad": {"start": 10, "end": 20}}}}, 4),
        ({"tokens": {"documents": [1000, 1, 0, 1500, 1595]}}, 3),
        ({"tokens": {"documents": [64] * 64}, "attention": {"causal": True}}, 16),
        ({"tokens": {"documents": [1] * S}}, 4),  # a diagonal: tiles, not a call a row
        ({"attention": {"mask": {"window": {"left": 128, "right": 0}}}}, 6),
        ({"attention": {"mask": {"window": {"left": 128, "right": 128}}}}, 6),
        ({"attention": {"mask": {"dense": {}}}}, 1),
    ],
    ids=str,
)
def test_structure_keeps_the_number_of_kernel_calls_small(parts: Any, most: int) -> None:
    tokens = {"total": S, **parts.get("tokens", {})}
    s = Scenario.parse({"mesh": {"ring": 4}, **parts, "tokens": tokens})
    visibility, layout = Visibility.of(s), Layout.of(s)
    counts = [
        len(block_pieces(visibility, layout.gathered(a), layout.gathered(b)))
        for a in range(4)
        for b in range(4)
    ]
    assert max(counts) <= most


def test_causal_blocks_need_no_mask_in_any_layout() -> None:
    for layout_name, most in (("contiguous", 1), ("zigzag", 3), ("striped", 1)):
        s = Scenario.parse(
            {
                "mesh": {"ring": 4},
                "tokens": {"total": 64, "layout": layout_name},
                "attention": {"causal": True},
            }
        )
        visibility, layout = Visibility.of(s), Layout.of(s)
        for a in range(4):
            for b in range(4):
                found = block_pieces(visibility, layout.gathered(a), layout.gathered(b))
                assert len(found) <= most
                assert all(piece.mask is None for piece in found)


def test_work_follows_what_is_allowed() -> None:
    """Documents and windows cost what they hold, not S x S."""
    for parts, share in (
        ({"tokens": {"documents": [512] * 8}}, 1 / 8),
        ({"attention": {"mask": {"window": {"left": 63, "right": 0}}}}, 320 / 4096),
        ({"attention": {"mask": {"key": {"valid": [1024]}}}}, 1 / 16),
    ):
        tokens = {"total": S, **parts.get("tokens", {})}
        s = Scenario.parse({**parts, "tokens": tokens})
        rows = Layout.of(s).gathered(0)
        cells = sum(
            (p.queries.stop - p.queries.start) * (p.keys.stop - p.keys.start)
            for p in block_pieces(Visibility.of(s), rows, rows)
        )
        assert cells <= share * S * S


def test_a_batch_with_different_padding_shares_the_rows_that_are_alike() -> None:
    s = Scenario.parse(
        {
            "tensors": {"batch": 4},
            "tokens": {"total": 8},
            "attention": {"mask": {"key": {"valid": [8, 8, 5, 8]}}},
        }
    )
    rows = Layout.of(s).gathered(0)
    batches = [p.batch for p in block_pieces(Visibility.of(s), rows, rows)]
    assert batches == [slice(0, 2), slice(2, 3), slice(3, 4)]


# -- heads ---------------------------------------------------------------------------------------


@given(st.integers(1, 6), st.integers(1, 6), st.integers(1, 12))
def test_head_runs_let_each_head_read_its_own_kv_head(
    kv_heads: int, group: int, parts: int
) -> None:
    for heads in head_split(kv_heads * group, parts):
        local_kv = kv_heads_of(heads, group)
        seen: list[tuple[int, int]] = []
        runs = head_runs(heads, group)
        assert len(runs) <= 3
        for q_slice, kv_slice in runs:
            q, kv = heads[q_slice], local_kv[kv_slice]
            assert len(q) and len(q) % len(kv) == 0, "what a kernel asks for"
            seen += [(head, kv[n // (len(q) // len(kv))]) for n, head in enumerate(q)]
        assert seen == [(head, head // group) for head in heads]
