"""The same runs under torchrun: on this machine, and on two hosts."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.gloo

HERE = Path(__file__).parent
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
WORKER = ["-m", "usp_viz.runtime.worker"]
PROBE = [str(HERE / "torchrun_probe.py")]
ENVIRONMENT = os.environ | {
    "PYTHONPATH": str(HERE.parents[1]),
    "OMP_NUM_THREADS": "1",
    "COLUMNS": "200",
}


ADDRESSES = ("10.213.77.1", "10.213.77.2")


def start(command, **environment):
    return subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=ENVIRONMENT | environment,
        start_new_session=True,
    )


def finish(process):
    try:
        out, err = process.communicate(timeout=150)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        raise
    return process.returncode, out, err


def on_this_machine(*arguments, ranks=4, **environment):
    command = [*TORCHRUN, "--standalone", f"--nproc-per-node={ranks}", *arguments]
    return finish(start(command, **environment))


def probe(name, payload=None, timeout_s=60.0):
    code, out, err = on_this_machine(*PROBE, name, json.dumps(payload), str(timeout_s))
    assert out, err
    return code, json.loads(out)


def test_a_scenario_is_verified():
    code, out, err = on_this_machine(*WORKER, "dense-2x2", "--json")
    result = json.loads(out)  # one object and nothing else
    assert result["outcome"] == "verified", err
    assert (code, result["world"], result["accuracy"]["wrong_rows"]) == (0, 4, 0)
    assert result["trace"]["matches_prediction"]


def test_every_rank_answers():
    code, ranks = probe("add_ranks")
    assert code == 0
    assert [(rank["status"], rank["value"]) for rank in ranks] == [("ok", 6.0)] * 4


def test_a_raise_on_one_rank_ends_the_others():
    code, ranks = probe("raise_on_one", 2)
    assert code != 0
    assert [rank["status"] for rank in ranks] == ["hung", "hung", "raised", "hung"]
    assert ranks[2]["failure"] == ["KeyError", "'rank 2 only'"]


def test_the_same_raise_on_every_rank_is_seen_as_such():
    _, ranks = probe("raise_everywhere", True)
    assert [rank["failure"] for rank in ranks] == [
        ["NotImplementedError", "Not on any rank yet."]
    ] * 4


def test_a_hang_ends_at_the_timeout_with_who_was_where():
    _, ranks = probe("pause_on_one", 1, timeout_s=2.0)
    assert [rank["status"] for rank in ranks] == ["hung"] * 4
    assert [[message["at"] for message in rank["messages"]] for rank in ranks] == [
        ["start", "reduced"]
    ] * 4


def test_a_rank_that_dies_is_missed():
    code, ranks = probe("end_process", "exit")
    assert code != 0
    assert ranks[1]["status"] == "died"
    assert {ranks[rank]["status"] for rank in (0, 2, 3)} <= {"raised", "hung"}


def test_a_world_that_does_not_fit_the_scenario():
    code, out, err = on_this_machine(*WORKER, "dense-2x2", "--json", ranks=2)
    assert code != 0
    assert json.loads(out)["outcome"] == "invalid"
    assert "torchrun has started 2 ranks" in err


def test_without_torchrun_it_says_so():
    code, out, err = finish(start([sys.executable, *WORKER, "dense-2x2"]))
    assert (code, out) == (2, "")
    assert "start this module with torchrun" in err


@pytest.fixture
def two_hosts():
    """For each of two hosts: how to run a command there, its address, its network interface.

    Network namespaces with a cable between them; where we may not make those, loopback twice.
    """
    names = [f"usp-viz-{os.getpid()}-{n}" for n in range(2)]
    links = [f"uv{os.getpid()}{end}" for end in "ab"]

    def ip(*arguments):
        subprocess.run(["ip", *arguments], check=True, capture_output=True)

    try:
        for name in names:
            ip("netns", "add", name)
        ip("link", "add", links[0], "type", "veth", "peer", "name", links[1])
        for name, link, address in zip(names, links, ADDRESSES, strict=True):
            ip("link", "set", link, "netns", name)
            ip("-n", name, "address", "add", f"{address}/24", "dev", link)
            ip("-n", name, "link", "set", link, "up")
            ip("-n", name, "link", "set", "lo", "up")
        yield [
            (["ip", "netns", "exec", name], address, link)
            for name, link, address in zip(names, links, ADDRESSES, strict=True)
        ]
    except (OSError, subprocess.CalledProcessError):
        yield [([], "127.0.0.1", "lo")] * 2
    finally:
        if shutil.which("ip"):
            for name in names:
                subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)


def test_two_hosts(two_hosts):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    processes = [
        start(
            [
                *prefix,
                *TORCHRUN,
                *("--nnodes=2", "--nproc-per-node=2", f"--node-rank={node}"),
                *(f"--master-addr={two_hosts[0][1]}", f"--master-port={port}"),
                *WORKER,
                "dense-2x2" if node == 0 else "a-file-that-only-the-first-host-has",
                "--json",
            ],
            GLOO_SOCKET_IFNAME=link,
        )
        for node, (prefix, _, link) in enumerate(two_hosts)
    ]
    (code, out, err), (other_code, other_out, other_err) = map(finish, processes)
    assert (code, other_code) == (0, 0), err + other_err
    assert json.loads(out)["outcome"] == "verified"
    assert other_out == ""
