"""However a program that uses a pool ends, nothing of the pool is left; and it keeps to itself."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.gloo

HERE = Path(__file__).parent
LOOPBACK = ("0100007F", "00000000000000000000000001000000")
LISTEN = "0A"


class Program:
    """pool_user.py in a session of its own, with a temporary folder of its own."""

    def __init__(self, ending: str, folder: Path) -> None:
        self.folder = folder
        self.process = subprocess.Popen(
            [sys.executable, "-X", "dev", str(HERE / "pool_user.py"), ending],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,  # a buffer would swallow lines that `communicate` then misses
            start_new_session=True,
            env=os.environ | {"PYTHONPATH": str(HERE.parents[1]), "TMPDIR": str(folder)},
        )

    def hear(self) -> dict:
        """The next line it says."""
        line = self.process.stdout.readline()
        assert line, self.process.stderr.read().decode()
        return json.loads(line)

    def end(self) -> tuple[str, str]:
        """Wait until it has ended; the rest of stdout, and stderr."""
        out, err = self.process.communicate(timeout=120)
        return out.decode(), err.decode()


@pytest.fixture
def program(tmp_path):
    programs = []

    def start(ending):
        programs.append(Program(ending, tmp_path))
        return programs[-1]

    yield start
    for each in programs:
        each.process.kill()
        each.process.communicate()


def ended(pid):
    """Wait until process `pid` has ended; it may remain as a zombie where nobody reaps."""
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([fd], [], [], 30)[0])
    finally:
        os.close(fd)


def open_files(pid):
    """Paths of what the process has open or mapped."""
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        yield os.readlink(fd)
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
        yield line.split(maxsplit=5)[-1]


def listening(pid):
    """Addresses, as the kernel writes them, on which the process listens."""
    sockets = {os.readlink(fd) for fd in Path(f"/proc/{pid}/fd").iterdir()}
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == LISTEN and f"socket:[{fields[9]}]" in sockets:
                yield fields[1].partition(":")[0]


def sockets_by_name(pid):
    """Unix sockets that others could find."""
    mine = {os.readlink(fd) for fd in Path(f"/proc/{pid}/fd").iterdir()}
    for line in Path(f"/proc/{pid}/net/unix").read_text().splitlines()[1:]:
        fields = line.split()
        if f"socket:[{fields[6]}]" in mine and len(fields) > 7:
            yield fields[7]


def kill(program, pids):
    program.process.kill()


def kill_fork_server(program, pids):
    os.kill(pids[0], signal.SIGKILL)
    program.process.stdin.close()


def terminate(program, pids):
    program.process.terminate()


def press_ctrl_c(program, pids):
    os.killpg(program.process.pid, signal.SIGINT)


def hang_up(program, pids):
    os.killpg(program.process.pid, signal.SIGHUP)


def close_stdin(program, pids):
    program.process.stdin.close()


@pytest.mark.parametrize(
    ("ending", "how"),
    [
        ("return", None),
        ("raise", None),
        ("os._exit", None),
        ("idle", close_stdin),
        ("idle", kill),
        ("idle", kill_fork_server),
        ("idle", press_ctrl_c),
        ("busy", kill),
        ("busy", terminate),
        ("busy", press_ctrl_c),
        ("busy", hang_up),
        ("while it imports", kill),
        ("while it imports", close_stdin),
        ("while it imports", press_ctrl_c),
    ],
)
def test_nothing_is_left(program, ending, how):
    user = program(ending)
    pids = user.hear()["pids"]
    if ending == "busy":
        assert user.hear()["waiting"]
    if how:
        how(user, pids)
        user.process.stdin = None  # closed, or of no more use
    user.end()
    assert all(map(ended, pids))
    assert list(user.folder.iterdir()) == []
    if ending in ("return", "raise"):  # then they are gone before the program is
        assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


def test_while_it_runs_it_has_no_files_and_listens_to_nobody_else(program):
    user = program("busy")
    pids = user.hear()["pids"]
    user.hear()
    files = {path for pid in pids for path in open_files(pid)}
    assert any(path.startswith("/memfd:usp-viz-store") for path in files)
    assert [p for p in files if p.startswith(("/tmp/", "/dev/shm/", str(user.folder)))] == []
    addresses = [address for pid in pids for address in listening(pid)]
    assert len(addresses) >= 4  # every rank: gloo
    assert set(addresses) <= set(LOOPBACK)
    assert [name for pid in pids for name in sockets_by_name(pid)] == []


def test_ranks_print_to_stderr(program):
    user = program("print")
    user.hear()
    out, err = user.end()
    assert json.loads(out) == {"torch": False}  # the caller has not imported torch
    said = ["C says hello"] * 4 + [f"python says {rank}" for rank in range(4)]
    assert all(err.count(line) == said.count(line) for line in said)  # lines may run together


def test_a_forked_process_has_ranks_of_its_own(program):
    user = program("fork")
    _, *first = user.hear()["pids"]
    in_child = user.hear()["child"]
    in_parent = user.hear()["parent"]
    user.end()
    assert not set(in_child) & set(first)
    assert in_parent == first
    assert all(map(ended, in_child))


def test_a_dev_mode_interpreter_finds_nothing_to_complain_about(program):
    user = program("return")
    user.hear()
    _, err = user.end()
    assert user.process.returncode == 0
    assert "Warning" not in err
