"""What the ranks do for a bench: the attention phase alone, and the floor it is held against."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from usp_viz.attention.comm import Comm
from usp_viz.attention.local import KernelAttention
from usp_viz.attention.meter import PeakMeter
from usp_viz.attention.schedule import Schedule
from usp_viz.attention.timing import TimeRecorder
from usp_viz.attention.usp import usp_attention
from usp_viz.layout import count
from usp_viz.scenario import Scenario

if TYPE_CHECKING:
    from usp_viz.runtime.context import RankContext


def floor(context: RankContext, payload: dict[str, Any]) -> tuple[float, float]:
    """(wall s, CPU s) of torch SDPA on the whole problem, in this one process."""
    scenario = Scenario.parse(payload["scenario"])
    tensors, total = scenario.tensors, scenario.tokens.total
    torch.set_num_threads(payload["threads"])
    shape = (tensors.batch, tensors.heads, total, tensors.head_dim)
    q, k, v = (torch.randn(shape, dtype=getattr(torch, tensors.dtype)) for _ in range(3))
    wall, cpu = time.perf_counter(), time.process_time()
    with torch.inference_mode():
        torch.nn.functional.scaled_dot_product_attention(q, k, v)
    return time.perf_counter() - wall, time.process_time() - cpu


def attention(context: RankContext, payload: dict[str, Any]) -> tuple[float, float, int]:
    """(wall s, CPU s, peak tensor bytes) of this rank's attention phase, inputs at hand.

    Peak bytes are counted only with ``payload["meter"]``, since counting costs time.
    """
    scenario = Scenario.parse(payload["scenario"])
    schedule = Schedule.of(scenario, context.rank)
    mesh, tensors = schedule.mesh, scenario.tensors
    groups = context.groups(mesh.groups())
    recorder = TimeRecorder(lambda message: None)
    ring_group = groups[mesh.ring + schedule.ulysses]
    comm = Comm(mesh, context.rank, groups[schedule.ring], ring_group, recorder)
    q, k, v = (
        torch.randn(
            (tensors.batch, count(rows), heads, tensors.head_dim),
            dtype=getattr(torch, tensors.dtype),
        )
        for rows, heads in (
            (schedule.own_queries, tensors.heads),
            (schedule.own_keys, scenario.kv_heads),
            (schedule.own_keys, scenario.kv_heads),
        )
    )
    assert schedule.hops  # worked out before the clock starts
    dist.barrier()
    wall, cpu = time.perf_counter(), time.process_time()
    with torch.inference_mode():
        if payload.get("meter"):
            with PeakMeter(q, k, v) as meter:
                usp_attention(q, k, v, schedule, comm, KernelAttention(recorder))
            return 0.0, 0.0, meter.peak
        usp_attention(q, k, v, schedule, comm, KernelAttention(recorder))
    cpu = time.process_time() - cpu
    dist.barrier()
    return time.perf_counter() - wall, cpu, 0
