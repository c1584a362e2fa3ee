"""Runs on real rank processes: what comes back, whatever the ranks do."""

from __future__ import annotations

import os
import select
import signal
import sys
import threading
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from usp_viz.errors import InvalidScenario, MissingRequirement
from usp_viz.runtime.pool import Job, RankPool

pytestmark = pytest.mark.gloo

HERE = str(Path(__file__).parent)


@pytest.fixture(scope="module", autouse=True)
def _probes_are_importable():
    sys.path.insert(0, HERE)
    yield
    sys.path.remove(HERE)


@pytest.fixture(scope="module")
def shared_pool(_probes_are_importable):
    with RankPool(preload=["pool_probes"]) as pool:
        yield pool


@pytest.fixture
def pool(shared_pool):
    """The pool of this module; every test must leave it able to run."""
    yield shared_pool
    assert values(go(shared_pool, "add_ranks")) == [6.0] * 4


@pytest.fixture
def fresh_pool():
    with RankPool(preload=["pool_probes"]) as pool:
        yield pool


def go(pool, probe, payload=None, *, world=4, timeout_s=60.0, **options):
    job = Job(f"pool_probes:{probe}", payload)
    return pool.run(job, world=world, timeout_s=timeout_s, **options)


def values(report):
    assert report.ok, report
    return [rank.value for rank in report.ranks]


def statuses(report):
    return [rank.status for rank in report.ranks]


def pids(report):
    return [rank.pid for rank in report.ranks]


def ended(pid):
    """Wait until process `pid` has ended; it may remain as a zombie."""
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([fd], [], [], 30)[0])
    finally:
        os.close(fd)


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def test_every_rank_gets_the_payload_and_answers(pool):
    payload = {"list": [1, 2.5, None], "array": np.arange(3)}
    report = go(pool, "who", payload)
    for number, (rank, value) in enumerate(zip(report.ranks, values(report), strict=True)):
        assert rank.rank == value["rank"] == number
        assert rank.pid == value["pid"] != os.getpid()
        assert value["payload"]["list"] == [1, 2.5, None]
        assert value["payload"]["array"].tolist() == [0, 1, 2]
        assert value["world"] == 4
        assert value["device"] == "cpu"
        assert value["threads"] == max(1, min(8, len(os.sched_getaffinity(0)) // 4))
        assert value["zygote_threads"] == 1  # a fork copies one thread
    assert len(set(pids(report))) == 4


def test_the_second_run_is_warm(fresh_pool):
    cold, warm = (go(fresh_pool, "nothing", world=2) for _ in range(2))
    assert cold.cold_start_ms > 0
    assert warm.cold_start_ms is None
    assert pids(cold) == pids(warm)


def test_worlds_of_several_sizes_stay_warm_up_to_the_cap(fresh_pool, monkeypatch):
    monkeypatch.setenv("USP_VIZ_MAX_RANKS", "5")
    two, three = (go(fresh_pool, "nothing", world=world) for world in (2, 3))
    assert pids(go(fresh_pool, "nothing", world=2)) == pids(two)
    one = go(fresh_pool, "nothing", world=1)  # 3 is the least recently used now
    assert one.cold_start_ms is not None
    assert [alive(pid) for pid in pids(two) + pids(three)] == [True] * 2 + [False] * 3
    assert pids(go(fresh_pool, "nothing", world=2)) == pids(two)
    assert values(go(fresh_pool, "add_ranks", world=3)) == [3.0] * 3


def test_groups_hold_their_ranks_and_are_made_once(pool):
    wanted = [(0, 1), (2, 3), (0, 2), (1, 3), (0, 1, 2, 3), (2,)]
    sums, ids = zip(*values(go(pool, "groups", wanted)), strict=True)
    assert list(map(list, sums)) == [
        [1.0, None, 2.0, None, 6.0, None],
        [1.0, None, None, 4.0, 6.0, None],
        [None, 5.0, 2.0, None, 6.0, 2.0],
        [None, 5.0, None, 4.0, 6.0, None],
    ]
    assert all(len(set(filter(None, mine))) == sum(map(bool, mine)) for mine in ids)
    again, same_ids = zip(*values(go(pool, "groups", wanted[::-1])), strict=True)
    assert [mine[::-1] for mine in same_ids] == list(ids)
    assert [mine[::-1] for mine in again] == list(sums)


def test_a_group_out_of_order_is_refused(pool):
    report = go(pool, "groups", [(1, 0)])
    assert [rank.failure.name for rank in report.ranks] == ["ValueError"] * 4


def test_the_same_raise_on_every_rank_keeps_the_world_if_nobody_communicated(pool):
    before = pids(go(pool, "nothing"))
    report = go(pool, "raise_everywhere", False)
    for rank in report.ranks:
        assert rank.status == "raised"
        assert rank.failure.name == "NotImplementedError"
        assert rank.failure.bases[:2] == ("NotImplementedError", "RuntimeError")
        assert rank.failure.message == "Not on any rank yet."
        assert rank.failure.source.startswith("pool_probes.py:")
        assert "raise_everywhere" in rank.failure.traceback
    assert pids(go(pool, "nothing")) == before
    go(pool, "raise_everywhere", True)
    assert not set(pids(go(pool, "nothing"))) & set(before)


def test_a_message_in_flight_never_reaches_the_next_run(pool):
    report = go(pool, "one_returns_without_the_others")
    assert statuses(report) == ["ok", "raised", "raised", "raised"]
    assert not set(pids(go(pool, "nothing"))) & set(pids(report))


def test_groups_that_not_all_ranks_have_made_are_forgotten(pool):
    report = go(pool, "raise_between_groups")
    assert not report.ok
    sums = [sums for sums, _ in values(go(pool, "groups", [(0,), (0, 1), (2, 3)]))]
    assert sums == [[0.0, 1.0, None], [None, 1.0, None], [None, None, 5.0], [None, None, 5.0]]


def test_a_raise_on_one_rank_leaves_the_others_hung(pool):
    report = go(pool, "raise_on_one", 2)
    assert statuses(report) == ["hung", "hung", "raised", "hung"]
    assert report.first_failure.rank == 2
    assert report.ranks[2].failure.message == "'rank 2 only'"
    assert not any(map(alive, pids(report)))


def test_a_rank_killed_in_a_collective(pool):
    reduced = Counter()

    def kill_one(rank, message):
        reduced[message["at"]] += 1
        if reduced["reduced"] == 4:
            os.kill(victim[0], signal.SIGKILL)
        if rank == 1:
            victim[:] = [message["pid"]]

    victim = []
    report = go(pool, "pause_on_one", 1, on_message=kill_one)
    assert report.ranks[1].status == "died"
    assert report.ranks[1].exit == -signal.SIGKILL
    assert report.first_failure.rank == 1
    assert {report.ranks[rank].status for rank in (0, 2, 3)} <= {"raised", "hung"}
    assert [rank.last_message["at"] for rank in report.ranks] == ["reduced"] * 4
    assert not any(map(alive, pids(report)))


def test_a_hang_ends_at_the_timeout_with_who_was_where(pool):
    report = go(pool, "pause_on_one", 3, timeout_s=1.0)
    assert statuses(report) == ["hung"] * 4
    assert report.first_failure is None
    assert [[message["at"] for message in rank.messages] for rank in report.ranks] == [
        ["start", "reduced"]
    ] * 4
    assert 1000 <= report.wall_ms <= 3000
    assert not any(map(alive, pids(report)))


def test_mismatched_collectives_end(pool):
    report = go(pool, "mismatched", timeout_s=5.0)
    assert not report.ok
    assert [rank.messages for rank in report.ranks] == [("start",)] * 4


@pytest.mark.parametrize(
    ("how", "code"),
    [("exit", 7), ("abort", -signal.SIGABRT), ("segfault", -signal.SIGSEGV)],
)
def test_a_process_that_ends_itself(pool, how, code):
    report = go(pool, "end_process", how)
    assert report.ranks[1].status == "died"
    assert report.ranks[1].exit == code
    assert report.ranks[1].last_message == "last words"


def test_sys_exit_ends_the_job_not_the_rank(pool):
    before = pids(go(pool, "nothing"))
    report = go(pool, "leave")
    assert {(rank.status, rank.failure.name) for rank in report.ranks} == {("raised", "SystemExit")}
    assert pids(go(pool, "nothing")) == before


def test_an_exception_that_can_be_neither_pickled_nor_printed(pool):
    report = go(pool, "raise_unprintable")
    for rank in report.ranks:
        assert rank.failure.name == "Unprintable"
        assert "ZeroDivisionError" in rank.failure.message


@pytest.mark.parametrize("what", ["function", "tensor", "dtype"])
def test_a_value_that_cannot_leave_its_rank(pool, what):
    report = go(pool, "answer_with", what)
    assert statuses(report) == ["raised"] * 4
    if what != "function":
        assert all("numpy" in rank.failure.message for rank in report.ranks)


def test_a_message_that_cannot_leave_its_rank(pool):
    report = go(pool, "emit_tensor")
    assert statuses(report) == ["raised"] * 4
    assert all("torch" in rank.failure.message for rank in report.ranks)


def test_messages_of_several_threads_do_not_mix(pool):
    count = 2000
    for rank in go(pool, "emit_from_threads", count).ranks:
        for letter in "ab":
            assert [n for name, n in rank.messages if name == letter] == list(range(count))


def test_large_messages_arrive_while_the_ranks_run(pool):
    size = 20_000_000
    heard = []
    report = go(pool, "emit_large", size, on_message=lambda *message: heard.append(message))
    assert Counter(rank for rank, _ in heard) == dict.fromkeys(range(4), 3)
    for rank in report.ranks:
        assert [message.shape for message in rank.messages] == [(size,)] * 3
        for number, message in enumerate(rank.messages):
            assert (message == 10 * rank.rank + number).all()


def test_large_outputs(pool):
    count = 12_500_000  # 100 MB
    for rank, value in enumerate(values(go(pool, "large_output", count, world=2))):
        assert value["rank"] == rank
        assert np.array_equal(value["values"], np.arange(count) + rank)
        value["values"][0] = -1.0  # ours to change


def test_threads_take_turns(pool):
    heard = []
    threads = [
        threading.Thread(
            target=go,
            args=(pool, "bracket", name),
            kwargs={"on_message": lambda rank, message: heard.append(message)},
        )
        for name in "abcd"
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(heard) == 32
    for first in range(0, 32, 8):
        run = heard[first : first + 8]
        assert Counter(run) == {(run[0][0], "begin"): 4, (run[0][0], "end"): 4}


def test_cancel_ends_the_run_at_hand_only(pool):
    pool.cancel()  # nothing to cancel
    assert go(pool, "nothing").ok

    def cancel_when_all_have_reduced(rank, message):
        reduced.append(message["at"])
        if reduced.count("reduced") == 4:
            thread = threading.Thread(target=pool.cancel)
            thread.start()
            thread.join()

    reduced = []
    report = go(pool, "pause_on_one", 0, on_message=cancel_when_all_have_reduced)
    assert statuses(report) == ["cancelled"] * 4
    assert not any(map(alive, pids(report)))


def test_cancel_wakes_a_run_that_hears_nothing(pool):
    def cancel_soon(rank, message):
        reduced.append(message["at"])
        if reduced.count("reduced") == 4:
            timer.start()

    reduced = []
    timer = threading.Timer(0.2, pool.cancel)  # by then the run waits for its ranks again
    report = go(pool, "pause_on_one", 0, on_message=cancel_soon)
    timer.join()
    assert statuses(report) == ["cancelled"] * 4


def test_a_callback_that_raises_abandons_the_run(pool):
    class Enough(Exception):
        pass

    def refuse(rank, message):
        seen.append(message["pid"])
        raise Enough

    seen = []
    with pytest.raises(Enough):
        go(pool, "pause_on_one", 0, on_message=refuse)
    assert not any(map(alive, seen))


def test_the_death_of_the_fork_server_is_survived(pool):
    (zygote,) = {value["zygote"] for value in values(go(pool, "who"))}
    reduced = []

    def kill_zygote(rank, message):
        reduced.append(message["at"])
        if reduced.count("reduced") == 4:
            os.kill(zygote, signal.SIGKILL)

    report = go(pool, "pause_on_one", 0, on_message=kill_zygote)
    assert statuses(report) == ["died"] * 4
    assert all(map(ended, pids(report)))
    (next_zygote,) = {value["zygote"] for value in values(go(pool, "who"))}
    os.kill(next_zygote, signal.SIGTERM)
    assert ended(next_zygote)


def test_a_rank_that_dies_between_runs_is_replaced(pool):
    first = go(pool, "nothing")
    os.kill(first.ranks[2].pid, signal.SIGKILL)
    assert ended(first.ranks[2].pid)
    second = go(pool, "add_ranks")
    assert values(second) == [6.0] * 4
    assert second.cold_start_ms is not None
    assert not any(map(alive, pids(first)))


@pytest.mark.parametrize(
    "entry",
    [
        "os:getpid",
        "usp_viz:x",
        "usp_vizards.x:y",
        "pool_probes.sub:x",
        "pool_probes",
        "usp_viz.a:b:c",
        "usp_viz..a:b",
        "usp_viz.a:",
        "usp_viz.a:b\n",
        "",
    ],
)
def test_entries_that_ranks_may_not_call(entry):
    pool = RankPool(preload=["pool_probes"])
    with pytest.raises(ValueError, match="job entry"):
        pool.run(Job(entry), world=1, timeout_s=1)


def test_an_entry_that_does_not_exist(pool):
    report = pool.run(Job("usp_viz.runtime.report:nowhere"), world=4, timeout_s=60)
    assert [rank.failure.name for rank in report.ranks] == ["AttributeError"] * 4


@pytest.mark.parametrize("world", [0, 4])
def test_the_cap_on_ranks(fresh_pool, monkeypatch, world):
    monkeypatch.setenv("USP_VIZ_MAX_RANKS", "3")
    with pytest.raises(InvalidScenario, match="USP_VIZ_MAX_RANKS"):
        go(fresh_pool, "nothing", world=world)
    assert go(fresh_pool, "nothing", world=3).ok


def test_a_missing_module_is_named():
    with RankPool(preload=["no_such_module_here"]) as pool:
        for _ in range(2):
            with pytest.raises(MissingRequirement, match="pip install no_such_module_here"):
                pool.run(Job("usp_viz.runtime.report:x"), world=2, timeout_s=5)


def test_a_module_that_fails_to_import_says_why(tmp_path, monkeypatch):
    (tmp_path / "broken_preload.py").write_text("1 / 0\n")
    monkeypatch.syspath_prepend(tmp_path)
    with (
        RankPool(preload=["broken_preload"]) as pool,
        pytest.raises(RuntimeError, match=r"broken_preload(.|\n)*ZeroDivisionError"),
    ):
        pool.run(Job("usp_viz.runtime.report:x"), world=2, timeout_s=5)


def test_cuda_without_a_gpu(fresh_pool, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(MissingRequirement, match=r"run\.device"):
        go(fresh_pool, "nothing", world=2, device="cuda")
    assert {value["device"] for value in values(go(fresh_pool, "who", device="auto"))} == {"cpu"}


def test_a_pool_that_is_dropped_ends_its_processes():
    pool = RankPool(preload=["pool_probes"])
    report = go(pool, "who", world=2)
    del pool
    assert all(map(ended, [*pids(report), report.ranks[0].value["zygote"]]))
