"""Caps from the environment, and how ranks share the cores."""

from __future__ import annotations

import os
from dataclasses import asdict

import pytest

from usp_viz.errors import InvalidScenario
from usp_viz.runtime.limits import limits, threads_per_rank, zygote_environment

NAMES = [f"USP_VIZ_{name.upper()}" for name in asdict(limits())]


def test_every_cap_has_a_variable_of_its_name(monkeypatch):
    for number, name in enumerate(NAMES):
        monkeypatch.setenv(name, f" {100 + number} ")
    assert list(asdict(limits()).values()) == [100 + n for n in range(len(NAMES))]


def test_unset_and_empty_mean_the_defaults(monkeypatch):
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
    defaults = limits()
    assert defaults.max_ranks == 16
    for name in NAMES:
        monkeypatch.setenv(name, "")
    assert limits() == defaults


@pytest.mark.parametrize("text", ["0", "-1", "1.5", "1e3", "many", "0x10", "١٦", "9" * 5000])
def test_a_cap_that_is_no_positive_whole_number(monkeypatch, text):
    monkeypatch.setenv("USP_VIZ_MAX_RANKS", text)
    with pytest.raises(InvalidScenario, match="USP_VIZ_MAX_RANKS") as caught:
        limits()
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize(
    ("cores", "ranks", "threads"),
    [(2, 1, 2), (2, 4, 1), (16, 4, 4), (16, 3, 5), (96, 1, 8), (1, 16, 1)],
)
def test_ranks_share_the_cores_they_may_use(monkeypatch, cores, ranks, threads):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(cores)))
    assert threads_per_rank(ranks) == threads


def test_ranks_of_a_local_pool_meet_on_loopback(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth0")
    monkeypatch.setenv("SOME_SETTING", "kept")
    environment = zygote_environment()
    assert environment["GLOO_SOCKET_IFNAME"] == environment["NCCL_SOCKET_IFNAME"] == "lo"
    assert environment["SOME_SETTING"] == "kept"
