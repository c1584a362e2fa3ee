"""The policies `sglang` and `unguarded` on a rank: raise what the release raises, or compute."""

from __future__ import annotations

import builtins
import time
from typing import TYPE_CHECKING, Any

from usp_viz import rules
from usp_viz.calls import Call
from usp_viz.engines.base import RankResult, as_float
from usp_viz.errors import NotExpressible
from usp_viz.scenario import ITEMSIZE, Scenario
from usp_viz.trace import Event

if TYPE_CHECKING:
    from usp_viz.runtime.context import RankContext


def run_rank(context: RankContext, scenario: Scenario) -> RankResult:
    """Record the communication on ids, then run it on the real tensors.

    Raises:
        Exception: What the release raises on this rank, class and message word for word.
    """
    import torch

    from usp_viz.attention import inputs
    from usp_viz.attention.comm import Comm
    from usp_viz.attention.ids import IdAttention, IdRecorder, K, Q, V, names
    from usp_viz.attention.local import KernelAttention
    from usp_viz.attention.program import Program
    from usp_viz.attention.sglang import NarrowAttention, sglang_attention
    from usp_viz.attention.timing import TimeRecorder
    from usp_viz.layout import ids

    tensors, rank = scenario.tensors, context.rank
    call = Call(scenario, scenario.release, scenario.policy == "unguarded")
    program = Program.of(call, rank)
    own_q, own_k = program.own_queries, program.own_keys
    recorder = IdRecorder(rank, tensors.head_dim * ITEMSIZE[tensors.dtype], context.emit)
    q = names(Q, tensors.batch, own_q, tensors.heads, context.device)
    k = names(K, tensors.batch, own_k, scenario.kv_heads, context.device)
    v = names(V, tensors.batch, own_k, scenario.kv_heads, context.device)
    recorder.held(0, "shard", "place", q, k, v)
    end = rules.ending(scenario, policy=scenario.policy)
    if end is not None:
        _raise(end, recorder, rank)
        return RankResult(out=None, events=tuple(recorder.events), backend="sdpa")

    ulysses_group, ring_group = _groups(context, program)
    comm = Comm(program.mesh, rank, ulysses_group, ring_group, recorder)
    out = sglang_attention(q, k, v, program, comm, IdAttention(recorder), real=False)
    recorder.held(program.output_step + program.swaps, "output", "output", out)

    timer = TimeRecorder(context.emit)
    comm = Comm(program.mesh, rank, ulysses_group, ring_group, timer)
    dtype = getattr(torch, tensors.dtype)
    q, k, v = (
        torch.tensor(data, device=context.device, dtype=dtype)
        for data in (
            inputs.make(scenario, "q", ids(own_q)),
            inputs.make(scenario, "k", ids(own_k)),
            inputs.make(scenario, "v", ids(own_k)),
        )
    )
    local = NarrowAttention(timer) if program.how.narrow else KernelAttention(timer)
    with torch.inference_mode():
        wall, cpu = time.perf_counter(), time.process_time()
        out = sglang_attention(q, k, v, program, comm, local, real=True)
        if context.device.type == "cuda":
            torch.cuda.synchronize(context.device)
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    return RankResult(
        out=as_float(out),
        events=tuple(recorder.events),
        pieces=tuple(recorder.pieces),
        arrived=tuple(timer.arrived),
        lanes=tuple(timer.lanes),
        attention_ms=wall * 1e3,
        cpu_ms=cpu * 1e3,
        backend="sdpa",
        versions={"torch": str(torch.__version__)},
    )


def _groups(context: RankContext, program: Any) -> tuple[Any, Any]:
    """(Ulysses group, ring group) of this rank, None where nobody is in it but itself."""
    if program.alone or program.call.world == 1:
        return None, None
    if program.how.exchange == "world":
        return context.groups([tuple(range(program.call.world))])[0], None
    groups = context.groups(program.mesh.groups())
    ring, ulysses = program.mesh.at(context.rank)
    return groups[ring], groups[program.mesh.ring + ulysses]


def _raise(end: rules.Refusal | rules.Crash, recorder: Any, rank: int) -> None:
    """Raise what the release raises on this rank, if it does."""
    message = end.messages[rank]
    if message is None:
        return
    stage = "guard" if isinstance(end, rules.Refusal) else "crash"
    recorder.add(Event(1, stage, "raise", rank, rank, "error", (), (0, 0), 0))
    cls = NotExpressible if end.cls == "NotExpressible" else getattr(builtins, end.cls)
    raise cls(message)
