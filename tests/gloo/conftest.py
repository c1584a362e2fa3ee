"""One warm pool of rank processes for all tests that only want to run scenarios."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from usp_viz.runtime.pool import RankPool


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    """Ranks that can also run `wrong_probes`: each of its jobs undoes what it changed."""
    with RankPool(preload=["tests.gloo.wrong_probes"]) as pool:
        yield pool
