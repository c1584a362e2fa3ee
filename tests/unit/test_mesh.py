"""Ranks, groups and heads, against tables written out by hand."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from usp_viz.mesh import Mesh, head_split, kv_heads_of, topology
from usp_viz.scenario import Scenario


def test_ulysses_inner_puts_a_ulysses_group_on_neighbours() -> None:
    mesh = Mesh(ulysses=2, ring=3)
    assert mesh.ranks == 6
    assert [mesh.ulysses_group(r) for r in range(3)] == [(0, 1), (2, 3), (4, 5)]
    assert [mesh.ring_group(u) for u in range(2)] == [(0, 2, 4), (1, 3, 5)]
    assert [mesh.at(rank) for rank in range(6)] == [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1)]
    assert [mesh.position(rank) for rank in range(6)] == [0, 1, 2, 3, 4, 5]


def test_ring_inner_puts_a_ring_on_neighbours() -> None:
    mesh = Mesh(ulysses=2, ring=3, order="ring-inner")
    assert [mesh.ulysses_group(r) for r in range(3)] == [(0, 3), (1, 4), (2, 5)]
    assert [mesh.ring_group(u) for u in range(2)] == [(0, 1, 2), (3, 4, 5)]
    assert [mesh.at(rank) for rank in range(6)] == [(0, 0), (1, 0), (2, 0), (0, 1), (1, 1), (2, 1)]
    # Sequence order walks a Ulysses group first, so neighbouring ranks hold distant rows.
    assert [mesh.position(rank) for rank in range(6)] == [0, 2, 4, 1, 3, 5]


MESHES = st.builds(
    Mesh, st.integers(1, 9), st.integers(1, 9), st.sampled_from(["ulysses-inner", "ring-inner"])
)


@settings(deadline=None)
@given(MESHES)
def test_ranks_places_and_positions_are_one_to_one(mesh: Mesh) -> None:
    ranks = range(mesh.ranks)
    assert {mesh.rank(*mesh.at(rank)) for rank in ranks} == set(ranks)
    assert sorted(mesh.position(rank) for rank in ranks) == list(ranks)
    for rank in ranks:
        ring, ulysses = mesh.at(rank)
        assert mesh.position(rank) == ring * mesh.ulysses + ulysses
        assert mesh.ulysses_group(ring)[ulysses] == rank
        assert mesh.ring_group(ulysses)[ring] == rank


@settings(deadline=None)
@given(MESHES)
def test_groups_cover_every_rank_once_an_axis_and_ascend(mesh: Mesh) -> None:
    """Ascending, because torch silently sorts what does not."""
    groups = mesh.groups()
    assert len(groups) == mesh.ring + mesh.ulysses
    assert all(list(group) == sorted(group) for group in groups)
    for part in (groups[: mesh.ring], groups[mesh.ring :]):
        assert sorted(rank for group in part for rank in group) == list(range(mesh.ranks))


def test_the_scenario_s_mesh() -> None:
    asked = {"ulysses": 2, "ring": 3, "order": "ring-inner"}
    assert Mesh.of(Scenario.parse({"mesh": asked})) == Mesh(2, 3, "ring-inner")


@pytest.mark.parametrize(
    ("heads", "parts", "expected"),
    [
        (8, 4, [[0, 1], [2, 3], [4, 5], [6, 7]]),
        (7, 3, [[0, 1, 2], [3, 4], [5, 6]]),
        (2, 4, [[0], [1], [], []]),
        (1, 1, [[0]]),
        (10, 4, [[0, 1, 2], [3, 4, 5], [6, 7], [8, 9]]),
    ],
)
def test_query_heads_are_split_evenly_larger_parts_first(
    heads: int, parts: int, expected: list[list[int]]
) -> None:
    assert [list(part) for part in head_split(heads, parts)] == expected


@pytest.mark.parametrize(
    ("query_heads", "group", "expected"),
    [
        (range(0, 2), 4, [0]),  # U > G: two ranks share a KV head
        (range(2, 4), 4, [0]),
        (range(4, 6), 4, [1]),
        (range(0, 3), 2, [0, 1]),  # G % U != 0: part of the second
        (range(3, 5), 2, [1, 2]),  # part of two
        (range(5, 7), 2, [2, 3]),
        (range(0, 8), 1, [0, 1, 2, 3, 4, 5, 6, 7]),
        (range(3, 3), 2, []),  # H < U: no query heads, no KV heads
    ],
)
def test_a_rank_gets_exactly_the_kv_heads_that_its_query_heads_read(
    query_heads: range, group: int, expected: list[int]
) -> None:
    assert list(kv_heads_of(query_heads, group)) == expected


@given(st.integers(1, 12), st.integers(1, 6), st.integers(1, 12))
def test_kv_heads_by_definition(kv_heads: int, group: int, parts: int) -> None:
    for heads in head_split(kv_heads * group, parts):
        assert list(kv_heads_of(heads, group)) == sorted({h // group for h in heads})


def test_topology_has_the_links_of_both_axes_and_the_bytes_on_them() -> None:
    graph = topology(Mesh(2, 3), sent=[(0, 1, 10), (0, 2, 5), (0, 2, 6), (0, 4, 7)])
    assert dict(graph.nodes(data=True))[3] == {"ring": 1, "ulysses": 1}
    links = {(a, b): (d["kind"], d["bytes"]) for a, b, d in graph.edges(data=True)}
    assert links == {
        (0, 1): ("ulysses", 10),
        (1, 0): ("ulysses", 0),
        (2, 3): ("ulysses", 0),
        (3, 2): ("ulysses", 0),
        (4, 5): ("ulysses", 0),
        (5, 4): ("ulysses", 0),
        (0, 2): ("ring", 11),
        (2, 4): ("ring", 0),
        (4, 0): ("ring", 0),
        (1, 3): ("ring", 0),
        (3, 5): ("ring", 0),
        (5, 1): ("ring", 0),
        (0, 4): ("ring", 7),  # a shift by two, over a hop that nobody needs
    }


def test_topology_of_one_rank_has_no_links() -> None:
    assert not topology(Mesh(1, 1)).edges
