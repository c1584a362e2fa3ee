"""The two passes of one rank: first ids, to record what really moves, then the real tensors.

Both run the same communication code, so that the i-th collective of one is the i-th of the other.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from usp_viz.attention import inputs
from usp_viz.attention.comm import Recorder
from usp_viz.attention.ids import IdAttention, IdRecorder, K, Q, V, names
from usp_viz.attention.local import KernelAttention
from usp_viz.attention.meter import PeakMeter
from usp_viz.attention.timing import TimeRecorder
from usp_viz.attention.usp import LocalAttention
from usp_viz.engines.base import RankResult, as_float
from usp_viz.layout import Rows, ids
from usp_viz.scenario import ITEMSIZE, Scenario

if TYPE_CHECKING:
    from usp_viz.runtime.context import RankContext

Attend = Callable[[Tensor, Tensor, Tensor, Recorder, LocalAttention], Tensor]
"""(q, k, v, recorder, local attention) -> this rank's output [B, L, H, D]."""


class Passes:
    """Runs an attention twice on the rows that one rank holds.

    Args:
        context: The rank.
        scenario: What runs.
        queries: Rows of its Q and output.
        keys: Rows of its K and V.
        memory: Whether to count tensor bytes in the real pass, which then takes longer.
    """

    def __init__(
        self,
        context: RankContext,
        scenario: Scenario,
        queries: Rows,
        keys: Rows,
        memory: bool = False,
    ) -> None:
        self._context, self._scenario = context, scenario
        self._memory = memory
        self._queries, self._keys = queries, keys
        tensors, device = scenario.tensors, context.device
        weight = tensors.head_dim * ITEMSIZE[tensors.dtype]
        self.recorder = IdRecorder(context.rank, weight, context.emit)
        self._names = (
            names(Q, tensors.batch, queries, tensors.heads, device),
            names(K, tensors.batch, keys, scenario.kv_heads, device),
            names(V, tensors.batch, keys, scenario.kv_heads, device),
        )
        self.recorder.held(0, "shard", "place", *self._names)

    def run(
        self,
        attend: Attend,
        last_step: int,
        local: Callable[[Recorder], LocalAttention] = KernelAttention,
    ) -> RankResult:
        """Both passes.

        Args:
            attend: The attention.
            last_step: Step number of the output.
            local: Makes the real local attention.
        """
        out = attend(*self._names, self.recorder, IdAttention(self.recorder))
        self.recorder.held(last_step, "output", "output", out)
        timer = TimeRecorder(self._context.emit)
        q, k, v = self._tensors()
        meter = PeakMeter(q, k, v) if self._memory else None
        with torch.inference_mode(), meter or nullcontext():
            wall, cpu = time.perf_counter(), time.process_time()
            out = attend(q, k, v, timer, local(timer))
            if self._context.device.type == "cuda":
                torch.cuda.synchronize(self._context.device)
            wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        return RankResult(
            out=as_float(out),
            events=tuple(self.recorder.events),
            pieces=tuple(self.recorder.pieces),
            arrived=tuple(timer.arrived),
            lanes=tuple(timer.lanes),
            attention_ms=wall * 1e3,
            cpu_ms=cpu * 1e3,
            peak_bytes=meter and meter.peak,
            backend="sdpa",
            device=self._context.device.type,
            versions={"torch": str(torch.__version__)},
        )

    def _tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        """The real Q, K and V of this rank."""
        dtype, device = getattr(torch, self._scenario.tensors.dtype), self._context.device
        held: dict[inputs.Name, Rows] = {"q": self._queries, "k": self._keys, "v": self._keys}
        q, k, v = (
            torch.tensor(inputs.make(self._scenario, name, ids(rows)), dtype=dtype, device=device)
            for name, rows in held.items()
        )
        return q, k, v
