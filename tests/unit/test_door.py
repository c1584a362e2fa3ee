"""What is let through to gradio."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from usp_viz.ui.door import MAX_BODY, Door

SCENARIO = {"data": [{"mesh": {"ring": 2}}]}


def ask(method: str, path: str, *chunks: bytes) -> tuple[int, Any]:
    """(status, what the app read or the answer said) of one request."""
    sent: list[dict[str, Any]] = []
    messages = [
        {"type": "http.request", "body": chunk, "more_body": n + 1 < len(chunks)}
        for n, chunk in enumerate(chunks)
    ] or [{"type": "http.request"}]

    async def receive() -> dict[str, Any]:
        return messages.pop(0)

    async def send(message: Any) -> None:
        sent.append(message)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        body, more = b"", True
        while more:
            message = await receive()
            body += message.get("body", b"")
            more = message.get("more_body", False)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b'{"read": %d}' % len(body)})

    asyncio.run(Door(app)({"type": "http", "method": method, "path": path}, receive, send))  # pyright: ignore[reportArgumentType]
    return sent[0]["status"], json.loads(sent[1]["body"])


@pytest.mark.parametrize(
    "path",
    [
        "/gradio_api/queue/join",
        "/gradio_api/queue/join/",
        "/gradio_api/call/simulate",
        "/gradio_api/call/v2/run",
        "/gradio_api/run/check",
        "/gradio_api/component_server",
        "/gradio_api/cancel",
        "/behind/a/proxy/gradio_api/queue/join",
    ],
)
def test_calls_pass_whole(path: str) -> None:
    body = json.dumps(SCENARIO).encode()
    assert ask("POST", path, body) == (200, {"read": len(body)})
    assert ask("POST", path, body[:5], body[5:9], body[9:]) == (200, {"read": len(body)})


@pytest.mark.parametrize("path", ["/", "/config", "/assets/x.js", "/gradio_api/queue/data"])
@pytest.mark.parametrize("method", ["GET", "HEAD"])
def test_reading_passes(method: str, path: str) -> None:
    assert ask(method, path)[0] == 200


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/gradio_api/upload"),
        ("POST", "/gradio_api/process_recording"),
        ("POST", "/gradio_api/stream/1"),
        ("POST", "/gradio_api/vibe-code"),
        ("POST", "/gradio_api/upload?/gradio_api/queue/join"),
        ("POST", "/login"),
        ("PUT", "/gradio_api/upload"),
        ("DELETE", "/"),
        ("GET", "/gradio_api/deep_link"),
        ("GET", "/gradio_api/proxy=http://127.0.0.1/"),
    ],
)
def test_the_rest_does_not(method: str, path: str) -> None:
    assert ask(method, path, b"{}")[0] == 403


@pytest.mark.parametrize(
    "found",
    [
        {"path": "/etc/passwd", "meta": {"_type": "gradio.FileData"}},
        {"path": "http://127.0.0.1:1/", "meta": {"_type": "gradio.FileData"}, "url": None},
        {"a": [{"path": "x", "meta": {}}]},
    ],
)
def test_file_objects_do_not(found: Any) -> None:
    """Gradio would fetch or copy what they name before any endpoint is asked."""
    assert ask("POST", "/gradio_api/call/run", json.dumps({"data": [found]}).encode())[0] == 400
    escaped = json.dumps({"data": [found]}).replace("path", "\\u0070ath").encode()
    assert ask("POST", "/gradio_api/call/run", escaped)[0] == 400


def test_long_bodies_do_not() -> None:
    text = json.dumps({"data": ["x" * MAX_BODY]}).encode()
    assert ask("POST", "/gradio_api/call/run", text)[0] == 413
    endless = [b" " * 100_000] * (MAX_BODY // 100_000 + 2)
    assert ask("POST", "/gradio_api/call/run", *endless)[0] == 413


def test_deep_bodies_do_not() -> None:
    for depth in (100, 100_000):
        body = b'{"a":' * depth + b"1" + b"}" * depth
        assert ask("POST", "/gradio_api/call/run", body)[0] == 400


def test_what_is_not_json_does_not() -> None:
    for body in (b"", b"mesh: {ring: 2}", b"\xff"):
        assert ask("POST", "/gradio_api/call/run", body)[0] == 400
