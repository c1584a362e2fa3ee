"""Chromium by playwright, and a server of the page for it to visit."""

from __future__ import annotations

import contextlib
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from usp_viz.errors import MissingRequirement

if TYPE_CHECKING:
    from playwright.sync_api import Browser

NAMES = ("chromium", "chromium-browser", "google-chrome")
ARGUMENTS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)


@dataclass(frozen=True, slots=True)
class Served:
    """A server that answers.

    Attributes:
        pid: Its process.
        url: Where it answers.
    """

    pid: int
    url: str

    def maps(self, library: str) -> int:
        """How many files of this name the server's process has mapped (Linux)."""
        lines = Path(f"/proc/{self.pid}/maps").read_text().splitlines()
        return len({line.split()[-1] for line in lines if library in line})


def program() -> str:
    """Chromium's path.

    Raises:
        MissingRequirement: There is none on the path.
    """
    found = next(filter(None, map(shutil.which, NAMES)), None)
    if found is None:
        raise MissingRequirement(
            f"Chromium is not on the path ({', '.join(NAMES)})",
            "On Debian: sudo apt-get install chromium",
        )
    return found


@contextlib.contextmanager
def browsing() -> Iterator[Browser]:
    """A browser without a window.

    Raises:
        MissingRequirement: Neither playwright nor Chromium can be had.
    """
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        raise MissingRequirement(
            "The package playwright is not installed", "pip install 'playwright>=1.50'"
        ) from None
    path = program()
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=[*ARGUMENTS])
        try:
            yield browser
        finally:
            browser.close()


@contextlib.contextmanager
def serving() -> Iterator[Served]:
    """``usp-viz ui`` in a process of its own, on a free port; it and its ranks end with the block.

    Raises:
        RuntimeError: It ended before it served.
    """
    command = [sys.executable, "-m", "usp_viz", "ui", "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout
            line = server.stdout.readline()
            url = re.search(r"http://\S+", line)
            if url is None:
                raise RuntimeError(f"usp-viz ui does not serve: {line.strip() or 'it ended'}")
            yield Served(server.pid, url[0])
        finally:
            server.send_signal(signal.SIGTERM)
