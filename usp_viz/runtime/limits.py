"""What one run may take, and what a rank process may find in its environment."""

from __future__ import annotations

import os
from dataclasses import dataclass

from usp_viz.errors import InvalidScenario

MAX_THREADS_PER_RANK = 8  # more gains nothing on the block sizes a picture can show


@dataclass(frozen=True, slots=True)
class Limits:
    """Caps on one run.

    Attributes:
        max_ranks: World size P, and how many rank processes a pool keeps in all.
        max_tokens: Sequence length S times batch B.
        max_seconds: `run.timeout_s`.
        max_pairs: (query, key) pairs times heads: what the float64 reference has to work through.
        max_elements: Elements of Q, K and V together.
    """

    max_ranks: int
    max_tokens: int
    max_seconds: int
    max_pairs: int
    max_elements: int


def limits() -> Limits:
    """The caps in force: the defaults, or ``USP_VIZ_MAX_RANKS``, ``…_TOKENS`` and so on.

    Raises:
        InvalidScenario: One of these variables is not a positive whole number.
    """
    return Limits(
        max_ranks=_cap("USP_VIZ_MAX_RANKS", 16),
        max_tokens=_cap("USP_VIZ_MAX_TOKENS", 65_536),
        max_seconds=_cap("USP_VIZ_MAX_SECONDS", 600),
        max_pairs=_cap("USP_VIZ_MAX_PAIRS", 10_000_000_000),
        max_elements=_cap("USP_VIZ_MAX_ELEMENTS", 200_000_000),
    )


def _cap(name: str, default: int) -> int:
    text = os.environ.get(name, "").strip()
    if not text:
        return default
    if not (text.isascii() and text.isdecimal() and len(text) <= 12 and int(text) > 0):
        raise InvalidScenario(name, text, "a whole number >= 1, or unset", [default])
    return int(text)


def threads_per_rank(ranks: int) -> int:
    """Torch threads for each of `ranks` processes that share this machine's cores."""
    return min(MAX_THREADS_PER_RANK, max(1, len(os.sched_getaffinity(0)) // ranks))


def zygote_environment() -> dict[str, str]:
    """The environment of a local pool: loopback only, no threads before the fork."""
    return os.environ | {
        "GLOO_SOCKET_IFNAME": "lo",
        "NCCL_SOCKET_IFNAME": "lo",
        "OPENBLAS_NUM_THREADS": "1",
    }
