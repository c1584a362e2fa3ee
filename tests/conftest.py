"""What holds for every test."""

from __future__ import annotations

from hypothesis import settings

# An example takes as long as the machine lets it: only pytest's own timeout stands under a hang.
settings.register_profile("usp-viz", deadline=None)
settings.load_profile("usp-viz")
