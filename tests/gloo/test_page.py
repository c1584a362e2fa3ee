"""The page as it is served: a real server, real ranks, a real client."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from gradio_client import Client
from jsonschema import Draft202012Validator

from usp_viz.loading import bundled
from usp_viz.schemas import schemas

ROOT = Path(__file__).resolve().parents[2]
UI = [sys.executable, "-m", "usp_viz", "ui", "--port", "0"]
LONG = {
    "name": "long",
    "mesh": {"ring": 2},
    "tensors": {"heads": 4, "head_dim": 64},
    "tokens": {"total": 16_384},
}
"""Takes many seconds: long enough to be interrupted at any moment of it."""

pytestmark = pytest.mark.gloo


@dataclass(frozen=True)
class Server:
    """A server that runs.

    Attributes:
        process: Its process.
        url: Where it answers.
        mapped: The files that it had mapped when it had served the page and run nothing.
    """

    process: subprocess.Popen[str]
    url: str
    mapped: str

    @property
    def port(self) -> int:
        return int(self.url.rstrip("/").rpartition(":")[2])

    @property
    def family(self) -> set[int]:
        """The server and everything below it."""
        return {self.process.pid, *descendants(self.process.pid)}

    def client(self) -> Client:
        return Client(self.url, verbose=False, analytics_enabled=False)


def until(true: Callable[[], Any], seconds: float = 60) -> Any:
    """Poll until it is true; returns what it was."""
    deadline = time.monotonic() + seconds
    while not (found := true()):
        assert time.monotonic() < deadline, "never came true"
        time.sleep(0.02)
    return found


@contextlib.contextmanager
def serving(command: list[str]) -> Iterator[Server]:
    """A server that says where it is, and is gone afterwards."""
    process = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout
        line = process.stdout.readline()
        found = re.search(r"http://\S+", line)
        assert found, line + (process.communicate(timeout=10)[1] if process.poll() else "")
        with urllib.request.urlopen(found[0], timeout=60) as page:
            assert b"USP Viz" in page.read()
        yield Server(process, found[0], libraries(process.pid))
    finally:
        process.kill()
        process.communicate()


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving(UI) as running:
        yield running


# -- /proc -------------------------------------------------------------------------------------


def descendants(pid: int) -> set[int]:
    parents: dict[int, int] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields = stat.read_text().rpartition(")")[2].split()
            parents[int(stat.parent.name)] = int(fields[1])
    found: set[int] = set()
    level = {pid}
    while level := {child for child, parent in parents.items() if parent in level} - found:
        found |= level
    return found


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"


def libraries(pid: int) -> str:
    return Path(f"/proc/{pid}/maps").read_text()


def listening(pids: set[int]) -> set[str]:
    """Addresses at which any of these processes listens, IPv4 and IPv6, as host:port."""
    inodes: set[str] = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            for fd in Path(f"/proc/{pid}/fd").iterdir():
                with contextlib.suppress(OSError):
                    inodes.add(os.readlink(fd))
    addresses: set[str] = set()
    for name, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in inodes:
                host, port = fields[1].split(":")
                words = [host[n : n + 8] for n in range(0, len(host), 8)]
                raw = b"".join(int(word, 16).to_bytes(4, sys.byteorder) for word in words)
                addresses.add(f"{socket.inet_ntop(family, raw)}:{int(port, 16)}")
    return addresses


# -- the endpoints -----------------------------------------------------------------------------


def command_line(*arguments: str) -> list[dict[str, Any]]:
    command = [sys.executable, "-m", "usp_viz", *arguments, "--json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.stdout, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def timeless(result: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in result.items() if key != "timing"}


def test_only_the_contracts_names_are_public(server: Server) -> None:
    info = server.client().view_api(return_format="dict")
    assert set(info["named_endpoints"]) == {"/run", "/check", "/simulate", "/scenarios", "/schema"}
    assert not info["unnamed_endpoints"]


def test_run_gives_what_the_command_line_gives(server: Server) -> None:
    """Word for word, but for the time it took; as an object, as text and by name."""
    expected = [timeless(r) for r in command_line("run", "varlen-ring", "--policy", "all")]
    assert [r["outcome"] for r in expected] == ["refused", "wrong", "verified"]
    client = server.client()
    results = client.predict("varlen-ring", "all", api_name="/run")
    assert [timeless(result) for result in results] == expected
    text = bundled()["varlen-ring"].read_text("utf-8")
    for sent in (text, results[0]["scenario"]):
        assert timeless(client.predict(sent, "unguarded", api_name="/run")) == expected[1]
    validator = Draft202012Validator(schemas()["result"])
    assert all(validator.is_valid(result) for result in results)


def test_the_files_own_policy_is_the_default(server: Server) -> None:
    client = server.client()
    results = [
        client.predict("causal-ring", *policy, api_name="/run") for policy in ((), ("sglang",))
    ]
    assert results[0]["policy"] == "sglang"
    assert timeless(results[0]) == timeless(results[1])


def test_predictions_give_what_the_command_line_gives(server: Server) -> None:
    client = server.client()
    names = ("varlen-ring", "zigzag-causal", "text-counted-twice")
    checks = [client.predict(name, api_name="/check") for name in names]
    assert checks == command_line("check", *names)
    assert [client.predict(names[1], api_name="/simulate")] == command_line("simulate", names[1])
    assert client.predict(api_name="/scenarios") == command_line("scenarios")[0]
    assert client.predict("trace", api_name="/schema") == schemas()["trace"]
    assert client.predict(api_name="/schema") == schemas()["scenario"]


def test_plain_http_needs_no_policy(server: Server) -> None:
    """As curl would call it: only a client of gradio's own fills in what has a default."""
    headers = {"Content-Type": "application/json"}
    body = json.dumps({"data": ["seven-tokens"]}).encode()
    call = urllib.request.Request(server.url + "gradio_api/call/run", body, headers)
    with urllib.request.urlopen(call, timeout=30) as answer:
        event = json.load(answer)["event_id"]
    with urllib.request.urlopen(server.url + f"gradio_api/call/run/{event}", timeout=120) as told:
        (data,) = [line for line in told.read().decode().splitlines() if line.startswith("data: [")]
    assert json.loads(data.removeprefix("data: "))[0]["outcome"] == "verified"


@pytest.mark.parametrize(
    "sent", ["/etc/passwd", {"engine": "os:system"}, {"mesh": {"ring": 10**9}}]
)
@pytest.mark.parametrize("endpoint", ["/run", "/check", "/simulate"])
def test_hostile_input_is_answered(server: Server, endpoint: str, sent: Any) -> None:
    answer = server.client().predict(sent, api_name=endpoint)
    assert answer["outcome"] == "invalid"


def test_gradio_fetches_and_stores_nothing(server: Server) -> None:
    """What looks like gradio's own file object is refused before gradio sees it."""
    with socket.create_server(("127.0.0.1", 0)) as trap:
        url = f"http://127.0.0.1:{trap.getsockname()[1]}/x"
        for path in (url, "/etc/passwd", str(ROOT / "README.md")):
            sent = {"data": [{"path": path, "url": url, "meta": {"_type": "gradio.FileData"}}]}
            assert post(server, "gradio_api/call/check", json.dumps(sent).encode()) == 400
        assert post(server, "gradio_api/upload", b"x") == 403
        trap.setblocking(False)
        with pytest.raises(BlockingIOError):
            trap.accept()
    for path in ("/etc/passwd", str(ROOT / "README.md"), "README.md"):
        assert get(server, f"gradio_api/file={path}") in (403, 404)


def post(server: Server, path: str, body: bytes) -> int:
    headers = {"Content-Type": "application/json"}
    return status(urllib.request.Request(server.url + path, body, headers))


def get(server: Server, path: str) -> int:
    return status(urllib.request.Request(server.url + path))


def status(request: urllib.request.Request) -> int:
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return answer.status
    except urllib.error.HTTPError as error:
        return error.code


# -- the process -------------------------------------------------------------------------------


def test_torch_stays_in_the_ranks(server: Server) -> None:
    assert server.client().predict("dense-2x2", "extended", api_name="/run")["world"] == 4
    assert "libtorch" not in server.mapped
    assert "libtorch" not in libraries(server.process.pid)
    assert any("libtorch" in libraries(pid) for pid in descendants(server.process.pid))


def test_nothing_listens_beyond_this_machine(server: Server) -> None:
    server.client().predict("dense-2x2", "extended", api_name="/run")
    addresses = listening(server.family)
    assert f"127.0.0.1:{server.port}" in addresses
    assert {address.rpartition(":")[0] for address in addresses} <= {"127.0.0.1", "::1"}


def test_runs_of_two_users_take_turns(server: Server) -> None:
    """Both are answered, one after the other, by the same ranks."""
    clients = [server.client(), server.client()]
    jobs = [client.submit("dense-2x2", "all", api_name="/run") for client in clients]
    answers = [job.result(timeout=120) for job in jobs]
    outcomes = [[result["outcome"] for result in answer] for answer in answers]
    assert outcomes[0] == outcomes[1]
    assert outcomes[0][2] == "verified"


@pytest.mark.parametrize(
    ("stop", "busy", "code"),
    [
        pytest.param(signal.SIGINT, True, 130, id="Ctrl-C in a run"),
        pytest.param(signal.SIGTERM, False, 0, id="SIGTERM, ranks warm"),
        pytest.param(signal.SIGKILL, True, -signal.SIGKILL, id="kill -9 in a run"),
    ],
)
def test_nothing_is_left_behind(stop: signal.Signals, busy: bool, code: int) -> None:
    with serving([sys.executable, "app.py", "--port", "0"]) as server:
        client = server.client()
        if busy:
            client.submit(LONG, api_name="/run")
        else:
            client.predict("dense-2x2", "extended", api_name="/run")
        until(lambda: len(descendants(server.process.pid)) > 2)
        family = server.family
        os.kill(server.process.pid, stop)
        assert server.process.wait(timeout=60) == code
        until(lambda: not any(map(alive, family)))


def test_a_port_that_is_taken(server: Server) -> None:
    command = [sys.executable, "-m", "usp_viz", "ui", "--port", str(server.port)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 4
    assert "--port 0" in done.stderr
    assert "Traceback" not in done.stderr
