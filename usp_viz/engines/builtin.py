"""Our own attention: the `extended` policy, and what an sglang release computes."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from usp_viz.engines.base import RankResult, as_float
from usp_viz.scenario import ITEMSIZE, Scenario

if TYPE_CHECKING:
    from torch import Tensor

    from usp_viz.runtime.context import RankContext

NAME = "builtin"
ENTRY = "usp_viz.engines.builtin:run_rank"


def missing(scenario: Scenario) -> tuple[str, str] | None:
    """What this machine lacks for the scenario's backend."""
    backend = scenario.attention.backend
    if backend == "flash":
        return (
            "backend: flash needs flash-attn and a CUDA GPU",
            "pip install 'usp-viz[gpu]', or use backend: auto",
        )
    if backend == "triton":
        return (
            "backend: triton needs triton and a CUDA GPU",
            "pip install 'usp-viz[gpu]', or use backend: auto",
        )
    return None


def run_rank(context: RankContext, payload: dict[str, Any]) -> RankResult:
    """Record the communication on ids, then run it on the real tensors.

    Payload: ``scenario``, a normalised scenario; ``repeat``, how often to time the real pass
    (default 1); ``record`` (default True): without it only the real pass runs and no output
    returns.
    """
    import torch

    from usp_viz.attention import inputs
    from usp_viz.attention.comm import Comm
    from usp_viz.attention.ids import K, OUT, Q, V, IdAttention, IdRecorder, names
    from usp_viz.attention.local import KernelAttention
    from usp_viz.attention.schedule import Schedule
    from usp_viz.attention.timing import TimeRecorder
    from usp_viz.attention.usp import usp_attention
    from usp_viz.layout import ids

    scenario = Scenario.parse(payload["scenario"])
    if scenario.policy != "extended":
        from usp_viz.engines import release

        return release.run_rank(context, scenario)
    schedule = Schedule.of(scenario, context.rank)
    mesh, tensors = schedule.mesh, scenario.tensors
    groups = context.groups(mesh.groups()) if mesh.ranks > 1 and not schedule.local else []
    ulysses_group = groups[schedule.ring] if groups else None
    ring_group = groups[mesh.ring + schedule.ulysses] if groups else None
    own_q, own_k = schedule.own_queries, schedule.own_keys

    recorder = IdRecorder(
        context.rank, tensors.head_dim * ITEMSIZE[tensors.dtype], context.emit
    )
    if payload.get("record", True):
        comm = Comm(mesh, context.rank, ulysses_group, ring_group, recorder)
        q = names(Q, tensors.batch, own_q, tensors.heads, context.device)
        k = names(K, tensors.batch, own_k, scenario.kv_heads, context.device)
        v = names(V, tensors.batch, own_k, scenario.kv_heads, context.device)
        recorder.held(0, "shard", "place", q, k, v)
        out = usp_attention(q, k, v, schedule, comm, IdAttention(recorder))
        last = schedule.output_step + (mesh.ulysses > 1 and not schedule.local)
        recorder.held(last, "output", "output", out)

    timer = TimeRecorder(context.emit)
    comm = Comm(mesh, context.rank, ulysses_group, ring_group, timer)
    dtype = getattr(torch, tensors.dtype)
    q, k, v = (
        torch.from_numpy(inputs.make(scenario, name, ids(rows))).to(context.device, dtype)
        for name, rows in (("q", own_q), ("k", own_k), ("v", own_k))
    )
    with torch.inference_mode():
        out, wall, cpu = _timed(
            lambda: usp_attention(q, k, v, schedule, comm, KernelAttention(timer)), context.device
        )
    return RankResult(
        out=as_float(out),
        events=tuple(recorder.events),
        pieces=tuple(recorder.pieces),
        arrived=tuple(timer.arrived),
        lanes=tuple(timer.lanes),
        attention_ms=wall,
        cpu_ms=cpu,
        backend="sdpa",
        versions={"torch": str(torch.__version__)},
    )


def _timed(call: Callable[[], Tensor], device: Any) -> tuple[Tensor, float, float]:
    """(result, wall ms, CPU ms of this process)."""
    import torch

    wall, cpu = time.perf_counter(), time.process_time()
    out = call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return out, (time.perf_counter() - wall) * 1e3, (time.process_time() - cpu) * 1e3
