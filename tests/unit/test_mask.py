"""Who may see whom: the contract's sentences, one element at a time, in plain Python."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.oracle import Oracle
from tests.strategies import scenarios
from usp_viz.layout import Layout, Order, ids, spans_of
from usp_viz.mask import BlockKind, Visibility
from usp_viz.scenario import Scenario

# -- by definition -------------------------------------------------------------------------------


def see(**parts: Any) -> list[str]:
    """The matrix of batch row 0 as lines of # and ·."""
    visibility = Visibility.of(Scenario.parse(parts))
    every = np.arange(visibility.order.size)
    return ["".join("#" if x else "." for x in row) for row in visibility.allowed(every, every, 0)]


def test_pictures_drawn_by_hand() -> None:
    four = {"total": 4}
    assert see(tokens=four) == ["####"] * 4
    assert see(tokens=four, attention={"causal": True}) == ["#...", "##..", "###.", "####"]
    window = {"mask": {"window": {"left": 1, "right": 0}}}
    assert see(tokens=four, attention=window) == ["#...", "##..", ".##.", "..##"]
    window = {"mask": {"window": {"left": None, "right": 1}}}
    assert see(tokens=four, attention=window) == ["##..", "###.", "####", "####"]
    prefix = {"mask": {"prefix_lm": {"prefix": 2}}}
    assert see(tokens=four, attention=prefix) == ["##..", "##..", "###.", "####"]
    padding = {"mask": {"key": {"valid": [3], "holes": [[1, 2]]}}}
    assert see(tokens=four, attention=padding) == ["#.#."] * 4
    assert see(tokens=four, attention={"mask": {"tail_pad": {"start": 1}}}) == ["#..."] * 4
    assert see(tokens=four, attention={"mask": {"gap_pad": {"start": 1, "end": 3}}}) == ["#..#"] * 4
    assert see(tokens={"total": 4, "documents": [1, 0, 3]}) == ["#...", ".###", ".###", ".###"]


def test_replicated_rows_are_for_everyone_but_the_future() -> None:
    tokens = {
        "total": 3,
        "documents": [1, 2],
        "replicated": {"kv_prefix": 1, "prefix": 1, "suffix": 1},
    }
    # Order: kv_prefix, prefix, three S rows, suffix.
    expected = ["######", "######", "###..#", "##.###", "##.###", "######"]
    assert see(tokens=tokens) == expected
    causal = ["#.....", "##....", "###...", "##.#..", "##.##.", "######"]
    assert see(tokens=tokens, attention={"causal": True}) == causal
    masked = {"mask": [{"window": {"left": 0, "right": 0}}, {"key": {"valid": [2]}}]}
    assert see(tokens=tokens, attention=masked) == [
        "####.#",
        "####.#",
        "###..#",
        "##.#.#",
        "##...#",
        "####.#",
    ]


def test_masks_in_a_list_are_anded() -> None:
    masks = [{"window": {"left": 1, "right": 2}}, {"window": {"left": 2, "right": 1}}]
    masks.append({"key": {"valid": [4]}})
    assert see(tokens={"total": 5}, attention={"mask": masks}) == [
        "##...",
        "###..",
        ".###.",
        "..##.",
        "...#.",
    ]


SMALL = scenarios(max_ranks=6, max_rows=14)


@settings(max_examples=80, deadline=None)
@given(SMALL)
def test_every_element_is_as_the_contract_says(s: Scenario) -> None:
    oracle, visibility = Oracle(s), Visibility.of(s)
    every = np.arange(oracle.size)
    for b in range(s.tensors.batch):
        assert visibility.allowed(every, every, b).tolist() == oracle.matrix(b)
        valid = [oracle.valid(b, i) for i in range(oracle.size)]
        assert visibility.is_valid(every, b).tolist() == valid


@settings(max_examples=60, deadline=None)
@given(SMALL, st.data())
def test_any_part_of_the_matrix_can_be_asked_for(s: Scenario, data: Any) -> None:
    visibility = Visibility.of(s)
    some = st.lists(st.integers(0, visibility.order.size - 1), max_size=6)
    q, k = (np.array(data.draw(some), np.int64) for _ in range(2))
    every = np.arange(visibility.order.size)
    whole = visibility.allowed(every, every, 0)
    assert np.array_equal(visibility.allowed(q, k, 0), whole[np.ix_(q, k)])


@settings(max_examples=80, deadline=None)
@given(SMALL)
def test_unmasked_means_that_everybody_sees_everybody(s: Scenario) -> None:
    oracle, unmasked = Oracle(s), Visibility.of(s).unmasked
    if unmasked:
        assert all(all(map(all, oracle.matrix(b))) for b in range(s.tensors.batch))
    if not (s.attention.causal or s.attention.mask or s.tokens.documents):
        assert unmasked


# -- by interval and by block --------------------------------------------------------------------


@settings(max_examples=80, deadline=None)
@given(scenarios(max_ranks=6, max_rows=14, dense=False))
def test_one_interval_says_what_a_query_sees(s: Scenario) -> None:
    oracle, visibility = Oracle(s), Visibility.of(s)
    every = np.arange(oracle.size)
    lo, hi = (x.tolist() for x in visibility.interval(every))
    until = visibility.replicated_until(every).tolist()
    for b in range(s.tensors.batch):
        for i, row in enumerate(oracle.matrix(b)):
            said = [
                oracle.valid(b, j) and lo[i] <= j < hi[i]
                if oracle.row(j) is not None
                else j < until[i]
                for j in range(oracle.size)
            ]
            assert said == row


@settings(max_examples=80, deadline=None)
@given(SMALL)
def test_blocks_count_what_is_left_of_them(s: Scenario) -> None:
    oracle, visibility, layout = Oracle(s), Visibility.of(s), Layout.of(s)
    matrices = [oracle.matrix(b) for b in range(s.tensors.batch)]
    places = range(s.mesh.ring)
    shards = [layout.gathered(r) for r in places] + [layout.queries(0), layout.keys(0)]
    for queries in shards:
        for keys in [*shards, layout.order.replicated_keys, (range(layout.order.size),)]:
            block = visibility.block(queries, keys)
            met = [
                (b, i, j)
                for b, matrix in enumerate(matrices)
                for i in ids(queries).tolist()
                for j in ids(keys).tolist()
                if oracle.valid(b, i) and matrix[i][j]
            ]
            assert block.pairs == len(met)
            assert block.queries == spans_of(sorted({i for _, i, _ in met}))
            assert block.keys == spans_of(sorted({j for _, _, j in met}))
            assert block.kind == kind(s, ids(queries).tolist(), ids(keys).tolist(), met)


def kind(s: Scenario, queries: list[int], keys: list[int], met: list[Any]) -> BlockKind:
    if not met:
        return BlockKind.EMPTY
    everything = {(b, i, j) for b in range(s.tensors.batch) for i in queries for j in keys}
    if set(met) == everything:
        return BlockKind.FULL
    if s.attention.causal and set(met) == {(b, i, j) for b, i, j in everything if j <= i}:
        return BlockKind.CAUSAL
    return BlockKind.PARTIAL


def test_kinds_of_blocks_under_a_causal_mask() -> None:
    visibility = Visibility(Order(0, 0, 8, 0), batch=1, causal=True)
    first, second = (range(0, 4),), (range(4, 8),)
    assert visibility.block(first, first).kind == BlockKind.CAUSAL
    assert visibility.block(first, second).kind == BlockKind.EMPTY
    assert visibility.block(second, first).kind == BlockKind.FULL
    assert visibility.block(first, (range(2, 4),)).kind == BlockKind.CAUSAL
    windowed = Visibility(Order(0, 0, 8, 0), batch=1, causal=True, left=1)
    assert windowed.block(second, first).kind == BlockKind.PARTIAL
    assert windowed.block(second, first).pairs == 1


def test_a_striped_causal_block_is_neither_full_nor_empty() -> None:
    s = Scenario.parse(
        {
            "mesh": {"ring": 2},
            "tokens": {"total": 8, "layout": "striped"},
            "attention": {"causal": True},
        }
    )
    visibility, layout = Visibility.of(s), Layout.of(s)
    even, odd = layout.gathered(0), layout.gathered(1)
    # Rows 0 2 4 6 and 1 3 5 7: of even's queries to odd's keys 0+1+2+3, back 1+2+3+4.
    assert [visibility.block(even, odd).pairs, visibility.block(odd, even).pairs] == [6, 10]


# -- dense masks ---------------------------------------------------------------------------------


@pytest.mark.parametrize("density", [0.0, 0.03, 0.5, 0.97, 1.0])
def test_density_is_kept_in_rows_columns_and_diagonals(density: float) -> None:
    mask = {"dense": {"density": density, "seed": 11}}
    s = Scenario.parse({"tokens": {"total": 400}, "attention": {"mask": mask}})
    every = np.arange(400)
    matrix = Visibility.of(s).allowed(every, every, 0)
    sigma = (density * (1 - density)) ** 0.5
    assert abs(matrix.mean() - density) <= 5 * sigma / 400
    for lines in (matrix.mean(0), matrix.mean(1), [matrix.trace() / 400]):
        assert np.abs(np.array(lines) - density).max() <= 5 * sigma / 20
    neighbours = (matrix[:, 1:] & matrix[:, :-1]).mean()
    assert abs(neighbours - density**2) <= 5 * density * (1 - density**2) / 400 + 1e-9


def test_seeds_give_unrelated_dense_masks_and_the_same_seed_the_same() -> None:
    def matrix(seed: int) -> Any:
        mask = {"dense": {"density": 0.5, "seed": seed}}
        s = Scenario.parse({"tokens": {"total": 200}, "attention": {"mask": mask}})
        every = np.arange(200)
        return Visibility.of(s).allowed(every, every, 0)

    assert np.array_equal(matrix(1), matrix(1))
    for a, b in ((0, 1), (1, 2), (0, 2**32), (7, 2**63 - 1)):
        assert abs((matrix(a) == matrix(b)).mean() - 0.5) < 0.02
    assert not np.array_equal(matrix(1), matrix(1).T)


def test_a_million_rows_are_summarised_without_an_s_by_s_matrix() -> None:
    s = Scenario.parse(
        {
            "mesh": {"ulysses": 32, "ring": 32},
            "tokens": {"total": 2**20, "documents": [2**19, 2**19]},
            "attention": {"causal": True, "mask": {"window": {"left": 4096}}},
        }
    )
    visibility, layout = Visibility.of(s), Layout.of(s)
    row = 2**20 // 32
    first = visibility.block(layout.gathered(0), layout.gathered(0))
    assert first.pairs == sum(min(i, 4096) + 1 for i in range(row))
    border = visibility.block(layout.gathered(16), layout.gathered(15))
    assert (border.kind, border.pairs) == (BlockKind.EMPTY, 0)
