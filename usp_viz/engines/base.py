"""What an engine is: capabilities and versions for the caller, one function for the ranks."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from usp_viz.ledger import Piece
from usp_viz.scenario import Scenario
from usp_viz.trace import Event

if TYPE_CHECKING:
    from usp_viz.runtime.context import RankContext


@dataclass(frozen=True, slots=True)
class RankResult:
    """What one rank brings back.

    Attributes:
        out: [B, L, H, D] for the rows of its Q, float32 or float64; None when only timing.
        events: The recorded trace of this rank.
        pieces: (step, piece) of every local attention call.
        arrived: Bytes that really arrived in each collective of the real pass: (step, src, bytes).
        lanes: (step, what, start, stop) in seconds of the rank's monotonic clock.
        attention_ms: Wall time of the real pass.
        cpu_ms: CPU time of the real pass, all threads.
        peak_bytes: The most tensor bytes held at once in the real pass, where that was asked for.
        backend: The kernel that ran.
        device: ``cpu`` or ``cuda``: where it ran.
        versions: Of what ran, e.g. torch.
    """

    out: NDArray[Any] | None
    events: tuple[Event, ...] = ()
    pieces: tuple[tuple[int, Piece], ...] = ()
    arrived: tuple[tuple[int, int, int], ...] = ()
    lanes: tuple[tuple[int, str, float, float], ...] = ()
    attention_ms: float = 0.0
    cpu_ms: float = 0.0
    peak_bytes: int | None = None
    backend: str = ""
    device: str = "cpu"
    versions: dict[str, str] = field(default_factory=dict[str, str])


class Engine(Protocol):
    """How the runtime sees an engine; a module of `usp_viz.engines` that has these names.

    Attributes:
        NAME: As in the scenario's ``engine`` key.
        ENTRY: ``module:function`` that each rank calls with (context, payload).
    """

    NAME: str
    ENTRY: str

    def missing(self, scenario: Scenario) -> tuple[str, str] | None:
        """(what is missing on this machine, the line that installs it), or None."""
        ...

    def run_rank(self, context: RankContext, payload: dict[str, Any]) -> RankResult:
        """Run ``payload["scenario"]``, a normalised scenario, on this rank.

        With ``payload["memory"]``, count tensor bytes, too: every operation then takes longer.
        """
        ...


def as_float(out: Any) -> NDArray[Any]:
    """A rank's output tensor as float32, or float64, on the host."""
    import torch

    wide = torch.float64 if out.dtype == torch.float64 else torch.float32
    return np.ascontiguousarray(out.detach().to("cpu", wide).numpy())
