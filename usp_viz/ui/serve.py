"""Serve the page: on this machine only unless asked, and leave nothing behind."""

from __future__ import annotations

import signal
import socket
import threading
from typing import Any

import gradio as gr
from starlette.middleware import Middleware

from usp_viz.errors import MissingRequirement
from usp_viz.runtime.pool import default_pool
from usp_viz.ui.door import Door
from usp_viz.ui.page import build

LAUNCH: dict[str, Any] = {
    "app_kwargs": {"middleware": [Middleware(Door)]},
    "enable_monitoring": False,
    "footer_links": ["api", "settings"],
    "inbrowser": False,
    "max_file_size": 1,
    "mcp_server": False,
    "num_workers": 0,
    "pwa": False,
    "quiet": True,
    "run_history": False,
    "share": False,
    "show_error": False,
    "ssr_mode": False,
}


def serve(port: int | None = None, host: str | None = None, page: gr.Blocks | None = None) -> None:
    """Serve until SIGTERM or Ctrl-C; then end the server and every rank.

    Args:
        port: 0 picks a free one; None leaves it to gradio (7860 or the next free one).
        host: None leaves it to gradio, whose default is 127.0.0.1.
        page: What to serve; by default a new page.

    Raises:
        MissingRequirement: The port is taken.
        KeyboardInterrupt: Ctrl-C, once everything has ended.
    """
    page = page or build()
    stop = threading.Event()
    before = signal.signal(signal.SIGTERM, lambda *_: stop.set())
    try:
        _launch(page, port, host)
        print(f"USP Viz: {page.local_url} (Ctrl-C ends it)", flush=True)
        stop.wait()
    finally:
        default_pool().close()
        page.close(verbose=False)
        signal.signal(signal.SIGTERM, before)


def _launch(page: gr.Blocks, port: int | None, host: str | None) -> None:
    if host and ":" in host:
        host = f"[{host.strip('[]')}]"
    try:
        number = _free_port(host) if port == 0 else port
        page.launch(server_port=number, server_name=host, prevent_thread_lock=True, **LAUNCH)
    except (OSError, OverflowError):
        raise MissingRequirement(
            f"Port {port} of {host or 'this machine'} cannot be served: the port is taken, or no "
            "port, or the host is another machine",
            "Use --port 0, which picks a free one, and --host only for an address of this machine.",
        ) from None


def _free_port(host: str | None) -> int:
    name = (host or "127.0.0.1").strip("[]")
    family, kind, _, _, address = socket.getaddrinfo(name, 0, type=socket.SOCK_STREAM)[0]
    with socket.socket(family, kind) as probe:
        probe.bind(address)
        return probe.getsockname()[1]
