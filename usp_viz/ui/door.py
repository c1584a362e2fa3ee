"""What is let through to gradio: reading, and calls of the endpoints with small plain bodies.

Gradio brings routes that this page has no use for: uploads, which fill the disk; links that keep a
session's state in files; a proxy. And an argument that looks like gradio's own file object is
fetched if it names a URL, and written to the cache, before any endpoint sees it. None of this gets
past here.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

MAX_BODY = 4_000_000
"""Bytes: a scenario is at most a megabyte of text, which JSON may escape."""
MAX_DEPTH = 64
_READING = ("GET", "HEAD", "OPTIONS")
_CALLS = re.compile(
    r"/gradio_api/(queue/join|(call|run|api)/[\w/]+|component_server|cancel|reset)/?"
)
_RUN = re.compile(r"/gradio_api/(call|run|api)/run/?")
_UNUSED = re.compile(r"/gradio_api/(deep_link|proxy=)")


class Door:
    """ASGI middleware that refuses everything else."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let a request through, or answer it here."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        reading = scope["method"] in _READING
        path = scope["path"][max(0, scope["path"].find("/gradio_api/")) :]  # behind any prefix
        if _UNUSED.match(path) or not (reading or _CALLS.fullmatch(path)):
            await _refuse(send, 403, "not part of this page")
            return
        if not reading:
            body = await _body(receive)
            if body is None:
                await _refuse(send, 413, f"a request has at most {MAX_BODY:,} bytes")
                return
            if problem := _problem(body):
                await _refuse(send, 400, problem)
                return
            receive = _replayed(_completed(path, body), receive)
        await self._app(scope, receive, send)


async def _body(receive: Receive) -> bytes | None:
    """The whole body; None as soon as it is too long."""
    body = bytearray()
    while True:
        message = await receive()
        body += message.get("body", b"")
        if len(body) > MAX_BODY:
            return None
        if not message.get("more_body", False):
            return bytes(body)


def _completed(path: str, body: bytes) -> bytes:
    """A call of ``run`` with its optional policy: over plain HTTP gradio knows no defaults."""
    if not _RUN.fullmatch(path):
        return body
    sent = json.loads(body)
    data = sent.get("data") if isinstance(sent, dict) else None
    if isinstance(data, list) and len(data) == 1:
        return json.dumps(sent | {"data": [*data, None]}).encode()
    return body


def _replayed(body: bytes, receive: Receive) -> Receive:
    """A `receive` that gives `body` first."""
    pending: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def again() -> Message:
        return pending.pop() if pending else await receive()

    return again


def _problem(body: bytes) -> str | None:
    """Why gradio should not see this body."""
    try:
        level = [json.loads(body)]
    except RecursionError:
        return "nested too deeply"
    except ValueError:
        return "not JSON"
    for _ in range(MAX_DEPTH):
        if any(isinstance(item, dict) and {"path", "meta"} <= item.keys() for item in level):
            return "no endpoint takes files"
        level = [child for item in level for child in _children(item)]
        if not level:
            return None
    return "nested too deeply"


def _children(item: Any) -> Any:
    return item.values() if isinstance(item, dict) else item if isinstance(item, list) else ()


async def _refuse(send: Send, status: int, detail: str) -> None:
    body = json.dumps({"detail": detail}).encode()
    headers = [(b"content-type", b"application/json"), (b"connection", b"close")]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
