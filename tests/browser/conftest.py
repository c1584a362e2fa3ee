"""Chromium for the tests of what runs in a browser."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page

from usp_viz.bench.chromium import browsing

OpenFile = Callable[..., Page]


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    """Gone when its module is: as long as it is there, no other test can use asyncio."""
    with browsing() as browser:
        yield browser


@pytest.fixture
def open_file(chromium: Browser, tmp_path: Path) -> Iterator[OpenFile]:
    """Open text as a page from disk; nothing may be asked of the network, nothing may complain."""
    pages: list[Page] = []
    asked: list[str] = []
    complaints: list[str] = []

    def opened(text: str, **context: object) -> Page:
        path = tmp_path / f"page{len(pages)}.html"
        path.write_text(text, "utf-8")
        page = chromium.new_context(**context).new_page()  # type: ignore[arg-type]
        pages.append(page)
        page.on("request", lambda request: asked.append(request.url))
        page.on("console", lambda message: complaints.append(message.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("dialog", lambda dialog: complaints.append(dialog.message))
        page.goto(path.as_uri())
        page.locator(".usp[data-step]").wait_for()
        return page

    yield opened
    for page in pages:
        page.context.close()
    assert not [url for url in asked if not url.startswith("file://")]
    assert len(asked) == len(pages), "a page asked for a file beside itself"
    assert not complaints
